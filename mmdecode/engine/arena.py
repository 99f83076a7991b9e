"""`Arena`: storage and CUDA graphs that outlive a call.

A captured round reads and writes tensors at fixed addresses. They belong to the call that captured
it: its rows, caches, and the sessions of its parts. A later call of the same shape reads its prompt
as usual; then its tensors are copied to the addresses of the earlier call, and stay there, and its
rounds replay the earlier call's graphs. Nothing is captured again. Caches are not copied: the later
call allocates them in the storage of the earlier one.

Two calls have the same shape if their states are the same but for the values of tensors: the
objects of the call and its parts are compared, attribute by attribute, without those that a class
lists as ``uncaptured``. Modules are compared by what they run and where their weights are. An
object of a class that is not understood here is like itself alone, so that its call is captured
again.
"""

from __future__ import annotations

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

from mmdecode._compat import attention_implementation
from mmdecode.quantization.foreign import stored

if TYPE_CHECKING:
    from mmdecode.engine.call import Request
    from mmdecode.engine.loop import Run

SHAPES = 4
"""Shapes whose storage and graphs a decoder keeps."""
GRAPHS = 16
"""Graphs of a shape that are kept: of different numbers of nodes and slots."""
MOST_BYTES = 2**31
"""Bytes of storage that a decoder keeps, graphs not counted; the last shape always is."""

_VALUES = (
    *(int, float, str, bytes, type(None), torch.dtype, torch.device, Enum, type),
    *(range, slice, set, frozenset),
)
"""Classes whose objects are compared by value."""
_LARGE = 2**22
"""Elements of a constant tensor from which on it is not compared by its values."""


@dataclass(eq=False)
class State:
    """State of a call between two rounds.

    Attributes:
        structure: Kinds and host values of all objects, in a fixed order.
        own: Tensors that belong to the call: rounds change them, or they depend on the prompt.
        weights: Tensors of drafter and rule, which must be at the same addresses.
        tables: Tensors of other parts, which no round changes: they must have the same values.
        objects: Objects that are compared by identity.
        modules: Modules, compared by their part of the structure.
    """

    structure: list[Any] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    tables: list[Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

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
            and all(a is b for a, b in zip(self.objects, other.objects, strict=True))
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
        theirs |= {_storage(tensor) for module in self.modules for tensor in _tensors_of(module)}
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
        state.structure.append(type(thing))
        if isinstance(thing, nn.Module):
            self._module(state, thing)
        elif isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter):
            layout = (tuple(thing.shape), thing.stride(), thing.dtype, thing.device)
            state.structure.append(layout)
            tensors.append(thing)
        elif (parts := _parts(thing)) is None:
            state.objects.append(thing)
        else:
            state.structure.append(list(parts))
            for part in parts.values():
                self.into(state, part, tensors)

    def _module(self, state: State, module: nn.Module) -> None:
        """Adds what a module runs: submodules, their options and hooks, addresses of weights."""
        state.modules.append(module)
        for inner in module.modules():
            own = vars(inner)
            plain = {key: value for key, value in own.items() if _is_plain(value)}
            attention = attention_implementation(own.get("config"))
            state.structure.append((type(inner), plain, attention))
            hooks = (own.get("_forward_pre_hooks", {}), own.get("_forward_hooks", {}))
            state.objects += [hook for kind in hooks for hook in kind.values()]
            state.objects.append(own.get("forward"))  # some libraries put another one there
        for tensor in _tensors_of(module):
            state.structure.append(tensor.data_ptr())
            self.seen.setdefault(id(tensor), len(self.seen))  # a session may hold it too


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _VALUES)


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
        try:
            cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        except ValueError:  # a cell that is filled later
            return None
        parts = (thing.__code__, thing.__defaults__, thing.__kwdefaults__, *cells)
        return dict(enumerate(parts))
    if _known(type(thing)):
        skipped = getattr(type(thing), "uncaptured", ())
        return {name: part for name, part in vars(thing).items() if name not in skipped}
    return None


