"""`Table`, a model for tests whose logits depend exactly, without rounding, on the prefix.

Logits of a real model differ by rounding between one long pass and many short ones, so drafted and
undrafted output may differ although the algorithm is right. In a table model every state is an
integer: a hash of token and position is written to the engine's cache; each layer sums the hashes
in all unmasked cache slots, modulo 2^64, and hashes the sum; the last hash gives the logits. A
wrong mask, position or cache slot changes the logits; batch size, width of a pass and order of
summation do not.

`Table.target_logits` computes the same function from a plain list of tokens, in Python integers and
without the engine. Tests use it for the expected distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from mmdecode.adapters.audio.whisper_timestamps import NODE_PROCESSORS
from mmdecode.engine.adapter import Adapter, BranchSpec, Prompt
from mmdecode.engine.call import Call, Plan
from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.engine.processors import NodeProcessors
from mmdecode.engine.trace import Round
from mmdecode.errors import IncompatibleError
from mmdecode.models.image_layout import Layout

if TYPE_CHECKING:
    from mmdecode.decoder import Decoder
    from mmdecode.engine.cache import RaggedCache

LAYERS = 2
NOTHING = 1001
"""Value that replaces the salt in a branch with the transform ``"unconditional"``."""
_BITS = 50  # float64 holds such integers exactly
_KEEP = (1 << _BITS) - 1
_WORD = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_RESOLUTION = 1 << 20


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _FIRST) & _WORD
    x = ((x ^ (x >> 27)) * _SECOND) & _WORD
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _mix_tensor(x: Tensor) -> Tensor:
    """Computes `_mix` for int64 tensors, as if they were unsigned."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_FIRST)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_SECOND)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


