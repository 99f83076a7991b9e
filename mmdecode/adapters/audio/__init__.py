"""Adapters of speech recognisers."""
