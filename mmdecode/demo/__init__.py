"""The demonstrations: pages, their assets, and the commands that make them."""
