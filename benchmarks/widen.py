"""Widens a small trained model to the width of a published one, and keeps what it computes.

    python benchmarks/widen.py --model zoo:whisper-synth --width small --out FOLDER

A pass of the wide model costs what a pass of the published shape costs, and predicts what the
small model predicts, so that accepted tokens and times belong to the same run. Function-preserving
transformations: Chen et al. 2016 (Net2Net), arXiv:1511.05641; here for transformers:

- Channels of the residual stream are copied a whole number of times, so that the statistics of
  norms stay. Each weight that reads copies is divided by their number.
- Heads are copied. Wider heads have zeros between their channels, at distances at which rotary
  frequencies stay, and larger queries, since scores are divided by the root of the head's width.
- Additional layers have output projections of zeros. Trained layers are all kept: a model with
  more layers than the shape has keeps its number.
- The output matrix is untied from the embedding and divided in place of the last norm, which
  Medusa heads read.
- Additional ids never win. After a LayerNorm their logit is a constant; after an RMSNorm, which has
  no bias, they share the row of the id that begins a text, which nothing predicts.
- More encoder slots: see `laid_out`, for a model of that many slots, and `repeated`, for the
  decoder alone.

The sums have other orders: logits agree to rounding, and ids do unless two logits are that near.
"""

from __future__ import annotations

import argparse
import copy
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

from mmdecode import registry
from mmdecode.checkpoints import local_path, paired
from mmdecode.draft import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.errors import InputError, OptionError, UnsupportedModelError, run_script
from mmdecode.runs.console import only_our_output
from mmdecode.runs.files import write_folder

PADDED_LOGIT = -100.0
"""Logit of each additional id after a LayerNorm."""
OFFSET = 0.01
"""Difference of two copies of a state by which the logit of additional ids is made."""
GAP, GAP_SCORE, SILENCED = 1000.0, -100.0, -10_000.0
"""Position channel of slots that no query may read, their score, and the input of their GELU."""
LINEAR = {
    "conv1": ("hidden", "mel"),
    "conv2": ("hidden", "hidden"),
    **dict.fromkeys(("fc1", "gate_proj", "up_proj"), ("mlp", "hidden")),
    **dict.fromkeys(("fc2", "down_proj"), ("hidden", "mlp")),
    "q_proj": ("queries", "hidden"),
    **dict.fromkeys(("k_proj", "v_proj"), ("keys", "hidden")),
    **dict.fromkeys(("out_proj", "o_proj"), ("hidden", "queries")),
    **dict.fromkeys(("proj_out", "lm_head"), ("vocab", "hidden")),
}
"""Axes of output and input of a matrix, by the name of its module."""
RESIDUAL = ("out_proj", "o_proj", "fc2", "down_proj")
"""Modules whose output is added to the residual stream."""
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "whisper": {
        "width": ("d_model",),
        "heads": ("encoder_attention_heads", "decoder_attention_heads"),
        "layers": ("decoder_layers",),
        "encoder_layers": ("encoder_layers",),
        "mlp": ("encoder_ffn_dim", "decoder_ffn_dim"),
        "vocab": ("vocab_size",),
        "mel_bins": ("num_mel_bins",),
        "slots": ("max_source_positions",),
    },
    "llama": {
        "width": ("hidden_size",),
        "heads": ("num_attention_heads",),
        "kv_heads": ("num_key_value_heads",),
        "layers": ("num_hidden_layers",),
        "mlp": ("intermediate_size",),
        "vocab": ("vocab_size",),
    },
}
"""Names of sizes in configurations, by model type; all names of a size have one value."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; ``None`` keeps the trained model's.

    Attributes:
        width: Width of the residual stream, a multiple of the trained one.
        heads: Number of attention heads; ``width / heads`` is a multiple of the trained width.
        layers: Number of decoder layers; trained layers are all kept.
        mlp: Width of feed-forward layers.
        vocab: Number of ids.
        encoder_layers: Number of encoder layers.
        kv_heads: Number of key and value heads of a language model.
        mel_bins: Number of mel bins; additional ones have zero weights, see `laid_out`.
        slots: Number of encoder slots, 2 frames each, see `laid_out`.
    """

    width: int
    heads: int
    layers: int
    mlp: int
    vocab: int | None = None
    encoder_layers: int | None = None
    kv_heads: int | None = None
    mel_bins: int | None = None
    slots: int | None = None


