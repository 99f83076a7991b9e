"""``Decoder(compile=True)``: rounds as CUDA graphs, compiled forward passes on other devices.

At small batch a step is bound by kernel launches, not by arithmetic. A round has a fixed shape: its
nodes, and the cache slots that attention covers. On CUDA, for each shape the first round is run as
usual, the second is captured, and from then on only the proposal is copied in and the graph
replayed. State that a round leaves to the next must therefore stay at the same address: `Call`,
caches and drafters change their tensors in place (`Plan.static_shapes`). Graphs, and the storage
that they read, are kept for later calls of the same shape: see `mmdecode.engine.arena`.

On other devices the model's forward pass is compiled by torch for each shape it meets, which takes
10 to 40 seconds a shape on a CPU and lasts as long as the process.

Slots are counted in steps of `STEP`, because each new number of slots is a new shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from warnings import warn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmdecode._compat import compiled
from mmdecode.engine.adapter import Adapter, Mask
from mmdecode.engine.proposal import Proposal
from mmdecode.engine.views import origin
from mmdecode.quantization.foreign import foreign_layers

if TYPE_CHECKING:
    from mmdecode.engine.loop import RoundResult, Run

STEP = 128
BACKEND = "inductor"
TOLERANCE = 0.2
"""Least mean difference of compiled from usual states, over their mean size, that is an error."""
T = TypeVar("T")


def available(device: torch.device) -> bool:
    """Whether rounds can be captured on a device."""
    return device.type == "cuda"


def coarse(length: int) -> int:
    """``length``, in cache slots, rounded up to a multiple of `STEP`."""
    return -(-length // STEP) * STEP


def record(
    call: Callable[[], T], device: torch.device, pool: Any
) -> tuple[T, Callable[[], None], Any]:
    """Captures ``call`` in a CUDA graph that allocates from ``pool``, without running it.

    Returns:
        The tensors that ``call`` returned, a function that replays the graph and fills them, and
        the pool for the next graph.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    options = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    with torch.cuda.device(device), torch.cuda.graph(graph, **options):
        result = call()
    return result, graph.replay, graph.pool()


def step(run: Run) -> Callable[[Proposal], RoundResult]:
    """A function that runs a round by replaying the captured round of the same shape.

    If a part of the round must run on the host, only the target's scoring of the proposal is
    captured.
    """
    own = [type(r).__name__ for r in run.runners if not r.graph_safe]
    if own:
        warn(f"no round is captured: runner {own[0]} is not declared as graph_safe", stacklevel=2)
        return run.round
    if run.guide is not None and run.guide.on_host:
        name = type(run.guide).__name__
        warn(f"no round is captured: guide {name} reads tokens on the host", stacklevel=2)
        return run.round
    reason = host_work(run)
    if reason is None:
        return Replayed(run.round, run)
    warn(f"of each round the scoring alone is captured: {reason}", stacklevel=2)
    score = Replayed(run.score, run)
    return lambda proposal: run.finish_round(proposal, score(proposal))


def host_work(run: Run) -> str | None:
    """Why a round cannot be replayed as a whole; ``None``: it can."""
    if run.processors.on_host:
        return "a logits processor is of a type that is run on the host"
    if run.stopping.others or run.stopping.per_call:
        return "a stopping criterion is run on the host"
    if run.listeners:
        return "scores, a stream or a trace were asked for"
    if not run.drafter.capabilities.graph_safe:
        return f"draft {type(run.drafter).__name__} is not declared as graph_safe"
    return None


@dataclass
class Graph(Generic[T]):
    """Graph of one shape.

    Attributes:
        inputs: The proposal that it reads.
        output: Tensors that it computes.
        replay: Function that replays it.
        alive: Objects whose tensors it reads.
    """

    inputs: Proposal
    output: T
    replay: Callable[[], None]
    alive: Any


