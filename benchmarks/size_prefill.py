"""Prompts that are read: memory and time against ``generate``. A part of real_sizes.py.

A case is timed in one process, both ways interleaved. Its memory is the peak of a process of its
own for each way, over what that process held with the model loaded and warmed; it fails, and not
the machine, where it needs more than a limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import size_models as models
import torch
import transformers
from size_models import Subject
from size_rows import CPU, Pair, Row, child_peak, limited, paths_of, peaks, row

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.evaluation.speed import stopwatch
from mmdecode.train.drafters.recipes import RECIPES, Options

SCRIPT = Path(__file__).with_name("real_sizes.py")
UNPADDED = ("prefill causal", "prefill in chunks")
BY_ROWS = ("prefill by rows", "prefill in chunks")
LEAN = tuple(dict.fromkeys(UNPADDED + BY_ROWS))
"""Paths of a prompt that build no mask of all queries and keys."""
MASKED = ("prefill masked",)
"""Path of a prompt that cannot be read otherwise."""
STEPS = ("step unmasked",)
"""Path of a token after a prompt that an encoder reads; the decoder's own is one token."""
READERS = ("drafter prefill causal", "drafter prefill by rows")
READING = dict.fromkeys(("eagle", "eagle3", "dream"), READERS)
# these keep a few summaries of each image: a short prompt, with a mask
READING |= dict.fromkeys(("vispec", "flash"), (*READERS, "drafter prefill masked"))
"""Paths of drafters that read the target's states of the prompt."""
DRAFTS = {
    "lookup": "lookup",
    "lookahead": "lookahead",
    "assistant, text only": None,
    "amateur": "amateur",
    "layer_skip": "layer_skip:exit_layer=1",
    "swift": "swift",
    "clasp": "clasp",
    "sparse": "sparse",
    "eagle": None,
    "eagle3": None,
    "vispec": None,
    "dream": None,
    "flash": None,
    "kangaroo": None,
}
"""Drafters that read the prompt, by name; ``None``: untrained, as ``mmdecode train`` begins."""


@dataclass(frozen=True)
class Case:
    """A prompt and what may be spent on it.

    Attributes:
        subject: Makes model and prompt.
        expects: Paths that may run.
        draft: Name of a drafter of `DRAFTS`.
        guide: Guide of our loop, which the reference does not have.
        memory: Most memory over that of the reference.
        seconds: Most time over that of the reference.
        beyond: Most megabytes, whatever the reference takes.
        alone: Whether there is no reference, and one call that is not repeated.
        new: Tokens that are generated.
    """

    subject: Callable[[], Subject]
    expects: tuple[str, ...] = UNPADDED
    draft: str | None = None
    guide: str | None = None
    memory: float | None = None
    seconds: float | None = None
    beyond: float | None = None
    alone: bool = False
    new: int = 4
    note: str = ""


def cases(tiny: bool) -> dict[str, Case]:
    """All cases by name; the tiny ones are toys."""
    long, longest = (96, 160) if tiny else (2**14, 2**16)
    other = 72 if tiny else 12000
    size: dict[str, Any] = {"width": 64, "vocab": 600} if tiny else {}
    bars = {"memory": 1.2, "seconds": 1.1}
    side, few = (56, 2) if tiny else (448, 4)
    images = partial(models.llava, few, side, **size)
    return {
        "Llama": Case(partial(models.llama, [long], **size), **bars),
        "Llama, padded": Case(
            partial(models.llama, [long, other], **size), BY_ROWS, beyond=500.0, seconds=0.6
        ),
        "Llama, longest": Case(
            partial(models.llama, [longest], **size), UNPADDED, beyond=3000.0, alone=True
        ),
        "LLaVA": Case(partial(models.llava, 2 * few, side, **size), LEAN, **bars),
        "LLaVA, guided by vcd": Case(
            images, LEAN, guide="vcd", note="two prompts; `generate` reads one, unguided"
        ),
        "Qwen2-VL": Case(partial(models.qwen_vl, few, 8 if tiny else 64, **size), LEAN, **bars),
        "Gemma3": Case(
            partial(models.gemma, 2 if tiny else 16, 32 if tiny else 128, **size),
            MASKED,
            note="images are attended to both ways, which takes a mask: the model's own",
            **bars,
        ),
        "T5": Case(partial(models.t5, 40 if tiny else 2048, **size), STEPS, **bars),
        **{
            f"LLaVA, {name}": Case(images, LEAN + READING.get(name, ()), draft=name)
            for name in DRAFTS
        },
        "LLaVA, sparse": Case(
            images, MASKED, draft="sparse", note="reads the attention of the prompt's text"
        ),
    }


def decode(subject: Subject, new: int, decoder: Decoder | None = None, **options: Any) -> Any:
    """Ids by ``generate``, or by a decoder; greedy unless options say otherwise."""
    given = {"do_sample": False, **options}
    if decoder is not None:
        given["custom_generate"] = decoder
        if "pixel_values" in subject.inputs:
            given["mm_inputs"] = {"pixel_values": subject.inputs["pixel_values"]}
    return transformers.GenerationMixin.generate(
        subject.model, **subject.inputs, max_new_tokens=new, **given
    )


