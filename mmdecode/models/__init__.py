"""Model code, and converters of checkpoints, for models that transformers does not have."""
