"""Vision-language models: answers to questions about images.

START HERE: `Answerer`. `mmdecode.vlm.images` reads images, and `mmdecode.vlm.questions` turns
questions into model inputs.
"""

from mmdecode.vlm.answerer import Answerer
from mmdecode.vlm.chat import Chat
from mmdecode.vlm.images import read_image
from mmdecode.vlm.options import AnswerOptions
from mmdecode.vlm.questions import Question
from mmdecode.vlm.requests import AnswerRequest
from mmdecode.vlm.results import Answer

__all__ = ["Answer", "AnswerOptions", "AnswerRequest", "Answerer", "Chat", "Question", "read_image"]
