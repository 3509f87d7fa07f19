"""Tenfold: serve one model fast, with the same answers."""
