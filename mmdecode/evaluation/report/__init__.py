"""Shared parts of reports: tables, figures, pages and comparisons."""
