"""Adapters, one module per model family, which run a model's forward passes for the engine."""
