"""Base of adapters of models that generate image tokens in raster order.

In image mode the call's ids are generated tokens alone and its prompt is empty. The condition (a
class, a prompt) comes in ``call.request.model_kwargs``, as `ImageAdapter.condition` made it, and
each branch's prompt is built from it here. A branch with the transform ``"unconditional"`` reads
the unconditional input. The vocabulary is that of the tokens that can be generated, which need not
be the vocabulary of prompts.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from mmdecode import registry
from mmdecode.adapters.attention import refuse_attention
from mmdecode.adapters.text import DecoderOnlyAdapter
from mmdecode.engine.adapter import BranchSpec, Mask, Prompt
from mmdecode.engine.call import Call
from mmdecode.engine.request import left_padded
from mmdecode.errors import IncompatibleError, OptionError, ShapeError
from mmdecode.models.image_layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNCONDITIONAL = "unconditional"
"""Transform of the branch that reads no condition."""


@dataclass(frozen=True)
class Preset:
    """Default guidance and sampling of a family.

    Attributes:
        guidance: Scale s of ``u + s (c - u)``; 1 is neutral.
        sampling: Arguments of `mmdecode.image_ar.sampling.Sampling`.
    """

    guidance: float = 1.0
    sampling: Mapping[str, Any] = field(default_factory=dict)


class ImageAdapter(DecoderOnlyAdapter, ABC):
    """Base of families of models that generate image tokens; see `mmdecode.engine.adapter.Adapter`.

    Attributes:
        layout: Positions of the codes among the generated tokens.
        vocab: Number of tokens that can be generated.
        preset: Published guidance and sampling of the family.
    """

    model_types = ()
    layout: Layout
    preset: Preset

    def masks_itself(self, prompt: Prompt) -> bool:
        """Never: conditions are short, so the engine's mask costs little."""
        return False

    @abstractmethod
    def condition(self, **given: Any) -> dict[str, Any]:
        """Checks conditions and turns them into model inputs, rows first."""

    @abstractmethod
    def row_names(self, inputs: Mapping[str, Any]) -> list[bytes]:
        """Names of the rows of a `condition`: equal for equal conditions, whatever the padding."""

    @abstractmethod
    def condition_prompt(self, inputs: Mapping[str, Any], unconditional: bool) -> Prompt:
        """The prompt of a `condition`; with ``unconditional``, the one without a condition."""

    @abstractmethod
    def codebook(self) -> Tensor | None:
        """Embedding of each code in the image tokenizer, ``(C, d)``; ``None``: not known."""

    @abstractmethod
    def pixels(self, codes: Tensor) -> Tensor:
        """Images of ``codes (B, rows, columns)``, about 0..1, ``(B, 3, H, W)``."""

    def decode(self, codes: Tensor) -> Tensor:
        """Images of ``codes (B, rows, columns)``, float32 in 0..1, ``(B, 3, H, W)``.

        Raises:
            ShapeError: The codes have another grid.
            IncompatibleError: The decoder of the image tokenizer was not given.
        """
        grid = (self.layout.rows, self.layout.columns)
        if codes.ndim != 3 or codes.shape[1:] != grid:
            raise ShapeError(
                f"codes have shape {tuple(codes.shape)}; expected (batch, {grid[0]}, {grid[1]})"
            )
        with torch.no_grad():
            return self.pixels(codes).float().clamp(0, 1)

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """The prompt of the condition, or the unconditional one.

        Raises:
            IncompatibleError: The branch asks for another transform or prompt.
        """
        if spec.transform not in (None, UNCONDITIONAL) or spec.prompt != "same":
            raise IncompatibleError.between(
                f"branch {spec.name!r}",
                self.name,
                f"in image mode the only transform is {UNCONDITIONAL!r}, and the only prompt "
                "the condition",
                "use guide 'guidance'",
            )
        unconditional = spec.transform == UNCONDITIONAL
        return self.condition_prompt(call.request.model_kwargs, unconditional)

    def with_prefix(self, tokens: Tensor) -> Self:
        """A copy whose prompts are extended by generated ``tokens (B, n)``, for one pass."""
        alike = copy.copy(self)
        plain = self.prompt

        def prompt(call: Call, spec: BranchSpec) -> Prompt:
            asked = plain(call, spec)
            embeds = torch.cat([asked.inputs["inputs_embeds"], self.embed(tokens)], 1)
            ids = torch.cat([asked.ids, tokens], 1)
            mask = torch.cat([asked.mask, torch.ones_like(tokens, dtype=torch.bool)], 1)
            return Prompt(ids=ids, mask=mask, inputs={"inputs_embeds": embeds})

        alike.prompt = prompt  # type: ignore[method-assign]
        return alike

    def companion(self, model: Any) -> ImageAdapter:
        """The adapter of a second model that generates the same image tokens.

        Raises:
            IncompatibleError: Its tokens have another layout.
        """
        other = registry.image_adapter_for(model, **self._shared())
        mine, theirs = self.layout, other.layout
        if (mine.rows, mine.columns, mine.newline, mine.tail) != (
            theirs.rows,
            theirs.columns,
            theirs.newline,
            theirs.tail,
        ) or not torch.equal(mine.ids, theirs.ids):
            raise IncompatibleError.between(
                type(model).__name__,
                self.name,
                f"they write {theirs.rows} x {theirs.columns} codes and {mine.rows} x "
                f"{mine.columns}, or other tokens for them",
                "use a model that was trained on the same tokenizer and image size",
            )
        return other

    def _shared(self) -> dict[str, Any]:
        """Options of this adapter that the adapter of a second model needs too."""
        return {}


