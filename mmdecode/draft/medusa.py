"""Medusa: drafts a tree with extra heads on the target model's last hidden state.

Head k is a stack of ``x + SiLU(W x + b)`` blocks before an output matrix. It reads the hidden state
that predicted the root (the last committed token), and predicts the k-th token after the root. The
most likely tokens of the heads are arranged in a fixed tree, the proposal. Heads may be limited to
the most frequent tokens (`mmdecode.draft.medusa_heads`). The block variant of Whisper-Medusa first
runs the states of the accepted tokens through one more decoder layer, with a cache of its own. A
round needs one pass of the target, which verifies the draft, yields the token after the accepted
path, and computes the states for the next round; the Whisper-Medusa reference needs two passes and
drops that token.

Sources: Cai et al. 2024 (Medusa), arXiv:2401.10774, section 3.1; Segal-Feldman et al. 2024
(Whisper-Medusa), arXiv:2409.15869. Differs from the references: unused nodes are marked with -1,
since token 0 is an ordinary token of Whisper; siblings do not attend to each other; batches may
have any size.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from mmdecode import registry
from mmdecode.checkpoints import local_path, paired
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.draft.shipped import no_path
from mmdecode.draft.target import (
    along_path,
    branch_prompt,
    followed,
    gathered,
    outputs_by_name,
)
from mmdecode.engine.adapter import Adapter, BranchSpec
from mmdecode.engine.cache import RaggedCache, bucket
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Block, BranchOutput, Drafter, DraftSession, Requirements
from mmdecode.engine.masks import block_mask, chain
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.errors import (
    IncompatibleError,
    InputError,
    OptionError,
    UnsupportedModelError,
)
from mmdecode.models.placed import Placed
from mmdecode.quantization.models import rounds_activations
from mmdecode.runs.files import write_file, write_folder
from mmdecode.weights import read_weights

VOCABULARY = "medusa_vocabulary"
"""Key of the token ids that heads are limited to, among a checkpoint's weights."""
MANY_ROWS = 8
"""Number of rows from which a pass on a CPU is compute-bound even without a draft."""


@dataclass(frozen=True)
class HeadTree:
    """A draft tree that names, for each node, a head and the rank of a token in its logits."""

    tree: Tree
    levels: Tensor
    ranks: Tensor
    top: int

    @classmethod
    def of(cls, paths: list[tuple[int, ...]], device: torch.device) -> HeadTree:
        """Builds the tree from rank paths, see `Medusa`."""
        tree, order = Tree.from_paths(paths)
        last = [path[-1] for path in order]
        levels = torch.tensor(tree.depths, device=device) - 1
        return cls(tree, levels, torch.tensor(last, device=device), max(last) + 1)


