"""Image tokens: classes or prompts in, pictures out.

START HERE: `ImageGenerator`. Below it, `mmdecode.image_ar.raster` decodes image tokens in raster
order with any draft and rule, `mmdecode.image_ar.next_scale` scale by scale, and
`mmdecode.image_ar.sampling` is what makes a law of logits for all of them.
"""

from mmdecode.image_ar.generator import ImageGenerator
from mmdecode.image_ar.results import GeneratedImage, ImageRequest
from mmdecode.image_ar.sampling import Sampling

__all__ = ["GeneratedImage", "ImageGenerator", "ImageRequest", "Sampling"]
