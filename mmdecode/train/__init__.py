"""Recipes that make the models: the zoo's own from scratch, and heads for any checkpoint."""
