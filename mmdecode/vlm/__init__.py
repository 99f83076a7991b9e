"""Vision-language: images and questions in, answers out.

START HERE: `Answerer`. `mmdecode.vlm.images` says which images are read and how, and
`mmdecode.vlm.questions` what a question becomes.
"""

from mmdecode.vlm.answerer import Answerer
from mmdecode.vlm.images import read_image
from mmdecode.vlm.options import AnswerOptions
from mmdecode.vlm.questions import Question
from mmdecode.vlm.requests import AnswerRequest
from mmdecode.vlm.results import Answer

__all__ = ["Answer", "AnswerOptions", "AnswerRequest", "Answerer", "Question", "read_image"]
