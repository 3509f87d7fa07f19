"""Recorded requests: reading them, having the target answer them, and dividing them for training."""
