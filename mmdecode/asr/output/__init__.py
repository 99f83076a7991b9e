"""Inputs, results folders and output formats of transcription jobs."""
