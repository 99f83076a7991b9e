"""Mask-CTC: fills the uncertain tokens of a CTC text by a masked language model, all at once.

The greedy CTC text gives length and confident tokens. Tokens whose frame probability is below a
threshold are masked, and a decoder that reads the encoder's states and the text in both directions
fills them in a few passes, the most confident masks first. The result is a text of its own, not the
recogniser's: no draft, and no exactness.

The *aligned cross-entropy* (AXE) trains that decoder without a fixed alignment of predictions and
targets: the cheapest monotone alignment counts, in which a prediction may be blank and a target may
be skipped for a penalty.

Sources: Higuchi et al. 2020 (Mask-CTC); Ghazvininejad et al. 2020 (AXE); Zhang et al. (dynamic
alignment Mask-CTC), who train with AXE and with the decoder's own wrong guesses. The figures of
these papers were not reproduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmdecode.errors import InputError, OptionError

Predict = Callable[[Tensor], Tensor]
"""Maps tokens ``(L,)`` with masks to log-probabilities ``(L, V)``."""


def confidences(log_probs: Tensor, blank: int = 0) -> tuple[list[int], list[float]]:
    """Returns the labels of the greedy CTC text, and the largest frame probability of each.

    Args:
        log_probs: Log-probabilities of the frames, ``(T, labels)``.
        blank: Index of the blank.
    """
    best, labels = log_probs.max(-1), list[int]()
    chances = list[float]()
    last = blank
    for label, chance in zip(best.indices.tolist(), best.values.exp().tolist(), strict=True):
        if label != blank and label != last:
            labels.append(label)
            chances.append(chance)
        elif label != blank:
            chances[-1] = max(chances[-1], chance)
        last = label
    return labels, chances


def filled(
    tokens: Sequence[int],
    chances: Sequence[float],
    predict: Predict,
    *,
    mask: int,
    threshold: float = 0.99,
    passes: int = 10,
) -> list[int]:
    """Masks uncertain tokens, and fills the masks in a number of passes.

    Args:
        tokens: Tokens of the CTC text.
        chances: Probability of each.
        predict: The masked language model.
        mask: Id of the mask, which is never filled in.
        threshold: Tokens with a smaller probability are masked; 0: none.
        passes: Most passes. Each fills the same number of the most confident masks, the last one
            the rest.

    Raises:
        OptionError: ``passes`` is below 1.
    """
    if passes < 1:
        raise OptionError(f"passes={passes}; expected 1 or more, or threshold=0 to fill nothing")
    text = torch.tensor(list(tokens), dtype=torch.long)
    open_ = torch.tensor([chance < threshold for chance in chances], dtype=torch.bool)
    text[open_] = mask
    count = int(open_.sum())
    passes = min(passes, count)
    for number in range(passes):
        scores = predict(text).clone()
        scores[:, mask] = -torch.inf
        best = scores.max(-1)
        size = count // passes if number < passes - 1 else int(open_.sum())
        chosen = best.values.masked_fill(~open_, -torch.inf).topk(size).indices
        text[chosen] = best.indices[chosen]
        open_[chosen] = False
    return text.tolist()


def aligned_cross_entropy(
    log_probs: Tensor, targets: Tensor, blank: int, penalty: float = 1.0
) -> Tensor:
    """Computes AXE of one text: the cost of the cheapest monotone alignment.

    With predictions j = 1..m and targets i = 1..n, ``A[i, j]`` is the smallest of ``A[i-1, j-1] -
    log p_j(y_i)`` (aligned), ``A[i, j-1] - log p_j(blank)`` (prediction j is blank) and ``A[i-1, j]
    - penalty * log p_j(y_i)`` (target i is skipped); the loss is ``A[n, m]``.

    Args:
        log_probs: Log-probabilities of the predictions, ``(m, V)``.
        targets: Targets, ``(n,)``.
        blank: Id of the blank.
        penalty: Factor of the cost of a skipped target.

    Raises:
        InputError: There are no predictions.
    """
    if not len(log_probs):
        raise InputError("there are no predictions to align; expected at least one")
    costs = -log_probs[:, targets].T  # (n, m)
    blanks = -log_probs[:, blank]
    total = torch.cat([blanks.new_zeros(1), blanks.cumsum(0)])
    above = total  # no target yet
    for row in costs:
        # column 0: the target is skipped before the first prediction
        first = above[:1] + penalty * row[:1]
        least = torch.minimum(above[:-1] + row, above[1:] + penalty * row)
        # A[i, j] = min(least[j], A[i, j - 1] + blanks[j]), for all j at once
        above = total + torch.cat([first, least - total[1:]]).cummin(0).values
    return above[-1]


class MaskedDecoder(nn.Module):
    """Transformer decoder without a causal mask, which reads a text with masks and encoder states.

    Args:
        vocab: Number of tokens, the mask (the last one) included.
        width: Width of its states and of the encoder's.
        layers: Number of layers.
        heads: Number of attention heads.
        longest: Most tokens of a text.
    """

    def __init__(
        self, vocab: int, width: int, layers: int = 2, heads: int = 4, longest: int = 160
    ) -> None:
        super().__init__()
        self.mask = vocab - 1
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):  # the tokens are the output, too
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        """Computes logits ``(B, L, V)``; those behind the end of a shorter text have no meaning.

        Args:
            tokens: Texts with masks, ``(L,)`` each.
            states: Encoder states of each, ``(S, width)``.

        Raises:
            InputError: A text is too long.
        """
        ids, read = pad_sequence([*tokens], True, self.mask), pad_sequence([*states], True)
        if ids.shape[1] > self.positions.num_embeddings:
            raise InputError(
                f"a text of {ids.shape[1]} tokens; expected at most "
                f"{self.positions.num_embeddings}: cut the recording"
            )
        order = torch.arange(max(ids.shape[1], read.shape[1]), device=ids.device)
        sizes = [[len(text), len(own)] for text, own in zip(tokens, states, strict=True)]
        lengths = torch.tensor(sizes, device=ids.device)
        no_token = order[: ids.shape[1]] >= lengths[:, :1]
        no_state = order[: read.shape[1]] >= lengths[:, 1:]
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, read, tgt_key_padding_mask=no_token, memory_key_padding_mask=no_state)
        return self.norm(x) @ self.tokens.weight.T
