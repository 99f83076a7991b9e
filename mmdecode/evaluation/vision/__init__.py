"""Evaluation on questions about images: benchmarks, scores and reports."""
