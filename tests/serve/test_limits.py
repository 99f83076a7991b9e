"""What clients may not do is answered with its status, and costs the others nothing."""

import asyncio
import contextlib
import http.client
import json
import select
import socket
import time

import httpx
import pytest

from mmdecode.errors import OptionError
from mmdecode.serve.limits import Gate, Limits, Rates, Refusal
from mmdecode.serve.server import bound
from mmdecode.zoo.speech import speech_test
from tests.serve.running import SPEECH, running

KEY = "a-key-of-the-test"
CLIP = speech_test()[3]


def transcribed(server, **how):
    with open(CLIP.path, "rb") as file:
        return httpx.post(
            f"{server.url}/v1/audio/transcriptions",
            **{"files": {"file": file}, "data": {"model": SPEECH}, "timeout": 60, **how},
        )


@pytest.fixture(scope="module")
def server():
    limits = Limits(upload_bytes=300_000, audio_s=6.0, receive_s=1.0, queue=2)
    hosts = frozenset({"127.0.0.1", "localhost"})
    with running(limits, key=KEY, hosts=hosts, chat=False) as found:
        yield found


def with_key(**headers):
    return {"headers": {"Authorization": f"Bearer {KEY}", **headers}}


def test_a_key_is_demanded_for_all_but_the_page_and_the_health(server):
    assert transcribed(server, **with_key()).status_code == 200
    for headers in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY},
                    {"Authorization": "Bearer"}, {"Authorization": f"Basic {KEY}"}):  # fmt: skip
        answer = transcribed(server, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/metrics", "/v1/models", "/openapi.json", "/assets/page.js"):
        expected = 200 if path.startswith("/assets") else 401
        assert httpx.get(server.url + path).status_code == expected, path
    for path in ("/", "/healthz"):
        assert httpx.get(server.url + path).status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch):
    asked = []
    gate = Gate(None, Limits(), KEY)
    monkeypatch.setattr("hmac.compare_digest", lambda *pair: bool(asked.append(pair)))
    assert not gate.knows(KEY.encode()) and asked == [(KEY.encode(), KEY.encode())]


@pytest.mark.slow
def test_other_sites_and_other_names_are_kept_out(server):
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"},
                    {"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example:80"}):  # fmt: skip
        answer = transcribed(server, **with_key(**headers))
        assert answer.status_code == 403, headers
        assert "access-control-allow-origin" not in answer.headers
    own = server.url.partition("//")[2]
    assert transcribed(server, **with_key(Origin=f"http://{own}")).status_code == 200
    preflight = httpx.options(
        f"{server.url}/v1/models",
        headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
    )
    assert preflight.status_code == 403


def test_requests_that_are_too_large_are_not_read(server):
    def chunks():
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 10_000

    url = f"{server.url}/v1/audio/transcriptions"
    large = httpx.post(url, content=b"x" * 400_000, **with_key())
    assert large.status_code == 413 and "MiB" in large.json()["error"]["message"]
    kind = {"content-type": "multipart/form-data; boundary=x"}
    with contextlib.suppress(httpx.HTTPError):  # it may be closed while the rest is being sent
        assert httpx.post(url, content=chunks(), **with_key(**kind)).status_code == 413
    assert server.is_idle()


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 4 << 20], ids=["nothing", "all"])
def test_a_refusal_is_read_by_a_client_that_sends_all_or_nothing_of_its_body_first(server, size):
    host, port = server.url.partition("//")[2].split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(
            f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}"
            f"\r\nContent-Length: {4 << 20}\r\n\r\n".encode()
        )
        connection.sendall(bytes(size))
        found = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413") and "MiB" in json.loads(body)["error"]["message"]
    assert server.is_idle()


def test_recordings_that_are_too_long_are_refused_after_decoding(server):
    long = next(clip for clip in speech_test() if clip.duration_s > 6.1)
    with open(long.path, "rb") as file:
        answer = transcribed(server, files={"file": file}, **with_key())
    assert answer.status_code == 413 and "6" in answer.json()["error"]["message"], answer.text


def test_a_body_that_does_not_come_times_out_and_frees_its_connection(server):
    host, port = server.url.partition("//")[2].split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Length: 5000\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
        )
        began = time.monotonic()
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        answer.close()
        assert answer.status == 408 and time.monotonic() - began < 8
    assert server.is_idle()


@pytest.mark.slow
def test_a_head_that_does_not_come_closes_its_connection(server):
    """Also the second one of a connection; one that is used goes on."""
    host, port = server.url.partition("//")[2].split(":")
    get = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for first in (b"", get):
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(first)
            began = time.monotonic()
            while time.monotonic() - began < 8:
                with contextlib.suppress(TimeoutError):
                    connection.settimeout(0.3)
                    if connection.recv(1 << 16) == b"":
                        break
                with contextlib.suppress(OSError):
                    connection.sendall(b"G" if time.monotonic() - began < 0.5 else b"")
            assert time.monotonic() - began < 6
    with httpx.Client() as client:
        for _ in range(4):
            assert client.get(f"{server.url}/healthz").status_code == 200
            time.sleep(0.4)


