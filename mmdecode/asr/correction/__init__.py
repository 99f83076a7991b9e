"""Correction of N-best lists by language models, alone or fused with the audio."""
