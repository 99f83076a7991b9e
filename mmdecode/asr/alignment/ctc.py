"""CTC models of characters for forced alignment (`mmdecode.asr.alignment.cross_attention`).

`LetterHead` comes with the zoo (the models shipped with this package): a small convolutional
network on Whisper's log-mel features. Its receptive field is limited to 0.3 s on either side on
purpose: a CTC head on the states of Whisper's encoder emits characters hundreds of milliseconds
away from the sound, since every state depends on the whole window. `LetterModel` computes such
features from samples, so that the head can align the text of any recogniser. `CTCModel` wraps any
``AutoModelForCTC`` of transformers.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.checkpoints import code_trusted, loading, local_path
from mmdecode.errors import InputError, OptionError, UnsupportedModelError
from mmdecode.runs.files import write_folder

SYMBOLS = "_'abcdefghijklmnopqrstuvwxyz"
"""Symbols of a `LetterHead`; index 0 is the blank."""
FILE = "aligner.safetensors"


class CharacterModel(Protocol):
    """A CTC model whose symbols are characters.

    Attributes:
        blank: Index of the CTC blank.
        delimiter: Index of the symbol between words; ``None``: the model has no such symbol.
        reads_samples: Whether `emit` reads the samples, and not the features.
    """

    blank: int
    delimiter: int | None
    reads_samples: bool

    def symbols(self, text: str) -> list[int]:
        """Returns the symbol indices of a text; characters outside the vocabulary are skipped."""

    def emit(
        self, features: Tensor, samples: np.ndarray | None, end_s: float
    ) -> tuple[Tensor, float]:
        """Returns log-probabilities ``(frames, symbols)`` up to ``end_s``, and seconds per frame.

        Args:
            features: Whisper's log-mel features, ``(mels, feature frames)``.
            samples: Samples of the window, ``(T,)``; ``None`` for models that do not read them.
            end_s: End of the recording's audio in the window, in seconds.
        """


class LetterHead(nn.Module):
    """Convolutional CTC head: characters from log-mel features, a distribution every 0.02 s.

    Args:
        mels: Number of mel bands.
        width: Hidden channels.
    """

    blank: int = 0
    delimiter: int | None = None
    reads_samples: bool = False
    frame_s: ClassVar = 0.02

    def __init__(self, mels: int = 80, width: int = 96) -> None:
        super().__init__()
        self.first = nn.Conv1d(mels, width, 5, padding=2)
        self.blocks = nn.ModuleList(
            nn.Conv1d(width, width, 5, padding=2 * spread, dilation=spread) for spread in (1, 2, 4)
        )
        self.last = nn.Conv1d(width, len(SYMBOLS), 1)

    def forward(self, features: Tensor) -> Tensor:
        """Maps ``features (B, mels, frames)`` to log-probabilities ``(B, frames, symbols)``."""
        hidden = F.gelu(self.first(features))
        for block in self.blocks:
            hidden = hidden + F.gelu(block(hidden))
        return self.last(hidden).transpose(1, 2).log_softmax(-1)

    def symbols(self, text: str) -> list[int]:
        """Returns the symbol indices of a text's letters, without accents."""
        return [SYMBOLS.index(c) for c in map(_bare, text.lower()) if c in SYMBOLS[1:]]

    @torch.no_grad()
    def emit(
        self, features: Tensor, samples: np.ndarray | None, end_s: float
    ) -> tuple[Tensor, float]:
        """See `CharacterModel.emit`; reads features only, samples may be ``None``."""
        log_probs = self(features[None].to(self.last.weight.device).float())[0]
        return log_probs[: max(1, round(end_s / self.frame_s))], self.frame_s

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> LetterHead:
        """Loads the head in a zoo model's folder.

        Raises:
            InputError: The folder has no such head.
        """
        from safetensors.torch import load_file

        file = Path(folder) / FILE
        if not file.exists():
            raise InputError(
                f"{folder} has no {FILE}, the CTC head that the method 'ctc' needs; name a CTC "
                "model with 'ctc:model=NAME', such as 'ctc:model=zoo:whisper-synth', or use "
                "'attention'"
            )
        weights = {name: tensor.float() for name, tensor in load_file(file).items()}
        width, mels, _ = weights["first.weight"].shape
        head = cls(mels, width)
        head.load_state_dict(weights)
        return head.eval()

    def save_pretrained(self, folder: str | Path, overwrite: bool = False) -> None:
        """Writes the head's weights in half precision into a model's folder.

        Raises:
            OptionError: The file exists, was not written by mmdecode, and ``overwrite`` is not set.
        """
        from safetensors.torch import save_file

        weights = {name: tensor.half() for name, tensor in self.state_dict().items()}
        write_folder(Path(folder), lambda into: save_file(weights, into / FILE), overwrite)


