"""Prompts of correctors, which show N-best lists, and templates that follow published ones."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmdecode.errors import (
    InputError,
    OptionError,
    UnknownNameError,
)
from mmdecode.runs.files import write_file
from mmdecode.weights import read_json

if TYPE_CHECKING:
    pass


SETTINGS = "corrector.json"
"""Name of the file with the `PromptOptions` in a trained corrector's folder."""


NO_LABEL = -100
"""Label of positions that the training loss ignores."""


TEMPLATES = {
    "n_best": "Below is the best hypothesis of a speech recogniser, and then its other hypotheses. "
    "Correct the best one with words of the others, and write the true transcription.\n\n"
    "### Best-hypothesis:\n{best}\n\n### Other-hypothesis:\n{others}\n\n### Response:\n",
    "1_best": "Below is the best hypothesis of a speech recogniser. Correct its errors, and write "
    "the true transcription.\n\n### Best-hypothesis:\n{best}\n\n### Response:\n",
    "flanec": "Write the true transcription of an utterance that a speech recogniser took for one "
    "of these, the likeliest first:\n\n{numbered}",
}

PLACEHOLDERS = ("best", "others", "numbered")


@dataclass(frozen=True)
class Template:
    """A prompt with placeholders for the hypotheses.

    Attributes:
        text: Text of the prompt, in which ``{best}`` stands for the first hypothesis and
            ``{others}`` for the other hypotheses, one per line; or in which ``{numbered}`` stands
            for all hypotheses as a numbered list. Literal braces are doubled.

    Raises:
        OptionError: The text has no placeholder, or an unknown one.
    """

    text: str

    def __post_init__(self) -> None:
        try:
            names = [name for _, name, _, _ in Formatter().parse(self.text) if name is not None]
        except ValueError as error:
            raise OptionError(f"template {self.text!r}: {error}; double literal braces") from None
        wrong = [name for name in names if name not in PLACEHOLDERS]
        if wrong or not {"best", "numbered"} & {*names} or len(names) > len({*names}):
            raise OptionError(
                f"template {self.text!r} has the placeholders {', '.join(names) or '(none)'}; "
                "expected {best}, alone or with {others}, or {numbered}, each once"
            )

    @classmethod
    def of(cls, given: Template | str) -> Template:
        """Returns one of `TEMPLATES` by its name, or makes a template from its text.

        Raises:
            UnknownNameError: There is no template of that name.
        """
        if isinstance(given, Template):
            return given
        if given not in TEMPLATES and "{" not in given:
            raise UnknownNameError.of("template", given, TEMPLATES)
        return cls(TEMPLATES.get(given, given))

    def prompt(self, hypotheses: Sequence[str]) -> str:
        """Returns the prompt for a list of hypotheses, whose white space becomes single spaces."""
        lines = [" ".join(text.split()) for text in hypotheses]
        return self.text.format(
            best=lines[0],
            others="\n".join(lines[1:]),
            numbered="\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1)),
        )

    def hypotheses(self, prompt: str) -> tuple[str, ...]:
        """Extracts the hypotheses from a prompt.

        Raises:
            InputError: The prompt does not match this template.
        """
        found = self._pattern.fullmatch(prompt)
        if found is None:
            raise InputError(
                f"{prompt[:60]!r} does not match the template {self.text[:60]!r}; give the "
                "template that the prompt was made with"
            )
        shown = found.groupdict()
        if "numbered" in shown:
            lines = shown["numbered"].split("\n")
            return tuple(line.partition(". ")[2] for line in lines)
        others = shown.get("others", "")
        return (shown["best"], *(others.split("\n") if others else ()))

    @cached_property
    def own_lines(self) -> list[str]:
        """The template's own lines of several words and its headings, without placeholders."""
        literal = "\n".join(part for part, _, _, _ in Formatter().parse(self.text))
        lines = (line.strip() for line in literal.split("\n"))
        return [line for line in lines if line.startswith("#") or len(line.split()) > 2]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        parts = []
        for literal, name, _, _ in Formatter().parse(self.text):
            parts.append(re.escape(literal))
            if name is not None:
                parts.append(f"(?P<{name}>.*)" if name == "best" else f"(?P<{name}>[\\s\\S]*)")
        return re.compile("".join(parts))


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options of a corrector's prompts, saved with a trained corrector.

    Attributes:
        template: A name of `TEMPLATES`, or a prompt text of your own, see `Template`.
        count: Most hypotheses in the prompt.
        chat: Whether the prompt is a user turn in the tokenizer's chat template.
    """

    template: str = "n_best"
    count: int = 5
    chat: bool = False

    def __post_init__(self) -> None:
        Template.of(self.template)
        if self.count < 1:
            raise OptionError(f"count={self.count}; expected at least one hypothesis")

    def save(self, folder: Path) -> None:
        """Writes the options into a model's folder."""
        write_file(folder / SETTINGS, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def kept(cls, model: str) -> dict[str, Any]:
        """Reads the prompt options of a model, by its folder or name; empty if it has none."""
        return read_json(model, SETTINGS)


class ListPrompts:
    """Encodes prompts and answers of a corrector as token ids.

    Args:
        tokenizer: The model's tokenizer.
        seq2seq: Whether the model is an encoder-decoder, whose encoder reads the prompt; for other
            models the answer continues the prompt.
        options: Options of the prompts.

    Raises:
        InputError: The tokenizer has no end token, or no chat template although ``chat`` is set.
    """

    def __init__(self, tokenizer: Any, seq2seq: bool, options: PromptOptions) -> None:
        self.tokenizer, self.seq2seq, self.options = tokenizer, seq2seq, options
        self.template = Template.of(options.template)
        if tokenizer.eos_token_id is None:
            raise InputError(
                f"{type(tokenizer).__name__} has no end-of-sequence token; set "
                "tokenizer.eos_token to the token that ends an answer"
            )
        if options.chat and not getattr(tokenizer, "chat_template", None):
            raise InputError("the tokenizer has no chat template; leave chat out")
        self.eos = int(tokenizer.eos_token_id)
        pad = tokenizer.pad_token_id
        self.pad = self.eos if pad is None else int(pad)

    def shown(self, hypotheses: Sequence[str]) -> Sequence[str]:
        """Returns the hypotheses of a list that the prompt shows."""
        return hypotheses[: self.options.count]

    def prompt(self, hypotheses: Sequence[str]) -> list[int]:
        """Returns the ids of the prompt for a list."""
        text = self.template.prompt(self.shown(hypotheses))
        if self.options.chat:
            turn = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(
                turn, tokenize=False, add_generation_prompt=True
            )
        ids = self.tokenizer(text, add_special_tokens=not self.options.chat)["input_ids"]
        if not self.seq2seq and ids[-1:] == [self.eos]:
            return ids[:-1]  # some tokenizers end every text, and this one goes on
        return ids

    def answer(self, text: str) -> list[int]:
        """Encodes an answer, with one end-of-sequence token at the end."""
        if self.seq2seq:
            ids = self.tokenizer(text_target=text)["input_ids"]
        else:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*(token for token in ids if token != self.eos), self.eos]

    def text(self, ids: Sequence[int]) -> str:
        """Decodes an answer, without special tokens."""
        decode = self.tokenizer.decode
        return decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()

    def collated(self, pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        """Makes training inputs from pairs of prompt and answer; only answers have labels.

        A seq2seq model gets prompts ``(B, P)`` and ``labels (B, A)``. A causal model gets prompts
        followed by answers, ``(B, P + A)``, and labels of the same shape. Rows are padded on the
        right.
        """
        rows = [prompt if self.seq2seq else prompt + answer for prompt, answer in pairs]
        wanted = [
            answer if self.seq2seq else [NO_LABEL] * len(prompt) + answer
            for prompt, answer in pairs
        ]

        def padded(parts: Sequence[list[int]], filler: int) -> Tensor:
            tensors = [torch.tensor(part) for part in parts]
            return pad_sequence(tensors, batch_first=True, padding_value=filler)

        return {
            "input_ids": padded(rows, self.pad),
            "attention_mask": padded([[1] * len(row) for row in rows], 0),
            "labels": padded(wanted, NO_LABEL),
        }

    def padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Pads prompts, on the left for causal models; returns ids and mask, ``(B, P)``."""
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.pad)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            part = slice(0, len(row)) if self.seq2seq else slice(width - len(row), width)
            ids[index, part], mask[index, part] = torch.tensor(row), 1
        return ids, mask
