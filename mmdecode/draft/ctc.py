"""CTC draft: a head on a recogniser's encoder gives the whole text, and the decoder verifies it.

The head reads the encoder's states, which the call has anyway, and gives the text of each row in
one pass that costs about as much as a step of the decoder. The text is written as the decoder would
write it: decoded, and encoded again by the tokenizer. A `mmdecode.draft.source.Source` then drafts
from it: a chain that ends with the end token, and which finds its way back after a wrong token. The
decoder runs no additional pass.

Source: Saon et al. 2026, arXiv:2603.11243 (self-speculative decoding with CTC encoder drafts).
Differs from it: every token is verified by the acceptance rule, the end token too, so that the text
is the decoder's own. The released code accepts a text whose tokens are all somewhat probable, takes
it unverified if the head is certain, and decodes from the beginning otherwise.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from mmdecode.draft.source import Source
from mmdecode.draft.target import branch_prompt
from mmdecode.engine.adapter import MAIN, Adapter
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter, DraftSession, Requirements
from mmdecode.errors import OptionError
from mmdecode.models.ctc_head import CTCHead
from mmdecode.models.placed import Placed

CPU_ROWS = 4
"""Default of ``rows`` on a CPU, without ``least``."""


class CTC(Drafter):
    """Drafts chains of the text that a CTC head finds in the encoder's states.

    Args:
        head: The head, trained for the model by ``mmdecode train ctc``.
        tokenizer: The model's tokenizer, which writes the head's text as the decoder would;
            ``None``: the head's subwords are drafted as they are.
        length: Maximum number of tokens proposed per round; 0 drafts nothing.
        ngram: Maximum number of last output tokens that are looked up in the text, see
            `mmdecode.draft.source.Source`.
        least: Minimum number of last output tokens that must match the text, see there. With 0 the
            draft always continues, which suits a head with few errors; with 2 a head with many
            errors drafts less in vain, and `mmdecode.draft.first_of.FirstOf` may draft the rest.
        rows: Most rows of a call that are drafted for. In a call with more, the head does not run
            and nothing is proposed. ``None``: any number, but on a CPU `CPU_ROWS`, since passes
            over the chains of many rows cost more there than they save, and none with ``least``,
            since before Medusa heads it was slower than these alone.

    Proposes deterministic chains. Lossless under every exact acceptance rule, whatever the head
    finds. Where the head finds nothing, nothing is drafted. Predicted timestamps are not in the
    text; the draft continues after them.

    Raises:
        OptionError: An option is out of range.
        IncompatibleError: When decoding begins: the model has no encoder, or the head was trained
            for another model.
    """

    summary = "a CTC head on the recogniser's encoder drafts the whole text"
    source = "Saon et al. 2026 (CTC encoder drafts), here verified token by token"
    capabilities = DrafterCapabilities(graph_safe=True, argmax_only=True)

    def __init__(
        self,
        head: CTCHead,
        tokenizer: Any = None,
        length: int = 16,
        ngram: int = 3,
        least: int = 0,
        rows: int | None = None,
    ) -> None:
        if rows is not None and rows < 0:
            raise OptionError(f"rows={rows}; expected rows >= 0, where 0 drafts nothing")
        self.rows, self._warned = rows, False
        self.texts_drafter = Source(length, ngram, least=least)
        self.head, self.tokenizer = head.eval(), tokenizer
        self.placed = Placed(self.head)

    @classmethod
    def from_options(
        cls,
        head: str | None = None,
        length: int = 16,
        ngram: int = 3,
        least: int = 0,
        rows: int | None = None,
        model_id: str | None = None,
        tokenizer: Any = None,
    ) -> CTC:
        """Builds the drafter from the options of a string, as in ``ctc:head=FOLDER``.

        Args:
            head: Folder, Hub id or ``zoo:NAME`` of the head; ``None``: the head that ships with
                the model ``model_id``.
            length: See `CTC`.
            ngram: See `CTC`.
            least: See `CTC`.
            rows: See `CTC`.
            model_id: Name of the model that decodes.
            tokenizer: See `CTC`.

        Raises:
            OptionError: No head ships with the model.
        """
        found = CTCHead.of_option(head, model_id, "draft 'ctc'")
        return cls(found, tokenizer, length, ngram, least, rows)

    @classmethod
    def from_pretrained(cls, name: str | Path, tokenizer: Any = None) -> CTC:
        """Loads a head from a folder, a Hub id or ``zoo:NAME``."""
        return cls(CTCHead.from_pretrained(name), tokenizer)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns no requirements: the encoder's states are part of the call.

        Raises:
            IncompatibleError: The model has no encoder whose states the head could read, or the
                head was trained for another model.
        """
        self.head.refuse_misfit(adapter, "draft CTC")
        return Requirements()

    def texts(self, call: Call) -> list[list[int]]:
        """Returns the head's text of each row, as the decoder would write it, without the end.

        Args:
            call: The generation call.
        """
        adapter, inputs = call.plan.adapter, branch_prompt(call, MAIN).inputs
        states, mask = inputs["source"], inputs.get("source_mask")
        head = self.placed.like(states)
        rows = head.greedy(*head.arguments(states, mask, adapter.embed))
        return [self.rewritten(row) for row in rows]

    def rewritten(self, ids: list[int]) -> list[int]:
        """Returns the tokens that the tokenizer writes a text with.

        Args:
            ids: Any tokens of the text.
        """
        if self.tokenizer is None or not ids:
            return ids
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _warn_off(self, batch: int, most: int) -> None:
        """Warns once that nothing is drafted, if nobody asked for that."""
        if self.rows is None and not self._warned:
            self._warned = True
            where = f"in calls of more than {most} rows" if most else "with least"
            warnings.warn(
                f"draft ctc is off {where}, since on a CPU it was slower than without; "
                f"rows={batch} in its options turns it on",
                stacklevel=2,
            )

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Runs the head, and opens a session that drafts from its texts and the end token."""
        most = self.rows
        if most is None and prefill.logits.device.type == "cpu":
            most = 0 if self.texts_drafter.least else CPU_ROWS
        if most is not None and call.batch > most:
            self._warn_off(call.batch, most)
            return DraftSession(call)
        end = call.request.eos_token_ids[:1].tolist()
        rows = [[*text, *end] for text in self.texts(call)]
        return self.texts_drafter.session(call, [[row] for row in rows])
