"""What computes a graph."""