class TableLayer(nn.Module):
    """A layer that sums hashes instead of attending; states are integers below 2^50, in float64."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, hidden_states: Tensor, mask: Tensor, past: Any) -> Tensor:
        """Returns the hashed sums of the visible cache slots, ``(R, Q, 1)`` float64.

        Args:
            hidden_states: States of Q new tokens in each of R rows, integers in float64.
            mask: Additive attention mask, ``(R, 1, Q, slots)``: 0 where a slot is visible.
            past: Cache; the new tokens are written to its layer ``self.index``.
        """
        key = hidden_states[:, None]  # (R, 1, Q, 1)
        value = (_mix_tensor(key.long() + 1) & _KEEP).double()
        keys, values = past.update(key, value, self.index)
        slots = _mix_tensor(keys.long() + 3 * values.long() + 1)[:, 0, :, 0]  # empty ones count too
        total = ((mask[:, 0] == 0) * slots[:, None]).sum(-1)
        return (_mix_tensor(total) & _KEEP).double()[..., None]


class Table(nn.Module):
    """A model whose logits are an exact function of tokens, positions and a number, the salt.

    Args:
        vocab: Size V of the vocabulary; keep it small.
        seed: Seed of the hashes: another seed is another model.
        sharpness: Logits are between ``-sharpness`` and ``sharpness``, before ``bias``.
        bias: Numbers added to the logits of single tokens, for example of the end token.
        blind: Whether logits depend on positions alone, not on tokens.
        layout: Layout of image codes among the generated tokens, for tests of image models.

    A call may pass ``salt``, int64 ``(B,)``: it stands for the image or audio of a real model. A
    guide's branch, a further pass with a changed input, changes the salt: the transform ``"salt"``
    adds the branch's option ``by`` to it, ``"unconditional"`` replaces it by `NOTHING`.
    """

    dtype = torch.float64

    def __init__(
        self,
        vocab: int = 5,
        seed: int = 0,
        sharpness: float = 2.0,
        bias: dict[int, float] | None = None,
        blind: bool = False,
        layout: Layout | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.config = SimpleNamespace(
            model_type="mmdecode_table", vocab_size=vocab, is_encoder_decoder=False
        )
        self.vocab, self.seed, self.sharpness, self.blind = vocab, seed, sharpness, blind
        self.offsets: torch.Tensor
        self.register_buffer("offsets", torch.zeros(vocab, dtype=torch.float64))
        for token, value in (bias or {}).items():
            self.offsets[token] = value
        self.decoder_layers = nn.ModuleList(TableLayer(index) for index in range(LAYERS))
        self._distribution = lru_cache(maxsize=None)(self._distribution_of)
        self._sums = lru_cache(maxsize=None)(self._sums_of)

    def embed(self, tokens: Tensor, positions: Tensor, salt: Tensor) -> Tensor:
        """Hashes each token with its position and salt, ``(R, Q)`` to ``(R, Q, 1)``."""
        seen = torch.zeros_like(tokens) if self.blind else tokens
        word = _mix_tensor(seen + 1) + _mix_tensor(positions + 1001) + salt[:, None]
        return (_mix_tensor(word + self.seed * 7919) & _KEEP).double()[..., None]

    def logits(self, states: Tensor) -> Tensor:
        """Maps states ``(..., 1)`` to logits ``(..., V)``, float32, in exact arithmetic."""
        tokens = torch.arange(self.vocab, device=states.device)
        word = _mix_tensor(states.long() + _mix_tensor(tokens + 17)) & (_RESOLUTION - 1)
        return (self._scale(word.double()) + self.offsets).float()

    def _scale(self, word: Any) -> Any:
        return (word * (2 / _RESOLUTION) - 1) * self.sharpness

    def target_logits(self, tokens: Sequence[int], salt: int = 0, layers: int = LAYERS) -> Tensor:
        """Computes the logits ``(V,)`` after a plain list of tokens, without engine or cache.

        Args:
            tokens: The whole prefix.
            salt: Salt of the row.
            layers: Number of layers to run.
        """
        return self._distribution(tuple(tokens), salt, layers)

    def _distribution_of(self, tokens: tuple[int, ...], salt: int, layers: int) -> Tensor:
        state = self.output(self._sums(tokens, salt)[layers - 1])
        words = [
            _mix((state + _mix(token + 17)) & _WORD) & (_RESOLUTION - 1)
            for token in range(self.vocab)
        ]
        offsets = self.offsets.tolist()
        return torch.tensor([self._scale(w) + o for w, o in zip(words, offsets, strict=True)])

    def output(self, total: int) -> int:
        """Returns the output of a layer whose sum over the cache is ``total``, as an integer."""
        return _mix(total) & _KEEP

    def _sums_of(self, tokens: tuple[int, ...], salt: int) -> tuple[int, ...]:
        """Returns the sum of each layer over the prefix."""
        if not tokens:
            return (0,) * LAYERS
        before = self._sums(tokens[:-1], salt)
        word = _mix(1 + (0 if self.blind else tokens[-1])) + _mix(len(tokens) - 1 + 1001) + salt
        state = _mix((word + self.seed * 7919) & _WORD) & _KEEP
        sums = []
        for total in before:
            value = _mix(state + 1) & _KEEP
            total = (total + _mix((state + 3 * value + 1) & _WORD)) & _WORD
            sums.append(total)
            state = self.output(total)
        return tuple(sums)


class TablePast:
    """The engine's key-value cache, together with the salt of each row."""

    def __init__(self, cache: RaggedCache, salt: Tensor) -> None:
        self.cache, self.salt = cache, salt

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Writes new keys and values of a layer, and returns all of that layer."""
        return self.cache.update(key, value, layer)

    def reorder_cache(self, rows: Tensor) -> None:
        """Selects rows by index, as beam search does."""
        self.cache.reorder_cache(rows)
        self.salt = self.salt[rows]


class TableAdapter(Adapter):
    """Adapter of `Table`; it prefills prompts one by one, so that tests cover joining caches."""

    summary = "the exact table models of mmdecode.testing"
    model_types = ("mmdecode_table",)
    num_layers = LAYERS
    shows_inside = True

    def __init__(self, model: Table) -> None:
        self.model, self.vocab, self.layout = model, model.vocab, model.layout

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """Returns the prompt of a branch, whose only other input is the salt of each row."""
        if spec.transform not in (None, "salt", "unconditional"):
            raise IncompatibleError.between(
                f"branch {spec.name!r} with transform {spec.transform!r}",
                "a table model",
                "it has no input but its salt",
                "use the transform 'salt' with the option by=...",
            )
        prompt = super().prompt(call, replace(spec, transform=None))
        salt = call.request.model_kwargs.get("salt")
        salt = torch.zeros_like(call.rows.length) if salt is None else salt
        if spec.transform == "salt":
            salt = salt + int(spec.transform_options["by"])
        elif spec.transform == "unconditional":
            salt = torch.full_like(salt, NOTHING)
        return replace(prompt, inputs={"salt": salt})

    def join(self, pasts: Sequence[TablePast], cache: RaggedCache) -> TablePast:
        """Returns the joined cache with the concatenated salts of its parts."""
        return TablePast(cache, torch.cat([past.salt for past in pasts]))

    def open(self, cache: RaggedCache, prompt: Prompt) -> TablePast:
        """Returns the cache together with the salts of the prompt."""
        return TablePast(cache, prompt.inputs["salt"])

    def forward(self, tokens: Tensor, mask: Any, positions: Tensor, past: TablePast) -> Tensor:
        """Returns the states after the last layer, ``(R, Q, 1)``: integers in float64."""
        states = self.model.embed(tokens, positions, past.salt)
        for layer in self.model.decoder_layers:
            states = layer(states, mask, past)
        return states

    def head(self, hidden: Tensor) -> Tensor:
        """Maps states ``(..., 1)`` to logits ``(..., V)``."""
        return self.model.logits(hidden)

    def node_processors(self) -> NodeProcessors:
        """Returns Whisper's timestamp rules, so that they are tested with exact logits too."""
        return NODE_PROCESSORS

    def norm(self, hidden: Tensor) -> Tensor:
        """Returns the states unchanged: a table has no final norm."""
        return hidden

    def layers(self) -> Sequence[nn.Module]:
        """Returns the layers of the table."""
        return list(self.model.decoder_layers)


