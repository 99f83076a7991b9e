"""Six questions about one image: their prompts read once, against each read whole.

A part of real_sizes.py. The model has the shape of Qwen2.5-0.5B behind a CLIP of 1,024 patches;
questions differ in length and are answered by two tokens, as by yes and an end. Each call begins
with an empty prompt cache. The reference is our loop without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import size_models as models
import torch
from size_models import BEGIN, END, IMAGE, Subject, finished, text, tower, words
from size_rows import Pair, Row, child_peak, limited, paths_of, peaks, row
from transformers import AutoModelForImageTextToText, LlavaConfig

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.engine.prompt_cache import PromptCache

SCRIPT = Path(__file__).with_name("real_sizes.py")
NAME = "questions"
QUESTIONS, NEW = 6, 2
TIME, MEMORY = 0.3, 1.0
"""Bars: most of the reference's."""


def subject(tiny: bool) -> Subject:
    """The model, and a prompt for each question."""
    torch.manual_seed(0)
    side = 56 if tiny else 448
    width, layers, vocab = (64, 2, 600) if tiny else (896, 24, 151936)
    more = {} if tiny else {"intermediate_size": 4864, "num_attention_heads": 14}
    sizes = text(width, vocab) | {"num_hidden_layers": layers, "num_key_value_heads": 2} | more
    vision = tower(side, 14)
    if not tiny:
        vision |= {"hidden_size": 768, "intermediate_size": 3072}
        vision |= {"num_hidden_layers": 12, "num_attention_heads": 12}
    config = LlavaConfig(
        text_config={"model_type": "qwen2", **sizes},
        vision_config={"model_type": "clip_vision_model", **vision},
        image_token_index=IMAGE,
        tie_word_embeddings=True,
    )
    model = finished(AutoModelForImageTextToText.from_config(config))
    each = (side // 14) ** 2
    begin = [*words(1, 8, vocab)[0].tolist(), BEGIN, *[IMAGE] * each, END]
    asked = [
        begin + words(1, 10 + 2 * number, vocab, seed=number)[0].tolist()
        for number in range(QUESTIONS)
    ]
    longest = max(map(len, asked))
    inputs = {
        "input_ids": torch.tensor([[0] * (longest - len(one)) + one for one in asked]),
        "attention_mask": torch.tensor(
            [[0] * (longest - len(one)) + [1] * len(one) for one in asked]
        ),
        "pixel_values": torch.randn(1, 3, side, side).repeat(QUESTIONS, 1, 1, 1),
    }
    note = (
        f"Qwen2, {layers} layers of width {width}, V = {vocab:,}, behind a CLIP of {each:,} tokens"
    )
    return Subject(model, inputs, note)


def calls(found: Subject) -> tuple[dict[str, Callable[[], Any]], Decoder]:
    """Both ways, and the decoder of ours."""
    ours, whole = Decoder(), Decoder()

    def call(decoder: Decoder, cache: PromptCache | None) -> Any:
        kept = {"decoder": decoder, "prompt_cache": cache}
        given = {"do_sample": False, "max_new_tokens": NEW}
        return mmdecode.generate(found.model, **found.inputs, **given, **kept)

    return {"ours": lambda: call(ours, PromptCache()), "whole": lambda: call(whole, None)}, ours


def rows(tiny: bool, repeats: int, gigabytes: float = 12.0) -> Iterator[Row]:
    """Time and memory."""
    found = subject(tiny)
    lengths = found.inputs["attention_mask"].sum(1).tolist()
    what = f"{found.note}; {QUESTIONS} prompts of {min(lengths):,} to {max(lengths):,} tokens"
    expects = ["prefill of prefixes", "prefill continued"]
    make = partial(row, NAME, "questions about one image", f"{what}, {NEW} new", expects=expects)
    options = ["--child", NAME, "--threads", str(torch.get_num_threads()), *["--tiny"] * tiny]
    options += ["--limit-gb", str(gigabytes)]
    mine, other = (peaks(SCRIPT, [*options, "--way", way], 1) for way in ("ours", "whole"))
    yield make(
        measure="memory over the loaded model",
        unit="MB",
        ours=mine.get("peak_mb"),
        theirs=other.get("peak_mb"),
        paths=mine.get("paths"),
        error=mine.get("error", ""),
        reference="prompts read whole",
        bar=None if tiny else MEMORY,
    )
    ways, decoder = calls(found)
    pair = Pair(ways, repeats, done=decoder.stats.reset)
    yield make(
        **pair.between("ours", "whole"),
        measure="time",
        reference="prompts read whole",
        paths=paths_of(decoder),
        same_ids=pair.same("ours", "whole"),
        bar=None if tiny else TIME,
        note="{read:,} tokens of prompts read, {reused:,} reused".format(
            **decoder.stats.prompt_tokens
        ),
    )


def main(arguments: Any) -> None:
    """Prints the memory of one way as JSON."""
    torch.set_num_threads(arguments.threads[0])
    limited(arguments.limit_gb)
    found = subject(arguments.tiny)
    ways, decoder = calls(found)
    short = models.Subject(found.model, found.warm_inputs(), "")

    def warm() -> None:
        mmdecode.generate(short.model, **short.inputs, decoder=Decoder(), max_new_tokens=2)

    peak = child_peak(warm, ways[arguments.way])
    print(json.dumps(peak | {"paths": paths_of(decoder)}))
