"""Correction of N-best lists by a language model, alone or fused with the recogniser's scores."""
