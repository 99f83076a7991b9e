"""Helpers of long jobs: result files, resumable journals, failed items, several processes."""
