"""Adapter of Emu3 for generating images: prompts name the grid's size, a token ends each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode.adapters.images.base import Preset, SharedVocabularyAdapter, named_id, to_unit
from mmdecode.errors import OptionError

if TYPE_CHECKING:
    from transformers import Emu3ForConditionalGeneration

EOL, EOF = "<|extra_200|>", "<|extra_201|>"
OPENS, CLOSES, STARTS = "<|image start|>", "<|image end|>", "<|image token|>"


class Emu3ImagesAdapter(SharedVocabularyAdapter):
    """Emu3, whose images end with three tokens: end of frame, end of image and end of sequence.

    Args:
        model: The model.
        grid: Numbers of rows and columns of codes; a code covers 8 x 8 pixels.
        image_sizes: Grids of all images as returned by the processor, instead of ``grid``; they
            must be equal.

    Raises:
        OptionError: Neither ``grid`` nor ``image_sizes`` is given, or they name different grids.
    """

    summary = "Emu3, generating image tokens"
    source = "Wang et al. 2024"
    image_types = ("emu3",)
    preset = Preset(guidance=3.0, sampling={"top_k": 2048})

    def __init__(
        self,
        model: Emu3ForConditionalGeneration,
        grid: tuple[int, int] | None = None,
        image_sizes: Sequence[Sequence[int]] | Tensor | None = None,
    ) -> None:
        self._words: dict[str, int] = model.config.vocabulary_map or {}
        rows, columns = _only_grid(grid, image_sizes)
        found = model.vocabulary_mapping.img2bpe
        codes = torch.tensor([found[code] for code in range(len(found))], device=model.device)
        ends = named_id(
            model, "eos_token_id", model.config.text_config.eos_token_id, "config.text_config"
        )
        super().__init__(
            model,
            codes,
            rows,
            columns,
            newline=self._id(model, EOL),
            tail=(self._id(model, EOF), self._id(model, CLOSES), ends),
        )
        self._opens, self._starts = self._id(model, OPENS), self._id(model, STARTS)
        self._vq = model.model.vqmodel

    def _id(self, model: Any, word: str) -> int:
        return named_id(model, f"id of {word}", self._words.get(word), "config.vocabulary_map")

    def _shared(self) -> dict[str, Any]:
        return {"grid": (self.layout.rows, self.layout.columns)}

    def text(self, prompt: str, tokenizer: Any) -> str:
        """Returns the prompt followed by the grid's size and the token that starts the image."""
        size = f"{self.layout.rows}*{self.layout.columns}"
        return f"{tokenizer.bos_token}{prompt}{tokenizer.boi_token}{size}{STARTS}"

    def check(self, ids: Tensor) -> None:
        """Checks that every prompt opens an image with this adapter's grid.

        Raises:
            OptionError: A prompt opens no image, or an image with another grid.
        """
        words = {token: word for word, token in self._words.items()}
        wanted = f"{self.layout.rows}*{self.layout.columns}"
        for row in ids.tolist():
            if self._opens not in row or row[-1] != self._starts:
                raise OptionError(
                    f"a prompt does not end with {OPENS}, rows*columns and {STARTS}; make it with "
                    "processor(..., return_for_image_generation=True)"
                )
            named = "".join(
                words.get(token, "?") for token in row[_last(row, self._opens) + 1 : -1]
            )
            if named != wanted:
                raise OptionError(
                    f"a prompt asks for {named} codes, but grid is {wanted}; give the grid of the "
                    "prompts, which must be the same in all of them"
                )

    def without_text(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids and mask: the begin-of-sequence token and the tokens that open an image."""
        opens = ids[0, _last(ids[0].tolist(), self._opens) :]
        begins = opens.new_tensor([self.model.config.text_config.bos_token_id])
        ids = torch.cat([begins, opens]).expand(len(ids), -1)
        return ids, torch.ones_like(ids, dtype=torch.bool)

    def codebook(self) -> Tensor:
        """Returns the embeddings of the codes, ``(C, d)``."""
        return self._vq.quantize.embedding.weight.detach()

    def pixels(self, codes: Tensor) -> Tensor:
        """Decodes codes to pixels in 0..1 with the model's image tokenizer."""
        return to_unit(self._vq.decode(codes))


def _last(row: Sequence[int], token: int) -> int:
    return len(row) - 1 - row[::-1].index(token)


def _only_grid(
    grid: tuple[int, int] | None, sizes: Sequence[Sequence[int]] | Tensor | None
) -> tuple[int, int]:
    """Returns the grid that all images share.

    Raises:
        OptionError: No grid is given, or different ones.
    """
    named = {tuple(int(n) for n in size) for size in (() if sizes is None else sizes)}
    named |= {grid} if grid is not None else set()
    if len(named) != 1 or any(len(size) != 2 for size in named):
        raise OptionError(
            f"the images have {len(named)} grids ({sorted(named)}); give one, grid=(rows, columns) "
            "or the processor's image_sizes, and generate others in a separate call"
        )
    rows, columns = named.pop()
    return rows, columns
