"""Drafting from the target's states: chains and trees of a `FeatureDrafter`, in ragged batches.

The drafter's cache holds one row per committed token but the last, on the accepted path alone; the
states that verification made anyway are its input, so a round costs one pass over the new rows and
one for each further level. A tree is grown level by level: every node of the frontier has its best
children, the best of these by the probability of their path go on, and in the end the best of all
nodes are kept. A node is never likelier than its parent, so what is kept is a tree.

Source: Li et al. 2024 (EAGLE-2), arXiv:2406.16858, section 4. Differs from the reference: any batch
with unlike rows, no loop over nodes and no question to the device within a round, ties go to the
earlier node, and a draft that is coupled to the law's noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mmdecode.engine.branch import MAIN, block_mask, chain, model_name
from mmdecode.engine.cache import RaggedCache, bucket
from mmdecode.engine.contracts import Adapter, Context, Needs, Outcome, Scores
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.models.feature_drafter import FeatureDrafter, Rows, load_drafter
from mmdecode.models.image_rows import numbered

IMAGES = ("all", "hidden")


class FeatureDraft:
    """Drafts with a model over the target's states.

    Args:
        drafter: The model.
        depth: Tokens on the longest path; the references count one less. 0 is neutral.
        top_k: Children of a node, and nodes of a level that go on; 1 drafts a chain.
        nodes: Nodes that are kept, the root not counted; the references count it.
        images: ``hidden`` leaves the prompt's image rows out of what the drafter sees, a control.

    Proposes deterministic trees. Under the coupled rule children are the top of log q plus the
    noise that decides their position, while paths are weighed by log q; tokens that the drafter's
    vocabulary lacks are never proposed. Lossless under every exact rule, whatever it says.

    Raises:
        OptionError: An option is out of range.
    """

    kinds: tuple[Kind, ...] = ("deterministic", "coupled")
    static = True
    own_tokens_only = True  # a path of another draft may be longer than its passes
    modules: ClassVar[Mapping[str, type[FeatureDrafter]]] = {}
    """What `from_pretrained` loads."""

    def __init__(
        self,
        drafter: FeatureDrafter,
        depth: int = 5,
        top_k: int = 8,
        nodes: int = 31,
        images: str = "all",
    ) -> None:
        if depth < 0 or top_k < 1 or nodes < 1:
            raise OptionError(
                f"depth={depth}, top_k={top_k}, nodes={nodes}; expected depth >= 0, top_k >= 1 and "
                "nodes >= 1"
            )
        if images not in IMAGES:
            raise OptionError(f"images={images!r}; expected one of {', '.join(IMAGES)}")
        self.drafter, self.depth, self.top_k, self.nodes = drafter.eval(), depth, top_k, nodes
        self.images = images
        self._running = self.drafter
        self._kind: Kind = "deterministic"
        self._cache: Any = None
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
        path: str,
        length: int | None = None,
        depth: int = 5,
        top_k: int = 8,
        nodes: int = 31,
        images: str = "all",
    ) -> Self:
        """From a string; ``length`` drafts a chain of so many tokens instead of a tree."""
        return cls.shaped(path, length, depth, top_k, nodes, images=images)

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

    def begin(self, ctx: Context, prefill: Scores, kind: Kind) -> None:
        """Reads all prompt rows but the last, whose next token is yet to be decided."""
        refuse_foreign(self.drafter, ctx.adapter, prefill)
        self._kind = kind
        self._place(prefill.hidden["last"])
        rows = prompt_rows(self._running, ctx, prefill)
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
        self._distances = _distances(self._running, ctx)
        tree = self.depth * self.top_k if ctx.fixed else 0
        self._cache = RaggedCache(
            self._running.cache_layers, ctx.batch, ctx.device, ctx.reserved(width) + tree
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
        """Puts a copy where the states are: half precision must not round the original."""
        parameter = next(self._running.parameters())
        if (parameter.device, parameter.dtype) != (like.device, like.dtype):
            self._running = copy.deepcopy(self.drafter).to(like)

    def _run(self, rows: Rows, mask: Tensor, visible: int, offset: int = 0) -> Tensor:
        self._cache.open(visible, offset)
        return self._running(rows, mask, self._cache)

    def _positions(self, slots: Tensor) -> Tensor:
        """Of slots ``(B, Q)``, behind the prompt."""
        positions = slots + self._base[:, None]
        if self._distances is None:
            return positions
        return positions[:, None] + self._distances

    def observe(self, ctx: Context, proposal: Proposal, scores: Scores, outcome: Outcome) -> None:
        """Reads the committed tokens: the states along the accepted path, each with what follows.

        Rows behind the path's end are read too, and written over in the next round.
        """
        levels = _levels(self._running, ctx.adapter)
        features = torch.cat([scores.hidden[level] for level in levels], -1)
        path = outcome.path[:, : self.depth]
        tokens = proposal.tokens.gather(1, path.clamp_min(0))
        if not proposal.is_chain:
            along = torch.nn.functional.pad(path + 1, (1, 0))  # root first
            features = gathered(features, along)
        width = features.shape[1]
        order = torch.arange(width, device=ctx.device)
        accepted = outcome.num_accepted[:, None]
        after = torch.nn.functional.pad(tokens, (0, 1))
        after = torch.where(order < accepted, after, outcome.next_token[:, None]).clamp_min(0)
        start = self._cache.start
        rows = Rows(
            embeds=self._running.embed(after, ctx.adapter),
            features=self._running.fuse(features),
            positions=self._positions(start[:, None] + order),
            carried=self._carried,
        )
        visible = bucket(self._width + ctx.longest + width)
        block = chain(width, ctx.device)
        mask = block_mask(start, self._pads, *block, visible, rows.embeds.dtype)
        states = self._run(rows, mask, visible)
        self._state = gathered(states, accepted)
        self._cache.set_start(self._width + ctx.length)
        # the longest row after this block, before it is cut
        self._reach = self._width + min(ctx.longest + width, ctx.limit)

    def propose(self, ctx: Context, budget: int) -> Proposal:
        """The likeliest paths below the last token."""
        levels = min(self.depth, budget)
        if levels <= 0:
            return Proposal.empty(ctx.batch, ctx.device)
        own = self._running.target_ids()
        logits, step = self._reader(ctx, levels)
        top_k = min(self.top_k, logits.shape[-1])

        def noise(level: int) -> Tensor:
            """``(B, 1, D)``: what decides the position, by the drafter's ids."""
            position = (ctx.length + level)[:, None]
            vocab = ctx.adapter.vocab
            gumbel = ctx.noise.gumbel(position, Role.TARGET, vocab)
            return gumbel if own is None else gumbel[..., own]

        coupled = noise if self._kind == "coupled" else None
        grown = grow(logits, step, levels, top_k, coupled)
        grown = grown.best(max(self.nodes, levels) if top_k == 1 else self.nodes)
        tokens = grown.tokens if own is None else own[grown.tokens]
        parents = None if top_k == 1 else grown.parents
        return Proposal(tokens=tokens, kind=self._kind, parents=parents)

    def _reader(
        self, ctx: Context, levels: int
    ) -> tuple[Tensor, Callable[[int, Tensor, Tensor], Tensor]]:
        """Logits after the root, and what reads the nodes of a level, as `grow` wants them."""
        assert self._state is not None, "observe was not called"
        drafter, own = self._running, self._running.target_ids()
        states, sees = self._state, None
        logits = drafter.logits(states, ctx.adapter)
        visible = bucket(self._reach + (levels - 1) * min(self.top_k, logits.shape[-1]))

        def step(level: int, tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal states, sees
            top_k = tokens.shape[1]
            sees = extended(sees, above)
            slots = (self._cache.start + level)[:, None].expand(-1, top_k)
            ids = tokens if own is None else own[tokens]
            rows = Rows(
                embeds=drafter.embed(ids, ctx.adapter),
                features=gathered(states, above),
                positions=self._positions(slots),
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
        self._cache.reorder_cache(rows)
        self._pads, self._base = self._pads[rows], self._base[rows]
        self._state = None if self._state is None else self._state[rows]
        self._carried = None if self._carried is None else self._carried[rows]
        self._distances = None if self._distances is None else self._distances[rows]

    def reset(self) -> None:
        """Forgets the call."""
        self._cache = self._pads = self._base = None
        self._state = self._carried = self._distances = None


def feature_needs(drafter: FeatureDrafter, adapter: Any) -> Needs:
    """What a drafter wants of the target's passes; see `FeatureDraft.needs`."""
    shown = {0} if getattr(adapter, "shows_images", False) else set()
    hidden = frozenset({"last", *_levels(drafter, adapter), *shown})
    return Needs(hidden=hidden, prompt_hidden=True)


def prompt_rows(drafter: FeatureDrafter, ctx: Context, prefill: Scores) -> Rows:
    """What a drafter reads of a prompt: all its tokens but the last, each with the one after it.

    Args:
        drafter: Whose rows they are.
        ctx: The call.
        prefill: With the states of the whole prompt, as `feature_needs` asks for them.

    Returns:
        Rows whose features are not fused yet, ``(B, P - 1, levels * E)``; of a drafter that has a
        row for the first token, P of them, the first feature 0 and positions those of embeddings.
    """
    adapter = ctx.adapter
    prompt = adapter.prompt(ctx, MAIN)
    hidden = prefill.prompt_hidden
    embeds = prompt.inputs.get("inputs_embeds")
    sizes = adapter.image_sizes(prompt) if getattr(adapter, "shows_images", False) else None
    images = numbered(adapter.image_mask(prompt.ids) & prompt.mask.bool(), sizes)
    if embeds is None:
        embeds = drafter.embed(prompt.ids, adapter)
        if 0 in hidden:  # image features stand where the placeholders were
            embeds = torch.where((images > 0)[..., None], hidden[0].to(embeds.dtype), embeds)
    positions = (prompt.mask.long().cumsum(1) - 1).clamp_min(0)
    if drafter.rotary.sections is not None:
        distances = prompt.inputs.get("distances")
        positions = positions[:, None].expand(-1, 3, -1)
        positions = positions if distances is None else positions + distances
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


def refuse_foreign(drafter: FeatureDrafter, adapter: Any, prefill: Scores) -> None:
    """Raises where a drafter was made for a target of another width, vocabulary or depth.

    Raises:
        IncompatibleError: It was.
    """
    config = drafter.config
    sizes = {
        "states of width": (drafter.target_width, prefill.hidden["last"].shape[-1]),
        "a vocabulary of": (config["vocab_size"], prefill.logits.shape[-1]),
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
    if drafter.rotary.sections is None:
        return None
    distances = ctx.adapter.prompt(ctx, MAIN).inputs.get("distances")
    if distances is None:
        return ctx.length.new_zeros(ctx.batch, 3, 1)
    return distances[..., -1:]


@dataclass(frozen=True, kw_only=True)
class Grown:
    """Nodes of a tree for each row, parents before children.

    Attributes:
        tokens: ``(B, M)``, ids of the drafter.
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
    noise: Callable[[int], Tensor] | None = None,
) -> Grown:
    """All nodes of a tree of ``levels`` levels, ``top_k + (levels - 1) * top_k ** 2`` of them.

    Args:
        root: Logits after the last committed token, ``(B, 1, D)``.
        step: From a level, counted from 0, the tokens of its frontier ``(B, k)`` and the place of
            each one's parent in the frontier before, to logits after them, ``(B, k, D)``.
        levels: Tokens on the longest path.
        top_k: Children of a node, and nodes of a level that go on.
        noise: Of a level ``(B, 1, D)``; added to log q to choose children, not to weigh them.
    """
    batch = len(root)
    tokens, parents, scores = [], [], []
    logits, first = root, 0
    node = torch.full((batch, 1), -1, device=root.device)  # of the frontier
    weight = torch.zeros(batch, 1, device=root.device)
    for level in range(levels):
        log_q = logits.float().log_softmax(-1)
        ranked = log_q if noise is None else log_q + noise(level)
        chosen = ranked.topk(top_k, dim=-1).indices  # (B, n, k)
        # rounding must not make a child likelier than its parent
        gain = log_q.gather(-1, chosen).clamp_max(0)
        score = (weight[..., None] + gain).flatten(1)
        chosen = chosen.flatten(1)
        tokens.append(chosen)
        parents.append(node.repeat_interleave(top_k, 1))
        scores.append(score)
        if level == levels - 1:
            break
        going = score.topk(top_k, dim=1).indices
        node, weight = first + going, score.gather(1, going)
        first += score.shape[1]
        logits = step(level, chosen.gather(1, going), going // top_k)
    return Grown(
        tokens=torch.cat(tokens, 1), parents=torch.cat(parents, 1), scores=torch.cat(scores, 1)
    )


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
