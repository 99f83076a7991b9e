"""Models with int8 weights, whose drafted and undrafted tokens agree."""

from mmdecode.quantization.models import is_quantized, quantize

__all__ = ["is_quantized", "quantize"]
