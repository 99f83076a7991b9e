"""``mmdecode bench``: compares the speed of drafters with decoding without a drafter.

Speech recognisers have a command of their own, `mmdecode.cli.bench_asr`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from mmdecode import registry
from mmdecode.cli import flags
from mmdecode.cli.bench_asr import RESULTS, asr, stage
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.cli.shared import Group, warn_of_load
from mmdecode.errors import OptionError, UnsupportedModelError
from mmdecode.runs.console import only_our_output, out, print_line, progress_bar
from mmdecode.runs.files import explained, marked_json, refuse_foreign, write_file

if TYPE_CHECKING:
    from mmdecode.evaluation.speed.draft_speed import Speed

app = typer.Typer(help="Measure the speed of drafters.", cls=Group, add_completion=False)
SCENES = "zoo:scenes"


@app.callback()
def group() -> None:
    """Measure the speed of drafters against decoding without a drafter."""


def vlm(
    model: Annotated[
        str, flags.model_option("A vision-language model", "llava-hf/llava-1.5-7b-hf")
    ] = "zoo:llava-scenes",
    draft: flags.Texts = None,
    guide: str | None = None,
    data: str = SCENES,
    batch_size: Annotated[list[int] | None, typer.Option(min=1)] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    limit: flags.AtLeast1 = 16,
    repeats: flags.AtLeast1 = 1,
    peers: bool = True,
    out_dir: Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
    device_map: str | None = None,
    dtype: str = "auto",
    quantize: flags.Rounding = None,
    seed: int = 0,
    json: JsonFlag = False,
) -> None:
    """Time drafters on your own model, images and machine, against decoding without a drafter.

    All decoders get the same prompts, in turns. Decoding without a drafter is timed twice: the
    difference between these two rows is the noise of the measurement. Close other programs; the
    system load is reported.

    For example:

      mmdecode bench vlm --model llava-1.5-7b --draft lookup --draft recycling --batch-size 4

      mmdecode bench vlm --model my-llava --draft eagle:path=my-drafter --data questions.jsonl

    Options:
        draft: Drafter, as name or name:key=value,...; see 'mmdecode methods draft'. Repeatable.
            [default: lookup]
        guide: Guide, as name or name:key=value,...; see 'mmdecode methods guide'.
        data: A table of questions about images, as for 'mmdecode ask', or zoo:scenes.
        batch_size: Questions decoded at once; repeatable. [default: 1]
        temperature: Sampling temperature, 0: greedy; repeatable. [default: 0]
        max_new_tokens: Maximum tokens of an answer.
        limit: Maximum number of questions.
        repeats: Number of timed runs.
        peers: Also time transformers' own generate.
        out_dir (--out): Folder for results.json, written after each setting.
        seed: Seed of sampling.
    """
    from mmdecode._compat import input_device
    from mmdecode.evaluation.speed import draft_speed
    from mmdecode.evaluation.speed.stopwatch import load, machine
    from mmdecode.quantization.models import format_of
    from mmdecode.vlm import Answerer

    if out_dir is not None:
        refuse_foreign([out_dir / RESULTS], overwrite)
    only_our_output()
    _refuse_others(model)
    answerer = Answerer.from_pretrained(
        model, device=device, dtype=dtype, quantize=quantize, device_map=device_map
    )
    at_hand = registry.context_of(answerer.model, answerer.processor, model)
    names = ["lookup"] if draft is None else draft
    facts = machine(input_device(answerer.model), dtype)
    if (rounded := format_of(answerer.model)) is not None:
        facts["quantize"] = rounded
    warn_of_load(facts["load_at_start"])
    cases: list[dict[str, Any]] = []
    results = {"machine": facts, "cases": cases}
    for size in batch_size or [1]:
        batches = prompts_of(answerer, data, limit, size)
        asked = draft_speed.PEERS if peers and guide is None else {}
        others, failed = draft_speed.working(answerer.model, batches[0], asked)
        for heat in temperature or [0.0]:
            setting = draft_speed.Setting(
                max_new_tokens=max_new_tokens, temperature=heat, seed=seed, repeats=repeats
            )
            drafts = {name: registry.create("draft", name, **at_hand) for name in names}
            guiding = None if guide is None else registry.create("guide", guide, **at_hand)
            title = f"batch {size}, temperature {heat:g}" + (f", {guide}" if guide else "")
            with progress_bar() as bar:
                total = draft_speed.calls(len(batches), len(drafts), len(others), setting)
                done = stage(bar, title, total)
                found = draft_speed.measure(
                    answerer.model, batches, drafts, setting, guide=guiding, peers=others, done=done
                )
            confident = draft_speed.confidence(answerer.model, batches, setting, guiding)
            case: dict[str, Any] = {"model": model, "guide": guide, "batch": size}
            case |= {"batches": len(batches), "temperature": heat, "max_new_tokens": max_new_tokens}
            rows = [asdict(row) for row in found]
            cases.append(case | confident | {"left_out": failed, "rows": rows})
            if not json:
                title += f"; {confident['entropy_bits']:.2f} bits a token"
                out.print(table_of(found, title, failed))
            facts["load_at_end"] = load()
            if out_dir is not None:
                with explained(out_dir):
                    write_file(out_dir / RESULTS, marked_json(results, None), overwrite)
    if json:
        emit_json(results)
    elif out_dir is not None:
        print_line(str(out_dir / RESULTS))


app.command("asr")(flags.documented(asr))
app.command("vlm")(flags.documented(vlm))


def _refuse_others(model: str) -> None:
    """Refuses a model that answers no questions about images.

    Raises:
        UnsupportedModelError: It is of another kind.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    from mmdecode.image_ar.loading import config_of  # knows our own model types too

    config = config_of(model)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UnsupportedModelError(
            f"bench vlm times vision-language models; {model} is a {config.model_type} model: "
            "compare drafters by 'mmdecode bench asr' for a speech recogniser, and for others in "
            "Python, by decoder.stats and a clock (docs/first_steps.md, which drafter is quickest)"
        )


