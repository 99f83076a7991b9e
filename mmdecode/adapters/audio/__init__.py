"""Adapters of speech recognition models."""
