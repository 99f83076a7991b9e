"""Adapters of models that generate image tokens, one file a family."""
