"""Image generation: classes or prompts in, images out.

START HERE: `ImageGenerator`. Below it, `mmdecode.image_ar.raster` decodes image tokens in raster
order with any draft and rule, `mmdecode.image_ar.next_scale` scale by scale, and
`mmdecode.image_ar.sampling` turns logits into the distribution that all of them sample from.
"""

from mmdecode.image_ar.generator import ImageGenerator
from mmdecode.image_ar.results import GeneratedImage, ImageRequest
from mmdecode.image_ar.sampling import Sampling

__all__ = ["GeneratedImage", "ImageGenerator", "ImageRequest", "Sampling"]
