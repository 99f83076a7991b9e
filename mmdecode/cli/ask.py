"""``mmdecode ask``: answers questions about images."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdecode.cli import flags
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.console import console, out, print_line, warnings_shown, without_other_bars
from mmdecode.runs.distributed import local_device
from mmdecode.runs.engines import TIME_LIMIT_S
from mmdecode.runs.inputs import find_files
from mmdecode.runs.items import Failed, Watch, tried
from mmdecode.runs.work import Tally, run

if TYPE_CHECKING:
    from mmdecode.vlm.answerer import Answerer
    from mmdecode.vlm.requests import AnswerRequest
    from mmdecode.vlm.results import Answer

SAMPLING = ("temperature", "top_p", "top_k")


def command(
    context: typer.Context,
    paths: Annotated[flags.Texts, typer.Argument(metavar="[IMAGE...]")] = None,
    questions: flags.Texts = None,
    together: bool = False,
    text_only: bool = False,
    table: str | None = None,
    images: str | None = None,
    model: Annotated[
        str, flags.model_option("A vision-language model", "llava-hf/llava-1.5-7b-hf")
    ] = "zoo:llava-scenes",
    guide: str | None = None,
    draft: str | None = None,
    accept: str = "auto",
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    stream: bool = False,
    chat: bool = False,
    batch_size: flags.AtLeast1 = 8,
    prompt_cache: flags.Bytes = 2**30,
    max_new_tokens: flags.AtLeast1 = 128,
    frames: flags.AtLeast1 = 8,
    fps: float | None = None,
    noise_by: flags.NoiseBy = "request",
    sample: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: flags.AtLeast0 = 0,
    engine: flags.EngineName = "local",
    workers: flags.Workers = None,
    shard: flags.Share = None,
    time_limit_s: flags.Seconds = TIME_LIMIT_S,
    gpus: flags.GPUs = None,
    cpus: flags.CPUs = 1,
    device: str = "auto",
    device_map: str | None = None,
    dtype: str = "auto",
    quantize: flags.Rounding = None,
    seed: int = 0,
    limit: flags.Limit = None,
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

      accelerate launch -m mmdecode ask --data questions.jsonl --model llava-1.5-7b --out answers

    Options:
        paths: Images, videos, or folders to search for images.
        questions (--question, -q): Question to ask about each image; repeatable.
        together: Ask about all images together, such as a video's frames.
        text_only: Ask without an image.
        table (--data): A table of questions (.jsonl, .json, .csv or .tsv) with question, image or
            images, and id; or with messages, conversations in OpenAI's form.
        images: Folder of the table's relative paths. [default: the table's folder]
        draft: Drafter for speed: lookup, or eagle:path=... with a drafter trained for the model;
            see 'mmdecode methods draft'. With --accept auto answers do not change.
        accept: Acceptance rule; with auto a drafter does not change answers.
        output (--out): Folder for the answers, in results.jsonl. [default: print them]
        stream: Print each answer as it is decoded.
        chat: Hold a conversation: questions are typed, one a line; /help lists more.
        batch_size: Questions decoded at once; answers do not depend on it.
        max_new_tokens: Maximum tokens of an answer.
        frames: Frames to read of a video, at equal distances.
        fps: Frames per second to read of a video, instead of --frames.
        sample: Sample tokens instead of taking the most likely.
        temperature: With --sample: sampling temperature.
        top_p: With --sample: total probability of the tokens to sample from.
        top_k: With --sample: number of tokens to sample from; 0: all.
    """
    given = dict(locals())

    from mmdecode.cli.conversation import converse
    from mmdecode.vlm.answerer import Answerer
    from mmdecode.vlm.jobs import AnswerFolder
    from mmdecode.vlm.options import AnswerOptions
    from mmdecode.vlm.requests import read_requests

    flags.refuse_without("--sample", SAMPLING, context, sample)
    flags.refuse_without("--out", ["resume"], context, output)
    flags.refuse_without("--data", ["images"], context, table is not None)
    # a printed answer does not show margins
    shown = {"do_sample": sample, "margins": bool(output or json)}
    options = AnswerOptions(**flags.fields_of(AnswerOptions, given) | shown)
    how = dataclasses.asdict(options)
    without_other_bars()
    load: dict[str, Any] = {"model_id": model}
    load |= flags.picked(given, "draft guide accept dtype seed", later="quantize")
    work = flags.work_of(given)
    loaded = partial(
        Answerer.from_pretrained, **load, device=local_device(device), device_map=device_map
    )
    if chat:
        answerer = loaded()
        with warnings_shown("default"):  # every turn reads all images again
            fine = converse(answerer, _found(paths), questions or [], how, _found)
        raise typer.Exit(0 if fine else 1)
    if table is None:
        requests = _asked(paths, questions, together, text_only)[:limit]
    elif paths or questions or together:
        raise OptionError(
            "--data already has images and questions; leave out IMAGE, --question and --together"
        )
    else:
        requests = read_requests(table, limit, images, failing=True)
    # what may change an answer; the batch does not
    left_out = {"batch_size", "prompt_cache", "margins", "trace", "first_logits"}
    for name in ("noise_by", "frames", "fps"):  # as before there was a choice
        if how[name] == getattr(AnswerOptions, name):
            left_out.add(name)
    settings = {name: value for name, value in (how | load).items() if name not in left_out}
    show = _Shown(requests)
    with warnings_shown("always"), contextlib.ExitStack() as stack:
        if stream:
            tally = _streamed(loaded(), requests, how, show)
        else:
            target = output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = AnswerFolder(
                *(target, settings, requests, how),
                **flags.picked(given, "batch_size resume overwrite"),
                command=sys.argv[1:],
            )
            tally = run(folder, loaded, keep=not output, temporary=not output, **work)
    _report(tally, output, None if stream else show, json)
    if not tally.fine:
        raise typer.Exit(1)


