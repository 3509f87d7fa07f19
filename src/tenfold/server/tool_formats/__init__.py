"""How models write tool calls: one file a format, one reader for what they share."""
