"""Training of drafters: Medusa heads, EAGLE and similar models, early exits."""
