"""Whisper-CD: contrasts the model's scores with its scores for changed recordings.

A window is the stretch of audio that Whisper transcribes at once. Each negative branch k runs on a
changed waveform of the window: with Gaussian noise, silent, or shifted. With log-probabilities l,
the scores of text tokens are:

    (1 + alpha) l(clean) - alpha tau log mean_k exp(l_k / tau)

With tau = 1 this contrasts with the mean of the negative branches' distributions. Because of the
mean over the K branches, scores do not change where all branches agree; a sum would lower the
scores of text tokens by ``alpha tau log K`` relative to other tokens. The scores are then
normalised so that the total probability of text tokens is the same as without contrast: the end
token, special tokens and timestamps keep their probabilities exactly.

Contrast cannot suppress text hallucinated in silence, since all branches agree there. But agreement
is a sign of silence: at the first text token, the evidence for speech is the total variation
between the distributions given the window and given silence. Optionally, ``doubt`` times the total
variation between the window with and without noise is subtracted, since noise changes the text of
real speech little, but hallucinated text much. If the evidence is below ``gate``, the end token is
chosen, so the window gets no text.

This gate detects only sounds that the model takes for silence. Two further gates use Whisper's
no-speech token, which the model was trained to predict at the start of a transcript without speech.
The gate ``no_speech`` ends a window if the token's probability, with noise added to the window, is
above a threshold. The gate ``structure`` compares the token's log-probability before and after
scrambling the window, which keeps the spectrum and randomises the phases. The model no longer takes
scrambled speech for speech, so the log-probability rises; it hardly changes for noise, steady
murmur or music. A weakness of this gate: scrambling also fills pauses with noise, so a sound that
ends long before its window is taken for speech.

Pad the last window with silence (``padding="silence"`` of the Transcriber): features padded with
zeros differ from features of silence, so the silent branch would not be comparable. The evidence
for speech depends on the model. Choose ``gate`` with ``mmdecode evaluate silence --part
development``, so that nearly all of your speech has more evidence; likewise ``no_speech`` and
``structure``, which are off by default. The default ``gate`` ends only windows that are very likely
silent.

Source: Whisper-CD 2026, arXiv:2603.06193. The default weights are not the paper's, which are
unknown. Additions to the paper: the mean, the normalisation to the text's total probability, the
plausibility cut (Li et al. 2023, arXiv:2210.15097, equation 2) and the gates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.adapter import Adapter, BranchSpec
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide, Requirements
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError
from mmdecode.guide.linear import checked_cut, generated, not_negative, plausible

if TYPE_CHECKING:
    from mmdecode.adapters.audio.transforms import Change

NOISED, SILENT, SCRAMBLED = "noised", "silent", "scrambled"
_FLOOR = -100.0  # log-probability below which a token is ruled out, in a negative branch
_LAST = -1e4  # logit of a token that is chosen only if no other is allowed


@dataclass(frozen=True)
class Vocabulary:
    """Masks of tokens and of rows that are computed once per call.

    Attributes:
        end: Id of the end token; lower ids are text tokens.
        text: Mask of the text tokens, ``(V,)`` bool.
        ended: Logits that make the end token certain, ``(V,)``.
        timed: Whether a row generates timestamps, which come before any text, ``(B, 1)`` bool.
        unspoken: Whether ``no_speech`` or ``structure`` ends a row, ``(B, 1)`` bool; ``None``: both
            gates are off.
    """

    end: int
    text: Tensor
    ended: Tensor
    timed: Tensor
    unspoken: Tensor | None = None


class WhisperCD(Guide):
    """Contrastive decoding of Whisper, with gates that end windows without speech.

    Args:
        alpha: Strength of the contrast; 0: none.
        tau: Temperature of the mean over negative branches; low values approach the maximum over
            branches.
        beta: Plausibility cut: excludes text tokens with a probability below ``beta`` times that of
            the most likely text token, without contrast.
        gate: Evidence for speech, 0 to 1, below which a window without text so far ends; 0: no
            gate.
        doubt: Weight, 0 to 1, of the total variation caused by noise, which is subtracted from the
            evidence for speech.
        snr: Signal-to-noise ratio of the branch with noise, in decibels; ``None``: no such branch.
        silence: Whether to contrast with a silent branch; ``gate`` uses one in any case.
        shift: Delay of the shifted branch, as a share of the window; ``None``: no such branch.
        no_speech: Probability of the no-speech token, with noise of ``snr``, above which a window
            ends; 1: no gate.
        structure: Minimum rise of the no-speech token's log-probability when the window is
            scrambled, in nats; with a smaller rise the window ends. ``None``: no gate.

    The guide has no effect with ``alpha``, ``beta`` and ``gate`` 0, ``no_speech`` 1 and
    ``structure`` ``None``.
    """

    summary = "away from what Whisper writes for noise, silence and a shifted recording"
    source = "Whisper-CD 2026; the gates are ours"
    requires_inputs = ("audio",)

    def __init__(
        self,
        alpha: float = 1.0,
        tau: float = 1.0,
        beta: float = 0.1,
        gate: float = 0.1,
        doubt: float = 0.0,
        snr: float | None = 10.0,
        silence: bool = True,
        shift: float | None = 0.25,
        no_speech: float = 1.0,
        structure: float | None = None,
    ) -> None:
        self.alpha, self.beta = not_negative("alpha", alpha), checked_cut("beta", beta)
        self.gate, self.noise_weight = checked_cut("gate", gate), checked_cut("doubt", doubt)
        if isinstance(tau, str) or not 0 < tau < math.inf:
            raise OptionError(
                f"tau must be more than 0, got {tau}; 1 averages the branches' distributions"
            )
        if shift is not None and not 0 < shift < 1:
            raise OptionError(f"shift must be above 0 and below 1, got {shift}; none leaves it out")
        if isinstance(structure, str) or not (structure is None or math.isfinite(structure)):
            raise OptionError(f"structure must be a number of nats, got {structure}; none: no gate")
        if isinstance(no_speech, str) or not 0 <= no_speech <= 1:
            raise OptionError(f"no_speech must be in 0..1, got {no_speech}; 1: no gate")
        self.no_speech, self.structure = no_speech, structure
        self.asks = no_speech < 1 or structure is not None
        self.tau = tau
        changes: dict[str, Change] = {}
        if snr is not None:
            changes[NOISED] = partial(noised, snr)
        if silence:
            changes[SILENT] = silent
        if shift is not None:
            changes["shifted"] = partial(delayed, shift)
        if alpha and not changes:
            raise OptionError(
                "there is no branch to contrast with: give snr, silence or shift, or alpha=0"
            )
        self.negatives = list(changes) if alpha else []
        branch_changes = {name: changes[name] for name in self.negatives}
        if gate:
            branch_changes[SILENT] = silent
        if (gate and doubt) or no_speech < 1:
            if snr is None:
                raise OptionError(
                    "doubt and no_speech use the branch with noise, which snr=none leaves out: "
                    "give snr, or doubt=0 and no_speech=1"
                )
            branch_changes[NOISED] = partial(noised, snr)
        if structure is not None:
            branch_changes[SCRAMBLED] = scrambled
        self.branches = [
            BranchSpec(name=name, transform="audio", transform_options={"change": change})
            for name, change in branch_changes.items()
        ]
        self.neutral = not (alpha or beta or gate or self.asks)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns what is needed: states of the prompt, if a gate uses the no-speech token."""
        return Requirements(prompt_hidden=self.asks)

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> Vocabulary:
        """Computes the masks of the call, see `Vocabulary`."""
        adapter, device = call.plan.adapter, call.device
        text = torch.arange(adapter.vocab, device=device) < adapter.end
        ended = torch.full_like(text, -torch.inf, dtype=torch.float32)
        ended[adapter.end] = 0.0
        # the end may be suppressed as the very first token; a timestamp is no text
        ended[adapter.no_timestamps + 1] = _LAST
        timed = call.request.prompt_ids[:, -1:] != adapter.no_timestamps
        unspoken = self._unspoken(call, prefill) if self.asks else None
        return Vocabulary(adapter.end, text, ended, timed, unspoken)

    def _unspoken(self, call: Call, prefill: Mapping[str, BranchOutput]) -> Tensor:
        """Returns whether each row ends because of its no-speech token, ``(B, 1)``."""

        def probability(
            name: str,
        ) -> Tensor:  # log, of the no-speech token
            rows = torch.arange(call.batch, device=call.device)
            states = prefill[name].prompt_hidden["last"][rows, start]
            logprobs = call.plan.adapter.head(states).float().log_softmax(-1)
            return logprobs[:, call.plan.adapter.no_speech, None]

        start = (call.request.prompt_ids == call.plan.adapter.start).int().argmax(1)
        found = torch.zeros(call.batch, 1, dtype=torch.bool, device=call.device)
        if self.no_speech < 1:
            found = probability(NOISED).exp() > self.no_speech
        if self.structure is not None:
            found = found | (probability(SCRAMBLED) - probability("main") < self.structure)
        return found

    @property
    def total(self) -> float:
        """Returns 1, the sum of the branches' weights: contrast subtracts as much as it adds."""
        return 1.0

    def combine(
        self,
        constants: Vocabulary,
        call: Call,
        proposal: Proposal,
        outputs: Mapping[str, BranchOutput],
    ) -> Tensor:
        """Computes the contrasted logits before cut and gates, ``(B, N + 1, V)``."""
        return self._contrasted(constants, outputs, beta=0.0)

    def apply(
        self,
        constants: Vocabulary,
        call: Call,
        proposal: Proposal,
        outputs: Mapping[str, BranchOutput],
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        logits = self._contrasted(constants, outputs, self.beta)
        if not (self.gate or self.asks):
            return logits
        ending = torch.zeros_like(logits[..., 0], dtype=torch.bool)
        if self.gate:
            ending = self._evidence(outputs) < self.gate
        if constants.unspoken is not None:
            ending = ending | constants.unspoken
        ends = first_text(constants, call, proposal) & ending
        return torch.where(ends[..., None], constants.ended, logits)

    def _evidence(self, outputs: Mapping[str, BranchOutput]) -> Tensor:
        """Computes the evidence for speech at the last and each drafted token, ``(B, N + 1)``."""
        main = outputs["main"].logits
        found = distance(main, outputs[SILENT].logits)
        if self.noise_weight:
            found = found - self.noise_weight * distance(main, outputs[NOISED].logits)
        return found

    def _contrasted(
        self, constants: Vocabulary, outputs: Mapping[str, BranchOutput], beta: float
    ) -> Tensor:
        main = outputs["main"].logits
        combined = main
        if self.negatives:
            clean = main.log_softmax(-1)
            negative = joined([outputs[name].logits for name in self.negatives], self.tau)
            combined = clean + self.alpha * (clean - negative.clamp_min(_FLOOR))
        elif not beta:
            return main
        text = main.masked_fill(~constants.text, -torch.inf)
        spoken = plausible(combined.masked_fill(~constants.text, -torch.inf), text, beta)
        shared = text.logsumexp(-1, keepdim=True) + spoken.log_softmax(-1)
        return torch.where(constants.text, shared, main)


def joined(logits: list[Tensor], tau: float) -> Tensor:
    """Computes ``tau log mean_k exp(l_k / tau)``, with l_k the log-softmax of ``logits[k]``."""
    scaled = (values.log_softmax(-1) / tau for values in logits)
    return tau * (reduce(torch.logaddexp, scaled) - math.log(len(logits)))


def distance(first: Tensor, second: Tensor) -> Tensor:
    """Computes the total variation ``(...)`` of two distributions, from logits ``(..., V)``."""
    return (first.softmax(-1) - second.softmax(-1)).abs().sum(-1) / 2


def first_text(constants: Vocabulary, call: Call, proposal: Proposal) -> Tensor:
    """Whether the next token could be the first text token, at root and nodes, ``(B, N + 1)``."""
    ids = call.rows.ids[:, call.prompt_length :]
    begun = torch.arange(ids.shape[1], device=call.device) < call.rows.length[:, None]
    has_text = (begun & (ids < constants.end)).any(1, keepdim=True)
    _, _, ancestors = proposal.structure()
    drafted = pad((proposal.tokens >= 0) & (proposal.tokens < constants.end), (1, 0))
    has_text = has_text | (ancestors & drafted[:, None]).any(-1)
    return ~has_text & ((generated(call, proposal) > 0) | ~constants.timed)


def noised(snr: float, samples: Tensor, draw: torch.Generator) -> Tensor:
    """Adds white Gaussian noise to samples, ``snr`` decibels below their mean power."""
    noise = torch.randn(samples.shape, generator=draw)
    level = samples.square().mean().sqrt() * 10 ** (-snr / 20)
    return samples + level * noise


def silent(samples: Tensor, draw: torch.Generator) -> Tensor:
    """Returns silence of the same length."""
    return torch.zeros_like(samples)


def scrambled(samples: Tensor, draw: torch.Generator) -> Tensor:
    """Randomises the phases of the samples, which gives stationary noise of the same spectrum."""
    spectrum = torch.fft.rfft(samples)
    phases = 2 * math.pi * torch.rand(spectrum.shape, generator=draw)
    return torch.fft.irfft(torch.polar(spectrum.abs(), phases), len(samples))


def delayed(shift: float, samples: Tensor, draw: torch.Generator) -> Tensor:
    """Delays the samples by a share ``shift`` of their length, with silence before them."""
    by = round(shift * len(samples))
    return pad(samples[: len(samples) - by], (by, 0))