def drafter(name: str, model: Any) -> Any:
    """A drafter of `DRAFTS` for a model, chains of four where that can be chosen."""
    spec = DRAFTS[name]
    if spec is not None:
        return registry.create("draft", spec, target=model)
    kind = "text" if name.startswith("assistant") else name
    torch.manual_seed(0)
    options = Options(kind=kind, exit_layer=1) if kind == "kangaroo" else Options(kind=kind)
    module = RECIPES[kind].build(registry.adapter_for(model), [], options)
    return RECIPES[kind].draft(module.eval(), 4)


def decoders(case: Case, subject: Subject) -> dict[str, Decoder | None]:
    """Our way and the reference: ``generate``, or for a drafter our loop without one."""
    if case.draft:
        return {"ours": Decoder(drafter(case.draft, subject.model)), "undrafted": Decoder()}
    return {"ours": Decoder(guide=case.guide), "generate": None}


def child(name: str, way: str, tiny: bool, gigabytes: float) -> Row:
    """Peak megabytes of one way, in this process."""
    limited(gigabytes)
    case = cases(tiny)[name]
    subject = case.subject()
    decoder = decoders(case, subject)[way]
    if decoder is not None and case.guide is None and case.draft is None:
        warm: Callable[[], Any] = partial(warmed, subject, decoder)
    else:
        warm = partial(warmed, subject, None)
    found = child_peak(warm, partial(decode, subject, case.new, decoder))
    return found | {"paths": decoder and paths_of(decoder)}


def warmed(subject: Subject, decoder: Decoder | None) -> None:
    """Decodes a short text, and forgets that it was counted."""
    short = Subject(subject.model, subject.warm_inputs(), "")
    decode(short, 2, decoder)
    if decoder is not None:
        decoder.stats.reset()


def timed(case: Case, subject: Subject, repeats: int) -> tuple[Row, Decoder, bool | None]:
    """Keys of a row of times, our decoder, and whether the ids were those of the reference."""
    ways = decoders(case, subject)
    ours = ways["ours"]
    assert ours is not None
    if case.alone:
        seconds, _ = stopwatch.timed(CPU, partial(decode, subject, case.new, ours))
        return {"ours": round(1e3 * seconds, 1), "reference": ""}, ours, None
    calls = {name: partial(decode, subject, case.new, way) for name, way in ways.items()}
    pair = Pair(calls, repeats, done=ours.stats.reset)
    (other,) = [name for name in ways if name != "ours"]
    same = None if case.guide else pair.same("ours", other)
    return pair.between("ours", other) | {"reference": other}, ours, same


def memory(name: str, case: Case, words: list[str], repeats: int) -> Row:
    """Keys of a row of megabytes."""
    options = ["--child", name, *words]
    mine = peaks(SCRIPT, [*options, "--way", "ours"], repeats)
    found = {
        "measure": "memory over the loaded model",
        "unit": "MB",
        "error": mine.get("error", ""),
    }
    found |= {"ours": mine.get("peak_mb"), "paths": mine.get("paths"), "reference": ""}
    if not case.alone:
        other = peaks(SCRIPT, [*options, "--way", "generate"], repeats)
        found |= {"reference": "generate", "theirs": other.get("peak_mb")}
    if case.beyond is not None:
        return found | {"bar": case.beyond, "absolute": True}
    return found | {"bar": case.memory}


def rows(
    tiny: bool, repeats: int, only: str | None = None, gigabytes: float = 12.0
) -> Iterator[Row]:
    """All rows; memory is left out for drafters."""
    words = ["--threads", str(torch.get_num_threads()), "--limit-gb", str(gigabytes)]
    words += ["--tiny"] * tiny
    for name, case in cases(tiny).items():
        if only is not None and only.lower() not in name.lower():
            continue
        subject = case.subject()
        lengths = subject.inputs["attention_mask"].sum(1).tolist()
        prompt = " and ".join(f"{length:,}" for length in lengths)
        what = f"{subject.note}; a prompt of {prompt} tokens, {case.new} new"
        make: Callable[..., Row] = partial(row, "prefill", name, what, expects=list(case.expects))
        room: Mapping[str, Any] = {}
        if case.draft is None:
            room = memory(name, case, words, max(1, repeats - 2))
            yield make(**room)
        if room.get("error"):
            yield make(measure="time", error=f"{room['error']}, so not timed", bar=case.seconds)
            continue
        try:
            spent, decoder, same = timed(case, subject, repeats)
        except Exception as error:
            first = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
            # a drafter that this model cannot have is no fault of the path
            refused = case.draft is not None and isinstance(error, IncompatibleError | OptionError)
            kind = "note" if refused else "error"
            yield make(measure="time", bar=case.seconds, **{kind: first})
            continue
        yield make(
            **spent,
            measure="time",
            bar=case.seconds,
            same_ids=same,
            paths=paths_of(decoder),
            note=case.note,
        )


def main(arguments: Any) -> None:
    """Prints the memory of one way as JSON."""
    torch.set_num_threads(arguments.threads[0])
    print(json.dumps(child(arguments.child, arguments.way, arguments.tiny, arguments.limit_gb)))