SHAPES = {
    "tiny": Shape(384, 6, 4, 1536, 51865, encoder_layers=4),
    "base": Shape(512, 8, 6, 2048, 51865, encoder_layers=6),
    "small": Shape(768, 12, 12, 3072, 51865, encoder_layers=12),
    "turbo": Shape(1280, 20, 4, 5120, 51866, encoder_layers=32),
    "llama-1b": Shape(2048, 32, 16, 8192, 128256, kv_heads=8),
}
"""Published shapes of Whisper, with the mel bins and slots of the trained model, and of Llama 3.2.

Whisper large-v3-turbo reads 128 mel bins; it keeps fewer here, since no feature extractor makes
the trained bins and empty ones. The first convolution is less than 0.1 % of its encoder.
"""


class Axis:
    """The channel that each channel of a wide axis copies.

    Args:
        index: Channels of the trained axis; -1: a channel of zeros.
    """

    def __init__(self, index: Tensor) -> None:
        self.used = (index >= 0).float()
        self.index = index.clamp(min=0)
        self.share = self.used / torch.bincount(index[index >= 0])[self.index]

    def copied(self, weight: Tensor, dim: int = 0) -> Tensor:
        """Copies channels, as what writes to the axis does."""
        return self._scaled(weight, self.used, dim)

    def shared(self, weight: Tensor) -> Tensor:
        """Copies channels of dimension 1 and divides each by its number of copies."""
        return self._scaled(weight, self.share, 1)

    def _scaled(self, weight: Tensor, factor: Tensor, dim: int) -> Tensor:
        sizes = [1] * weight.ndim
        sizes[dim] = -1
        return weight.index_select(dim, self.index) * factor.view(sizes)


def repeated_axis(new: int, old: int) -> Axis:
    """An axis of copies one after another; the last may be cut short."""
    return Axis(torch.arange(new) % old)


def padded_axis(new: int, old: int) -> Axis:
    """The trained axis and zeros after it."""
    return Axis(torch.where(torch.arange(new) < old, torch.arange(new), -1))


