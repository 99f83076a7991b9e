"""Vision-language: images and questions in, answers out.

START HERE: `Answerer`. `mmdecode.vlm.images` says which images are read and how, and
`mmdecode.vlm.questions` what a question becomes.
"""

from mmdecode.vlm.answerer import Answer, Answerer, AnswerOptions
from mmdecode.vlm.images import read_image
from mmdecode.vlm.questions import Question
from mmdecode.vlm.requests import Request

__all__ = ["Answer", "AnswerOptions", "Answerer", "Question", "Request", "read_image"]
