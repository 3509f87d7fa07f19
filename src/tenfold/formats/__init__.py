"""Number formats: what a weight is stored as, how it is rounded and read back."""
