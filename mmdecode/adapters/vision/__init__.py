"""Adapters of vision-language models, one file a family."""
