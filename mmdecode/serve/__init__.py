"""The server: models behind HTTP."""
