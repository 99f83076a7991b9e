"""``mmdecode ask``: answers questions about images."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TextColumn

from mmdecode.cli.flags import (
    Device,
    DeviceMap,
    Dtype,
    NoiseBy,
    Overwrite,
    PromptCacheBytes,
    Quantize,
    model_help,
    refuse_without,
)
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.cli.progress import progress_bar, resumable, tell_batch_size
from mmdecode.runs.console import console, out, warnings_shown, without_other_bars
from mmdecode.runs.journal import Unit

if TYPE_CHECKING:
    from mmdecode.runs.items import Failed
    from mmdecode.vlm.answerer import Answerer
    from mmdecode.vlm.jobs import AnswerFolder
    from mmdecode.vlm.requests import AnswerRequest
    from mmdecode.vlm.results import Answer

SAMPLING = ("temperature", "top_p", "top_k")


def command(
    context: typer.Context,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IMAGE...]", help="Images, videos, or folders to search for images."
        ),
    ] = None,
    questions: Annotated[
        list[str] | None,
        typer.Option("--question", "-q", help="Question to ask about each image; repeatable."),
    ] = None,
    together: Annotated[
        bool,
        typer.Option("--together", help="Ask about all images together, such as a video's frames."),
    ] = False,
    text_only: Annotated[bool, typer.Option("--text-only", help="Ask without an image.")] = False,
    table: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="A table of questions (.jsonl, .json, .csv or .tsv) with question, image or "
            "images, and id; or with messages, conversations in OpenAI's form.",
        ),
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(help="Folder of the table's relative paths. [default: the table's folder]"),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help=model_help("A vision-language model", "llava-hf/llava-1.5-7b-hf")),
    ] = "zoo:llava-scenes",
    guide: Annotated[
        str | None,
        typer.Option(help="Guide, as name or name:key=value,...; see 'mmdecode methods guide'."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Drafter for speed: lookup, or eagle:path=... with a drafter trained for the "
            "model; see 'mmdecode methods draft'. With --accept auto answers do not change."
        ),
    ] = None,
    accept: Annotated[
        str, typer.Option(help="Acceptance rule; with auto a drafter does not change answers.")
    ] = "auto",
    output: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder for the answers, in results.jsonl. [default: print them]"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, with the same settings.")
    ] = False,
    overwrite: Overwrite = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print each answer as it is decoded.")
    ] = False,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Hold a conversation: questions are typed, one a line; /help lists more."
        ),
    ] = False,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Questions decoded at once; answers do not depend on it.")
    ] = 8,
    prompt_cache: PromptCacheBytes = 2**30,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 128,
    frames: Annotated[
        int, typer.Option(min=1, help="Frames to read of a video, at equal distances.")
    ] = 8,
    fps: Annotated[
        float | None,
        typer.Option(help="Frames per second to read of a video, instead of --frames."),
    ] = None,
    noise_by: NoiseBy = "request",
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample tokens instead of taking the most likely.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="With --sample: sampling temperature.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="With --sample: total probability of the tokens to sample from.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="With --sample: number of tokens to sample from; 0: all.")
    ] = 0,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of questions.")] = None,
    json: JsonFlag = False,
) -> None:
    """Ask questions about images.

    Each question is asked about each image. Prints the answers or, with --out, appends a line per
    answer to results.jsonl. Images that cannot be read are listed at the end, and the exit code is
    then 1. An interrupted run is continued with --resume.

    For example:

      mmdecode ask photo.jpg -q "Is there a dog in the image?" --model llava-hf/llava-1.5-7b-hf

      mmdecode ask photo.jpg -q "Describe the image." --model llava-1.5-7b --stream --draft lookup

      mmdecode ask photos/ -q "What is in the image?" --model llava-1.5-7b --out answers

      mmdecode ask photo.jpg --chat --model llava-1.5-7b

      mmdecode ask --data questions.jsonl --model llava-1.5-7b --out answers --resume
    """
    from mmdecode.cli.conversation import converse
    from mmdecode.errors import OptionError
    from mmdecode.vlm.answerer import Answerer
    from mmdecode.vlm.options import AnswerOptions
    from mmdecode.vlm.requests import read_requests

    if not sample:
        refuse_without("--sample", SAMPLING, context)
    if output is None:
        refuse_without("--out", ["resume"], context)
    if table is None:
        refuse_without("--data", ["images"], context)
    options = AnswerOptions(
        max_new_tokens=max_new_tokens,
        do_sample=sample,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        batch_size=batch_size,
        prompt_cache=prompt_cache,
        noise_by=noise_by,
        frames=frames,
        fps=fps,
        text_only=text_only,
        margins=bool(output or json),  # a printed answer does not show them
    )
    without_other_bars()
    if chat:
        answerer = Answerer.from_pretrained(
            model, draft, guide, accept, device, dtype, quantize, seed, device_map=device_map
        )
        with warnings_shown("default"):  # every turn reads all images again
            given = dataclasses.asdict(options)
            fine = converse(answerer, _found(paths), questions or [], given, _found)
        if not fine:
            raise typer.Exit(1)
        return
    if table is None:
        requests = _asked(paths, questions, together, text_only)[:limit]
    elif paths or questions or together:
        raise OptionError(
            "--data already has images and questions; leave out IMAGE, --question and --together"
        )
    else:
        requests = read_requests(table, limit, images, failing=True)
    load: dict[str, Any] = {
        "model_id": model,
        "draft": draft,
        "guide": guide,
        "accept": accept,
        "dtype": dtype,
        "seed": seed,
    }
    if quantize is not None:  # as before there was a choice
        load["quantize"] = quantize
    # what may change an answer; the batch does not
    settings = {**dataclasses.asdict(options), **load}
    for name in ("noise_by", "frames", "fps"):  # as before there was a choice
        if settings[name] == getattr(AnswerOptions, name):
            del settings[name]
    for name in ("batch_size", "prompt_cache", "margins", "trace", "first_logits"):
        del settings[name]
    tally = _Tally()
    with warnings_shown("always"), contextlib.ExitStack() as stack:
        file = None
        units = [Unit(requests, batch_size)]
        if output is not None:  # refused before a model is loaded
            from mmdecode.runs.files import claimed
            from mmdecode.vlm.jobs import AnswerFolder

            file = AnswerFolder(
                output,
                settings,
                requests,
                batch_size=batch_size,
                resume=resume,
                overwrite=overwrite,
                command=sys.argv[1:],
            )
            stack.enter_context(resumable(output, len(requests), lambda: tally.done))
            stack.enter_context(claimed(output))
            stack.enter_context(contextlib.closing(file.open(file.prepare())))
            units = file.units()
            tell_batch_size(units, batch_size)
            tally.done_before = sum(request.id in file.done for request in requests)
            tally.changed = len(file.changed)
        show = _Shown(requests)
        if any(unit.items for unit in units):
            answerer = Answerer.from_pretrained(**load, device=device, device_map=device_map)
            given = dataclasses.asdict(options)
            started = time.perf_counter()
            for answer in (
                _streamed(answerer, requests, given, show)
                if stream
                else _with_bar(answerer, units, given, file)
            ):
                if file and answer.id in file.done:
                    continue  # of a unit that was interrupted
                (tally.failures if answer.error else tally.answers).append(answer)
                if file:
                    file.add(answer)
            tally.wall_s = time.perf_counter() - started
            tally.stats = answerer.stats.as_dict()
        if file:
            file.finish()
    _report(tally, output, None if stream else show, json)
    if tally.failures:
        raise typer.Exit(1)


def refuse(given: Mapping[str, Any]) -> None:
    """Refuses arguments that do not go together.

    Raises:
        OptionError: They do not.
    """
    from mmdecode.errors import OptionError

    others = ("output", "json", "table", "together", "stream")
    if given["chat"] and any(given[name] for name in others):
        raise OptionError("--chat talks; leave out --out, --json, --data, --together and --stream")
    if given["stream"] and (given["output"] or given["json"]):
        raise OptionError("--stream prints pieces of answers; leave out --out and --json")


@dataclass
class _Tally:
    """Counts, answers and failures of the run, for its summary."""

    done_before: int = 0
    changed: int = 0
    answers: list[Answer] = field(default_factory=list)
    failures: list[Answer] = field(default_factory=list)
    wall_s: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Number of questions that have an answer."""
        return self.done_before + len(self.answers)


