"""``/v1/chat/completions``, as OpenAI's clients call it, about images and without.

Decoding is greedy unless the request has a temperature. Images come as data URLs; addresses and
paths are refused, and nothing is downloaded. Each parameter is honoured, or answered with 400 that
names it, unless it has the value that changes nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from mmdecode.errors import MMDecodeError
from mmdecode.serve.answers import Asked
from mmdecode.serve.limits import LATER, UNTIL, Limits, Refusal
from mmdecode.serve.service import Channel, Service, refusal_of, refusal_of_failure
from mmdecode.serve.transcriptions import UNBUFFERED, event
from mmdecode.vlm.chat import request_of
from mmdecode.vlm.options import AnswerOptions, make_options
from mmdecode.vlm.requests import AnswerRequest
from mmdecode.vlm.results import Answer

Found = tuple[str, Answer | None]

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "audio": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "n": (None, 1),
    "parallel_tool_calls": (None,),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "prompt_cache_key": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "safety_identifier": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "user": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
"""Parameters that are not supported, with the values that ask for nothing."""
HONOURED = frozenset(
    "messages model max_tokens max_completion_tokens temperature top_p seed stop stream "
    "stream_options".split()
)
_DATA = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
MOST_STOPS, MOST_MESSAGES, MOST_PARTS = 4, 1000, 100_000


@dataclass(frozen=True, kw_only=True)
class Body:
    """Parameters of a request.

    Attributes:
        messages: The conversation; images are data URLs.
        model: Name of the model.
        options: Options of the answer.
        seed: Seed of its random numbers.
        stops: Texts before which the answer ends.
        stream: Whether pieces are sent as they come.
        usage: Whether the last of them counts tokens.
    """

    messages: Sequence[Any]
    model: str
    options: AnswerOptions
    seed: int
    stops: Sequence[str]
    stream: bool
    usage: bool


def routes(service: Service) -> APIRouter:
    """Returns the endpoint for conversations."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, service.limits)
        worker, scope = service.answers_for(body.model), request.scope
        channel: Channel[Found] = Channel()
        asked = Asked(
            await _question(service, body, scope[LATER]),
            body.options,
            body.seed,
            body.stream or bool(body.stops),  # so that it can end at a text
            lambda *found: channel.put(found),
        )
        try:
            worker.submit(asked)
        except MMDecodeError as error:
            raise refusal_of(error) from error
        scope[LATER].append(partial(worker.cancel, asked))
        about = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }
        if body.stream:
            chunks = _chunks(service, channel, asked, body, about, scope[UNTIL])
            return StreamingResponse(chunks, media_type="text/event-stream", headers=UNBUFFERED)
        stopping, answer = Stopping(body.stops), None
        while answer is None:
            piece, answer = await channel.get_for(request.receive, scope[UNTIL])
            stopping.add(piece)
            asked.cancelled = stopping.stopped  # then the answer ends with the round at hand
        return JSONResponse(_completion(service, body, about, answer, stopping))

    return router


