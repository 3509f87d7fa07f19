"""Model families: each file turns a configuration into a Graph."""
