"""SWIFT and CLaSp: drafting with the target model, without layers that a search chose to skip.

The search runs during decoding. `Swift` tries sets of attention and MLP sublayers on the latest
tokens, and keeps the set without which the model predicts most of them. `Clasp` chooses whole
layers by a dynamic programme over the hidden states of the last token. Both draft with a copy of
the target's keys and values (see `mmdecode.draft.mirror`). All rows of a batch share one set, so
the drafts of a row depend on the other rows; the output does not.

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
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.hooks import of_this_thread
from mmdecode.engine.masks import chain
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError, OptionError

Unit = tuple[int, str]
"""A unit that may be skipped: a layer's index, and ``"attention"``, ``"mlp"`` or ``"layer"``, the
whole layer."""

ENOUGH = 0.95
"""Share of predicted tokens at which the search ends, as in SWIFT."""


class LayerSearch(CacheCopyDrafter):
    """Drafts ``length`` tokens without a share of the model's layers: base of `Swift` and `Clasp`.

    Args:
        share: Share of the skippable layers or sublayers to skip; with 0 the whole model drafts,
            and every token is accepted.
        length: Drafted tokens per round; 0 drafts nothing.
        every: Number of rounds after which the search is run again.
        max_rejection_probability: See `mmdecode.draft.assistant.Assistant`.

    Proposals are deterministic or coupled, not sampled. Lossless under every exact acceptance rule.
    The tokens that ``sample_match`` samples for a seed (not their distribution) depend on the other
    rows of the batch. A round with a search needs one more transfer to the host.

    Raises:
        IncompatibleError: When decoding begins: the model's layers have different attention
            windows.
    """

    kinds: tuple[Kind, ...] = ("deterministic", "coupled")
    # the search decides on the host which layers are run
    capabilities = DrafterCapabilities(graph_safe=False, follows_target=True)

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
        """Builds the drafter from the options of a string, such as ``clasp:share=0.5,length=6``."""
        return cls(share, length, every, max_rejection_probability)

    def _refuse(self, call: Call) -> None:
        if len(call.plan.adapter.windows) > 1:
            raise IncompatibleError.between(
                f"draft {type(self).__name__}",
                call.plan.adapter.name,
                "the attention window of a layer depends on its index in the model",
                "use layer_skip with exit_layer, which keeps the index of every layer",
            )
        super()._refuse(call)


class SearchSession(CopySession):
    """Session of a `LayerSearch` drafter.

    Attributes:
        skipped: Units that are skipped when drafting; empty before the first search.
    """

    def __init__(self, call: Call, prefill: BranchOutput, drafter: LayerSearch) -> None:
        super().__init__(call, prefill, drafter)
        self.share, self.every = drafter.share, drafter.every
        self.skipped: frozenset[Unit] = frozenset()
        self._whole: Any = call.plan.adapter
        self._proposals = 0
        self._views: dict[frozenset[Unit], Any] = {}

    def propose(self, budget: int) -> Proposal:
        """Drafts a chain per row; every ``every`` rounds, a search is run first."""
        if min(self.length, budget) > 0:
            if self._proposals % self.every == 0 and self.share:
                self.search()
            self._proposals += 1
            self.branch.use(self.view(self.skipped))
        return super().propose(budget)

    def search(self) -> None:
        """Sets `skipped`; the cache's committed entries and write positions stay the same."""
        raise NotImplementedError

    def view(self, skip: frozenset[Unit]) -> Any:
        """Returns an adapter of the model that skips the units ``skip``."""
        if not skip:
            return self._whole
        if skip not in self._views:
            self._views[skip] = adapter_like(self._whole, partial(self._whole, skip))
        return self._views[skip]


class Swift(LayerSearch):
    """SWIFT: skips the set of sublayers that a random search finds to matter least.

    A candidate is a random set of ``share`` of the sublayers between the first and the last layer.
    Its score, from one pass over the last ``window`` tokens, is the share of tokens that the model
    without the set predicts as its argmax. The best set is kept from call to call; the search ends
    with a score of 95 %.

    Args:
        share: Share of these sublayers to skip.
        length: Drafted tokens per round; 0 drafts nothing.
        every: Number of rounds after which the next candidate is tried.
        max_rejection_probability: See `mmdecode.draft.assistant.Assistant`; 0.2 is closest to the
            stopping rule of SWIFT.
        window: Maximum number of tokens that a candidate is scored on.
        seed: Seed of the random candidates.

    Differs from the reference: no Bayesian optimisation (off by default there too), no tree; the
    best set is scored again with each candidate, on the same tokens. Whole layers are skipped if
    the model's layers do not consist of ``attention_sites`` and an ``mlp``.
    """

    summary = "the model drafts a chain without the sublayers that a search found dispensable"
    source = "SWIFT, Xia et al. 2024"
    capabilities = DrafterCapabilities(graph_safe=False, follows_target=True, repeatable=False)

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
        """Opens a session with the best set found so far for a model with the same units."""
        self._refuse(call)
        return SwiftSession(call, prefill, self)

    def found(self, units: Sequence[Unit]) -> Found:
        """Returns the state of the search for models with these units."""
        with self._lock:
            return self._found.setdefault(tuple(units), Found(units, self.share, self.seed))