def _known(kind: type) -> bool:
    """Whether objects of a class are compared by their attributes."""
    if "__slots__" in vars(kind):
        return False
    names = [base.__module__.split(".") for base in kind.__mro__]
    ours = any(name[0] == "mmdecode" for name in names)
    theirs = ("cache_utils", "logits_process", "stopping_criteria")
    return ours or any(name[0] == "transformers" and name[-1] in theirs for name in names)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        yield from stored(tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _whole(tensor: Tensor) -> Tensor:
    """The elements of an expanded tensor, each once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


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


@dataclass(eq=False)
class Storage:
    """Tensors that caches are allocated in, by one call at a time.

    Attributes:
        key: Key of the calls, see `Arena.lease`.
        tensors: The tensors, in the order in which a call allocates them.
        busy: Whether a call uses them.
        torn: Whether a call allocated others than the ones before it.
    """

    key: Hashable
    tensors: list[Tensor] = field(default_factory=list)
    busy: bool = True
    torn: bool = False


@dataclass(eq=False)
class Kept:
    """Storage and graphs of a shape.

    Attributes:
        state: State of the call that began it, whose addresses the graphs read and write.
        storage: Storage of its caches; shapes that differ in something else may share it.
        graphs: Graphs by shape of a round; see `mmdecode.engine.capture.Replayed`.
        pool: Memory pool of the graphs.
        complete: False: a round made tensors that outlive it, which later calls do not have.
    """

    state: State
    storage: Storage
    graphs: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)
    pool: Any = None
    complete: bool = True

    def add(self, key: Hashable, graph: Any) -> None:
        """Adds a graph, and drops the oldest one of too many."""
        self.graphs[key] = graph
        if len(self.graphs) > GRAPHS:
            self.graphs.popitem(last=False)

    @property
    def bytes(self) -> int:
        """Memory of the call's own tensors, views not counted twice."""
        sizes = {_storage(t): t.untyped_storage().nbytes() for t in self.state.own}
        return sum(sizes.values())


class Lease:
    """Storage and graphs that one call takes from an arena.

    Attributes:
        state: State of the call when its graphs were looked up; graphs keep it alive.
        paths: Counts of what was kept and reused; see `mmdecode.engine.stats.Stats`.
    """

    def __init__(self, arena: Arena, key: Hashable) -> None:
        self._arena, self._key = arena, key
        self._storage: Storage | None = None
        self._allocated: list[Tensor] = []
        self._kept: Kept | None = None
        self._before: State | None = None
        self.state: State | None = None
        self.paths: Counter[str] = Counter()

    def allocate(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Storage of a cache, zeros: an earlier call's, if that asked for the same in this order.

        Args:
            like: Keys or values, whose dtype and device the storage gets.
            shape: Shape of the storage.
        """
        if self._storage is None:
            self._storage = self._arena.storage(self._key)
        held, index = self._storage.tensors, len(self._allocated)
        if index < len(held):
            fits = held[index].dtype == like.dtype and held[index].device == like.device
            if fits and held[index].shape == shape:
                self._allocated.append(held[index].zero_())
                return held[index].detach()
            self._storage.torn = True
        made = like.new_zeros(shape)
        self.paths["storage allocated"] += 1
        self._allocated.append(made)
        if not self._storage.torn:
            held.append(made)
        return made

    def take(self, run: Run, captured: str) -> Kept:
        """The storage and graphs of an earlier call of the same shape; else this call's own.

        The call is moved to that storage.

        Args:
            run: The call, whose prompt was read.
            captured: Name of the function that is captured.
        """
        if self._storage is None:  # no cache reserves storage
            self._storage = self._arena.storage(self._key)
        state = State.of(run)
        state.structure.append(captured)
        kept = self._arena.find(state, self._storage)
        if kept is None:
            state.part_from(_given(run.call.request))
            kept = Kept(state, self._storage)
            self._arena.put(kept)
        else:
            state.move_to(kept.state)
            self.paths["storage reused"] += 1
        self._kept, self.state = kept, state
        return kept

    def watch(self, run: Run) -> None:
        """Called after a round that was not replayed: looks for tensors that outlive a round.

        A part that makes a tensor in its first round, and keeps it, has more state than its call
        began with, so that a later call cannot take over from it.
        """
        state = State.of(run)
        if self._kept is not None and self._before is not None and self.state is not None:
            before = set(map(id, self._before.own)) - set(map(id, self.state.own))
            if before & set(map(id, state.own)):
                self._kept.complete = False
        self._before = state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Gives back what was taken; after an error it is dropped."""
        if self._storage is not None:
            usable = error[0] is None and (self._kept is None or self._kept.complete)
            self._arena.give_back(self._storage, self._kept, usable)
        self._storage = self._kept = self._before = self.state = None


class Arena:
    """Storage and graphs of the last shapes that a decoder was called with.

    Calls may run in several threads: storage serves one call at a time.
    """

    def __init__(self) -> None:
        self._kept: list[Kept] = []  # the one used last at the end
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Arena], tuple[()]]:
        return Arena, ()  # a copy begins empty

    def __len__(self) -> int:
        """Number of shapes that are kept."""
        return len(self._kept)

    def lease(self, key: Hashable) -> Lease:
        """A lease for one call, which ends with its context.

        Args:
            key: Anything that calls of one shape have in common before their prompts are read.
        """
        return Lease(self, key)

    def storage(self, key: Hashable) -> Storage:
        """The idle storage of a key that was used last, or new storage."""
        with self._lock:
            for kept in reversed(self._kept):
                if kept.storage.key == key and not kept.storage.busy:
                    kept.storage.busy = True
                    return kept.storage
        return Storage(key)

    def find(self, state: State, storage: Storage) -> Kept | None:
        """The shape in this storage that fits a state; ``None``: there is none."""
        if storage.torn:
            return None
        with self._lock:
            kept = [kept for kept in self._kept if kept.storage is storage]
        return next((one for one in reversed(kept) if state.like(one.state)), None)

    def put(self, kept: Kept) -> None:
        """Keeps a new shape."""
        with self._lock:
            self._kept.append(kept)

    def give_back(self, storage: Storage, kept: Kept | None, usable: bool) -> None:
        """Ends the use of storage, and drops the shapes used longest ago if there are too many."""
        with self._lock:
            storage.busy = False
            if kept is not None:
                self._kept.remove(kept)
                self._kept += [kept] if usable else []
            if storage.torn:  # what was captured in it may have no storage any more
                self._kept = [one for one in self._kept if one.storage is not storage]
            for one in list(self._kept):
                sizes = {id(other.storage): other.bytes for other in self._kept}
                if len(self._kept) <= SHAPES and sum(sizes.values()) <= MOST_BYTES:
                    break
                if not one.storage.busy and len(self._kept) > 1:
                    self._kept.remove(one)
