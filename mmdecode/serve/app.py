"""`make_app`: the ASGI application of the server, with all its endpoints."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from mmdecode.errors import MissingExtraError

with MissingExtraError.instead("the server needs fastapi", extra="serve"):
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import HTMLResponse, JSONResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

from mmdecode import __version__
from mmdecode.serve import chat, live, transcriptions
from mmdecode.serve.limits import FAILED, Gate, Refusal
from mmdecode.serve.service import GoneError, Service

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_KINDS = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
_KINDS |= {"recorder.js": "text/javascript", "icon.svg": "image/svg+xml"}


def make_app(service: Service) -> FastAPI:
    """Returns the application, without the `Gate` that limits what reaches it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="mmdecode", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(GoneError, _gone)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(HTTPException, _of_framework)
    app.add_exception_handler(Exception, _failed)  # the gate logs that there was one

    for part in (transcriptions, chat, live):
        app.include_router(part.routes(service))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Lists the models, by all names that clients may use."""
        return {"object": "list", "data": [_model(service, name) for name in _names(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in _names(service):
            raise Refusal(
                404, f"no model {name[:100]!r}; see /v1/models", "model", "model_not_found"
            )
        return _model(service, name)

    @app.get("/healthz")
    async def health() -> Response:
        """Says whether the server takes requests."""
        status = "ends" if service.drained.is_set() else "ok" if service.is_alive else "broken"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Returns the counters in Prometheus' format."""
        return Response(service.metrics.text(), media_type=_TEXT)

    @app.get("/")
    async def page() -> Response:
        """Returns the page with microphone and files."""
        return _file("page.html")

    @app.get("/assets/{name}")
    async def asset(name: str) -> Response:
        if name not in _KINDS:
            raise Refusal(404, "there is no such file")
        return _file(name)

    return app


def watch(service: Service, gate: Gate) -> None:
    """Adds gauges of what waits and is decoded to the metrics."""
    metrics, speech, answers = service.metrics, service.speech, service.answers
    metrics.watch("active_requests", "Requests and streams that are open.", lambda: gate.active)
    if speech is not None:
        metrics.watch("files_waiting", "Files that wait.", lambda: speech.waiting)
        metrics.watch("files_decoding", "Files that are decoded.", lambda: speech.decoding)
        metrics.watch("streams", "Streams that are open.", lambda: speech.streams)
        metrics.watch("stream_waiting_seconds", "Most audio that waits in a stream.",
                      lambda: speech.delay_s)  # fmt: skip
    if answers is not None:
        metrics.watch("questions_waiting", "Questions that wait.", lambda: answers.waiting)
        metrics.watch("questions_decoding", "Questions that are answered.",
                      lambda: answers.decoding)  # fmt: skip


def _names(service: Service) -> list[str]:
    return list(dict.fromkeys((*service.speech_names, *service.answer_names)))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.created, "owned_by": "mmdecode"}


def _file(name: str) -> Response:
    text = (resources.files("mmdecode.serve") / "assets" / name).read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _PAGE_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, media_type=_KINDS[name], headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    text = json.dumps(error.body)  # of ASCII: a client may send what is no text
    return Response(text, error.status, headers=error.headers, media_type="application/json")


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # which nobody reads; it is counted


async def _of_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _refused(request, Refusal(error.status_code, str(error.detail)))


async def _failed(request: Request, error: Exception) -> Response:
    return await _refused(request, Refusal(500, FAILED, code="internal_error"))
