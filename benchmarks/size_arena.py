"""What the second call of a shape allocates and captures; see `real_sizes.py`.

Without a GPU rounds are captured on a tape, which replays as a CUDA graph does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import size_models as models
import torch
from size_prefill import decode
from size_rows import Row, paths_of, row

from mmdecode.decoder import Decoder
from mmdecode.engine import capture, host
from mmdecode.testing import tape

COUNTED = {"cache storage allocated": "storage allocated", "rounds captured": "graph captured"}
"""Keys of `mmdecode.engine.stats.Stats.paths` by what they count."""
DRAFTS = (None, "lookup", "recycling", "layer_skip:exit_layer=1", "sparse")


@contextmanager
def capturing() -> Iterator[str]:
    """Captures rounds; yields what they are captured by."""
    if torch.cuda.is_available():
        yield "CUDA graphs"
        return
    with ExitStack() as stack:
        stack.enter_context(patch.object(capture, "available", lambda device: True))
        stack.enter_context(patch.object(capture, "record", tape.record))
        stack.enter_context(patch.object(host, "may_read", lambda device: False))
        yield "a tape"


def rows(new: int = 24) -> Iterator[Row]:
    """The second call of a shape, by drafter."""
    subject = models.tiny_models()["tiny LLaVA"]()
    for draft in DRAFTS:
        with capturing() as way:
            decoder = Decoder(draft, compile=True)
            expected = decode(subject, new)
            decode(subject, new, decoder)
            first = paths_of(decoder) or {}
            decoder.stats.reset()
            same = bool(torch.equal(decode(subject, new, decoder), expected))
            second = paths_of(decoder) or {}
        for what, key in COUNTED.items():
            yield row(
                "arena",
                f"draft {draft}" if draft else "no draft",
                f"{subject.note}, {new} tokens, captured by {way}",
                measure=what,
                unit="",
                reference="the first call",
                theirs=float(first.get(key, 0)),
                ours=float(second.get(key, 0)),
                bar=0.0,
                absolute=True,
                same_ids=same,
                expects=["storage reused"],
                paths={name: n for name, n in second.items() if name == "storage reused"},
            )
