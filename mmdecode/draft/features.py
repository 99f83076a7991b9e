"""Base of drafters with a small trained model on the target's hidden states, such as EAGLE.

The small model is a `FeatureDrafter`. Each of its inputs, called rows, combines a token's embedding
and the target's hidden state at the token before it, known from verification. Its cache has one
entry per committed token except the last (the root of the draft tree). A round costs one pass of
the small model over the newly committed tokens, and one for each further level of the tree, which
`mmdecode.draft.growing` grows.

Source: Li et al. 2024 (EAGLE-2), arXiv:2406.16858, section 4. Differs from the reference: batches
whose rows have different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mmdecode.draft.growing import Shape, extended, grown_proposal, tree_mask
from mmdecode.draft.prefixes import prefixes_of, read_shared, rows_of_prefixes
from mmdecode.draft.shipped import shipped
from mmdecode.draft.target import (
    along_path,
    branch_prompt,
    followed,
    gathered,
    outputs_by_name,
)
from mmdecode.engine import prefill
from mmdecode.engine.adapter import MAIN, Adapter, BranchSpec
from mmdecode.engine.cache import Piece, RaggedCache, bucket
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Block, BranchOutput, Drafter, DraftSession, Requirements
from mmdecode.engine.encoding import grouped
from mmdecode.engine.masks import block_mask, chain
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.models.feature_drafter import FeatureDrafter, Rows, load_drafter
from mmdecode.models.hydra import HydraHeads
from mmdecode.models.image_rows import numbered
from mmdecode.models.placed import Placed

IMAGES = ("all", "hidden")


class FeatureDraft(Drafter):
    """Drafts chains or trees with a small model on the target's hidden states.

    Args:
        drafter: The trained small model.
        depth: Number of tokens on the longest path, one more than in the references. 0 drafts
            nothing.
        top_k: Number of children per expanded node, and of nodes per level that are expanded; 1
            drafts a chain.
        nodes: Number of nodes that are proposed, without the root, which the references count.
        images: ``hidden`` leaves the prompt's image tokens out of the drafter's input, as a
            control experiment; ``all`` keeps them.
        sampled: Whether rejection sampling gets nodes that were sampled without replacement from
            the drafter's distribution q, instead of the most likely ones. All sampled nodes must be
            proposed, so the whole tree must fit into ``nodes``. ``None``: sampled if the drafter
            was trained for image tokens, whose distributions are flat, and the tree fits.
        min_expected_gain: Minimum number of expected accepted tokens that a level of the tree must
            add for the next level to be grown; ``None``: all ``depth`` levels are grown. With
            ``top_k`` equal to ``nodes`` this is OPT-Tree; see `mmdecode.draft.growing.Worth`.

    Proposes the most likely nodes, or sampled nodes with their distributions. With the coupled
    rule, the children of a node are the top k of log q plus the Gumbel noise that the rule uses at
    their position, and paths are ranked by log q. Tokens outside the drafter's vocabulary are never
    proposed. Lossless under every exact acceptance rule, whatever is drafted.

    With a guide that has several branches, the drafter runs on the hidden states of each branch and
    drafts from the guided distribution; see `mmdecode.draft.target`.

    Raises:
        OptionError: An option is out of range, or a sampled tree has too many nodes.
    """

    capabilities = DrafterCapabilities(
        graph_safe=True,
        composable=False,  # a path of another draft may be longer than its passes
        follows_target=True,
        argmax_only=True,
        hint="sampled=true with a chain (length=4) or a tree that is kept whole (depth=2,top_k=3), "
        "which proposes tokens with their distribution",
    )
    modules: ClassVar[Mapping[str, type[FeatureDrafter]]] = {}
    """Models that `from_pretrained` loads, by kind."""

    def __init__(
        self,
        drafter: FeatureDrafter,
        depth: int = 5,
        top_k: int = 8,
        nodes: int = 31,
        images: str = "all",
        sampled: bool | None = None,
        min_expected_gain: float | None = None,
    ) -> None:
        if depth < 0 or top_k < 1 or nodes < 1:
            raise OptionError(
                f"depth={depth}, top_k={top_k}, nodes={nodes}; expected depth >= 0, top_k >= 1 and "
                "nodes >= 1"
            )
        if images not in IMAGES:
            raise OptionError(f"images={images!r}; expected one of {', '.join(IMAGES)}")
        grown = top_k + max(depth - 1, 0) * top_k**2
        if sampled and grown > nodes:
            raise OptionError(
                f"a sampled tree of depth {depth} and top_k {top_k} has {grown} nodes, of which "
                f"only {nodes} would be proposed; give nodes={grown} or more, a smaller tree, a "
                "chain (length=...), or sampled=false"
            )
        if sampled is None:
            sampled = bool(drafter.config.get("draws_images")) and grown <= nodes
        sampled_kind: Kind = "iid" if top_k == 1 else "without_replacement"
        kinds: tuple[Kind, ...] = ("deterministic", "coupled")
        self.kinds = (*kinds, sampled_kind) if sampled else kinds
        self.drafter, self.depth, self.top_k, self.nodes = drafter.eval(), depth, top_k, nodes
        self.shape, self.images = Shape(depth, top_k, nodes, min_expected_gain), images
        self.placed = Placed(self.drafter)

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Self:
        """Loads a drafter in our layout or a published one.

        Args:
            name: A folder, a Hub id, or ``zoo:NAME`` for a model that ships with this library.
            **options: Options of the class.

        Raises:
            InputError: The checkpoint is of no drafter that this class loads.
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
        sampled: bool | None = None,
        min_expected_gain: float | None = None,
    ) -> Self:
        """Builds the drafter from a string's options; ``length=n`` drafts a chain of n tokens.

        Without ``path``, loads the drafter that this library ships for the target ``model_id``.
        """
        path = path or shipped(cls.modules, model_id)
        own = {"images": images, "sampled": sampled, "min_expected_gain": min_expected_gain}
        return cls.shaped(path, length, depth, top_k, nodes, **own)

    @classmethod
    def shaped(
        cls, path: str, length: int | None, depth: int, top_k: int, nodes: int, **options: Any
    ) -> Self:
        """Loads a drafter of chains of ``length`` tokens, or of trees if ``length`` is ``None``."""
        if length is not None:
            depth, top_k, nodes = length, 1, max(length, 1)
        return cls.from_pretrained(path, depth=depth, top_k=top_k, nodes=nodes, **options)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns the hidden states that the drafter reads; with images, the input embeddings too.

        Raises:
            IncompatibleError: The drafter was trained for another target.
        """
        return feature_needs(self.drafter, adapter)

    def begin(self, call: Call, prefill: BranchOutput) -> FeatureSession:
        """Opens a session, in which the drafter reads the prompt."""
        return FeatureSession(self, call, prefill)


class FeatureSession(DraftSession):
    """Session of a `FeatureDraft`: the small model's cache and its last states.

    On opening, the small model reads the prompt except the last token: a row needs the next token.

    Args:
        draft: The drafter.
        call: The generation call.
        prefill: Outputs of the prompt's pass, with the hidden states of the whole prompt.

    Raises:
        IncompatibleError: The drafter was trained for another target.
    """

    def __init__(self, draft: FeatureDraft, call: Call, prefill: BranchOutput) -> None:
        super().__init__(call)
        refuse_foreign(draft.drafter, call.plan.adapter, prefill)
        self.draft, self.drafter = draft, draft.placed.like(prefill.hidden["last"])
        outputs = outputs_by_name(prefill)
        self.target = followed(call)
        self.unguided = self.target.unguided
        # the tensors below have the rows of all branches, branch by branch
        self.state: Tensor | None = None  # state at the last row, (B, 1, H)
        self._reach = 0  # slots of the longest row
        rows = prompt_rows(self.drafter, call, outputs, self.target.specs)
        rows = replace(rows, features=self.drafter.fuse(rows.features))
        assert rows.kept is not None and rows.images is not None
        whole, shift = rows.kept, rows.kept.sum(1)  # tokens before the last one
        rows = self.drafter.prepare(self.visible_rows(rows, prefill))
        found = prefixes_of([outputs[spec.name] for spec in self.target.specs])
        counts = rows_of_prefixes(rows, shift, found, self.drafter.reads_first)
        pads = rows.embeds.shape[1] - shift
        rows, self._pads = rows.packed() if rows.kept is not whole else (rows, pads)
        self._carried = None if rows.carried is None else rows.carried[:, -1:]
        self._width = width = rows.embeds.shape[1]
        self._base = shift - width  # from a slot to its position
        self._offsets = _offsets(self.drafter, call, self.target.specs)
        tree = draft.depth * draft.top_k if call.plan.static_shapes else 0
        self.cache = RaggedCache(
            self.drafter.cache_layers, len(shift), call.device, call.reserved(width, tree)
        )
        if width and found:
            self.paths = {"drafter prefill continued": 1}
            given = (rows, found, counts, draft.images, call.plan.prompt_cache)
            read_shared(self.drafter, self.cache, self._pads, *given)
        elif width:
            self._read(rows)
        self.cache.set_start(torch.full_like(self._pads, width))

    def visible_rows(self, rows: Rows, prefill: BranchOutput) -> Rows:
        """Marks the prompt rows that the drafter reads: all, or the ones without image tokens."""
        if self.draft.images == "all":
            return rows
        assert rows.kept is not None and rows.images is not None
        return replace(rows, kept=rows.kept & (rows.images == 0))

    def _read(self, rows: Rows) -> None:
        """Reads the prompt: a long one without a mask, rows of one length together."""
        width, pads = self._width, self._pads
        if width < prefill.LONG:
            self.paths = {"drafter prefill masked": 1}
            block = chain(width, self.call.device)
            visible = bucket(width)
            mask = block_mask(self.cache.start, pads, *block, visible, rows.embeds.dtype)
            self._run(rows, mask, visible)
            return
        lengths = (width - pads).tolist()
        groups = grouped(lengths)
        self.paths = {f"drafter prefill {'causal' if len(groups) == 1 else 'by rows'}": len(groups)}
        for group in groups:
            tokens = lengths[group[0]]
            if not tokens:
                continue  # a prompt of one token, or of padding
            index = None if len(group) == len(lengths) else torch.tensor(group, device=pads.device)
            piece = Piece(index, width - tokens, 0, tokens)
            self.cache.open_piece(piece, width)
            self.drafter(rows.part(index, piece.columns), None, self.cache)

    def _run(self, rows: Rows, mask: Tensor, visible: int, offset: int = 0) -> Tensor:
        self.cache.open(visible, offset)
        return self.drafter(rows, mask, self.cache)

    def positions(self, slots: Tensor) -> Tensor:
        """Returns the token positions that belong to cache slots ``(B, Q)``."""
        positions = turned(self.drafter, self.call.plan.adapter, slots + self._base[:, None])
        return positions if self._offsets is None else positions + self._offsets

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Runs the small model over the accepted path: each state with the token after it.

        Entries after the end of the path are computed too, and overwritten in the next round.
        """
        call, each = self.call, self.target.each
        levels = _levels(self.drafter, call.plan.adapter)
        path = each(block.path[:, : self.draft.depth])
        features = along_path(self.target.hidden(output, *levels), proposal, path)
        width = features.shape[1]
        order = torch.arange(width, device=call.device)
        start = self.cache.start
        after = block.tokens[:, :width].clamp_min(0)
        rows = Rows(
            embeds=self.drafter.embed(each(after), call.plan.adapter),
            features=self.drafter.fuse(features),
            positions=self.positions(start[:, None] + order),
            carried=self._carried,
        )
        visible = bucket(self._width + call.rows.cur_len + width)
        mask = block_mask(start, self._pads, *chain(width, call.device), visible, rows.embeds.dtype)
        states = self._run(rows, mask, visible)
        self.state = gathered(states, each(block.num_accepted[:, None]))
        self.cache.set_start(self._width + each(call.rows.length))
        # the longest row after this block, before it is cut
        self._reach = self._width + min(call.rows.cur_len + width, call.request.max_new_tokens)

    def propose(self, budget: int) -> Proposal:
        """Grows a tree of the most likely continuations of the last committed token."""
        levels = min(self.draft.depth, budget)
        if levels <= 0:
            return super().propose(budget)
        shape = replace(self.draft.shape, levels=levels)
        return grown_proposal(self.target, shape, *self.reader(levels), self.drafter.target_ids())

    def reader(self, levels: int) -> tuple[Tensor, Callable[[int, Tensor, Tensor], Tensor]]:
        """Returns the drafter's logits after the root, and the function ``step`` of `grow`.

        The logits are of all M branches, ``(M * B, k, D)``; ``step`` takes nodes once per row.
        """
        assert self.state is not None, "observe was not called"
        drafter, own, adapter = self.drafter, self.drafter.target_ids(), self.call.plan.adapter
        each = self.target.each
        states, attended = self.state, None
        logits = drafter.logits(states, adapter)
        visible = self.slots(levels, logits.shape[-1])

        def step(level: int, tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal states, attended
            tokens, above, top_k = each(tokens), each(above), tokens.shape[1]
            attended = extended(attended, above)
            slots = (self.cache.start + level)[:, None].expand(-1, top_k)
            ids = tokens if own is None else own[tokens]
            rows = Rows(
                embeds=drafter.embed(ids, adapter),
                features=gathered(states, above),
                positions=self.positions(slots),
                carried=self._carried,
            )
            mask = tree_mask(self.cache.start, self._pads, attended, visible, rows.embeds.dtype)
            states = self._run(rows, mask, visible, offset=level * top_k)
            return drafter.logits(states, adapter)

        return logits, step

    def slots(self, levels: int, vocab: int) -> int:
        """Returns how many cache slots attention covers while ``levels`` levels are grown."""
        return bucket(self._reach + (levels - 1) * min(self.draft.top_k, vocab))


def feature_needs(drafter: FeatureDrafter, adapter: Any) -> Requirements:
    """Returns the hidden states that a drafter needs from the target; see `FeatureDraft.needs`.

    Raises:
        IncompatibleError: The drafter was trained for another target.
    """
    refuse_encoder(drafter, adapter)
    image_levels = {0} if "image" in adapter.inputs else set()
    hidden = frozenset({"last", *_levels(drafter, adapter), *image_levels})
    return Requirements(hidden=hidden, prompt_hidden=True)


def prompt_rows(
    drafter: FeatureDrafter,
    call: Call,
    prefill: Mapping[str, BranchOutput],
    specs: Sequence[BranchSpec] = (MAIN,),
) -> Rows:
    """Returns the drafter's inputs for a prompt: the state of each token with the next token.

    Args:
        drafter: The drafter's model.
        call: The generation call.
        prefill: Outputs by branch, with the hidden states that `feature_needs` asks for.
        specs: The M branches whose prompts are read, the main one first; their rows are
            concatenated branch by branch.

    Returns:
        Inputs whose states of several layers are concatenated but not yet projected, ``(M * B,
        P - 1, levels * E)``. If ``drafter.reads_first`` is set, there are P: the first token is
        paired with a state of zeros, and positions are those of the tokens.
    """
    parts = [_branch_rows(drafter, call, prefill[spec.name].prompt_hidden, spec) for spec in specs]
    return parts[0] if len(parts) == 1 else Rows.stacked(parts)


def _branch_rows(
    drafter: FeatureDrafter, call: Call, hidden: Mapping[int | str, Tensor], spec: BranchSpec
) -> Rows:
    adapter = call.plan.adapter
    prompt = branch_prompt(call, spec)
    # a prompt that shares its pass with a wider one was padded there
    hidden = {level: states[:, -prompt.ids.shape[1] :] for level, states in hidden.items()}
    embeds = prompt.inputs.get("inputs_embeds")
    sizes = adapter.span_sizes("image", prompt) if "image" in adapter.inputs else None
    images = numbered(adapter.spans("image", prompt.ids) & prompt.mask.bool(), sizes)
    if embeds is None:
        embeds = drafter.embed(prompt.ids, adapter)
        if 0 in hidden:  # image features replace the placeholders
            embeds = torch.where((images > 0)[..., None], hidden[0].to(embeds.dtype), embeds)
    positions = turned(drafter, adapter, (prompt.mask.long().cumsum(1) - 1).clamp_min(0))
    offsets = prompt.inputs.get("offsets")
    if drafter.rotary.sections is not None and offsets is not None:
        positions = positions + offsets
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
    """Returns rotary positions for token positions ``(B, Q)``; with rotary sections ``(B, 3, Q)``.

    For a target that generates an image on a grid, the three are time, row and column.
    """
    if drafter.rotary.sections is None:
        return positions
    if adapter.on_grid:
        return adapter.grid_positions(positions)
    return positions[:, None].expand(-1, 3, -1)


def refuse_encoder(drafter: FeatureDrafter | HydraHeads, adapter: Adapter) -> None:
    """Raises an error for an encoder-decoder model, whose encoder reads the prompt.

    Raises:
        IncompatibleError: The model is an encoder-decoder.
    """
    config = getattr(adapter.model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise IncompatibleError.between(
            f"draft {type(drafter).__name__}",
            adapter.name,
            "the drafter reads the prompt's states in a decoder-only model, and this model's "
            "prompt is read by an encoder",
            "use medusa with heads that were trained for this model, or lookup",
        )


def refuse_foreign(
    drafter: FeatureDrafter | HydraHeads, adapter: Any, prefill: BranchOutput
) -> None:
    """Raises an error if the drafter's target has another width, vocabulary or number of layers.

    Raises:
        IncompatibleError: The drafter was trained for another target.
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
                adapter.name,
                f"the drafter expects {what} {wanted}, the model has {found}",
                "use a drafter that was trained for this model",
            )


def _levels(drafter: FeatureDrafter, adapter: Any) -> tuple[int | str, ...]:
    """Returns the keys of the target's hidden states that the drafter reads."""
    levels = drafter.levels(adapter.num_layers)
    highest = max((level for level in levels if isinstance(level, int)), default=0)
    if highest >= adapter.num_layers:
        raise IncompatibleError.between(
            f"draft {type(drafter).__name__}",
            adapter.name,
            f"the drafter reads the input of layer {highest}, the model has {adapter.num_layers} "
            "layers",
            "use a drafter that was trained for this model",
        )
    return levels


def _offsets(drafter: FeatureDrafter, call: Call, specs: Sequence[BranchSpec]) -> Tensor | None:
    """Returns the rotary positions of generated tokens minus their indices, ``(M * B, 3, 1)``."""
    if drafter.rotary.sections is None:
        return None
    found = [branch_prompt(call, spec).inputs.get("offsets") for spec in specs]
    if all(one is None for one in found):
        return None
    # in a prompt without images a token's position is its index
    none = torch.zeros(call.batch, 3, 1, dtype=torch.long, device=call.device)
    return torch.cat([none if one is None else one[..., -1:] for one in found])
