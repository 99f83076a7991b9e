"""A decoder pass of speech models without the overhead of PyTorch modules (lean step).

At small batch sizes, a decoder of transformers spends more time between tensor operations than in
them: on module calls, inactive dropout, attention dispatch and mask utilities. Here the same
formulas are applied to the same weights in 14 to 20 operations per layer. A model family implements
`LeanAdapter.describe`, which collects the weights of a layer, and `LeanAdapter.embed_at`, which
returns the input of the first layer.

The lean step is used only after two checks. First, the modules must be exactly ``nn.Linear``,
``nn.LayerNorm`` and ``nn.Embedding``, or their int8 forms (`mmdecode.quantization`), without hooks,
other quantisation, offloading or adapters, in evaluation mode, with sdpa attention. Second, once
per model, the lean step and the modules must compute the same states for a small prompt and a small
tree of random tokens. Otherwise the adapter runs the modules.
"""

from __future__ import annotations

import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from mmdecode._compat import attention_implementation
from mmdecode.adapters.products import Product, float_product
from mmdecode.adapters.seq2seq.base import EncoderDecoderAdapter, SourcePast
from mmdecode.engine.adapter import Mask, Prompt
from mmdecode.engine.cache import RaggedCache, RaggedLayer, bucket
from mmdecode.engine.growing_source import SOURCES, GrowingSource, extended_rows
from mmdecode.engine.masks import block_mask
from mmdecode.engine.views import origin
from mmdecode.quantization.attention import NAME as BY_ROWS
from mmdecode.quantization.attention import attend_by_rows
from mmdecode.quantization.foreign import is_foreign
from mmdecode.quantization.models import is_quantized, rounds_activations
from mmdecode.quantization.modules import Int8Embedding, Int8Linear, multiplier
from mmdecode.quantization.source import Int8Source, Int8States

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Norm = tuple[tuple[int, ...], Tensor, Tensor | None, float]
"""Arguments of ``torch.layer_norm`` after its input."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of rotary positions, ``(B, Q, 1, D)`` each; see `rotated`."""


class Source(NamedTuple):
    """Keys and values of the encoder's states, for one layer's cross-attention.

    Attributes:
        keys: ``(B, heads, S, D)``.
        values: ``(B, heads, S, D)``.
        mask: Additive mask, ``(B, 1, 1, S)``; ``None``: no padding.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, heads: int, mask: Tensor | None) -> Source:
        """Splits keys and values ``(B, S, heads * D)`` into heads, contiguous in memory."""
        keys, values = (_heads(x, heads).transpose(1, 2).contiguous() for x in (keys, values))
        return cls(keys, values, mask)

    def attend(self, layer: Layer, queries: Tensor) -> Tensor:
        """Computes the attention output ``(B, Q, heads * D)`` of ``(B, Q, heads, D)`` queries."""
        return attend(layer, queries, self.keys, self.values, self.mask)

    def select_rows(self, rows: Tensor) -> Source:
        """Returns the rows ``rows``."""
        mask = None if self.mask is None else self.mask[rows]
        return Source(self.keys[rows], self.values[rows], mask)


class Layer(NamedTuple):
    """Weights of one decoder layer, collected once per call: reading module attributes is slow.

    Attributes:
        cache_index: Index of the layer in the cache; in a copy of a model that leaves out layers it
            differs from the layer's place.
        heads: Number of heads of self-attention and of cross-attention.
        qkv: Function that computes queries, keys and values, each ``(B, Q, H)``.
        cross_kv: Modules that compute keys and values of cross-attention from encoder states.
        activation: Activation between ``up`` and ``down``.
        scale: Scale of attention scores; ``None``: 1 / sqrt(head width).
        padding: Zeros appended to each head's width during attention.
        by_rows: Whether each query is computed alone, see `mmdecode.quantization.attention`.
        source: These keys and values, or what is read instead of them with int8 weights: `Source`,
            or `mmdecode.quantization.source`. `LeanPast` adds them.
    """

    cache_index: int
    heads: int
    self_norm: Norm
    qkv: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    out: Product
    cross_norm: Norm
    cross_q: Product
    cross_out: Product
    cross_kv: tuple[Any, Any]
    final_norm: Norm
    up: Product
    activation: Callable[[Tensor], Tensor]
    down: Product
    scale: float | None = None
    padding: int = 0
    by_rows: bool = False
    source: Any = None

    def select_rows(self, rows: Tensor) -> Layer:
        """Returns this layer with only the rows ``rows`` of the encoder's states."""
        return self._replace(source=self.source.select_rows(rows))


