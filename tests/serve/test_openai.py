"""The package ``openai`` against a running server: every parameter is honoured, or named."""

import base64
import inspect
import io
import re
from functools import partial

import httpx
import openai
import pytest
from openai.resources.audio.transcriptions import Transcriptions
from openai.resources.audio.translations import Translations
from openai.resources.chat.completions import Completions
from PIL import Image

from mmdecode.serve.chat import HONOURED, NEUTRAL
from mmdecode.zoo.speech import speech_test
from tests.serve.running import CHAT, SPEECH, answerer, running, transcriber

CLIP = speech_test()[0]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def server():
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def transcribed(client, kind="transcriptions", **options):
    with open(CLIP.path, "rb") as file:
        given = {"file": file, "model": SPEECH, **options}
        return getattr(client.audio, kind).create(**given)


@pytest.fixture(scope="module")
def alone():
    """What the transcriber says by itself."""
    found = transcriber().with_options(scores=True, word_timestamps=True)
    return found(str(CLIP.path))


def image(color="red", size=(64, 64)):
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def asking(text, url=None):
    parts = [{"type": "text", "text": text}]
    if url is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": parts}]


# Files


def test_formats_hold_the_transcript(client, alone):
    assert transcribed(client).text == alone.text
    assert transcribed(client).usage.seconds == pytest.approx(alone.duration_s, abs=1e-3)
    assert transcribed(client, response_format="text") == alone.text + "\n"
    assert transcribed(client, response_format="srt").startswith("1\n00:00:00,")
    assert transcribed(client, response_format="vtt").startswith("WEBVTT\n\n00:00:0")
    found = transcribed(client, response_format="verbose_json")
    assert found.text == alone.text and found.language == "english" and found.words is None
    assert "".join(segment.text for segment in found.segments).strip() == alone.text
    found = transcribed(
        client, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    words = [word for segment in alone.segments for word in segment.words]
    assert [(w.word, w.start, w.end) for w in found.words] == [
        (w.text.strip(), w.start_s, w.end_s) for w in words
    ]
    assert found.segments
    words = ["word"]
    found = transcribed(client, response_format="verbose_json", timestamp_granularities=words)
    assert found.words and found.segments is None


def test_text_comes_segment_by_segment(client, alone):
    *deltas, done = transcribed(client, stream=True)
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert "".join(event.delta for event in deltas) == alone.text == done.text
    assert done.type == "transcript.text.done" and done.usage.seconds > 4


HONOURED_BY_FILES = {
    "language": ("en", "xx"),
    "languages": (["en"], ["en", "de"]),
    "prompt": ("Sugar, cake.", "a" * 10_001),
    "keywords": (["potato"], ["a" * 10_001]),
    "response_format": ("text", "diarized_json"),
    "temperature": (0.5, 3),
    "timestamp_granularities": (["word"], ["letter"]),
    "stream": (True, None),
    "chunking_strategy": ({"type": "server_vad", "threshold": 0.4}, {"type": "x"}),
}
"""A value that is honoured, and one that is refused, by parameter."""
OTHERS = {
    "include": ["logprobs"],
    "known_speaker_names": ["Ann"],
    "known_speaker_references": ["data:audio/wav;base64,AAAA"],
}
TRANSPORT = {"self", "file", "model", "extra_headers", "extra_query", "extra_body", "timeout"}


def refused(call, name):
    with pytest.raises(openai.BadRequestError) as error:
        call()
    assert error.value.body["param"] == name
    assert name in str(error.value) or error.value.body["message"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["transcriptions", "translations"])
def test_every_parameter_of_a_file_is_honoured_or_named(client, kind):
    create = {"transcriptions": Transcriptions, "translations": Translations}[kind].create
    names = set(inspect.signature(create).parameters) - TRANSPORT
    assert names <= {*HONOURED_BY_FILES, *OTHERS}, "a parameter that nobody has looked at"
    for name in sorted(names):
        good, bad = HONOURED_BY_FILES.get(name, (None, OTHERS.get(name)))
        more = {"response_format": "verbose_json"} if name.startswith("timestamp") else {}
        if good is not None:
            assert transcribed(client, kind, **{name: good}, **more)
        if bad is not None:
            refused(partial(transcribed, client, kind, **{name: bad}, **more), name)


def test_parameters_change_what_they_are_for(client, alone):
    texts = {transcribed(client, temperature=1.0).text for _ in range(2)}
    assert len(texts) == 1  # sampled by the audio's own noise
    other = transcriber().with_options(temperatures=(1.0,), scores=True)(str(CLIP.path)).text
    assert texts == {other}
    biased = transcriber().with_options(hotwords="pepper")(str(CLIP.path)).text
    assert transcribed(client, keywords=["pepper"]).text == biased
    prompted = transcriber().with_options(prompt="pepper pepper")(str(CLIP.path)).text
    assert transcribed(client, prompt="pepper pepper").text == prompted


def test_what_is_no_request_is_refused(server, client):
    url = f"{server.url}/v1/audio/transcriptions"
    file = {"file": ("a.wav", b"RIFF", "audio/wav")}
    for how, words in [
        ({"json": {"model": SPEECH}}, "multipart/form-data"),
        ({"data": {"model": SPEECH}, "files": {"other": file["file"]}}, "as 'file'"),
        ({"data": {"model": SPEECH}, "files": {"file": ("a.wav", b"", "audio/wav")}}, "empty"),
        ({"files": file}, "'model' is given 0 times"),
        ({"data": {"model": SPEECH}, "files": file}, "not audio"),
        ({"data": {"model": [SPEECH, SPEECH]}, "files": file}, "2 times"),
        ({"data": {"model": SPEECH, "colour": "red"}, "files": file}, "'colour'"),
        ({"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data"}}, "oundary"),
    ]:
        answer = httpx.post(url, **how)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    body = b'--x\r\nContent-Disposition: form-data; name="+2AA-"\r\n\r\na\\ud800\r\n--x--\r\n'
    for charset in ("undefined", "punycode", "utf-7", "unicode_escape"):
        kind = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
        answer = httpx.post(url, content=body, headers=kind)
        assert answer.status_code == 400 and "UTF-8" in answer.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="expected 'zoo:whisper-synth' or 'whisper-1'"):
        transcribed(client, model="whisper-2")
    assert transcribed(client, model="whisper-1").text


