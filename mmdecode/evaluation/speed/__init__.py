"""Measurement of decoding time, streaming latency and memory."""
