"""`PromptCache`: beginnings of prompts that are read once and continued many times.

Prompts often begin alike: questions about one image, turns of a chat, branches of a guide. The keys
and values of a beginning, its prefix, are kept and copied into every row that begins with it; only
the rest of the row is read. Two prefixes are the same if they have the same ids and the same inputs
(pixels or features, grids, positions), byte for byte. A prefix ends after its images, since an
image is read as a whole.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from mmdecode._compat import attention_implementation
from mmdecode.engine.adapter import Adapter, Prompt
from mmdecode.engine.cache import Slots
from mmdecode.errors import OptionError

BYTES = 2**30
"""Default size of a cache, in bytes."""


def refuse_no_cache(given: Any) -> None:
    """Refuses what is neither a `PromptCache` nor ``None``.

    Raises:
        OptionError: It is neither.
    """
    if given is not None and not isinstance(given, PromptCache):
        size = f"max_bytes={given}" if type(given) is int else ""
        raise OptionError(
            f"prompt_cache={given!r:.80}; expected a mmdecode.PromptCache, such as "
            f"PromptCache({size})"
        )


class RowPrompt(NamedTuple):
    """The prompt of one row.

    Attributes:
        ids: Its ids without padding, ``(n,)``, on the CPU.
        images: Number of tokens up to the end of its last image; 0: it has none.
        content: Digest of the inputs of these tokens.
    """

    ids: Tensor
    images: int
    content: bytes


class KeptDraft(NamedTuple):
    """A drafter's keys and values for a prefix.

    Attributes:
        state: State of the drafter.
        length: Number of its slots.
        slots: Its keys and values, by layer.
    """

    state: ModelState
    length: int
    slots: list[Slots | None]


@dataclass(eq=False)
class Prefix:
    """A prefix that was read.

    Attributes:
        row: The prompt that was read; all of its ids belong to the prefix.
        slots: Keys and values of its tokens, by layer.
        states: Hidden states of its tokens by layer, each ``(n, H)``, where parts asked for them.
        drafts: Keys and values of drafters, by a name of their own.
    """

    row: RowPrompt
    slots: list[Slots | None]
    states: Mapping[int | str, Tensor] = field(default_factory=dict)
    drafts: Mapping[Any, KeptDraft] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def keep_draft(self, name: Any, kept: KeptDraft) -> None:
        """Adds a drafter's keys and values, also while other threads read those of others."""
        self.drafts = {**self.drafts, name: kept}

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.states.values()
        for layers in (self.slots, *(kept.slots for kept in self.drafts.values())):
            for layer in layers:
                yield from layer or ()

    def copy(self) -> Prefix:
        """The same prefix, with storage of its own."""
        states = {key: value.clone() for key, value in self.states.items()}
        return Prefix(self.row, [slots and slots.clone() for slots in self.slots], states)

    def shared_with(self, row: RowPrompt) -> int:
        """Number of its tokens that a row begins with, and may take.

        The last token of a row is always read, since its state decides the next token.
        """
        if row.images != self.row.images or row.content != self.row.content:
            return 0
        count = min(len(self.row.ids), len(row.ids) - 1)
        differ = (self.row.ids[:count] != row.ids[:count]).nonzero()
        count = int(differ[0]) if len(differ) else count
        return count if count >= row.images else 0


class Found(NamedTuple):
    """A prefix that a row begins with, and how many of its tokens the row takes."""

    prefix: Prefix
    tokens: int


class PromptCache:
    """Prefixes of prompts, the least recently used of which are dropped.

    Give one to `mmdecode.generate` as ``prompt_cache``; calls of several models may share it. A
    prefix is used only as long as the model's weights, adapters and attention are what they were.
    It may be used from several threads.

    Args:
        max_bytes: Bytes to keep. A prefix that is larger is not kept, but is still shared by the
            rows of its batch.
        whole: Whether whole prompts are kept, and not only up to the end of their images: for
            chats, in which each turn continues the one before.

    Raises:
        OptionError: ``max_bytes`` is negative.
    """

    def __init__(self, max_bytes: int = BYTES, whole: bool = False) -> None:
        if max_bytes < 0:
            raise OptionError(f"prompt_cache={max_bytes}; expected bytes to keep, or 0 for none")
        self.max_bytes, self.whole = max_bytes, whole
        self._kept: OrderedDict[int, tuple[ModelState, Prefix]] = OrderedDict()
        self._lock = Lock()
        self._next = 0

    @property
    def count(self) -> int:
        """Number of prefixes."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes."""
        return sum(prefix.nbytes for _, prefix in list(self._kept.values()))

    def clear(self) -> None:
        """Drops all prefixes."""
        with self._lock:
            self._kept.clear()

    def holds(self, state: ModelState) -> bool:
        """Whether there is a prefix of a model in this state."""
        with self._lock:
            state = self._known(state)
            return any(kept is state for kept, _ in self._kept.values())

    def find(self, state: ModelState, row: RowPrompt, layers: frozenset[int | str]) -> Found | None:
        """The prefix that has most in common with a row; ``None``: nothing.

        Args:
            state: State of the model.
            row: The row.
            layers: Layers whose hidden states are needed.
        """
        with self._lock:
            state = self._known(state)
            best, key = None, None
            for number, (kept, prefix) in self._kept.items():
                if kept is not state or not layers <= prefix.states.keys():
                    continue
                count = prefix.shared_with(row)
                if count and (best is None or count > best.tokens):
                    best, key = Found(prefix, count), number
            if key is not None:
                self._kept.move_to_end(key)
            return best

    def add(self, state: ModelState, prefix: Prefix) -> Prefix:
        """Keeps a copy of a prefix, if it fits; drops those that it goes on from.

        Returns:
            The copy; the prefix itself if it does not fit.
        """
        if prefix.nbytes > self.max_bytes:
            return prefix
        copy = prefix.copy()
        with self._lock:
            state = self._known(state)
            for number, (kept, other) in [*self._kept.items()]:
                if kept is state and _goes_on(copy, other):
                    del self._kept[number]
            self._kept[self._next] = (state, copy)
            self._next += 1
        self.trim()
        return copy

    def trim(self) -> None:
        """Drops prefixes, the least recently used first, until the rest fit ``max_bytes``."""
        with self._lock:
            while self._kept and self.nbytes > self.max_bytes:
                self._kept.popitem(last=False)

    def _known(self, state: ModelState) -> ModelState:
        """The equal state of a prefix that is kept, if there is one; comparing takes time.

        Prefixes of models that are gone are dropped.
        """
        for number, (kept, _) in [*self._kept.items()]:
            if kept.model() is None:
                del self._kept[number]
        states = {id(kept): kept for kept, _ in self._kept.values()}
        return next((kept for kept in states.values() if kept == state), state)


