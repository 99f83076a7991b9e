"""``mmdecode demo image``."""
