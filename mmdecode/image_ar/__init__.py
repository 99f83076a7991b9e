"""Image generation: classes or prompts in, images out.

START HERE: `ImageGenerator`. It uses `mmdecode.image_ar.raster`, which decodes image tokens in
raster order with any drafter and rule, or `mmdecode.image_ar.next_scale`, scale by scale. Both
sample from the distribution of `mmdecode.image_ar.sampling`.
"""

from mmdecode.image_ar.generator import ImageGenerator
from mmdecode.image_ar.results import GeneratedImage, ImageRequest
from mmdecode.image_ar.sampling import Sampling

__all__ = ["GeneratedImage", "ImageGenerator", "ImageRequest", "Sampling"]
