"""Late fusion: combines the next-token distributions of the main model and a second model.

In the usual case, a language model (the main model) corrects a transcript, and a speech recogniser
(the second model) reads the audio. In formulas, the main model's distribution is p_L and the second
model's, called acoustic, is p_A. The second model scores either the whole vocabulary of the main
model (`SecondModel`) or only some candidate tokens at each position
(`mmdecode.engine.contracts.BranchOutput.candidates`). Other tokens keep the main probability if
probabilities are added, and are excluded if log-probabilities are added. A position without
candidates follows the main model.

Two combinations with a fixed weight, the baselines of `mmdecode.guide.uadf`:

- `Static`: ``p_L + weight * p_A``, the static late fusion of Chen et al. 2024, arXiv:2402.05457.
- `Shallow`: ``log p_L + weight * log p_A``, from Gulcehre et al. 2015, arXiv:1503.03535, with the
  roles of the two models exchanged: here the language model is the main model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput

from mmdecode.engine.adapter import MAIN, BranchSpec
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, BranchRunner, Guide
from mmdecode.engine.encoding import Inputs, encode_unpadded
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import InputError, OptionError
from mmdecode.guide.linear import not_negative
from mmdecode.registry import adapter_for

ACOUSTIC = "acoustic"
"""Name of the branch of the second model."""


class Fusion(Guide, ABC):
    """Base of fusion guides: a branch for the second model, and a temperature for each model.

    Args:
        acoustic: The branch of the second model, whose name must be `ACOUSTIC`; see
            `second_model`.
        main_temperature: Divisor of the main model's logits, applied before everything else.
        acoustic_temperature: Divisor of the second model's scores.

    If the second model has weight 0, it is not run, and the guide (with its temperatures) has no
    effect.

    Raises:
        OptionError: A temperature is not above 0, or the branch has another name.
    """

    def __init__(
        self,
        acoustic: BranchSpec,
        main_temperature: float = 1.0,
        acoustic_temperature: float = 1.0,
    ) -> None:
        if acoustic.name != ACOUSTIC:
            raise OptionError(f"the second branch is called {acoustic.name!r}; name it {ACOUSTIC}")
        for name, value in (("main", main_temperature), ("acoustic", acoustic_temperature)):
            if not 0 < value < math.inf:
                raise OptionError(f"{name}_temperature must be above 0, got {value}; 1 is neutral")
        self.main_temperature = main_temperature
        self.acoustic_temperature = acoustic_temperature
        self.branches: Sequence[BranchSpec] = (acoustic,)

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Returns ``None``: this guide computes nothing in advance."""
        return None

    def apply(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        main = (outputs["main"].logits / self.main_temperature).log_softmax(-1)
        acoustic = acoustic_log_probs(outputs[ACOUSTIC], main, self.acoustic_temperature)
        scored = (acoustic > -torch.inf).any(-1, keepdim=True)
        return torch.where(scored, self.fuse(main, acoustic), main)

    @abstractmethod
    def fuse(self, main: Tensor, acoustic: Tensor) -> Tensor:
        """Combines log-probabilities ``(B, N + 1, V)`` of two models; may return any logits."""


def acoustic_log_probs(output: BranchOutput, main: Tensor, temperature: float) -> Tensor:
    """Returns the second model's log-probabilities over the main vocabulary; ``-inf``: not scored.

    Args:
        output: Output of the second model; unused candidates are -1, a score may be ``-inf``.
        main: Log-probabilities of the main model, ``(B, N + 1, V)``; only their shape is used.
        temperature: Divisor of the second model's scores.
    """
    values = output.logits / temperature
    if output.candidates is not None:
        values = values.masked_fill(output.candidates < 0, -torch.inf)
    # a position without any score has no distribution
    logprobs = values.log_softmax(-1).masked_fill(values == -torch.inf, -torch.inf)
    if output.candidates is None:
        return logprobs
    spread = torch.full_like(main, -torch.inf)
    # unused candidates point at token 0, which may be a candidate itself: the larger value stays
    return spread.scatter_reduce(-1, output.candidates.clamp_min(0), logprobs, "amax")


class Late(Fusion):
    """Base of fusions ``(p_L + w p_A) / (1 + w)``; the method `weight` of a subclass returns w."""

    @abstractmethod
    def weight(self, main: Tensor) -> Tensor:
        """Returns w at every position, ``(B, N + 1, 1)``, given main log-probabilities."""

    def fuse(self, main: Tensor, acoustic: Tensor) -> Tensor:
        """Combines both distributions, see `Late`; the result is normalised."""
        weight = self.weight(main)
        return torch.logaddexp(main, weight.log() + acoustic) - weight.log1p()


class Static(Late):
    """Late fusion with the same weight at all positions, ``(p_L + w p_A) / (1 + w)``.

    Args:
        acoustic: Branch of the second model, see `Fusion`.
        weight: Weight w of the second model. With 0 the guide has no effect.
        main_temperature: Divisor of the main model's logits.
        acoustic_temperature: Divisor of the second model's scores.
    """

    def __init__(
        self,
        acoustic: BranchSpec,
        weight: float = 0.5,
        main_temperature: float = 1.0,
        acoustic_temperature: float = 1.0,
    ) -> None:
        super().__init__(acoustic, main_temperature, acoustic_temperature)
        self.fixed = float(not_negative("weight", weight))
        self.neutral = self.fixed == 0

    def weight(self, main: Tensor) -> Tensor:
        """Returns the same weight at all positions, ``(B, N + 1, 1)``."""
        return torch.full_like(main[..., :1], self.fixed)


class Shallow(Fusion):
    """Shallow fusion, ``log p_L + weight * log p_A``.

    Args:
        acoustic: Branch of the second model, see `Fusion`.
        weight: Weight of the second model. With 0 the guide has no effect.
        main_temperature: Divisor of the main model's logits.
        acoustic_temperature: Divisor of the second model's scores.
    """

    def __init__(
        self,
        acoustic: BranchSpec,
        weight: float = 0.5,
        main_temperature: float = 1.0,
        acoustic_temperature: float = 1.0,
    ) -> None:
        super().__init__(acoustic, main_temperature, acoustic_temperature)
        self.weight = float(not_negative("weight", weight))
        self.neutral = self.weight == 0

    def fuse(self, main: Tensor, acoustic: Tensor) -> Tensor:
        """Adds weighted log-probabilities; tokens that either model excludes stay excluded."""
        return main + self.weight * acoustic


@dataclass(frozen=True, eq=False)
class Given:
    """Inputs of the second model for one row.

    Attributes:
        features: Input of its encoder: a tensor without batch dimension that has the same shape in
            all rows of a call; or tensors by name, with a batch dimension of 1 and any length.
        prompt: First token ids of its decoder; their number is the same in all rows of a call.
    """

    features: Tensor | Inputs
    prompt: tuple[int, ...]


class Choices:
    """Records the tokens that each model alone would choose at every generated position.

    Args:
        call: The generation call.

    Attributes:
        kept: For each row and position, the main model's token and the second model's tokens.
    """

    def __init__(self, call: Call) -> None:
        self.kept: list[list[tuple[int, frozenset[int]]]] = [[] for _ in range(call.batch)]
        self._call = call
        self._seen: list[list[tuple[int, frozenset[int]]]] = []

    def see(self, main: Tensor, acoustic: Sequence[Sequence[frozenset[int]]]) -> None:
        """Stores both models' choices at all scored positions; ``main`` is ``(B, N + 1)``."""
        rows = zip(main.tolist(), acoustic, strict=True)
        self._seen = [list(zip(*row, strict=True)) for row in rows]

    def keep_first(self) -> None:
        """Keeps the choices for the first token of every row, which follows the prompt."""
        for row, seen in enumerate(self._seen):
            self.kept[row].append(seen[0])

    def commit(self, path: Tensor, count: Tensor) -> None:
        """Keeps the choices at committed positions, given ``path (B, D)`` and ``count (B,)``."""
        for row, (nodes, number) in enumerate(zip(path.tolist(), count.tolist(), strict=True)):
            score_rows = [0, *(node + 1 for node in nodes)][:number]
            self.kept[row] += [self._seen[row][index] for index in score_rows]

    def tokens(self, row: int) -> list[int]:
        """Returns the tokens that a row has generated so far."""
        call = self._call
        ids = call.rows.ids[row, call.prompt_length :]
        return ids[: int(call.rows.length[row])].tolist()

    def select_rows(self, rows: Tensor) -> None:
        """Keeps only the rows ``rows``, in that order."""
        self.kept = [list(self.kept[row]) for row in rows.tolist()]


class SecondModel(BranchRunner):
    """Runs an encoder-decoder with inputs of its own on the tokens that the main model generates.

    Its decoder reads a prompt of its own and then the tokens generated so far. Its encoder reads
    ``mm_inputs["audio"]`` of the call, one `Given` per row. If that is missing, it reads
    ``mm_inputs[name]``, where ``name`` is the model's ``main_input_name`` (``input_features`` for a
    speech recogniser). The methods are those of `mmdecode.engine.contracts.BranchRunner`.

    Args:
        call: The generation call.
        model: The second model.
        prompt: First token ids of its decoder, if the call does not give them.
        ids: Its token id for each id of the main model, ``(V,)``, -1 if it has none; ``None``: both
            models have the same ids.

    Attributes:
        choices: Tokens that each model alone would have chosen.

    Raises:
        InputError: The call has no input for the second model, or not one per row.
        OptionError: The vocabularies differ, and ``ids`` does not translate between them.
    """

    def __init__(
        self, call: Call, model: Any, prompt: Sequence[int], ids: Tensor | None = None
    ) -> None:
        self.branches = ModelRunner(adapter_for(model), [MAIN])
        self.model, self.ids = model, None if ids is None else ids.to(call.device)
        self.choices = Choices(call)
        self._given, self.prompt = what_it_reads(call, model, prompt)
        own = self.branches.adapter.vocab if ids is None else len(ids)
        if own != call.plan.adapter.vocab:
            raise OptionError(
                f"{type(model).__name__} has a vocabulary of {own}, the main model one of "
                f"{call.plan.adapter.vocab}; expected the same, or ids= to translate between them"
            )

    def prefill(self, call: Call, earlier: Mapping[str, BranchOutput]) -> dict[str, BranchOutput]:
        """Runs the encoder on its input, and the decoder on its prompt."""
        inputs = encoded(self.model, self._given)
        found = self.branches.prefill(self._view(call, inputs), {})
        scores = self._scores(found, earlier)
        self.choices.keep_first()
        return scores

    def score(
        self, call: Call, proposal: Proposal, earlier: Mapping[str, BranchOutput]
    ) -> dict[str, BranchOutput]:
        """Scores the last committed token and all drafted tokens, translated to its own ids."""
        own = self._own(proposal.tokens.clamp_min(0)).masked_fill(proposal.tokens < 0, -1)
        found = self.branches.score(self._view(call, {}), replace(proposal, tokens=own), {})
        return self._scores(found, earlier)

    def commit(self, path: Tensor, count: Tensor, chain: bool) -> None:
        """Updates the caches; see `mmdecode.engine.contracts.BranchRunner`."""
        self.branches.commit(path, count, chain)
        self.choices.commit(path, count)

    def select_rows(self, rows: Tensor) -> None:
        """Updates the caches; see `mmdecode.engine.contracts.BranchRunner`."""
        self.branches.select_rows(rows)
        self.choices.select_rows(rows)
        self.prompt = self.prompt[rows]

    def _view(self, call: Call, inputs: Mapping[str, Any]) -> Call:
        """Returns the call as the second model sees it, with its own prompt and token ids."""
        return own_view(
            call, self.prompt, self._own(call.rows.ids[:, call.prompt_length :]), inputs
        )

    def _own(self, tokens: Tensor) -> Tensor:
        """Translates the main model's ids to the second model's; 0 replaces unknown tokens."""
        if self.ids is None:
            return tokens
        return self.ids[tokens.clamp_max(len(self.ids) - 1)].clamp_min(0)

    def _scores(
        self, found: Mapping[str, BranchOutput], earlier: Mapping[str, BranchOutput]
    ) -> dict[str, BranchOutput]:
        logits = found["main"].logits
        if self.ids is not None:
            ids = self.ids.to(logits.device)
            logits = logits[..., ids.clamp_min(0)].masked_fill(ids < 0, -torch.inf)
        best = [[frozenset([t]) for t in row] for row in logits.argmax(-1).tolist()]
        self.choices.see(earlier["main"].logits.argmax(-1), best)
        return {ACOUSTIC: BranchOutput(logits=logits)}


def second_model(model: Any, prompt: Sequence[int], ids: Tensor | None = None) -> BranchSpec:
    """Returns the branch that a `SecondModel` with these arguments runs."""
    build = partial(SecondModel, model=model, prompt=prompt, ids=ids)
    return BranchSpec(name=ACOUSTIC, build=build)


def own_view(call: Call, prompt: Tensor, new: Tensor, inputs: Mapping[str, Any]) -> Call:
    """Returns a copy of the call with another prompt ``(B, P)`` and other generated ids."""
    request = replace(
        call.request,
        prompt_ids=prompt,
        prompt_mask=torch.ones_like(prompt, dtype=torch.bool),
        model_kwargs=inputs,
    )
    rows = replace(call.rows, ids=torch.cat([prompt, new], 1))
    return replace(call, request=request, rows=rows)


def what_it_reads(call: Call, model: Any, prompt: Sequence[int]) -> tuple[Any, Tensor]:
    """Returns raw inputs of a second model, for `encoded`, and its prompts ``(B, P)``.

    Raises:
        InputError: The call has no inputs for the model, or not one entry per row.
    """
    name = model.main_input_name
    given = call.request.inputs.get("audio", call.request.inputs.get(name))
    wanted = call.batch // call.request.num_return_sequences
    if given is None or len(given) != wanted:
        had = "no entry" if given is None else f"{len(given)} entries"
        raise InputError(
            f"{type(model).__name__} scores the tokens too, and the call has {had} for it to "
            f"read; pass mm_inputs={{{name!r}: ...}} with one for each of the {wanted} rows"
        )
    features: Any = given
    prompts = [tuple(prompt)] * wanted
    if all(isinstance(one, Given) for one in given):
        features = [one.features for one in given]
        prompts = [one.prompt for one in given]
        if isinstance(features[0], Tensor):
            features = torch.stack(features)
    rows = torch.tensor(prompts, device=call.device).repeat_interleave(
        call.request.num_return_sequences, 0
    )
    if isinstance(features, Tensor):
        return features.repeat_interleave(call.request.num_return_sequences, 0), rows
    return [one for one in features for _ in range(call.request.num_return_sequences)], rows


def encoded(model: Any, given: Tensor | Sequence[Inputs]) -> dict[str, Any]:
    """Runs the encoder on raw inputs; returns the inputs of the decoder by name."""
    encoder = model.get_encoder()
    weight = next(encoder.parameters())
    if isinstance(given, Tensor):
        states = encoder(given.to(weight.device, weight.dtype)).last_hidden_state
        return {"encoder_outputs": (states,)}
    states, mask = encode_unpadded(encoder, given)
    output = ModelOutput(last_hidden_state=states, attention_mask=mask)
    return {"encoder_outputs": output, "attention_mask": mask}
