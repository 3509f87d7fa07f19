"""KV pages, who owns them, and which prefixes they hold."""
