"""``mmdecode serve``: a server that clients of OpenAI's interface can talk to."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from mmdecode.cli import flags
from mmdecode.cli.output import emit_json
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.console import console, print_line, without_other_bars

PANELS = {
    "Options": "model draft chat_model chat_draft host port key_file device",
    "Decoding": "guide accept chat_guide batch_size prompt_cache dtype quantize seed",
    "Clients": "names json",
    "Limits": "max_upload_mb max_duration max_queue max_streams max_connections rate timeout",
}
"""Parameters by section of the help."""
KEY = "MMDECODE_API_KEY"
"""Environment variable with the key; on a command line every user of the machine would see it."""
LEAST_KEY = 16
"""Characters of a key."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def command(
    model: flags.Recogniser,
    draft: str | None = None,
    guide: str | None = None,
    accept: str = "auto",
    chat_model: str | None = None,
    chat_draft: str | None = None,
    chat_guide: str | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    key_file: Path | None = None,
    names: list[str] | None = None,
    batch_size: flags.AtLeast1 = 8,
    prompt_cache: flags.Bytes = 0,
    max_upload_mb: flags.AtLeast1 = 100,
    max_duration: flags.Seconds = 4 * 3600.0,
    max_queue: flags.AtLeast1 = 128,
    max_streams: flags.AtLeast1 = 64,
    max_connections: flags.AtLeast1 = 256,
    rate: flags.Limit = 1200,
    timeout: flags.Seconds = 900.0,
    device: str = "auto",
    dtype: str = "auto",
    quantize: flags.Rounding = None,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Serve a recogniser, and a vision-language model, over OpenAI's interface.

    Endpoints: /v1/audio/transcriptions, /v1/audio/translations, /v1/chat/completions (with
    --chat-model), the websocket /v1/audio/stream, /v1/models, /healthz, /metrics, and a page with
    microphone and files at /. Files of several clients are decoded in one batch, with the text
    that each has alone.

    Only this machine can reach the server unless --host says otherwise; a key is then needed, in
    the environment variable MMDECODE_API_KEY or in --key-file. Nothing of a client's is logged or
    kept. SIGTERM or Ctrl-C ends the server after what was begun; a second one ends it at once.

    For example:

      mmdecode serve --model openai/whisper-small --draft lookup

      mmdecode serve --model small --chat-model llava-1.5-7b --chat-draft lookup --port 9000

      mmdecode serve --model small --host 0.0.0.0 --key-file /etc/mmdecode/key

    Options:
        draft: Drafter of the recogniser; see 'mmdecode methods draft'.
        accept: Acceptance rule; with auto a drafter does not change texts.
        chat_model: A vision-language model, such as llava-hf/llava-1.5-7b-hf. [default: none]
        chat_draft: Drafter of --chat-model.
        chat_guide: Guide of --chat-model.
        host: Address to listen at.
        port: Port to listen at; 0: any that is free.
        key_file: File whose first line is the key.
        names (--name): Another name by which clients may ask for --model, such as whisper-1;
            repeatable.
        batch_size: Files, streams or questions decoded at once; texts do not depend on it.
        prompt_cache: Memory in which --chat-model keeps prompts after their answers, so that the
            next turn of a conversation reads only what is new; 0: none is kept.
        max_upload_mb: Maximum size of a request, in MiB.
        max_duration: Maximum seconds of a recording, after decoding.
        max_queue: Maximum number of files, or questions, that wait.
        max_streams: Maximum number of streams.
        max_connections: Maximum number of requests and streams at the same time.
        rate (--rate-limit): Maximum requests a minute of one address.
        timeout: Seconds after which a request that is not answered fails.
        json: Print the address as a JSON object when the server is ready.
    """
    given = dict(locals())

    from mmdecode.serve.limits import Gate, Limits
    from mmdecode.serve.server import bound, serve

    without_other_bars()
    local = _is_local(host)
    key = read_key(key_file)
    if key is None and not local:
        raise OptionError(
            f"--host {host}: other machines can reach the server, so that a key is needed; set the "
            f"environment variable {KEY}, or give --key-file"
        )
    flags_of_chat = [name for name in ("chat_draft", "chat_guide") if given[name] is not None]
    if chat_model is None and flags_of_chat:
        flag = "--" + flags_of_chat[0].replace("_", "-")
        raise OptionError(f"{flag} does nothing without --chat-model; give it, or leave {flag} out")
    limits = Limits(
        prompt_cache=prompt_cache,
        upload_bytes=max_upload_mb << 20,
        audio_s=max_duration,
        queue=max_queue,
        streams=max_streams,
        connections=max_connections,
        connections_of_client=max(1, max_connections // 2),
        rate=float(rate or 1),
        request_s=timeout,
    )
    with contextlib.closing(bound(host, port)) as listener:
        service = _service(given, limits)
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listener.getsockname()[1]}"

        def ready() -> None:
            models = [*service.speech_names, *service.answer_names]
            if json:
                emit_json({"url": url, "models": models, "key": key is not None})
            else:
                print_line(f"serving {', '.join(models)} at {url}; Ctrl-C ends", console)

        hosts = hosts_of(host, key)
        count = service.metrics.answered
        gc.collect()
        gc.freeze()  # what is loaded stays: collections look at what requests leave
        serve(service, listener, lambda app: Gate(app, limits, key, hosts, count), ready)


def read_key(path: Path | None) -> str | None:
    """Returns the key of the server; ``None``: there is none.

    Raises:
        InputError: The file cannot be read.
        OptionError: The key is too short, or no header can have it.
    """
    if path is None:
        key = os.environ.get(KEY)
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--key-file {path}: cannot be read: {error}") from error
        key = lines[0].strip() if lines else ""
    if key is None:
        return None
    if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise OptionError(
            f"the key has {len(key)} characters; expected {LEAST_KEY} or more letters, digits and "
            "marks: make one by 'openssl rand -hex 24'"
        )
    return key


def hosts_of(host: str, key: str | None) -> frozenset[str] | None:
    """Returns the names by which the server may be asked for, see `Gate`; ``None``: any.

    A key keeps other sites out as well, and a proxy may pass its own name on.
    """
    if key is not None or not _is_local(host):
        return None
    return LOCAL_NAMES | {f"[{host}]" if ":" in host else host.lower()}


def _is_local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _service(given: dict[str, Any], limits: Any) -> Any:
    """Loads the models, and starts their workers."""
    from mmdecode.asr.transcriber import Transcriber
    from mmdecode.serve.answers import AnswerWorker
    from mmdecode.serve.media import MediaDecoder
    from mmdecode.serve.metrics import Metrics
    from mmdecode.serve.service import Service
    from mmdecode.serve.speech import SpeechWorker

    names = "draft guide accept device dtype quantize seed"
    transcriber = Transcriber.from_pretrained(given["model"], **flags.picked(given, names))
    answerer = None
    if given["chat_model"] is not None:
        from mmdecode.vlm.answerer import Answerer

        answerer = Answerer.from_pretrained(
            given["chat_model"],
            draft=given["chat_draft"],
            guide=given["chat_guide"],
            **flags.picked(given, "device dtype quantize seed"),
        )
    metrics, size = Metrics(), given["batch_size"]
    return Service(
        limits=limits,
        metrics=metrics,
        media=MediaDecoder(longest_s=limits.audio_s, most_pixels=limits.pixels),
        speech=SpeechWorker(transcriber, limits, metrics, size),
        answers=AnswerWorker(answerer, limits, metrics, size) if answerer else None,
        speech_names=[given["model"], *(given["names"] or [])],
        answer_names=[given["chat_model"]] if answerer else [],
    )
