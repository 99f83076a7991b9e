"""Two methods that search for layers to skip while they decode.

`Swift` tries sets of attention and MLP sublayers on the tokens generated last, and keeps the set
that would have drafted most of them. `Clasp` chooses whole layers by a dynamic programme over the
hidden states of the last token. Both draft on the model's own keys and values (see
`mmdecode.draft.mirror`), with one set for all rows of a batch: the drafts, though never the output,
depend on the other rows.

Sources: Xia et al. 2024 (SWIFT), arXiv:2410.06916; Chen et al. 2025 (CLaSp), arXiv:2505.24196.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from mmdecode.draft.assistant import adapter_like
from mmdecode.draft.layer_skip import shallow, without_hooks
from mmdecode.draft.mirror import CacheCopyDrafter, CopySession
from mmdecode.engine.cache import bucket
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.hooks import of_this_thread
from mmdecode.engine.masks import chain
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError, OptionError

Unit = tuple[int, str]
"""A layer's index, and its part: ``"attention"``, ``"mlp"``, or ``"layer"`` for all of it."""

ENOUGH = 0.95
"""The search ends with a set that drafts this share of the text, as in SWIFT."""


class LayerSearch(CacheCopyDrafter):
    """Drafts ``length`` tokens without a share of the model's layers: base of `Swift` and `Clasp`.

    Args:
        share: Share of the skippable layers or sublayers to skip; 0 is the model itself, and
            accepts everything.
        length: Tokens per round; 0 is neutral.
        every: Rounds from one search to the next.
        max_rejection_probability: See `mmdecode.draft.assistant.Assistant`.

    Samples nothing from a distribution of its own, since that would depend on the other rows.
    Lossless under every exact rule; under sample_match the sample, not its distribution, depends on
    them too. A round with a search costs a further transfer to the host.

    Raises:
        IncompatibleError: At the call: what a layer attends to depends on its index.
    """

    kinds: tuple[Kind, ...] = ("deterministic", "coupled")

    def __init__(
        self,
        share: float = 0.45,
        length: int = 4,
        every: int = 4,
        max_rejection_probability: float = 1.0,
    ) -> None:
        if not 0 <= share <= 1 or every < 1:
            raise OptionError(f"share={share}, every={every}; expected share 0..1 and every >= 1")
        super().__init__(length, max_rejection_probability)
        self.share, self.every = share, every

    @classmethod
    def from_options(  # type: ignore[override]
        cls,
        share: float = 0.45,
        length: int = 4,
        every: int = 4,
        max_rejection_probability: float = 1.0,
    ) -> LayerSearch:
        """Builds it from a string: ``clasp:share=0.5,length=6``."""
        return cls(share, length, every, max_rejection_probability)

    def _refuse(self, call: Call) -> None:
        if len(call.plan.adapter.windows) > 1:
            raise IncompatibleError.between(
                f"draft {type(self).__name__}",
                call.plan.adapter.name,
                "what a layer attends to depends on its index in the model",
                "use layer_skip with exit_layer, which keeps the index of every layer",
            )
        super()._refuse(call)


class SearchSession(CopySession):
    """One call of a `LayerSearch`.

    Nothing is skipped before the first search.

    Attributes:
        skipped: Units that the drafting view leaves out.
    """

    def __init__(self, call: Call, prefill: BranchOutput, drafter: LayerSearch) -> None:
        super().__init__(call, prefill, drafter)
        self.share, self.every = drafter.share, drafter.every
        self.skipped: frozenset[Unit] = frozenset()
        self._whole: Any = call.plan.adapter
        self._proposals = 0
        self._views: dict[frozenset[Unit], Any] = {}

    def propose(self, budget: int) -> Proposal:
        """A chain per row, after a search where one is due."""
        if min(self.length, budget) > 0:
            if self._proposals % self.every == 0 and self.share:
                self.search()
            self._proposals += 1
            self.branch.use(self.view(self.skipped))
        return super().propose(budget)

    def search(self) -> None:
        """Sets `skipped`, and leaves the cache as it was before the write position."""
        raise NotImplementedError

    def view(self, skip: frozenset[Unit]) -> Any:
        """The adapter of the model without some units."""
        if not skip:
            return self._whole
        if skip not in self._views:
            self._views[skip] = adapter_like(self._whole, partial(self._whole, skip))
        return self._views[skip]


