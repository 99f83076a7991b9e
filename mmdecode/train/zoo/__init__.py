"""Training recipes of the shipped models, one per module."""
