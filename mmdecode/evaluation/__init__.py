"""How a number becomes believable: scorers with names, counts and intervals."""