def prompts_of(answerer: Any, data: str, limit: int, size: int) -> list[dict[str, Any]]:
    """Returns the model inputs of each full batch; a last smaller batch is left out.

    Args:
        answerer: Answerer of the model, whose processor makes the inputs.
        data: Table of questions, or ``zoo:scenes``.
        limit: Maximum number of questions.
        size: Questions per batch.

    Raises:
        OptionError: There are fewer questions than ``size``.
    """
    from mmdecode.vlm.requests import read_requests
    from mmdecode.zoo.scene_sets import descriptions

    requests = descriptions(limit) if data == SCENES else read_requests(data, limit)
    if len(requests) < size:
        raise OptionError(f"{len(requests)} questions for a batch of {size}; raise --limit")
    starts = range(0, len(requests) - size + 1, size)
    return [answerer.prompts.read(requests[at : at + size]) for at in starts]


def table_of(found: Sequence[Speed], title: str, failed: Mapping[str, str]) -> Table:
    """Makes the table of speeds; its caption says which decoders could not be timed, and why."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold")
    names = ["tokens\na pass", "draft's\nshare", "first\nms", "ms a\ntoken", "decoding"]
    for name in [*names, "end to\nend", "same"]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        value, low, high = row.decode
        table.add_row(
            row.way,
            "" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}",
            "" if row.draft_share is None else f"{row.draft_share:.0%}",
            f"{row.first_token_ms:.0f}",
            f"{row.ms_per_token:.2f}",
            f"x{value:.2f} [{low:.2f}, {high:.2f}]",
            f"x{row.end_to_end[0]:.2f}",
            "" if row.identical is None else f"{row.identical:.0%}",
        )
    if failed:
        lines = [f"{name}: not timed. {why[0].upper()}{why[1:]}" for name, why in failed.items()]
        table.caption, table.caption_justify = "\n".join(map(escape, lines)), "left"
    return table
