"""CTC head on a recogniser's encoder: the text of a recording in one cheap pass, token by token.

Strided convolutions over the encoder's states, plain or in residual blocks, then logits over a
blank and the head's subwords. Logits are products with the model's own token embeddings (tied in
recognisers), so that the head stores no output matrix. Subwords are a part of the decoder's
vocabulary: rare words are spelled.

Sources: Graves et al. 2006 (connectionist temporal classification); Liu et al. 2022,
arXiv:2201.03545 (the residual block, of two-dimensional convolutions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmdecode.checkpoints import local_path, paired
from mmdecode.errors import IncompatibleError, InputError, OptionError
from mmdecode.models.feature_drafter import SavedDrafter
from mmdecode.weights import fill, read_weights

BLANK = 0
"""Index of the blank among the logits; subword i of the head has index i + 1."""


class SeparableBlock(nn.Module):
    """Residual block: a convolution of each channel over time, then a feed-forward part.

    Args:
        width: Number of channels.
        kernel: Width of the convolution in states; an odd number.
        stride: Its stride.
        feed_forward: Width of the feed-forward part.
    """

    def __init__(self, width: int, kernel: int, stride: int, feed_forward: int) -> None:
        super().__init__()
        # on CPU, in two dimensions with channels last: up to 20 times as fast
        self.conv = nn.Conv2d(
            width, width, (1, kernel), (1, stride), (0, kernel // 2), groups=width
        )
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, feed_forward)
        self.down = nn.Linear(feed_forward, width)

    def forward(self, states: Tensor) -> Tensor:
        """Computes states ``(B, width, S')``, one for each stride.

        Args:
            states: States, ``(B, width, S)``.
        """
        rows = states[:, :, None].contiguous(memory_format=torch.channels_last)
        mixed = self.norm(self.conv(rows)[:, :, 0].mT)
        added = self.down(nn.functional.gelu(self.up(mixed)))
        return states[..., :: self.conv.stride[1]] + added.mT


class CTCHead(SavedDrafter):
    """Convolutions over encoder states with logits over a blank and N subwords.

    Args:
        config: ``source_size`` (width of the encoder's states), ``hidden_size`` (width of the token
            embeddings), ``inner_size`` (width of the convolutions), ``kernel`` (their odd width in
            states), ``strides`` (one per convolution) and ``subwords`` (their number N); where
            known, ``vocab_size``, the number of token embeddings, and ``spelled``, the most labels
            that spell a token of the model. With ``feed_forward`` each convolution is that of a
            `SeparableBlock` with so wide a feed-forward part, and ``inner_size`` is not used.

    Attributes:
        ids: Token ids of the subwords, in the decoder's vocabulary, ``(N,)``.
        spellings: Labels that spell each token of the decoder, ``(vocab_size, spelled)``, 0 after
            the last one; no columns: only the subwords themselves are known.
    """

    kind = "ctc"

    ids: Tensor
    spellings: Tensor

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        width, inner = config["source_size"], config["inner_size"]
        self.kernel, self.strides = config["kernel"], tuple(config["strides"])
        self.norm = nn.LayerNorm(width)
        self.separable = bool(config.get("feed_forward"))
        if self.separable:
            self.layers = nn.ModuleList(
                SeparableBlock(width, self.kernel, stride, config["feed_forward"])
                for stride in self.strides
            )
            inner = width
        else:
            self.layers = nn.ModuleList(
                nn.Conv1d(inner if index else width, inner, self.kernel, stride, self.kernel // 2)
                for index, stride in enumerate(self.strides)
            )
        self.output = nn.Linear(inner, config["hidden_size"])
        self.blank = nn.Parameter(torch.zeros(config["hidden_size"]))
        self.bias = nn.Parameter(torch.zeros(config["subwords"] + 1))
        self.register_buffer("ids", torch.zeros(config["subwords"], dtype=torch.long))
        spelled = config.get("spelled", 0)
        table = torch.zeros(config["vocab_size"] if spelled else 0, spelled, dtype=torch.int16)
        self.register_buffer("spellings", table, persistent=bool(spelled))

    def labels(self, size: int) -> Tensor:
        """Returns the labels that spell each id of a vocabulary, ``(size, K)``; 0: no further one.

        Args:
            size: Size of the vocabulary.
        """
        found = self.ids.new_zeros(size, max(1, self.spellings.shape[1]))
        found[self.ids, 0] = torch.arange(1, len(self.ids) + 1, device=found.device)
        if self.spellings.shape[1]:
            found[: len(self.spellings)] = self.spellings[:size]
        return found

    def lengths(self, lengths: Tensor) -> Tensor:
        """Returns the number of frames of logits for each number of encoder states."""
        for stride in self.strides:
            lengths = (lengths - 1).div(stride, rounding_mode="floor") + 1
        return lengths

    def forward(self, states: Tensor, lengths: Tensor, embeddings: Tensor) -> Tensor:
        """Computes logits ``(B, T, N + 1)``; a row's logits do not depend on its padding.

        Args:
            states: Encoder states, ``(B, S, H)``, padded on the right.
            lengths: Number of states of each row that are not padding, ``(B,)``.
            embeddings: Embeddings of the head's subwords, ``(N, hidden_size)``.
        """
        hidden = (states if self.separable else self.norm(states)).transpose(1, 2)
        for layer, stride in zip(self.layers, self.strides, strict=True):
            real = torch.arange(hidden.shape[2], device=hidden.device) < lengths[:, None, None]
            hidden = layer(hidden * real)
            hidden = hidden if self.separable else nn.functional.gelu(hidden)
            lengths = (lengths - 1).div(stride, rounding_mode="floor") + 1
        hidden = hidden.transpose(1, 2)
        hidden = self.output(self.norm(hidden) if self.separable else hidden)
        return hidden @ torch.cat([self.blank[None], embeddings]).T + self.bias

    @torch.no_grad()
    def log_probs(self, states: Tensor, lengths: Tensor, embeddings: Tensor) -> Tensor:
        """Returns float32 log-probabilities ``(B, T, N + 1)``; frames of padding are blank.

        Args:
            states: Encoder states, as in `forward`.
            lengths: Number of states per row, as in `forward`.
            embeddings: Embeddings of the subwords, as in `forward`.
        """
        found = self(states, lengths, embeddings).float().log_softmax(-1)
        order = torch.arange(found.shape[1], device=found.device)
        padding = (order >= self.lengths(lengths)[:, None])[..., None]
        blank = torch.arange(found.shape[2], device=found.device) == BLANK
        return torch.where(padding, torch.where(blank, 0.0, -torch.inf), found)

    @torch.no_grad()
    def greedy(self, states: Tensor, lengths: Tensor, embeddings: Tensor) -> list[list[int]]:
        """Returns the token ids of each row: the best class of each frame, collapsed.

        Args:
            states: Encoder states, as in `forward`.
            lengths: Number of states per row, as in `forward`.
            embeddings: Embeddings of the subwords, as in `forward`.
        """
        best = self(states, lengths, embeddings).argmax(-1)
        real = torch.arange(best.shape[1], device=best.device) < self.lengths(lengths)[:, None]
        before = nn.functional.pad(best, (1, 0), value=BLANK)[:, :-1]
        kept = real & (best != BLANK) & (best != before)
        ids = torch.cat([self.ids.new_full((1,), -1), self.ids])[best].masked_fill(~kept, -1)
        return [[token for token in row if token >= 0] for row in ids.tolist()]

    def arguments(
        self, states: Tensor, mask: Tensor | None, embed: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the arguments of `forward` for encoder states.

        Args:
            states: Encoder states ``(B, S, H)``.
            mask: True at states that are not padding, ``(B, S)``; ``None``: none is.
            embed: Function that embeds tokens of the model.
        """
        if mask is None:
            lengths = states.new_full((len(states),), states.shape[1]).long()
        else:
            lengths = mask.sum(1)
        return states, lengths, embed(self.ids).to(states)

    def refuse_misfit(self, adapter: Any, user: str) -> None:
        """Checks that the head can read the states of an adapter's model.

        Args:
            adapter: Adapter of the model.
            user: Name of the part that uses the head, for the error.

        Raises:
            IncompatibleError: The model has no encoder, or the head was trained for another model.
        """
        problem = self._misfit(adapter)
        if problem is not None:
            raise IncompatibleError.between(
                user,
                adapter.name,
                problem,
                "use a recogniser with a head that was trained for it by 'mmdecode train ctc'",
            )

    def _misfit(self, adapter: Any) -> str | None:
        width = getattr(adapter, "source_width", None)
        if width is None:
            return "the head reads the states of an encoder, which this model lacks"
        table = adapter.model.get_input_embeddings()
        found = {
            "source_size": ("encoder states of width", width),
            "hidden_size": ("token embeddings of width", table.embedding_dim),
            "vocab_size": ("a vocabulary of", table.num_embeddings),
        }
        for name, (what, size) in found.items():
            if self.config.get(name, size) != size:
                return f"the head expects {what} {self.config[name]}, the model has {size}"
        return None

    @classmethod
    def of_option(cls, head: str | None, model_id: str | None, user: str) -> CTCHead:
        """Loads the head that an option names, or else the one that ships with a model.

        Args:
            head: Folder, Hub id or ``zoo:NAME``; ``None``: the shipped head.
            model_id: Name of the model that decodes.
            user: Name of the part that needs the head, for the error: ``draft 'ctc'``.

        Raises:
            OptionError: No head ships with the model.
        """
        head = head or paired(model_id, cls.kind)
        if head is None:
            raise OptionError(
                f"{user} needs head=..., the folder of a CTC head; none is shipped for "
                f"{model_id or 'this model'}: train one by 'mmdecode train ctc --model "
                f"{model_id or 'MODEL'} --data RECORDINGS --out FOLDER', and give ctc:head=FOLDER"
            )
        return cls.from_pretrained(head)

    @classmethod
    def from_pretrained(cls, name: str | Path) -> CTCHead:
        """Loads a head that this package saved.

        Args:
            name: A folder, a Hub id or ``zoo:NAME``.

        Raises:
            InputError: The checkpoint holds no CTC head.
        """
        config, weights = read_weights(local_path(name))
        if config.get("drafter") != cls.kind:
            raise InputError(
                f'{name} holds no CTC head; expected a config.json with "drafter": "ctc": give '
                "the folder that 'mmdecode train ctc' wrote"
            )
        return fill(cls(config), weights, name)