def refuse(given: Mapping[str, Any]) -> None:
    """Refuses arguments that do not go together.

    Raises:
        OptionError: They do not.
    """
    others = ("output", "json", "table", "together", "stream")
    if given["chat"] and any(given[name] for name in others):
        raise OptionError("--chat talks; leave out --out, --json, --data, --together and --stream")
    if given["stream"] and (given["output"] or given["json"]):
        raise OptionError("--stream prints pieces of answers; leave out --out and --json")


def _asked(
    paths: list[str] | None, questions: list[str] | None, together: bool, text_only: bool
) -> list[AnswerRequest]:
    """Makes requests from the images and questions on the command line, in order."""
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
    from mmdecode.vlm.images import SUFFIXES

    with warnings_shown("always"):  # of links that are skipped
        return find_files(paths or (), SUFFIXES, "image")


def _streamed(
    answerer: Answerer, requests: list[AnswerRequest], options: dict[str, Any], show: _Shown
) -> Tally:
    """Answers one question after the other, and prints each answer while it is decoded."""
    tally, started = Tally(), time.perf_counter()
    for answer in Watch().released(_pieced(answerer, requests, options, show)):
        tally.add(answer.index, answer, keep=False)
    tally.wall_s, tally.stats = time.perf_counter() - started, answerer.stats.as_dict()
    return tally


def _pieced(
    answerer: Answerer, requests: list[AnswerRequest], options: dict[str, Any], show: _Shown
) -> Iterator[tuple[Answer, Failed | None]]:
    """Yields answers one after the other, each printed while it is decoded.

    If a question fails, its answer holds the error, which is the second of the pair.
    """
    from mmdecode.vlm.answerer import MEMORY_HINT
    from mmdecode.vlm.results import Answer

    for request in requests:
        names = tuple(image.name for image in request.images)
        answer = Answer(id=request.id, index=request.index, images=names, question=request.text)
        text = ""
        pieces = answerer.pieces(request, **options) if request.problem is None else iter(())
        while isinstance(piece := tried(partial(next, pieces, None), MEMORY_HINT), str):
            # rich prints whole lines only where there is no terminal
            out.file.write(piece if text else show.before(answer) + piece.lstrip())
            out.file.flush()
            text += piece
        if request.problem is not None:
            piece = Failed.of(InputError(request.problem), MEMORY_HINT)
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


def _report(tally: Tally, output: Path | None, show: _Shown | None, as_json: bool) -> None:
    results = tally.results.values()
    if as_json:
        from mmdecode.vlm.jobs import as_line

        emit_json(
            {
                "answered": tally.done,
                "resumed": tally.done_before,
                "changed": tally.changed,
                "failed": len(tally.failures),
                "wall_s": round(tally.wall_s, 3),
                "stats": tally.stats,
                "output": output,
                "answers": None if output else [as_line(answer) for answer in results],
                "failures": [as_line(answer) for answer in tally.failures.values()],
            }
        )
    elif not output and show:
        for answer in results:
            print_line(show.before(answer) + answer.text)
    print_line(tally.counted("answered") + tally.speed(), console)
    for failure in tally.failures.values():
        print_line(f"failed: {failure.error}", console, "red")
