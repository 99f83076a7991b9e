"""``mmdecode demo image``: the command and its HTML page."""
