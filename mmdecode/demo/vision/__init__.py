"""``mmdecode demo vlm``: the command and its HTML page."""