def _goes_on(prefix: Prefix, other: Prefix) -> bool:
    """Whether a prefix begins with another one, which is then of no more use."""
    n = len(other.row.ids)
    return (
        n <= len(prefix.row.ids)
        and other.row.images == prefix.row.images
        and other.row.content == prefix.row.content
        and other.states.keys() <= prefix.states.keys()
        and bool((other.row.ids == prefix.row.ids[:n]).all())
    )


class ModelState:
    """State of a model that keys and values depend on; equal states read a prompt alike.

    Weights are compared by their addresses, version counters and one value of each.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self.model = ref(model)
        self._parts = (*_parts_of(model), *_values_of(model))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelState) or self.model() is None:
            return False
        return self.model() is other.model() and self._parts == other._parts

    __hash__ = None  # type: ignore[assignment]


_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""Attributes by which peft switches adapters on and off."""


def _parts_of(model: Any) -> Iterator[Any]:
    yield attention_implementation(getattr(model, "config", None))
    kind = next((weight.device.type for weight in model.parameters()), "cpu")
    kind = "cpu" if kind == "meta" else kind
    yield torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    for module in model.modules():
        own = vars(module)
        if "_active_adapter" in own:
            yield repr([own.get(name) for name in _SWITCHES])
        hooks = (*own["_forward_hooks"].items(), *own["_forward_pre_hooks"].items())
        # transformers adds its own in the first pass; they only record
        ours = [key for key, hook in hooks if _home(hook) != "transformers"]
        if ours or "forward" in own:
            yield (*ours, id(own.get("forward")))
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                yield tensor.data_ptr()
                yield 0 if tensor.is_inference() else tensor._version


def _values_of(model: Any) -> Iterator[Any]:
    """The middle value of each weight: writing to ``weight.data`` counts as no new version."""
    groups: dict[Any, list[Tensor]] = {}
    for weight in model.parameters():
        if weight.device.type != "meta" and weight.numel():
            middle = weight.detach()[tuple(size // 2 for size in weight.shape)]
            groups.setdefault((weight.device, weight.dtype), []).append(middle)
    for found in groups.values():
        yield tuple(torch.stack(found).float().tolist())


def _home(hook: Any) -> str:
    return str(getattr(hook, "__module__", "")).partition(".")[0]


def rows_of(adapter: Adapter, prompt: Prompt) -> list[RowPrompt] | None:
    """The prompts of all rows; ``None``: a row's prefix depends on what comes after it."""
    images = torch.zeros_like(prompt.mask)
    if prompt.inputs:
        images = adapter.spans("image", prompt.ids) & prompt.mask
    width = prompt.ids.shape[1]
    order = torch.arange(1, width + 1, device=images.device)
    pads = (width - prompt.mask.sum(1)).tolist()
    ends = (images * order).amax(1).tolist()
    ids = prompt.ids.cpu()
    rows: list[RowPrompt] = []
    for row, (pad, end) in enumerate(zip(pads, ends, strict=True)):
        own = adapter.prefix(prompt, [row], slice(pad, end or width)) if end < width else None
        if own is None or (own.inputs and not end):
            return None
        rows.append(RowPrompt(ids[row, pad:], max(end - pad, 0), digest(own.inputs)))
    return rows


def digest(inputs: Any) -> bytes:
    """Digest of inputs: names, shapes, types and bytes of all tensors."""
    found = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(f"{tuple(value.shape)} {value.dtype}".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            for name, part in value.items():
                found.update(f"{name}:".encode())
                add(part)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for part in value:
                add(part)
        else:
            found.update(repr(value).encode())

    add(inputs)
    return found.digest()
