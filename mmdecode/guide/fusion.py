"""Late fusion: a second model's distribution of the next token is combined with the main model's.

Made for a language model that corrects a transcript while a recogniser reads the audio; the
recogniser's distribution is called acoustic here. The second model either scores the same
vocabulary (`SecondModel`), or it answers for candidates alone
(`mmdecode.engine.contracts.BranchOutput.candidates`). Tokens that are no candidates keep the main
probability if probabilities are added, and are excluded if logarithms are added. A position at
which nothing is a candidate follows the main model.

Two fixed combinations, the baselines of `mmdecode.guide.uadf`:

- `Static`: ``p_L + weight * p_A``, as the static late fusion of Chen et al. 2024, arXiv:2402.05457.
- `Shallow`: ``log p_L + weight * log p_A``, as of Gulcehre et al. 2015, arXiv:1503.03535, with the
  roles of the two models exchanged: here the language model is the main one.
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
    """Base of fusions: a second branch, and a temperature for each model.

    Args:
        acoustic: The branch of the second model, called `ACOUSTIC`; see `second_model`.
        main_temperature: Divisor of the main logits, applied before everything else.
        acoustic_temperature: Divisor of the second model's scores.

    The guide has no effect with a second model without weight; it is then not run, and temperatures have no effect.

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
        """Combines log-probabilities ``(B, N + 1, V)`` of two models; need not be normalised."""