# Conversations


def test_an_answer_is_that_of_the_answerer(client):
    question = "Is there a red ring in the image?"
    found = client.chat.completions.create(model=CHAT, messages=asking(question, image()))
    expected = answerer()(Image.new("RGB", (64, 64), "red"), question)
    [choice] = found.choices
    assert (choice.message.content, choice.finish_reason) == (expected.text, "stop")
    assert found.usage.prompt_tokens == expected.prompt_tokens > 20
    assert found.usage.completion_tokens == len(expected.token_ids)
    *chunks, last = client.chat.completions.create(
        model=CHAT,
        messages=asking(question, image()),
        stream=True,
        stream_options={"include_usage": True},
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    assert last.usage == found.usage and chunks[-1].choices[0].finish_reason == "stop"


def test_a_conversation_has_system_and_earlier_turns(client):
    turns = [
        {"role": "system", "content": "Answer in a word."},
        *asking("Is there a ring?", image()),
        {"role": "assistant", "content": "No"},
        {"role": "user", "content": "And a square?"},
    ]
    found = client.chat.completions.create(model=CHAT, messages=turns, max_completion_tokens=1)
    assert found.choices[0].finish_reason == "length" and found.usage.completion_tokens == 1


def test_an_answer_ends_before_a_text(client):
    ask = asking("Describe the image.", image())
    whole = client.chat.completions.create(model=CHAT, messages=ask).choices[0].message.content
    stop = whole.split()[2]
    ended = client.chat.completions.create(model=CHAT, messages=ask, stop=[stop, "never"])
    assert ended.choices[0].message.content == whole.partition(stop)[0].strip()
    assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens >= 3
    chunks = client.chat.completions.create(model=CHAT, messages=ask, stop=stop, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.partition(stop)[0]


def test_samples_follow_their_seed(client):
    def sampled(seed):
        found = client.chat.completions.create(
            model=CHAT, messages=asking("Describe the image.", image()), temperature=2.0,
            seed=seed, max_tokens=12,
        )  # fmt: skip
        return found.choices[0].message.content

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(6)}) > 1


