"""Uploads that are broken or made to do harm, by seed. See serve_hostile.py.

Recordings and images of common formats are written here and then damaged; others never were any:
playlists of addresses, small files of huge content, random bytes. Then forms, JSON and messages of
streams that are not what they should be.
"""

from __future__ import annotations

import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import soundfile
from PIL import Image
from serve_process import MODEL, RATE, as_pcm, as_wav, asking

from mmdecode.zoo.speech import Clip

Draw = random.Random
Change = Callable[[bytes, Draw], bytes]
LONGEST_S = 60.0
"""Most seconds of a recording that the server takes here."""
MIX = {"audio": 40, "image": 15, "playlist": 5, "bomb": 1, "random": 9, "form": 12, "json": 10,
        "stream": 8}  # fmt: skip
"""Kinds of uploads, and how many of a hundred are of each."""


@dataclass(frozen=True)
class Upload:
    """Something to send.

    Attributes:
        kind: One of `MIX`.
        way: ``file``, ``image``, ``form``, ``json`` or ``stream``: what it is sent as.
        data: Its bytes.
        messages: Messages of a stream.
        header: Type of a form.
    """

    kind: str
    way: str
    data: bytes = b""
    messages: Sequence[str | bytes] = field(default=())
    header: str = ""


# ---- ways to damage bytes


def cut(data: bytes, draw: Draw) -> bytes:
    """The end is missing."""
    return data[: draw.randrange(len(data))]


def cut_early(data: bytes, draw: Draw) -> bytes:
    """Little more than the header is left."""
    return data[: draw.randrange(min(100, len(data)))]


def beheaded(data: bytes, draw: Draw) -> bytes:
    """The beginning is missing."""
    return data[draw.randrange(1, len(data)) :]


def flipped(data: bytes, draw: Draw) -> bytes:
    """Some bits are others."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 5, 50, 500))):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def new_header(data: bytes, draw: Draw) -> bytes:
    """Some of the first bytes are others."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 3, 10))):
        found[draw.randrange(min(160, len(found)))] = draw.randrange(256)
    return bytes(found)


def new_number(data: bytes, draw: Draw) -> bytes:
    """A number in the header is zero, huge, or negative."""
    found = bytearray(data)
    value = draw.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, draw.getrandbits(32)))
    at = draw.randrange(max(1, min(160, len(found) - 4)))
    struct.pack_into(draw.choice("<>") + "I", found, at, value)
    return bytes(found)


def zeroed(data: bytes, draw: Draw) -> bytes:
    """A part is zero."""
    at, size = draw.randrange(len(data)), draw.randrange(1, 4000)
    return data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]


def shortened(data: bytes, draw: Draw) -> bytes:
    """A part inside is missing."""
    at = draw.randrange(len(data))
    return data[:at] + data[at + draw.randrange(1, 4000) :]


def filled(data: bytes, draw: Draw) -> bytes:
    """Random bytes are put in."""
    at = draw.randrange(len(data))
    return data[:at] + draw.randbytes(draw.randrange(1, 4000)) + data[at:]


def doubled(data: bytes, draw: Draw) -> bytes:
    """A part comes twice."""
    return data + data[draw.randrange(len(data)) :]


DAMAGE: Sequence[Change] = (
    cut, cut_early, beheaded, flipped, new_header, new_number, zeroed, shortened, filled, doubled,
)  # fmt: skip

# ---- whole files


def beginning(clip: Clip) -> np.ndarray:
    """Samples of the beginning of a recording."""
    return clip.samples()[: round(1.5 * RATE)]


def recordings(clip: Clip) -> dict[str, bytes]:
    """A recording in some formats, in most of them its beginning."""
    import av

    samples, found = beginning(clip), {"ogg": clip.path.read_bytes()}
    for kind in ("WAV", "FLAC", "MP3"):
        file = io.BytesIO()
        soundfile.write(file, samples, RATE, format=kind)
        found[kind.lower()] = file.getvalue()
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as to:
        sound = to.add_stream("aac", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), "fltp", "mono")
        frame.sample_rate, frame.pts = RATE, 0
        for packet in (*sound.encode(frame), *sound.encode(None)):
            to.mux(packet)
    return found | {"mp4": file.getvalue()}


