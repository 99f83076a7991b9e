"""Image generation from classes or prompts.

START HERE: `ImageGenerator`. `mmdecode.image_ar.raster` decodes image tokens in raster order with
any drafter and acceptance rule; `mmdecode.image_ar.next_scale` generates images scale by scale
(VAR). Guidance, temperature, top-k and top-p are those in `mmdecode.image_ar.sampling`.
"""

from mmdecode.image_ar.generator import ImageGenerator
from mmdecode.image_ar.results import GeneratedImage, ImageRequest
from mmdecode.image_ar.sampling import Sampling

__all__ = ["GeneratedImage", "ImageGenerator", "ImageRequest", "Sampling"]
