"""Intervals, paired tests and tests of distributions."""
