"""Files and questions of several clients share batches, each with the text that it has alone."""

import asyncio
import gc
import random
import threading
import time
import weakref

import httpx
import openai
import pytest

from mmdecode.errors import OverloadError
from mmdecode.serve.answers import Asked
from mmdecode.serve.limits import Limits
from mmdecode.serve.metrics import Metrics
from mmdecode.serve.speech import SpeechWorker
from mmdecode.zoo.speech import speech_test
from tests.serve.running import CHAT, SPEECH, answerer, running, transcriber
from tests.serve.test_openai import asking, image

CLIPS = speech_test()


@pytest.fixture(scope="module")
def server():
    with running() as found:
        yield found


def client_of(server):
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def alone(number, **options):
    return transcriber().with_options(**options)(str(CLIPS[number].path)).text


async def asked_for(server, requests):
    """Answers to transcriptions at once; each is the number of a clip, with options."""
    async with client_of(server) as client:

        async def one(number, options):
            file = CLIPS[number].path.read_bytes()
            answer = await client.audio.transcriptions.create(
                file=("a.wav", file), model=SPEECH, **options
            )
            if "stream" not in options:
                return answer.text
            return "".join([e.delta async for e in answer if e.type == "transcript.text.delta"])

        return await asyncio.gather(*(one(*request) for request in requests))


def all_texts(server, count=16):
    kinds = [({}, {}), ({"stream": True}, {}), ({"language": "en"}, {"language": "en"})]
    numbers = [(number % 14, kinds[number % 3]) for number in range(count)]
    texts = asyncio.run(asked_for(server, [(number, kind[0]) for number, kind in numbers]))
    assert texts == [alone(number, **kind[1]) for number, kind in numbers]


def test_files_share_batches_and_have_the_texts_that_they_have_alone(server):
    all_texts(server)
    assert server.is_idle()
    values = server.values()
    assert values["mmdecode_batch_files_sum"] > 2 * values["mmdecode_batch_files_count"]


@pytest.mark.slow
def test_a_server_that_mixes_files_up_is_noticed(server, monkeypatch):
    submit, before = SpeechWorker.submit, []

    def mixed(self, samples, *rest):
        """Decodes what was sent before."""
        before.append(samples)
        return submit(self, before[max(0, len(before) - 2)], *rest)

    monkeypatch.setattr(SpeechWorker, "submit", mixed)
    with pytest.raises(AssertionError):
        all_texts(server)


