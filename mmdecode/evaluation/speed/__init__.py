"""Time, latency and memory, measured."""