class Medusa(Drafter):
    """Drafts a fixed tree with Medusa heads.

    Args:
        heads: The heads; head k proposes the k-th token after the last committed token.
        block: A decoder layer of the target's architecture that runs before the heads, or ``None``.
        paths: Rank paths of the tree, the most useful first: the path ``(0, 1)`` means the second
            most likely token of head 2 after the most likely token of head 1. ``None``: a chain of
            the most likely tokens.
        nodes: Number of nodes of the tree that are used, the first in ``paths``; ``None``: all.
        cpu_nodes: The same on a CPU, if ``nodes`` is ``None``, for fewer than 8 rows; half as many
            for more rows. On a CPU wide passes are soon compute-bound. A checkpoint may contain a
            number that was measured for its model.

    Proposes deterministic trees. Lossless under every exact acceptance rule, whatever the heads
    predict. With a guide that has several branches, the heads run on the states of each; see
    `mmdecode.draft.target`.
    """

    summary = "extra heads on the model's own last hidden state draft a tree"
    source = "Cai et al. 2024; for Whisper, Segal-Feldman et al. 2024"
    capabilities = DrafterCapabilities(graph_safe=True, follows_target=True, argmax_only=True)

    def __init__(
        self,
        heads: MedusaHeads,
        block: nn.Module | None = None,
        paths: list[tuple[int, ...]] | None = None,
        nodes: int | None = None,
        cpu_nodes: int | None = None,
    ) -> None:
        num_heads = heads.weight.shape[1]
        paths = paths or [(0,) * depth for depth in range(1, num_heads + 1)]
        if max(map(len, paths)) > num_heads:
            raise OptionError(
                f"a path of {max(map(len, paths))} ranks needs as many heads; there are {num_heads}"
            )
        self.heads, self.block = heads.eval(), block.eval() if block is not None else None
        self.paths, self.nodes, self.cpu_nodes = paths, nodes, cpu_nodes
        self.placed = Placed(self.heads)
        self.placed_block = None if self.block is None else Placed(self.block)
        self._trees: dict[tuple[int, torch.device], HeadTree] = {}
        self._lock = Lock()

    @classmethod
    def from_pretrained(
        cls, name: str | Path, paths: list[tuple[int, ...]] | None = None
    ) -> Medusa:
        """Loads heads in this library's layout or a published one.

        Args:
            name: A folder, a Hub id, or ``zoo:NAME`` for a model that ships with this library.
                Published layouts: aiola-lab/whisper-medusa (linear and block),
                FasterDecoding/Medusa (heads alone, or with a Llama model).
            paths: Rank paths to use instead of the checkpoint's tree.

        Raises:
            InputError: The checkpoint contains no Medusa heads.
        """
        path = local_path(name)
        config, weights = read_weights(path)
        roots = ("medusa_heads.", "medusa_head.")
        heads = {
            key[len(root) :]: value
            for root in roots
            for key, value in weights.items()
            if key.startswith(root)
        }
        if not heads:
            heads = {key: value for key, value in weights.items() if key[0].isdigit()}
        if not heads:
            raise InputError(
                f"{name} holds no Medusa heads; expected keys medusa_heads.*, medusa_head.* or "
                "0.0.linear.weight: give the checkpoint of the heads, as medusa:path=NAME, not the "
                "bare model; or a model that ships with heads: --model zoo:whisper-synth"
            )
        linear_target = config.get("medusa_heads_type") == "base_head"
        ids = weights.get(VOCABULARY)
        module = MedusaHeads.from_layout(heads, 1 if linear_target else 0, ids)
        layer = None
        block = {
            key.removeprefix("medusa_block."): value
            for key, value in weights.items()
            if key.startswith("medusa_block.")
        }
        if block:
            from transformers import AutoConfig

            target = config.get("target_config", config)
            # a layer has no special tokens, and the family's own may be outside the vocabulary
            names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
            family = AutoConfig.for_model(**dict.fromkeys(names, 0) | target)
            adapter = registry.adapter_class(target["model_type"])
            layer = adapter.extra_layer(family)
            if layer is None:
                raise UnsupportedModelError(
                    f"{name} has a decoder block for {target['model_type']!r}, whose adapter "
                    "cannot run one; use heads without a block"
                )
            layer.load_state_dict({key: value.float() for key, value in block.items()})
        cpu_nodes = None if paths else config.get("cpu_nodes")
        paths = paths or paths_of_choices(config.get("medusa_choices"))
        return cls(module.float(), layer, paths, cpu_nodes=cpu_nodes)

    @classmethod
    def from_options(
        cls,
        path: str | None = None,
        model_id: str | None = None,
        chain: bool = False,
        nodes: int | None = None,
    ) -> Medusa:
        """Builds the drafter from the options of a string.

        Without ``path``, loads the heads that belong to the target ``model_id``: those that ship
        for it, or the heads in the target's own (Whisper-Medusa) checkpoint.
        """
        if path is None and model_id is not None:
            own = None if model_id.startswith("zoo:") else model_id
            path = paired(model_id, "medusa") or own
        if path is None and model_id is None:
            raise no_path("medusa", ["medusa"])
        if path is None:
            raise OptionError(
                f"medusa needs path=..., the folder of the heads; {model_id} has none of its own"
            )
        draft = cls.from_pretrained(path)
        draft.nodes = nodes
        return cls(draft.heads, draft.block) if chain else draft

    def save_pretrained(
        self, folder: str | Path, target_config: dict[str, Any], overwrite: bool = False
    ) -> None:
        """Saves the heads to a folder, in half precision and with the published keys.

        Raises:
            OptionError: The folder has files of another origin, and ``overwrite`` is not set.
        """
        from safetensors.torch import save_file

        weights = {f"medusa_heads.{k}": v for k, v in self.heads.to_layout().items()}
        if self.block is not None:
            block = self.block.state_dict()
            weights |= {f"medusa_block.{k}": v.detach().clone() for k, v in block.items()}
        half = {k: v.half().contiguous() for k, v in weights.items()}
        if self.heads.vocabulary is not None:
            half[VOCABULARY] = self.heads.vocabulary.int()
        config = {
            "model_type": "mmdecode_medusa",
            "medusa_heads_type": "heads" if self.block is None else "medusa_block",
            "medusa_num_heads": self.heads.weight.shape[1],
            "medusa_num_layers": self.heads.weight.shape[0],
            "medusa_choices": self.paths,
            "cpu_nodes": self.cpu_nodes,
            "target_config": target_config,
        }

        def fill(into: Path) -> None:
            save_file(half, into / "model.safetensors")
            write_file(into / "config.json", json.dumps(config, indent=2) + "\n")

        write_folder(Path(folder), fill, overwrite)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns what the heads need: final hidden states; with a block, of the whole prompt too.

        Raises:
            IncompatibleError: The heads have a block, which the target's adapter cannot run.
        """
        if self.block is not None and type(adapter).extra_layer is Adapter.extra_layer:
            raise IncompatibleError.between(
                "draft Medusa",
                adapter.name,
                "the heads read the states of one more decoder layer, which its adapter cannot run",
                "use heads without a block, trained for this model",
            )
        return Requirements(hidden=frozenset({"last"}), prompt_hidden=self.block is not None)

    def begin(self, call: Call, prefill: BranchOutput) -> MedusaSession:
        """Opens a session, with the heads on the device of the target's states."""
        return MedusaSession(self, call, prefill)

    def shape(self, call: Call) -> HeadTree:
        """Returns the tree that is drafted in a call."""
        nodes = len(self.paths)
        if self.nodes is not None:
            nodes = min(nodes, self.nodes)
        elif self.cpu_nodes is not None and call.device.type == "cpu":
            few = call.batch < MANY_ROWS
            nodes = min(nodes, self.cpu_nodes if few else -(-self.cpu_nodes // 2))
        key = (nodes, call.device)
        with self._lock:
            if key not in self._trees:
                self._trees[key] = HeadTree.of(self.paths[:nodes], call.device)
            return self._trees[key]


class MedusaSession(DraftSession):
    """Session of a `Medusa` drafter: the states that the last tokens came from, and the block.

    If there is a block, opening runs it over the whole prompt except the last token.

    Args:
        draft: The drafter.
        call: The generation call.
        prefill: Outputs of the prompt's pass; with a block, the states of the whole prompt too.

    Raises:
        IncompatibleError: The heads were trained for another model.
    """

    def __init__(self, draft: Medusa, call: Call, prefill: BranchOutput) -> None:
        super().__init__(call)
        _refuse_foreign(draft.heads, call, prefill)
        states = prefill.hidden["last"]
        self.heads, self.tree = draft.placed.like(states), draft.shape(call)
        outputs = outputs_by_name(prefill)
        self.target = followed(call)
        self.unguided = self.target.unguided
        self.state: Tensor | None = None  # decided the root, in each branch, (M * B, H)
        self.block: BlockRunner | None = None
        if draft.placed_block is not None:
            layer = draft.placed_block.like(states, rounds_activations(call.plan.adapter.model))
            self.block = BlockRunner(layer, call, self.target.specs, outputs)

    def propose(self, budget: int) -> Proposal:
        """Proposes a tree of the most likely tokens of the heads."""
        assert self.state is not None, "observe was not called"
        tree = self.tree
        logits = self.heads.logits(self.state, self.call.plan.adapter)
        if not self.target.plain:
            logits = self._followed(logits)
        if tree.top == 1:
            tokens = logits[: len(tree.tree)].argmax(-1)  # (N, B): a chain has a head per node
        else:
            top = logits.topk(tree.top, dim=-1).indices  # (K, B, ranks)
            tokens = top[tree.levels, :, tree.ranks]
        if self.target.plain:  # those that followed the target have its ids
            tokens = self.heads.target_ids(tokens)
        return Proposal(tokens=tokens.T.contiguous(), kind="deterministic", tree=tree.tree)

    def _followed(self, logits: Tensor) -> Tensor:
        """Applies guide and warpers to the heads' logits in all branches, ``(K, M * B, V)``."""
        logits = self.heads.spread(logits, self.call.plan.adapter.vocab)
        first = self.call.rows.length[:, None]
        targets = [self.target(own[:, None], first + head) for head, own in enumerate(logits)]
        return torch.cat(targets, 1).transpose(0, 1)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Keeps the states at the end of the accepted path."""
        each = self.target.each
        states = along_path(self.target.hidden(output, "last"), proposal, each(block.path))
        if self.block is not None:
            states = self.block(states)
        self.state = gathered(states, each(block.num_accepted)[:, None])[:, 0]


class BlockRunner:
    """Runs the extra decoder layer (block) over committed states, with a cache of its own.

    Args:
        layer: The extra decoder layer.
        call: The generation call.
        specs: Branches whose states it reads; rows are ordered branch by branch.
        outputs: Outputs of these branches for the prompt, with the states of the whole prompt.
    """

    def __init__(
        self,
        layer: nn.Module,
        call: Call,
        specs: Sequence[BranchSpec],
        outputs: Mapping[str, BranchOutput],
    ) -> None:
        self.layer, self.call = layer, call
        adapter, width = call.plan.adapter, call.prompt_length
        [prompt] = adapter.stack([branch_prompt(call, spec) for spec in specs])
        rows = len(prompt.ids)
        self.cache = RaggedCache(1, rows, call.device, call.reserved(width))
        self._pads = width - prompt.mask.sum(1)
        self._past = adapter.open(self.cache, prompt)
        if width > 1:
            whole = torch.cat([outputs[spec.name].prompt_hidden["last"] for spec in specs])
            self._run(whole[:, :-1], bucket(width))
            self.cache.set_start(torch.full_like(self._pads, width - 1))

    def __call__(self, states: Tensor) -> Tensor:
        """Runs the layer on root and accepted path, ``(M * B, D + 1, H)``; updates the cache."""
        call = self.call
        visible = bucket(call.prompt_length + call.rows.cur_len + states.shape[1])
        states = self._run(states, visible)
        branches = len(self._pads) // call.batch
        self.cache.set_start((call.end() - 1).repeat(branches))  # all but the root
        return states

    def _run(self, states: Tensor, visible: int) -> Tensor:
        block = chain(states.shape[1], states.device)
        mask = block_mask(self.cache.start, self._pads, *block, visible, states.dtype)
        self.cache.open(visible)
        return self.call.plan.adapter.run_extra_layer(self.layer, states, mask, self._past)


def _refuse_foreign(heads: MedusaHeads, call: Call, prefill: BranchOutput) -> None:
    """Raises an error if the heads' model has another hidden size or vocabulary.

    Raises:
        IncompatibleError: The heads were trained for another model.
    """
    vocab = None if heads.out is None else heads.out.shape[1]
    sizes = {
        "states of width": (heads.weight.shape[-1], prefill.hidden["last"].shape[-1]),
        "a vocabulary of": (vocab, prefill.logits.shape[-1]),
    }
    if heads.vocabulary is not None and int(heads.vocabulary.max()) >= prefill.logits.shape[-1]:
        sizes["a vocabulary of"] = (int(heads.vocabulary.max()) + 1, prefill.logits.shape[-1])
    for what, (wanted, found) in sizes.items():
        if wanted not in (None, found):
            raise IncompatibleError.between(
                "draft Medusa",
                type(call.plan.adapter.model).__name__,
                f"the heads expect {what} {wanted}, the model has {found}",
                "use heads that were trained for this model",
            )


def paths_of_choices(choices: Any) -> list[tuple[int, ...]] | None:
    """Returns rank paths of a checkpoint's tree, given as paths or as numbers per level."""
    if not choices:
        return None
    if isinstance(choices[0], int):
        levels = [range(count) for count in choices[1:]]
        paths = [
            path
            for depth in range(1, len(levels) + 1)
            for path in itertools.product(*levels[:depth])
        ]
        return sorted(paths, key=lambda path: (sum(path), len(path), path))
    return [tuple(path) for path in choices]