def test_questions_share_batches_and_have_the_answers_that_they_have_alone(server):
    from PIL import Image

    asks = [(color, f"Is there a {color} ring?") for color in ("red", "green", "blue")] * 3
    shapes = [(color, text, image(color)) for color, text in asks]

    async def ask():
        async with client_of(server) as client:
            return await asyncio.gather(*(
                client.chat.completions.create(model=CHAT, messages=asking(text, url))
                for _, text, url in shapes
            ))  # fmt: skip

    sizes = []
    batches = type(server.service.answers)._next_batch

    def counted(self):
        found = batches(self)
        sizes.append(len(found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(server.service.answers), "_next_batch", counted)
        found = asyncio.run(ask())
    assert sum(sizes) == len(shapes) and max(sizes) > 1
    for (color, text, _), answer in zip(shapes, found, strict=True):
        expected = answerer()(Image.new("RGB", (64, 64), color), text)
        assert answer.choices[0].message.content == expected.text


class Fed:
    """A worker that is fed by hand."""

    def __init__(self, size=8):
        self.found = {}
        self.worker = SpeechWorker(transcriber(), Limits(), Metrics(), size)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.worker.close()

    def submit(self, name, samples, **options):
        self.found[name] = texts, done = [], threading.Event()

        def notify(segments, result):
            texts.extend(segment.text for segment in segments)
            if result is not None:
                texts.append(result)
                done.set()

        return self.worker.submit(samples, self.worker.options(**options), notify)

    def result(self, name):
        assert self.found[name][1].wait(60)
        return self.found[name][0][-1]


@pytest.mark.slow
def test_a_long_file_holds_up_neither_short_ones_nor_those_with_other_options():
    import numpy as np

    long = np.concatenate([clip.samples() for clip in CLIPS])
    with Fed(size=2) as fed:
        fed.submit("long", long)
        while fed.worker.decoding == 0:
            time.sleep(0.01)
        fed.submit("short", CLIPS[3].samples())
        assert fed.result("short").text == alone(3)
        assert not fed.found["long"][1].is_set()
        assert fed.result("long").text == transcriber()(long).text
        fed.submit("again", long)
        fed.submit("other", CLIPS[3].samples(), language="en")
        for number in range(4):
            fed.submit(number, CLIPS[number].samples())
        assert fed.result("other").text == alone(3, language="en")
        assert not fed.found["again"][1].is_set()
        for number in range(4):
            assert fed.result(number).text == alone(number)


def test_segments_come_before_the_end_and_are_those_of_the_whole():
    import numpy as np

    long = np.concatenate([clip.samples() for clip in CLIPS[:6]])
    with Fed() as fed:
        fed.submit("long", long, word_timestamps=True)
        result = fed.result("long")
        texts = fed.found["long"][0][:-1]
        assert texts == [segment.text for segment in result.segments] and len(texts) > 3
        expected = transcriber().with_options(word_timestamps=True)(long)
        assert result.segments == expected.segments and result.text == expected.text


def test_what_nobody_waits_for_is_ended():
    import numpy as np

    long = np.concatenate([clip.samples() for clip in CLIPS] * 4)
    with Fed(size=1) as fed:
        request = fed.submit("long", long)
        while not fed.found["long"][0]:
            time.sleep(0.01)
        fed.submit("next", CLIPS[3].samples())
        request.cancel()
        assert fed.result("next").text == alone(3)
        assert not fed.found["long"][1].is_set() and fed.worker.decoding == 0


def test_what_nobody_waits_for_takes_no_room_in_the_queue(monkeypatch):
    monkeypatch.setattr(SpeechWorker, "_begin", lambda self: time.sleep(0.01))
    with Fed() as fed:
        fed.worker._limits = Limits(queue=1)
        request = fed.submit("a", CLIPS[0].samples())
        with pytest.raises(OverloadError, match="1 files wait already"):
            fed.submit("b", CLIPS[0].samples())
        request.cancel()
        assert fed.worker.waiting == 0
        fed.submit("c", CLIPS[0].samples()).cancel()


def test_streams_that_leave_are_forgotten():
    with Fed() as fed:
        for _ in range(5):
            stream = fed.worker.open(lambda *found: None)
            stream.feed(CLIPS[0].samples()[:4000])
            stream.leave()
        left = weakref.ref(stream.stream)
        del stream
        gc.collect()
        assert left() is None and fed.worker.streams == 0


def test_an_answer_that_nobody_waits_for_ends(server):
    """In a batch, and before its turn."""
    from mmdecode.vlm.chat import request_of
    from mmdecode.vlm.options import AnswerOptions

    worker, found, ended = server.service.answers, [], threading.Event()
    options = AnswerOptions(max_new_tokens=400, do_sample=True, temperature=50.0, text_only=True)
    request = request_of([{"role": "user", "content": "Describe the image."}])
    asked = Asked(request, options, 0, False, lambda *one: (found.append(one), ended.set()))
    rounds = []

    def going():
        rounds.append(1)
        if len(rounds) == 3:
            worker.cancel(asked)
        return not asked.cancelled

    for one in worker.answerer.answers([request], wanted=going, **vars(options)):
        assert len(one.token_ids) < 400
    assert len(rounds) < 10
    worker.submit(asked)  # cancelled before its turn: it is left out
    time.sleep(0.2)
    assert not found and worker.waiting == 0


def test_an_error_of_a_batch_reaches_all_of_it_and_the_worker_goes_on(monkeypatch):
    with Fed() as fed:
        kind = type(fed.worker.transcriber)
        steps = kind.stream_windows

        def broken(self, *args):
            yield from ()
            raise RuntimeError("the machine is broken")

        def taken(self, sources, *rest):
            list(zip(range(2), sources))  # noqa: B905
            return broken(self)

        monkeypatch.setattr(kind, "stream_windows", taken)
        fed.submit("a", CLIPS[0].samples())
        assert "broken" in fed.result("a").error
        monkeypatch.setattr(kind, "stream_windows", steps)
        fed.submit("b", CLIPS[3].samples())
        assert fed.result("b").text == alone(3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_500_requests_of_20_clients_of_which_some_vanish(server):
    """5 % go midway; the others have their own text, and nothing is left."""
    draw = random.Random(0)
    texts = [alone(number) for number in range(14)]
    url = f"{server.url}/v1/audio/transcriptions"

    async def client(seed):
        own = random.Random(seed)
        good = 0
        async with httpx.AsyncClient(timeout=300) as http:
            for _ in range(25):
                number = own.randrange(14)
                asking_for = http.post(
                    url,
                    files={"file": CLIPS[number].path.read_bytes()},
                    data={"model": SPEECH},
                )
                if own.random() < 0.05:
                    task = asyncio.create_task(asking_for)
                    await asyncio.sleep(own.uniform(0, 0.3))
                    task.cancel()
                    continue
                answer = await asking_for
                assert answer.json()["text"] == texts[number]
                good += 1
        return good

    async def clients():
        return await asyncio.gather(*(client(draw.random()) for _ in range(20)))

    assert sum(asyncio.run(clients())) > 450
    assert server.is_idle()
