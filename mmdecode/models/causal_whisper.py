"""Causal Whisper: a Whisper whose encoder reads audio chunk by chunk, as it arrives.

The encoder's states form blocks of ``chunk`` states. A state attends to its own block and to all
earlier ones, so that later audio never changes it. `CausalWhisperEncoder` computes all states in
one pass with a mask, `IncrementalWhisperEncoder` computes each block once, with the keys and values
of the blocks before it; both give the same states up to rounding.

A state reads a little audio after its own end: the convolutions reach one mel frame further, and a
mel frame reaches half a Fourier window further. With Whisper's window of 25 ms this is 12.5 ms. A
block is therefore final 12.5 ms after its end. Until then its states are computed as if silence
followed.

Whisper clips mel energies at eight decades below the loudest value of the recording, which a stream
does not know yet. Here a frame is clipped at eight decades below the loudest value up to that
frame, see `running_features`.

An encoder state that is all zeros is padding: cross-attention ignores it in every pass of the
model. Rows of a batch can therefore have different lengths, which a plain Whisper does not support.

Source: Krichli et al. 2025, arXiv:2508.12301 (CarelessWhisper). Differs from it: the last state of
a block waits for its 12.5 ms, instead of reading zeros in their place, and the level is that of
each frame, not of each chunk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad, scaled_dot_product_attention
from transformers import AutoModelForSpeechSeq2Seq
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.modeling_whisper import (
    WhisperAttention,
    WhisperEncoder,
    WhisperForConditionalGeneration,
)

from mmdecode.errors import InputError, ShapeError
from mmdecode.models.causal_whisper_config import CausalWhisperConfig
from mmdecode.models.incremental import IncrementalConvolution
from mmdecode.weights import fill, read_tensors

if TYPE_CHECKING:
    from mmdecode.asr.recognizers.whisper_features import Mel


def block_mask(frames: int, chunk: int, extra: int = 0) -> Tensor:
    """Returns which states each state attends to, ``(frames, frames)`` bool.

    State i is in block ``b = i // chunk``, and attends to the states before ``chunk * (max(b,
    extra) + 1)``.

    Args:
        frames: Number of states.
        chunk: Number of states of a block.
        extra: Number of blocks that are read together with the first one.
    """
    index = torch.arange(frames)
    ends = chunk * ((index // chunk).clamp_min(extra) + 1)
    return index < ends[:, None]


class CausalWhisperEncoder(WhisperEncoder):
    """Whisper's encoder with blocks, for mel features of any length up to the window."""

    def forward(
        self, input_features: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Computes the states of all blocks in one pass, ``(B, T // 2, H)``.

        Args:
            input_features: Log-mel features ``(B, mels, T)``; if T is odd, the last frame is the
                context of the last state.
            attention_mask: 1 at frames of audio, 0 at padding on the right, ``(B, T)``; ``None``:
                all are audio. States of padding are zeros, which the decoder ignores.
            **kwargs: Not used.

        Raises:
            ShapeError: The features are longer than the window.
        """
        x = gelu(self.conv2(gelu(self.conv1(input_features)))).transpose(1, 2)
        x = x[:, : input_features.shape[-1] // self.conv2.stride[0]]
        x = x + positions(self, 0, x.shape[1])
        seen = block_mask(x.shape[1], self.config.chunk, self.config.extra).to(x.device)[None]
        audio = None
        if attention_mask is not None:
            stride = self.conv2.stride[0]
            # generate pads the features further than the mask
            audio = pad(attention_mask, (0, input_features.shape[-1] - attention_mask.shape[1]))
            audio = audio[:, : stride * x.shape[1] : stride] != 0
            itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
            seen = seen & audio[:, None] | itself  # a row of a mask may not be empty
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill_(~seen, torch.finfo(x.dtype).min)[:, None]
        for layer in self.layers:
            x = layer(x, mask)
        x = self.layer_norm(x)
        if audio is not None:
            x = x * audio[..., None].to(x)
        return BaseModelOutput(last_hidden_state=x)


def positions(encoder: WhisperEncoder, first: int, count: int) -> Tensor:
    """Returns the position embeddings of states, ``(count, H)``.

    Raises:
        ShapeError: The states do not fit into the window.
    """
    table = encoder.embed_positions.weight
    if first + count > len(table):
        raise ShapeError(
            f"the audio makes {first + count} encoder states; expected at most {len(table)}: cut "
            "it into windows"
        )
    return table[first : first + count]


def running_features(energies: Tensor, level: float | Tensor = -10.0) -> tuple[Tensor, Tensor]:
    """Returns Whisper's log-mel features with the level of the audio so far, and that level.

    Args:
        energies: log10 mel energies of the next frames, ``(mels, T)``.
        level: Largest energy of the frames before them.

    Returns:
        Features ``(mels, T)``; and the largest energy up to the last frame.
    """
    if not energies.shape[1]:
        return energies, torch.as_tensor(level)
    levels = energies.amax(0).clamp_min(level).cummax(0).values
    return (torch.maximum(energies, levels - 8.0) + 4.0) / 4.0, levels[-1]


def window_features(mel: Mel, samples: Tensor) -> Tensor:
    """Returns the features of a window, with one frame of silence after it, ``(mels, 2 S + 1)``.

    Args:
        mel: The model's log-mel transform.
        samples: Samples of the window, ``(T,)``, of S encoder states.
    """
    frames = 2 * -(-len(samples) // (2 * mel.hop)) + 1
    silence = (frames - 1) * mel.hop + mel.size // 2 - len(samples)
    return running_features(mel.energies(_reflected(pad(samples, (0, silence)), mel)))[0]


def _reflected(samples: Tensor, mel: Mel) -> Tensor:
    """Reflects the first samples, so that the first frame is centred at the first sample."""
    return torch.cat([samples[1 : mel.size // 2 + 1].flip(0), samples])


class MaskedAttention(WhisperAttention):
    """Whisper's cross-attention, which ignores encoder states that are all zeros."""

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention as the base class does, with a mask of the padded states."""
        if key_value_states is not None and attention_mask is None:
            audio = is_audio(key_value_states)[:, None, None]
            attention_mask = torch.zeros(audio.shape, dtype=hidden_states.dtype).to(audio.device)
            least = torch.finfo(hidden_states.dtype).min
            attention_mask = attention_mask.masked_fill_(~audio, least)
        found: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states,
            key_value_states=key_value_states,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            output_attentions=output_attentions,
            **kwargs,
        )
        return found


def is_audio(states: Tensor) -> Tensor:
    """Returns which encoder states ``(B, S, H)`` are not padding, ``(B, S)`` bool."""
    return (states != 0).any(-1)


class CausalWhisperForConditionalGeneration(WhisperForConditionalGeneration):
    """A Whisper with a `CausalWhisperEncoder`, whose decoder ignores padded states.

    Args:
        config: Its configuration.

    Raises:
        InputError: The configuration has blocks without states.
    """

    config_class = CausalWhisperConfig

    def __init__(self, config: CausalWhisperConfig) -> None:
        if config.chunk < 1 or config.extra < 0:
            raise InputError(
                f"chunk={config.chunk}, extra={config.extra} in the model's config.json; expected "
                "blocks of at least one state, and no fewer than 0 further blocks"
            )
        super().__init__(config)
        self.model.encoder.__class__ = CausalWhisperEncoder
        for layer in self.model.decoder.layers:
            layer.encoder_attn.__class__ = MaskedAttention


def causal_form(model: Any, **own: Any) -> CausalWhisperForConditionalGeneration:
    """Returns a causal Whisper with the weights of a Whisper.

    Args:
        model: The ``WhisperForConditionalGeneration``.
        **own: Fields of `CausalWhisperConfig` that a Whisper does not have.
    """
    shape = {key: value for key, value in model.config.to_dict().items() if key != "model_type"}
    found = CausalWhisperForConditionalGeneration(CausalWhisperConfig(**shape | own))
    found.load_state_dict(model.state_dict())
    found.generation_config = model.generation_config
    return found


HALF_LIMIT = torch.finfo(torch.float16).max - 1000
"""Largest float16 state, to which transformers clamps the output of a layer."""

Past = tuple[Tensor, Tensor]
"""Keys and values of earlier states in a layer, ``(1, heads, S, D)`` each."""


class IncrementalWhisperEncoder:
    """Encodes the samples of one window, in parts of any size, every block once.

    `feed` returns each state once, as soon as its block is final; `provisional` returns the states
    after it. Both together are the states of one pass over `window_features`, up to rounding.

    Kept are the keys and values of the final states, the inputs that the convolutions still read,
    and the samples of the next mel frame. The work per second of audio does not grow with the
    window, apart from the attention to earlier states.

    Args:
        encoder: Encoder of the model, in evaluation mode.
        mel: The model's log-mel transform.

    Attributes:
        done: Number of final states so far.
    """

    def __init__(self, encoder: CausalWhisperEncoder, mel: Mel) -> None:
        self._encoder, self._mel = encoder, mel
        self._samples = self.done = 0
        self._tail = torch.zeros(0)  # samples from the beginning of the next mel frame on
        self._begins = True  # whether no frame was computed yet
        self._level = torch.tensor(-10.0)  # largest mel energy so far
        self._convolutions = [
            IncrementalConvolution(conv, conv.padding[0]) for conv in (encoder.conv1, encoder.conv2)
        ]
        weight = encoder.conv2.weight
        self._inputs = weight.new_zeros(0, len(weight))  # of the first layer, after the final ones
        heads = encoder.config.encoder_attention_heads
        empty = weight.new_zeros(1, heads, 0, len(weight) // heads)
        self._past = [(empty, empty) for _ in encoder.layers]

    @torch.no_grad()
    def feed(self, samples: Tensor) -> Tensor:
        """Adds samples ``(T,)``; returns the states that became final, ``(S, H)``, often none."""
        self._samples += len(samples)
        inputs = torch.cat([self._inputs, self._embedded(samples, last=False)])
        states, inputs, self._past = self._blocks(inputs, last=False)
        self._inputs, self.done = inputs.clone(), self.done + len(states)
        return states

    @torch.no_grad()
    def provisional(self) -> Tensor:
        """Returns the states after the final ones, ``(S, H)``, as if silence followed the audio."""
        mel = self._mel
        count = -(-self._samples // (2 * mel.hop))
        silence = torch.zeros(max(0, 2 * count * mel.hop + mel.size // 2 - self._samples))
        inputs = torch.cat([self._inputs, self._embedded(silence, last=True)])
        return self._blocks(inputs[: count - self.done], last=True)[0]

    def _blocks(self, inputs: Tensor, last: bool) -> tuple[Tensor, Tensor, list[Past]]:
        """Runs the layers over blocks of the next inputs ``(S, H)``; keeps nothing.

        Args:
            inputs: Inputs of the first layer, from the first that is not final on.
            last: Whether also a block that is not complete is computed.

        Returns:
            The blocks' states; the inputs after them; and keys and values of each layer.
        """
        config, done, past = self._encoder.config, self.done, self._past
        found = [inputs[:0]]
        while len(inputs):
            size = config.chunk if done else config.chunk * (config.extra + 1)
            if len(inputs) < size and not last:
                break
            states, past = self._encoded(inputs[:size], done, past)
            inputs, done = inputs[size:], done + len(states)
            found.append(states)
        return torch.cat(found), inputs, past

    def _embedded(self, samples: Tensor, last: bool) -> Tensor:
        """Returns the inputs of the first layer that samples complete, without positions.

        Args:
            samples: The next samples.
            last: Whether to keep nothing of these samples.
        """
        mel, tail = self._mel, torch.cat([self._tail, samples.to(self._tail)])
        begins = self._begins and len(tail) > mel.size // 2
        if begins:
            tail = _reflected(tail, mel)
        ready = not self._begins or begins
        count = max(0, (len(tail) - mel.size) // mel.hop + 1) if ready else 0
        energies = self._energies(tail, count)
        features, level = running_features(energies, self._level)
        if not last:
            self._tail, self._level = tail[count * mel.hop :].clone(), level
            self._begins = self._begins and not begins
        x = features.to(self._inputs)[None]
        for convolution in self._convolutions:
            x = gelu(convolution(x, last))
        return x[0].T

    def _energies(self, samples: Tensor, count: int) -> Tensor:
        """Returns the log10 mel energies of ``count`` frames."""
        mel = self._mel
        if not count:
            return samples.new_zeros(len(mel.filters), 0)
        return mel.energies(samples[: (count - 1) * mel.hop + mel.size])

    def _encoded(self, x: Tensor, done: int, before: list[Past]) -> tuple[Tensor, list[Past]]:
        """Runs the layers over the inputs ``(S, H)`` of one block.

        Args:
            x: The inputs.
            done: Number of states before them.
            before: Keys and values of these states, by layer.

        Returns:
            States ``(S, H)``; and keys and values of each layer, those of earlier states included.
        """
        x, past = (x + positions(self._encoder, done, len(x)))[None], list[Past]()
        for layer, (keys, values) in zip(self._encoder.layers, before, strict=True):
            attend, normed = layer.self_attn, layer.self_attn_layer_norm(x)
            queries, new_keys, new_values = (
                module(normed).unflatten(-1, (attend.num_heads, -1)).transpose(1, 2)
                for module in (attend.q_proj, attend.k_proj, attend.v_proj)
            )
            keys, values = torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2)
            past.append((keys, values))
            attended = scaled_dot_product_attention(queries, keys, values, scale=attend.scaling)
            x = x + attend.out_proj(attended.transpose(1, 2).flatten(2))
            inner = layer.activation_fn(layer.fc1(layer.final_layer_norm(x)))
            x = x + layer.fc2(inner)
            if x.dtype == torch.float16:  # as one pass does
                x = x.clamp(-HALF_LIMIT, HALF_LIMIT)
        return self._encoder.layer_norm(x)[0], past


def merged(
    weights: Mapping[str, Tensor], lora: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Returns weights with a LoRA adapter added: ``W + scale * B @ A``.

    Args:
        weights: Weights of the base model, by name.
        lora: ``NAME.lora_A.weight (r, in)`` and ``NAME.lora_B.weight (out, r)``, as peft saves them
            with the prefix ``base_model.model.``.
        scale: ``lora_alpha / r``.

    Raises:
        InputError: The adapter has a layer that the base model lacks, or other weights.
    """
    found = dict(weights)
    downs = [key for key in lora if key.endswith(".lora_A.weight")]
    downs = [key for key in downs if key.replace("lora_A", "lora_B") in lora]
    others = set(lora) - {*downs, *(key.replace("lora_A", "lora_B") for key in downs)}
    if others or not downs:
        raise InputError(
            f"the adapter has {', '.join(sorted(others)[:3]) or 'no weights'}; expected pairs of "
            "NAME.lora_A.weight and NAME.lora_B.weight, as peft saves plain LoRA: merge another "
            "adapter into its base, and give the folder of the whole model"
        )
    for key in downs:
        name, down = re.fullmatch(r"(?:base_model\.model\.)?(.*)\.lora_A\.weight", key), lora[key]
        assert name is not None, "by its ending"
        target, up = f"{name[1]}.weight", lora[key.replace("lora_A", "lora_B")]
        if target not in found:
            raise InputError(
                f"the adapter changes {target}, which its base model does not have; give the model "
                "that it was trained for"
            )
        found[target] = found[target] + scale * (up.float() @ down.float()).to(found[target])
    return found


_RENAMED = {
    r"^(encoder|decoder)\.blocks\.": r"model.\1.layers.",
    r"^encoder\.ln_post\.": "model.encoder.layer_norm.",
    r"^decoder\.ln\.": "model.decoder.layer_norm.",
    r"^(encoder|decoder)\.positional_embedding$": r"model.\1.embed_positions.weight",
    r"^decoder\.token_embedding\.": "model.decoder.embed_tokens.",
    r"^encoder\.conv": "model.encoder.conv",
    r"\.cross_attn_ln\.": ".encoder_attn_layer_norm.",
    r"\.cross_attn\.": ".encoder_attn.",
    r"\.attn_ln\.": ".self_attn_layer_norm.",
    r"\.attn\.": ".self_attn.",
    r"\.mlp_ln\.": ".final_layer_norm.",
    r"\.mlp\.0\.": ".fc1.",
    r"\.mlp\.2\.": ".fc2.",
    r"\.query\.": ".q_proj.",
    r"\.key\.": ".k_proj.",
    r"\.value\.": ".v_proj.",
    r"_attn\.out\.": "_attn.out_proj.",
    r"\.base_layer\.": ".",
}
"""Patterns of names of weights in checkpoints of OpenAI and CarelessWhisper, and names here."""


_SIZES = [f"{part}_{size}" for part in ("audio", "text") for size in "ctx state head layer".split()]


def from_published(file: str | Path) -> CausalWhisperForConditionalGeneration:
    """Loads a checkpoint of CarelessWhisper: one ``.pt`` file with the adapter not merged yet.

    The file has ``dims`` (OpenAI's sizes), ``cfg`` (``gran``, the states of a chunk;
    ``extra_gran_blocks``; ``rank``) and ``state_dict``. The adapter's scale is 1. Save the model
    next to the processor of the Whisper that it was made from, to use the folder as a checkpoint.

    Source: the layout that tomer9080/CarelessWhisper-streaming loads. Its checkpoints, whose
    licence forbids commercial use, were not used: the conversion is tested on random weights.

    Raises:
        InputError: The file has another layout.
    """
    found = read_tensors(Path(file))
    if not {"dims", "cfg", "state_dict"} <= set(found):
        raise InputError(
            f"{file} has {', '.join(sorted(map(str, found))[:6]) or 'nothing'}; expected 'dims', "
            "'cfg' and 'state_dict': give a checkpoint of CarelessWhisper"
        )
    dims, cfg = found["dims"], found["cfg"]
    sizes = {"n_vocab", "n_mels", *(f"n_{part}" for part in _SIZES)}
    missing = [*sorted(sizes - set(dims)), *sorted({"gran", "extra_gran_blocks"} - set(cfg))]
    if missing:
        raise InputError(
            f"'dims' and 'cfg' of {file} lack {', '.join(missing)}; give a checkpoint of "
            "CarelessWhisper"
        )
    config = CausalWhisperConfig(
        chunk=cfg["gran"],
        extra=cfg["extra_gran_blocks"],
        vocab_size=dims["n_vocab"],
        pad_token_id=min(50256, dims["n_vocab"] - 1),
        num_mel_bins=dims["n_mels"],
        d_model=dims["n_audio_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        encoder_layers=dims["n_audio_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"],
        decoder_ffn_dim=4 * dims["n_text_state"],
    )
    model = CausalWhisperForConditionalGeneration(config)
    weights, lora = dict[str, Tensor](), dict[str, Tensor]()
    for key, value in found["state_dict"].items():
        name = key
        for pattern, new in _RENAMED.items():
            name = re.sub(pattern, new, name)
        if match := re.fullmatch(r"(.*)\.lora_layer\.(lora_[AB])", name):
            lora[f"{match[1]}.{match[2]}.weight"] = value.T
        elif name in model.state_dict():
            weights[name] = value
        elif "lora" in name:
            raise InputError(
                f"{file} has {key}, which is no part of an adapter as CarelessWhisper saves it: "
                "expected NAME.lora_layer.lora_A and lora_B"
            )
    weights["proj_out.weight"] = weights.get("model.decoder.embed_tokens.weight", torch.zeros(0))
    return fill(model, merged(weights, lora, 1.0), file)


AutoModelForSpeechSeq2Seq.register(CausalWhisperConfig, CausalWhisperForConditionalGeneration)
