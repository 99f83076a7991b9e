"""Layers to skip are searched for while the text is written, by two methods.

`Swift` tries sets of attention and MLP sublayers on what was written last, and keeps the one that
would have drafted most of it. `Clasp` chooses whole layers by a dynamic programme over the hidden
states of the last token. Both draft behind the model's own keys and values (see
`mmdecode.draft.mirror`), with one set for all rows of a batch: what is drafted, though never what
is written, depends on the other rows.

Sources: Xia et al. 2024 (SWIFT), arXiv:2410.06916; Chen et al. 2025 (CLaSp), arXiv:2505.24196.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from mmdecode import registry
from mmdecode.draft.layer_skip import shallow, without_hooks
from mmdecode.draft.mirror import CacheCopyDrafter
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
"""A set that drafts so much of the text ends the search: SWIFT's own figure."""


class LayerSearch(CacheCopyDrafter):
    """Drafts ``length`` tokens without a share of the model's layers: a base for the two.

    Args:
        share: Of the layers or sublayers that may be skipped; 0 is the model itself, and accepts
            everything.
        length: Tokens per round; 0 is neutral.
        every: Rounds from one search to the next.
        risk: As of `mmdecode.draft.assistant.Assistant`.

    Draws nothing from a law of its own, since that would depend on the other rows. Lossless under
    every exact rule; under membership the sample, not its law, depends on them too. The host looks
    at the device once more in a round with a search.

    Raises:
        IncompatibleError: At the call: layers differ in what they see, by their place.
    """

    kinds: tuple[Kind, ...] = ("deterministic", "coupled")

    def __init__(
        self, share: float = 0.45, length: int = 4, every: int = 4, risk: float = 1.0
    ) -> None:
        if not 0 <= share <= 1 or every < 1:
            raise OptionError(f"share={share}, every={every}; expected share 0..1 and every >= 1")
        super().__init__(length, risk)
        self.share, self.every = share, every
        self.skipped: frozenset[Unit] = frozenset()
        self._whole: Any = None  # the model's own adapter
        self._calls = 0  # of propose
        self._views: dict[frozenset[Unit], Any] = {}

    @classmethod
    def from_options(  # type: ignore[override]
        cls, share: float = 0.45, length: int = 4, every: int = 4, risk: float = 1.0
    ) -> LayerSearch:
        """From a string: ``clasp:share=0.5,length=6``."""
        return cls(share, length, every, risk)

    def begin(self, call: Call, prefill: BranchOutput, kind: Kind) -> None:
        """Copies what the model keeps of the prompt; nothing is skipped before the first search."""
        if len(call.plan.adapter.windows) > 1:
            raise IncompatibleError.between(
                f"draft {type(self).__name__}",
                call.plan.adapter.name,
                "its layers differ in what they see, by their place in the model",
                "use layer_skip with exit_layer, which keeps every layer in its place",
            )
        super().begin(call, prefill, kind)
        self._whole, self._calls = call.plan.adapter, 0

    def propose(self, call: Call, budget: int) -> Proposal:
        """A chain per row, behind a search where one is due."""
        assert self._branch is not None, "begin was not called"
        if min(self.length, budget) > 0:
            if self._calls % self.every == 0 and self.share:
                self._search(call)
            self._calls += 1
            self._branch.use(self._view(self.skipped))
        return super().propose(call, budget)

    def _search(self, call: Call) -> None:
        """Sets `skipped`, and leaves the cache as it was before the write position."""
        raise NotImplementedError

    def _view(self, skip: frozenset[Unit]) -> Any:
        """The adapter of the model without some units."""
        if skip not in self._views:
            view = partial(self._whole, skip) if skip else self._whole.model
            adapt = getattr(self._whole, "beside", registry.adapter_for)
            self._views[skip] = adapt(view) if skip else self._whole
        return self._views[skip]

    def reset(self) -> None:
        """Forgets the call."""
        super().reset()
        self._whole = None
        self._views.clear()


