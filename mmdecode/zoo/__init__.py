"""Test sets for the tiny trained models that ship, and the generators of their data."""
