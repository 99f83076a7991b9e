"""Adapters of encoder-decoders of text."""
