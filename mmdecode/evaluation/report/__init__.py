"""What reports share: tables, figures, pages and comparisons."""