class Widening:
    """The way from a trained configuration to a shape.

    Args:
        config: The trained model's.
        shape: The sizes to reach.

    Raises:
        UnsupportedModelError: The architecture is not one of `FIELDS`.
        OptionError: The function cannot be kept at these sizes.
    """

    def __init__(self, config: Any, shape: Shape) -> None:
        if config.model_type not in FIELDS:
            raise UnsupportedModelError(
                f"{config.model_type} cannot be widened; one of {', '.join(FIELDS)} can"
            )
        self.fields = FIELDS[config.model_type]
        self.old = {name: self._size(config, name) for name in self.fields}
        new = {name: getattr(shape, name) or self.old[name] for name in self.fields}
        self.wanted = dict(new)
        for name in ("layers", "encoder_layers", "mel_bins"):
            if name in new:
                new[name] = max(new[name], self.old[name])
        if new.get("slots") != self.old.get("slots"):
            new["mel_bins"] = max(new["mel_bins"], self.old["mel_bins"] + 1)
        self.new = new
        self.config = copy.deepcopy(config)
        for name, fields in self.fields.items():
            for field in fields:
                setattr(self.config, field, new[name])
        self.config.tie_word_embeddings = False
        if hasattr(config, "head_dim"):
            self.config.head_dim = new["width"] // new["heads"]
        self._make_axes()
        self._check(config)

    def _size(self, config: Any, name: str) -> int:
        sizes = {getattr(config, field) for field in self.fields[name]}
        if len(sizes) > 1:
            raise OptionError(f"encoder and decoder differ in {name}: {sorted(sizes)}")
        return sizes.pop()

    def _make_axes(self) -> None:
        old, new = self.old, self.new
        groups = old["heads"] // old.get("kv_heads", old["heads"])
        keys = new.get("kv_heads", new["heads"])
        key_heads = torch.arange(keys) % old.get("kv_heads", old["heads"])
        group = torch.arange(new["heads"] // keys) % groups
        query_heads = (key_heads[:, None] * groups + group).flatten()
        trained, wide = old["width"] // old["heads"], new["width"] // new["heads"]
        self.spread = max(wide // trained, 1)
        inside = torch.full((wide,), -1)
        inside[:: self.spread][:trained] = torch.arange(trained)[:wide]
        self.empty = torch.nonzero((inside < 0).repeat(keys)).view(keys, -1)[:, :1]

        def heads(sources: Tensor) -> Axis:
            index = sources[:, None] * trained + inside
            return Axis(torch.where(inside < 0, inside, index).flatten())

        self.axes = {
            "hidden": repeated_axis(new["width"], old["width"]),
            "mlp": repeated_axis(new["mlp"], old["mlp"]),
            "queries": heads(query_heads),
            "keys": heads(key_heads),
            "vocab": padded_axis(new["vocab"], old["vocab"]),
            "mel": padded_axis(new.get("mel_bins", 1), old.get("mel_bins", 1)),
        }
        self.copies = new["width"] // old["width"]
        self.contrast = torch.zeros(max(self.copies, 2), old["width"])
        self.contrast[-2], self.contrast[-1] = 1, -1
        self.contrast = self.contrast.flatten()

    def _check(self, config: Any) -> None:
        old, new = self.old, self.new
        trained, wide = old["width"] // old["heads"], new["width"] // new["heads"]
        pairs = [("heads", "kv_heads")] if "kv_heads" in new else []
        reasons = {
            f"a width of {new['width']} is no multiple of {old['width']}": new["width"]
            % old["width"],
            f"heads of width {wide} are no multiple of {trained}": wide % trained,
            "an embedding is scaled by the width": getattr(config, "scale_embedding", False),
            "there are fewer query heads for each key head": any(
                new[a] % new[b] or new[a] // new[b] < old[a] // old[b] for a, b in pairs
            ),
            "additional ids need at least two copies": new["vocab"] > old["vocab"]
            and "slots" in new
            and self.copies < 2,
        }
        for name in ("heads", "kv_heads", "mlp", "vocab", "slots"):
            if name in new:
                reasons[f"{new[name]} {name} are fewer than {old[name]}"] = new[name] < old[name]
        if "slots" in new and new["slots"] > old["slots"]:
            reasons["more slots need wider heads and at least two copies"] = (
                self.spread < 2 or self.copies < 2
            )
        if found := [text for text, wrong in reasons.items() if wrong]:
            raise OptionError(f"the function cannot be kept: {'; '.join(found)}")

    @property
    def notes(self) -> list[str]:
        """Sizes that are not those of the shape, in words."""
        found = [
            f"{self.new[name]} {name.replace('_', ' ')} instead of {self.wanted[name]}: "
            "trained layers are all kept"
            for name in ("encoder_layers", "layers")
            if name in self.new and self.new[name] != self.wanted[name]
        ]
        if self.new.get("slots") != self.old.get("slots"):
            found.append("features need laid_out: one of the mel bins marks what is hidden")
        return found

    def layer(self, number: int, stack: str = "layers") -> int:
        """Number of a trained layer in the wide model; additional layers are spread between."""
        return number * self.new[stack] // self.old[stack]

    def weight(self, name: str, weight: Tensor) -> Tensor:
        """A wide weight or bias, from the trained one of that name."""
        *_, module, kind = name.split(".")
        hidden = self.axes["hidden"]
        if module in LINEAR:
            out, source = (self.axes[axis] for axis in LINEAR[module])
            wide = out.copied(weight)
            wide = wide if kind == "bias" else source.shared(wide)
            return wide * self.spread**0.5 if module == "q_proj" else wide
        if module == "embed_tokens":
            return hidden.copied(self.axes["vocab"].copied(weight), 1)
        if module == "embed_positions":
            return hidden.copied(weight, 1)
        if "norm" in module:
            return hidden.copied(weight)
        raise UnsupportedModelError(f"it is not known how {name} is widened")

    def weights(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights of the wide model, by name."""
        found = {}
        for name, weight in trained.items():
            wide = self.weight(name, weight.detach().cpu().float())
            match = re.fullmatch(r"(.*layers\.)(\d+)(\.(?:\w+\.)*(\w+)\.\w+)", name)
            if match is None:
                found[name] = wide
                continue
            stack = "encoder_layers" if ".encoder." in name else "layers"
            number = int(match[2])
            first, end = self.layer(number, stack), self.layer(number + 1, stack)
            for layer in range(first, end):
                additional = layer > first and match[4] in RESIDUAL
                own = torch.zeros_like(wide) if additional else wide.clone()
                found[f"{match[1]}{layer}{match[3]}"] = own
        return found

    @property
    def offset(self) -> Tensor | None:
        """The bias that moves two copies of the last state apart; ``None``: it has no bias."""
        return OFFSET * self.contrast if "slots" in self.new else None

    def pad_rows(self, rows: Tensor, unlikely: int | None) -> None:
        """Fills the rows of additional ids in an output matrix, in place.

        Rows of trained ids, and Medusa heads, read the sum of the two copies that `offset` moves
        apart; there it cancels. The additional rows read their difference, and nothing else.

        Args:
            rows: A wide output matrix.
            unlikely: The id whose row is copied where there is no such bias.
        """
        first = self.old["vocab"]
        if self.new["vocab"] == first:
            return
        if self.offset is not None:
            rows[first:] = PADDED_LOGIT / self.offset.abs().sum() * self.contrast
        elif unlikely is None:
            raise OptionError("more ids need an id that begins a text, and the model has none")
        else:
            rows[first:] = rows[unlikely]

    def open_gaps(self, weights: dict[str, Tensor]) -> None:
        """Makes room for the copies of `laid_out`, and hides the slots between them.

        The position of such a slot is a large difference between two copies of the state, which
        all trained weights cancel. One empty channel of each head turns it into a low score.
        """
        old, new = self.old["slots"], self.new["slots"]
        if new == old:
            return
        positions = weights["model.encoder.embed_positions.weight"]
        table = (GAP * self.contrast).repeat(new, 1)
        for start in starts(new, old):
            table[start : start + old] = positions
        weights["model.encoder.embed_positions.weight"] = table
        weights["model.encoder.conv1.weight"][:, self.old["mel_bins"], 1] = SILENCED
        encoder = "model.encoder."
        for name in [name for name in weights if name.endswith("k_proj.weight")]:
            layer = name.removesuffix("self_attn.k_proj.weight")
            if "encoder_attn." in name:
                self.hide(weights, name, weights[encoder + "layer_norm.weight"])
            elif name.startswith(encoder):
                self.hide(weights, name, weights[layer + "self_attn_layer_norm.weight"])

    def hide(self, weights: dict[str, Tensor], keys: str, norm: Tensor) -> None:
        """Lets an attention layer ignore the slots between copies.

        Args:
            weights: Wide weights; changed in place.
            keys: Name of the layer's key matrix.
            norm: Weight of the norm through which it reads the slots.
        """
        row = GAP_SCORE * self.contrast * norm.sign() / (self.contrast * norm).abs().sum()
        weights[keys][self.empty[:, 0]] = row
        root = (self.new["width"] / self.new["heads"]) ** 0.5
        weights[keys.replace("k_proj.weight", "q_proj.bias")][self.empty[:, 0]] = root


def starts(slots: int, trained: int) -> range:
    """First slots of the copies, with at least one slot between two of them."""
    return range(0, slots - trained + 1, trained + 1)


def laid_out(features: Tensor, config: Any) -> Tensor:
    """Features for a model of more slots: the window again and again, as often as it fits.

    Attention over keys and values that are all repeated is attention over these. Slots between
    the copies, and after the last one, are hidden; a mel bin of its own marks them.

    Args:
        features: Features of the trained model, ``(B, mel, frames)``.
        config: The wide model's.
    """
    rows, bins, frames = features.shape
    slots = config.max_source_positions
    wide = features.new_zeros(rows, config.num_mel_bins, 2 * slots)
    if slots == frames // 2:
        wide[:, :bins] = features
        return wide
    wide[:, bins] = 1
    for start in starts(slots, frames // 2):
        here = slice(2 * start, 2 * start + frames)
        wide[:, :bins, here], wide[:, bins, here] = features, 0
    return wide


def repeated(states: Tensor, slots: int) -> Tensor:
    """Encoder states for a decoder that reads more slots, ``(B, slots, H)``.

    Args:
        states: States ``(B, S, H)``.
        slots: A multiple of S: attention reads each state equally often.

    Raises:
        OptionError: It is not.
    """
    times, rest = divmod(slots, states.shape[1])
    if rest:
        raise OptionError(f"{slots} slots are no multiple of {states.shape[1]}")
    return states.repeat(1, times, 1)


def widen(model: Any, shape: Shape) -> Any:
    """A model of that shape in float32 that predicts what a trained model predicts.

    Args:
        model: A Whisper or Llama of transformers, as trained.
        shape: Its new sizes; see `Widening.notes` for those that are not reached.

    Raises:
        UnsupportedModelError: Another architecture.
        OptionError: The function cannot be kept at these sizes.
    """
    plan = Widening(model.config, shape)
    weights = plan.weights(model.state_dict())
    head = "lm_head.weight" if plan.offset is None else "proj_out.weight"
    plan.pad_rows(weights[head], model.config.bos_token_id)
    if plan.offset is not None:
        if plan.new["vocab"] > plan.old["vocab"]:
            weights["model.decoder.layer_norm.bias"] += plan.offset
        plan.open_gaps(weights)
    wide, report = type(model).from_pretrained(
        None,
        config=plan.config,
        state_dict=weights,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
    )
    if wrong := {name: keys for name, keys in report.items() if keys}:
        raise UnsupportedModelError(f"weights of the wide model do not fit: {wrong}")
    generation = copy.deepcopy(model.generation_config)
    if heads := getattr(generation, "alignment_heads", None):
        generation.alignment_heads = [[plan.layer(layer), head] for layer, head in heads]
    wide.generation_config = generation
    return wide.eval()


def widen_heads(medusa: Medusa, model: Any, shape: Shape) -> Medusa:
    """Medusa heads, and their block, for the widened model.

    Args:
        medusa: Heads of the trained model.
        model: The trained model, as given to `widen`.
        shape: The same shape.
    """
    plan = Widening(model.config, shape)
    hidden, heads = plan.axes["hidden"], medusa.heads
    layers, count = heads.weight.shape[:2]
    own = None if heads.out is None else plan.new["vocab"]
    wide = MedusaHeads(count, layers, plan.new["width"], own)
    with torch.no_grad():
        for layer in range(layers):
            for head in range(count):
                wide.weight[layer, head] = hidden.shared(hidden.copied(heads.weight[layer, head]))
        wide.bias.copy_(hidden.copied(heads.bias, 3))
        if heads.out is not None and wide.out is not None:
            for head, trained_rows in enumerate(heads.out):
                rows = hidden.shared(plan.axes["vocab"].copied(trained_rows))
                plan.pad_rows(rows, model.config.bos_token_id)
                wide.out[head] = rows
    block = None
    if medusa.block is not None:
        block = registry.adapter_class(model.config.model_type).extra_layer(plan.config)
        trained = medusa.block.state_dict()
        weights = {name: plan.weight(name, weight) for name, weight in trained.items()}
        if plan.new.get("slots") != plan.old.get("slots"):
            norm = hidden.copied(model.get_encoder().layer_norm.weight.detach().float())
            plan.hide(weights, "encoder_attn.k_proj.weight", norm)
        block.load_state_dict(weights)
    return Medusa(wide, block, medusa.paths, medusa.nodes, medusa.cpu_nodes)


def load(name: str) -> Any:
    """A trained model by folder, Hub id or zoo name, in float32."""
    path = local_path(name)
    for kind in (AutoModelForSpeechSeq2Seq, AutoModelForCausalLM):
        try:
            model = kind.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
        except ValueError:  # of the other kind
            continue
        return model.eval()
    raise InputError(f"{name} is neither a speech model nor a language model")


FILES = ("tokenizer*", "vocab*", "merges*", "normalizer*", "*processor*", "added*", "special*")
"""Files of a checkpoint that belong to any width."""


def write(name: str, heads: str | None, shape: Shape, folder: Path) -> Widening:
    """Writes a wide checkpoint, with the files of tokenizer and processor, and its heads.

    Args:
        name: The trained model.
        heads: Its Medusa heads, which are written to ``medusa`` in the folder.
        shape: The sizes.
        folder: A new or empty folder.

    Raises:
        InputError: The folder has files.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} has files; give a new folder")
    model = load(name)
    plan = Widening(model.config, shape)
    wide = widen(model, shape)
    drafter = None
    if heads is not None:
        drafter = widen_heads(Medusa.from_pretrained(heads), model, shape)

    def fill(into: Path) -> None:
        wide.save_pretrained(into)
        for pattern in FILES:
            for file in Path(local_path(name)).glob(pattern):
                shutil.copy(file, into / file.name)
        if drafter is not None:
            drafter.save_pretrained(into / "medusa", plan.config.to_dict())

    write_folder(folder, fill)
    return plan


def main() -> None:
    """Command line: writes a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="zoo:whisper-synth")
    parser.add_argument("--heads", help="Medusa heads; default: those that ship with a zoo model")
    parser.add_argument("--width", choices=SHAPES, default="small")
    parser.add_argument("--slots", type=int, help="encoder slots, 1500 as published")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    arguments = parser.parse_args()
    only_our_output()
    began = time.perf_counter()
    heads = arguments.heads
    if heads is None and arguments.model.startswith("zoo:whisper"):
        heads = paired(arguments.model, "medusa")
    shape = replace(SHAPES[arguments.width], slots=arguments.slots)
    plan = write(arguments.model, heads, shape, arguments.out)
    for note in plan.notes:
        print(note)
    print(f"written: {arguments.out}, in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    run_script(main)
