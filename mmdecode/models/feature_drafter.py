"""Base of feature drafters (EAGLE and others): small models that read a target's hidden states.

Input row t pairs the target's state of token t with the embedding of token t + 1; from these the
drafter computes a state that predicts token t + 2. The drafter's state replaces the target's in the
next row, so that it can draft several tokens without the target. A subclass of `FeatureDrafter`
defines which states are read, how rows of images are processed, the forward pass and the logits.
`mmdecode.draft.features` drafts with any subclass, and `mmdecode.train.drafters.trainer` trains it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mmdecode.checkpoints import local_path
from mmdecode.errors import InputError, UnsupportedModelError
from mmdecode.runs.files import write_file, write_folder
from mmdecode.weights import fill, read_weights

Level = int | str
"""Layer whose states are read, a key of `mmdecode.engine.contracts.BranchOutput.hidden`."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Input rows of a drafter in one pass.

    Attributes:
        embeds: Embedding of the token after the row's token, ``(B, Q, E)``.
        features: State of the row's token, ``(B, Q, H)``: the target's state after `fuse`, or the
            drafter's own.
        positions: Position of the row's token, ``(B, Q)``, or in time, height and width, ``(B, 3,
            Q)``.
        kept: Mask of the rows that are no padding and that later rows may attend to, ``(B, Q)``;
            ``None``: all rows.
        images: Number, from 1, of the image that the row's embedding belongs to, ``(B, Q)``; 0:
            text. ``None``: all rows are text.
        carried: Prompt summary that the drafter keeps for later rows, ``(B, 1 or Q, C)``.
    """

    embeds: Tensor
    features: Tensor
    positions: Tensor
    kept: Tensor | None = None
    images: Tensor | None = None
    carried: Tensor | None = None

    @classmethod
    def stacked(cls, parts: Sequence[Rows]) -> Rows:
        """Stacks prompts of several guide branches, row by row, padded on the left to one width."""
        width = max(part.embeds.shape[1] for part in parts)

        def rows(name: str, *after: int) -> Tensor:
            found = [getattr(part, name) for part in parts]
            room = [width - part.embeds.shape[1] for part in parts]
            return torch.cat(
                [F.pad(one, (*after, left, 0)) for one, left in zip(found, room, strict=True)]
            )

        return cls(
            embeds=rows("embeds", 0, 0),
            features=rows("features", 0, 0),
            positions=rows("positions"),
            kept=rows("kept"),
            images=rows("images"),
        )

    def part(self, rows: Tensor | None, columns: slice) -> Rows:
        """Returns some columns of some rows ``(G,)``; ``None``: of all rows."""

        def cut(values: Tensor) -> Tensor:
            return (values if rows is None else values[rows])[:, columns]

        def cut_given(values: Tensor | None) -> Tensor | None:
            return None if values is None else cut(values)

        positions = self.positions if rows is None else self.positions[rows]
        carried = self.carried
        if carried is not None and carried.shape[1] > 1:
            carried = cut(carried)
        elif carried is not None and rows is not None:
            carried = carried[rows]
        return replace(
            self,
            embeds=cut(self.embeds),
            features=cut(self.features),
            positions=positions[..., columns],
            kept=cut_given(self.kept),
            images=cut_given(self.images),
            carried=carried,
        )

    def packed(self) -> tuple[Rows, Tensor]:
        """Returns the kept rows, right-aligned, and the padding slots before them, ``(B,)``.

        Synchronises with the device to read the largest number of kept rows.
        """
        assert self.kept is not None and self.images is not None
        count = self.kept.sum(1)
        width = int(count.max())
        # a stable sort puts rows that are left out first and keeps the order of the rest
        order = self.kept.long().argsort(dim=1, stable=True)[:, self.kept.shape[1] - width :]
        return self.gathered(order), width - count

    def gathered(self, order: Tensor) -> Rows:
        """Returns the rows ``order (B, Q)``, which are numbered along the second axis."""

        def moved(rows: Tensor) -> Tensor:
            return rows.gather(1, order[..., None].expand(-1, -1, rows.shape[-1]))

        positions = self.positions
        index = order if positions.ndim == 2 else order[:, None].expand(-1, 3, -1)
        carried = self.carried
        if carried is not None and carried.shape[1] > 1:
            carried = moved(carried)
        return replace(
            self,
            embeds=moved(self.embeds),
            features=moved(self.features),
            positions=positions.gather(-1, index),
            kept=None if self.kept is None else self.kept.gather(1, order),
            images=None if self.images is None else self.images.gather(1, order),
            carried=carried,
        )


class Rotary:
    """Computes rotary cosines and sines of the type that a configuration names.

    With M-RoPE (Qwen2-VL), each frequency uses one of three positions: time, height or width.

    Raises:
        UnsupportedModelError: Frequencies depend on the length of the input, or the sections of
            M-RoPE are interleaved.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        sections = given.get("mrope_section")
        if given.get("mrope_interleaved"):
            raise UnsupportedModelError(
                "the drafter interleaves its sections of M-RoPE, and only consecutive sections are "
                "supported; use a drafter with 1-D positions"
            )
        self.sections = None if sections is None else tuple(sections)
        names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
        shape = {name: config[name] for name in names if config.get(name) is not None}
        rope = {k: v for k, v in given.items() if not k.startswith("mrope")}
        kind = rope.pop("type", None) or rope.pop("rope_type", None) or "default"
        kind = "default" if kind == "mrope" else kind
        if kind == "longrope" or "dynamic" in kind:
            raise UnsupportedModelError(
                f"the drafter's rotary form is {kind!r}, whose frequencies change with the length "
                "of a pass; use a drafter with another form"
            )
        theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        rope |= {"rope_type": kind, "rope_theta": theta}
        inner = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters=rope))
        self.scaling: float = inner.attention_scaling
        # not a buffer: a copy in half precision must not round frequencies
        self._frequencies = {torch.device("cpu"): inner.inv_freq.float()}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, ``(B, Q, D)``, of positions ``(B, Q)`` or ``(B, 3, Q)``."""
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        angles = positions[..., None].float() * self._frequencies[device]
        if positions.ndim == 3:
            parts = angles.split(self.sections, dim=-1)
            angles = torch.cat([part[:, axis % 3] for axis, part in enumerate(parts)], -1)
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


class Attention(nn.Module):
    """Grouped-query self-attention with a cache.

    Args:
        config: Sizes, as in ``config.json``.
        index: Index of the layer in the cache.
        inputs: Width of the input; ``None``: the hidden size.
    """

    def __init__(self, config: Mapping[str, Any], index: int = 0, inputs: int | None = None):
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        self.dim = config.get("head_dim") or width // heads
        self.index, self.grouped = index, groups != heads
        inputs = inputs or width
        bias = bool(config.get("qkv_bias") or config.get("attention_bias"))
        self.q_proj = nn.Linear(inputs, heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(inputs, groups * self.dim, bias=bias)
        self.v_proj = nn.Linear(inputs, groups * self.dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.dim, width, bias=bool(config.get("attention_bias")))

    def forward(
        self, states: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, past: Any
    ) -> Tensor:
        """Maps ``(B, Q, inputs)`` to ``(B, Q, H)``.

        ``mask`` is additive, ``(B, 1, Q, K)``; ``None``: each token attends to those before it.
        """
        query, key, value = (
            part(states).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        key, value = past.update(key, value, self.index)
        found = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=self.grouped
        )
        return self.o_proj(found.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Llama's gated feed-forward part.

    Args:
        config: Sizes, as in ``config.json``.
        outputs: Width of the output; ``None``: the hidden size.
    """

    def __init__(self, config: Mapping[str, Any], outputs: int | None = None) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, outputs or width, bias=False)

    def forward(self, states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Maps ``(..., H)`` to ``(..., outputs)``; the gate is computed from ``gate``, if given."""
        gate = states if gate is None else gate
        return self.down_proj(F.silu(self.gate_proj(gate)) * self.up_proj(states))


class Norm(nn.RMSNorm):
    """Root-mean-square norm in the dtype of its weight, also under autocast."""

    def forward(self, states: Tensor) -> Tensor:
        """Normalises states ``(..., H)``."""
        return super().forward(states.to(self.weight.dtype))


def norm_of(config: Mapping[str, Any], width: int | None = None) -> nn.RMSNorm:
    """Makes a root-mean-square norm; ``width`` is by default the hidden size."""
    return Norm(width or config["hidden_size"], eps=config.get("rms_norm_eps", 1e-6))


class SavedDrafter(nn.Module):
    """Base class of a drafter that is saved as ``config.json`` and weights.

    Attributes:
        config: Content of ``config.json``.
    """

    kind: ClassVar[str]
    """Name of the drafter class in ``config.json`` and in training options."""
    config: dict[str, Any]

    def save_pretrained(self, folder: str | Path, overwrite: bool = False) -> None:
        """Writes ``config.json`` and half-precision weights.

        Raises:
            OptionError: The folder has a file that this package did not write, and ``overwrite`` is
                not set.
        """
        from safetensors.torch import save_file

        config = self.config | {"drafter": self.kind}
        weights = {
            name: (value.half() if value.is_floating_point() else value).cpu().contiguous()
            for name, value in self.state_dict().items()
        }

        def fill(into: Path) -> None:
            save_file(weights, into / "model.safetensors")
            write_file(into / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")

        write_folder(Path(folder), fill, overwrite)


class FeatureDrafter(SavedDrafter):
    """Base class of a drafter that reads a target's hidden states.

    Args:
        config: Content of ``config.json``: sizes of a Llama, and fields of the drafting method.
            Three fields must match the target: ``target_hidden_size``, ``target_num_layers`` and
            ``vocab_size``.
        own_embedding: Whether the drafter has its own embedding table; otherwise the target's is
            used.

    Raises:
        UnsupportedModelError: The configuration has sliding-window attention, an activation other
            than silu, or an unknown rotary type.
    """

    marker: ClassVar[str]
    """Prefix of a key by which published checkpoints of this class are recognised."""
    reads_first: ClassVar[bool] = False
    """Whether the first token, which has no state before it, has a row too."""
    cache_layers: int = 1

    def __init__(self, config: Mapping[str, Any], own_embedding: bool = False) -> None:
        super().__init__()
        if config.get("use_sliding_window"):
            raise UnsupportedModelError(
                "the drafter has sliding-window attention; expected full attention: use another "
                "drafter"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(
                f"the drafter's activation is {config['hidden_act']!r}; expected 'silu'"
            )
        self.config = dict(config)
        self.width: int = config["hidden_size"]
        self.rotary = Rotary(config)
        self.embed_tokens = (
            nn.Embedding(config["vocab_size"], self.target_width) if own_embedding else None
        )

    @property
    def target_width(self) -> int:
        """Width of the target's states."""
        return self.config.get("target_hidden_size") or self.width

    def levels(self, num_layers: int) -> tuple[Level, ...]:
        """Returns the levels whose states a feature concatenates, for a target of that depth."""
        raise NotImplementedError

    def embed(self, ids: Tensor, adapter: Any) -> Tensor:
        """Embeds the target's ids, with the drafter's own table if it has one."""
        if self.embed_tokens is None:
            return embedded(ids, adapter)
        # the id of an image placeholder may lie outside the vocabulary
        return self.embed_tokens(ids.clamp_max(self.embed_tokens.num_embeddings - 1))

    def fuse(self, features: Tensor) -> Tensor:
        """Fuses the target's states, ``(B, Q, levels * E)`` to ``(B, Q, H)``."""
        return features

    def prepare(self, rows: Rows) -> Rows:
        """Processes the prompt's rows; rows whose ``kept`` is false afterwards are dropped."""
        return rows

    def forward(self, rows: Rows, mask: Tensor | None, past: Any) -> Tensor:
        """Computes states ``(B, Q, H)``, which are the features of the rows after.

        Args:
            rows: Input rows.
            mask: Additive attention mask, ``(B, 1, Q, K)``; ``None``: causal.
            past: A cache with ``update(keys, values, layer)``.
        """
        raise NotImplementedError

    def logits(self, states: Tensor, adapter: Any) -> Tensor:
        """Computes logits over the drafter's vocabulary, ``(..., H)`` to ``(..., D)``."""
        return adapter.head(states)

    def target_ids(self) -> Tensor | None:
        """Returns the target's id of each drafter id, ``(D,)``; ``None``: the ids are the same."""
        return None

    @classmethod
    def from_weights(
        cls, config: Mapping[str, Any], weights: Mapping[str, Tensor], name: str | Path
    ) -> FeatureDrafter:
        """Builds the module of a checkpoint, in float32 and evaluation mode.

        Raises:
            InputError: A weight is missing, unknown or of another shape.
        """
        module = cls(config, "embed_tokens.weight" in weights)
        wanted = module.state_dict()
        given = {k: v for k, v in weights.items() if k in wanted or not cls.ignored(k)}
        return fill(module, given, name)

    @staticmethod
    def ignored(key: str) -> bool:
        """Returns whether a tensor of a checkpoint is not loaded: rotary tables, and the head."""
        return key.endswith("rotary_emb.inv_freq") or key == "lm_head.weight"


def embedded(ids: Tensor, adapter: Any) -> Tensor:
    """Embeds the target's ids with the target's table."""
    return adapter.embed(ids)


def load_drafter(name: str | Path, kinds: Mapping[str, type[FeatureDrafter]]) -> FeatureDrafter:
    """Loads a drafter that this package saved, or a published checkpoint.

    Args:
        name: A folder, a Hub id or ``zoo:NAME``.
        kinds: Possible drafter classes by name. A published checkpoint is loaded as the first class
            whose ``marker`` is among its keys.

    Raises:
        InputError: The checkpoint holds no drafter of these classes.
    """
    config, weights = read_weights(local_path(name))
    weights = {key.removeprefix("model."): value for key, value in weights.items()}
    found = kinds.get(config.get("drafter", ""))
    for cls in kinds.values():
        if found is None and any(key.startswith(cls.marker) for key in weights):
            found = cls
    if found is None or "hidden_size" not in config:
        shown = ", ".join(sorted(weights)[:4])
        markers = ", ".join(f"{cls.marker}* of {kind}" for kind, cls in kinds.items())
        raise InputError(
            f"{name} holds no drafter ({shown}); expected config.json and weights {markers}: give "
            "the checkpoint of the drafter, not the bare model"
        )
    return found.from_weights(config, weights, name)
