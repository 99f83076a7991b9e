"""Adapters of encoder-decoder models of text."""
