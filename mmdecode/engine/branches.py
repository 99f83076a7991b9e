"""Branches: one model under several conditionings, scored together.

All branches of one model and stage are stacked as batch rows, branch by branch, so that a further
branch costs rows, not kernel launches. Prompts that cannot be read in one pass are read one by one
and stacked afterwards. Each row has its own write position, padding and position offset. The tree
mask is additive (a boolean one is silently wrong under eager attention), and positions are
explicit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from typing import Any, ClassVar
from warnings import warn

import torch
from torch import Tensor
from transformers import DynamicCache

from mmdecode.engine import capture, flex, prefill, shared_prefill
from mmdecode.engine.adapter import MAIN, Adapter, BranchSpec, Mask, Prompt
from mmdecode.engine.attention import AttentionEdit, AttentionPlan, planned
from mmdecode.engine.cache import Piece, RaggedCache, Reserve, bucket
from mmdecode.engine.call import Call
from mmdecode.engine.checks import refuse_closed, refuse_memory
from mmdecode.engine.contracts import BranchOutput, BranchRunner, Requirements, StateEdit
from mmdecode.engine.hooks import edit_states, record_states
from mmdecode.engine.masks import block_mask, slot_positions
from mmdecode.engine.noise import Noise
from mmdecode.engine.prompt_cache import Found
from mmdecode.engine.proposal import Proposal, root_depth
from mmdecode.engine.target_logits import argmax_of
from mmdecode.errors import IncompatibleError
from mmdecode.quantization.models import rounds_activations


class ModelRunner(BranchRunner):
    """Runs one model in M branches as M * B rows: see `mmdecode.engine.contracts.BranchRunner`.

    Args:
        adapter: Adapter of the model.
        specs: Branches of the model, in row order.
        needs: Internals to return in addition to logits.
        edits: Edits of attention and hidden states; those of other branches are ignored.

    Attributes:
        paths: Number of passes by the way that each took; see `mmdecode.engine.stats.Stats`.
        prompt_tokens: Tokens of prompts that were ``read``, and ``reused`` from a prompt cache.
    """

    graph_safe = True
    _own_mask: Callable[..., Any] | None = None  # `mmdecode.engine.flex.tree_mask`, if not additive
    uncaptured: ClassVar = {"prompts", "paths", "prompt_tokens", "even"}

    def __init__(
        self,
        adapter: Adapter,
        specs: Sequence[BranchSpec],
        needs: Requirements | None = None,
        edits: Sequence[AttentionEdit | StateEdit] = (),
    ) -> None:
        self.adapter, self.specs, self.needs = adapter, list(specs), needs or Requirements()
        self.stage = self.specs[0].stage
        names = {spec.name for spec in self.specs}
        self.edits = [edit for edit in edits if edit.branch in names]
        part = "a part that reads or edits attention, or reads exits"
        refuse_closed(part, adapter, self.edits, self.needs)
        self.paths: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.cache: RaggedCache
        self.pads: Tensor
        self._past: Any = None
        self._forward: Callable[..., Tensor] = adapter.forward
        self.width = 0  # slots of the widest prompt
        self.even = False  # whether the prompt of each row fills all of them
        self.prompts: list[Prompt] = []  # one per branch, kept for drafters that follow a guide
        self.left_out: Tensor | int = 0  # tokens of the prompt that are in no slot, per row
        self._means: Mapping[int, Tensor] = {}  # see BranchOutput.text_attention
        self._images: Tensor | None = None  # image tokens of the prompts, where attention is used
        self._strengths: Mapping[int, Tensor] = {}
        self._noise: Noise | None = None
        reads = self.needs.attention or self.needs.text_attention
        hooks_attention = reads or any(isinstance(e, AttentionEdit) for e in self.edits)
        modules = adapter.attention_sites() if hooks_attention else ()
        self._sites = {id(module): layer for layer, module in enumerate(modules)}

    def prefill(self, call: Call, earlier: Mapping[str, BranchOutput]) -> dict[str, BranchOutput]:
        """Reads the prompts of all branches; score row 0 is the prompt's last position."""
        own = [self.adapter.prompt(call, spec) for spec in self.specs]
        self.prompts = [] if call.plan.draft_target.guide is None else own
        prompts = self.adapter.stack(own)
        self.width = max(prompt.ids.shape[1] for prompt in prompts)
        reserved = call.reserved(self.width)
        # several caches are joined, and the joined one reserves
        alone = reserved if len(prompts) == 1 else None
        kept = self.needs.hidden | {"last"} if self.needs.prompt_hidden else frozenset()
        options = {"by_rows": not (self.edits or self._sites), "chunks": not self._sites}
        ours = self.adapter is call.plan.adapter and self.specs[0].name == MAIN.name
        readers = [
            reader_of(call, self.adapter, prompt, alone, past, **options, layers=kept)
            for prompt, past in zip_longest(prompts, [call.plan.past] if ours else [])
        ]
        for reader in readers:
            refuse_memory(self.adapter, reader.prompt, reader.passes)
        read: list[tuple[RaggedCache, Any, Tensor, Tensor | None]] = []
        result, first = dict[str, BranchOutput](), 0
        for prompt, reader in zip(prompts, readers, strict=True):
            rows, width = prompt.ids.shape
            self.cache = RaggedCache(self.adapter.num_layers, rows, prompt.ids.device, alone)
            self.pads = width - prompt.mask.sum(1)
            self._past = self.adapter.open(self.cache, prompt)
            here = self.specs[first : first + rows // call.batch]
            self._read_edits(call, earlier, prompt)
            found = reader.read(self, here)
            self.cache.set_start(torch.full_like(self.pads, width))
            result |= self._split(here, found.last, found.weights, found.whole, found.prefixes)
            read.append((self.cache, self._past, self.pads, self._images))
            first += len(here)
        if call.plan.static_shapes:
            self._fix_shapes(call)
        self.even = all(min(reader.lengths) == self.width for reader in readers)
        if len(read) > 1:
            caches, pasts, pads, images = zip(*read, strict=True)
            self.cache = RaggedCache.join(caches, reserved)
            self._past = self.adapter.join(pasts, self.cache)
            self.pads, self._images = torch.cat(pads), _joined(images)
        return result

    def score(
        self, call: Call, proposal: Proposal, earlier: Mapping[str, BranchOutput]
    ) -> dict[str, BranchOutput]:
        """Scores root and nodes after the committed slots."""
        _, depths, tree = proposal.structure()
        ancestors = None if proposal.is_chain else tree
        tokens = call.last(1)
        if proposal.size:
            tokens = torch.cat([tokens, proposal.tokens], 1)
        repeat = len(self.specs)
        if repeat > 1:
            tokens = tokens.repeat(repeat, 1)
            if len(depths) > 1:
                depths = depths.repeat(repeat, 1)
                ancestors = None if ancestors is None else ancestors.repeat(repeat, 1, 1)
        depths = (
            torch.nn.functional.pad(depths, (1, 0)) if proposal.size else root_depth(call.device)
        )
        # the longest row holds its prompt and all its tokens but the root
        begin = self.width + call.rows.cur_len - 1
        end = begin + tokens.shape[1]
        common = begin if self.even and call.rows.even else None
        alone = common is not None and end == begin + 1 and not self._sites
        masked = not (alone and self.adapter.steps_unmasked(end))
        self.paths["step masked" if masked else "step unmasked"] += 1
        self._read_edits(call, earlier, None)
        states, weights = self.run(
            tokens,
            depths,
            ancestors,
            visible=bucket(end) if masked else end,
            masked=masked,
            common=common,
        )
        read = {layer: value[..., : self.width] for layer, value in weights.items()}
        if self.needs.argmax_only:
            tokens = argmax_of(self.adapter, states["last"]).to(self.pads.device)
            none = states["last"].new_empty(*tokens.shape, 0)
            return {self.specs[0].name: BranchOutput(logits=none, argmax=tokens, hidden=states)}
        return self._split(self.specs, states, read, {})

    def run(
        self,
        tokens: Tensor,
        depths: Tensor,
        ancestors: Tensor | None,
        *,
        visible: int,
        offset: int = 0,
        prompt: Prompt | None = None,
        specs: Sequence[BranchSpec] | None = None,
        piece: Piece | None = None,
        masked: bool = True,
        common: int | None = None,
    ) -> tuple[dict[int | str, Tensor], Mapping[int, Tensor]]:
        """One forward pass that writes after ``start + offset`` and commits nothing.

        Args:
            tokens: Tokens to read, ``(R, Q)``, -1 where unused.
            depths: Distance of each token from the first one, ``(1 or R, Q)``.
            ancestors: Tokens of these that each token may attend to, ``(1 or R, Q, Q)`` bool, self
                included; ``None``: all before it.
            visible: Slots that attention covers; at least every row's ``start + offset + Q``.
            offset: Slots after ``start`` that an earlier pass wrote and that count as committed.
            prompt: The prompt whose ids are ``tokens``; ``None``: the tokens come after it.
            specs: Branches of these rows; ``None``: all.
            piece: Where ``tokens`` are in the prompt of this runner, if they are read without its
                padding; they attend to themselves and to what was read before them.
            masked: Whether the model is given the engine's mask; see `Adapter.masks_itself` and
                `Adapter.steps_unmasked`.
            common: See `RaggedCache.open`.

        Returns:
            Hidden states by layer as in `BranchOutput.hidden`, ``(R, Q, H)``, and attention weights
            by layer as asked for, ``(R, heads, Q, visible)``; for a prompt, of its last token only.
        """
        cache, adapter = self.cache, self.adapter
        specs = self.specs if specs is None else specs
        pads, past = self.pads, self._past
        begin = cache.start + offset if offset else cache.start
        if piece is None:
            cache.open(visible, offset, common, masked)
        else:
            pads = piece.of(pads)
            begin = torch.full_like(pads, piece.columns.start)
            cache.open_piece(piece, self.width)
            if piece.rows is not None and prompt is not None:
                past = adapter.open(cache, prompt)
        mask = self._mask(begin, pads, depths, ancestors, visible, piece) if masked else None
        top = None if adapter.max_positions is None else adapter.max_positions - 1
        if common is None:
            logical = (begin - pads + self.left_out)[:, None] + depths
            positions = logical.clamp(min=0, max=top)
        else:  # no padding
            logical = begin[:, None] + depths
            positions = logical if top is None else logical.clamp_max(top)
        states: dict[int | str, Tensor] = {}
        with ExitStack() as hooks:
            for index in self.needs.hidden:
                if isinstance(index, int):
                    hooks.enter_context(record_states(adapter.layers()[index], states, index))
            plan = self._enter_edits(hooks, specs, logical, visible, prompt is not None)
            if prompt is not None:
                states["last"] = adapter.prefill(prompt, mask, positions, past)
            else:
                alone = common is not None and tokens.shape[1] == 1  # a token that was committed
                used = tokens if alone else tokens.clamp_min(0)
                states["last"] = self._forward(used, mask, positions, past)
        if states["last"].device != tokens.device:  # a model that is split over devices
            states = {key: value.to(tokens.device) for key, value in states.items()}
        self._means = plan.means if plan else {}
        return states, plan.weights if plan else {}

    def _mask(
        self,
        begin: Tensor,
        pads: Tensor,
        depths: Tensor,
        ancestors: Tensor | None,
        visible: int,
        piece: Piece | None,
    ) -> Mask:
        dtype, make = self.adapter.model.dtype, self._own_mask or block_mask
        if piece is not None:  # of rows that are all alike, and attend to no slot before `seen`
            begin, pads = (slots[:1] - piece.left - piece.seen for slots in (begin, pads))
        masks = {
            kind: make(begin, pads, depths, ancestors, visible, dtype, window)
            for kind, window in self.adapter.windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _read_edits(
        self, call: Call, earlier: Mapping[str, BranchOutput], prompt: Prompt | None
    ) -> None:
        """Prepares noise, image tokens and strengths for the edits of the next pass."""
        attention = [edit for edit in self.edits if isinstance(edit, AttentionEdit)]
        if not (attention or self.needs.attention or self.needs.text_attention):
            return
        self._noise = call.request.noise
        if prompt is not None:
            self._images = self.adapter.spans("image", prompt.ids) & prompt.mask
        self._strengths = {
            index: edit.strength(call, earlier)
            for index, edit in enumerate(attention)
            if edit.strength is not None and (prompt is not None or edit.rows != "last_prompt")
        }

    def _enter_edits(
        self,
        hooks: ExitStack,
        specs: Sequence[BranchSpec],
        positions: Tensor,
        visible: int,
        is_prompt: bool,
    ) -> AttentionPlan | None:
        """Installs edits and readers for one pass; weights that are read are kept in the plan."""
        averages = is_prompt and self.needs.text_attention
        if not (self.edits or self.needs.attention or averages):
            return None
        batch = len(self.pads) // len(specs)
        rows = {spec.name: slice(i * batch, (i + 1) * batch) for i, spec in enumerate(specs)}
        attention: list[tuple[AttentionEdit, slice]] = []
        strengths: dict[int, Tensor] = {}
        for edit in self.edits:
            if isinstance(edit, StateEdit) and edit.branch in rows:
                edit_states(hooks, self.adapter.layers(), edit, rows[edit.branch])
        named = [edit for edit in self.edits if isinstance(edit, AttentionEdit)]
        for index, edit in enumerate(named):
            if edit.branch not in rows:
                continue
            if index in self._strengths:  # given for the last prompt token, or for root and nodes
                given, width = self._strengths[index], positions.shape[1]
                strengths[len(attention)] = (
                    torch.nn.functional.pad(given, (width - 1, 0), value=1.0)
                    if is_prompt
                    else given.expand(-1, width)
                )
            attention.append((edit, rows[edit.branch]))
        if not (attention or self.needs.attention or averages):
            return None
        assert self._images is not None and self._noise is not None, "read with the prompt"
        decoding = torch.ones_like(positions.expand(len(self.pads), -1), dtype=torch.bool)
        if is_prompt:
            decoding[:, :-1] = False
        first = positions[:, :1]
        slots = torch.arange(visible, device=positions.device)
        plan = AttentionPlan(
            sites=self._sites,
            depth=self.adapter.num_layers,
            edits=attention,
            reads=self.needs.attention,
            images=self._images,
            decoding_rows=decoding,
            is_prompt=is_prompt,
            positions=positions.expand(len(self.pads), -1),
            keys=first + slot_positions(slots - first - self.pads[:, None], positions - first),
            noise=self._noise,
            strengths=strengths,
            texts=_columns(~self._images & (positions >= 0)) if averages else None,
        )
        hooks.enter_context(planned(plan))
        return plan

    def _compiled(self) -> Callable[..., Tensor]:
        if rounds_activations(self.adapter.model):
            warn("nothing is compiled: int8 products are run by TorchScript already", stacklevel=2)
            return self.adapter.forward
        inside = self.edits or self.needs.attention
        if all(isinstance(index, str) for index in self.needs.hidden) and not inside:
            return capture.Compiled(self.adapter)
        warn("nothing is compiled: states of inner layers are taken by hooks", stacklevel=2)
        return self.adapter.forward

    def _fix_shapes(self, call: Call) -> None:
        """Prepares passes of a few fixed shapes: they are captured, or compiled."""
        if not capture.available(call.device):
            self._forward = self._compiled()
        elif self.adapter is call.plan.adapter and flex.used(self.adapter):
            self._own_mask = flex.tree_mask

    def commit(self, path: Tensor, count: Tensor, chain: bool) -> None:
        """Commits root and accepted nodes of the last pass in every branch."""
        repeat = len(self.specs)
        if repeat > 1:
            path, count = path.repeat(repeat, 1), count.repeat(repeat)
        self.cache.commit(count, None if chain else path)

    def rows_of(self, name: str) -> slice:
        """The rows of one branch."""
        batch = len(self.pads) // len(self.specs)
        first = [spec.name for spec in self.specs].index(name) * batch
        return slice(first, first + batch)

    def use(self, adapter: Adapter) -> None:
        """Switches to another view of the model for later passes; the cache is kept."""
        self.adapter, self._forward = adapter, adapter.forward

    def fork(self, name: str, reserved: Reserve | None = None) -> ModelRunner:
        """A runner of one branch after the same prompt, with an empty `RaggedCache` of its own."""
        rows = self.rows_of(name)
        spec = next(spec for spec in self.specs if spec.name == name)
        own = ModelRunner(self.adapter, [spec])
        own.cache = RaggedCache(self.adapter.num_layers, len(self.pads), self.pads.device, reserved)
        own._past = self.adapter.join([self._past], own.cache)
        order = torch.arange(rows.start, rows.stop, device=self.pads.device)
        own._past.reorder_cache(order)
        own.pads, own.width = self.pads[rows], self.width
        return own

    def rename(self, name: str, new: str) -> None:
        """Renames a branch, if this runner has it."""
        self.specs = [replace(s, name=new) if s.name == name else s for s in self.specs]
        self.edits = [replace(e, branch=new) if e.branch == name else e for e in self.edits]

    def select_rows(self, rows: Tensor) -> None:
        """Keeps the rows ``rows`` of every branch; repeated rows are forked."""
        batch = len(self.pads) // len(self.specs)
        rows = torch.cat([rows + branch * batch for branch in range(len(self.specs))])
        self._past.reorder_cache(rows)
        self.pads = self.pads[rows]
        self._images = None if self._images is None else self._images[rows]

    def _split(
        self,
        specs: Sequence[BranchSpec],
        states: Mapping[int | str, Tensor],
        weights: Mapping[int, Tensor],
        prompt: Mapping[int | str, Tensor],
        prefixes: Sequence[Found | None] = (),
    ) -> dict[str, BranchOutput]:
        logits = self.adapter.head(states["last"]).float().to(self.pads.device)
        exits = {
            layer: self.adapter.head(self.adapter.norm(states[layer])).float()
            for layer in self.needs.early_exit_logits
        }
        text_attention = {}
        if self._images is not None:
            width = self._images.shape[1]
            text_attention = {key: value[:, :, :width] for key, value in self._means.items()}
        whole = BranchOutput(
            logits=logits,
            hidden=states,
            early_exit_logits=exits,
            attention=weights,
            text_attention=text_attention,
            images=self._images,
            prompt_hidden=prompt,
            prefixes=prefixes,
        )
        if len(specs) == 1:
            return {specs[0].name: whole}
        batch = len(logits) // len(specs)
        return {
            spec.name: whole.rows(slice(index * batch, (index + 1) * batch))
            for index, spec in enumerate(specs)
        }


def reader_of(
    call: Call,
    adapter: Adapter,
    prompt: Prompt,
    reserved: Reserve | None,
    past: DynamicCache | None,
    *,
    by_rows: bool,
    chunks: bool,
    layers: frozenset[int | str],
) -> prefill.Reader:
    """The reader of a prompt.

    Args:
        call: The call.
        adapter: Adapter of the model.
        prompt: The prompt.
        reserved: Storage of the runner's cache, if it cannot grow.
        past: Cache of transformers that holds the beginning of the first rows; ``None``: none.
        by_rows: Whether rows may be read apart.
        chunks: Whether tokens of a row may be read apart.
        layers: Layers whose hidden states of the whole prompt are needed.

    Raises:
        IncompatibleError: ``past`` cannot be used, and the images that it holds are not given.
    """
    lengths, cache, shared = prompt.mask.sum(1).tolist(), call.plan.prompt_cache, None
    if (cache is not None or past is not None) and by_rows and chunks:
        shared = shared_prefill.reader_of(
            adapter, prompt, lengths, cache, layers, past, call.prompt_length
        )
        if shared is not None and shared.pays(reserved):
            return shared
    if past is not None and not prompt.inputs and bool(adapter.spans("image", prompt.ids).any()):
        raise IncompatibleError.between(
            "past_key_values",
            adapter.name,
            "this call reads the whole prompt again, and its images were not passed",
            "pass the images of earlier turns too",
        )
    passes = prefill.planned(adapter, prompt, lengths, by_rows=by_rows, chunks=chunks)
    return prefill.Reader(prompt, lengths, passes) if shared is None else shared.keeping(passes)


def _columns(chosen: Tensor) -> Tensor:
    """Columns where ``chosen (R, P)`` is true, in order, ``(R, most of any row)``, -1 padded."""
    most = int(chosen.sum(1).amax())
    order = (~chosen).long().argsort(dim=1, stable=True)[:, :most]
    return torch.where(chosen.gather(1, order), order, -1)


def _joined(masks: Sequence[Tensor | None]) -> Tensor | None:
    """Masks of prompts of unequal width as one ``(R, P)``; the cache holds each from slot 0."""
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    width = max(mask.shape[1] for mask in present)
    return torch.cat(
        [torch.nn.functional.pad(mask, (0, width - mask.shape[1])) for mask in present]
    )
