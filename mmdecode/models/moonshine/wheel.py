"""``moonshine:tiny-en``: a model converted from the Python wheel ``moonshine-voice``, and cached.

The wheel is located without importing it, and its files are read as data. Only files with the
hashes `SHA256`, for which the conversion was verified, are accepted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

from mmdecode.checkpoints import CheckpointScheme, cache_folder
from mmdecode.errors import InputError, UnknownNameError

PACKAGE, WHEEL = "moonshine_voice", "moonshine-voice==0.1.0"
INSTALL = f"pip install --no-deps {WHEEL}"

SHA256 = {
    "encoder_model.ort": "94e90a4654fc45cdfedb77c4c08e1739f48862998e58fada384b25118134f221",
    "decoder_model_merged.ort": "cf524c4862d36e9e5ab032eddc73637efd822d70e868ac575cf1a46e1e4708a0",
    "tokenizer.bin": "6884b35fd6377d4c4d32336a0bc152f36b64d1e45b6503683cdc238250a8472d",
}
SIZES = {
    "encoder_model.ort": 13_281_600,
    "decoder_model_merged.ort": 30_412_256,
    "tokenizer.bin": 249_974,
}
"""Sizes of the files, in bytes."""

FORMAT = 3
"""Version of the converted files; it is raised when they change, which invalidates the cache."""

CARD: dict[str, Any] = {
    "mib": 105.0,
    "what": "Moonshine tiny for English, a published recogniser of 27.1 M parameters; no times, no "
    "languages",
    "measured": "WER 2.9 % [0.9, 6.9] on the 174 words of zoo:real-clips, by plain generate: few "
    "words, and some may be in its training data",
    "licence": "MIT",
    "origin": f"Moonshine AI, the wheel {WHEEL} (56 MB, Linux, x86_64); weights of 8 bits, "
    "restored to float32",
    "notice": "Copyright (c) 2025 Moonshine AI",
    "install": INSTALL,
}


class MoonshineWheel(CheckpointScheme):
    """Moonshine's recogniser for English, from its Python wheel or a folder with the same files."""

    summary = "moonshine:tiny-en, a published recogniser from a Python wheel"
    source = "Jeffries et al. 2024"
    names = ("tiny-en",)

    @classmethod
    def folder(cls, name: str) -> Path:
        """See `CheckpointScheme`; a name with a slash is a folder that holds the three files."""
        if _is_path(name):
            source = Path(name).expanduser()
            _check(source)
            return _cached(source)
        if name not in cls.names:
            raise UnknownNameError.of("moonshine checkpoint", name, cls.names)
        source = assets() or Path()
        if not _is_complete(converted_folder()):
            if source == Path():
                raise InputError(
                    f"moonshine:{name} needs the wheel {WHEEL}, which is not installed; install it "
                    f"with: {INSTALL}; it exists for Linux on x86_64: elsewhere, give a folder "
                    f"that holds its files {', '.join(SHA256)} as the model"
                )
            _check(source)
        return _cached(source)

    @classmethod
    def is_installed(cls, name: str) -> bool:
        """See `CheckpointScheme`; files of another size are of another version."""
        if name not in cls.names:
            return _is_path(name) and _has_sizes(Path(name).expanduser())
        with contextlib.suppress(InputError):  # a user without a home
            return _has_sizes(assets()) or _is_complete(converted_folder())
        return False

    @classmethod
    def cached(cls, name: str) -> Path | None:
        """See `CheckpointScheme`."""
        with contextlib.suppress(InputError):  # a user without a home
            if name in cls.names and not _has_sizes(assets()) and _is_complete(converted_folder()):
                return converted_folder()
        return None

    @classmethod
    def holds(cls, folder: Path) -> bool:
        """See `CheckpointScheme`."""
        return all((folder / file).is_file() for file in SHA256)

    @classmethod
    def card(cls, name: str) -> dict[str, Any]:
        """See `CheckpointScheme`."""
        return dict(CARD)


def _is_path(name: str) -> bool:
    return "/" in name or os.sep in name


def converted_folder() -> Path:
    """Returns the cache folder of the converted checkpoint, named by `FORMAT` and the hashes."""
    digest = "".join(value[:4] for value in SHA256.values())
    return cache_folder() / f"moonshine-tiny-en-{FORMAT}-{digest}"


def assets() -> Path | None:
    """Returns the folder of the files in the installed wheel; ``None``: it is not installed."""
    found = importlib.util.find_spec(PACKAGE)  # imports nothing for a top-level package
    for location in (found and found.submodule_search_locations) or ():
        folder = Path(location) / "assets" / "tiny-en"
        if folder.is_dir():
            return folder
    return None


