"""Acceptance rules, one family a file: how much of a proposal is kept, and the token after it."""
