"""CTC guide: adds the CTC prefix score of a head on the recogniser's encoder to the decoder's.

The prefix score ``psi(h)`` is the probability, under the CTC head, that the text begins with h. So
``psi(hc) / psi(h)`` is a distribution over the next label c, with ``P(h) / psi(h)`` for the end of
the text, where P(h) is the probability that h is the whole text. With the decoder's distribution p
and a weight w

    log q(c) = (1 - w) log p(c) + w (log psi(hc) - log psi(h)).

A token that the head does not have is spelled with its labels, as in the head's training, and
scored by all of them. Labels and end share the probability that p gives them together. Ids without
a spelling, such as timestamps, keep their own, and the prefix stays as it is. After such an id the
end keeps its own, too, unlike in the source: a window of Whisper may end after a timestamp, though
its frames hold the first words of the next one. Only the decoder's most likely labels are scored;
the others are excluded. A text that goes round in circles, or that nobody has spoken, has a small
prefix score. A token that does not fit into the frames any more leaves the prefix as it is: every
further label then has the smallest score, and the end does not.

Scores are computed in float64, by two cumulative sums per label instead of a loop over frames. With
the sums ``X_t`` of a label's log-probabilities and ``B_t`` of the blank's up to frame t,

    n_t = X_t + logcumsumexp_{s <= t} (phi_{s-1} - X_{s-1}),
    b_t = B_t + logcumsumexp_{s <= t} (n_{s-1} - B_{s-1})

are the log-probabilities of the frames up to t collapsing to hc, with the last frame a label or a
blank; phi is the same for h, without ``n`` if c repeats its last label.

Source: Watanabe et al. 2017, Hybrid CTC/attention architecture; the formulas of ESPnet's
``ctc_prefix_score.py``, which loops over frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.adapter import MAIN, Adapter
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide, Requirements
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError
from mmdecode.models.ctc_head import BLANK, CTCHead
from mmdecode.models.placed import Placed

NEVER = -1e4
"""Log-probability of labels in frames that are padding."""


class Prefixes(NamedTuple):
    """CTC scores of prefixes; the leading dimensions are the same for all fields.

    Attributes:
        label: Log-probability that the frames up to t collapse to the prefix and frame t is its
            last label, for t from 0 on, ``(..., T + 1)``.
        blank: The same where frame t is a blank.
        last: Last label; -1: the prefix is empty.
        score: Log prefix score.
    """

    label: Tensor
    blank: Tensor
    last: Tensor
    score: Tensor

    def at(self, rows: Tensor) -> Prefixes:
        """Returns the prefixes ``(B, K)`` with given indices ``(B, K)`` of prefixes ``(B, N)``."""
        index = rows[..., None].expand(*rows.shape, self.label.shape[-1])
        return Prefixes(
            self.label.gather(1, index),
            self.blank.gather(1, index),
            self.last.gather(1, rows),
            self.score.gather(1, rows),
        )

    def where(self, chosen: Tensor, other: Prefixes) -> Prefixes:
        """Returns these prefixes where ``chosen``, and the others elsewhere."""
        wide = chosen[..., None]
        return Prefixes(
            torch.where(wide, self.label, other.label),
            torch.where(wide, self.blank, other.blank),
            torch.where(chosen, self.last, other.last),
            torch.where(chosen, self.score, other.score),
        )

    @property
    def ends(self) -> Tensor:
        """Log-probability that the prefix is the whole text."""
        return torch.logaddexp(self.label[..., -1], self.blank[..., -1])


class PrefixScorer:
    """Prefix scores under the frame probabilities of a batch of recordings.

    Args:
        log_probs: Log-probabilities of each frame, ``(B, T, labels)``; index 0 is the blank. Frames
            that are padding have a certain blank.
    """

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs.double().clamp_min(NEVER)
        self._sums = pad(self.log_probs.cumsum(1), (0, 0, 1, 0))  # (B, T + 1, labels)

    def empty(self) -> Prefixes:
        """Returns the empty prefix of each recording, ``(B, 1)``."""
        blank = self._sums[:, None, :, BLANK]
        nothing = torch.full_like(blank[..., 0], -1, dtype=torch.long)
        return Prefixes(
            torch.full_like(blank, 2 * NEVER * blank.shape[-1]), blank, nothing, blank[..., 0]
        )

    def extended(self, prefixes: Prefixes, labels: Tensor) -> Prefixes:
        """Returns the prefixes ``(B, N)`` with one label ``(B, N)`` more."""
        sums = self._sums.transpose(1, 2)
        sums = sums.gather(1, labels[..., None].expand(*labels.shape, sums.shape[-1]))
        blanks = self._sums[:, None, :, BLANK]
        before = self._before(prefixes, labels)
        label = sums[..., 1:] + (before - sums[..., :-1]).logcumsumexp(-1)
        label = pad(label, (1, 0), value=2 * NEVER * sums.shape[-1])
        blank = blanks[..., 1:] + (label - blanks)[..., :-1].logcumsumexp(-1)
        blank = pad(blank, (1, 0), value=2 * NEVER * sums.shape[-1])
        score = (before + sums.diff(dim=-1)).logsumexp(-1)
        return Prefixes(label, blank, labels, score)

    def scores(self, prefixes: Prefixes, labels: Tensor) -> Tensor:
        """Returns log prefix scores with each of K labels more, ``(B, N, K)``.

        Args:
            prefixes: Prefixes ``(B, N)``.
            labels: Labels ``(B, N, K)``.
        """
        either = torch.logaddexp(prefixes.label, prefixes.blank)[..., :-1]
        repeats = labels == prefixes.last[..., None]
        before = torch.where(
            repeats[..., None], prefixes.blank[..., None, :-1], either[..., None, :]
        )
        frames = self.log_probs.transpose(1, 2)
        size = labels.shape[1:]
        index = labels.flatten(1)[..., None].expand(-1, -1, frames.shape[-1])
        return (before + frames.gather(1, index).unflatten(1, size)).logsumexp(-1)

    def spelled(self, prefixes: Prefixes, labels: Tensor) -> Prefixes:
        """Returns the prefixes ``(B, N)`` with up to K labels ``(B, N, K)`` more; 0: no label."""
        for step in range(int((labels > 0).any(0).any(0).sum())):
            longer = self.extended(prefixes, labels[..., step])
            prefixes = longer.where(labels[..., step] > 0, prefixes)
        return prefixes

    def followed(self, prefixes: Prefixes, labels: Tensor) -> Prefixes:
        """Returns the prefixes ``(B, N)`` with a spelled token ``(B, N, K)`` more, if it fits.

        Prefixes that leave the token no frame stay as they are.
        """
        longer = self.spelled(prefixes, labels)
        return longer.where(longer.score - prefixes.score > NEVER / 2, prefixes)

    def spelled_scores(self, prefixes: Prefixes, labels: Tensor) -> Tensor:
        """Returns log prefix scores with each of C spelled tokens more, ``(B, N, C)``.

        Args:
            prefixes: Prefixes ``(B, N)``.
            labels: Labels ``(B, N, C, K)``; 0: no label.
        """
        found = self.scores(prefixes, labels[..., 0])
        sizes = (labels > 0).sum(-1)
        count = int((sizes > 1).sum(-1).max())
        if not count:
            return found
        longest = sizes.topk(count, -1).indices  # no other token has further labels
        rows = torch.arange(labels.shape[1], device=labels.device).repeat_interleave(count)
        index = longest[..., None].expand(-1, -1, -1, labels.shape[-1])
        spelling = labels.gather(2, index).flatten(1, 2)
        last = sizes.gather(2, longest).flatten(1, 2)[..., None] - 1
        final = spelling.gather(2, last.clamp_min(0))
        before = spelling.scatter(2, last.clamp_min(0), 0)
        wide = self.spelled(prefixes.at(rows.expand(len(labels), -1)), before)
        scores = self.scores(wide, final)[..., 0].unflatten(1, (-1, count))
        return found.scatter(2, longest, scores)

    def _before(self, prefixes: Prefixes, labels: Tensor) -> Tensor:
        """Returns phi of the frames before each frame, ``(B, N, T)``."""
        either = torch.logaddexp(prefixes.label, prefixes.blank)
        repeats = (labels == prefixes.last)[..., None]
        return torch.where(repeats, prefixes.blank, either)[..., :-1]


@dataclass
class Constants:
    """Constants of a call, and the scores of the committed text, which follow from its ids.

    Attributes:
        scorer: Prefix scores of the rows.
        labels: Labels that spell each id of the vocabulary, ``(V, K)``; 0: no further one.
        shared: Whether an id has labels or is the end, ``(V,)`` bool.
        ends: Ids of the end.
        ids: Generated ids that ``prefixes`` are for, ``(B, L)``, -1 beyond a row's length.
        prefixes: Their scores, ``(B, 1)``.
    """

    scorer: PrefixScorer
    labels: Tensor
    shared: Tensor
    ends: Tensor
    ids: Tensor
    prefixes: Prefixes


class CTCScore(Guide):
    """Adds the CTC prefix score of a head on the encoder to the decoder's scores.

    Args:
        head: The head, trained for the model by ``mmdecode train ctc``.
        weight: Weight w of the prefix score, 0 to 1.
        candidates: Number of the decoder's most likely labels that are scored; 0: all, which takes
            some 100 bytes per row, position, token of the vocabulary and frame.
        floor: Smallest log-probability that the prefix score gives a label, so that it cannot
            exclude a rare word alone.

    The guide has no effect with ``weight`` 0. It is a function of the text and the audio, so that
    every drafter is as exact with it as without it.

    Raises:
        OptionError: A value is out of range.
        IncompatibleError: When decoding begins: the head was trained for another model.
    """

    summary = "adds the CTC prefix score of a head on the recogniser's encoder"
    source = "Watanabe et al. 2017 (hybrid CTC/attention)"
    on_host = True

    def __init__(
        self, head: CTCHead, weight: float = 0.3, candidates: int = 40, floor: float = -20.0
    ) -> None:
        if not 0 <= weight <= 1 or candidates < 0 or not floor < 0:
            raise OptionError(
                f"weight={weight}, candidates={candidates}, floor={floor}; expected a weight from "
                "0 to 1, 0 or more candidates and a negative floor"
            )
        self.weight, self.candidates, self.floor = float(weight), candidates, float(floor)
        self.head = head.eval()
        self._placed = Placed(self.head)
        self.neutral = not weight

    @classmethod
    def from_options(
        cls,
        head: str | None = None,
        weight: float = 0.3,
        candidates: int = 40,
        floor: float = -20.0,
        model_id: str | None = None,
    ) -> CTCScore:
        """Builds the guide from the options of a string, as in ``ctc:weight=0.3``.

        Args:
            head: Folder, Hub id or ``zoo:NAME`` of the head; ``None``: the one that ships with the
                model ``model_id``.
            weight: See `CTCScore`.
            candidates: See `CTCScore`.
            floor: See `CTCScore`.
            model_id: Name of the model that decodes.

        Raises:
            OptionError: No head ships with the model.
        """
        return cls(CTCHead.of_option(head, model_id, "guide 'ctc'"), weight, candidates, floor)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns no requirements: the encoder's states are part of the call.

        Raises:
            IncompatibleError: The head does not fit the model.
        """
        self.head.refuse_misfit(adapter, "guide CTCScore")
        return Requirements()

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> Constants:
        """Runs the head on the encoder's states."""
        scorer = PrefixScorer(self.frames(call))
        labels = self.head.labels(prefill["main"].logits.shape[-1]).to(call.device)
        shared = labels[:, 0] > 0
        ends = call.request.eos_token_ids
        shared[ends] = True
        nothing = labels.new_zeros(call.batch, 0)
        return Constants(scorer, labels, shared, ends, nothing, scorer.empty())

    def frames(self, call: Call) -> Tensor:
        """Returns the head's log-probabilities of each frame, ``(B, T, labels)``."""
        adapter = call.plan.adapter
        inputs = adapter.prompt(call, MAIN).inputs
        states, mask = inputs["source"], inputs.get("source_mask")
        head = self._placed.like(states)
        return head.log_probs(*head.arguments(states, mask, adapter.embed))

    def apply(
        self,
        constants: Constants,
        call: Call,
        proposal: Proposal,
        outputs: Mapping[str, BranchOutput],
    ) -> Tensor:
        """Combines both scores; see `mmdecode.engine.contracts.Guide.apply`."""
        logits = outputs["main"].logits
        prefixes = self._at_nodes(constants, call, proposal)
        root = pad(constants.ids, (1, 0), value=-1).gather(1, call.rows.length[:, None])
        last = torch.cat([root, proposal.tokens.expand(call.batch, -1)], 1)
        return self.mixed(constants, logits, prefixes, last)

    def mixed(
        self, constants: Constants, logits: Tensor, prefixes: Prefixes, last: Tensor
    ) -> Tensor:
        """Returns the combined log-probabilities, given the prefixes of root and nodes.

        Args:
            constants: Constants of the call.
            logits: Logits of the decoder, ``(B, N + 1, V)``.
            prefixes: Prefixes ``(B, N + 1)``.
            last: Last id of each, ``(B, N + 1)``; -1: none.
        """
        own = logits.double().log_softmax(-1)
        known = constants.labels[:, 0] > 0
        labelled = own.masked_fill(~known, -torch.inf)
        count = self.candidates or int(known.sum())
        best, ids = labelled.topk(min(count, labelled.shape[-1]), -1)
        scores = constants.scorer.spelled_scores(prefixes, constants.labels[ids])
        gained = (scores - prefixes.score[..., None]).clamp_min(self.floor)
        scored = torch.full_like(own, -torch.inf)
        scored.scatter_(-1, ids, (1 - self.weight) * best + self.weight * gained)
        ending = (prefixes.ends - prefixes.score).clamp_min(self.floor)[..., None]
        ends = constants.ends
        spelled = (last < 0) | known[last.clamp_min(0)]
        ending = (1 - self.weight) * own[..., ends] + self.weight * ending
        scored[..., ends] = ending.masked_fill(~spelled[..., None], -torch.inf)
        scored = scored.masked_fill(scored.isnan(), -torch.inf)
        shared = constants.shared.repeat(*last.shape, 1)
        shared[..., ends] &= spelled[..., None]
        whole = own.masked_fill(~shared, -torch.inf).logsumexp(-1, keepdim=True)
        scored = scored - scored.logsumexp(-1, keepdim=True) + whole
        return torch.where(shared, scored, own).to(logits.dtype)

    def _at_nodes(self, constants: Constants, call: Call, proposal: Proposal) -> Prefixes:
        """Returns the prefixes of root and nodes, ``(B, N + 1)``."""
        root = self._committed(constants, call)
        if not proposal.size:
            return root
        parents, depths = (part.expand(call.batch, -1) for part in proposal.structure()[:2])
        labels = constants.labels[proposal.tokens.clamp_min(0)]
        labels = labels * (proposal.tokens >= 0)[..., None]
        found = root.at(parents.new_zeros(call.batch, proposal.size + 1))
        for depth in range(1, int(depths.max()) + 1):
            at_depth = depths == depth
            nodes = at_depth.any(0).nonzero()[:, 0]
            longer = constants.scorer.followed(found.at(parents[:, nodes] + 1), labels[:, nodes])
            own = found.at((nodes + 1).expand(call.batch, -1))
            new = longer.where(at_depth[:, nodes], own)
            pairs = zip(found, new, strict=True)
            found = Prefixes(*(every.index_copy(1, nodes + 1, part) for every, part in pairs))
        return found

    def _committed(self, constants: Constants, call: Call) -> Prefixes:
        """Returns the prefix of each row's committed text, ``(B, 1)``; remembers it."""
        start, count = call.prompt_length, call.rows.cur_len
        ids = call.rows.ids[:, start : start + count]
        order = torch.arange(count, device=ids.device)
        ids = torch.where(order < call.rows.length[:, None], ids, -1)
        before, prefixes = constants.ids, constants.prefixes
        known = before.shape[1]
        if known > count or not bool(((before == ids[:, :known]) | (before < 0)).all()):
            before, prefixes, known = ids[:, :0], constants.scorer.empty(), 0
        before = pad(before, (0, count - known), value=-1)
        for column in (ids != before).any(0).nonzero()[:, 0].tolist():
            new = (ids[:, column] != before[:, column])[:, None]
            labels = constants.labels[ids[:, column].clamp_min(0)][:, None]
            prefixes = constants.scorer.followed(prefixes, labels * new[..., None])
        constants.ids, constants.prefixes = ids, prefixes
        return prefixes