class Replayed(Generic[T]):
    """A function of a proposal and of tensors at fixed addresses, run by replaying CUDA graphs.

    Args:
        function: Function to capture. A replay overwrites the result of the previous replay of the
            same shape.
        run: The call; ``run.call.rows.cur_len`` decides how many slots attention covers. Its
            arena keeps the graphs.
    """

    def __init__(self, function: Callable[[Proposal], T], run: Run) -> None:
        self.function, self.run, self.lease = function, run, run.call.plan.lease
        self.kept = self.lease.take(run, function.__name__)
        self.ran: set[Hashable] = set()
        self.broken = False

    def __call__(self, proposal: Proposal) -> T:
        """Result of the function for ``proposal``."""
        key = (self.run.call.rows.cur_len, proposal.size, proposal.tree)
        graph: Graph[T] | None = self.kept.graphs.get(key)
        if graph is None and (self.broken or key not in self.ran):
            self.ran.add(key)  # run once: lazy initialisation is not allowed during capture
            result = self.function(proposal)
            if not self.broken:
                self.lease.watch(self.run)
            return result
        if graph is None:
            try:
                graph = self._capture(proposal)
            except RuntimeError as error:
                self.broken = True
                warn(f"a round could not be captured and is run as usual: {error}", stacklevel=2)
                return self.function(proposal)
            self.kept.add(key, graph)
            self.lease.watch(self.run)
        else:
            for held, new in zip(_tensors(graph.inputs), _tensors(proposal), strict=True):
                held.copy_(new)
        graph.replay()
        return graph.output

    def _capture(self, proposal: Proposal) -> Graph[T]:
        inputs, kept = proposal.map(torch.clone), self.kept
        output, replay, kept.pool = record(
            lambda: self.function(inputs), self.run.call.device, kept.pool
        )
        self.lease.paths["graph captured"] += 1
        alive = (proposal.structure(), self.lease.state)
        return Graph(inputs, output, replay, alive)


def _tensors(proposal: Proposal) -> list[Tensor]:
    held: tuple[Any, ...] = (proposal.tokens, proposal.parents, proposal.log_q)
    return [value for value in held if value is not None]


_compiled: WeakKeyDictionary[torch.nn.Module, Callable[..., Tensor] | None] = WeakKeyDictionary()
"""Compiled forward passes by model; ``None`` where compiling failed."""
_checked: WeakKeyDictionary[torch.nn.Module, set[torch.Size]] = WeakKeyDictionary()
"""Shapes of tokens whose compiled pass was compared, by model that another library quantised."""


class Compiled:
    """An adapter's ``forward``, compiled; where compiling fails, it is run as usual with a warning.

    For a model that another library quantised, the first pass of each shape is compared with the
    usual one: compiled by torch 2.11, torchao's int8 products of a single row are wrong.

    Args:
        adapter: Adapter of the model.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.model = origin(adapter.model)  # views come and go
        if self.model not in _compiled:
            _compiled[self.model] = compiled(_forward, BACKEND)
        if any(foreign_layers(self.model)):  # it may have been float before
            _checked.setdefault(self.model, set())

    def __call__(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Same as ``adapter.forward``."""
        adapter = self.adapter
        forward = _compiled[self.model]
        if forward is not None:
            try:
                found = forward(adapter, tokens, mask, positions, past)
                checked = _checked.get(self.model)
                if checked is None or tokens.shape in checked:
                    return found
                usual = adapter.forward(tokens, mask, positions, past)
                checked.add(tokens.shape)
                difference = (found - usual).abs().mean() / usual.abs().mean()
                if difference < TOLERANCE:
                    return usual
                why = f"compiled, its states differ by {float(difference):.2g} of their size"
            except RuntimeError as error:
                why = " ".join(str(error).split("\n")[:2])
            _compiled[self.model] = None
            name = type(self.model).__name__
            warn(f"{name} could not be compiled and is run as usual: {why}", stacklevel=2)
        return adapter.forward(tokens, mask, positions, past)


def _forward(adapter: Adapter, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
    return adapter.forward(tokens, mask, positions, past)


def is_split(model: Any) -> bool:
    """Returns whether a model is split over devices, CPU or disk; warns that nothing is compiled.

    accelerate moves tensors between its parts in hooks, which cannot be captured.
    """
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) < 2 and "disk" not in devices:
        return False
    warn(
        f"nothing is compiled: {type(model).__name__} is split over {', '.join(sorted(devices))} "
        "(device_map)",
        stacklevel=2,
    )
    return True
