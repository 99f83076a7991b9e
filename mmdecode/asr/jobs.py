"""A folder of results that survives being interrupted.

``results.jsonl`` gets one line per recording as it ends, flushed; ``run.json`` says under which
settings. A folder with results is continued only on request and only under the same settings;
recordings that failed are tried again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdecode.asr.formats import FORMATS, file_stem, write_atomically
from mmdecode.asr.transcriber import Failure, Transcript
from mmdecode.errors import InputError, OptionError


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Of everything that may change a transcript."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class ResultFolder:
    """Where a run writes.

    Args:
        folder: Created where it does not exist.
        formats: Written per recording.
        settings: What may change a transcript.
        resume: Continue what is there.

    Raises:
        OptionError: The folder holds results and ``resume`` is not set, or holds results of other
            settings.
        InputError: The folder cannot be written.
    """

    def __init__(
        self, folder: Path, formats: list[str], settings: Mapping[str, Any], resume: bool
    ) -> None:
        self.folder, self.formats = folder, formats
        self._names: dict[str, str] = {}
        self.done: dict[str, dict[str, Any]] = {}
        settings = {**settings, "formats": formats}
        wanted = {"hash": settings_hash(settings), "settings": settings}
        lines, run = folder / "results.jsonl", folder / "run.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if lines.exists():
                self._continue(lines, run, wanted, resume)
            write_atomically(run, json.dumps(wanted, indent=1, default=str) + "\n")
            self._file = lines.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write to {folder}: {error.strerror}; choose another --out"
            ) from error

    def _continue(self, lines: Path, run: Path, wanted: dict[str, Any], resume: bool) -> None:
        if not resume:
            raise OptionError(
                f"{self.folder} holds results of an earlier run; continue it with --resume, or "
                "choose another --out"
            )
        try:
            before = json.loads(run.read_text(encoding="utf-8"))
            found = before["hash"], before["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            raise OptionError(
                f"{run} cannot be read, so nothing shows that the results beside it belong to this "
                "run; choose another --out"
            ) from None
        if found[0] != wanted["hash"]:
            old, new = found[1], json.loads(json.dumps(wanted["settings"], default=str))
            differing = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
            shown = "; ".join(f"{k} was {old.get(k)!r}, is {new.get(k)!r}" for k in differing)
            raise OptionError(
                f"{self.folder} holds results of other settings ({shown}); repeat them to "
                "continue, or choose another --out"
            )
        data = lines.read_bytes()
        complete = data[: data.rfind(b"\n") + 1]  # a line cut off by a crash is written again
        if len(complete) < len(data):
            with lines.open("r+b") as file:
                file.truncate(len(complete))
        for line in complete.splitlines():
            entry = json.loads(line)
            self._names[entry["source"]] = entry["name"]
            if "error" not in entry:
                self.done[entry["source"]] = entry

    def name_of(self, source: str) -> str:
        """The stem of a source's files; the same one whenever it is asked for."""
        if source not in self._names:
            self._names[source] = file_stem(source, self._names.values())
        return self._names[source]

    def add(self, result: Transcript | Failure) -> None:
        """Writes the files of a recording, then its line."""
        name = self.name_of(result.source)
        if isinstance(result, Transcript):
            for kind in self.formats:
                write_atomically(self.folder / f"{name}.{kind}", FORMATS[kind](result))
        entry = {"source": result.source, "name": name, **dataclasses.asdict(result)}
        self._file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if isinstance(result, Transcript):
            self.done[result.source] = entry

    def close(self) -> None:
        """No more results."""
        self._file.close()
