"""Training: the package's own tiny models (the zoo), and drafters and heads for any checkpoint."""
