"""What a call gives back: ids, and the scores, the stream and the trace that were asked for."""

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
    """What a scoring pass says.

    Attributes:
        main: Outputs of the main branch, those of the guide's other branches with them.
        logits: What the guide made of them, ``(B, N + 1, V)``.
        details: What a trace wants to know; see `mmdecode.engine.trace.NoTrace`.
    """

    main: BranchOutput
    logits: Tensor
    details: Any = None


@dataclass(frozen=True)
class Committed:
    """A round after its block was cut, for what listens to the loop.

    Attributes:
        proposal: What was drafted.
        scores: What was scored, before the caller's processors.
        target: The target distribution, under them.
        block: What was kept.
        first: Whether this is round 0, after the prompt was read.
    """

    proposal: Proposal
    scores: TargetScores
    target: TargetLogits
    block: Block
    first: bool


class Listener(Protocol):
    """What is shown every committed block: a recorder, a stream, a trace."""

    def add(self, round: Committed) -> None:
        """One round."""


class Stream:
    """Puts the tokens of the one row into a streamer of transformers, block by block.

    Args:
        streamer: It; whoever made it ends it.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer

    def add(self, round: Committed) -> None:
        """The tokens that are kept."""
        block = round.block
        self.streamer.put(block.tokens[0, : int(block.count[0])].cpu())


class Recorder:
    """Scores and raw logits of the committed tokens, where the caller asked for them.

    Args:
        config: The call's: ``output_scores`` and ``output_logits`` ask.
        batch: Rows.
    """

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        wanted = {"scores": config.output_scores, "logits": config.output_logits}
        self.rows: dict[str, list[list[Tensor]]] = {
            name: [[] for _ in range(batch)] for name, asked in wanted.items() if asked
        }

    def add(self, round: Committed) -> None:
        """Those of the tokens that are kept."""
        path = round.block.path
        for name, rows in self.rows.items():
            along = (
                round.target.along(path)
                if name == "scores"
                else rows_along(round.scores.main.logits, path)
            )
            for row, kept in enumerate(round.block.count.tolist()):
                rows[row].extend(along[row, :kept].clone())  # let the rejected rows go

    def tuple_of(self, name: str) -> tuple[Tensor, ...] | None:
        """One ``(B, V)`` tensor per generated position; zeros after a row's end."""
        if name not in self.rows:
            return None
        rows = self.rows[name]
        longest = max(len(r) for r in rows)
        zero = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([r[i] if i < len(r) else zero for r in rows]) for i in range(longest)
        )


def output(
    call: Call, config: GenerationConfig, recorder: Recorder, longest: int, encoder_decoder: bool
) -> Any:
    """Ids ``(B, P + longest)``, or the output class of transformers with what was recorded."""
    sequences = call.rows.ids[:, : call.prompt_length + longest]
    columns = torch.arange(sequences.shape[1], device=call.device)
    sequences = sequences.masked_fill(columns >= call.end()[:, None], pad_id(config))
    if not config.return_dict_in_generate:
        return sequences
    cls: Any = GenerateEncoderDecoderOutput if encoder_decoder else GenerateDecoderOnlyOutput
    return cls(
        sequences=sequences, scores=recorder.tuple_of("scores"), logits=recorder.tuple_of("logits")
    )
