"""``mmdecode demo speech``: the command and its HTML page."""
