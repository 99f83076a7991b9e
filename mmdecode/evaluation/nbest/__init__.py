"""Evaluation of N-best lists of speech recognition: oracles, selection and correction."""
