"""What the text of an answer must match: checking it, compiling it, and the tokens that it leaves."""
