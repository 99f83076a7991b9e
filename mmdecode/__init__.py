"""mmdecode: faster and truer decoding for speech and vision-language models.

It has one decoding loop with three exchangeable parts. A drafter (``mmdecode.draft``) proposes
tokens for speculative decoding, a guide (``mmdecode.guide``) changes the distribution (contrastive
decoding, guidance), and a rule (``mmdecode.accept``) decides which drafted tokens to accept.

Importing this package imports neither torch nor transformers; its names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmdecode._lazy import lazy

if TYPE_CHECKING:
    from mmdecode import (
        accept,
        adapters,
        asr,
        draft,
        engine,
        errors,
        evaluation,
        guide,
        image_ar,
        vlm,
        zoo,
    )
    from mmdecode.api import attach, generate
    from mmdecode.decoder import Decoder
    from mmdecode.engine.adapter import Adapter
    from mmdecode.engine.contracts import AcceptanceRule, BranchRunner, Drafter, DraftSession, Guide
    from mmdecode.engine.prompt_cache import PromptCache
    from mmdecode.loading import load
    from mmdecode.quantization import quantize

__version__ = "0.1.0.dev0"

__all__ = [
    "AcceptanceRule",
    "Adapter",
    "BranchRunner",
    "Decoder",
    "DraftSession",
    "Drafter",
    "Guide",
    "PromptCache",
    "__version__",
    "accept",
    "adapters",
    "asr",
    "attach",
    "draft",
    "engine",
    "errors",
    "evaluation",
    "generate",
    "guide",
    "image_ar",
    "load",
    "quantize",
    "vlm",
    "zoo",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "api": ("attach", "generate"),
        "decoder": ("Decoder",),
        "engine.adapter": ("Adapter",),
        "engine.contracts": ("AcceptanceRule", "BranchRunner", "DraftSession", "Drafter", "Guide"),
        "engine.prompt_cache": ("PromptCache",),
        "loading": ("load",),
        "quantization": ("quantize",),
    },
    packages=(
        *("accept", "adapters", "asr", "draft", "engine", "errors", "evaluation", "guide"),
        *("image_ar", "vlm", "zoo"),
    ),
)
