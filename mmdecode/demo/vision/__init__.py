"""``mmdecode demo vlm``."""
