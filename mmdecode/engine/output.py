"""Output of a call: ids, and scores, logits or a stream where they were asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import Block, BranchOutput
from mmdecode.engine.proposal import Proposal
from mmdecode.engine.request import pad_id
from mmdecode.engine.target_logits import TargetLogits, rows_along


class TargetScores(NamedTuple):
    """Result of a scoring pass.

    Attributes:
        main: Outputs of the main branch, along with those of the guide's other branches.
        logits: Guided logits, before the caller's processors, ``(B, N + 1, V)``.
        details: Details for a trace; see `mmdecode.engine.trace.NoTrace`.
    """

    main: BranchOutput
    logits: Tensor
    details: Any = None


@dataclass(frozen=True)
class Committed:
    """A round after its block was cut, as listeners are given it.

    Attributes:
        proposal: The proposal that was scored.
        scores: Its scores, before the caller's processors.
        target: The target distribution, after the processors.
        block: The committed tokens.
        first: Whether this is round 0, after the prompt was read.
    """

    proposal: Proposal
    scores: TargetScores
    target: TargetLogits
    block: Block
    first: bool


class Listener(Protocol):
    """An object called with every committed block: a recorder, a stream, a trace."""

    def add(self, round: Committed) -> None:
        """Takes one round."""


class Stream:
    """Passes the committed tokens of a batch of one to a streamer of transformers.

    Args:
        streamer: The streamer; its ``end`` is called by ``generate``, not here.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer

    def add(self, round: Committed) -> None:
        """Passes the tokens of a round to the streamer."""
        block = round.block
        self.streamer.put(block.tokens[0, : int(block.count[0])].cpu())


class Recorder:
    """Records scores and raw logits of the committed tokens, if the caller asked for them.

    Args:
        config: Config of the call, with ``output_scores`` and ``output_logits``.
        batch: Number of rows.
    """

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        wanted = {"scores": config.output_scores, "logits": config.output_logits}
        self.rows: dict[str, list[list[Tensor]]] = {
            name: [[] for _ in range(batch)] for name, asked in wanted.items() if asked
        }

    def add(self, round: Committed) -> None:
        """Records the scores and logits of a round's committed tokens."""
        path = round.block.path
        for name, rows in self.rows.items():
            along = (
                round.target.along(path)
                if name == "scores"
                else rows_along(round.scores.main.logits, path)
            )
            for row, kept in enumerate(round.block.count.tolist()):
                rows[row].extend(along[row, :kept].clone())  # frees the rejected rows

    def tuple_of(self, name: str) -> tuple[Tensor, ...] | None:
        """Recorded scores or logits, as ``generate`` returns them; ``None``: not recorded.

        One ``(B, V)`` tensor per generated position, with zeros after a row's end.

        Args:
            name: ``scores`` or ``logits``.
        """
        if name not in self.rows:
            return None
        rows = self.rows[name]
        longest = max(len(r) for r in rows)
        zero = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([r[i] if i < len(r) else zero for r in rows]) for i in range(longest)
        )


def output(
    call: Call, config: GenerationConfig, recorder: Recorder, cur_len: int, encoder_decoder: bool
) -> Any:
    """Ids ``(B, P + cur_len)``, or an output class of transformers with the recorded scores."""
    sequences = call.rows.ids[:, : call.prompt_length + cur_len]
    columns = torch.arange(sequences.shape[1], device=call.device)
    sequences = sequences.masked_fill(columns >= call.end()[:, None], pad_id(config))
    if not config.return_dict_in_generate:
        return sequences
    cls: Any = GenerateEncoderDecoderOutput if encoder_decoder else GenerateDecoderOnlyOutput
    return cls(
        sequences=sequences, scores=recorder.tuple_of("scores"), logits=recorder.tuple_of("logits")
    )
