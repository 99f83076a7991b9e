"""`Arena`: storage and CUDA graphs that outlive a call.

A captured round reads and writes tensors at fixed addresses. They belong to the call that captured
it: its rows, caches, and the sessions of its parts. A later call of the same shape reads its prompt
as usual; then its tensors are copied to the addresses of the earlier call, and stay there, and its
rounds replay the earlier call's graphs. Nothing is captured again.

Two calls have the same shape if their states are the same but for the values of tensors: the
objects of the call and its parts are compared, attribute by attribute. A state with an object of
another kind is like itself alone, so whatever is not understood here is captured again.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Lock
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from mmdecode.engine.call import Request
    from mmdecode.engine.loop import Run

SHAPES = 4
"""Shapes whose storage and graphs a decoder keeps."""
MOST_BYTES = 2**31
"""Bytes of storage that a decoder keeps; the last shape is kept in any case."""

_VALUES = (
    *(int, float, str, bytes, type(None), torch.dtype, torch.device, Enum, type),
    *(range, slice, set, frozenset),
)
"""Classes whose objects are compared by value."""
_NOT_CAPTURED = {
    "Request": {"inputs", "model_kwargs"},  # read with the prompt
    "Noise": {"seed"},  # the rows' keys hold it
    "ModelRunner": {"prompts", "paths"},
    "Plan": {"lease"},
    "_Rows": {
        "reserved",
        "offset",
        "slots",
        "visible",
        "room",
        "piece",
        "common",
        "length",
    },  # of a pass
    "Processors": {"paths"},
}
"""Attributes by class that no captured round reads."""
_LARGE = 2**22
"""Elements of a constant tensor from which on it is not compared by its values."""


@dataclass
class State:
    """State of a call between two rounds.

    Attributes:
        structure: Kinds and host values of all objects, in a fixed order.
        own: Tensors that belong to the call: rounds change them, or they depend on the prompt.
        weights: Tensors of drafter and rule, which must be at the same addresses.
        tables: Tensors of other parts, which no round changes: they must have the same values.
        objects: Objects that are compared by identity.
    """

    structure: list[Any] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    tables: list[Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run) -> State:
        """State of a call whose prompt was read."""
        state, walk, call = cls(), _Walk(), run.call
        walk.into(state, (run.drafter, run.rule), state.weights)
        parts = (run.guide, run.processors, run.stopping, call.plan.adapter, type(run.trace))
        walk.into(state, parts, state.tables)
        own = (run.constants, call.rows, call.request, run.runners, run.session)
        walk.into(state, own, state.own)
        walk.into(state, call.plan, state.tables)
        return state

    def like(self, other: State) -> bool:
        """Whether rounds captured for ``other`` do what is right for this state."""
        return (
            self.structure == other.structure
            and all(map(_alike, self.objects, other.objects))
            and all(map(_at_one_address, self.weights, other.weights))
            and all(map(_equal, self.tables, other.tables))
        )

    def move_to(self, other: State) -> None:
        """Copies the call's tensors to the addresses of another state, and leaves them there."""
        for mine, kept in zip(self.own, other.own, strict=True):
            if not _at_one_address(mine, kept):
                _whole(kept).copy_(_whole(mine))
                mine.set_(kept)  # type: ignore[call-overload]

    def part_from(self, given: Iterable[Tensor]) -> None:
        """Gives tensors that share storage with the caller's, or a model's, one of their own."""
        theirs = {_storage(tensor) for tensor in given}
        for model in self.objects:
            if isinstance(model, nn.Module):
                theirs |= {_storage(tensor) for tensor in _tensors_of(model)}
        for mine in self.own:
            if _storage(mine) in theirs:
                mine.set_(mine.clone())  # type: ignore[call-overload]


