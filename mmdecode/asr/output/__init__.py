"""Inputs of a job, manifests, and transcripts as files."""
