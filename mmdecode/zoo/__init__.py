"""The zoo's data: test sets for the tiny trained models in the package, and data generators."""
