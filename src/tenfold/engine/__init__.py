"""Requests in, tokens out: scheduling and the step loop."""