class Found:
    """State of the search of `Swift`, shared by all calls of models with the same units.

    Args:
        units: Units that may be skipped.
        share: Share of these units to skip.
        seed: Seed of the random candidates.

    Attributes:
        skipped: The best set so far; at first, evenly spaced units.
        enough: Whether the search is over.
    """

    def __init__(self, units: Sequence[Unit], share: float, seed: int) -> None:
        count = round(share * len(units))
        self.units, self.enough = units, False
        self.skipped = frozenset(units[i * len(units) // count] for i in range(count))
        self._dice = random.Random(seed)
        self._lock = Lock()

    def candidate(self) -> frozenset[Unit]:
        """Returns a random set of units, as many as in ``skipped``."""
        with self._lock:
            return frozenset(self._dice.sample(self.units, len(self.skipped)))

    def compared(
        self, best: frozenset[Unit], candidate: frozenset[Unit], shares: Sequence[float]
    ) -> None:
        """Keeps the better of two scored sets, unless another call has replaced ``best`` since.

        Args:
            best: The best set when the scoring began.
            candidate: The candidate.
            shares: Scores of ``best`` and ``candidate``.
        """
        with self._lock:
            if self.skipped == best:
                self.skipped = candidate if shares[1] > shares[0] else best
                self.enough = max(shares) >= ENOUGH


class SwiftSession(SearchSession):
    """Session of a `Swift` drafter."""

    def __init__(self, call: Call, prefill: BranchOutput, drafter: Swift) -> None:
        super().__init__(call, prefill, drafter)
        self.window, self.found = drafter.window, drafter.found(units_of(call.plan.adapter))
        self.skipped = self.found.skipped

    def search(self) -> None:
        """Compares a candidate set with the best set so far on the same tokens."""
        found, window = self.found, min(self.window, self.call.rows.cur_len)
        self.skipped = best = found.skipped
        if found.enough or not 0 < len(best) < len(found.units) or window < 1:
            return
        candidate = found.candidate()
        shares = torch.stack([self.matches(skip, window) for skip in (best, candidate)])
        found.compared(best, candidate, shares.tolist())
        self.skipped = found.skipped

    def matches(self, skip: frozenset[Unit], window: int) -> Tensor:
        """Returns the share of the last ``window`` tokens that the reduced model predicts."""
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
    """CLaSp: skips the set of layers whose removal changes the last token's hidden state least.

    A dynamic programme chooses the set. Let X_i be the whole model's state after layer i, and g(i,
    j) the best state after i layers of which j were skipped. Then g(i, j) is g(i-1, j-1), or layer
    i applied to g(i-1, j), whichever has the larger cosine with X_i. All j are computed as sibling
    tokens in one pass of the whole model; j = 0 gives X.

    Args:
        share: Share of the layers to skip.
        length: Drafted tokens per round; 0 drafts nothing.
        every: Number of rounds after which the set is chosen again; 1 in the paper.
        max_rejection_probability: See `mmdecode.draft.assistant.Assistant`.

    Differs from the paper: all rows share one set, chosen by the sum of the cosines of the rows
    that are not finished.
    """

    summary = "the model drafts a chain without the layers that mattered least for the last tokens"
    source = "CLaSp, Chen et al. 2025"

    def begin(self, call: Call, prefill: BranchOutput) -> ClaspSession:
        """Opens a session with a copy of the prompt's keys and values."""
        self._refuse(call)
        return ClaspSession(call, prefill, self)


class ClaspSession(SearchSession):
    """Session of a `Clasp` drafter."""

    def search(self) -> None:
        """Chooses the layers to skip by running the dynamic programme on the last token."""
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
    """The dynamic programme of `Clasp`, run in one pass of the model over ``count + 1`` candidates.

    Candidate j, from 0 to ``count``, is the best hidden state so far with j skipped layers. The
    candidates are separate queries at the last token's position.

    Args:
        count: Number of layers to skip.
        rows: Rows whose cosines are summed for the choice, ``(B,)`` bool.
    """

    def __init__(self, count: int, rows: Tensor) -> None:
        self.count, self.rows = count, rows.float()
        self.choices: list[Tensor] = []  # by layer: which candidates j skip it, (count + 1,)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Runs the dynamic programme's step for one layer; a forward hook of that layer.

        Candidate j gets the layer's output, or skips the layer and gets the input of candidate
        j - 1, whichever is nearer to the whole model's state.
        """
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
        """Returns cosines with the whole model's state, summed over rows, ``(count + 1,)``."""
        near = cosine_similarity(states.float(), ran[:, :1].float(), dim=-1)
        return (near * self.rows[:, None]).sum(0)

    def skipped(self) -> list[int]:
        """Returns the indices of the layers that the final candidate, j = ``count``, skipped."""
        choices, j, found = torch.stack(self.choices).tolist(), self.count, []
        for layer in reversed(range(len(choices))):
            if choices[layer][j]:
                found.append(layer)
                j -= 1
        return found


class Nothing(nn.Module):
    """Replaces a skipped sublayer: its output is zero, so the residual stream is unchanged.

    Args:
        replaced: The sublayer.
        attention: Whether the sublayer is attention. In transformers' models, attention also
            returns its weights; in this library's models, its return annotation is ``Tensor``.
    """

    def __init__(self, replaced: nn.Module, attention: bool) -> None:
        super().__init__()
        returned = inspect.signature(replaced.forward).return_annotation
        self.pair = attention and returned not in (Tensor, "Tensor")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns zeros in the shape of the input; for attention also ``None`` as weights."""
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.pair else zeros


def units_of(adapter: Any) -> list[Unit]:
    """Lists the units that may be skipped: attention and MLP of each layer, or whole layers.

    The first and the last layer are never skipped.
    """
    layers = list(adapter.layers())
    inner = range(1, len(layers) - 1)
    sites = adapter.attention_sites()
    if len(sites) == len(layers) and all(hasattr(layers[index], "mlp") for index in inner):
        return [(index, part) for index in inner for part in ("attention", "mlp")]
    return [(index, "layer") for index in inner]


def partial(adapter: Any, skip: Collection[Unit]) -> Any:
    """Returns the model without the units ``skip``, with shared weights."""
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
