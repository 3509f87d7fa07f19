"""A process with one engine."""