GOOD = {
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "temperature": 0.7,
    "top_p": 1.0,
    "seed": 5,
    "stop": ["x"],
    "stream": False,
    "n": 1,
    "frequency_penalty": 0,
    "logprobs": False,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tool_choice": "none",
}
BAD = {
    "audio": {"format": "wav", "voice": "x"},
    "frequency_penalty": 1.0,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "logit_bias": {"5": 1},
    "logprobs": True,
    "max_tokens": 0,
    "max_completion_tokens": 0,
    "metadata": {"a": "b"},
    "modalities": ["audio"],
    "moderation": {"model": "x"},
    "n": 2,
    "parallel_tool_calls": True,
    "prediction": {"type": "content"},
    "presence_penalty": 1.0,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "safety_identifier": "s",
    "seed": "x",
    "service_tier": "flex",
    "stop": [""],
    "store": True,
    "stream": "yes",
    "stream_options": {"a": 1},
    "temperature": 3.0,
    "tool_choice": "auto",
    "tools": [{"type": "function"}],
    "top_logprobs": 2,
    "top_p": 2.0,
    "user": "u",
    "verbosity": "low",
    "web_search_options": {"user_location": None},
    "messages": [],
}


def test_every_parameter_of_a_conversation_is_honoured_or_named(client):
    names = set(inspect.signature(Completions.create).parameters) - TRANSPORT
    assert names <= {*HONOURED, *NEUTRAL} and names <= {*BAD}, "one that nobody has looked at"
    ask = {"model": CHAT, "messages": asking("Is there a ring?", image())}
    for name in sorted(names):
        refused(partial(client.chat.completions.create, **{**ask, name: BAD[name]}), name)
        if name in GOOD:
            given = {**ask, name: GOOD[name]}
            assert client.chat.completions.create(**given).choices[0].message.content is not None
    refused(partial(client.chat.completions.create, **ask, extra_body={"colour": 1}), "colour")


@pytest.mark.parametrize(
    "url",
    ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/a.png", "data:text/html;base64,AAAA",
     "data:image/png;base64,?", "data:image/png;base64,AAAA", partial(image, size=(9000, 9000))],
)  # fmt: skip
def test_nothing_but_an_image_itself_is_read(client, url):
    url = url() if callable(url) else url
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(model=CHAT, messages=asking("?", url[:20_000_000]))
    assert error.value.status_code in (400, 413) and error.value.body["param"] == "messages"
    assert "passwd" not in str(error.value)


@pytest.mark.parametrize(
    "messages",
    [
        "text", [1], [{"role": "tool", "content": "x"}], [{"role": "user"}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}],
        [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "/a.mp4"}}]}],
        [{"role": "user", "content": "x", "tool_calls": [1]}],
        [{"role": "user", "content": "x", "name": "Ann"}],
        [{"role": "user", "content": [{"type": "text", "text": "x", "colour": "red"}]}],
        [{"role": "assistant", "content": "x"}],
        asking("a") * 1001,
    ],
)  # fmt: skip
def test_other_messages_are_refused(server, messages):
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={"model": CHAT, "messages": messages}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages", answer.text
    assert not re.search("passwd|mp4|Traceback", answer.text)


def test_nothing_of_a_conversation_is_kept(server, client):
    kept = server.service.answers.answerer.prompt_cache.count
    ask = asking("Is there a ring that nobody has asked for?", image("navy"))
    client.chat.completions.create(model=CHAT, messages=ask)
    assert server.is_idle() and server.service.answers.answerer.prompt_cache.count == kept


def test_bodies_that_would_hold_the_server_up_are_refused(server):
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, content=b'{"messages":[' + b"[]," * 100_000 + b"1]}")
    assert answer.status_code == 400 and "parts" in answer.json()["error"]["message"]
    long = {"model": CHAT, "messages": asking("a" * 200_001)}
    answer = httpx.post(url, json=long)
    assert answer.status_code == 400 and "characters" in answer.json()["error"]["message"]
    for name, value in (("seed", 10**400), ("max_tokens", 5000), ("temperature", 10**400)):
        answer = httpx.post(url, json={"model": CHAT, "messages": asking("a"), name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("more", "param"), [('"\\ud800": 1', "?"), (f'"seed": 1{"0" * 400}', "seed"),
                        (f'"temperature": 1{"0" * 400}', "temperature")],
)  # fmt: skip
def test_json_that_no_other_text_or_number_can_hold_is_refused(server, more, param):
    body = f'{{"model": "{CHAT}", "messages": [{{"role": "user", "content": "a"}}], {more}}}'
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_models_are_listed_by_all_their_names(client):
    assert [model.id for model in client.models.list()] == [SPEECH, "whisper-1", CHAT]
    assert client.models.retrieve(SPEECH).id == SPEECH
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
