"""Adapters of models that generate image tokens, one module per family."""