def _has_sizes(folder: Path | None) -> bool:
    if folder is None:
        return False
    try:
        return all((folder / name).stat().st_size == size for name, size in SIZES.items())
    except OSError:
        return False


def _check(folder: Path) -> None:
    """Checks that the folder has the files that the conversion was verified with.

    Raises:
        InputError: A file is missing, truncated, or of another version.
    """
    for name in SHA256:
        file = folder / name
        try:
            about = file.stat()
        except OSError as error:
            raise InputError(
                f"{file} cannot be read: {error.strerror}; expected a folder that holds "
                f"{', '.join(SHA256)}; install them with: {INSTALL}"
            ) from error
        found = _digest(file, about.st_size, about.st_mtime_ns)
        if found != SHA256[name]:
            raise InputError(
                f"{file} is not the file of {WHEEL}: its sha256 is {found}, expected "
                f"{SHA256[name]}; it is cut off, changed or of another version; install the right "
                f"one with: {INSTALL} --force-reinstall"
            )


@functools.lru_cache(maxsize=8)
def _digest(file: Path, size: int, changed: int) -> str:
    """Returns the sha256 of a file, cached by its size and modification time."""
    import hashlib

    try:
        with file.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; check its rights") from error


def _cached(source: Path) -> Path:
    """Returns the folder of the converted checkpoint; converts the files in ``source`` if needed.

    Raises:
        InputError: The folder cannot be written, or exists and is incomplete.
    """
    folder = converted_folder()
    if not _is_complete(folder):
        from mmdecode.runs.files import write_once

        write_once(folder, lambda: _made(source))
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if missing:
            raise InputError(
                f"{folder} lacks {', '.join(missing)}, which somebody removed; delete that folder, "
                "and it is made again"
            )
    return folder


_FILES = (
    *("LICENSE", "README.md", "config.json", "generation_config.json", "model.safetensors"),
    *("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"),
)


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _made(source: Path) -> dict[str, bytes]:
    import hashlib

    from mmdecode.models.moonshine.convert import converted

    files = converted(source)
    digest = hashlib.sha256(files["model.safetensors"]).hexdigest()
    return files | {"LICENSE": LICENSE.encode(), "README.md": _page(digest).encode()}


def _page(weights: str) -> str:
    """Returns the text of the model card.

    Args:
        weights: The sha256 of the converted weights.
    """
    hashes = "\n".join(f"| `{name}` | `{value}` |" for name, value in SHA256.items())
    return f"""\
---
license: mit
language: en
library_name: transformers
pipeline_tag: automatic-speech-recognition
---

# Moonshine tiny-en, converted

A `MoonshineForConditionalGeneration` of 27,092,736 parameters in float32, converted by mmdecode
from the files that Moonshine AI publishes for onnxruntime in the wheel `{WHEEL}`
(https://github.com/moonshine-ai/moonshine). The published weights have 8 bits, with a scale and a
zero point for each matrix; here they are multiplied out. The published program also rounds the
activations to 8 bits, so its logits differ a little.

- **Input:** samples at 16 kHz, one channel, up to about 30 seconds. No times, languages or tasks.
- **Licence:** MIT, see `LICENSE`. {CARD["notice"]}.
- **Recalled, shown by no file:** `max_position_embeddings` 194 in `config.json`, which is also the
  longest text in `generation_config.json`, and the publisher's limit of 6.5 tokens for a second of
  audio, which nothing here enforces. The graphs pad heads from 36 to 40 values, of which
  `pad_head_dim_to_multiple_of` 8 is the simplest reading; results do not depend on it.
- **Tokenizer:** pieces and ids are the publisher's; merges follow from the order of ids. It adds
  neither start nor end token. Its encoding was not compared with the publisher's.
- **Made by mmdecode:** `alignment_heads` in `generation_config.json`, the cross-attention head that
  shows which audio a token was read from, for streams. Found with `mmdecode train alignment-heads
  --model moonshine:tiny-en --data zoo:real-clips --method ctc:model=zoo:whisper-synth`. Word times
  from it differ from that forced alignment by 0.10 s in the median on these 11 clips of people,
  and by 0.07 s on 60 sentences of espeak-ng, where it is the best head too.
- **Not for:** other languages than English. What it was trained on is not known to mmdecode.

| file | sha256 |
|---|---|
{hashes}
| `model.safetensors` (made) | `{weights}` |
"""


LICENSE = """\
MIT License

Copyright (c) 2025 Moonshine AI

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""