class _Walk:
    """Walks objects once each, in the order of their attributes."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []  # an id is of one object as long as it lives

    def into(self, state: State, thing: Any, tensors: list[Tensor]) -> None:
        """Adds what is found in an object; ``tensors`` is the list that its tensors belong to."""
        if isinstance(thing, _VALUES):
            state.structure.append((type(thing), thing))
            return
        if id(thing) in self.seen:
            state.structure.append(("again", self.seen[id(thing)]))
            return
        self.seen[id(thing)] = len(self.seen)
        self.alive.append(thing)
        if isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter):
            layout = (tuple(thing.shape), thing.stride(), thing.dtype, thing.device)
            state.structure.append((Tensor, layout))
            tensors.append(thing)
            return
        parts = _parts(thing)
        state.structure.append(type(thing))
        if parts is None:
            state.objects.append(thing)
            if isinstance(thing, nn.Module):  # what a session has of them stays theirs
                for tensor in _tensors_of(thing):
                    self.seen.setdefault(id(tensor), len(self.seen))
            return
        state.structure.append(list(parts))
        for part in parts.values():
            self.into(state, part, tensors)


def _parts(thing: Any) -> dict[Any, Any] | None:
    """Named parts of an object; ``None`` if it is compared by identity."""
    if isinstance(thing, (list, tuple)):
        return dict(enumerate(thing))
    if isinstance(thing, Mapping):
        return dict(thing)
    if isinstance(thing, partial):
        return dict(enumerate((thing.func, thing.args, thing.keywords)))
    if isinstance(thing, MethodType):
        return dict(enumerate((thing.__func__, thing.__self__)))
    if isinstance(thing, FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        return dict(enumerate((thing.__code__, thing.__defaults__, *cells)))
    if _known(type(thing)):
        skipped = _NOT_CAPTURED.get(type(thing).__name__, ())
        return {name: part for name, part in vars(thing).items() if name not in skipped}
    return None


def _known(kind: type) -> bool:
    """Whether objects of a class are compared by their attributes."""
    if issubclass(kind, nn.Module) or "__slots__" in vars(kind):
        return False
    names = [base.__module__.split(".") for base in kind.__mro__]
    ours = any(name[0] == "mmdecode" for name in names)
    theirs = ("cache_utils", "logits_process", "stopping_criteria")
    return ours or any(name[0] == "transformers" and name[-1] in theirs for name in names)


def _alike(one: Any, other: Any) -> bool:
    """Whether two objects are one, or two views of a model that run the same modules."""
    if one is other or not (isinstance(one, nn.Module) and isinstance(other, nn.Module)):
        return one is other
    modules = list(one.modules()), list(other.modules())
    pairs = [pair for pair in zip(*modules, strict=False) if pair[0] is not pair[1]]
    return (
        len(modules[0]) == len(modules[1])
        and all(type(a) is type(b) and _values(a) == _values(b) for a, b in pairs)
        and all(map(operator.is_, _tensors_of(one), _tensors_of(other)))
    )


def _values(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if isinstance(value, _VALUES)}


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _whole(tensor: Tensor) -> Tensor:
    """The elements of an expanded tensor, each once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _fits(storage: Tensor, like: Tensor, shape: tuple[int, ...]) -> bool:
    alike = storage.dtype == like.dtype and storage.device == like.device
    return alike and storage.shape == shape