class PromptedAdapter(ImageAdapter):
    """Base of models whose condition is a text: ids that end with the token that opens an image."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._body = model.get_decoder()
        refuse_attention(self._body)

    @abstractmethod
    def text(self, prompt: str, tokenizer: Any) -> str:
        """The prompt as the model reads it, up to the token that opens an image."""

    @abstractmethod
    def check(self, ids: Tensor) -> None:
        """Checks that ``ids (B, P)`` open an image."""

    @abstractmethod
    def without_text(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and mask of the unconditional prompt, ``(B, P')``."""

    def condition(  # type: ignore[override]
        self,
        *,
        prompt: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        negative_prompt: str | None = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
    ) -> dict[str, Any]:
        """Model inputs from texts, or from the processor's output for image generation.

        Args:
            prompt: One text per image, in the model's own template if it has one.
            tokenizer: Tokenizer for texts, or a processor that has one.
            input_ids: Ids instead of texts, padded on the left, ``(B, P)``.
            attention_mask: Mask of the ids.
            negative_prompt: Text that guidance leads away from; default: the prompt without text.
            negative_prompt_ids: The same as ids, ``(1 or B, P')``.
            negative_prompt_attention_mask: Mask of these ids.

        Raises:
            OptionError: Neither or both of texts and ids are given; a prompt does not open an
                image, or is too long.
        """
        ids, mask = self._read("prompt", prompt, tokenizer, input_ids, attention_mask)
        if ids is None:
            raise OptionError(
                "nothing to draw: give prompt=... with tokenizer=..., or input_ids from the "
                "model's processor, for image generation"
            )
        self._check_length("prompt", mask)
        inputs = {"prompt_ids": ids, "prompt_mask": mask}
        ids, mask = self._read(
            "negative_prompt",
            negative_prompt,
            tokenizer,
            negative_prompt_ids,
            negative_prompt_attention_mask,
        )
        if ids is not None:
            rows = len(inputs["prompt_ids"])
            if len(ids) not in (1, rows):
                raise OptionError(
                    f"{len(ids)} negative prompts for {rows} images; give one, or one for each"
                )
            self._check_length("negative prompt", mask)
            inputs["negative_ids"] = ids.expand(rows, -1)
            inputs["negative_mask"] = mask.expand(rows, -1)
        return inputs

    def _read(
        self,
        name: str,
        texts: str | Sequence[str] | None,
        tokenizer: Any,
        ids: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Any, Any]:
        """Ids and mask, checked; ``None`` if nothing was given."""
        if texts is not None and ids is not None:
            raise OptionError(f"{name} came both as text and as ids; give one of them")
        if texts is not None:
            if tokenizer is None:
                raise OptionError(f"{name} came as text; pass tokenizer=... too, or ids")
            tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
            texts = [texts] if isinstance(texts, str) else list(texts)
            read = tokenizer(
                [self.text(text, tokenizer) for text in texts],
                padding=True,
                padding_side="left",
                return_tensors="pt",
            )
            ids, mask = read["input_ids"], read["attention_mask"]
        if ids is None:
            return None, None
        ids = ids.to(self.model.device)
        mask = torch.ones_like(ids) if mask is None else mask.to(ids.device)
        mask = left_padded(mask)
        self.check(ids)
        return ids, mask

    def _check_length(self, what: str, mask: Tensor) -> None:
        positions = self.model.config.get_text_config(decoder=True).max_position_embeddings
        longest = int(mask.sum(1).max())
        if longest + self.layout.length > positions:
            raise OptionError(
                f"a {what} of {longest} tokens and an image of {self.layout.length}; {self.name} "
                f"has {positions} positions: shorten the {what} to {positions - self.layout.length}"
            )

    def row_names(self, inputs: Mapping[str, Any]) -> list[bytes]:
        """Names rows by the ids of the prompt."""
        rows = zip(inputs["prompt_ids"].cpu(), inputs["prompt_mask"].cpu(), strict=True)
        return [ids[mask].numpy().tobytes() for ids, mask in rows]

    def condition_prompt(self, inputs: Mapping[str, Any], unconditional: bool) -> Prompt:
        """Prompt of the text; unconditional: of the negative prompt, or without text."""
        ids, mask = inputs["prompt_ids"], inputs["prompt_mask"]
        if unconditional and "negative_ids" in inputs:
            ids, mask = inputs["negative_ids"], inputs["negative_mask"]
        elif unconditional:
            ids, mask = self.without_text(ids, mask)
        embeds = self.model.get_input_embeddings()(ids)
        return Prompt(ids=ids, mask=mask, inputs={"inputs_embeds": embeds})


