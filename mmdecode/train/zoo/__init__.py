"""Training recipes of the zoo, the tiny models that come with the package; one in each module."""
