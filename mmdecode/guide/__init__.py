"""Guides, one law a file: what the tokens must follow, as a pure function of branch scores."""
