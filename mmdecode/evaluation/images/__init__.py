"""Generated images: their distribution, distances and reports."""
