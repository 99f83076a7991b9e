"""Demonstrations, ``mmdecode demo``: each runs a model and writes an HTML page of the results."""
