"""Adapters of models that write image tokens, one file a family."""
