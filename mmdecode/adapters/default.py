"""Adapter of causal language models that have no adapter of their own, with a check at first use.

The check compares logits computed with the engine's cache to logits of separate forward passes of
the whole model without a cache. It scores two prompts of unequal length, a tree of three drafted
tokens after each, and one token after each row's accepted path. So it covers masks, positions, the
cache and everything between the last norm and the logits. The tolerance is a multiple of the
difference between the model's own passes over inputs of different lengths. The prompts are longer
than every attention window in the model's config up to `LONGEST`; a longer ``sliding_window`` is
assumed to work as defined by transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmdecode._compat import attention_implementation
from mmdecode.adapters.text import DecoderOnlyAdapter
from mmdecode.engine.adapter import MAIN, BranchSpec, Prompt
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import Call
from mmdecode.engine.checks import refuse_training
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.engine.views import origin
from mmdecode.errors import IncompatibleError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST = 256
"""Attention windows up to this length are checked, by prompts that are longer."""

TREE = Tree((-1, -1, 0))
PREPARED = frozenset(
    ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
)

_checked: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


class DefaultAdapter(DecoderOnlyAdapter):
    """Any causal language model whose layers use a key-value cache of transformers.

    Raises:
        UnsupportedModelError: The check fails: logits with the cache differ from the model's own.
    """

    summary = "any other causal language model, after a check at its first use"
    model_types = ()

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        refuse_training(model)
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and self._has_position_table(longest):
            self.max_positions = min(longest, self.max_positions or longest)
        used = attention_implementation(model.config)
        whole = origin(model)
        if whole not in _checked or _checked[whole] != used:
            check(self)
            _checked[whole] = used

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the model is a causal language model of transformers that reads text alone."""
        config = getattr(model, "config", None)
        if config is None or not callable(getattr(model, "can_generate", None)):
            return False
        modalities = getattr(model, "input_modalities", "text")
        return bool(
            model.can_generate()
            and modalities in ("text", ["text"], ("text",))
            and config.get_text_config(decoder=True) is config
            and not getattr(config, "is_encoder_decoder", False)
        )

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """Returns the prompt; raises an error if the call has inputs other than ids and mask."""
        given = {name for name, value in call.request.model_kwargs.items() if value is not None}
        strange = sorted(given - PREPARED)
        if strange and call.plan.adapter is self:
            raise IncompatibleError.between(
                f"input {', '.join(strange)}",
                self.name,
                "models without an adapter of their own are run from ids and mask alone",
                "leave it out, or decode with plain generate",
            )
        return super().prompt(call, spec)

    def layers(self) -> Sequence[nn.Module]:
        """Returns the layers: the module list whose length is the number of layers."""
        for module in self._body.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers:
                return list(module)
        raise UnsupportedModelError(
            f"{self.name} has no list of {self.num_layers} layers to read hidden "
            "states from; use a draft that needs none"
        )

    def _has_position_table(self, positions: int) -> bool:
        """Whether positions are looked up in a table: an embedding or a tensor."""
        words = self.model.get_input_embeddings()
        for module in self._body.modules():
            if isinstance(module, nn.Embedding) and module is not words:
                return True
            for held in (*module.buffers(recurse=False), *vars(module).values()):
                if isinstance(held, Tensor) and held.ndim == 2 and len(held) == positions:
                    return True
        return False


@torch.no_grad()
def check(adapter: DecoderOnlyAdapter) -> None:
    """Compares logits with the cache to logits of full passes; see the module.

    Raises:
        UnsupportedModelError: The logits differ, or a pass fails.
    """
    name = adapter.name
    hint = (
        "decode it with plain generate, or register an adapter under the entry-point group "
        "mmdecode.adapters"
    )
    try:
        where, worst, tolerance = _largest_difference(adapter)
    except Exception as error:  # a model may object to a mask or a cache in any way
        raise UnsupportedModelError(
            f"{name} has no adapter, and the default one failed its start-up check: "
            f"{type(error).__name__}: {error}; {hint}"
        ) from error
    if not worst <= tolerance:
        raise UnsupportedModelError(
            f"{name} has no adapter, and through the default one logits at {where} differ by "
            f"{worst:.3g} from a pass of their own; expected at most {tolerance:.3g}: {hint}"
        )


