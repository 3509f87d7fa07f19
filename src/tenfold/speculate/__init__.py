"""Drafting tokens ahead of the target: drafters, the choice among them, and training them."""
