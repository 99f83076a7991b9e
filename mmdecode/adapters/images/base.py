"""Base of adapters of models that generate image tokens in raster order.

In image mode a call has an empty prompt, and its ids are only the generated tokens. The condition
(class labels or texts) is in ``call.request.model_kwargs``, as returned by
`ImageAdapter.condition`, and the adapter builds the prompt of each branch from it. A branch with
the transform ``"unconditional"`` reads the unconditional input. The vocabulary consists of the
tokens that can be generated; prompts may have another vocabulary.
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
"""Name of the transform of the unconditional branch."""


@dataclass(frozen=True)
class Preset:
    """Default guidance and sampling options of a model family.

    Attributes:
        guidance: Guidance scale s of ``u + s (c - u)``; 1 switches guidance off.
        sampling: Keyword arguments of `mmdecode.image_ar.sampling.Sampling`.
    """

    guidance: float = 1.0
    sampling: Mapping[str, Any] = field(default_factory=dict)


class ImageAdapter(DecoderOnlyAdapter, ABC):
    """Base of adapters of image-token models; see `mmdecode.engine.adapter.Adapter`.

    Attributes:
        layout: Grid of the image, and positions of its codes among the generated tokens. A code is
            an index into the codebook of the image tokenizer.
        vocab: Number of different tokens that can be generated.
        preset: Guidance and sampling options that the family's authors published.
    """

    model_types = ()
    layout: Layout
    preset: Preset

    def masks_itself(self, prompt: Prompt) -> bool:
        """Returns False: conditions are short, so the engine's mask costs little."""
        return False

    def piece(self, prompt: Prompt, rows: Tensor | None, columns: slice) -> Prompt | None:
        """Never: conditions are short."""
        return None

    @abstractmethod
    def condition(self, **given: Any) -> dict[str, Any]:
        """Checks conditions, and returns model inputs whose first dimension is the rows."""

    @abstractmethod
    def row_names(self, inputs: Mapping[str, Any]) -> list[bytes]:
        """Returns a name for each row, equal for equal conditions, whatever the padding."""

    @abstractmethod
    def condition_prompt(self, inputs: Mapping[str, Any], unconditional: bool) -> Prompt:
        """Returns the prompt of a `condition`, or the unconditional prompt."""

    @abstractmethod
    def codebook(self) -> Tensor | None:
        """Returns the image tokenizer's embedding of each code, ``(C, d)``; ``None``: not known."""

    @abstractmethod
    def pixels(self, codes: Tensor) -> Tensor:
        """Decodes ``codes (B, rows, columns)`` to unclamped images ``(B, 3, H, W)``."""

    def decode(self, codes: Tensor) -> Tensor:
        """Decodes ``codes (B, rows, columns)`` to images ``(B, 3, H, W)``, float32 in 0..1.

        Raises:
            ShapeError: The codes do not have the grid of the layout.
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
        """Returns the prompt of the condition, or the unconditional prompt.

        Raises:
            IncompatibleError: The branch has another transform or a prompt of its own.
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
        """Returns a copy whose prompts are extended by generated ``tokens (B, n)``."""
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
        """Returns the adapter of a second model that generates the same image tokens.

        Raises:
            IncompatibleError: The second model has another grid or other tokens.
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
                f"they generate {theirs.rows} x {theirs.columns} and {mine.rows} x {mine.columns} "
                "codes, or have different tokens for the codes",
                "use a model that was trained on the same tokenizer and image size",
            )
        return other

    def _shared(self) -> dict[str, Any]:
        """Returns options of this adapter that the adapter of a second model needs too."""
        return {}


class PromptedAdapter(ImageAdapter):
    """Base of adapters of models whose condition is a text, followed by an image-opening token."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._body = model.get_decoder()
        refuse_attention(self._body)

    @abstractmethod
    def text(self, prompt: str, tokenizer: Any) -> str:
        """Returns the prompt in the model's format, up to the token that opens an image."""

    @abstractmethod
    def check(self, ids: Tensor) -> None:
        """Checks that all prompts ``ids (B, P)`` end with the tokens that open an image."""

    @abstractmethod
    def without_text(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids and mask of the unconditional prompt, ``(B, P')`` each."""

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
        """Returns model inputs for texts, or for the processor's output for image generation.

        Args:
            prompt: One text per image, in the model's own template if it has one.
            tokenizer: Tokenizer for texts, or a processor that has one.
            input_ids: Token ids instead of texts, padded on the left, ``(B, P)``.
            attention_mask: Mask of the ids, 0 at padding; ``None``: no padding.
            negative_prompt: Text that guidance leads away from; ``None``: the model's unconditional
                prompt.
            negative_prompt_ids: The negative prompt as token ids, ``(1 or B, P')``.
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
        """Returns checked ids and mask; ``None`` for both if nothing was given."""
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
        """Returns the bytes of each prompt's ids as the name of its row."""
        rows = zip(inputs["prompt_ids"].cpu(), inputs["prompt_mask"].cpu(), strict=True)
        return [ids[mask].numpy().tobytes() for ids, mask in rows]

    def condition_prompt(self, inputs: Mapping[str, Any], unconditional: bool) -> Prompt:
        """Returns the prompt of the text; if ``unconditional``, the negative or textless prompt."""
        ids, mask = inputs["prompt_ids"], inputs["prompt_mask"]
        if unconditional and "negative_ids" in inputs:
            ids, mask = inputs["negative_ids"], inputs["negative_mask"]
        elif unconditional:
            ids, mask = self.without_text(ids, mask)
        embeds = self.model.get_input_embeddings()(ids)
        return Prompt(ids=ids, mask=mask, inputs={"inputs_embeds": embeds})


class SharedVocabularyAdapter(PromptedAdapter):
    """Base of models with one vocabulary and one head for text and image tokens.

    Logits are computed only for the ids from the lowest to the highest that can be generated. A
    generated token is its id minus ``first``, the lowest of these ids.

    Args:
        model: The model.
        codes: Token id of each code, ``(C,)``.
        rows: Number of rows of codes in an image.
        columns: Number of columns of codes in an image.
        newline: Id of the token after every row of codes; ``None``: there is none.
        tail: Ids of the tokens after the last row of codes.
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
        """Computes the states after the final norm."""
        return super().forward(tokens + self.first, mask, positions, past)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings of generated tokens, ``(..., H)``."""
        return super().embed(tokens + self.first)

    def head(self, hidden: Tensor) -> Tensor:
        """Computes logits of the tokens that can be generated."""
        return self.unembed(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Computes logits of these tokens; from a plain linear head, with only the needed rows."""
        last = self.first + self.vocab
        head = self._head
        # a quantised or offloaded matrix has to be applied by its module
        plain = type(head) is torch.nn.Linear and type(head.weight.data) is Tensor
        if plain and head.bias is None and head.weight.device == hidden.device:
            return linear(hidden, head.weight[self.first : last])
        return head(hidden)[..., self.first : last]


def to_unit(values: Tensor) -> Tensor:
    """Maps values from the range -1..1 to 0..1."""
    return (values + 1) / 2


def named_id(model: Any, name: str, value: Any, where: str) -> int:
    """Returns a token id from the model's configuration; the first one if it is a list.

    Raises:
        OptionError: The configuration does not have it.
    """
    if value is None:
        raise OptionError(
            f"{type(model).__name__} does not say what its {name} is; set it in {where}, as "
            "the published model has it"
        )
    return int(value[0] if isinstance(value, (list, tuple)) else value)