class Swift(LayerSearch):
    """Skips the sublayers that were missed least: random search, scored on the last tokens.

    Candidates are random sets of ``share`` of the sublayers between the first and the last layer.
    One is scored in a single pass over the last ``window`` tokens: in what share of places its
    argmax is what was written. The best so far is kept, from call to call, until one drafts 95 %.

    Args:
        share: Of these sublayers.
        length: Tokens per round; 0 is neutral.
        every: Rounds from one candidate to the next.
        risk: As of `mmdecode.draft.assistant.Assistant`; 0.2 is nearest to SWIFT's own stop.
        window: Most tokens that a candidate is scored on.
        seed: Of the candidates.

    Differs from the reference: no Bayesian proposals (off by default there too), no tree; the best
    set is scored anew beside each candidate, on the same tokens. Whole layers are the units of a
    model whose layers do not consist of ``attention_sites`` and an ``mlp``.
    """

    summary = "the model without sublayers that a search found to be spared drafts a chain"
    source = "SWIFT, Xia et al. 2024"

    def __init__(
        self,
        share: float = 0.45,
        length: int = 4,
        every: int = 4,
        risk: float = 1.0,
        window: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__(share, length, every, risk)
        if window < 1:
            raise OptionError(f"window must be >= 1, got {window}")
        self.window = window
        self._dice = random.Random(seed)
        self._units: list[Unit] = []
        self._found = False

    def begin(self, call: Call, prefill: BranchOutput, kind: Kind) -> None:
        """Keeps the best set so far, where the model is laid out as the last one."""
        super().begin(call, prefill, kind)
        units = units_of(call.plan.adapter)
        if units != self._units:
            self._units, self._found = units, False
            count = round(self.share * len(units))
            # evenly spread, until something better is known
            self.skipped = frozenset(units[i * len(units) // count] for i in range(count))

    def _search(self, call: Call) -> None:
        count, window = len(self.skipped), min(self.window, call.rows.cur_len)
        if self._found or not 0 < count < len(self._units) or window < 1:
            return
        candidate = frozenset(self._dice.sample(self._units, count))
        best, new = (self._matches(call, skip, window) for skip in (self.skipped, candidate))
        shares = torch.stack([best, new]).tolist()
        if shares[1] > shares[0]:
            self.skipped = candidate
        self._found = max(shares) >= ENOUGH

    def _matches(self, call: Call, skip: frozenset[Unit], window: int) -> Tensor:
        """The share of the last tokens that the model without ``skip`` would have drafted."""
        branch = self._branch
        assert branch is not None
        start = branch.cache.start.clone()
        tokens = call.last(window + 1)
        branch.use(self._view(skip))
        branch.cache.set_start((start - window).clamp_min(0))
        visible = bucket(branch.width + call.rows.cur_len + window)
        states, _ = branch.run(tokens[:, :-1], *chain(window, call.device), visible=visible)
        drafted = branch.adapter.head(states["last"]).argmax(-1)
        back = torch.arange(window, 0, -1, device=call.device)
        # what stands before the first generated token was never drafted, nor read as ids alone
        written = (back < call.rows.length[:, None]) & call.rows.active[:, None]
        self._copy(call, branch.cache.start - branch.width, window)
        branch.cache.set_start(start)
        right = (drafted == tokens[:, 1:]) & written
        return right.sum() / written.sum().clamp_min(1)


class Clasp(LayerSearch):
    """Skips the layers without which the last token's state stays nearest to the whole model's.

    With X_i the state behind layer i and g(i, j) the best state behind i layers of which j were
    skipped, g(i, j) is g(i-1, j-1) or f_i(g(i-1, j)), whichever has the larger cosine with X_i. All
    j run as siblings in one pass of the whole model, of which j = 0 is X itself.

    Args:
        share: Of the layers.
        length: Tokens per round; 0 is neutral.
        every: Rounds from one programme to the next; the paper runs it after each.
        risk: As of `mmdecode.draft.assistant.Assistant`.

    Differs from the paper: one set for all rows, by the mean cosine of those that go on.
    """

    summary = "the model without the layers that the last tokens could spare drafts a chain"
    source = "CLaSp, Chen et al. 2025"

    def _search(self, call: Call) -> None:
        branch = self._branch
        assert branch is not None
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
        self.choices: list[Tensor] = []  # by layer, which j skip it, (count + 1,)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """A hook behind a layer: what it puts out, or what went in one candidate before."""
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
        """With the whole model's, summed over rows, ``(count + 1,)``."""
        near = cosine_similarity(states.float(), ran[:, :1].float(), dim=-1)
        return (near * self.rows[:, None]).sum(0)

    def skipped(self) -> list[int]:
        """The layers on the way to g(L, count)."""
        choices, j, found = torch.stack(self.choices).tolist(), self.count, []
        for layer in reversed(range(len(choices))):
            if choices[layer][j]:
                found.append(layer)
                j -= 1
        return found


class Nothing(nn.Module):
    """Stands in the place of a sublayer, and adds nothing to what goes round it.

    Args:
        replaced: What it stands for.
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
    """What may be skipped: sublayers between the first and the last layer, or whole layers."""
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
