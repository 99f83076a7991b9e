"""A test set of the Hub as a folder: audio files as they are stored there, and a manifest.

    python benchmarks/real/prepare.py hf-audio/esb-datasets-test-only-sorted \
        --name librispeech --split test.clean --out data/librispeech-clean

Needs the packages ``datasets`` and ``soundfile``, and a connection. Files are written as they come,
not decoded; a run that was cut off begins again.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import soundfile

from mmdecode.errors import run_script
from mmdecode.runs.files import append_line, open_append, refuse_foreign, write_file

TEXT = ("text", "transcription", "transcript", "sentence", "norm_text")
SUFFIXES = {"WAV": ".wav", "FLAC": ".flac", "OGG": ".ogg", "MP3": ".mp3"}


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the set, audio as stored."""
    from datasets import Audio, load_dataset

    data = load_dataset(
        arguments.dataset, arguments.name, split=arguments.split, streaming=True
    ).cast_column(arguments.audio, Audio(decode=False))
    return iter(data if arguments.limit is None else data.take(arguments.limit))


def write(row: dict[str, Any], number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One recording as a file, and its line of the manifest."""
    stored = row[arguments.audio]
    data = stored["bytes"] or Path(stored["path"]).read_bytes()
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        seconds, kind = file.frames / file.samplerate, file.format
    if kind not in SUFFIXES:
        raise SystemExit(f"row {number} is {kind} audio; expected {', '.join(SUFFIXES)}")
    name = f"{number:06d}{SUFFIXES[kind]}"
    write_file(arguments.out / "audio" / name, data, arguments.overwrite)
    text = next((row[column] for column in TEXT if column in row), None)
    if text is None:
        raise SystemExit(f"row {number} has no text; expected one of {', '.join(TEXT)}")
    line = {
        "id": str(row.get("id") or f"{number:06d}"),
        "audio": f"audio/{name}",
        "text": text,
        "duration": round(seconds, 3),
    }
    speaker = row.get("speaker_id")
    return line if speaker is None else line | {"speaker": str(speaker)}


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dataset", help="of the Hub")
    parser.add_argument("--name", help="of its configuration")
    parser.add_argument("--split", default="test")
    parser.add_argument("--audio", default="audio", help="column")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="only the first so many; a smoke test")
    parser.add_argument("--overwrite", action="store_true", help="also what mmdecode did not write")
    arguments = parser.parse_args()
    table = arguments.out / "manifest.jsonl"
    refuse_foreign([table, *(arguments.out / "audio").glob("*")], arguments.overwrite)
    hours, count = 0.0, 0
    write_file(table, "", arguments.overwrite)
    with open_append(table) as manifest:
        for count, row in enumerate(rows(arguments), 1):
            line = write(row, count, arguments)
            hours += line["duration"] / 3600
            append_line(manifest, json.dumps(line, ensure_ascii=False).encode() + b"\n")
    print(f"{count} recordings, {hours:.2f} h: {table}")


if __name__ == "__main__":
    run_script(main)
