"""Incremental encoder of MoonshineStreaming: encodes audio while it arrives, every frame once.

A state of the encoder depends on all earlier samples within reach and on a fixed number of later
states, the *look-ahead*: its convolutions are causal, and a layer with the window ``(left, right)``
attends to the ``left - 1`` states before a state and to the ``right - 1`` states after it (both
bounds are excluded in transformers 5.23, which is followed here). The look-ahead is the sum of
``right - 1`` over the layers, 12 states (240 ms) in the published layout.

`IncrementalEncoder.feed` therefore returns each state once, as soon as its look-ahead is complete;
the state is final. `IncrementalEncoder.provisional` returns the states after it, computed as if the
audio ended here. Both together are the states of one pass over all samples, padded with zeros to
whole frames, with an attention mask. They are equal up to rounding.

Kept are, for each layer, the keys and values within reach of its next outputs and the inputs whose
look-ahead is not complete. Neither memory nor the work per second grows with the recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention, silu

from mmdecode.models.incremental import IncrementalConvolution

FRAMES = 256
"""Most frames of 5 ms that are encoded at once."""


class IncrementalEncoder:
    """Encodes the samples of one recording, in blocks of any size.

    Args:
        encoder: The ``MoonshineStreamingEncoder`` of the model, in evaluation mode.

    Attributes:
        look_ahead: Number of states after a state that it depends on.
    """

    def __init__(self, encoder: Any) -> None:
        self._embedder, self._final_norm = encoder.embedder, encoder.final_norm
        weight = self._embedder.conv1.weight
        self._tail: Tensor = weight.new_zeros(0)  # samples that do not fill a frame
        self._convolutions = [
            IncrementalConvolution(conv, conv.left_pad)
            for conv in (self._embedder.conv1, self._embedder.conv2)
        ]
        windows = encoder.config.sliding_windows
        self._layers = [
            _Layer(layer, windows[index], weight.new_zeros(1, 0, encoder.config.hidden_size))
            for index, layer in enumerate(encoder.layers)
        ]
        self.look_ahead = sum(layer.ahead for layer in self._layers)

    @torch.no_grad()
    def feed(self, samples: Tensor) -> Tensor:
        """Adds samples ``(T,)``; returns the states that became final, ``(S, H)``, often none."""
        samples = torch.cat([self._tail, samples.to(self._tail)])
        length = self._embedder.frame_len
        whole = len(samples) - len(samples) % length
        self._tail = samples[whole:].clone()
        block = FRAMES * length
        parts = [
            self._encode(samples[at : min(at + block, whole)]) for at in range(0, whole, block)
        ]
        return torch.cat(parts or [self._encode(samples[:0])])

    @torch.no_grad()
    def provisional(self) -> Tensor:
        """Returns the states after the final ones, ``(S, H)``, as if the audio ended here."""
        length = self._embedder.frame_len
        return self._encode(pad(self._tail, (0, -len(self._tail) % length)), last=True)

    def _encode(self, samples: Tensor, last: bool = False) -> Tensor:
        """Encodes whole frames.

        Args:
            samples: The samples of the frames.
            last: Whether to compute all states, and to leave this encoder as it is.
        """
        embed = self._embedder
        x = embed.comp(embed.cmvn(samples.view(1, -1, embed.frame_len)))
        x = silu(embed.linear(x)).transpose(1, 2)
        first, second = self._convolutions
        x = second(silu(first(x, last)), last).transpose(1, 2)
        for layer in self._layers:
            x = layer(x, last)
        states: Tensor = self._final_norm(x)[0]
        return states


class _Layer:
    """Encoder layer over blocks; keeps keys, values and inputs that later outputs still read.

    Args:
        layer: The layer of the model.
        window: Its window ``(left, right)``, both bounds excluded.
        empty: No input, ``(1, 0, H)``.

    Attributes:
        ahead: Number of inputs after an output that it depends on.
    """

    def __init__(self, layer: Any, window: Sequence[int], empty: Tensor) -> None:
        self._layer = layer
        self._left, self._right = window
        self.ahead = max(self._right - 1, 0)
        self._inputs = empty  # from output `_done` on
        self._keys, self._values = self._projected(empty)  # from input `_first` on
        self._first = self._done = 0

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        """Returns the outputs whose look-ahead the inputs ``(1, S, H)`` complete.

        Args:
            x: The next inputs.
            last: Whether to compute all outputs, and to keep nothing of these inputs.
        """
        new = self._projected(x)
        x = torch.cat([self._inputs, x], 1)
        keys, values = torch.cat([self._keys, new[0]], 2), torch.cat([self._values, new[1]], 2)
        end = self._done + x.shape[1]
        stop = end if last else max(self._done, end - self.ahead)
        queries, done, first = x[:, : stop - self._done], self._done, self._first
        if not last:
            self._first = max(first, stop - max(self._left - 1, 0))
            self._keys = keys[:, :, self._first - first :].clone()
            self._values = values[:, :, self._first - first :].clone()
            self._inputs, self._done = x[:, stop - done :].clone(), stop
        if not queries.shape[1]:
            return queries
        order = torch.arange(first, end, device=x.device)
        distance = torch.arange(done, stop, device=x.device)[:, None] - order
        seen = (distance >= 0) & (distance < self._left)
        seen |= (distance < 0) & (-distance < self._right)
        return self._outputs(queries, keys, values, seen)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values ``(1, heads, S, D)`` of inputs."""
        attend, x = self._layer.self_attn, self._layer.input_layernorm(x)
        keys, values = (
            module(x).unflatten(-1, (-1, attend.head_dim)).transpose(1, 2)
            for module in (attend.k_proj, attend.v_proj)
        )
        return keys, values

    def _outputs(self, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        layer, attend = self._layer, self._layer.self_attn
        queries = attend.q_proj(layer.input_layernorm(x))
        queries = queries.unflatten(-1, (-1, attend.head_dim)).transpose(1, 2)
        found = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=seen,
            scale=attend.scaling,
            enable_gqa=keys.shape[1] != queries.shape[1],
        )
        x = x + attend.o_proj(found.transpose(1, 2).flatten(2))
        outputs: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return outputs