def decode(
    model: Any,
    ids: Tensor,
    decoder: Decoder,
    *,
    mask: Tensor | None = None,
    processors: Iterable[Any] = (),
    criteria: Iterable[Any] = (),
    eos: int | list[int] | None = None,
    max_new_tokens: int = 12,
    do_sample: bool = False,
    request: Any = None,
    inputs: dict[str, Any] | None = None,
    mm_inputs: dict[str, Any] | None = None,
    trace: list[list[Round]] | None = None,
    **config: Any,
) -> Any:
    """Calls a decoder on a table model as ``generate`` would.

    Args:
        model: A `Table`, or any model with an adapter.
        ids: Prompts, padded on the left, ``(B, P)``.
        decoder: Decoder under test.
        mask: True where the prompt is not padding.
        processors: Logits processors, in order.
        criteria: Stopping criteria besides length and end-of-sequence.
        eos: Tokens that end a row.
        max_new_tokens: Maximum number of new tokens of a row.
        do_sample: Whether to sample.
        request: Names of the rows, from which their sampling noise is derived.
        inputs: Further keyword arguments of the model, such as ``salt``.
        mm_inputs: Inputs before preprocessing (images, audio), for guides.
        trace: A list to which the rounds of every row are added.
        **config: Further fields of the generation configuration.

    Returns:
        The decoder's result; rows are padded with the id V, which is outside the vocabulary.
    """
    length = ids.shape[1] + max_new_tokens
    generation_config = GenerationConfig(
        max_length=length,
        eos_token_id=eos,
        pad_token_id=model.config.vocab_size,
        do_sample=do_sample,
        **config,
    )
    stop: list[Any] = [MaxLengthCriteria(length)]
    if eos is not None:
        stop.append(EosTokenCriteria(eos))
    return decoder(
        model,
        ids,
        logits_processor=LogitsProcessorList(processors),
        stopping_criteria=StoppingCriteriaList([*stop, *criteria]),
        generation_config=generation_config,
        mm_request=request,
        mm_inputs=mm_inputs,
        mm_trace=trace,
        attention_mask=torch.ones_like(ids) if mask is None else mask.to(ids.dtype),
        **(inputs or {}),
    )


def new_tokens(sequences: Tensor, width: int, pad: int) -> list[list[int]]:
    """Returns the generated tokens of each row, without the padding after its end."""
    return [[t for t in row if t != pad] for row in sequences[:, width:].tolist()]


def left_pad(prompts: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Pads prompts on the left; returns ids ``(B, P)`` and their mask.

    The default padding id, 0, is also an ordinary token, so that code that reads padding is found.
    """
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(p)) + list(p) for p in prompts]
    mask = [[False] * (width - len(p)) + [True] * len(p) for p in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def call_of(prompts: Sequence[Sequence[int]], adapter: Any = None, **options: Any) -> Call:
    """Makes a `Call` for ``prompts``, before its first round; options are those of `Call.of`."""
    return Call.of(*left_pad(prompts), plan=Plan(adapter=adapter), **options)


Choice = Callable[[Tensor, int], int]


def greedy(scores: Tensor, position: int) -> int:
    """Returns the id with the highest score; of equal scores the lowest id."""
    return int(scores.argmax())


def coupled(seed: int, request: Any) -> Choice:
    """Makes a function that samples by Gumbel-max, with the engine's noise of row ``request``."""
    noise = Noise.of(seed, [request_key(request, 0)])

    def choose(scores: Tensor, position: int) -> int:
        return int(noise.sample(scores[None, None], torch.tensor([[position]]), Role.TARGET))

    return choose


def plain_loop(
    distribution: Callable[[list[int]], Tensor],
    prompt: Sequence[int],
    choose: Choice = greedy,
    *,
    padding: Sequence[int] = (),
    processors: Iterable[Any] = (),
    criteria: Iterable[Any] = (),
    eos: Iterable[int] = (),
    max_new_tokens: int = 12,
) -> list[int]:
    """Generates token by token on plain lists, without the engine; the reference for tests.

    Args:
        distribution: Function from a list of tokens to next-token scores ``(V,)``, such as
            `Table.target_logits` or a guide's formula.
        prompt: Prompt without padding.
        choose: Function from processed scores ``(V,)`` and index of the new token to a token.
        padding: Ids left of the prompt, which only processors and criteria get to see.
        processors: Logits processors, called with padding, prompt and new tokens.
        criteria: Stopping criteria, called with the same tokens.
        eos: Tokens that end the row.
        max_new_tokens: Maximum number of new tokens.

    Returns:
        The new tokens.
    """
    new: list[int] = []
    while len(new) < max_new_tokens:
        prefix = [*prompt, *new]
        scores = distribution(prefix)[None]
        for processor in processors:
            scores = processor(torch.tensor([[*padding, *prefix]]), scores)
        new.append(choose(scores[0], len(new)))
        ids = torch.tensor([[*padding, *prompt, *new]])
        if new[-1] in set(eos) or any(bool(c(ids, None)) for c in criteria):
            break
    return new