def _asked(
    paths: list[str] | None, questions: list[str] | None, together: bool, text_only: bool
) -> list[AnswerRequest]:
    """Makes requests from the images and questions on the command line, in order."""
    from mmdecode.errors import OptionError
    from mmdecode.vlm.requests import asked_of

    if not questions:
        raise OptionError("nothing to ask; give -q with a question, or --data with a table")
    if bool(paths) == text_only:
        raise OptionError(
            "--text-only asks without an image; leave out the images"
            if paths
            else "no image to ask about; give one, or --text-only for a question without an image"
        )
    return asked_of(_found(paths), questions, together)


def _found(paths: Sequence[str] | None) -> list[str]:
    """Finds the images that are named on the command line."""
    from mmdecode.runs.inputs import find_files
    from mmdecode.vlm.images import SUFFIXES

    with warnings_shown("always"):  # of links that are skipped
        return find_files(paths or (), SUFFIXES, "image")


def _with_bar(
    answerer: Answerer,
    units: Sequence[Unit[AnswerRequest]],
    options: dict[str, Any],
    file: AnswerFolder | None,
) -> Iterator[Answer]:
    """Yields answers unit by unit."""
    from mmdecode.runs.items import Watch
    from mmdecode.vlm import crashes

    def noted(request: AnswerRequest) -> AnswerRequest:
        if not file:
            return request
        images = tuple(crashes.watched(one, file.reading) for one in request.images)
        problem = request.problem or file.batches.problem(request.id)
        return file.noted(dataclasses.replace(request, images=images, problem=problem))

    watch = file.watch if file else Watch()
    with progress_bar(TextColumn("{task.fields[failed]}")) as bar:
        total = sum(len(unit.items) for unit in units)
        task = bar.add_task("asking", total=total, failed="")
        failed = 0
        for unit in units:
            how = options | {"batch_size": unit.batch_size}
            for answer in answerer.answers(list(map(noted, unit.items)), watch=watch, **how):
                failed += answer.error is not None
                bar.update(task, advance=1, failed=f"{failed} failed" if failed else "")
                yield answer