class LeanPast(SourcePast):
    """The caches that the modules use, and the weights, keys and values for the lean step.

    Args:
        cache: The engine's self-attention cache, whose rows may have different lengths.
        prompt: The prompt with the encoder's states.
        describe: Function that collects the weights of a layer, see `LeanAdapter.describe`.
        rounds: Whether the encoder's states are rounded to int8.
        embed: Function from the encoder's states to what cross-attention reads, see
            `LeanAdapter.embed_source`; ``None``: it reads the states.
    """

    def __init__(
        self,
        cache: RaggedCache,
        prompt: Prompt,
        describe: Callable[[Any], Layer],
        rounds: bool = False,
        embed: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(cache, prompt)
        self._describe, self._rounds, self._embed = describe, rounds, embed
        self._grown: Sequence[GrowingSource | None] = prompt.inputs.get(SOURCES, ())
        self._layers: list[Layer] = []

    def read(self, layers: Iterable[nn.Module]) -> list[Layer]:
        """Returns each layer's weights, cross-attention keys and values; collected at first use."""
        if not self._layers:
            rounded, states = None, self._embed(self.source) if self._embed else self.source
            modules = list(layers)
            described = [self._describe(module) for module in modules]
            grown = self._extended(states, modules[0], described)
            for index, layer in enumerate(described):
                source: Any
                if self._rounds and layer.by_rows:
                    if rounded is None:
                        mask = self.source_mask
                        read = None if mask is None else mask[:, 0, 0] == 0
                        rounded = Int8States.of(states, read)
                    source = Int8Source(rounded, *layer.cross_kv)
                else:
                    if grown:
                        keys, values = grown[index]
                    else:
                        keys, values = (module.forward(states) for module in layer.cross_kv)
                    source = Source.of(keys, values, layer.heads, self.source_mask)
                self._layers.append(layer._replace(source=source))
        return self._layers

    def _extended(
        self, states: Tensor, reader: nn.Module, layers: Sequence[Layer]
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns keys and values ``(B, S, H)`` of each layer; nothing if no source grows."""
        if not any(self._grown) or (self._rounds and layers[0].by_rows):
            return []
        lengths = [states.shape[1]] * len(states)
        if self.source_mask is not None:
            lengths = (self.source_mask[:, 0, 0] == 0).sum(1).tolist()
        projections = [(layer.cross_kv[0].forward, layer.cross_kv[1].forward) for layer in layers]
        return extended_rows(self._grown, states, lengths, reader, projections)

    def reorder_cache(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``, in that order."""
        super().reorder_cache(rows)
        if self._grown and not self._layers:
            self._grown = [self._grown[row] for row in rows.tolist()]
        self._layers = [layer.select_rows(rows) for layer in self._layers]


class LeanAdapter(EncoderDecoderAdapter):
    """Base of adapters of pre-norm encoder-decoders, which use the lean step if its states agree.

    Args:
        model: The whole model.
        num_layers: Number of layers of its decoder.
    """

    takes_positions: ClassVar = True

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        super().__init__(model, num_layers)
        self._lean = False  # until it is compared
        modules = list(self._decoder.modules())
        hooks = [(module._forward_hooks, module._forward_pre_hooks) for module in modules]
        self._hooks = [each for pair in hooks for each in pair]
        self._lean = usable(self._decoder) and agrees(self)

    @staticmethod
    @abstractmethod
    def describe(layer: Any) -> Layer:
        """Collects the weights of a layer."""

    @abstractmethod
    def embed_at(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotation | None]:
        """Returns the first layer's input for ``(B, Q)`` tokens, and the rotation of all layers."""

    def embed_source(self, source: Tensor) -> Tensor:
        """Returns what cross-attention reads, for encoder states ``(B, S, H)``; here the states."""
        return source

    @abstractmethod
    def final_norm(self) -> nn.LayerNorm:
        """Returns the norm after the last layer."""

    @property
    def rounds_source(self) -> bool:
        """Whether encoder states are read in int8, see `mmdecode.quantization.source`."""
        return self._lean and rounds_activations(self.model)

    def open(self, cache: RaggedCache, prompt: Prompt) -> Any:
        """Returns the caches for a prompt; the weights are collected at first use."""
        return LeanPast(cache, prompt, self.describe, self._lean, self.embed_source)

    def steps_unmasked(self, visible: int) -> bool:
        """Whether steps are run without the modules, which may mask by themselves."""
        return self._lean and not any(self._hooks)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the states after the decoder's final norm."""
        if self._lean and not any(self._hooks):
            return self.step(tokens, mask, positions, past)
        return super().forward(tokens, mask, positions, past)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the output matrix."""
        head = self._head
        if not self._lean or head._forward_hooks or head._forward_pre_hooks:
            return super().unembed(hidden)
        return self._logits(hidden)

    def unembed_some(self, ids: Tensor) -> Product | None:
        """Returns the product with some rows of the output matrix, which are copied."""
        head = self._head
        if type(head) is not nn.Linear or not plain(head):
            return None
        bias = None if head.bias is None else head.bias.detach()[ids]
        return float_product(head.weight.detach()[ids], bias)

    @functools.cached_property
    def _logits(self) -> Product:
        head = self._head
        return product(head) if type(head) is nn.Linear and plain(head) else head

    def step(self, tokens: Tensor, mask: Mask, positions: Tensor, past: LeanPast) -> Tensor:
        """Computes the states ``(B, Q, H)`` after the final norm by the lean step.

        Args:
            tokens: Token ids, ``(B, Q)``.
            mask: Additive self-attention mask, ``(B, 1, Q, K)``; ``None``: every token attends to
                all visible slots.
            positions: Positions of the tokens, ``(B, Q)``.
            past: The caches that `open` returned.
        """
        assert mask is None or isinstance(mask, Tensor), "layers of one type"
        hidden, rotation = self.embed_at(tokens, positions)
        for layer in past.read(self._decoder.layers):
            hidden = run_layer(layer, hidden, mask, past.cache.layers[layer.cache_index], rotation)
        return torch.layer_norm(hidden, *norm(self.final_norm()))


def run_layer(
    layer: Layer,
    hidden: Tensor,
    mask: Tensor | None,
    cache: RaggedLayer,
    rotation: Rotation | None = None,
) -> Tensor:
    """Runs one pre-norm layer: self-attention, cross-attention and feed-forward.

    Args:
        layer: Weights of the layer.
        hidden: Input of the layer, ``(B, Q, H)``.
        mask: Additive self-attention mask, ``(B, 1, Q, K)``.
        cache: Self-attention cache of the layer.
        rotation: Rotation of queries and keys; ``None``: positions were added to the embedding.
    """
    heads = layer.heads
    queries, keys, values = layer.qkv(torch.layer_norm(hidden, *layer.self_norm))
    queries, keys = _heads(queries, heads), _heads(keys, heads)
    if rotation is not None:
        queries, keys = rotated(queries, rotation), rotated(keys, rotation)
    keys, values = cache.update(keys.transpose(1, 2), _heads(values, heads).transpose(1, 2))
    hidden = hidden + layer.out(attend(layer, queries, keys, values, mask))

    queries = layer.cross_q(torch.layer_norm(hidden, *layer.cross_norm))
    hidden = hidden + layer.cross_out(layer.source.attend(layer, _heads(queries, heads)))

    x = layer.up(torch.layer_norm(hidden, *layer.final_norm))
    return hidden + layer.down(layer.activation(x))


def attend(
    layer: Layer, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Computes the attention output ``(B, Q, heads * D)`` of ``(B, Q, heads, D)`` queries.

    Keys and values are ``(B, heads, K, D)``.
    """
    queries = queries.transpose(1, 2)
    if layer.padding:
        added = (0, layer.padding)
        queries, keys, values = pad(queries, added), pad(keys, added), pad(values, added)
    if layer.by_rows:
        x = attend_by_rows(queries, keys, values, mask, layer.scale)
    else:
        x = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale)
        x = x.transpose(1, 2)
    if layer.padding:
        x = x[..., : -layer.padding]
    return x.flatten(2)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates ``x (B, Q, heads, D)`` by position; dimensions 2i and 2i + 1 form a pair."""
    cos, sin = rotation
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos + swapped * sin


class Turns(NamedTuple):
    """Rotary frequencies of the dimensions of a head.

    Attributes:
        radians: Angle per position in radians, ``(D,)``, the same for both dimensions of a pair; 0
            for dimensions that are not rotated.
        side: Sign of the sine, ``(D,)``: alternately -1 and 1.
    """

    radians: Tensor
    side: Tensor

    @classmethod
    def of(cls, frequencies: Tensor, width: int) -> Turns:
        """Builds them from the angles of pairs, ``(R / 2,)``, and the width of a head."""
        radians = frequencies.float().repeat_interleave(2)
        side = radians.new_tensor([-1.0, 1.0]).repeat(width // 2)
        return cls(pad(radians, (0, width - len(radians))), pad(side, (0, width % 2)))

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Returns cosines and signed sines at positions ``(B, Q)``."""
        angle = positions[..., None, None] * self.radians
        return angle.cos().to(dtype), (angle.sin() * self.side).to(dtype)


def product(module: Any) -> Product:
    """Returns a linear layer as a function that calls no module."""
    if isinstance(module, Int8Linear):
        multiply = multiplier([module])
        return lambda x: multiply(x)[0]
    return float_product(module.weight, module.bias)


def products(*modules: Any) -> Callable[[Tensor], Any]:
    """Returns a function that applies several linear layers to one input."""
    if all(isinstance(module, Int8Linear) for module in modules):
        return multiplier(modules)
    each = [product(module) for module in modules]
    return lambda x: [one(x) for one in each]


def embedded(module: Any, tokens: Tensor) -> Tensor:
    """Returns rows of an embedding."""
    if isinstance(module, Int8Embedding):
        return module.forward(tokens)
    return module.weight[tokens]


def norm(module: nn.LayerNorm) -> Norm:
    """Returns the arguments of ``torch.layer_norm`` after its input."""
    return module.normalized_shape, module.weight, module.bias, module.eps


def _heads(x: Tensor, heads: int) -> Tensor:
    """Splits ``(B, Q, H)`` into heads ``(B, Q, heads, D)``."""
    return x.view(x.shape[0], x.shape[1], heads, -1)


# Where the lean step may be used


def usable(decoder: Any) -> bool:
    """Whether the decoder's modules can be bypassed: none is hooked, wrapped or patched."""
    if decoder.training or attention_implementation(decoder.config) not in ("sdpa", BY_ROWS):
        return False
    return all(plain(module) for module in decoder.modules())


def plain(module: nn.Module) -> bool:
    """Whether a module is unmodified: no hooks or patches, and weights only in standard layers."""
    holds_weights = bool(module._parameters) and type(module).__module__.startswith("torch.")
    foreign = holds_weights and type(module) not in (nn.Linear, nn.LayerNorm, nn.Embedding)
    foreign |= type(module).__module__.startswith("torch.ao.") or any(
        map(is_foreign, module._parameters.values())
    )
    patched = "forward" in vars(module) or "_hf_hook" in vars(module)
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    if type(module) in (Int8Linear, Int8Embedding):
        return not (patched or hooked)
    ours = ("torch.", "transformers.", "mmdecode.models.")
    wrapped = not type(module).__module__.startswith(ours)
    return not (foreign or patched or hooked or wrapped)


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest allowed difference of the lean step's states, relative to the largest state."""

_checked: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()
"""Result of each model's check, by device, dtype, and whether its weights are int8."""


def agrees(adapter: LeanAdapter) -> bool:
    """Whether the lean step computes the same states as the modules, checked once per model.

    Warns if it does not. The result also holds for copies of the model that share its weights.
    """
    model = origin(adapter.model)
    weight = next(adapter.model.get_decoder().parameters())
    rounded = is_quantized(adapter.model)
    results, kind = _checked.setdefault(model, {}), (weight.device, adapter.model.dtype, rounded)
    if kind in results:
        return results[kind]
    if weight.is_meta or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False  # nothing can be compared here
    why = _difference(adapter)
    if why:
        warn(
            f"{type(model).__name__}: the lean decoder step {why}; the model's own modules are run "
            "instead, which is slower and changes nothing else",
            stacklevel=2,
        )
    if model is adapter.model or rounded:  # other views have fewer layers
        results[kind] = not why
    return not why


def _difference(adapter: LeanAdapter) -> str:
    """Describes how the lean step's states differ from the modules'; empty: they agree."""
    expected = _states(adapter, lambda *inputs: EncoderDecoderAdapter.forward(adapter, *inputs))
    try:
        found = _states(adapter, adapter.step)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"fails ({type(error).__name__}: {error})"
    largest = float(expected.abs().amax())
    worst = float((found - expected).abs().amax())
    if worst <= TOLERANCE.get(adapter.model.dtype, 0.0) * largest:
        return ""
    return f"differs from them by {worst:.2g} in states of up to {largest:.2g}"


@torch.no_grad()
def _states(adapter: LeanAdapter, run: Callable[..., Tensor]) -> Tensor:
    """Computes states of two prompts, one padded, each with a small tree, ``(2, 7, H)``."""
    device, dtype = next(adapter.model.get_decoder().parameters()).device, adapter.model.dtype
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(adapter.vocab, (2, 8), generator=dice).to(device)
    source = torch.randn(2, 6, adapter.source_width, generator=dice).to(device, dtype)
    inputs = {"source": source}
    if adapter.source_is_padded:
        inputs["source_mask"] = torch.arange(6, device=device) < ids.new_tensor([[6], [4]])
        inputs["source"] = source * inputs["source_mask"][..., None]
    mask = torch.arange(4, device=device) >= ids.new_tensor([[0], [1]])
    cache = RaggedCache(adapter.num_layers, 2, device)
    past = adapter.open(cache, Prompt(ids=ids[:, :4], mask=mask, inputs=inputs))
    chain = torch.arange(4, device=device)[None]
    tree = ids.new_tensor([[0, 1, 1, 2]])  # a root, two children of it, and one of the second
    tree_ancestors = ids.new_tensor(
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    ).bool()[None]
    top = None if adapter.max_positions is None else adapter.max_positions - 1
    found, visible = [], bucket(8)
    for begin, depths, ancestors in ((0, chain, None), (4, tree, tree_ancestors)):
        start = torch.full_like(ids[:, 0], begin)
        cache.set_start(start)
        cache.open(visible)
        seen = block_mask(start, past.pads, depths, ancestors, visible, dtype, None)
        positions = ((start - past.pads)[:, None] + depths).clamp(min=0, max=top)
        found.append(run(ids[:, begin : begin + 4], seen, positions, past))
    return torch.cat(found, 1)[:, 1:].float()  # the first is padding in one of them
