"""Drafting from the target's states: chains and trees of a `FeatureDrafter`, in ragged batches.

The drafter's cache holds one row per committed token but the last, on the accepted path alone; the
states that verification made anyway are its input, so a round costs one pass over the new rows and
one for each further level. A tree is grown level by level: every node of the frontier has its best
children, the best of these by the probability of their path go on, and in the end the best of all
nodes are kept. A node is never likelier than its parent, so what is kept is a tree.

Sources: Li et al. 2024 (EAGLE-2), arXiv:2406.16858, section 4; Wang et al. 2025 (OPT-Tree),
arXiv:2406.17276, for the depth (see `Worth`). Differs from the references: any batch with unlike
rows, no loop over nodes and no question to the device within a round, ties go to the earlier node,
and a draft that is coupled to the law's noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from mmdecode.checkpoints import paired
from mmdecode.draft.own_law import OwnLaw, noise_of
from mmdecode.engine.branch import MAIN, block_mask, chain, model_name
from mmdecode.engine.cache import RaggedCache, bucket
from mmdecode.engine.contracts import (
    Adapter,
    BranchSpec,
    Context,
    Guide,
    Needs,
    Outcome,
    Prompt,
    Scores,
)
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.models.feature_drafter import FeatureDrafter, Rows, load_drafter
from mmdecode.models.hydra import HydraHeads
from mmdecode.models.image_rows import numbered

IMAGES = ("all", "hidden")
Module = TypeVar("Module", bound=nn.Module)


class FeatureDraft:
    """Drafts with a model over the target's states.

    Args:
        drafter: The model.
        depth: Tokens on the longest path; the references count one less. 0 is neutral.
        top_k: Children of a node, and nodes of a level that go on; 1 drafts a chain.
        nodes: Nodes that are kept, the root not counted; the references count it.
        images: ``hidden`` leaves the prompt's image rows out of what the drafter sees, a control.
        drawn: Whether rules that test a token against its law get tokens that were drawn, without
            replacement from log q, and not the likeliest; ``None``: where the drafter was made for
            a model of image tokens, whose laws are flat, and the tree fits into ``nodes``, since
            none that was drawn may be left out.
        gain: A row's tree ends behind the level that adds no more than this to the number of
            drafted tokens that the drafter expects to be accepted; ``None``, the neutral setting:
            at ``depth``. With ``top_k`` as many as ``nodes`` this is OPT-Tree; see `Worth`.

    Proposes deterministic trees, or drawn ones with their laws. Under the coupled rule children
    are the top of log q plus the noise that decides their position, while paths are weighed by
    log q; tokens that the drafter's vocabulary lacks are never proposed. Lossless under every exact
    rule, whatever it says.

    Under a guide with other branches (see `under`) the drafter runs on the states of each, and what
    it drafts follows the guided law, as LANTERN has it.

    Raises:
        OptionError: An option is out of range, or a drawn tree has too many nodes.
    """

    static = True
    own_tokens_only = True  # a path of another draft may be longer than its passes
    advice = (
        "drawn=true with a chain (length=4) or a tree that is kept whole (depth=2,top_k=3), which "
        "proposes tokens with their law"
    )
    modules: ClassVar[Mapping[str, type[FeatureDrafter]]] = {}
    """What `from_pretrained` loads."""

    def __init__(
        self,
        drafter: FeatureDrafter,
        depth: int = 5,
        top_k: int = 8,
        nodes: int = 31,
        images: str = "all",
        drawn: bool | None = None,
        gain: float | None = None,
    ) -> None:
        if depth < 0 or top_k < 1 or nodes < 1:
            raise OptionError(
                f"depth={depth}, top_k={top_k}, nodes={nodes}; expected depth >= 0, top_k >= 1 and "
                "nodes >= 1"
            )
        if images not in IMAGES:
            raise OptionError(f"images={images!r}; expected one of {', '.join(IMAGES)}")
        grown = top_k + max(depth - 1, 0) * top_k**2
        if drawn and grown > nodes:
            raise OptionError(
                f"a drawn tree of depth {depth} and top_k {top_k} has {grown} nodes, of which "
                f"{nodes} would be kept, by what was drawn; expected nodes={grown} or more, a "
                "smaller tree, a chain (length=...), or drawn=false"
            )
        if drawn is None:
            drawn = bool(drafter.config.get("draws_images")) and grown <= nodes
        sampled: Kind = "iid" if top_k == 1 else "without_replacement"
        kinds: tuple[Kind, ...] = ("deterministic", "coupled")
        self.kinds = (*kinds, sampled) if drawn else kinds
        self.drafter, self.depth, self.top_k, self.nodes = drafter.eval(), depth, top_k, nodes
        if gain is not None and gain < 0:
            raise OptionError(f"gain={gain}; expected 0 or more expected tokens a level")
        self.images, self.gain, self.law = images, gain, OwnLaw()
        self._running = self.drafter
        self._placed = [self.drafter]  # where states were last, also for copies of this
        self._kind: Kind = "deterministic"
        self._cache: Any = None  # its rows, like all below, branch by branch
        self._pads: Any = None
        self._base: Any = None  # from a slot to its position
        self._state: Tensor | None = None  # of the last row, (B, 1, H)
        self._carried: Tensor | None = None
        self._distances: Tensor | None = None
        self._width = self._reach = 0  # slots of the prompt, and of the longest row

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Self:
        """Loads a drafter in our layout or a published one.

        Args:
            name: A folder, a Hub id or ``zoo:NAME``.
            **options: As of the class.

        Raises:
            InputError: The checkpoint holds no such drafter.
        """
        return cls(load_drafter(name, cls.modules), **options)

    @classmethod
    def from_options(
        cls,
        path: str | None = None,
        model_id: str | None = None,
        length: int | None = None,
        depth: int = 5,
        top_k: int = 8,
        nodes: int = 31,
        images: str = "all",
        drawn: bool | None = None,
        gain: float | None = None,
    ) -> Self:
        """From a string; ``length`` drafts a chain of so many tokens instead of a tree.

        Without ``path``, the drafter that is shipped for the model at hand.
        """
        path = path or shipped(cls.modules, model_id)
        return cls.shaped(path, length, depth, top_k, nodes, images=images, drawn=drawn, gain=gain)

    @classmethod
    def shaped(
        cls, path: str, length: int | None, depth: int, top_k: int, nodes: int, **options: Any
    ) -> Self:
        """A draft of a chain of ``length`` tokens, or where that is ``None`` of a tree."""
        if length is not None:
            depth, top_k, nodes = length, 1, max(length, 1)
        return cls.from_pretrained(path, depth=depth, top_k=top_k, nodes=nodes, **options)

    def needs(self, adapter: Adapter) -> Needs:
        """The states that make a feature; of a model with images, what stands for them too.

        Raises:
            IncompatibleError: The drafter was made for another target.
        """
        return feature_needs(self.drafter, adapter)

    def under(self, guide: Guide | None, warp: Callable[[Tensor], Tensor] | None) -> Self:
        """This draft with the law of a target."""
        alike = copy.copy(self)
        alike.law = OwnLaw(guide, warp)
        return alike

    def begin(self, ctx: Context, prefill: Scores, kind: Kind) -> None:
        """Reads all prompt rows but the last, whose next token is yet to be decided."""
        refuse_foreign(self.drafter, ctx.adapter, prefill)
        self._kind = kind
        self._place(prefill.hidden["last"])
        self.law.begin(ctx, {"main": prefill, **prefill.beside})
        rows = prompt_rows(self._running, ctx, prefill, self.law.specs)
        rows = replace(rows, features=self._running.fuse(rows.features))
        assert rows.kept is not None and rows.images is not None
        shift = rows.kept.sum(1)  # tokens before the last one
        whole = rows.kept
        rows = self._running.prepare(self._shown(rows, prefill))
        packed = rows.packed() if rows.kept is not whole else (rows, rows.embeds.shape[1] - shift)
        rows, self._pads = packed
        self._carried = None if rows.carried is None else rows.carried[:, -1:]
        self._width = width = rows.embeds.shape[1]
        self._base = shift - width
        distances = _distances(self._running, ctx)
        self._distances = None if distances is None else self._each(distances)
        tree = self.depth * self.top_k if ctx.fixed else 0
        self._cache = RaggedCache(
            self._running.cache_layers, len(shift), ctx.device, ctx.reserved(width) + tree
        )
        if width:
            states = rows.embeds
            mask = block_mask(
                self._cache.start,
                self._pads,
                *chain(width, ctx.device),
                bucket(width),
                states.dtype,
            )
            self._run(rows, mask, bucket(width))
        self._cache.set_start(torch.full_like(self._pads, width))

    def _shown(self, rows: Rows, prefill: Scores) -> Rows:
        """The prompt's rows, without those that the drafter is not to see."""
        if self.images == "all":
            return rows
        assert rows.kept is not None and rows.images is not None
        return replace(rows, kept=rows.kept & (rows.images == 0))

    def _place(self, like: Tensor) -> None:
        self._running = self._placed[0] = placed(self.drafter, self._placed[0], like)

    def _run(self, rows: Rows, mask: Tensor, visible: int, offset: int = 0) -> Tensor:
        self._cache.open(visible, offset)
        return self._running(rows, mask, self._cache)

    def _positions(self, ctx: Context, slots: Tensor) -> Tensor:
        """Of slots ``(B, Q)``, behind the prompt."""
        positions = turned(self._running, ctx.adapter, slots + self._base[:, None])
        return positions if self._distances is None else positions + self._distances

    def _each(self, values: Tensor) -> Tensor:
        """Values of the rows ``(B, ...)``, for the rows of all branches."""
        branches = len(self.law.specs)
        return values if branches == 1 else values.repeat(branches, *[1] * (values.ndim - 1))

    def observe(self, ctx: Context, proposal: Proposal, scores: Scores, outcome: Outcome) -> None:
        """Reads the committed tokens: the states along the accepted path, each with what follows.

        Rows behind the path's end are read too, and written over in the next round.
        """
        levels = _levels(self._running, ctx.adapter)
        said = [{"main": scores, **scores.beside}[spec.name] for spec in self.law.specs]
        features = torch.cat(
            [torch.cat([branch.hidden[level] for level in levels], -1) for branch in said]
        )
        path = outcome.path[:, : self.depth]
        tokens = proposal.tokens.gather(1, path.clamp_min(0))
        if not proposal.is_chain:
            along = torch.nn.functional.pad(path + 1, (1, 0))  # root first
            features = gathered(features, self._each(along))
        width = features.shape[1]
        order = torch.arange(width, device=ctx.device)
        accepted = outcome.num_accepted[:, None]
        after = torch.nn.functional.pad(tokens, (0, 1))
        after = torch.where(order < accepted, after, outcome.next_token[:, None]).clamp_min(0)
        start = self._cache.start
        rows = Rows(
            embeds=self._running.embed(self._each(after), ctx.adapter),
            features=self._running.fuse(features),
            positions=self._positions(ctx, start[:, None] + order),
            carried=self._carried,
        )
        visible = bucket(self._width + ctx.longest + width)
        block = chain(width, ctx.device)
        mask = block_mask(start, self._pads, *block, visible, rows.embeds.dtype)
        states = self._run(rows, mask, visible)
        self._state = gathered(states, self._each(accepted))
        self._cache.set_start(self._width + self._each(ctx.length))
        # the longest row after this block, before it is cut
        self._reach = self._width + min(ctx.longest + width, ctx.limit)

    def propose(self, ctx: Context, budget: int) -> Proposal:
        """The likeliest paths below the last token."""
        levels = min(self.depth, budget)
        if levels <= 0:
            return Proposal.empty(ctx.batch, ctx.device)
        shape = Shape(levels, self.top_k, self.nodes, self.gain)
        own = self._running.target_ids()
        return grown_proposal(ctx, self._kind, self.law, shape, *self._reader(ctx, levels), own)

    def _reader(
        self, ctx: Context, levels: int
    ) -> tuple[Tensor, Callable[[int, Tensor, Tensor], Tensor]]:
        """Logits after the root, and what reads the nodes of a level, as `grow` wants them.

        Both of all branches, ``(M * B, k, D)``; the nodes are those of rows.
        """
        assert self._state is not None, "observe was not called"
        drafter, own = self._running, self._running.target_ids()
        states, sees = self._state, None
        logits = drafter.logits(states, ctx.adapter)
        visible = bucket(self._reach + (levels - 1) * min(self.top_k, logits.shape[-1]))

        def step(level: int, tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal states, sees
            tokens, above, top_k = self._each(tokens), self._each(above), tokens.shape[1]
            sees = extended(sees, above)
            slots = (self._cache.start + level)[:, None].expand(-1, top_k)
            ids = tokens if own is None else own[tokens]
            rows = Rows(
                embeds=drafter.embed(ids, ctx.adapter),
                features=gathered(states, above),
                positions=self._positions(ctx, slots),
                carried=self._carried,
            )
            mask = tree_mask(self._cache.start, self._pads, sees, visible, rows.embeds.dtype)
            states = self._run(rows, mask, visible, offset=level * top_k)
            return drafter.logits(states, ctx.adapter)

        return logits, step

    def reorder(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``."""
        if self._cache is None:
            return
        branches = len(self.law.specs)
        batch = len(self._pads) // branches
        rows = torch.cat([rows + batch * branch for branch in range(branches)])
        self._cache.reorder_cache(rows)
        self._pads, self._base = self._pads[rows], self._base[rows]
        self._state = None if self._state is None else self._state[rows]
        self._carried = None if self._carried is None else self._carried[rows]
        self._distances = None if self._distances is None else self._distances[rows]

    def reset(self) -> None:
        """Forgets the call."""
        self._cache = self._pads = self._base = None
        self._state = self._carried = self._distances = None


def shipped(kinds: Iterable[str], model_id: str | None) -> str:
    """The drafter that ships with a model, the first of some kinds, as ``zoo:NAME``.

    Raises:
        OptionError: None of them does.
    """
    kinds = list(kinds)
    for kind in kinds:
        if (name := paired(model_id, kind)) is not None:
            return name
    raise OptionError(
        f"draft {kinds[0]!r} needs path=..., the folder or Hub id of a drafter; none is shipped "
        f"for {model_id or 'the model'}: train one by 'mmdecode train drafter --kind {kinds[0]}'"
    )


def feature_needs(drafter: FeatureDrafter, adapter: Any) -> Needs:
    """What a drafter wants of the target's passes; see `FeatureDraft.needs`."""
    shown = {0} if getattr(adapter, "shows_images", False) else set()
    hidden = frozenset({"last", *_levels(drafter, adapter), *shown})
    return Needs(hidden=hidden, prompt_hidden=True)


def prompt_rows(
    drafter: FeatureDrafter, ctx: Context, prefill: Scores, specs: Sequence[BranchSpec] = (MAIN,)
) -> Rows:
    """What a drafter reads of a prompt: all its tokens but the last, each with the one after it.

    Args:
        drafter: Whose rows they are.
        ctx: The call.
        prefill: With the states of the whole prompt, as `feature_needs` asks for them.
        specs: Branches whose prompts are read, the main one first; their rows follow each other.

    Returns:
        Rows whose features are not fused yet, ``(M * B, P - 1, levels * E)``; of a drafter that has
        a row for the first token, P of them, the first feature 0 and positions those of embeddings.
    """
    said = {"main": prefill, **prefill.beside}
    parts = [_branch_rows(drafter, ctx, said[spec.name].prompt_hidden, spec) for spec in specs]
    return parts[0] if len(parts) == 1 else Rows.stacked(parts)


def _prompt(ctx: Context, spec: BranchSpec) -> Prompt:
    """What a branch has read: a guide may have put another in its place, see `BranchSpec`."""
    running = {} if ctx.branch is None else {one.name: one for one in ctx.branch.specs}
    return ctx.adapter.prompt(ctx, running.get(spec.name, spec))


def _branch_rows(
    drafter: FeatureDrafter, ctx: Context, hidden: Mapping[int | str, Tensor], spec: BranchSpec
) -> Rows:
    adapter = ctx.adapter
    prompt = _prompt(ctx, spec)
    # a prompt that shares its pass with a wider one was padded there
    hidden = {level: states[:, -prompt.ids.shape[1] :] for level, states in hidden.items()}
    embeds = prompt.inputs.get("inputs_embeds")
    sizes = adapter.image_sizes(prompt) if getattr(adapter, "shows_images", False) else None
    images = numbered(adapter.image_mask(prompt.ids) & prompt.mask.bool(), sizes)
    if embeds is None:
        embeds = drafter.embed(prompt.ids, adapter)
        if 0 in hidden:  # image features stand where the placeholders were
            embeds = torch.where((images > 0)[..., None], hidden[0].to(embeds.dtype), embeds)
    positions = turned(drafter, adapter, (prompt.mask.long().cumsum(1) - 1).clamp_min(0))
    distances = prompt.inputs.get("distances")
    if drafter.rotary.sections is not None and distances is not None:
        positions = positions + distances
    features = torch.cat([hidden[level] for level in _levels(drafter, adapter)], -1)
    features, kept = features[:, :-1], prompt.mask.bool()
    if drafter.reads_first:
        features = torch.nn.functional.pad(features, (0, 0, 1, 0))
        return Rows(embeds=embeds, features=features, positions=positions, kept=kept, images=images)
    return Rows(
        embeds=embeds[:, 1:],
        features=features,
        positions=positions[..., :-1],
        kept=kept[:, :-1],
        images=images[:, 1:],
    )


def turned(drafter: FeatureDrafter, adapter: Any, positions: Tensor) -> Tensor:
    """Positions ``(B, Q)`` as a drafter turns by them; those of sections are ``(B, 3, Q)``.

    These are the places on the grid where the target writes an image on one.
    """
    if drafter.rotary.sections is None:
        return positions
    if getattr(adapter, "on_grid", False):
        return adapter.grid_places(positions)
    return positions[:, None].expand(-1, 3, -1)


def refuse_foreign(drafter: FeatureDrafter | HydraHeads, adapter: Any, prefill: Scores) -> None:
    """Raises where a drafter was made for a target of another width, vocabulary or depth.

    Raises:
        IncompatibleError: It was.
    """
    config = drafter.config
    sizes = {
        "states of width": (drafter.target_width, prefill.hidden["last"].shape[-1]),
        "a vocabulary of": (config.get("vocab_size"), prefill.logits.shape[-1]),
        "a depth in layers of": (config.get("target_num_layers"), adapter.num_layers),
    }
    for what, (wanted, found) in sizes.items():
        if wanted is not None and wanted != found:
            raise IncompatibleError.between(
                f"draft {type(drafter).__name__}",
                model_name(adapter),
                f"the drafter expects {what} {wanted}, the model has {found}",
                "use a drafter that was trained for this model",
            )


def _levels(drafter: FeatureDrafter, adapter: Any) -> tuple[int | str, ...]:
    """Keys of the states that make a feature of this target."""
    levels = drafter.levels(adapter.num_layers)
    highest = max((level for level in levels if isinstance(level, int)), default=0)
    if highest >= adapter.num_layers:
        raise IncompatibleError.between(
            f"draft {type(drafter).__name__}",
            model_name(adapter),
            f"the drafter reads the input of layer {highest}, the model has {adapter.num_layers} "
            "layers",
            "use a drafter that was trained for this model",
        )
    return levels


def _distances(drafter: FeatureDrafter, ctx: Context) -> Tensor | None:
    """Behind the prompt: from a token's number to its three positions, ``(B, 3, 1)``."""
    distances = _prompt(ctx, MAIN).inputs.get("distances")
    if drafter.rotary.sections is None or distances is None:
        return None
    return distances[..., -1:]


def placed(module: Module, running: Module, like: Tensor) -> Module:
    """A copy of a module where states are: half precision must not round the original.

    Args:
        module: The original.
        running: The copy so far, or the original.
        like: States.
    """
    parameter = next(running.parameters())
    if (parameter.device, parameter.dtype) == (like.device, like.dtype):
        return running
    return copy.deepcopy(module).to(like)


@dataclass(frozen=True)
class Shape:
    """Of a tree that is grown.

    Attributes:
        levels: Tokens on the longest path.
        top_k: Children of a node, and nodes of a level that go on; 1 makes a chain.
        nodes: That are kept, where none was drawn; of a chain, all.
        gain: As of `FeatureDraft`.
    """

    levels: int
    top_k: int
    nodes: int
    gain: float | None = None


class Worth:
    """Which rows' trees go on: those whose last level added more than ``gain`` expected tokens.

    A path is expected to be accepted as often as the drafter gives it probability, so a tree is
    worth the sum of these over the ``nodes`` nodes that are kept, and the likeliest nodes are the
    tree that is worth most. Where a level adds nothing, no later one can. The host looks only where
    that is free (on the CPU); elsewhere all levels are grown, and nodes behind a row's end are
    unused.

    Args:
        gain: Of expected tokens by a level that is not the last; the level that fails is kept.
        nodes: That a tree keeps.
        ctx: Of the call.

    Source: Wang et al. 2025 (OPT-Tree), arXiv:2406.17276, section 3. Differs from its code, which
    leaves the level it has just grown out of the sum.
    """

    def __init__(self, gain: float, nodes: int, ctx: Context) -> None:
        self.gain, self.nodes = gain, nodes
        self.looks = ctx.device.type == "cpu" and not ctx.fixed
        self.going = ctx.open[:, None]
        self._best = torch.zeros(ctx.batch, 0, device=ctx.device)
        self._expected = torch.zeros(ctx.batch, 1, device=ctx.device)

    def shown(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and scores of a level, ``(B, n)``, unused in rows that have ended."""
        ended = ~self.going
        return tokens.masked_fill(ended, -1), scores.masked_fill(ended, -torch.inf)

    def ended(self, scores: Tensor) -> bool:
        """Notes the scores of a level as shown; says whether all rows are known to end with it."""
        both = torch.cat([self._best, scores.exp()], 1)
        self._best = both.topk(min(self.nodes, both.shape[1]), dim=1).values
        expected = self._best.sum(1, keepdim=True)
        self.going = expected - self._expected > self.gain  # nothing is added where it ended
        self._expected = expected
        return self.looks and not bool(self.going.any())


@dataclass(frozen=True, kw_only=True)
class Grown:
    """Nodes of a tree for each row, parents before children.

    Attributes:
        tokens: ``(B, M)``, ids of the drafter, -1 where unused.
        parents: ``(B, M)``, -1 for children of the root.
        scores: Log-probability of each node's path, ``(B, M)``.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor

    def best(self, nodes: int) -> Grown:
        """The likeliest nodes in their old order; of equals the earlier, so parents stay."""
        size = self.tokens.shape[1]
        if nodes >= size:
            return self
        kept = self.scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
        kept = kept.sort(dim=1).values
        order = torch.arange(nodes, device=kept.device).expand_as(kept)
        place = kept.new_full((len(kept), size), -1).scatter(1, kept, order)
        above = self.parents.gather(1, kept)
        parents = place.gather(1, above.clamp_min(0)).masked_fill(above < 0, -1)
        return Grown(
            tokens=self.tokens.gather(1, kept),
            parents=parents,
            scores=self.scores.gather(1, kept),
        )


def grow(
    root: Tensor,
    step: Callable[[int, Tensor, Tensor], Tensor],
    levels: int,
    top_k: int,
    noise: Callable[[int], Tensor | None] = lambda level: None,
    worth: Worth | None = None,
) -> Grown:
    """All nodes of a tree of ``levels`` levels, ``top_k + (levels - 1) * top_k ** 2`` of them.

    Args:
        root: Logits after the last committed token, ``(B, 1, D)``.
        step: From a level, counted from 0, the tokens of its frontier ``(B, k)`` and the place of
            each one's parent in the frontier before, to logits after them, ``(B, k, D)``.
        levels: Tokens on the longest path.
        top_k: Children of a node, and nodes of a level that go on.
        noise: Of a level ``(B, 1, D)``, added to log q to choose children, not to weigh them;
            ``None``: the likeliest are chosen.
        worth: Which rows' trees end before; ``None``: none.
    """
    batch = len(root)
    tokens, parents, scores = [], [], []
    logits, first = root, 0
    node = torch.full((batch, 1), -1, device=root.device)  # of the frontier
    weight = torch.zeros(batch, 1, device=root.device)
    for level in range(levels):
        log_q = logits.float().log_softmax(-1)
        added = noise(level)
        ranked = log_q if added is None else log_q + added
        chosen = ranked.topk(top_k, dim=-1).indices  # (B, n, k)
        # rounding must not make a child likelier than its parent
        gain = log_q.gather(-1, chosen).clamp_max(0)
        score = (weight[..., None] + gain).flatten(1)
        chosen = chosen.flatten(1)
        shown = (chosen, score) if worth is None else worth.shown(chosen, score)
        # a warped law may leave fewer tokens than a node should have children
        tokens.append(shown[0].masked_fill(shown[1] == -torch.inf, -1))
        parents.append(node.repeat_interleave(top_k, 1))
        scores.append(shown[1])
        if level == levels - 1 or (worth is not None and worth.ended(shown[1])):
            break
        going = score.topk(top_k, dim=1).indices
        node, weight = first + going, score.gather(1, going)
        first += score.shape[1]
        logits = step(level, chosen.gather(1, going), going // top_k)
    return Grown(
        tokens=torch.cat(tokens, 1), parents=torch.cat(parents, 1), scores=torch.cat(scores, 1)
    )


def grown_proposal(
    ctx: Context,
    kind: Kind,
    law: OwnLaw,
    shape: Shape,
    root: Tensor,
    step: Callable[[int, Tensor, Tensor], Tensor],
    own: Tensor | None = None,
) -> Proposal:
    """A tree of a law: its likeliest nodes, or all that was drawn.

    Args:
        ctx: Of the call.
        kind: Of the proposal.
        law: Made of logits.
        shape: Of the tree.
        root: Logits after the last committed token, of all branches of the law, ``(M * B, 1, D)``.
        step: As of `grow`, to logits of all branches.
        own: The target's id of each of the drafter's, ``(D,)``; ``None``: they are the same.
    """
    vocab, top_k = ctx.adapter.vocab, min(shape.top_k, root.shape[-1])
    nodes = max(shape.nodes, shape.levels) if top_k == 1 else shape.nodes
    laws: list[Tensor] = []  # of the nodes of each level

    def law_of(level: int, logits: Tensor) -> Tensor:
        position = (ctx.length + level)[:, None]
        laws.append(law(ctx, logits, position, own))
        return laws[-1]

    grown = grow(
        law_of(0, root),
        lambda level, tokens, above: law_of(level + 1, step(level, tokens, above)),
        shape.levels,
        top_k,
        lambda level: noise_of(kind, ctx, (ctx.length + level)[:, None], vocab, own),
        None if shape.gain is None else Worth(shape.gain, nodes, ctx),
    )
    log_q = None
    if kind in ("iid", "without_replacement"):
        log_q = torch.cat([of.repeat_interleave(top_k, 1) for of in laws], 1)
        if own is not None:
            whole = log_q.new_full((*log_q.shape[:2], vocab), -torch.inf)
            log_q = whole.index_copy(2, own, log_q)
    else:
        grown = grown.best(nodes)
    tokens = grown.tokens
    if own is not None:
        tokens = own[tokens.clamp_min(0)].masked_fill(tokens < 0, -1)
    parents = None if top_k == 1 else grown.parents
    return Proposal(tokens=tokens, kind=kind, parents=parents, log_q=log_q)


def tree_mask(
    begin: Tensor, pads: Tensor, sees: Tensor, visible: int, dtype: torch.dtype
) -> Tensor:
    """What a level of a tree may attend to, as an additive mask ``(B, 1, k, visible)``.

    Args:
        begin: Slot behind the committed rows, where the tree's first level lies, ``(B,)``.
        pads: Slots at the left of each row that hold nothing, ``(B,)``.
        sees: What each node may see of the tree so far, itself included, ``(B, k, W)`` bool.
        visible: Slots that attention covers.
        dtype: The model's.
    """
    slots = torch.arange(visible, device=begin.device)
    relative = slots - begin[:, None]
    width = sees.shape[-1]
    column = relative.clamp(0, width - 1)[:, None].expand(-1, sees.shape[1], -1)
    inside = ((relative >= 0) & (relative < width))[:, None]
    committed = ((relative < 0) & (slots >= pads[:, None]))[:, None]
    seen = torch.where(inside, sees.gather(2, column), committed)
    low = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=begin.device)
    return torch.where(seen, 0.0, low)[:, None]


def extended(sees: Tensor | None, above: Tensor) -> Tensor:
    """What the nodes of a level see of the tree: what their parents do, and themselves."""
    batch, width = above.shape
    itself = torch.eye(width, dtype=torch.bool, device=above.device).expand(batch, -1, -1)
    if sees is None:
        return itself
    inherited = sees.gather(1, above[..., None].expand(-1, -1, sees.shape[-1]))
    return torch.cat([inherited, itself], -1)


def gathered(states: Tensor, rows: Tensor) -> Tensor:
    """The rows ``(B, n)`` of states ``(B, Q, H)``."""
    return states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1]))
