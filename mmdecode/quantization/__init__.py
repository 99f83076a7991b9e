"""Models with int8 weights, whose drafted and undrafted tokens agree."""

from mmdecode.quantization.models import quantize

__all__ = ["quantize"]