def _at_one_address(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _equal(one: Tensor, other: Tensor) -> bool:
    if _at_one_address(one, other):
        return True
    return one.numel() <= _LARGE and torch.equal(one, other)


def aliases(tree: Any) -> Any:
    """A nest of containers with new tensor objects, of the same storage."""
    return tree_map_only(Tensor, Tensor.detach, tree)


def _given(request: Request) -> Iterator[Tensor]:
    """The caller's tensors."""
    yield from (request.prompt_ids, request.prompt_mask)
    for leaf in tree_leaves((dict(request.inputs), dict(request.model_kwargs))):
        if isinstance(leaf, Tensor):
            yield leaf


@dataclass
class Kept:
    """Storage and graphs of a shape.

    Attributes:
        key: Its key, see `Arena.lease`.
        state: State of the call that captured the graphs, whose addresses they read and write.
        storage: Storage of its caches, in the order in which they were allocated.
        graphs: Graphs by shape of a round; see `mmdecode.engine.capture.Replayed`.
        pool: Memory pool of the graphs.
        busy: Whether a call uses them.
        complete: Whether the state of a call before its first captured round is all that its
            rounds keep.
    """

    key: Hashable
    state: State
    storage: list[Tensor]
    graphs: dict[Hashable, Any] = field(default_factory=dict)
    pool: Any = None
    busy: bool = True
    complete: bool = True

    @property
    def bytes(self) -> int:
        """Memory of the call's own tensors, views not counted twice."""
        sizes = {_storage(t): t.untyped_storage().nbytes() for t in self.state.own}
        return sum(sizes.values())


class Lease:
    """Storage and graphs that one call takes from an arena.

    Attributes:
        paths: Counts of what was kept and reused; see `mmdecode.engine.stats.Stats`.
    """

    def __init__(self, arena: Arena, key: Hashable) -> None:
        self._arena, self._key = arena, key
        self._kept: Kept | None = None
        self._claimed: Kept | None = None  # whose storage this call's caches are allocated in
        self._storage: list[Tensor] = []
        self._began: set[int] = set()
        self._before: State | None = None
        self.paths: Counter[str] = Counter()

    def allocate(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Storage of a cache: that of an earlier call which asked for the same in the same order.

        Args:
            like: Keys or values, whose dtype and device the storage gets.
            shape: Shape of the storage.
        """
        index = len(self._storage)
        if not index:
            self._claimed = self._arena.claim(self._key)
        if self._claimed is not None:
            found = self._claimed.storage[index : index + 1]
            if found and _fits(found[0], like, shape):
                self._storage.append(found[0])
                return found[0].detach()
            self._arena.drop(self._claimed)
            self._claimed = None
        self.paths["storage allocated"] += 1
        self._storage.append(like.new_zeros(shape))
        return self._storage[-1]

    def take(self, run: Run, captured: str) -> Kept:
        """The storage and graphs of an earlier call of the same shape; else this call's own.

        The call is moved to that storage.

        Args:
            run: The call, whose prompt was read.
            captured: Name of the function that is captured.
        """
        state = State.of(run)
        state.structure.append(captured)
        kept = self._claimed
        if kept is not None and not state.like(kept.state):
            self._arena.drop(kept)  # this call writes to its storage
            kept = None
        kept = kept or self._arena.take(state)
        if kept is None:
            state.part_from(_given(run.call.request))
            kept = self._arena.put(Kept(self._key, state, self._storage))
        else:
            state.move_to(kept.state)
            self.paths["storage reused"] += 1
        self._kept, self._claimed = kept, None
        self._began = set(map(id, state.own))
        return kept

    def watch(self, run: Run) -> None:
        """Called after a round that was not replayed: looks for tensors that outlive a round.

        A part that makes a tensor in its first round, and keeps it, has more state than its call
        began with, so that a later call cannot take over from it.
        """
        state = State.of(run)
        if self._kept is not None and self._before is not None:
            before = set(map(id, self._before.own)) - self._began
            if before & set(map(id, state.own)):
                self._kept.complete = False
        self._before = state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Gives back what was taken; after an error it is dropped."""
        self._before = None
        for kept in (self._kept, self._claimed):
            if kept is not None:
                kept.complete &= error[0] is None
                self._arena.give_back(kept)
        self._kept = self._claimed = None


class Arena:
    """Storage and graphs of the last shapes that a decoder was called with.

    Calls may run in several threads: a shape serves one call at a time.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Arena], tuple[()]]:
        return Arena, ()  # a copy begins empty

    def lease(self, key: Hashable) -> Lease:
        """A lease for one call, which ends with its context.

        Args:
            key: Anything that calls of one shape have in common before their prompts are read.
        """
        return Lease(self, key)

    def claim(self, key: Hashable) -> Kept | None:
        """The shape that was used last of those with a key."""
        with self._lock:
            for kept in reversed(self._kept.values()):
                if not kept.busy and kept.key == key:
                    kept.busy = True
                    return kept
        return None

    def drop(self, kept: Kept) -> None:
        """Forgets a shape."""
        with self._lock:
            self._kept.pop(id(kept), None)

    def take(self, state: State) -> Kept | None:
        """The kept shape that fits a state, unless another call uses it."""
        with self._lock:
            for key, kept in reversed(self._kept.items()):
                if not kept.busy and state.like(kept.state):
                    kept.busy = True
                    self._kept.move_to_end(key)
                    return kept
        return None

    def put(self, kept: Kept) -> Kept:
        """Keeps a new shape; drops the ones used longest ago if there are too many."""
        with self._lock:
            self._kept[id(kept)] = kept
            idle = [key for key, other in self._kept.items() if not other.busy]
            for key in idle:
                total = sum(other.bytes for other in self._kept.values())
                if len(self._kept) <= SHAPES and total <= MOST_BYTES:
                    break
                del self._kept[key]
        return kept

    def give_back(self, kept: Kept) -> None:
        """Lets later calls use a shape, or drops it if they cannot."""
        with self._lock:
            kept.busy = False
            if not kept.complete:
                self._kept.pop(id(kept), None)
