"""Self-drafting by a rounded copy: the target model with int8 weights drafts for itself.

The copy runs every layer, so nearly every draft is accepted; it reads a quarter of the bytes, which
is what a step costs. Nothing is trained, and verification is the float model's: the tokens are the
same as without a draft. The copy has a cache of its own and adds a quarter to the memory of the
weights; embeddings, norms and convolutions are shared.

Sources: QuantSpec, Tiwari et al. 2025, arXiv:2502.10424 (a quantised self-draft; there 4-bit
weights and a quantised cache). Differs from it: weights and activations of linear layers have 8
bits, and the cache is not quantised, except Whisper's keys and values of the encoder's states. On
CUDA only weights have, by torchao, see `mmdecode.quantization.weight_only`.
"""

from __future__ import annotations

import copy
from threading import Lock
from typing import Any

from mmdecode.draft.assistant import Assistant, AssistantSession, adapter_like
from mmdecode.draft.target import warp_alone
from mmdecode.engine.adapter import MAIN
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter
from mmdecode.engine.proposal import Kind
from mmdecode.engine.views import mark
from mmdecode.errors import IncompatibleError, OptionError, UnsupportedModelError

BITS = (8, 32)


class Quantized(Drafter):
    """Drafts ``length`` tokens per round with the target's own weights, rounded to int8.

    Args:
        bits: Bits of a weight: 8, or 32, with which the model drafts for itself unrounded, for
            tests.
        length: Number of tokens drafted per round; 0 drafts nothing.
        max_rejection_probability: See `mmdecode.draft.assistant.Assistant`.

    Proposes argmax, sampled or coupled chains, as `mmdecode.draft.assistant.Assistant` does.
    Lossless under every exact acceptance rule. The rounded copy is made when the model is first
    decoded with, and lives as long as the drafter; a change to the model's weights afterwards costs
    accepted tokens, never correctness. A rounded model drafts with its own weights.

    Raises:
        OptionError: An option is out of range.
        IncompatibleError: When decoding begins: the model is neither on the CPU nor on CUDA, is
            quantised by another library, or has an adapter or a hook.
        MissingExtraError: When decoding begins: the model is on CUDA, and torchao is missing.
    """

    summary = "the model itself with int8 weights drafts a chain"
    source = "self-drafting as in QuantSpec, Tiwari et al. 2025; int8 as in `mmdecode.quantize`"
    kinds: tuple[Kind, ...] = Assistant.kinds
    # its cache lacks what another draft proposed
    capabilities = DrafterCapabilities(
        graph_safe=True, composable=False, follows_target=True, argmax_only=True
    )

    def __init__(
        self, bits: int = 8, length: int = 8, max_rejection_probability: float = 1.0
    ) -> None:
        if bits not in BITS:
            raise OptionError(f"bits={bits}; expected one of {', '.join(map(str, BITS))}")
        Assistant(None, length, max_rejection_probability=max_rejection_probability)  # its checks
        self.bits, self.length = bits, length
        self.max_rejection_probability = max_rejection_probability
        self._copies: dict[int, Any] = {}  # by id of a model, which its copy keeps alive
        self._lock = Lock()

    def begin(self, call: Call, prefill: BranchOutput) -> AssistantSession:
        """Rounds the model if that has not been done, and runs the copy on the prompt."""
        adapter = call.plan.adapter
        view = adapter if self.bits == 32 else adapter_like(adapter, self._rounded(adapter.model))
        branch = ModelRunner(view, [MAIN])
        branch.prefill(call, {})
        return AssistantSession(
            call, branch, warp_alone(call), self.length, self.max_rejection_probability
        )

    def _rounded(self, model: Any) -> Any:
        """Returns the int8 copy of a model, which is made once.

        Raises:
            IncompatibleError: The model cannot be rounded.
        """
        from mmdecode.quantization.models import quantize_drafter

        with self._lock:
            if id(model) not in self._copies:
                view = sharing_copy(model)
                mark(view, model)
                try:
                    quantize_drafter(view)
                except UnsupportedModelError as error:
                    raise IncompatibleError.between(
                        "draft Quantized", type(model).__name__, str(error), "use another draft"
                    ) from error
                self._copies[id(model)] = view
            return self._copies[id(model)]


def sharing_copy(model: Any) -> Any:
    """Returns a copy of a model whose modules are its own, and whose tensors are shared."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
