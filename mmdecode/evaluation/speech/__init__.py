"""Word errors, hallucinated words, and how they are reported."""
