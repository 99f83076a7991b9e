"""Inputs and manifests of transcription jobs, their results folders, and output formats."""