def saved(image: Image.Image, kind: str) -> bytes:
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def bombs() -> list[tuple[str, bytes]]:
    """Small files of much content, each with the way it is sent."""
    silence = io.BytesIO()
    with soundfile.SoundFile(silence, "w", 8000, 1, format="FLAC") as sound:
        for _ in range(240):
            sound.write(np.zeros(80_000, np.int16))  # forty minutes
    claim = bytearray(as_wav(np.zeros(800)))
    struct.pack_into("<I", claim, 40, 0xFFFFFFF0)
    jpeg = bytearray(saved(Image.new("RGB", (8, 8)), "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    struct.pack_into(">HH", jpeg, at + 5, 65_000, 65_000)
    png = saved(Image.new("RGB", (8, 8)), "PNG")
    text = b"a\0\0" + zlib.compress(bytes(50_000_000), 9)
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text
    chunk += struct.pack(">I", zlib.crc32(chunk[4:]))
    return [
        ("file", silence.getvalue()),
        ("file", bytes(claim)),
        ("image", saved(Image.new("1", (20_000, 20_000)), "PNG")),
        ("image", saved(Image.new("L", (7000, 7000)), "PNG")),  # as many pixels as are taken
        ("image", bytes(jpeg)),
        ("image", png[:33] + chunk + png[33:]),
    ]


def playlist(address: str, draw: Draw) -> bytes:
    """A file that names another file, or an address."""
    return draw.choice(
        (
            f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{address}\n#EXT-X-ENDLIST\n",
            f'#EXTM3U\n#EXT-X-KEY:METHOD=AES-128,URI="{address}"\n#EXTINF:5,\na.ts\n',
            f"ffconcat version 1.0\nfile '{address}'\n",
            f'<svg xmlns="http://www.w3.org/2000/svg"><image href="{address}"/></svg>',
            f"[Reference]\r\nRef1={address}\r\n",
            f"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=a\r\nt=0 0\r\na=control:{address}\r\n"
            "m=audio 0 RTP/AVP 0\r\na=rtpmap:0 PCMU/8000\r\n",
            f'<MPD type="static"><Period><AdaptationSet mimeType="audio/mp4"><Representation '
            f'id="1"><BaseURL>{address}</BaseURL></Representation></AdaptationSet></Period></MPD>',
        )
    ).encode()


MAGIC = (b"", b"", b"RIFF\x24\0\0\0WAVEfmt ", b"fLaC", b"OggS\0\2", b"ID3\3\0", b"\xff\xfb\x90\0",
         b"\0\0\0\x20ftypM4A ", b"\x1aE\xdf\xa3", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0",
         b"GIF89a", b"II*\0", b"%PDF-1.7", b"PK\3\4", b"<!DOCTYPE html>")  # fmt: skip

# ---- forms, JSON, and messages


def part(name: str, content: bytes, more: str = "") -> bytes:
    """A part of a form."""
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode("utf-8", "surrogateescape") + content + b"\r\n"


def form(draw: Draw, file: bytes) -> tuple[bytes, str]:
    """A form that is not what it should be, and its type."""
    kind = "multipart/form-data; boundary=b"
    model, data = part("model", MODEL.encode()), part("file", file, '; filename="a"')
    whole = model + data + b"--b--\r\n"
    odd = draw.choice(("model", "prompt", "language", "temperature", "response_format", "stream",
                       "keywords", "chunking_strategy", "timestamp_granularities[]", "colour",
                       "file", "", "\0", "a" * 5000, "languages", "ä"))  # fmt: skip
    value = draw.choice((b"", b"\0", b"nan", b"1e999", b"-1", b"\xff\xfe", b"{" * 9000, b"true",
                         b"a" * 9000, b"a" * 20_000, b'{"type":"server_vad"}', b"<|endoftext|>",
                         draw.randbytes(50)))  # fmt: skip
    return draw.choice(
        (
            lambda: (draw.choice(DAMAGE)(whole, draw), kind),
            lambda: (whole[: len(model) + draw.randrange(300)], kind),  # no end
            lambda: (whole, kind.replace("=b", "=c")),
            lambda: (whole, kind.partition(";")[0]),
            lambda: (whole, f"{kind}{draw.choice('bcd')}"),
            lambda: (whole, "application/x-www-form-urlencoded"),
            lambda: (part("+2AA-", b"+2AA-") + whole, f"{kind}; charset=utf-7"),
            lambda: (part("\\ud800", b"a") + whole, f"{kind}; charset=unicode_escape"),
            lambda: (whole, f"{kind}; charset={draw.choice(('undefined', 'punycode', 'zip'))}"),
            lambda: (part(odd, value) + whole, kind),
            lambda: (part(odd, value) * draw.choice((2, 300)) + whole, kind),
            lambda: (part("model", MODEL.encode(), f"; a={'x' * 70_000}") + whole, kind),
            lambda: (data + whole, kind),
            lambda: (part("file", whole, '; filename="a"') + b"--b--\r\n", kind),
            lambda: (whole.replace(b"\r\n", b"\n"), kind),
            lambda: (part(odd, value, f'; filename="{draw.choice(("", "../a", "/etc/a"))}"'), kind),
        )
    )()


VALUES: Sequence[Any] = (None, True, False, 0, -1, 1.5, 1e308, 10**400, "", "x", "\ud800", "\0",
                         [], {}, [[]], [None], {"": None}, {"a": 1}, ["x"] * 5, "a" * 5000,
                         float("nan"), float("inf"))  # fmt: skip
TEXTS = (b"", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"NaN", b'"' * 99, b"{}",
         b"1" * 10_000, b'{"model": "\\ud800", "\\ud800": 1}')  # fmt: skip


def conversation(draw: Draw, image: bytes) -> bytes:
    """Body of a conversation that is not what it should be."""
    body = asking("Is there a ring?", image, max_completion_tokens=1)
    [message] = body["messages"]
    if draw.random() < 0.1:
        return draw.choice(TEXTS)
    if draw.random() < 0.3:
        return draw.choice(DAMAGE)(json.dumps(body).encode(), draw)
    value = draw.choice(VALUES)
    urls = (
        "http://127.0.0.1:1/a",
        "/etc/passwd",
        "data:image/png;base64,=",
        "data:,",
        "data:" * 99,
    )
    draw.choice(
        (
            lambda: body.update(
                {draw.choice([*body, "temperature", "seed", "stop", "n", "top_p"]): value}
            ),
            lambda: body.update({draw.choice(("stream_options", "tools", "stream", "x")): value}),
            lambda: message.update({draw.choice(("role", "content", "name", "x")): value}),
            lambda: message.update(content=[value]),
            lambda: message["content"][0].update({draw.choice(("type", "text", "x")): value}),
            lambda: message["content"][1].update({draw.choice(("type", "image_url")): value}),
            lambda: message["content"][1].update(image_url={"url": draw.choice(urls)}),
            lambda: body.update(messages=[message] * draw.choice((0, 20, 1001))),
            lambda: body.update(messages=[value, message]),
        )
    )()
    return json.dumps(body).encode()


def messages(draw: Draw, samples: bytes) -> list[str | bytes]:
    """Messages of a stream that are not what they should be."""
    fields = ("type", "model", "rate", "language", "task", "prompt", "policy", "step_s",
              "word_timestamps", "vad", "key", "x")  # fmt: skip
    policies = ("agreement:n=1e9", "hold:n=-1", "alignatt:s=nan", "::=", "x", "ending:p=2",
                "agreement:n=2,n=3")  # fmt: skip
    names = draw.sample(fields, draw.choice((0, 1, 1, 2)))
    start = {"type": "start", **{name: draw.choice(VALUES) for name in names}}
    if draw.random() < 0.2:
        start["policy"] = draw.choice(policies)
    first = draw.choice((json.dumps(start), json.dumps(start), "", "[]", "{" * 50_000, "null",
                         '"\\ud800"', samples[:999]))  # fmt: skip
    blocks = [samples[at : at + 3201] for at in range(0, len(samples), 3201)]
    middle = draw.choice(([], [b""] * 9, ["x"], [json.dumps(start)], [b"a" * ((1 << 20) + 1)],
                          [draw.randbytes(999)], ["\0"]))  # fmt: skip
    return [first, *blocks[: draw.randrange(8)], *middle, '{"type": "finish"}', *middle]


def uploads(
    count: int, clip: Clip, image: Image.Image, addresses: Sequence[str], seed: int
) -> Iterator[Upload]:
    """Yields uploads.

    Args:
        count: Number of uploads.
        clip: A recording.
        image: An image.
        addresses: Files and addresses that no upload may make the server open.
        seed: Seed of all choices.
    """
    draw, files, spoken = random.Random(seed), recordings(clip), as_pcm(beginning(clip))
    images: Mapping[str, bytes] = {"png": saved(image, "PNG"), "jpeg": saved(image, "JPEG")}
    harmful = bombs()
    makers: dict[str, Callable[[], Upload]] = {
        "audio": lambda: Upload(
            "audio", "file", draw.choice(DAMAGE)(files[draw.choice(list(files))], draw)
        ),
        "image": lambda: Upload(
            "image", "image", draw.choice(DAMAGE)(images[draw.choice(list(images))], draw)
        ),
        "playlist": lambda: Upload(
            "playlist", draw.choice(("file", "image")), playlist(draw.choice(addresses), draw)
        ),
        "bomb": lambda: Upload("bomb", *draw.choice(harmful)),
        "random": lambda: Upload(
            "random",
            draw.choice(("file", "image")),
            draw.choice(MAGIC) + draw.randbytes(draw.randrange(1, 20_000)),
        ),
        "form": lambda: (lambda made: Upload("form", "form", made[0], header=made[1]))(
            form(draw, files["ogg"])
        ),
        "json": lambda: Upload("json", "json", conversation(draw, images["jpeg"])),
        "stream": lambda: Upload("stream", "stream", messages=messages(draw, spoken)),
    }
    for _ in range(count):
        [kind] = draw.choices(list(MIX), list(MIX.values()))
        yield makers[kind]()
