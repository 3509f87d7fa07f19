"""Anthropic's Messages API: a parser of its bodies and a shape of its answers."""
