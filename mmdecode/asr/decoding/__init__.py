"""Decoding of long audio: windows, temperature fallback, beam search, N-best lists, segments."""
