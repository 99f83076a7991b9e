"""Benchmarks of questions about images, one a module."""
