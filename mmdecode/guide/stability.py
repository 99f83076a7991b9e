"""Stability rule of CarelessWhisper: continues a stream's last hypothesis while it stays likely.

With every chunk of audio, decoding continues the last hypothesis y of n tokens instead of starting
again. Tokens older than the last m are kept. One of the last m is kept if its logit did not fall
since the last step, or if it is the most likely token; at the first that is not, the hypothesis is
cut, and greedy decoding continues. The guide is a function of the prefix: where the text so far is
the beginning of y and the next token of y is kept, that token becomes the most likely one.

Earlier tokens are never decided again, though they were chosen with less audio. To decide every
token again with the audio that is there, and still commit words once, draft from the last
hypothesis and choose a commit policy, as `mmdecode.asr.streaming.Stream` does by default.

Source: Krichli et al. 2025, arXiv:2508.12301, and the greedy decoder of its release, whose edge
cases were read, not run. There as here raw logits are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError

LIFT = 20.0
"""How far a kept token's logit is raised above the others: Whisper's timestamp rule, which sums the
probabilities of all timestamps, must not outweigh it."""


class Constants(NamedTuple):
    """The last hypothesis of each row.

    Attributes:
        tokens: Its tokens, ``(B, L)``; -1 after the last one.
        floors: Logit that each token needs to be kept, ``(B, L)``; ``-inf``: it is kept.
    """

    tokens: Tensor
    floors: Tensor


class Stability(Guide):
    """Makes kept tokens of the last hypothesis the most likely ones.

    Args:
        m: Number of tokens at the end of the hypothesis that are decided again.

    The call passes the last hypothesis of each row as ``mm_inputs["source_ids"]``, ids with their
    last logit as an attribute ``evidence``; a stream with the policy ``stable`` does. Rows of other
    ids are decoded as without the guide.

    Raises:
        OptionError: ``m`` is negative.
    """

    summary = "keeps the last hypothesis of a stream, and decides its last tokens again"
    source = "Krichli et al. 2025 (CarelessWhisper)"
    on_host = True
    neutral = False

    def __init__(self, m: int = 2) -> None:
        if m < 0:
            raise OptionError(f"m={m}; expected a number of tokens, 0 or more")
        self.m = m

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> Constants:
        """Returns the hypotheses of all rows; rows without one have no tokens."""
        given: Sequence[Sequence[int]] = call.request.inputs.get("source_ids") or [()]
        logits = [[getattr(token, "evidence", None) for token in row] for row in given]
        width = max(1, *map(len, given))
        tokens = torch.full((call.batch, width), -1, dtype=torch.long)
        floors = torch.full((call.batch, width), -torch.inf)
        for row in range(call.batch):
            own = row * len(given) // call.batch
            count, last = len(given[own]), logits[own]
            if count and None not in last:
                tokens[row, :count] = torch.tensor(list(map(int, given[own])))
                again = max(0, count - self.m)
                floors[row, again:count] = torch.tensor(last[again:], dtype=torch.float)
        return Constants(tokens.to(call.device), floors.to(call.device))

    def apply(
        self,
        constants: Constants,
        call: Call,
        proposal: Proposal,
        outputs: Mapping[str, BranchOutput],
    ) -> Tensor:
        """Raises the kept tokens; see `mmdecode.engine.contracts.Guide.apply`."""
        logits = outputs["main"].logits
        follows, depths = self._following(constants, call, proposal)
        positions = call.rows.length[:, None] + depths
        width = constants.tokens.shape[1]
        inside = follows & (positions < width)
        at = positions.clamp_max(width - 1)
        wanted = constants.tokens.gather(1, at)
        inside &= wanted >= 0
        own = logits.gather(2, wanted.clamp_min(0)[..., None])[..., 0]
        top = logits.amax(-1)
        kept = inside & ((own >= constants.floors.gather(1, at)) | (own >= top))
        raised = torch.where(kept, top + LIFT, own)
        return logits.scatter(2, wanted.clamp_min(0)[..., None], raised[..., None])

    @staticmethod
    def _following(constants: Constants, call: Call, proposal: Proposal) -> tuple[Tensor, Tensor]:
        """Returns whether the text up to root and nodes begins the hypothesis; and their depths."""
        tokens, start = constants.tokens, call.prompt_length
        length, width = call.rows.length, constants.tokens.shape[1]
        ids = call.rows.ids[:, start : start + width]
        ids = pad(ids, (0, width - ids.shape[1]), value=-2)
        order = torch.arange(width, device=ids.device)
        root = ((ids == tokens) | (order >= length[:, None])).all(1) & (length <= width)
        if not proposal.size:
            return root[:, None], torch.zeros_like(length)[:, None]
        _, depths, ancestors = proposal.structure()
        depths = depths.expand(call.batch, -1)
        at = (length[:, None] + depths - 1).clamp_max(width - 1)
        same = (tokens.gather(1, at) == proposal.tokens) & (length[:, None] + depths <= width)
        whole = ~(ancestors[:, 1:, 1:] & ~same[:, None]).any(-1) & root[:, None]
        return torch.cat([root[:, None], whole], 1), pad(depths, (1, 0))
