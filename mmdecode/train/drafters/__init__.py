"""Training of drafters: heads, feature drafters and early exits."""
