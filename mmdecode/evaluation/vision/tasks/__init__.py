"""Benchmarks of questions about images, one module for each."""
