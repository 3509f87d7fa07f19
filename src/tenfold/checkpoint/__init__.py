"""Model files: weights, configuration, tokenizer and chat template."""
