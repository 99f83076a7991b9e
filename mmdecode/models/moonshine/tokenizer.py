"""Converts Moonshine's ``tokenizer.bin`` to a tokenizer of the library ``tokenizers``.

The file lists pieces in the order of their ids, each preceded by its length in bytes. A length is
one byte or, from 128 on, two bytes, the second of which counts multiples of 128. Ids 0 to 2 are the
unknown, start and end tokens, ids 3 to 258 the 256 bytes, and ids from 32,000 on are ``<<ST_0>>``
to ``<<ST_767>>``, which do not occur in texts.
"""

from __future__ import annotations

import json

from mmdecode.errors import InputError

FIRST_BYTE, AFTER_BYTES, FIRST_SPECIAL = 3, 259, 32_000
UNKNOWN, START, END = "<unk>", "<s>", "</s>"
SPACE = "\u2581"
"""Character that stands for a space in pieces; every text also begins with it."""


def read_pieces(data: bytes) -> list[bytes]:
    """Reads the pieces of a ``tokenizer.bin``, in the order of their ids.

    Raises:
        InputError: The file ends within a piece.
    """
    pieces: list[bytes] = []
    position = 0
    while position < len(data):
        size = data[position]
        position += 1
        if size >= 128 and position < len(data):
            size = data[position] * 128 + size - 128
            position += 1
        if position + size > len(data):
            raise InputError(
                f"tokenizer.bin is damaged: piece {len(pieces)} of {size} bytes at byte "
                f"{position} of {len(data)}; get the file again from where it came"
            )
        pieces.append(data[position : position + size])
        position += size
    return pieces


def tokenizer_json(pieces: list[bytes]) -> str:
    """Makes the text of a ``tokenizer.json``: byte-pair encoding with byte fallback.

    ``tokenizer.bin`` has no merges. They are derived from the ids, since SentencePiece numbers
    pieces in the order of their merges: for each piece by id, all pairs of pieces that make it up.
    The tokenizer adds neither start nor end token.

    Raises:
        InputError: The first pieces are not the unknown, start and end token.
    """
    if pieces[:FIRST_BYTE] != [UNKNOWN.encode(), START.encode(), END.encode()]:
        raise InputError(
            f"tokenizer.bin begins with {pieces[:FIRST_BYTE]}, expected the pieces {UNKNOWN}, "
            f"{START} and {END}; give Moonshine's"
        )
    names = [
        f"<0x{number - FIRST_BYTE:02X}>"
        if FIRST_BYTE <= number < AFTER_BYTES
        else piece.decode("utf-8", "backslashreplace")
        for number, piece in enumerate(pieces)
    ]
    ids = {name: number for number, name in enumerate(names)}
    special = [*range(FIRST_BYTE), *range(FIRST_SPECIAL, len(names))]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [_added(number, names[number]) for number in special],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": UNKNOWN,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": _merges(names[AFTER_BYTES:FIRST_SPECIAL], ids),
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False)


def _added(number: int, name: str) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": name, "special": True, **flags}


def _merges(names: list[str], ids: dict[str, int]) -> list[list[str]]:
    """Returns all pairs of pieces whose concatenation is a piece, ordered by that piece's id."""
    merges = []
    for name in names:
        pairs = [(name[:cut], name[cut:]) for cut in range(1, len(name))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return [list(pair) for pair in merges]


def tokenizer_config(longest: int) -> dict[str, object]:
    """Makes the content of ``tokenizer_config.json``.

    Args:
        longest: Maximum number of tokens of a text.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Wav2Vec2Processor",
        "unk_token": UNKNOWN,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }
