"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``, as OpenAI's clients call them.

Each field of a form is honoured, or answered with 400 that names it. Text comes in the format that
was asked for, or, with ``stream``, segment by segment as server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import UploadFile

from mmdecode.asr.languages import language_name
from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.output.formats import srt, vtt, whisper_json
from mmdecode.asr.results import Failure, Segment, Transcript
from mmdecode.errors import MMDecodeError
from mmdecode.serve.limits import LATER, UNTIL, Refusal, is_text
from mmdecode.serve.service import Channel, Service, refusal_of, refusal_of_failure
from mmdecode.serve.speech import SpeechWorker

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
MOST_TEXT = 10_000
"""Characters of a field that is a text."""
_NO_TEXT = "a field is not UTF-8 text; write all as UTF-8, and leave out 'charset'"

Found = tuple[list[Segment], Transcript | Failure | None]


@dataclass(frozen=True, kw_only=True)
class Form:
    """Fields of a request.

    Attributes:
        data: Content of the file.
        model: Name of the model.
        response_format: One of `FORMATS`.
        words: Whether words have times.
        segments: Whether segments are listed.
        stream: Whether text is sent as it comes.
        options: Fields of `TranscribeOptions`, by the field of the request that sets them.
    """

    data: bytes
    model: str
    response_format: str
    words: bool
    segments: bool
    stream: bool
    options: Mapping[str | None, Mapping[str, Any]]


def routes(service: Service) -> APIRouter:
    """Returns the endpoints for files."""
    router = APIRouter()

    @router.post("/v1/audio/transcriptions")
    async def transcriptions(request: Request) -> Response:
        return await _answer(service, request, "transcribe")

    @router.post("/v1/audio/translations")
    async def translations(request: Request) -> Response:
        return await _answer(service, request, "translate")

    return router


async def _answer(service: Service, request: Request, task: str) -> Response:
    """Answers a request for the text of a file."""
    form = await read_form(request, task)
    worker = service.speech_for(form.model)
    channel: Channel[Found] = Channel()
    options = await asyncio.to_thread(_options, worker, form)
    try:
        rate = worker.transcriber.sampling_rate
        samples = await service.decoded(service.media.samples, form.data, rate, name="file")
    except MMDecodeError as error:
        raise refusal_of(error, "file") from error
    try:
        service.budget.take(samples.nbytes)
        request.scope[LATER].append(partial(service.budget.give_back, samples.nbytes))
        asked = worker.submit(samples, options, lambda *found: channel.put(found))
    except MMDecodeError as error:
        raise refusal_of(error) from error
    request.scope[LATER].append(asked.cancel)
    until_s = request.scope[UNTIL]
    if form.stream:
        events = _events(service, channel, until_s)
        return StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)
    result = None
    while result is None:
        _, result = await channel.get_for(request.receive, until_s)
    if isinstance(result, Failure):
        raise refusal_of_failure(result.error, result.kind)
    service.metrics.audio("files", result.duration_s)
    return _response(form, result, task)


def _options(worker: SpeechWorker, form: Form) -> TranscribeOptions:
    """Returns the options of a request; a refusal names the field that is to blame."""
    together = {name: value for own in form.options.values() for name, value in own.items()}
    try:
        return worker.options(**together)
    except MMDecodeError as error:
        for field, options in form.options.items():
            _refuse_field(worker, field, options)
        raise refusal_of(error) from error


def _refuse_field(worker: SpeechWorker, field: str | None, options: Mapping[str, Any]) -> None:
    """Refuses a field whose options alone are not possible."""
    try:
        worker.options(**options)
    except MMDecodeError as error:
        refusal = refusal_of(error, field)
        if field is None or refusal.status != 400:
            raise refusal from error
        # without what would have to change in Python or on a command line
        reason = str(error).partition(";")[0]
        raise Refusal(400, f"{field} is not possible here: {reason}", field) from error


UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers that keep proxies from holding events back."""


async def _events(service: Service, channel: Channel[Found], until_s: float) -> AsyncIterator[str]:
    """Yields server-sent events: new text, and at the end all of it."""
    sent, texts = "", list[str]()
    while True:
        try:
            segments, result = await channel.get(until_s)
        except Refusal as refusal:
            yield event(refusal.body)
            return
        if isinstance(result, Failure):
            yield event(refusal_of_failure(result.error, result.kind).body)
            return
        texts += [segment.text for segment in segments if segment.text]
        whole = " ".join(texts) if result is None else result.text
        if whole.startswith(sent) and whole != sent:
            yield event({"type": "transcript.text.delta", "delta": whole[len(sent) :]})
            sent = whole
        if result is not None:
            service.metrics.audio("files", result.duration_s)
            done = {"type": "transcript.text.done", "text": result.text, "usage": _usage(result)}
            yield event(done)
            return


def event(data: Mapping[str, Any]) -> str:
    """Formats a server-sent event."""
    return f"data: {json.dumps(data)}\n\n"  # of ASCII: some clients split lines at U+2028


def _usage(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(transcript.duration_s, 3)}


def _response(form: Form, transcript: Transcript, task: str) -> Response:
    """Returns a transcript in the format of the request."""
    kind = form.response_format
    if kind == "text":
        return PlainTextResponse(transcript.text + "\n")
    if kind in ("srt", "vtt"):
        text = (srt if kind == "srt" else vtt)(transcript)
        return PlainTextResponse(text, media_type="text/vtt" if kind == "vtt" else "text/plain")
    if kind == "json":
        return JSONResponse({"text": transcript.text, "usage": _usage(transcript)})
    found = json.loads(whisper_json(transcript))
    words = [word for segment in found["segments"] for word in segment.pop("words", ())]
    body: dict[str, Any] = {
        "task": task,
        "language": language_name(found["language"]),
        "duration": round(transcript.duration_s, 3),
        "text": transcript.text,
        "usage": _usage(transcript),
    }
    if form.segments:
        body["segments"] = found["segments"]
    if form.words:
        names = ("word", "start", "end")
        body["words"] = [
            {name: word[name] for name in names} | {"word": word["word"].strip()} for word in words
        ]
    return JSONResponse(body)


# ---- the form


async def read_form(request: Request, task: str) -> Form:
    """Reads the fields of a request.

    Raises:
        Refusal: A field is missing, unknown or out of range.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refusal(400, "expected a form of type multipart/form-data with a file and a model")
    fields: dict[str, list[str]] = {}
    data: bytes | None = None
    try:
        async with request.form(max_files=1, max_fields=200, max_part_size=1 << 20) as given:
            for name, value in given.multi_items():
                if not isinstance(value, UploadFile):
                    fields.setdefault(name.removesuffix("[]"), []).append(value)
                elif name == "file":
                    data = await value.read()
                else:
                    raise Refusal(400, f"{name!r} is a file; expected it as 'file'", name)
    except UnicodeError:  # of a charset that the client names
        raise Refusal(400, _NO_TEXT) from None
    if not all(is_text(text) for name, values in fields.items() for text in (name, *values)):
        raise Refusal(400, _NO_TEXT)
    if data is None:
        raise Refusal(
            400,
            "there is no 'file'; send the recording as a part of that name, with curl as "
            "-F file=@talk.mp3",
            "file",
        )
    if not data:
        raise Refusal(400, "the file is empty (0 bytes); expected a recording", "file")
    return _form(fields, data, task)


def _form(fields: dict[str, list[str]], data: bytes, task: str) -> Form:
    options: dict[str | None, dict[str, Any]] = {}
    if task == "translate":
        options[None] = {"task": task}
    known = {
        "model", "language", "languages", "prompt", "keywords", "response_format", "temperature",
        "timestamp_granularities", "stream", "chunking_strategy",
    }  # fmt: skip
    if task == "translate":
        known = {"model", "prompt", "response_format", "temperature"}
    strategy = {
        name.partition("[")[2].rstrip("]"): values[0]
        for name, values in fields.items()
        if name.startswith("chunking_strategy[")
    }
    for name, values in fields.items():
        base = name.partition("[")[0]
        if base not in known:
            raise Refusal(400, f"{base[:100]!r} is not supported here; leave it out", base[:100])
        if any(len(value) > MOST_TEXT for value in values):
            raise Refusal(400, f"{base!r} is longer than {MOST_TEXT} characters", base)
    read = partial(_value, fields)
    kind = read(
        "response_format", str, "json", lambda value: value in FORMATS, " or ".join(FORMATS)
    )
    stream = read("stream", str, "false", lambda v: v.lower() in ("true", "false"), "true or false")
    language = read("language", str, None)
    languages = fields.get("languages", [])
    if len(languages) > 1 or (languages and language):
        raise Refusal(400, "expected one language for a file; leave 'languages' out", "languages")
    if found := language or (languages[0] if languages else None):
        options["language"] = {"language": found}
    temperature = read("temperature", float, 0.0, lambda value: 0 <= value <= 1, "0 to 1")
    if temperature:
        options["temperature"] = {"temperatures": (temperature,)}
    if prompt := read("prompt", str, None):
        options["prompt"] = {"prompt": prompt}
    if keywords := fields.get("keywords"):
        options["keywords"] = {"hotwords": ", ".join(keywords)}
    if "chunking_strategy" in fields or strategy:
        kind_of_vad = read("chunking_strategy", str, strategy.pop("type", ""))
        options["chunking_strategy"] = _vad(kind_of_vad, strategy)
    granularities = fields.get("timestamp_granularities", [])
    if granularities and kind != "verbose_json":
        raise Refusal(
            400,
            "times are in 'verbose_json' alone; set response_format to it",
            "timestamp_granularities",
        )
    if wrong := set(granularities) - {"word", "segment"}:
        raise Refusal(
            400,
            f"{min(wrong)[:100]!r} has no times; expected 'word' or 'segment'",
            "timestamp_granularities",
        )
    streamed = stream.lower() == "true"
    if streamed and kind not in ("json", "text"):
        raise Refusal(400, f"{kind!r} cannot be streamed; expected json or text", "response_format")
    if kind == "verbose_json":
        options["response_format"] = {"scores": True}
    if "word" in granularities:
        options["timestamp_granularities"] = {"word_timestamps": True}
    return Form(
        data=data,
        model=read("model", str),
        response_format=kind,
        words="word" in granularities,
        segments="segment" in granularities or not granularities,
        stream=streamed,
        options=options,
    )


_MISSING: Any = object()


def _value(
    fields: Mapping[str, list[str]],
    name: str,
    convert: Callable[[str], Any],
    default: Any = _MISSING,
    accept: Callable[[Any], bool] = lambda value: True,
    expected: str = "a text",
) -> Any:
    """Returns the value of a field.

    Raises:
        Refusal: It is missing, given twice, or out of range.
    """
    values = fields.get(name, [])
    if not values and default is not _MISSING:
        return default
    if len(values) != 1:
        raise Refusal(400, f"{name!r} is given {len(values)} times; expected it once", name)
    try:
        value = convert(values[0])
        good = accept(value)
    except ValueError:
        good = False
    if not good:
        raise Refusal(400, f"{name}={values[0][:100]!r}; expected {expected}", name)
    return value


def _vad(kind: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Options of voice activity detection, from a chunking strategy."""
    if kind.startswith("{"):
        try:
            given = {str(name): str(value) for name, value in json.loads(kind).items()}
        except (ValueError, AttributeError):
            given = {}
        kind, options = given.pop("type", ""), given
    names = {
        "threshold": ("vad_threshold", 1.0),
        "prefix_padding_ms": ("vad_pad_s", 1e-3),
        "silence_duration_ms": ("vad_min_silence_s", 1e-3),
    }
    if kind not in ("auto", "server_vad") or not set(options) <= set(names):
        raise Refusal(
            400,
            "expected 'auto', or 'server_vad' with threshold, prefix_padding_ms and "
            "silence_duration_ms",
            "chunking_strategy",
        )
    found: dict[str, Any] = {"vad": True}
    for name, text in options.items():
        if not re.fullmatch(r"\d+(\.\d*)?", text):
            raise Refusal(400, f"{name}={text[:100]!r}; expected a number", "chunking_strategy")
        field, scale = names[name]
        found[field] = float(text) * scale
    return found
