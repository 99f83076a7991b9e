"""Broken recordings and manifests, made by seed from the shipped clips and read in a subprocess.

    python tests/asr/fuzz.py FOLDER --count 2000 --seed 0

Each file must be read, or be refused by an error of `mmdecode.errors` that names it, in bounded
time and memory; every tenth is whole, and must give the samples that it gave before. The reader is
a process of its own, so that a crash inside a decoder is counted and the rest goes on. Prints how
many files of which kind ended how, and leaves in FOLDER those that ended as they must not.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import random
import resource
import selectors
import struct
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import soundfile
import soxr

from mmdecode.asr.audio.reading import blocks, recording
from mmdecode.asr.output.manifest import read_manifest
from mmdecode.errors import MMDecodeError
from tests.support.files import json_lines

DATA = Path(__file__).parents[1] / "data" / "speech"
RATE, SECONDS = 16_000, 1.5
CONTROL = "whole"
LIMIT_S = 30  # for one file, on a busy machine
LIMIT_BYTES = 1 << 30  # beyond what the reader needs for itself

SOUNDFILE = {
    "wav": {"subtype": "PCM_16"},
    "float.wav": {"subtype": "FLOAT", "format": "WAV"},
    "24.wav": {"subtype": "PCM_24", "format": "WAV"},
    "adpcm.wav": {"subtype": "IMA_ADPCM", "format": "WAV"},
    "flac": {},
    "ogg": {},
    "opus": {"format": "OGG", "subtype": "OPUS"},
    "mp3": {},
    "aiff": {},
    "caf": {},
    "w64": {},
    "au": {},
}
MUXERS = {"m4a": "ipod", "mkv": "matroska"}
CONTAINERS = {"m4a": "aac", "mp4": "aac", "mkv": "flac", "webm": "libopus", "mov": "aac"}


# Whole files


def recordings():
    """Bytes of one excerpt in each format, by ending."""
    samples, rate = soundfile.read(DATA / "librispeech-2412-153948-0000.flac", dtype="float32")
    samples = samples[2 * rate : int((2 + SECONDS) * rate)]
    made = {}
    for ending, options in SOUNDFILE.items():
        file = io.BytesIO()
        soundfile.write(file, samples, rate, **{"format": ending.upper(), **options})
        made[ending] = file.getvalue()
    return made | containers(samples, rate)


def containers(samples, rate):
    try:
        import av
    except ImportError:
        return {}
    samples = soxr.resample(samples, rate, 48_000)[None]
    made = {}
    for ending, codec in CONTAINERS.items():
        file = io.BytesIO()
        with av.open(
            file, "w", format={"m4a": "ipod", "mkv": "matroska"}.get(ending, ending)
        ) as to:
            stream = to.add_stream(codec, rate=48_000, layout="mono")
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48_000, 0
            for packet in [*stream.encode(frame), *stream.encode(None)]:
                to.mux(packet)
        made[ending] = file.getvalue()
    return made


def rows():
    return json_lines(DATA / "manifest.jsonl")


# Ways to break bytes


def cut(data, draw):
    return data[: draw.randrange(len(data))]


def cut_header(data, draw):
    return data[: draw.randrange(min(80, len(data)))]


def headless(data, draw):
    return data[draw.randrange(1, len(data)) :]


def flipped(data, draw):
    found = bytearray(data)
    for _ in range(draw.choice([1, 4, 30, 300])):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def flipped_header(data, draw):
    found = bytearray(data)
    for _ in range(draw.choice([1, 2, 8])):
        found[draw.randrange(min(128, len(found)))] = draw.randrange(256)
    return bytes(found)


def sized(data, draw):
    """Some length or count in the header is huge, zero or negative."""
    found = bytearray(data)
    value = draw.choice(
        [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFF0, draw.getrandbits(32)]
    )
    struct.pack_into(
        draw.choice("<>") + "I", found, draw.randrange(min(120, len(found) - 4)), value
    )
    return bytes(found)


def zeroed(data, draw):
    start = draw.randrange(len(data))
    length = min(draw.randrange(1, 4000), len(data) - start)
    return data[:start] + bytes(length) + data[start + length :]


def without_a_part(data, draw):
    start = draw.randrange(len(data))
    return data[:start] + data[start + draw.randrange(1, 4000) :]


def with_noise_inside(data, draw):
    start = draw.randrange(len(data))
    return data[:start] + draw.randbytes(draw.randrange(1, 4000)) + data[start:]


def repeated(data, draw):
    return data + data[draw.randrange(len(data)) :]


DAMAGE = [cut, cut_header, headless, flipped, flipped_header, sized, zeroed]
DAMAGE += [without_a_part, with_noise_inside, repeated]


# Files that never were recordings, or of impossible samples


def foreign(draw):
    """Name of the kind, ending and bytes."""
    kind = draw.choice(["empty", "text", "random", "picture", "html", "nan", "channels", "rate"])
    ending = draw.choice([*SOUNDFILE, *CONTAINERS])
    if kind == "empty":
        return kind, ending, b""
    if kind == "text":
        return kind, ending, ("This is no recording. " * draw.randrange(1, 300)).encode("utf-16")
    if kind == "random":
        return kind, ending, draw.randbytes(draw.randrange(1, 20_000))
    if kind == "picture":
        return kind, ending, b"\x89PNG\r\n\x1a\n" + draw.randbytes(3000)
    if kind == "html":
        return kind, ending, b"<!DOCTYPE html><title>404</title>" + b"<p>not found</p>" * 50
    samples = np.zeros((4000, 1), np.float32)
    rate = RATE
    if kind == "nan":
        samples[draw.randrange(4000)] = draw.choice([np.nan, np.inf, -np.inf])
    if kind == "channels":
        samples = np.zeros((500, draw.choice([64, 255, 1000])), np.float32)
    if kind == "rate":
        rate = draw.choice([1, 100, 7_999, 192_001, 1_000_000])
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return kind, "wav", file.getvalue()


# Manifests


def table(entries, ending, draw):
    if ending == "jsonl":
        return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()
    if ending == "json":
        return json.dumps(entries).encode()
    file = io.StringIO()
    columns = ["audio", "text", "duration_s", "language"]
    separator = "\t" if ending == "tsv" else ","
    writer = csv.DictWriter(file, columns, extrasaction="ignore", delimiter=separator)
    writer.writeheader()
    writer.writerows(entries)
    return file.getvalue().encode()


def manifest(draw):
    """Name of the kind, ending and bytes."""
    ending = draw.choice(["jsonl", "json", "csv", "tsv"])
    entries = rows()
    kind = draw.choice(["row", "bytes", "encoding", "column", "double", "type", "shape", "nothing"])
    if kind == "column":
        entries[draw.randrange(len(entries))].pop("audio")
    if kind == "double":
        entries.append(draw.choice(entries))
    if kind == "type":
        entries[draw.randrange(len(entries))][draw.choice(["audio", "text", "duration_s"])] = (
            draw.choice([None, 3, -1.5, True, [], {}, "", "\0", "1e999", "x" * 100_000])
        )
    if kind == "shape":
        ending = draw.choice(["jsonl", "json"])
        entries = draw.choice([[1], [None], ["a"], [[]], [{}], [[entries]]])
    data = table(entries, ending, draw) if kind != "shape" else json.dumps(entries).encode()
    if kind == "nothing":
        data = draw.choice([b"", b"\n\n", b"[]", b"{}", b"\xef\xbb\xbf"])
    if kind == "row":
        lines = data.split(b"\n")
        at = draw.randrange(len(lines))
        lines[at] = cut(lines[at] or b"{", draw) + draw.choice([b"", b'"', b"}", b"[" * 5000])
        data = b"\n".join(lines)
    if kind == "bytes":
        data = draw.choice(DAMAGE)(data, draw)
    if kind == "encoding":
        text = data.decode().replace("a", "ä")
        data = text.encode(draw.choice(["latin-1", "utf-16", "utf-32", "cp1252"]), "replace")
    return f"manifest {kind}", ending, data


# All of them


def make(folder, count, seed):
    """Writes the files; their paths and kinds, and of whole ones what they must hold."""
    draw = random.Random(seed)
    whole = recordings()
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for number in range(count):
        ending = draw.choice(list(whole))
        if number % 10 == 0:
            kind, data = CONTROL, whole[ending]
        elif number % 10 in (1, 2):
            kind, ending, data = manifest(draw)
        elif number % 10 == 3:
            kind, ending, data = foreign(draw)
        else:
            damage = draw.choice(DAMAGE)
            kind, data = damage.__name__, damage(whole[ending], draw)
            if draw.random() < 0.1:
                ending = draw.choice(list(whole))  # the name says something else
        path = folder / f"{number:05d}-{kind.replace(' ', '_')}.{ending}"
        path.write_bytes(data)
        made.append((path, kind))
    return made


# The reader: paths on standard input, an outcome a line on standard output


def read(path):
    if "-manifest_" in path:
        return str(len(read_manifest(path)))
    digest = hashlib.blake2b(digest_size=8)
    for block in blocks(recording(path), RATE):
        assert block.dtype == np.float32 and block.ndim == 1 and np.isfinite(block).all()
        digest.update(block.tobytes())
    return digest.hexdigest()


def outcome(path):
    """How reading a file ended: ``read``, the name of our error, or what must not be."""
    try:
        return {"outcome": "read", "value": read(path)}
    except MMDecodeError as error:
        message = str(error)
        has_hint = ";" in message or "-manifest_" in path
        clear = message.startswith(path) and has_hint
        return {"outcome": type(error).__name__ if clear else "unclear", "value": message}
    except BaseException as error:
        return {"outcome": f"BUG {type(error).__name__}", "value": str(error)[:500]}


def reader():
    read(str(DATA / "jfk.ogg"))  # everything is loaded before memory is counted
    warnings.simplefilter("error")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES,) * 2)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(outcome(line.rstrip("\n"))), flush=True)


class Reader:
    """The reader's process, begun again where it crashed or hung."""

    def __init__(self, command=(sys.executable, __file__, "--reader"), limit_s=LIMIT_S):
        self.command, self.limit_s, self.process = command, limit_s, None

    def __call__(self, path):
        if self.process is None:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            self.answer(300)
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        found = self.answer(self.limit_s)
        if found is None:
            self.process.kill()
            code = self.process.wait()
            self.close()
            found = {"outcome": f"CRASH {code}", "value": ""}
        return found

    def answer(self, limit_s):
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if waiting.select(limit_s) else ""
        return json.loads(line) if line else None

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            self.process = None


def run(folder, count, seed):
    """Outcomes by kind, and what was not as it must be."""
    made = make(folder, count, seed)
    read_file = Reader()
    whole, outcomes, bad = {}, {}, []
    for path, kind in made:
        found = read_file(path)
        outcomes.setdefault(kind, Counter())[found["outcome"]] += 1
        fine = found["outcome"] in ("read", "InputError")
        if kind == CONTROL:
            fine = found["outcome"] == "read"
            ending = path.name.partition(".")[2]
            fine &= whole.setdefault(ending, found["value"]) == found["value"]
        if fine:
            path.unlink()
        else:
            bad.append({"file": path.name, **found})
    read_file.close()
    return {"files": len(made), "outcomes": outcomes, "bad": bad}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="store_true", help="be the process that reads")
    given = parser.parse_args()
    if given.reader:
        reader()
    else:
        print(json.dumps(run(given.folder, given.count, given.seed), indent=1))


if __name__ == "__main__":
    main()