def _streamed(
    answerer: Answerer, requests: list[AnswerRequest], options: dict[str, Any], show: _Shown
) -> Iterator[Answer]:
    """Yields answers one after the other, each printed while it is decoded."""
    from mmdecode.runs.items import Watch

    yield from Watch().released(_pieced(answerer, requests, options, show))


def _pieced(
    answerer: Answerer, requests: list[AnswerRequest], options: dict[str, Any], show: _Shown
) -> Iterator[tuple[Answer, Failed | None]]:
    """See `_streamed`; if a question fails, its answer holds the error."""
    from mmdecode.errors import InputError
    from mmdecode.runs.items import Failed, tried
    from mmdecode.vlm.answerer import MEMORY_HINT
    from mmdecode.vlm.results import Answer

    for request in requests:
        names = tuple(image.name for image in request.images)
        answer = Answer(id=request.id, index=request.index, images=names, question=request.text)
        text = ""
        if request.problem is not None:
            failed = Failed.of(InputError(request.problem), MEMORY_HINT)
            yield dataclasses.replace(answer, error=failed.error, kind=failed.kind), failed
            continue
        pieces = answerer.pieces(request, **options)
        while isinstance(piece := tried(partial(next, pieces, None), MEMORY_HINT), str):
            # rich prints whole lines only where there is no terminal
            out.file.write(piece if text else show.before(answer) + piece.lstrip())
            out.file.flush()
            text += piece
        if text or piece is None:
            out.file.write("\n")
        if isinstance(piece, Failed):
            yield dataclasses.replace(answer, error=piece.error, kind=piece.kind), piece
        else:
            yield dataclasses.replace(answer, text=text.strip()), None


class _Shown:
    """Heading of each printed answer: its images and question, where answers differ in them."""

    def __init__(self, requests: list[AnswerRequest]) -> None:
        self.images = len({tuple(i.name for i in request.images) for request in requests}) > 1
        self.questions = len({request.text for request in requests}) > 1

    def before(self, answer: Answer) -> str:
        """Returns the heading of an answer, which ends with a space if it is not empty."""
        parts = [", ".join(answer.images) + ":"] if self.images else []
        parts += [answer.question] if self.questions else []
        # names of files need not be UTF-8
        return "".join(f"{p} " for p in parts).encode("utf-8", "backslashreplace").decode()


def _report(tally: _Tally, output: Path | None, show: _Shown | None, as_json: bool) -> None:
    answers = sorted(tally.answers, key=lambda answer: answer.index)
    failures = sorted(tally.failures, key=lambda answer: answer.index)
    if as_json:
        from mmdecode.vlm.jobs import as_line

        emit_json(
            {
                "answered": len(answers),
                "resumed": tally.done_before,
                "changed": tally.changed,
                "failed": len(failures),
                "wall_s": round(tally.wall_s, 3),
                "stats": tally.stats,
                "output": output,
                "answers": None if output else [as_line(answer) for answer in answers],
                "failures": [as_line(answer) for answer in failures],
            }
        )
    elif not output and show:
        for answer in answers:
            line = show.before(answer) + answer.text
            out.print(line, markup=False, highlight=False, soft_wrap=True)
    line = f"{len(answers)} answered, {tally.done_before} done before, {len(failures)} failed"
    if tally.changed:
        line += f", {tally.changed} changed since and done again"
    if tally.stats.get("tokens") and tally.wall_s:
        line += f"; {tally.stats['tokens']} tokens in {tally.wall_s:.1f} s"
        if tally.stats["drafted"]:
            line += f", {tally.stats['acceptance_length']:.2f} per pass"
    console.print(line, highlight=False, soft_wrap=True)
    for failure in failures:
        console.print(
            f"failed: {failure.error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