def acoustic_log_probs(output: BranchOutput, main: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the second model over the main vocabulary; ``-inf``: not scored.

    Args:
        output: Output of the second model; unused candidates are -1, a score may be ``-inf``.
        main: Main log-probabilities, for their shape ``(B, N + 1, V)``.
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
    """Base of late fusions, ``(p_L + w p_A) / (1 + w)``; subclasses choose w in `weight`."""

    @abstractmethod
    def weight(self, main: Tensor) -> Tensor:
        """Weight at every position, ``(B, N + 1, 1)``, by log-probabilities ``(B, N + 1, V)``."""

    def fuse(self, main: Tensor, acoustic: Tensor) -> Tensor:
        """See `Fusion.fuse`; the result is normalised."""
        weight = self.weight(main)
        return torch.logaddexp(main, weight.log() + acoustic) - weight.log1p()


class Static(Late):
    """Late fusion with one weight everywhere.

    Args:
        acoustic: See `Fusion`.
        weight: w; 0 is neutral.
        main_temperature: See `Fusion`.
        acoustic_temperature: See `Fusion`.
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
        """The same everywhere."""
        return torch.full_like(main[..., :1], self.fixed)


class Shallow(Fusion):
    """Shallow fusion, ``log p_L + weight * log p_A``.

    Args:
        acoustic: See `Fusion`.
        weight: Weight of the second model; 0 is neutral.
        main_temperature: See `Fusion`.
        acoustic_temperature: See `Fusion`.
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
        """See `Fusion.fuse`; tokens that either model excludes are excluded."""
        return main + self.weight * acoustic


@dataclass(frozen=True, eq=False)
class Given:
    """Inputs of a second model for one row.

    Attributes:
        features: Its encoder's input: a tensor without the batch, of one shape in all rows of a
            call; or tensors by name with a batch of 1, of any length.
        prompt: Its decoder's first ids, the same number for every row of a call.
    """

    features: Tensor | Inputs
    prompt: tuple[int, ...]


class Choices:
    """Tokens that each model alone would choose at every kept position.

    Args:
        call: The generation call.

    Attributes:
        kept: For each row and position, the main model's token and the second model's likely ones.
    """

    def __init__(self, call: Call) -> None:
        self.kept: list[list[tuple[int, frozenset[int]]]] = [[] for _ in range(call.batch)]
        self._call = call
        self._seen: list[list[tuple[int, frozenset[int]]]] = []

    def see(self, main: Tensor, acoustic: Sequence[Sequence[frozenset[int]]]) -> None:
        """Notes the tokens of both models at root and nodes, ``(B, N + 1)`` for the main one."""
        rows = zip(main.tolist(), acoustic, strict=True)
        self._seen = [list(zip(*row, strict=True)) for row in rows]

    def keep_first(self) -> None:
        """Keeps those at the first token of every row, for which there is no proposal."""
        for row, seen in enumerate(self._seen):
            self.kept[row].append(seen[0])

    def commit(self, path: Tensor, count: Tensor) -> None:
        """See the base class: tokens after the root and after accepted nodes."""
        for row, (nodes, number) in enumerate(zip(path.tolist(), count.tolist(), strict=True)):
            score_rows = [0, *(node + 1 for node in nodes)][:number]
            self.kept[row] += [self._seen[row][index] for index in score_rows]

    def tokens(self, row: int) -> list[int]:
        """Tokens that the row has generated so far."""
        call = self._call
        ids = call.rows.ids[row, call.prompt_length :]
        return ids[: int(call.rows.length[row])].tolist()

    def select_rows(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``."""
        self.kept = [list(self.kept[row]) for row in rows.tolist()]


class SecondModel(BranchRunner):
    """An encoder-decoder that scores the main model's tokens, given an input of its own.

    It reads the row's generated tokens, after a prompt of its own. Its encoder reads the call's
    ``mm_inputs["audio"]``, a `Given` per row; or, if that is missing, ``mm_inputs[name]`` for
    the model's ``main_input_name``: ``input_features`` for a recogniser. See
    `mmdecode.engine.contracts.BranchRunner`.

    Args:
        call: The generation call.
        model: The second model.
        prompt: Its decoder's first ids, where the call does not give them.
        ids: Its id of each main id, ``(V,)``, -1 where there is none; ``None``: they are the same.

    Attributes:
        choices: Tokens that each model would have chosen.

    Raises:
        InputError: The call brings no input for it, or not one per row.
        OptionError: Its vocabulary is not the main model's.
    """

    def __init__(
        self, call: Call, model: Any, prompt: Sequence[int], ids: Tensor | None = None
    ) -> None:
        self.branches = ModelRunner(adapter_for(model), [MAIN])
        self.model, self.ids = model, ids
        self.choices = Choices(call)
        self._given, self.prompt = what_it_reads(call, model, prompt)
        own = self.branches.adapter.vocab if ids is None else len(ids)
        if own != call.plan.adapter.vocab:
            raise OptionError(
                f"{type(model).__name__} scores a vocabulary of {own}, the main model one of "
                f"{call.plan.adapter.vocab}; expected the same, or the ids that carry one over"
            )

    def prefill(self, call: Call, earlier: Mapping[str, BranchOutput]) -> dict[str, BranchOutput]:
        """Reads its input and its prompt."""
        inputs = encoded(self.model, self._given)
        found = self.branches.prefill(self._view(call, inputs), {})
        scores = self._scores(found, earlier)
        self.choices.keep_first()
        return scores

    def score(
        self, call: Call, proposal: Proposal, earlier: Mapping[str, BranchOutput]
    ) -> dict[str, BranchOutput]:
        """Scores root and nodes, by its own ids."""
        own = self._own(proposal.tokens.clamp_min(0)).masked_fill(proposal.tokens < 0, -1)
        found = self.branches.score(self._view(call, {}), replace(proposal, tokens=own), {})
        return self._scores(found, earlier)

    def commit(self, path: Tensor, count: Tensor, chain: bool) -> None:
        """See `mmdecode.engine.contracts.BranchRunner`."""
        self.branches.commit(path, count, chain)
        self.choices.commit(path, count)

    def select_rows(self, rows: Tensor) -> None:
        """See `mmdecode.engine.contracts.BranchRunner`."""
        self.branches.select_rows(rows)
        self.choices.select_rows(rows)
        self.prompt = self.prompt[rows]

    def _view(self, call: Call, inputs: Mapping[str, Any]) -> Call:
        """The call with the prompt and generated ids of the second model."""
        return own_view(
            call, self.prompt, self._own(call.rows.ids[:, call.prompt_length :]), inputs
        )

    def _own(self, tokens: Tensor) -> Tensor:
        """Its ids of main ids; tokens that it does not have are read as its token 0."""
        if self.ids is None:
            return tokens
        return self.ids[tokens.clamp_max(len(self.ids) - 1)].clamp_min(0)

    def _scores(
        self, found: Mapping[str, BranchOutput], earlier: Mapping[str, BranchOutput]
    ) -> dict[str, BranchOutput]:
        logits = found["main"].logits
        if self.ids is not None:
            logits = logits[..., self.ids.clamp_min(0)].masked_fill(self.ids < 0, -torch.inf)
        best = [[frozenset([t]) for t in row] for row in logits.argmax(-1).tolist()]
        self.choices.see(earlier["main"].logits.argmax(-1), best)
        return {ACOUSTIC: BranchOutput(logits=logits)}


def second_model(model: Any, prompt: Sequence[int], ids: Tensor | None = None) -> BranchSpec:
    """The branch of a `SecondModel`; takes its arguments."""
    build = partial(SecondModel, model=model, prompt=prompt, ids=ids)
    return BranchSpec(name=ACOUSTIC, build=build)


def own_view(call: Call, prompt: Tensor, new: Tensor, inputs: Mapping[str, Any]) -> Call:
    """The call with another prompt ``(B, P)`` and other generated ids."""
    request = replace(
        call.request,
        prompt_ids=prompt,
        prompt_mask=torch.ones_like(prompt, dtype=torch.bool),
        model_kwargs=inputs,
    )
    rows = replace(call.rows, ids=torch.cat([prompt, new], 1))
    return replace(call, request=request, rows=rows)


def what_it_reads(call: Call, model: Any, prompt: Sequence[int]) -> tuple[Any, Tensor]:
    """Raw inputs of a second model, as `encoded` takes them, and its prompts ``(B, P)``.

    Raises:
        InputError: The call brings none, or not one entry per row.
    """
    name = model.main_input_name
    given = call.request.inputs.get("audio", call.request.inputs.get(name))
    wanted = call.batch // call.request.num_return_sequences
    if given is None or len(given) != wanted:
        had = "no entry" if given is None else f"{len(given)} entries"
        raise InputError(
            f"{type(model).__name__} has a say in the tokens, and the call has {had} for it to "
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
    """Encodes raw inputs; returns inputs of the decoder."""
    encoder = model.get_encoder()
    weight = next(encoder.parameters())
    if isinstance(given, Tensor):
        states = encoder(given.to(weight.device, weight.dtype)).last_hidden_state
        return {"encoder_outputs": (states,)}
    states, mask = encode_unpadded(encoder, given)
    output = ModelOutput(last_hidden_state=states, attention_mask=mask)
    return {"encoder_outputs": output, "attention_mask": mask}