def test_a_full_queue_is_refused(server, monkeypatch):
    monkeypatch.setattr(server.service.speech, "_begin", lambda: time.sleep(0.01))

    async def ask():
        async with httpx.AsyncClient() as client:
            asked = []
            for _ in range(3):
                data = {"files": {"file": CLIP.path.read_bytes()}, "data": {"model": SPEECH}}
                url = f"{server.url}/v1/audio/transcriptions"
                asked.append(asyncio.create_task(client.post(url, **data, **with_key(), timeout=9)))
                await asyncio.sleep(0.3)
            answer = await asked[2]
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "overloaded"
            for one in asked[:2]:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(ask())
    monkeypatch.undo()
    server.service.speech._wake()
    assert server.is_idle()  # those whose clients have gone are not decoded
    assert transcribed(server, **with_key()).status_code == 200


def test_a_request_that_takes_too_long_is_ended(monkeypatch):
    with running(Limits(request_s=0.5), chat=False) as server:
        monkeypatch.setattr(server.service.speech, "_begin", lambda: time.sleep(0.01))
        answer = transcribed(server)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        monkeypatch.undo()
        server.service.speech._wake()
        assert server.is_idle()


@pytest.mark.slow
def test_rates_and_connections_of_one_address():
    with running(Limits(rate=6, connections_of_client=1), chat=False) as server:
        answers = [httpx.get(f"{server.url}/v1/models") for _ in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 6 + [429] * 2
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 10
        assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_tokens_of_a_rate_come_back_with_time():
    now = [0.0]
    rates = Rates(60, lambda: now[0])
    assert [rates.take("a") for _ in range(60)] == [0] * 60
    assert rates.take("a") == pytest.approx(1) and rates.take("b") == 0
    now[0] = 1.0
    assert rates.take("a") == 0 and rates.take("a") > 0
    now[0] = 1000.0
    assert rates.take("c") == 0 and set(rates._used) == {"c"}  # full ones are forgotten


def test_a_client_that_does_not_read_is_let_go():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def send(message):
        if message["type"].endswith("body"):
            await asyncio.sleep(60)

    async def receive():
        return {"type": "http.request"}

    gate = Gate(app, Limits(send_s=0.05))
    scope = {"type": "http", "path": "/", "headers": [], "client": ("a", 1)}
    asyncio.run(asyncio.wait_for(gate(scope, receive, send), 5))
    assert gate.active == 0


def is_aborted(connection, seconds=15):
    """Whether the server ends a connection, whose client reads nothing."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.2)
        try:
            connection.send(b"x")  # a connection that was aborted answers by a reset
        except BlockingIOError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.fixture(scope="module")
def impatient():
    with running(Limits(receive_s=1.0, send_s=1.0, request_s=3.0), chat=False) as found:
        yield found


@pytest.fixture
def connection(impatient):
    with contextlib.closing(connected(impatient)) as found:
        yield found


def connected(server):
    host, port = server.url.partition("//")[2].split(":")
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    found.settimeout(10)
    found.connect((host, int(port)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [b"/assets/page.js", pytest.param(b"/healthz", marks=pytest.mark.slow)]
)
def test_a_connection_whose_client_never_reads_is_closed(connection, path):
    asking = b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % path * 4000
    connection.settimeout(2)
    with contextlib.suppress(TimeoutError):
        connection.sendall(asking)
    connection.setblocking(False)
    assert is_aborted(connection)


@pytest.mark.slow
@pytest.mark.parametrize(
    "begun",
    [b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET", pytest.param(b"", marks=pytest.mark.slow)],
)
def test_a_connection_that_brings_no_whole_request_is_closed(connection, begun):
    connection.sendall(begun)
    assert is_aborted(connection)  # though bytes come


@pytest.mark.slow
def test_a_body_may_not_come_for_ever():
    limits = Limits(receive_s=60.0, request_s=3.0)
    with running(limits, chat=False) as server, contextlib.closing(connected(server)) as connection:
        connection.sendall(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5000"
            b"\r\nContent-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
        )
        for _ in range(300):  # a byte at a time, until there is an answer
            if select.select([connection], [], [], 0.1)[0]:
                break
            connection.sendall(b"a")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 408 and b"did not end within 3 s" in answer.read()
        assert server.is_idle()


def test_an_error_of_the_server_is_answered_and_logged_without_its_message(caplog, capfd):
    async def app(scope, receive, send):
        raise ValueError("my-secret-words")

    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request"}

    for kind in ("http", "websocket"):
        scope = {"type": kind, "path": "/", "headers": [], "client": ("a", 1)}
        asyncio.run(Gate(app, Limits())(scope, receive, send))
    found = [one.get("status", one.get("code")) for one in sent]
    assert [code for code in found if code] == [500, 1011]
    assert caplog.text.count("ValueError at none: a bug of the server, in test_limits.py:") == 2
    assert "my-secret-words" not in caplog.text + "".join(capfd.readouterr())


def test_small_answers_are_not_held_back():
    """TCP waits 40 ms for the acknowledgement of a header, unless asyncio knows the protocol."""
    with contextlib.closing(bound("127.0.0.1", 0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_limits_are_positive_and_refusals_say_their_kind():
    with pytest.raises(OptionError, match="queue=0"):
        Limits(queue=0)
    assert Refusal(500, "a\nb").body["error"] == {
        "message": "a b", "type": "server_error", "param": None, "code": None,
    }  # fmt: skip


@pytest.mark.slow
def test_a_connection_that_is_used_is_kept():
    """Also where no look at it meets a request."""
    get = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with running(Limits(receive_s=3.0), chat=False) as server:
        host, port = server.url.partition("//")[2].split(":")
        with socket.create_connection((host, int(port)), 10) as connection:
            for _ in range(60):
                connection.sendall(get)
                text = b""
                while not text.endswith(b"}"):
                    text += connection.recv(1 << 16)
                    assert text
                time.sleep(0.1)


@pytest.mark.slow
def test_a_body_that_trickles_has_as_much_time_as_any_request():
    with running(Limits(request_s=1.0, receive_s=60.0), chat=False) as server:
        active = []  # requests, whenever a byte is sent

        def trickle():
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(60):
                time.sleep(0.1)
                active.append(server.gate.active)
                yield b"x"

        kind = {"content-type": "multipart/form-data; boundary=x"}
        url = f"{server.url}/v1/audio/transcriptions"
        with contextlib.suppress(httpx.HTTPError):
            assert httpx.post(url, content=trickle(), headers=kind).status_code == 408
        assert server.is_idle() and (len(active) < 60 or not active[-1])


@pytest.mark.slow
def test_requests_share_a_budget_of_memory_and_give_it_back():
    with running(Limits(memory_bytes=200_000), chat=False) as server:
        answer = transcribed(server)
        assert answer.status_code == 503 and "memory" in answer.json()["error"]["message"]
        assert server.is_idle() and server.gate.budget.held == 0
    with running(Limits(memory_bytes=2_000_000), chat=False) as server:
        for stream in ("true", "false"):
            assert transcribed(server, data={"model": SPEECH, "stream": stream}).status_code == 200
            assert server.is_idle() and server.gate.budget.held == 0


def test_with_a_key_a_proxy_may_pass_its_own_name_on():
    from mmdecode.cli.serve import hosts_of

    assert hosts_of("127.0.0.1", None) == {"127.0.0.1", "localhost", "[::1]"}
    assert hosts_of("127.0.0.1", KEY) is None and hosts_of("0.0.0.0", KEY) is None


@pytest.mark.slow
def test_few_websockets_wait_for_a_key():
    import websockets

    async def strangers(url):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(websockets.connect(url))
            with pytest.raises(websockets.InvalidStatus) as error:
                await stack.enter_async_context(websockets.connect(url))
            assert error.value.response.status_code == 503

    with running(Limits(strangers=2), key=KEY, chat=False) as server:
        asyncio.run(strangers(server.socket_url))
        assert server.is_idle()
        asyncio.run(strangers(server.socket_url))  # they count no more


def test_nothing_of_a_client_is_logged_where_it_fails(server, caplog, capfd):
    """A text that is none, a first message in another script, and an upload that is left off."""
    import websockets

    from mmdecode.serve.chat import read_body

    async def ask(first):
        headers = with_key()["headers"]
        async with websockets.connect(server.socket_url, additional_headers=headers) as connection:
            await connection.send(first)
            with contextlib.suppress(websockets.ConnectionClosed):
                while True:
                    await connection.recv()
            return connection.close_code

    assert asyncio.run(ask("語" * 300)) == 1007
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, content=b'{"\\ud800secret": 1}', **with_key())
    assert answer.status_code == 400, answer.text
    host, port = server.url.partition("//")[2].split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer "
            + KEY.encode() + b"\r\nContent-Length: 5000\r\n\r\nsecret"
        )  # fmt: skip
        time.sleep(0.2)
    assert server.is_idle()
    assert read_body and not caplog.text and not "".join(capfd.readouterr())


def test_a_bug_is_logged_by_its_kind_alone(server, caplog, monkeypatch):
    def broken(self, name):
        raise RuntimeError("secret words of a client")

    monkeypatch.setattr(type(server.service), "speech_for", broken)
    answer = transcribed(server, **with_key())
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert server.is_idle()
    assert "RuntimeError" in caplog.text and "secret" not in caplog.text


def test_nothing_of_a_client_is_logged(server, caplog, capfd):
    secret = "my-secret-words"
    url = f"{server.url}/v1/audio/transcriptions?{secret}"
    httpx.post(url, data={"model": secret, "prompt": secret}, files={"file": b"x"}, **with_key())
    httpx.get(f"{server.url}/{secret}", **with_key())
    assert server.is_idle()
    written = (
        "".join(capfd.readouterr())
        + caplog.text
        + httpx.get(f"{server.url}/metrics", **with_key()).text
    )
    assert secret not in written
