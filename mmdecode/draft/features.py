"""Drafting from the target's states: chains and trees of a `FeatureDrafter`, in ragged batches.

The drafter's cache holds one row per committed token but the last, on the accepted path alone; the
states that verification made anyway are its input, so a round costs one pass over the new rows and
one for each further level. How a tree is grown is in `mmdecode.draft.growing`.

Source: Li et al. 2024 (EAGLE-2), arXiv:2406.16858, section 4. Differs from the reference: any batch
with unlike rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from mmdecode.checkpoints import paired
from mmdecode.draft.growing import Shape, extended, gathered, grown_proposal, tree_mask
from mmdecode.draft.target import DraftTarget
from mmdecode.engine.adapter import MAIN, Adapter, BranchSpec, Prompt
from mmdecode.engine.cache import RaggedCache, bucket
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter, Guide, Outcome, Requirements
from mmdecode.engine.masks import block_mask, chain
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.models.feature_drafter import FeatureDrafter, Rows, load_drafter
from mmdecode.models.hydra import HydraHeads
from mmdecode.models.image_rows import numbered

IMAGES = ("all", "hidden")
Module = TypeVar("Module", bound=nn.Module)


class FeatureDraft(Drafter):
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
            at ``depth``. With ``top_k`` as many as ``nodes`` this is OPT-Tree; see
            `mmdecode.draft.growing.Worth`.

    Proposes deterministic trees, or drawn ones with their laws. Under the coupled rule children
    are the top of log q plus the noise that decides their position, while paths are weighed by
    log q; tokens that the drafter's vocabulary lacks are never proposed. Lossless under every exact
    rule, whatever it says.

    Under a guide with other branches (see `under`) the drafter runs on the states of each, and what
    it drafts follows the guided law, as LANTERN has it.

    Raises:
        OptionError: An option is out of range, or a drawn tree has too many nodes.
    """

    capabilities = DrafterCapabilities(
        graph_safe=True,
        composable=False,  # a path of another draft may be longer than its passes
        hint="drawn=true with a chain (length=4) or a tree that is kept whole (depth=2,top_k=3), "
        "which proposes tokens with their law",
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
        self._shape = Shape(depth, top_k, nodes, gain)
        self.images, self.law = images, DraftTarget()
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

    def needs(self, adapter: Adapter) -> Requirements:
        """The states that make a feature; of a model with images, what stands for them too.

        Raises:
            IncompatibleError: The drafter was made for another target.
        """
        return feature_needs(self.drafter, adapter)

    def under(self, guide: Guide | None, warp: Callable[[Tensor], Tensor] | None) -> Self:
        """This draft with the law of a target."""
        alike = copy.copy(self)
        alike.law = DraftTarget(guide, warp)
        return alike

    def begin(self, call: Call, prefill: BranchOutput, kind: Kind) -> None:
        """Reads all prompt rows but the last, whose next token is yet to be decided."""
        refuse_foreign(self.drafter, call.plan.adapter, prefill)
        self._kind = kind
        self._place(prefill.hidden["last"])
        self.law.begin(call, {"main": prefill, **prefill.beside})
        rows = prompt_rows(self._running, call, prefill, self.law.specs)
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
        distances = _distances(self._running, call)
        self._distances = None if distances is None else self._each(distances)
        tree = self.depth * self.top_k if call.plan.static_shapes else 0
        self._cache = RaggedCache(
            self._running.cache_layers, len(shift), call.device, call.reserved(width) + tree
        )
        if width:
            states = rows.embeds
            mask = block_mask(
                self._cache.start,
                self._pads,
                *chain(width, call.device),
                bucket(width),
                states.dtype,
            )
            self._run(rows, mask, bucket(width))
        self._cache.set_start(torch.full_like(self._pads, width))

    def _shown(self, rows: Rows, prefill: BranchOutput) -> Rows:
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

    def _positions(self, call: Call, slots: Tensor) -> Tensor:
        """Of slots ``(B, Q)``, behind the prompt."""
        positions = turned(self._running, call.plan.adapter, slots + self._base[:, None])
        return positions if self._distances is None else positions + self._distances

    def _each(self, values: Tensor) -> Tensor:
        """Values of the rows ``(B, ...)``, for the rows of all branches."""
        branches = len(self.law.specs)
        return values if branches == 1 else values.repeat(branches, *[1] * (values.ndim - 1))

    def observe(
        self, call: Call, proposal: Proposal, scores: BranchOutput, outcome: Outcome
    ) -> None:
        """Reads the committed tokens: the states along the accepted path, each with what follows.

        Rows behind the path's end are read too, and written over in the next round.
        """
        levels = _levels(self._running, call.plan.adapter)
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
        order = torch.arange(width, device=call.device)
        accepted = outcome.num_accepted[:, None]
        after = torch.nn.functional.pad(tokens, (0, 1))
        after = torch.where(order < accepted, after, outcome.next_token[:, None]).clamp_min(0)
        start = self._cache.start
        rows = Rows(
            embeds=self._running.embed(self._each(after), call.plan.adapter),
            features=self._running.fuse(features),
            positions=self._positions(call, start[:, None] + order),
            carried=self._carried,
        )
        visible = bucket(self._width + call.rows.cur_len + width)
        block = chain(width, call.device)
        mask = block_mask(start, self._pads, *block, visible, rows.embeds.dtype)
        states = self._run(rows, mask, visible)
        self._state = gathered(states, self._each(accepted))
        self._cache.set_start(self._width + self._each(call.rows.length))
        # the longest row after this block, before it is cut
        self._reach = self._width + min(call.rows.cur_len + width, call.request.max_new_tokens)

    def propose(self, call: Call, budget: int) -> Proposal:
        """The likeliest paths below the last token."""
        levels = min(self.depth, budget)
        if levels <= 0:
            return Proposal.empty(call.batch, call.device)
        shape = replace(self._shape, levels=levels)
        own = self._running.target_ids()
        return grown_proposal(call, self._kind, self.law, shape, *self._reader(call, levels), own)

    def _reader(
        self, call: Call, levels: int
    ) -> tuple[Tensor, Callable[[int, Tensor, Tensor], Tensor]]:
        """Logits after the root, and what reads the nodes of a level, as `grow` wants them.

        Both of all branches, ``(M * B, k, D)``; the nodes are those of rows.
        """
        assert self._state is not None, "observe was not called"
        drafter, own = self._running, self._running.target_ids()
        states, sees = self._state, None
        logits = drafter.logits(states, call.plan.adapter)
        visible = bucket(self._reach + (levels - 1) * min(self.top_k, logits.shape[-1]))

        def step(level: int, tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal states, sees
            tokens, above, top_k = self._each(tokens), self._each(above), tokens.shape[1]
            sees = extended(sees, above)
            slots = (self._cache.start + level)[:, None].expand(-1, top_k)
            ids = tokens if own is None else own[tokens]
            rows = Rows(
                embeds=drafter.embed(ids, call.plan.adapter),
                features=gathered(states, above),
                positions=self._positions(call, slots),
                carried=self._carried,
            )
            mask = tree_mask(self._cache.start, self._pads, sees, visible, rows.embeds.dtype)
            states = self._run(rows, mask, visible, offset=level * top_k)
            return drafter.logits(states, call.plan.adapter)

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


def feature_needs(drafter: FeatureDrafter, adapter: Any) -> Requirements:
    """What a drafter wants of the target's passes; see `FeatureDraft.needs`."""
    shown = {0} if "image" in adapter.inputs else set()
    hidden = frozenset({"last", *_levels(drafter, adapter), *shown})
    return Requirements(hidden=hidden, prompt_hidden=True)


def prompt_rows(
    drafter: FeatureDrafter,
    call: Call,
    prefill: BranchOutput,
    specs: Sequence[BranchSpec] = (MAIN,),
) -> Rows:
    """What a drafter reads of a prompt: all its tokens but the last, each with the one after it.

    Args:
        drafter: Whose rows they are.
        call: The call.
        prefill: With the states of the whole prompt, as `feature_needs` asks for them.
        specs: Branches whose prompts are read, the main one first; their rows follow each other.

    Returns:
        Rows whose features are not fused yet, ``(M * B, P - 1, levels * E)``; of a drafter that has
        a row for the first token, P of them, the first feature 0 and positions those of embeddings.
    """
    said = {"main": prefill, **prefill.beside}
    parts = [_branch_rows(drafter, call, said[spec.name].prompt_hidden, spec) for spec in specs]
    return parts[0] if len(parts) == 1 else Rows.stacked(parts)


def _prompt(call: Call, spec: BranchSpec) -> Prompt:
    """What a branch has read: a guide may have put another in its place, see `BranchSpec`."""
    running = {} if call.plan.main is None else {one.name: one for one in call.plan.main.specs}
    return call.plan.adapter.prompt(call, running.get(spec.name, spec))


def _branch_rows(
    drafter: FeatureDrafter, call: Call, hidden: Mapping[int | str, Tensor], spec: BranchSpec
) -> Rows:
    adapter = call.plan.adapter
    prompt = _prompt(call, spec)
    # a prompt that shares its pass with a wider one was padded there
    hidden = {level: states[:, -prompt.ids.shape[1] :] for level, states in hidden.items()}
    embeds = prompt.inputs.get("inputs_embeds")
    sizes = adapter.image_sizes(prompt) if "image" in adapter.inputs else None
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
    if adapter.on_grid:
        return adapter.grid_places(positions)
    return positions[:, None].expand(-1, 3, -1)


def refuse_foreign(
    drafter: FeatureDrafter | HydraHeads, adapter: Any, prefill: BranchOutput
) -> None:
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
                adapter.name,
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
            adapter.name,
            f"the drafter reads the input of layer {highest}, the model has {adapter.num_layers} "
            "layers",
            "use a drafter that was trained for this model",
        )
    return levels


def _distances(drafter: FeatureDrafter, call: Call) -> Tensor | None:
    """Behind the prompt: from a token's number to its three positions, ``(B, 3, 1)``."""
    distances = _prompt(call, MAIN).inputs.get("distances")
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