class Stopping:
    """Text of an answer, which ends before the first of some texts.

    Args:
        stops: The texts.

    Attributes:
        stopped: Whether one of them was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._text, self._handed = stops, "", 0
        self._held = max(map(len, stops), default=1) - 1
        self.stopped = False

    def add(self, piece: str) -> str:
        """Adds a piece; returns the text that is certain now and was not handed on yet."""
        if self.stopped:
            return ""
        begin = max(0, len(self._text) - self._held)
        self._text += piece
        found = [at for stop in self._stops if (at := self._text.find(stop, begin)) >= 0]
        if found:
            self.stopped, self._text = True, self._text[: min(found)]
            return self.rest()
        end = max(self._handed, len(self._text) - self._held)
        new, self._handed = self._text[self._handed : end], end
        return new

    def rest(self) -> str:
        """Returns the text that was held back, at the end of the answer."""
        new, self._handed = self._text[self._handed :], len(self._text)
        return new

    @property
    def text(self) -> str:
        """All of the text."""
        return self._text


def _finish_reason(answer: Answer, stopping: Stopping) -> str:
    return "stop" if stopping.stopped or answer.ended else "length"


def _usage(answer: Answer) -> dict[str, int]:
    """Counts of tokens; a text that ended the answer is counted, as it was decoded."""
    counts = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.token_ids),
    }
    return {**counts, "total_tokens": sum(counts.values())}


def _completion(
    service: Service,
    body: Body,
    about: Mapping[str, Any],
    answer: Answer,
    stopping: Stopping,
) -> dict[str, Any]:
    """Returns the answer to a request, whole."""
    if answer.error is not None:
        raise refusal_of_failure(answer.error, answer.kind)
    service.metrics.tokens(answer.prompt_tokens, len(answer.token_ids))
    text = stopping.text if body.stops else answer.text
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text.strip(), "refusal": None},
        "logprobs": None,
        "finish_reason": _finish_reason(answer, stopping),
    }
    return {
        **about,
        "object": "chat.completion",
        "choices": [choice],
        "usage": _usage(answer),
    }


async def _chunks(
    service: Service,
    channel: Channel[Found],
    asked: Asked,
    body: Body,
    about: Mapping[str, Any],
    until_s: float,
) -> AsyncIterator[str]:
    """Yields server-sent events with the pieces of an answer."""

    def chunk(delta: Mapping[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if body.usage else {}
        return event({**about, "object": "chat.completion.chunk", "choices": [choice], **usage})

    stopping, answer, begun = Stopping(body.stops), None, False
    yield chunk({"role": "assistant", "content": ""})
    while answer is None:
        try:
            piece, answer = await channel.get(until_s)
        except Refusal as refusal:
            yield event(refusal.body)
            return
        if answer is not None and answer.error is not None:
            yield event(refusal_of_failure(answer.error, answer.kind).body)
            return
        new = stopping.add(piece) if answer is None else stopping.rest()
        new = new if begun else new.lstrip()
        begun = begun or bool(new)
        if new:
            yield chunk({"content": new})
        asked.cancelled = stopping.stopped
    yield chunk({}, _finish_reason(answer, stopping))
    service.metrics.tokens(answer.prompt_tokens, len(answer.token_ids))
    if body.usage:
        whole = {**about, "object": "chat.completion.chunk", "choices": []}
        yield event({**whole, "usage": _usage(answer)})
    yield "data: [DONE]\n\n"


# ---- the request


async def read_body(request: Request, limits: Limits) -> Body:
    """Reads the parameters of a request.

    Args:
        request: The request.
        limits: Most tokens of its answer.

    Raises:
        Refusal: One is missing, unknown, not supported or out of range.
    """
    data = await request.body()
    if sum(map(data.count, b"[{,")) > MOST_PARTS:  # which take long to read
        raise Refusal(400, f"the body has more than {MOST_PARTS} parts; send fewer messages")
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is no JSON; expected an object") from None
    if not isinstance(given, dict):
        raise Refusal(400, f"the body is {type(given).__name__}; expected an object")
    for name, value in given.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            usual = " or ".join(json.dumps(one) for one in NEUTRAL[name] if one is not None)
            leave = f"leave it out{f', or give {usual}' if usual else ''}"
            raise Refusal(400, f"{name!r} is not supported; {leave}", name, "unsupported_parameter")
        if name not in NEUTRAL and name not in HONOURED:
            raise Refusal(400, f"{name[:100]!r} is not known; leave it out", name[:100])
    messages = given.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MOST_MESSAGES:
        raise Refusal(400, f"expected a list of 1 to {MOST_MESSAGES} messages", "messages")
    if not isinstance(given.get("model"), str):
        raise Refusal(400, "expected the name of a model; see /v1/models", "model")
    stream_options = given.get("stream_options")
    streamed = _bool(given, "stream")
    if stream_options is not None:
        if not streamed or not isinstance(stream_options, dict):
            raise Refusal(400, "expected an object, and 'stream' to be true", "stream_options")
        if unknown := set(stream_options) - {"include_usage", "include_obfuscation"}:
            raise Refusal(400, f"{min(unknown)[:100]!r} is not known", "stream_options")
        if stream_options.get("include_obfuscation"):
            raise Refusal(400, "'include_obfuscation' is not supported", "stream_options")
    stops = given.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= 1000 for stop in stops)
    ):
        raise Refusal(400, f"expected a text, or a list of up to {MOST_STOPS} texts", "stop")
    return Body(
        messages=messages,
        model=given["model"],
        options=_options(given, limits),
        seed=int(_number(given, "seed", 0, -(2**63), 2**63 - 1, whole=True)),
        stops=stops,
        stream=streamed,
        usage=bool(stream_options and stream_options.get("include_usage")),
    )


def _options(given: Mapping[str, Any], limits: Limits) -> AnswerOptions:
    """Returns the options of an answer."""
    names = [
        name for name in ("max_completion_tokens", "max_tokens") if given.get(name) is not None
    ]
    if len(names) == 2 and given[names[0]] != given[names[1]]:
        raise Refusal(400, "max_tokens is the old name of max_completion_tokens", "max_tokens")
    options: dict[str, Any] = {"text_only": True, "margins": False}
    options["prompt_cache"] = limits.prompt_cache
    for name in names:
        options["max_new_tokens"] = int(
            _number(given, name, 1, 1, limits.answer_tokens, whole=True)
        )
    temperature = _number(given, "temperature", 0.0, 0, 2)
    top_p = _number(given, "top_p", 1.0, 0, 1)
    if temperature:
        if not top_p:
            raise Refusal(400, "top_p=0; expected more than 0 and at most 1", "top_p")
        options |= {"do_sample": True, "temperature": float(temperature), "top_p": float(top_p)}
    try:
        return make_options(options)
    except MMDecodeError as error:
        raise refusal_of(error) from error


def _bool(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if not (value is None or isinstance(value, bool)):
        raise Refusal(400, f"{name}={value!r:.100}; expected true or false", name)
    return bool(value)


def _number(
    given: Mapping[str, Any],
    name: str,
    default: float,
    least: float,
    most: float,
    whole: bool = False,
) -> float:
    value = given.get(name)
    if value is None:
        return default
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not good or not least <= value <= most:  # NaN is not
        kind = "a whole number" if whole else "a number"
        raise Refusal(400, f"{name}={value!r:.100}; expected {kind} from {least} to {most}", name)
    return value


async def _question(
    service: Service, body: Body, later: list[Callable[[], object]]
) -> AnswerRequest:
    """Makes the question of a conversation, whose images are decoded in a process of their own.

    Args:
        service: Decoder of images, and limits.
        body: The request.
        later: Functions that are called once it is answered.
    """
    count, characters, messages = 0, 0, list[dict[str, Any]]()
    for number, message in enumerate(body.messages, 1):
        where = f"message {number}"
        if not isinstance(message, dict):
            raise Refusal(400, f"{where} is no object; expected a role and a content", "messages")
        if unknown := {name for name, value in message.items() if value} - {"role", "content"}:
            raise Refusal(400, f"{where}: {min(unknown)[:100]!r} is not supported", "messages")
        content = message.get("content")
        characters += sum(map(len, _texts(content)))
        if characters > service.limits.text:
            most = service.limits.text
            raise Refusal(400, f"more than {most} characters of text; send fewer", "messages")
        if isinstance(content, list):
            parts = []
            for part in content:
                url = _url(part, where)
                if url is not None:
                    count += 1
                    if count > service.limits.images:
                        raise Refusal(
                            400, f"more than {service.limits.images} images; send fewer", "messages"
                        )
                    part = {"type": "image", "image": await _image(service, url, where, later)}
                parts.append(part)
            content = parts
        messages.append({"role": message.get("role"), "content": content})
    try:
        return request_of(messages)
    except MMDecodeError as error:
        raise refusal_of(error, "messages") from error


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str)]


def _url(part: Any, where: str) -> str | None:
    """Returns the URL of an image of a message; ``None``: the part is a text."""
    if not isinstance(part, dict):
        raise Refusal(400, f"{where}: a part is no object; expected a 'type'", "messages")
    kind = part.get("type")
    if kind in ("text", "input_text"):
        if not isinstance(part.get("text"), str):
            raise Refusal(400, f"{where}: a part has no text; expected it as 'text'", "messages")
        if unknown := set(part) - {"type", "text"}:
            raise Refusal(400, f"{where}: {min(unknown)[:100]!r} is not supported", "messages")
        return None
    if kind not in ("image_url", "input_image"):
        raise Refusal(
            400,
            f"{where}: type {str(kind)[:100]!r} is not supported; expected text or image_url",
            "messages",
        )
    if unknown := set(part) - {"type", "image_url"}:
        raise Refusal(400, f"{where}: {min(unknown)[:100]!r} is not supported", "messages")
    url = part.get("image_url")
    if isinstance(url, dict):
        if unknown := set(url) - {"url", "detail"}:
            raise Refusal(400, f"{where}: {min(unknown)[:100]!r} is not supported", "messages")
        if (detail := url.get("detail", "auto")) not in ("auto", None):
            raise Refusal(
                400, f"detail={str(detail)[:100]!r} is not supported; leave it out", "messages"
            )
        url = url.get("url")
    if not isinstance(url, str):
        raise Refusal(400, f"{where}: an image has no 'url'; expected a data URL", "messages")
    return url


async def _image(service: Service, url: str, where: str, later: list[Callable[[], object]]) -> Any:
    """Decodes the image of a data URL."""
    found = _DATA.match(url)
    if found is None:
        raise Refusal(
            400,
            f"{where}: an image is no data URL; expected 'data:image/png;base64,...': addresses "
            "are not opened here, so send the image itself",
            "messages",
        )
    try:
        data = base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(400, f"{where}: the base64 of an image is damaged", "messages") from None
    try:
        image = await service.decoded(service.media.image, data)
    except MMDecodeError as error:
        raise refusal_of(error, "messages") from error
    size = 3 * image.width * image.height
    service.budget.take(size)
    later.append(partial(service.budget.give_back, size))
    return image
