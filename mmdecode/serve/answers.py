"""`AnswerWorker`: answers the questions of all clients, in batches that clients share.

One thread owns the vision-language model. Questions with the same options that wait are answered in
one batch; an answer does not depend on the others of its batch. An answer whose pieces are wanted
as they come is decoded alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from mmdecode.errors import OverloadError
from mmdecode.runs.items import Failed
from mmdecode.serve.limits import Limits
from mmdecode.serve.metrics import Metrics
from mmdecode.serve.worker import Worker
from mmdecode.vlm.answerer import MEMORY_HINT, Answerer
from mmdecode.vlm.options import AnswerOptions
from mmdecode.vlm.requests import AnswerRequest
from mmdecode.vlm.results import Answer, failed_answer

Notify = Callable[[str, Answer | None], None]
"""Takes the next piece of an answer, and at the end the answer; called in the worker's thread."""


class Asked:
    """A question that waits for its answer.

    Args:
        request: The question.
        options: Options of its answer.
        seed: Seed of its random numbers.
        in_pieces: Whether pieces are wanted as they come.
        notify: Function that takes them.

    Attributes:
        cancelled: Whether nobody waits for more of it; an answer that is decoded then ends with
            the round at hand, if nobody waits for others of its batch.
    """

    def __init__(
        self,
        request: AnswerRequest,
        options: AnswerOptions,
        seed: int,
        in_pieces: bool,
        notify: Notify,
    ) -> None:
        self.request, self.options, self.seed = request, options, seed
        self.in_pieces, self.notify = in_pieces, notify
        self.cancelled = False

    @property
    def kind(self) -> tuple[AnswerOptions, int]:
        """Value that questions of one batch have in common."""
        return self.options, self.seed


class AnswerWorker(Worker):
    """Answers questions in a thread of its own.

    Args:
        answerer: Answerer of all questions.
        limits: Most questions that wait.
        metrics: Counters of the server.
        batch_size: Most questions that are answered at once.
    """

    def __init__(
        self, answerer: Answerer, limits: Limits, metrics: Metrics, batch_size: int = 8
    ) -> None:
        super().__init__("answers")
        self.answerer, self._limits, self._metrics = answerer, limits, metrics
        self._size = batch_size
        self._waiting: deque[Asked] = deque()
        self.decoding = 0
        self.start()

    @property
    def waiting(self) -> int:
        """Number of questions that wait."""
        return len(self._waiting)

    def submit(self, asked: Asked) -> None:
        """Adds a question.

        Raises:
            OverloadError: Too many questions wait.
        """
        with self._changed:
            if len(self._waiting) >= self._limits.queue:
                raise OverloadError(f"{self._limits.queue} questions wait already; ask again later")
            self._waiting.append(asked)
            self._changed.notify()

    def cancel(self, asked: Asked) -> None:
        """Says that nobody waits for an answer any more; called from any thread."""
        with self._changed:
            asked.cancelled = True
            if asked in self._waiting:
                self._waiting.remove(asked)

    def has_work(self) -> bool:
        """Returns whether a question waits."""
        return bool(self._waiting)

    def work(self) -> None:
        """Answers a batch of questions."""
        with self._changed:
            batch = self._next_batch() if self._waiting else []  # one may have been cancelled
            self.decoding = len(batch)
        try:
            self._answer(batch)
        finally:
            self.decoding = 0

    def _next_batch(self) -> list[Asked]:
        """Takes the first question, and others that can be answered with it."""
        first = self._waiting[0]
        alike = [
            one
            for one in self._waiting
            if one is first or (not (one.in_pieces or first.in_pieces) and one.kind == first.kind)
        ][: self._size]
        self._waiting = deque(one for one in self._waiting if one not in alike)
        return [one for one in alike if not one.cancelled]

    def _answer(self, batch: list[Asked]) -> None:
        if not batch:
            return
        decoder = replace(self.answerer.decoder, seed=batch[0].seed)
        answerer = self.answerer.with_decoder(decoder)
        options = vars(batch[0].options)
        done: set[int] = set()
        try:
            if batch[0].in_pieces:
                batch[0].notify("", self._in_pieces(answerer, batch[0]))
                return
            requests = [replace(one.request, index=index) for index, one in enumerate(batch)]

            def wanted() -> bool:
                return not all(one.cancelled for one in batch)

            for answer in answerer.answers(requests, wanted=wanted, **options):
                done.add(answer.index)
                batch[answer.index].notify("", answer)
        except Exception as error:  # of the options or the machine: it is that of all of them
            failed = Failed.of(error, MEMORY_HINT)
            for index, one in enumerate(batch):
                if index not in done:
                    one.notify("", failed_answer(one.request, failed))

    def _in_pieces(self, answerer: Answerer, asked: Asked) -> Answer:
        """Hands on an answer piece by piece, until nobody waits for more; returns it."""
        pieces = answerer.pieces(asked.request, lambda: not asked.cancelled, **vars(asked.options))
        while True:
            try:
                asked.notify(next(pieces), None)
            except StopIteration as end:
                return end.value