class SharedVocabularyAdapter(PromptedAdapter):
    """Base of models with one vocabulary and one head for text and image tokens.

    Logits cover the ids from the first to the last that can be generated, so a token is its id
    minus `first`, and the head computes only those.

    Args:
        model: The model.
        codes: Id of each code, ``(C,)``.
        rows: Rows of codes.
        columns: Columns of codes.
        newline: Token after every row, see `Layout`.
        tail: Tokens after the last row, see `Layout`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        codes: Tensor,
        rows: int,
        columns: int,
        newline: int | None = None,
        tail: tuple[int, ...] = (),
    ) -> None:
        super().__init__(model)
        used = [*codes.tolist(), *tail, *(() if newline is None else (newline,))]
        self.first = min(used)
        self.vocab = max(used) - self.first + 1
        self.layout = Layout(
            rows,
            columns,
            codes - self.first,
            None if newline is None else newline - self.first,
            tuple(token - self.first for token in tail),
        )

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States after the final norm."""
        return super().forward(tokens + self.first, mask, positions, past)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of generated tokens, ``(..., H)``."""
        return super().embed(tokens + self.first)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the tokens that can be generated."""
        return self.unembed(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the needed rows of the output matrix, if it is a plain linear layer."""
        last = self.first + self.vocab
        head = self._head
        # a quantised or offloaded matrix has to be applied by its module
        plain = type(head) is torch.nn.Linear and type(head.weight.data) is Tensor
        if plain and head.bias is None and head.weight.device == hidden.device:
            return linear(hidden, head.weight[self.first : last])
        return head(hidden)[..., self.first : last]


def to_unit(values: Tensor) -> Tensor:
    """Maps values from -1..1 to 0..1."""
    return (values + 1) / 2


def named_id(model: Any, name: str, value: Any, where: str) -> int:
    """An id that the model's files should name; the first of several.

    Raises:
        OptionError: They do not name it.
    """
    if value is None:
        raise OptionError(
            f"{type(model).__name__} does not say what its {name} is; set it in {where}, as "
            "the published model has it"
        )
    return int(value[0] if isinstance(value, (list, tuple)) else value)
