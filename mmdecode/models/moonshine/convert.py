"""Converts the files that Moonshine's authors publish for onnxruntime to transformers' format.

Linear layers and the embedding are stored as one byte per weight, with a scale and a zero point for
each matrix: ``weight = (stored - zero_point) * scale``. Everything else is float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from mmdecode.errors import InputError
from mmdecode.models.moonshine.ort_file import Graph, read_graph
from mmdecode.models.moonshine.tokenizer import read_pieces, tokenizer_config, tokenizer_json

MOST_TOKENS = 194
"""Maximum number of tokens of a text, its start token included."""
NUM_TENSORS, NUM_PARAMETERS = 160, 27_092_736
ENCODER, DECODER, TOKENIZER = "encoder_model.ort", "decoder_model_merged.ort", "tokenizer.bin"

LINEAR = {"DynamicQuantizeMatMul": (1, 2, 3), "MatMulIntegerToFloat": (1, 3, 5)}
"""Operators of linear layers, and which of their inputs are weight, scale and zero point."""

CONFIG = {
    "architectures": ["MoonshineForConditionalGeneration"],
    "model_type": "moonshine",
    "dtype": "float32",
    "vocab_size": 32768,
    "hidden_size": 288,
    "intermediate_size": 1152,
    "encoder_num_hidden_layers": 6,
    "decoder_num_hidden_layers": 6,
    "encoder_num_attention_heads": 8,
    "decoder_num_attention_heads": 8,
    "encoder_num_key_value_heads": 8,
    "decoder_num_key_value_heads": 8,
    "pad_head_dim_to_multiple_of": 8,
    "encoder_hidden_act": "gelu",
    "decoder_hidden_act": "silu",
    "max_position_embeddings": MOST_TOKENS,
    "partial_rotary_factor": 0.9,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "decoder_start_token_id": 1,
    "is_encoder_decoder": True,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
}
"""Configuration of tiny-en. Two values are in none of its files and come from memory: the number of
positions, and that heads are padded to a multiple of 8 (the graphs pad 36 values to 40), which does
not change results."""

GENERATION = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "decoder_start_token_id": 1,
    "language": "en",
    "max_length": MOST_TOKENS,
    "alignment_heads": [[4, 3]],
}
"""Generation settings; the alignment heads are those that ``mmdecode train alignment-heads --model
moonshine:tiny-en --data zoo:real-clips --method ctc:model=zoo:whisper-synth`` found."""

FEATURES = {
    "feature_extractor_type": "Wav2Vec2FeatureExtractor",
    "processor_class": "Wav2Vec2Processor",
    "feature_size": 1,
    "sampling_rate": 16000,
    "do_normalize": False,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def converted(folder: Path) -> dict[str, bytes]:
    """Returns the files of a checkpoint by name, without its model card.

    Args:
        folder: Folder with `ENCODER`, `DECODER` and `TOKENIZER`.

    Raises:
        InputError: A file is damaged or belongs to another model.
    """
    from safetensors.numpy import save

    pieces = read_pieces((folder / TOKENIZER).read_bytes())
    return {
        "config.json": _json(CONFIG),
        "generation_config.json": _json(GENERATION),
        "preprocessor_config.json": _json(FEATURES),
        "tokenizer.json": tokenizer_json(pieces).encode(),
        "tokenizer_config.json": _json(tokenizer_config(MOST_TOKENS)),
        "model.safetensors": save(read_weights(folder), metadata={"format": "pt"}),
    }


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Reads all weights in float32, by the names that transformers has for them.

    Raises:
        InputError: A graph is damaged, or a weight is missing.
    """
    weights: dict[str, np.ndarray] = {}
    for name, prefix in ((ENCODER, "model.encoder."), (DECODER, "")):
        try:
            found = {**_plain(graph := read_graph(folder / name)), **dict(_restored(graph))}
        except (KeyError, IndexError) as error:
            raise InputError(
                f"{folder / name} is no graph of Moonshine tiny-en: {error} is missing; give its "
                "own files"
            ) from error
        weights |= {f"{prefix}{key}": value for key, value in found.items()}
    weights.pop("proj_out.weight", None)  # the embedding, cell by cell
    parameters = sum(value.size for value in weights.values())
    if (len(weights), parameters) != (NUM_TENSORS, NUM_PARAMETERS):
        raise InputError(
            f"{folder} holds {len(weights)} tensors of {parameters} parameters, expected "
            f"{NUM_TENSORS} of {NUM_PARAMETERS}; give the files of Moonshine tiny-en"
        )
    return weights


def _plain(graph: Graph) -> Mapping[str, np.ndarray]:
    """Returns norms, biases and convolutions, which are stored in float32."""
    names = {
        name: re.sub(r"(_add_tensor|_merged_\d+)$", "", name)
        for name, tensor in graph.tensors.items()
        if tensor.dtype == np.float32
    }
    return {
        plain: graph.tensors[name]
        for name, plain in names.items()
        if re.fullmatch(r"[a-z_0-9.]+\.(weight|bias)", plain)
    }


def _restored(graph: Graph) -> Iterator[tuple[str, np.ndarray]]:
    """Returns linear layers, the embedding, and the group norm (a product and a sum there)."""
    for node in graph.nodes:
        module = node.name.strip("/").replace("/", ".")
        if node.kind in LINEAR:
            weight, scale, zero = (graph.tensors[node.inputs[at]] for at in LINEAR[node.kind])
            stored = np.ascontiguousarray(weight.T)  # (in, out) in the graph
            yield f"{module.removesuffix('.MatMul_quant')}.weight", _floats(stored, scale, zero)
        elif node.kind == "Gather" and node.inputs[0].endswith("_quantized"):
            stem = node.inputs[0].removesuffix("_quantized")
            parts = (graph.tensors[f"{stem}_{end}"] for end in ("quantized", "scale", "zero_point"))
            yield f"{module.removesuffix('.Gather')}.weight", _floats(*parts)
        elif module in ("groupnorm.Mul", "groupnorm.Add"):
            end = "weight" if node.kind == "Mul" else "bias"
            yield f"groupnorm.{end}", graph.tensors[node.inputs[1]].ravel()


def _floats(stored: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
    return (stored.astype(np.float32) - zero_point.astype(np.float32)) * scale


def _json(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
