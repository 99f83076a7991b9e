"""mmdecode: faster and truer decoding for speech and vision-language models.

It has one decoding loop with three exchangeable parts. A drafter (``mmdecode.draft``) proposes
tokens for speculative decoding, a guide (``mmdecode.guide``) changes the distribution (contrastive
decoding, guidance), and a rule (``mmdecode.accept``) decides which drafted tokens to accept.

Importing this package imports neither torch nor transformers; its names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_HOME = {
    "AcceptanceRule": "mmdecode.engine.contracts",
    "Adapter": "mmdecode.engine.adapter",
    "BranchRunner": "mmdecode.engine.contracts",
    "Decoder": "mmdecode.decoder",
    "DraftSession": "mmdecode.engine.contracts",
    "Drafter": "mmdecode.engine.contracts",
    "Guide": "mmdecode.engine.contracts",
    "PromptCache": "mmdecode.engine.prompt_cache",
    "attach": "mmdecode.api",
    "generate": "mmdecode.api",
    "load": "mmdecode.loading",
    "quantize": "mmdecode.quantization",
}
_PACKAGES = frozenset(__all__) - frozenset(_HOME) - {"__version__"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"mmdecode.{name}")
    else:
        raise AttributeError(f"module 'mmdecode' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
