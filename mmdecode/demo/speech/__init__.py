"""``mmdecode demo speech``."""
