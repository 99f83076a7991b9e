"""Jacobi windows: the guesses of one pass are the drafts of the next.

Jacobi decoding needs no training and no second model. A window of guessed tokens after the last
committed token is scored in one pass, and the acceptance rule accepts a prefix of it. Positions
after the first rejection get new guesses from the scores of that pass (`mmdecode.engine.window`).
Positions that are new to the window get the token of a neighbour in the image, or a random one.
Guesses are only right early if a token's distribution depends little on the tokens just before it,
which holds for image tokens, but hardly for text.

Sources: Teng et al. 2024 (SJD), arXiv:2410.01699, section 4, with its initialisations; SJD-PAC,
arXiv:2603.18599, for ``adaptive`` and ``siblings``; arXiv:2510.24211 for coupled guesses. Differs
from the published code: the q of random guesses is the uniform distribution they were sampled from,
which is also exact and accepted more often; tokens that the image layout forces (such as the end of
a row) are set at their positions; rows of a batch accept different numbers of tokens; and the
window shrinks at the end of the image.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.adapter import Adapter
from mmdecode.engine.call import Call, WindowMode
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Block, BranchOutput, Drafter, DraftSession, Requirements
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal, Tree
from mmdecode.errors import OptionError
from mmdecode.models.image_layout import Layout

STARTS = ("random", "left", "left_law", "above", "above_law")
CONTINUATIONS = ("adaptive", "redraw", "shared")


class Jacobi(Drafter):
    """Drafts a window of guessed tokens, which every pass scores together and improves.

    Args:
        window: Number of tokens per pass: the last committed token and ``window - 1`` guesses. 1
            drafts nothing.
        start: How positions that are new to the window are guessed. ``random``: uniformly among the
            image's codes; ``left`` and ``above``: the token of that neighbour in the image;
            ``left_law`` and ``above_law``: a sample from the last distribution at that neighbour.
            Positions without the neighbour, and models without an image grid, use ``random``.
        continuation: How guesses after the first rejection are replaced under rejection sampling.
            ``adaptive``: each guess is tested, and kept or resampled; ``redraw``: each is sampled
            again, as in SJD; ``shared``: each is sampled with noise that depends on its position
            alone. In greedy decoding and under the coupled rule, each guess becomes the token that
            the target chooses at its position.
        siblings: Number of guesses per position, in the first ``levels`` positions of the window;
            1 drafts a chain.
        levels: Number of positions that have ``siblings`` guesses.

    Lossless under every exact acceptance rule.

    Raises:
        OptionError: A number or a name is out of range.
    """

    summary = "guesses of one pass are the drafts of the next: for image tokens"
    source = "Teng et al. 2024"
    capabilities = DrafterCapabilities(graph_safe=True)

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
        self.paths: list[tuple[int, ...]] = []
        self.tree: Tree | None = None
        if siblings > 1 and self.levels:
            self.tree, self.paths = front_tree(window - 1, siblings, self.levels)
        sampled: Kind = "iid" if self.tree is None else "without_replacement"
        self.kinds: tuple[Kind, ...] = ("coupled", "deterministic", sampled)
        own: WindowMode = continuation  # type: ignore[assignment]
        modes: dict[Kind, WindowMode] = {
            "coupled": "coupled",
            "deterministic": "redraw",
            sampled: own,
        }
        self._modes = modes

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns how guesses after a rejection are replaced, for each kind of proposal."""
        return Requirements(window_modes=self._modes)

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session with a window of guesses for each row.

        Raises:
            OptionError: The window is larger than the image.
        """
        adapter = call.plan.adapter
        layout: Layout | None = None if adapter is None else adapter.layout
        if layout is not None and self.window > layout.length:
            raise OptionError(
                f"a window of {self.window} tokens is larger than the image, which has "
                f"{layout.length}: give a window of at most {layout.length}"
            )
        return JacobiSession(call, self, layout, prefill.logits.shape[-1])


class JacobiSession(DraftSession):
    """Session of a `Jacobi` drafter: the windows of all rows of a call.

    Args:
        call: The generation call.
        drafter: The drafter, whose options are used.
        layout: Layout of the image; ``None``: the model does not generate an image on a grid.
        vocab: Size of the target's vocabulary.
    """

    def __init__(self, call: Call, drafter: Jacobi, layout: Layout | None, vocab: int) -> None:
        super().__init__(call)
        self.window, self.start, self.layout = drafter.window, drafter.start, layout
        self.shared = drafter.continuation == "shared"
        self.siblings, self.levels, self.tree = drafter.siblings, drafter.levels, drafter.tree
        self.kind = call.plan.kind
        device = call.device
        # tokens that may be guessed
        self.ids = torch.arange(vocab, device=device)
        if layout is not None:
            self.ids = layout.ids.to(device)
        self.uniform = torch.full((vocab,), -torch.inf, device=device)
        self.uniform[self.ids] = 0.0
        self.known = torch.zeros_like(call.rows.length)  # first position without a guess, per row
        size = call.request.max_new_tokens + self.window
        self.guesses = torch.zeros((call.batch, size), dtype=torch.long, device=device)
        self.log_q: Tensor | None = None  # distribution of each guess, where something reads it
        sampled = self.kind in ("iid", "without_replacement")
        if sampled or self.tree is not None or self.start.endswith("_law"):
            # a ring buffer by position modulo its size: the window, and neighbours before it
            back = layout.stride if layout is not None and self.start == "above_law" else 1
            self.log_q = self.uniform.repeat(call.batch, self.window + back, 1)
        self.depths, self.ranks = (
            torch.tensor(part, device=device)
            for part in ([len(p) - 1 for p in drafter.paths], [p[-1] for p in drafter.paths])
        )

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Stores the new guesses of the window, and the distributions they were sampled from."""
        window, length = block.window, self.call.rows.length
        assert window is not None, "the loop refills it"
        positions = length[:, None] + torch.arange(window.tokens.shape[1], device=length.device)
        self.guesses.scatter_(1, positions, window.tokens.clamp_min(0))
        if self.log_q is not None:
            index = self._ring(positions).expand_as(window.logits)
            self.log_q.scatter_(1, index, window.logits)
        self.known.copy_(length + (window.tokens >= 0).sum(1))

    def propose(self, budget: int) -> Proposal:
        """Proposes the stored guesses of the window, then guesses at new positions."""
        call, layout = self.call, self.layout
        if self.window == 1:
            return Proposal.empty(call.batch, call.device)
        order = torch.arange(self.window - 1, device=call.device)
        positions = call.rows.length[:, None] + order
        fresh, start = self._begun(positions)
        missing = positions >= self.known[:, None]
        tokens = torch.where(missing, fresh, self.guesses.gather(1, positions))
        if layout is not None and layout.has_forced:
            forced = layout.forced(positions)
            tokens = torch.where(forced >= 0, forced, tokens)
        if self.log_q is None:
            return Proposal(tokens=tokens, kind=self.kind)
        index = self._ring(positions).expand(-1, -1, self.log_q.shape[-1])
        log_q = torch.where(missing[..., None], start, self.log_q.gather(1, index))
        if layout is not None and layout.has_forced:
            log_q = torch.where((forced >= 0)[..., None], one_hot(forced, log_q), log_q)
        self.log_q.scatter_(1, index, log_q)  # neighbours may read it
        if self.tree is None:
            given = log_q if self.kind == "iid" else None
            return Proposal(tokens=tokens, kind=self.kind, log_q=given)
        return self._with_siblings(self.tree, positions, tokens, log_q)

    def _ring(self, positions: Tensor) -> Tensor:
        """Returns the indices in ``log_q`` of ``positions (B, N)``, ``(B, N, 1)``."""
        assert self.log_q is not None
        return (positions % self.log_q.shape[1])[..., None]

    def _begun(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns first guesses at ``positions (B, N)``, and the log q they were sampled from."""
        call, log_q = self.call, self.uniform.expand(*positions.shape, -1)
        source = self._source(positions)
        if source is None:
            return self._sampled(positions, log_q), log_q
        found, source = (source >= 0)[..., None], source.clamp_min(0)
        if self.start.endswith("_law"):
            assert self.log_q is not None
            index = self._ring(source).expand_as(log_q)
            log_q = torch.where(found, self.log_q.gather(1, index), log_q)
            return self._sampled(positions, log_q), log_q
        neighbour = call.rows.ids.gather(1, source + call.prompt_length)
        committed = source < call.rows.length[:, None]
        neighbour = torch.where(committed, neighbour, self.guesses.gather(1, source))
        tokens = torch.where(found[..., 0], neighbour, self._sampled(positions, log_q))
        return tokens, torch.where(found, one_hot(neighbour, log_q), log_q)

    def _source(self, positions: Tensor) -> Tensor | None:
        """Returns the neighbour that each of ``positions (B, N)`` is guessed from; -1 if none."""
        layout = self.layout
        if self.start == "random" or layout is None:
            return None
        end = self.known[:, None]
        if self.start.startswith("above"):
            above = layout.above(positions)
            return torch.where(above < end, above, -1)
        # the nearest known position of the same row
        nearest = torch.minimum(layout.left(positions), end - 1)
        return torch.where(nearest >= positions - positions % layout.stride, nearest, -1)

    def _sampled(self, positions: Tensor, log_q: Tensor) -> Tensor:
        """Samples a token from each ``log_q (B, N, V)``, with noise for the kind of proposal."""
        call, noise = self.call, self.call.request.noise
        trial = None if self.shared else call.rows.rounds
        if not self.start.endswith("_law"):  # uniform, where coupling would gain next to nothing
            unit = noise.uniform(positions, Role.DRAFT, trial=trial)
            return self.ids[(unit * len(self.ids)).long()]
        if not call.request.do_sample:
            return log_q.argmax(-1)
        if self.kind == "coupled":
            return noise.sample(log_q, positions, Role.TARGET)
        return noise.sample(log_q, positions, Role.DRAFT, trial)

    def _with_siblings(
        self, tree: Tree, positions: Tensor, tokens: Tensor, log_q: Tensor
    ) -> Proposal:
        """Adds siblings, sampled without replacement, at the first positions of the chain."""
        call, front = self.call, log_q[:, : self.levels]
        if call.request.do_sample:
            coupled = self.kind == "coupled"
            role, trial = (Role.TARGET, None) if coupled else (Role.DRAFT, call.rows.rounds)
            at, vocab = positions[:, : self.levels], log_q.shape[-1]
            front = front + call.request.noise.gumbel(at, role, vocab, trial=trial)
        first = tokens[:, : self.levels, None]
        more = front.scatter(2, first, -torch.inf).topk(self.siblings - 1, -1)
        others = more.indices.masked_fill(more.values == -torch.inf, -1)
        choices = torch.cat([first, others], -1)
        choices = pad(choices, (0, 0, 0, tokens.shape[1] - self.levels), value=-1)
        choices[:, self.levels :, 0] = tokens[:, self.levels :]
        nodes = choices[:, self.depths, self.ranks]
        _, _, ancestors = tree.tensors(call.device)
        lost = (ancestors[1:, 1:] & (nodes < 0)[:, None]).any(-1)  # below an unused sibling
        return Proposal(
            tokens=nodes.masked_fill(lost, -1),
            kind=self.kind,
            tree=tree,
            log_q=log_q[:, self.depths] if self.kind == "without_replacement" else None,
        )


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """Returns log-probabilities ``(B, N, V)`` that are one-hot at tokens ``(B, N)``."""
    certain = torch.full_like(like, -torch.inf)
    return certain.scatter(2, tokens.clamp_min(0)[..., None], 0.0)


def front_tree(length: int, siblings: int, levels: int) -> tuple[Tree, list[tuple[int, ...]]]:
    """Builds a chain of ``length`` nodes with siblings at its first ``levels`` positions.

    Returns:
        The tree, and each node's path as a tuple of sibling indices; after ``levels``, only the
        path of first siblings continues.
    """
    paths = [
        path
        for depth in range(1, levels + 1)
        for path in itertools.product(range(siblings), repeat=depth)
    ]
    return Tree.from_paths([*paths, *((0,) * depth for depth in range(1, length + 1))])
