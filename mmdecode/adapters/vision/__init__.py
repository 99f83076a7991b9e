"""Adapters of vision-language models, one module per family."""
