"""Scores and reports of speech recognition: word errors, hallucinations, punctuation."""