class Swift(LayerSearch):
    """Skips the sublayers that were missed least: random search, scored on the last tokens.

    Candidates are random sets of ``share`` of the sublayers between the first and the last layer.
    One is scored in a single pass over the last ``window`` tokens: the share of positions where its
    argmax is the generated token. The best so far is kept, from call to call, until one drafts 95
    %.

    Args:
        share: Share of these sublayers to skip.
        length: Tokens per round; 0 is neutral.
        every: Rounds from one candidate to the next.
        max_rejection_probability: See `mmdecode.draft.assistant.Assistant`; 0.2 is nearest to
            SWIFT's own stop.
        window: Most tokens that a candidate is scored on.
        seed: Seed of the random candidates.

    Differs from the reference: no Bayesian proposals (off by default there too), no tree; the best
    set is scored again with each candidate, on the same tokens. Whole layers are the units of a
    model whose layers do not consist of ``attention_sites`` and an ``mlp``.
    """

    summary = "the model drafts a chain without the sublayers that a search found dispensable"
    source = "SWIFT, Xia et al. 2024"

    def __init__(
        self,
        share: float = 0.45,
        length: int = 4,
        every: int = 4,
        max_rejection_probability: float = 1.0,
        window: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__(share, length, every, max_rejection_probability)
        if window < 1:
            raise OptionError(f"window must be >= 1, got {window}")
        self.window = window
        self.seed = seed
        self._found: dict[tuple[Unit, ...], Found] = {}
        self._lock = Lock()

    def begin(self, call: Call, prefill: BranchOutput) -> SwiftSession:
        """Starts from the best set found so far for a model with the same units."""
        self._refuse(call)
        return SwiftSession(call, prefill, self)

    def found(self, units: Sequence[Unit]) -> Found:
        """Search results for models with these units."""
        with self._lock:
            return self._found.setdefault(tuple(units), Found(units, self.share, self.seed))


class Found:
    """Search results of `Swift` for models with the same units; their calls share them.

    Args:
        units: Units that may be skipped.
        share: Share of them to skip.
        seed: Seed of the random candidates.

    Attributes:
        skipped: The best set so far; evenly spread, until something better is known.
        enough: Whether the search is over.
    """

    def __init__(self, units: Sequence[Unit], share: float, seed: int) -> None:
        count = round(share * len(units))
        self.units, self.enough = units, False
        self.skipped = frozenset(units[i * len(units) // count] for i in range(count))
        self._dice = random.Random(seed)
        self._lock = Lock()

    def candidate(self) -> frozenset[Unit]:
        """A random set of as many units as are skipped."""
        with self._lock:
            return frozenset(self._dice.sample(self.units, len(self.skipped)))

    def compared(
        self, best: frozenset[Unit], candidate: frozenset[Unit], shares: Sequence[float]
    ) -> None:
        """Keeps the better one, unless another call has replaced ``best`` meanwhile."""
        with self._lock:
            if self.skipped == best:
                self.skipped = candidate if shares[1] > shares[0] else best
                self.enough = max(shares) >= ENOUGH


class SwiftSession(SearchSession):
    """One call of a `Swift`."""

    def __init__(self, call: Call, prefill: BranchOutput, drafter: Swift) -> None:
        super().__init__(call, prefill, drafter)
        self.window, self.found = drafter.window, drafter.found(units_of(call.plan.adapter))
        self.skipped = self.found.skipped

    def search(self) -> None:
        """Scores a candidate and the best set so far on the same tokens."""
        found, window = self.found, min(self.window, self.call.rows.cur_len)
        self.skipped = best = found.skipped
        if found.enough or not 0 < len(best) < len(found.units) or window < 1:
            return
        candidate = found.candidate()
        shares = torch.stack([self.matches(skip, window) for skip in (best, candidate)])
        found.compared(best, candidate, shares.tolist())
        self.skipped = found.skipped

    def matches(self, skip: frozenset[Unit], window: int) -> Tensor:
        """The share of the last tokens that the model without ``skip`` would have drafted."""
        call, branch = self.call, self.branch
        start = branch.cache.start.clone()
        tokens = call.last(window + 1)
        branch.use(self.view(skip))
        branch.cache.set_start((start - window).clamp_min(0))
        visible = bucket(branch.width + call.rows.cur_len + window)
        states, _ = branch.run(tokens[:, :-1], *chain(window, call.device), visible=visible)
        drafted = branch.adapter.head(states["last"]).argmax(-1)
        back = torch.arange(window, 0, -1, device=call.device)
        # tokens before the first generated one were never drafted, nor read as ids alone
        written = (back < call.rows.length[:, None]) & call.rows.active[:, None]
        self.copy(branch.cache.start - branch.width, window)
        branch.cache.set_start(start)
        right = (drafted == tokens[:, 1:]) & written
        return right.sum() / written.sum().clamp_min(1)


class Clasp(LayerSearch):
    """Skips the layers without which the last token's state stays nearest to the whole model's.

    With X_i the state after layer i and g(i, j) the best state after i layers of which j were
    skipped, g(i, j) is g(i-1, j-1) or f_i(g(i-1, j)), whichever has the larger cosine with X_i. All
    j run as siblings in one pass of the whole model, of which j = 0 is X itself.

    Args:
        share: Share of the layers to skip.
        length: Tokens per round; 0 is neutral.
        every: Rounds from one programme to the next; the paper runs it after each.
        max_rejection_probability: See `mmdecode.draft.assistant.Assistant`.

    Differs from the paper: one set for all rows, by the mean cosine of those that go on.
    """

    summary = "the model drafts a chain without the layers that mattered least for the last tokens"
    source = "CLaSp, Chen et al. 2025"

    def begin(self, call: Call, prefill: BranchOutput) -> ClaspSession:
        """Copies what the model keeps of the prompt."""
        self._refuse(call)
        return ClaspSession(call, prefill, self)


class ClaspSession(SearchSession):
    """One call of a `Clasp`."""

    def search(self) -> None:
        """Runs the programme on the last token."""
        call, branch = self.call, self.branch
        layers = list(self._whole.layers())
        count = min(round(self.share * len(layers)), len(layers) - 1)
        programme = Programme(count, call.rows.active | ~call.rows.active.any())
        width = count + 1
        branch.use(self._whole)
        with ExitStack() as hooks:
            for layer in layers:
                hook = of_this_thread(programme.after)
                hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
            branch.run(
                call.last(1).expand(-1, width),
                torch.zeros(1, width, dtype=torch.long, device=call.device),
                torch.eye(width, dtype=torch.bool, device=call.device)[None],
                visible=bucket(branch.width + call.rows.cur_len + self.length + 1 + width),
            )
        self.skipped = frozenset((layer, "layer") for layer in programme.skipped())


class Programme:
    """The dynamic programme of `Clasp`: candidates j = 0..count, side by side as queries.

    Args:
        count: Layers to skip.
        rows: Rows whose states decide, ``(B,)`` bool.
    """

    def __init__(self, count: int, rows: Tensor) -> None:
        self.count, self.rows = count, rows.float()
        self.choices: list[Tensor] = []  # by layer: which candidates j skip it, (count + 1,)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Forward hook: gives a candidate the layer's output, or the input of the one before."""
        before = args[0] if args else kwargs["hidden_states"]
        ran = output[0] if isinstance(output, tuple) else output
        done = len(self.choices)  # layers before this one, of which so many could be skipped
        kept = torch.nn.functional.pad(before[:, :-1], (0, 0, 1, 0))
        near = [self._cosine(states, ran) for states in (kept, ran)]
        j = torch.arange(self.count + 1, device=ran.device)
        skip = ((near[0] > near[1]) | (j > done)) & (j >= 1)
        self.choices.append(skip)
        states = torch.where(skip[:, None], kept, ran)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    def _cosine(self, states: Tensor, ran: Tensor) -> Tensor:
        """Cosine with the whole model's state, summed over rows, ``(count + 1,)``."""
        near = cosine_similarity(states.float(), ran[:, :1].float(), dim=-1)
        return (near * self.rows[:, None]).sum(0)

    def skipped(self) -> list[int]:
        """Layers skipped on the path to g(L, count)."""
        choices, j, found = torch.stack(self.choices).tolist(), self.count, []
        for layer in reversed(range(len(choices))):
            if choices[layer][j]:
                found.append(layer)
                j -= 1
        return found


class Nothing(nn.Module):
    """Replaces a sublayer, and adds zero to the residual stream.

    Args:
        replaced: The sublayer.
        attention: Whether that is attention, which returns weights too, in transformers' models;
            those of this library say by an annotation that they do not.
    """

    def __init__(self, replaced: nn.Module, attention: bool) -> None:
        super().__init__()
        returned = inspect.signature(replaced.forward).return_annotation
        self.pair = attention and returned not in (Tensor, "Tensor")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Zeros."""
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.pair else zeros


def units_of(adapter: Any) -> list[Unit]:
    """Units that may be skipped: sublayers between first and last layer, or whole layers."""
    layers = list(adapter.layers())
    inner = range(1, len(layers) - 1)
    sites = adapter.attention_sites()
    if len(sites) == len(layers) and all(hasattr(layers[index], "mlp") for index in inner):
        return [(index, part) for index in inner for part in ("attention", "mlp")]
    return [(index, "layer") for index in inner]


def partial(adapter: Any, skip: Collection[Unit]) -> Any:
    """The adapter's model without some units; it shares every weight with the model."""
    parts: dict[int, set[str]] = {}
    for index, part in skip:
        parts.setdefault(index, set()).update(("attention", "mlp") if part == "layer" else (part,))
    keep = [index for index in range(len(adapter.layers())) if len(parts.get(index, ())) < 2]

    def change(index: int, layer: nn.Module) -> nn.Module:
        if index not in parts:
            return layer
        copied = without_hooks(layer)
        attention = "attention" in parts[index]
        site = adapter.attention_sites()[index] if attention else layer.get_submodule("mlp")
        name = next(name for name, module in layer.named_children() if module is site)
        copied._modules[name] = Nothing(site, attention)
        return copied

    return shallow(adapter, keep, change)