class LetterModel:
    """A `LetterHead` with a feature extractor, which reads audio samples of any length.

    Args:
        head: The head.
        extractor: The ``WhisperFeatureExtractor`` whose features it was trained on.
        rate: Sampling rate of the audio that it will get, in Hz.

    Raises:
        UnsupportedModelError: The extractor expects another rate.
    """

    reads_samples = True

    def __init__(self, head: LetterHead, extractor: Any, rate: int) -> None:
        _check_rate(type(head).__name__, extractor.sampling_rate, rate)
        self.head, self.extractor, self.rate = head, extractor, rate
        self.blank, self.delimiter, self.symbols = head.blank, head.delimiter, head.symbols

    def emit(
        self, features: Tensor | None, samples: np.ndarray | None, end_s: float
    ) -> tuple[Tensor, float]:
        """See `CharacterModel.emit`; reads samples only, not features."""
        given = {"sampling_rate": self.rate, "return_tensors": "pt"}
        made = self.extractor(samples, truncation=False, padding="longest", **given)
        return self.head.emit(made.input_features[0], None, end_s)


class CTCModel:
    """A CTC model of transformers that reads audio samples.

    Args:
        model: An ``AutoModelForCTC``.
        processor: Its processor: a feature extractor and a tokenizer of single characters.
        rate: Sampling rate of the audio that it will get, in Hz.

    Raises:
        UnsupportedModelError: The model expects another rate, or its symbols are not characters.
    """

    reads_samples = True

    def __init__(self, model: Any, processor: Any, rate: int) -> None:
        self.model, self.processor, self.rate = model.eval(), processor, rate
        _check_rate(type(model).__name__, processor.feature_extractor.sampling_rate, rate)
        tokenizer = processor.tokenizer
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.blank = int(tokenizer.pad_token_id)
        between = getattr(tokenizer, "word_delimiter_token", None)
        self.delimiter = self.vocabulary.get(between) if between else None
        if not any(len(symbol) == 1 and symbol.isalpha() for symbol in self.vocabulary):
            raise UnsupportedModelError(
                f"the vocabulary of {type(model).__name__} has no single letters; forced alignment "
                "needs a CTC model whose symbols are characters"
            )

    def symbols(self, text: str) -> list[int]:
        """Returns the symbol indices of a text; case and accents are adapted to the vocabulary."""
        found = []
        for character in text.strip():
            forms = (character, character.upper(), character.lower())
            for form in (*forms, *map(_bare, forms)):
                index = self.vocabulary.get(form)
                if index is not None and index not in (self.blank, self.delimiter):
                    found.append(index)
                    break
        return found

    @torch.no_grad()
    def emit(
        self, features: Tensor, samples: np.ndarray | None, end_s: float
    ) -> tuple[Tensor, float]:
        """See `CharacterModel.emit`; reads samples only, not features."""
        assert samples is not None, "the loop reads samples for a CTC model"
        inputs = self.processor(samples, sampling_rate=self.rate, return_tensors="pt")
        values = inputs[self.model.main_input_name].to(self.model.device, self.model.dtype)
        log_probs = self.model(values).logits[0].float().log_softmax(-1)
        hop = getattr(self.model.config, "inputs_to_logits_ratio", len(samples) / len(log_probs))
        return log_probs, hop / self.rate


def ctc_model_of(method: str | bool, model: Any, rate: int) -> CharacterModel | None:
    """Loads the CTC model of a word timestamp method; returns ``None`` for ``attention``.

    Args:
        method: ``attention``, ``ctc``, ``ctc:model=NAME``, or ``True``, see
            `mmdecode.asr.alignment.cross_attention.Timer`.
        model: A recogniser's model; if ``method`` names no CTC model, the head in its folder is
            used, which is a Whisper's. ``NAME`` may also be a Whisper with such a head.
        rate: Sampling rate of the audio, in Hz.

    Raises:
        OptionError: There is no such method.
        InputError: The head or model cannot be loaded.
    """
    folder = Path(model.name_or_path)
    if method == "attention" or (method is True and not (folder / FILE).exists()):
        return None
    if method in (True, "ctc"):
        return LetterHead.from_pretrained(folder).to(model.device)
    name = str(method).removeprefix("ctc:model=")
    if not name or name == method:
        raise OptionError(
            f"word_timestamps={method!r}; expected True, 'attention', 'ctc' or 'ctc:model=NAME'"
        )
    from transformers import AutoModelForCTC, AutoProcessor, WhisperFeatureExtractor

    path, trust = local_path(name), code_trusted()
    with loading(name):
        if (Path(path) / FILE).exists():
            head = LetterHead.from_pretrained(path).to(model.device)
            extractor = WhisperFeatureExtractor.from_pretrained(path, trust_remote_code=trust)
            return LetterModel(head, extractor, rate)
        network = AutoModelForCTC.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=trust
        )
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust)
    return CTCModel(network.to(model.device), processor, rate)


def _check_rate(name: str, wanted: int, rate: int) -> None:
    if wanted != rate:
        raise UnsupportedModelError(
            f"{name} expects audio at {wanted} Hz, the recogniser at {rate} Hz; choose a CTC model "
            f"for {rate} Hz"
        )


def _bare(character: str) -> str:
    """Returns a character without accents."""
    return unicodedata.normalize("NFKD", character)[:1]
