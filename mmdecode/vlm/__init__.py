"""Vision-language models: answers to questions about images.

START HERE: `Answerer`. `mmdecode.vlm.images` reads images, and `mmdecode.vlm.questions` turns
questions into model inputs.

Importing this package imports neither torch nor transformers; its names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmdecode._lazy import lazy

if TYPE_CHECKING:
    from mmdecode.vlm.answerer import Answerer
    from mmdecode.vlm.chat import Chat
    from mmdecode.vlm.images import read_image
    from mmdecode.vlm.options import AnswerOptions
    from mmdecode.vlm.questions import Question
    from mmdecode.vlm.requests import AnswerRequest
    from mmdecode.vlm.results import Answer

__all__ = ["Answer", "AnswerOptions", "AnswerRequest", "Answerer", "Chat", "Question", "read_image"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "answerer": ("Answerer",),
        "chat": ("Chat",),
        "images": ("read_image",),
        "options": ("AnswerOptions",),
        "questions": ("Question",),
        "requests": ("AnswerRequest",),
        "results": ("Answer",),
    },
)
