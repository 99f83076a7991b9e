"""Adapters, one file a model family: the forward passes that branches run."""
