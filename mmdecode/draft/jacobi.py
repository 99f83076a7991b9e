"""Jacobi windows: the guesses of one pass are the drafts of the next.

Nothing is trained and no second model is run. The window behind the last committed token is scored
in one pass, the rule keeps what it can, and what lies behind the first rejection comes back with
the law each token was drawn from (`mmdecode.engine.window`); places that are new to the window are
filled from their neighbours or at random. What this gains depends on how soon a token's law settles
while the tokens before it still change, so it suits image tokens, and text hardly.

Sources: Teng et al. 2024 (SJD), arXiv:2410.01699, section 4, with its initialisations; SJD-PAC,
arXiv:2603.18599, for adaptive continuation and siblings at the front; arXiv:2510.24211 for the two
couplings. Differs from the published code: random guesses record the uniform law they came from
(both are exact, this one is kept more often), forced tokens are put in their places, a batch is
ragged, and at the end the window shrinks.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.call import Call, WindowMode
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter, Outcome, Requirements
from mmdecode.engine.layout import Layout
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal, Tree
from mmdecode.errors import OptionError

STARTS = ("random", "left", "left_law", "above", "above_law")
CONTINUATIONS = ("adaptive", "redraw", "shared")


class Jacobi(Drafter):
    """A window of guesses that are scored together and guessed again.

    Args:
        window: Tokens of a pass, L: the last committed one and L - 1 guesses. 1 is neutral.
        start: Guesses at places that are new to the window. ``random``: uniform over the image's
            codes; ``left`` and ``above``: the neighbour's token; ``left_law`` and ``above_law``: a
            draw from the law that was last noted of the neighbour. Places without that neighbour,
            and all places of models without a grid, are random.
        continuation: What becomes of the window behind a rejection, where the rule is a rejection
            test: ``adaptive``, every guess is tested; ``redraw``, as SJD was published; ``shared``,
            drawn with noise that belongs to the place. The coupled rule and greedy decoding guess
            by their own choice.
        siblings: Guesses per place in the first ``levels`` places; 1: a chain.
        levels: Places that have siblings.

    Lossless under every exact rule. ``adaptive`` and ``shared`` are two modes, not to be combined.

    Raises:
        OptionError: A number or a name is out of range.
    """

    summary = "guesses of one pass are the drafts of the next: for image tokens"
    source = "Teng et al. 2024"
    capabilities = DrafterCapabilities(graph_safe=True)
    _layout: Layout | None
    _laws: Tensor | None

    def __init__(
        self,
        window: int = 32,
        start: str = "above",
        continuation: str = "adaptive",
        siblings: int = 1,
        levels: int = 2,
    ) -> None:
        if window < 1 or siblings < 1 or levels < 1:
            raise OptionError(
                f"window={window}, siblings={siblings}, levels={levels}; expected 1 or more each"
            )
        if start not in STARTS:
            raise OptionError(f"start must be one of {', '.join(STARTS)}, got {start!r}")
        if continuation not in CONTINUATIONS:
            raise OptionError(
                f"continuation must be one of {', '.join(CONTINUATIONS)}, got {continuation!r}"
            )
        self.window, self.start, self.continuation = window, start, continuation
        self.siblings, self.levels = siblings, min(levels, window - 1)
        self._paths: list[tuple[int, ...]] = []
        self._tree: Tree | None = None
        if siblings > 1 and self.levels:
            self._tree, self._paths = front_tree(window - 1, siblings, self.levels)
        drawn: Kind = "iid" if self._tree is None else "without_replacement"
        self.kinds: tuple[Kind, ...] = ("coupled", "deterministic", drawn)
        own: WindowMode = continuation  # type: ignore[assignment]
        modes: dict[Kind, WindowMode] = {
            "coupled": "coupled",
            "deterministic": "redraw",
            drawn: own,
        }
        self.needs = Requirements(window_modes=modes)
        self.reset()

    def begin(self, call: Call, prefill: BranchOutput, kind: Kind) -> None:
        """Makes room for guesses by place, and for their laws where something reads these.

        Raises:
            OptionError: The window is larger than the image.
        """
        self._kind = kind
        layout = self._layout = getattr(call.plan.adapter, "layout", None)
        if layout is not None and self.window > layout.length:
            raise OptionError(
                f"a window of {self.window} tokens is larger than the image, which has "
                f"{layout.length}: give a window of at most {layout.length}"
            )
        vocab = prefill.logits.shape[-1]
        self._ids = torch.arange(vocab, device=call.device)
        if layout is not None:
            self._ids = layout.ids.to(call.device)
        self._uniform = torch.full((vocab,), -torch.inf, device=call.device)
        self._uniform[self._ids] = 0.0
        self._known = torch.zeros_like(call.rows.length)  # first place of each row without a guess
        size = call.request.max_new_tokens + self.window
        self._guesses = torch.zeros((call.batch, size), dtype=torch.long, device=call.device)
        drawn = kind in ("iid", "without_replacement")
        if drawn or self._tree is not None or self.start.endswith("_law"):
            # the window, and as far back as neighbours lie: a ring, by place modulo its size
            back = layout.stride if layout is not None and self.start == "above_law" else 1
            self._laws = self._uniform.repeat(call.batch, self.window + back, 1)
        self._depths, self._ranks = (
            torch.tensor(part, device=call.device)
            for part in ([len(path) - 1 for path in self._paths], [p[-1] for p in self._paths])
        )

    def observe(
        self, call: Call, proposal: Proposal, scores: BranchOutput, outcome: Outcome
    ) -> None:
        """Notes what is left of the window, and the law each guess was drawn from."""
        window = outcome.window
        assert window is not None, "the loop refills it"
        places = call.rows.length[:, None] + torch.arange(
            window.tokens.shape[1], device=call.device
        )
        self._guesses.scatter_(1, places, window.tokens.clamp_min(0))
        if self._laws is not None:
            logits = window.logits
            self._laws.scatter_(1, self._ring(places).expand_as(logits), logits)
        self._known.copy_(call.rows.length + (window.tokens >= 0).sum(1))

    def propose(self, call: Call, budget: int) -> Proposal:
        """What is left of the window, then fresh guesses."""
        if self.window == 1:
            return Proposal.empty(call.batch, call.device)
        places = call.rows.length[:, None] + torch.arange(self.window - 1, device=call.device)
        fresh, start = self._begun(call, places)
        missing = places >= self._known[:, None]
        tokens = torch.where(missing, fresh, self._guesses.gather(1, places))
        if self._layout is not None and self._layout.has_forced:
            forced = self._layout.forced(places)
            tokens = torch.where(forced >= 0, forced, tokens)
        if self._laws is None:
            return Proposal(tokens=tokens, kind=self._kind)
        index = self._ring(places).expand(-1, -1, self._laws.shape[-1])
        laws = torch.where(missing[..., None], start, self._laws.gather(1, index))
        if self._layout is not None and self._layout.has_forced:
            laws = torch.where((forced >= 0)[..., None], one_hot(forced, laws), laws)
        self._laws.scatter_(1, index, laws)  # neighbours may read them
        if self._tree is None:
            return Proposal(
                tokens=tokens, kind=self._kind, log_q=laws if self._kind == "iid" else None
            )
        return self._with_siblings(call, places, tokens, laws)

    def reorder(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``."""
        self._known, self._guesses = self._known[rows], self._guesses[rows]
        self._laws = None if self._laws is None else self._laws[rows]

    def reset(self) -> None:
        """Forgets the call."""
        self._layout = None
        self._laws = None
        self._known = self._guesses = self._ids = self._uniform = torch.empty(0)
        self._depths = self._ranks = torch.empty(0)

    def _ring(self, places: Tensor) -> Tensor:
        """Where the laws of ``places (B, N)`` are kept, ``(B, N, 1)``."""
        assert self._laws is not None
        return (places % self._laws.shape[1])[..., None]

    def _begun(self, call: Call, places: Tensor) -> tuple[Tensor, Tensor]:
        """Guesses at ``places (B, N)`` by nothing but their neighbours, and their log-laws."""
        law = self._uniform.expand(*places.shape, -1)
        source = self._source(places)
        if source is None:
            return self._draw(call, places, law), law
        found, source = (source >= 0)[..., None], source.clamp_min(0)
        if self.start.endswith("_law"):
            assert self._laws is not None
            index = self._ring(source).expand_as(law)
            law = torch.where(found, self._laws.gather(1, index), law)
            return self._draw(call, places, law), law
        told = call.rows.ids.gather(1, source + call.prompt_length)
        told = torch.where(
            source < call.rows.length[:, None], told, self._guesses.gather(1, source)
        )
        tokens = torch.where(found[..., 0], told, self._draw(call, places, law))
        return tokens, torch.where(found, one_hot(told, law), law)

    def _source(self, places: Tensor) -> Tensor | None:
        """The place each of ``places (B, N)`` begins from, -1 where it has none that is known."""
        layout = self._layout
        if self.start == "random" or layout is None:
            return None
        end = self._known[:, None]
        if self.start.startswith("above"):
            above = layout.above(places)
            return torch.where(above < end, above, -1)
        # the nearest known place of the same row
        nearest = torch.minimum(layout.left(places), end - 1)
        return torch.where(nearest >= places - places % layout.stride, nearest, -1)

    def _draw(self, call: Call, places: Tensor, law: Tensor) -> Tensor:
        """A token from each ``law (B, N, V)``, by noise that suits the kind of proposal."""
        trial = None if self.continuation == "shared" else call.rows.rounds
        if not self.start.endswith("_law"):  # uniform, where coupling would gain next to nothing
            unit = call.request.noise.uniform(places, Role.DRAFT, trial=trial)
            return self._ids[(unit * len(self._ids)).long()]
        if not call.request.do_sample:
            return law.argmax(-1)
        if self._kind == "coupled":
            return (law + call.request.noise.gumbel(places, Role.TARGET, law.shape[-1])).argmax(-1)
        return (
            law + call.request.noise.gumbel(places, Role.DRAFT, law.shape[-1], trial=trial)
        ).argmax(-1)

    def _with_siblings(self, call: Call, places: Tensor, tokens: Tensor, laws: Tensor) -> Proposal:
        """The chain with further draws from the laws of its first places, without replacement."""
        assert self._tree is not None
        front = laws[:, : self.levels]
        if call.request.do_sample:
            coupled = self._kind == "coupled"
            role, trial = (Role.TARGET, None) if coupled else (Role.DRAFT, call.rows.rounds)
            noise = call.request.noise.gumbel(
                places[:, : self.levels], role, laws.shape[-1], trial=trial
            )
            front = front + noise
        first = tokens[:, : self.levels, None]
        more = front.scatter(2, first, -torch.inf).topk(self.siblings - 1, -1)
        others = more.indices.masked_fill(more.values == -torch.inf, -1)
        choices = torch.cat([first, others], -1)
        choices = pad(choices, (0, 0, 0, tokens.shape[1] - self.levels), value=-1)
        choices[:, self.levels :, 0] = tokens[:, self.levels :]
        nodes = choices[:, self._depths, self._ranks]
        _, _, ancestors = self._tree.tensors(call.device)
        lost = (ancestors[1:, 1:] & (nodes < 0)[:, None]).any(-1)  # behind a sibling that is none
        return Proposal(
            tokens=nodes.masked_fill(lost, -1),
            kind=self._kind,
            tree=self._tree,
            log_q=laws[:, self._depths] if self._kind == "without_replacement" else None,
        )


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """The log-law of tokens that were not drawn: ``(B, N)`` to the shape of ``like (B, N, V)``."""
    certain = torch.full_like(like, -torch.inf)
    return certain.scatter(2, tokens.clamp_min(0)[..., None], 0.0)


def front_tree(length: int, siblings: int, levels: int) -> tuple[Tree, list[tuple[int, ...]]]:
    """A chain of ``length`` nodes whose first ``levels`` places have ``siblings`` guesses each.

    Returns:
        The tree, and each node's rank path; first siblings lead on.
    """
    paths = [
        path
        for depth in range(1, levels + 1)
        for path in itertools.product(range(siblings), repeat=depth)
    ]
    return Tree.from_paths([*paths, *((0,) * depth for depth in range(1, length + 1))])