def _largest_difference(adapter: DecoderOnlyAdapter) -> tuple[str, float, float]:
    """Returns where cached and full passes differ most, by how much, and the tolerance."""
    device = next((p.device for p in adapter.model.parameters() if not p.is_meta), None)
    longest = _longest_window(adapter.model.config) + 12
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(adapter.vocab, (2, longest + 8), generator=dice).to(device)
    prompts, (root, *nodes, last) = ids[:, :longest], ids[:, longest : longest + 5].T
    mask = torch.ones_like(prompts, dtype=torch.bool)
    mask[1, :4] = False
    kept = torch.tensor([[0, 2], [1, -1]], device=device)

    call = _context(prompts, mask)
    branches = ModelRunner(adapter, [MAIN])
    drafted = Proposal(tokens=torch.stack(nodes, 1), kind="deterministic", tree=TREE)
    found = [branches.prefill(call, {})["main"].logits]
    alone = ModelRunner(adapter, [MAIN]).prefill(_context(prompts[:1], mask[:1]), {})
    _append(call, root)
    found.append(branches.score(call, drafted, {})["main"].logits)
    count = (kept >= 0).sum(1)
    branches.commit(kept, count + 1, chain=False)
    _append(call, last, skip=count)
    found.append(branches.score(call, Proposal.empty(2, ids.device), {})["main"].logits)

    worst, where, noise, scale = 0.0, "the prompt", 0.0, 0.0
    for row in range(2):
        tokens = [[root[row], nodes[0][row], nodes[2][row]], [root[row], nodes[1][row]]]
        new = [torch.stack([*path, last[row]]) for path in tokens]
        prompt = prompts[row][mask[row]]
        plain = [_plain(adapter.model, torch.cat([prompt, path])) for path in new]
        end = len(prompt) - 1
        compared = {
            "the prompt": (found[0][row, 0], plain[0][end]),
            "the root": (found[1][row, 0], plain[0][end + 1]),
            "a node": (found[1][row, 1], plain[0][end + 2]),
            "its sibling": (found[1][row, 2], plain[1][end + 2]),
            "its child": (found[1][row, 3], plain[0][end + 3]),
            "the token after a kept path": (found[2][row, 0], plain[row][-1]),
        }
        if row == 0:
            compared["a prompt without padding"] = (alone["main"].logits[0, 0], plain[0][end])
        for position, (ours, expected) in compared.items():
            difference = float((ours - expected).abs().amax())
            if not difference <= worst:  # so that NaN counts
                worst, where = difference, position
        for width in (1, 4, end + 1):
            short = _plain(adapter.model, prompt[:width])
            noise = max(noise, float((short - plain[0][:width]).abs().amax()))
        scale = max(scale, float(plain[0].abs().amax()))
    noise = max(noise, torch.finfo(adapter.model.dtype).eps * scale)
    if noise > scale / 32:
        return "a prefix, for which what follows matters,", noise, scale / 32
    return where, worst, 8 * noise


def _longest_window(config: Any) -> int:
    """Returns the longest attention window that is at most `LONGEST`; 0 if there is none."""
    windows = {
        name: value
        for name, value in config.to_dict().items()
        if "window" in name and isinstance(value, int)
    }
    for name, value in windows.items():
        if value > LONGEST and name != "sliding_window":
            raise ValueError(f"{name}={value} is too long to be checked")
    return max((value for value in windows.values() if value <= LONGEST), default=0)


def _plain(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids[None], use_cache=False).logits[0].float()


def _append(call: Call, token: Tensor, skip: Tensor | int = 0) -> None:
    """Commits ``token (B,)`` after ``skip`` accepted tokens per row, whose ids are not needed."""
    call.rows.length = call.rows.length + 1 + skip
    call.rows.ids.scatter_(1, call.end()[:, None] - 1, token[:, None])
    call.rows.cur_len = int(call.rows.length.max())


def _context(ids: Tensor, mask: Tensor) -> Call:
    return Call.of(ids, mask, max_new_tokens=8)
