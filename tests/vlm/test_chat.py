"""Conversations: every turn is what the whole conversation gives, and reads only what is new."""

import base64
import io
import json
import re
from types import SimpleNamespace

import pytest

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.engine import shared_prefill
from mmdecode.errors import InputError, OptionError
from mmdecode.vlm import Answerer
from mmdecode.vlm.chat import request_of
from mmdecode.vlm.messages import as_messages, turns_of
from mmdecode.vlm.requests import read_requests
from tests.support.commands import invoke
from tests.support.files import write_json_lines

ROLES = (
    "{% for message in messages %}{{ message['role'].upper() }}: "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TURNS = ["Is there a red circle in the image?", "What is beside the star?", "How many rings?"]


@pytest.fixture(scope="module")
def talking(kit):
    """A processor whose template names the roles."""
    processor = kit.build_processor()
    processor.chat_template = ROLES
    return processor


@pytest.fixture
def answerer(model, talking):
    return Answerer(model, talking)


def whole(model, talking, messages, **options):
    """What the last message is answered if everything is read anew."""
    [answer] = Answerer(model, talking, options.pop("decoder", None)).answers(
        [request_of(messages)], text_only=True, prompt_cache=0, **options
    )
    return answer


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("guide", [None, "vcd"])
def test_three_turns_are_those_of_the_whole_conversation(model, talking, kit, draft, guide):
    decoder = Decoder(draft, guide, seed=0)
    answerer = Answerer(model, talking, decoder)
    chat, read = answerer.chat("Answer.", max_new_tokens=6), []
    for turn, text in enumerate(TURNS):
        before = decoder.stats.prompt_tokens.copy()
        messages = [*chat.messages]
        found = chat.ask(text, kit.image(3) if turn == 0 else None)
        asked = chat.messages[: len(messages) + 1]
        alone = Decoder(draft, guide, seed=0)
        expected = whole(model, talking, asked, max_new_tokens=6, decoder=alone)
        assert found.token_ids == expected.token_ids
        assert chat.messages[-1] == {"role": "assistant", "content": found.text}
        now = decoder.stats.prompt_tokens
        read.append((now["read"] - before["read"], now["reused"] - before["reused"]))
    assert not read[0][1]
    if guide is None:
        assert read[1][1] == read[0][0]  # the whole prompt of the turn before
        assert read[2][1] == read[1][0] + read[1][1]
        assert all(reused for _, reused in read[1:])


def test_an_edited_history_is_reused_as_far_as_it_agrees(model, talking, kit):
    answerer = Answerer(model, talking)
    chat = answerer.chat(max_new_tokens=5)
    for turn, text in enumerate(TURNS):
        chat.ask(text, kit.image(3) if turn == 0 else None)
    chat.messages = [
        *chat.messages[:2],
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": "one star"},
    ]
    before = answerer.stats.prompt_tokens["reused"]
    found = chat.ask("How many?")
    expected = whole(model, talking, chat.messages[:-1], max_new_tokens=5)
    assert found.token_ids == expected.token_ids
    assert answerer.stats.prompt_tokens["reused"] - before > kit.tokens_per_image


def test_pieces_of_a_turn_make_up_its_answer(model, talking, kit):
    chat, other = (Answerer(model, talking).chat(max_new_tokens=6) for _ in range(2))
    for turn, text in enumerate(TURNS):
        image = kit.image(3) if turn == 0 else None
        pieces = list(chat.stream(text, image))
        assert "".join(pieces).strip() == other.ask(text, image).text
    assert [m["content"] for m in chat.messages[1::2]] == [
        m["content"] for m in other.messages[1::2]
    ]


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(model, talking, kit, tmp_path):
    chat = Answerer(model, talking).chat(max_new_tokens=4)
    chat.ask(TURNS[0], kit.image(3))
    before = [*chat.messages]
    for question, image in (("", None), ("What?", tmp_path / "nothing.png")):
        with pytest.raises(InputError):
            chat.ask(question, image)
        with pytest.raises(InputError):
            list(chat.stream(question, image))
    assert chat.messages == before
    assert (
        chat.ask(TURNS[1]).text == whole(model, talking, chat.messages[:-1], max_new_tokens=4).text
    )
    with pytest.raises(OptionError, match="no option named"):
        Answerer(model, talking).chat(temprature=1)


def test_images_may_come_in_any_turn(model, talking, kit):
    chat = Answerer(model, talking).chat(max_new_tokens=5)
    chat.ask(TURNS[0], kit.image(3))
    found = chat.ask("Is <image> like it?", kit.image(4))
    assert found.token_ids == whole(model, talking, chat.messages[:-1], max_new_tokens=5).token_ids
    assert found.prompt.count("<image>") == 2


def data_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def conversation(first):
    return [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": [first, {"type": "text", "text": TURNS[0]}]},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": TURNS[1]},
    ]


def test_a_table_holds_conversations(model, talking, kit, tmp_path):
    image = kit.image(3)
    image.save(tmp_path / "a.png")
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image", "image": "a.png"},
        {"type": "image"},
    ]
    rows = [{"id": str(n), "messages": conversation(part)} for n, part in enumerate(parts)]
    rows[3]["images"] = ["a.png"]
    rows.append({"id": "plain", "image": "a.png", "question": TURNS[0]})
    table = tmp_path / "table.jsonl"
    write_json_lines(table, rows)
    requests = read_requests(table)
    found = list(Answerer(model, talking).answers(requests, max_new_tokens=5))
    found.sort(key=lambda answer: answer.index)
    assert [answer.error for answer in found] == [None] * 5
    assert len({tuple(answer.token_ids) for answer in found[:4]}) == 1
    assert found[0].prompt == (
        f"SYSTEM: Answer. USER: <image>\n{TURNS[0]} ASSISTANT: Yes USER: {TURNS[1]} ASSISTANT:"
    )
    assert as_messages(found[1].history, found[1].question)[1]["content"] == "<image>" + TURNS[0]


BAD = {
    "address": ("https://example.org/a.png", "is a URL, and nothing is downloaded"),
    "not base64": ("data:image/png;base64,###", "cannot be read"),
    "not encoded": ("data:image/png,abc", "it is not base64"),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_image_that_is_an_address_is_refused_by_name(bad, tmp_path):
    url, why = BAD[bad]
    rows = [
        {"id": "a", "messages": conversation({"type": "image_url", "image_url": url})},
        {"id": "b", "question": "What?"},
    ]
    table = tmp_path / "table.jsonl"
    write_json_lines(table, rows)
    with pytest.raises(InputError, match=f"line 1: message 2, image 1.*{why}"):
        read_requests(table)
    problem = read_requests(table, failing=True)[0].problem
    assert problem is not None and why in problem


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "expected a list of"),
        ("hello", "expected a list of"),
        ([{"role": "user"}], "message 1 is .* expected a 'role' and a 'content'"),
        ([{"role": "tool", "content": "x"}], "message 1 has the role 'tool'"),
        ([{"role": ["user"], "content": "x"}], "message 1 has the role"),
        ([{"role": "assistant", "content": "x"}], "the last message is of the assistant"),
        ([{"role": "user", "content": 3}], "expected a text or a list"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "has the part .*audio"),
        (
            [{"role": "user", "content": [{"type": "video", "video": b"mp4"}]}],
            "message 1, image 1 is a video without a path",
        ),
        (
            [{"role": "user", "content": [{"type": "video_url", "video_url": "data:video/mp4,"}]}],
            "message 1, image 1 is a video without a path",
        ),
        ([{"role": "user", "content": "<image>"}], "more placeholders than there are images"),
        (
            [{"role": "system", "content": [{"type": "image", "image": "a"}]}],
            "message 1 is of the system and has an image",
        ),
    ],
)
def test_messages_that_cannot_be_read(messages, why):
    with pytest.raises(InputError, match=why):
        turns_of(messages)
    with pytest.raises(InputError, match=r"^2 images given, and the messages name 0"):
        turns_of([{"role": "user", "content": "x"}], more=["a", "b"])


def test_failures_of_a_conversation_name_its_row(model, talking, tmp_path):
    broken = "data:image/png;base64," + base64.b64encode(b"nothing").decode()
    rows = [
        {"id": "a", "messages": conversation({"type": "image_url", "image_url": broken})},
        {"id": "b", "messages": [{"role": "user", "content": "What?"}]},
        {"id": "c", "messages": conversation({"type": "text", "text": "\udce9"})},
        {"id": "d", "messages": [{"role": "user", "content": "What?"}], "question": "Why?"},
        {"id": "e", "messages": [{"role": "assistant", "content": "What?"}]},
    ]
    table = tmp_path / "table.jsonl"
    write_json_lines(table, [*rows[:3], {"id": "ok", "question": "What?"}, *rows[3:]])
    requests = read_requests(table, failing=True)
    failed = [*Answerer(model, talking).answers(requests, max_new_tokens=3)]
    failed = {answer.id: answer.error for answer in failed}
    for name, line, why in (
        ("a", 1, ": message 2, image 1: is no image that Pillow reads"),
        ("b", 2, ": the question 'What.' has no image; give one, or .*--text-only "),
        ("c", 3, ": the question .* is not UTF-8 text"),
        ("d", 5, " has a question and messages; leave out either"),
        ("e", 6, ": the last message is of the assistant"),
    ):
        assert re.match(f"{re.escape(str(table))}, line {line}{why}", failed[name])


def test_results_of_conversations_resume_and_are_a_table(model, talking, kit, tmp_path, folder):
    talking.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    kit.image(3).save(tmp_path / "a.png")
    rows = [{"id": "a", "messages": conversation({"type": "image", "image": "a.png"})}]
    table = tmp_path / "table.jsonl"
    write_json_lines(table, rows)
    from typer.testing import CliRunner

    from mmdecode.cli.app import app

    def ask(data, *more):
        words = ["ask", "--data", str(data), "--model", str(tmp_path / "model"), "--out"]
        given = [*words, str(tmp_path / "out"), "--max-new-tokens", "5", *more]
        return CliRunner().invoke(app, given)

    assert ask(table).exit_code == 0
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    assert row["messages"][-1] == {"role": "user", "content": TURNS[1]}
    assert ask(table, "--resume").exit_code == 0
    again = read_requests(tmp_path / "out" / "results.jsonl")
    [answer] = Answerer(model, talking).answers(again, max_new_tokens=5)
    assert answer.token_ids == row["token_ids"]
    rows[0]["messages"][2]["content"] = "No"
    write_json_lines(table, rows)
    assert "the id of another question" in str(ask(table, "--resume").exception)


def test_a_conversation_on_the_command_line(model, talking, kit, tmp_path):
    talking.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    kit.image(3).save(tmp_path / "a.png")
    from typer.testing import CliRunner

    from mmdecode.cli.app import app

    lines = [TURNS[1], "/help", "/undo", "/[/b]nothing", "/image it's.png", TURNS[1]]
    typed = "\n".join([*lines, "/undo", TURNS[2], "/clear", "Hi?", "/quit", "x"])
    words = ["ask", str(tmp_path / "a.png"), "--chat", "-q", TURNS[0], "--max-new-tokens", "5"]
    found = CliRunner().invoke(app, [*words, "--model", str(tmp_path / "model")], input=typed)
    assert found.exit_code == 1, found.output  # an image could not be read
    chat = Answerer(model, talking).chat(max_new_tokens=5)
    first = chat.ask(TURNS[0], kit.image(3)).text
    second = chat.ask(TURNS[1]).text
    del chat.messages[-2:]
    again = chat.ask(TURNS[1]).text
    del chat.messages[-2:]
    third = chat.ask(TURNS[2]).text
    fourth = Answerer(model, talking).chat(max_new_tokens=5).ask("Hi?").text
    lines = found.stdout.splitlines()
    assert lines[2].startswith("/image PATH") and lines[6].startswith("/quit")
    assert [*lines[:2], *lines[7:]] == [first, second, again, third, fourth]
    for text in ("there is no /[/b]nothing", "not added: it's.png: does not exist"):
        assert text in found.stderr
    assert found.stderr.count(f"forgotten: {TURNS[1]}\n") == 2
    refused = CliRunner().invoke(app, [*words, "--json"])
    assert "--chat talks" in str(refused.exception) and not refused.stderr


@pytest.fixture
def talk(model, talking, kit, tmp_path, monkeypatch):
    """Types lines into a conversation about an image."""
    talking.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    kit.image(3).save(tmp_path / "a.png")
    (tmp_path / "sub dir").mkdir()
    kit.image(4).save(tmp_path / "sub dir" / "b c.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def call(*lines, **options):
        typed = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        words = ("ask", "a.png", "--chat", "--model", "model", "--max-new-tokens", 3, "--quiet")
        return invoke(*words, *options.pop("words", ()), input=typed, **options)

    return call


def test_an_undone_question_leaves_its_images(talk, model, talking, kit):
    found = talk(TURNS[0], "/undo", TURNS[1], "/undo", "/undo", "/image", "/help")
    chat = Answerer(model, talking).chat(max_new_tokens=3)
    first = chat.ask(TURNS[0], kit.image(3)).text
    chat.messages = []
    assert found.stdout.splitlines()[:2] == [first, chat.ask(TURNS[1], kit.image(3)).text]
    assert found.stdout.splitlines()[2].startswith("/image PATH")  # asked for: also if quiet
    assert "there is no question to forget" in found.stderr
    assert "/image needs the path" in found.stderr and "forgotten" not in found.stderr
    assert found.exit_code == 0


@pytest.mark.parametrize("given", ["sub dir/b c.png", "'sub dir/b c.png'", "~/sub dir", "sub dir"])
def test_paths_of_images_are_those_of_a_command_line(talk, model, talking, kit, given):
    found = talk(TURNS[0], f"/image {given}", TURNS[1])
    chat = Answerer(model, talking).chat(max_new_tokens=3)
    chat.ask(TURNS[0], kit.image(3))
    assert found.stdout.splitlines()[1] == chat.ask(TURNS[1], kit.image(4)).text
    assert found.exit_code == 0


def test_a_line_that_is_not_text_fails_alone(talk):
    found = talk(b"What \xe9?", TURNS[1])
    assert found.exit_code == 1 and "is not UTF-8 text" in found.stderr
    assert len(found.stdout.splitlines()) == 1


def test_ctrl_c_stops_an_answer_alone(talk, monkeypatch):
    pieces, calls = Answerer.pieces, []

    def interrupted(self, request, **options):
        calls.append(request)
        yield from list(pieces(self, request, **options))[:1]
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Answerer, "pieces", interrupted)
    found = talk(TURNS[0], TURNS[1], TURNS[2])
    assert found.exit_code == 0 and len(calls) == 3
    assert [turn.text for turn in calls[2].history][::2] == ["<image>" + TURNS[0]]


def test_a_failed_question_shows_its_traceback_if_asked(talk, monkeypatch):
    def broken(self, request, **options):
        raise RuntimeError("of the model")
        yield

    monkeypatch.setattr(Answerer, "pieces", broken)
    found = talk(TURNS[0])
    assert found.exit_code == 1 and "Traceback" not in found.stderr
    monkeypatch.setenv("MMDECODE_DEBUG", "1")
    assert "Traceback" in talk(TURNS[0]).stderr


def test_a_closed_pipe_ends_a_conversation(talk, monkeypatch):
    from mmdecode.cli import conversation

    class Closed:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    monkeypatch.setattr(conversation, "out", SimpleNamespace(file=Closed()))
    found = talk(TURNS[0], TURNS[1])
    assert isinstance(found.exception, BrokenPipeError) and "failed" not in found.stderr


def test_images_of_data_urls_resume_by_their_content(model, talking, kit, tmp_path, monkeypatch):
    talking.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")

    def ask(seed, *more):
        url = {"type": "image_url", "image_url": {"url": data_url(kit.image(seed))}}
        write_json_lines(tmp_path / "table.jsonl", [{"id": "a", "messages": conversation(url)}])
        words = ["ask", "--data", str(tmp_path / "table.jsonl"), "--model", str(tmp_path / "model")]
        return invoke(*words, "--out", str(tmp_path / "out"), "--max-new-tokens", "3", *more)

    assert ask(3).exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert ask(3, "--resume").exit_code == 0
    assert "the id of another question" in str(ask(4, "--resume").exception)


def test_data_urls_may_stand_in_the_columns_of_images(model, talking, kit, tmp_path):
    rows = [{"question": "What?", "image": data_url(kit.image(seed))} for seed in (3, 4)]
    write_json_lines(tmp_path / "table.jsonl", rows)
    requests = read_requests(tmp_path / "table.jsonl")
    found = list(Answerer(model, talking).answers(requests, max_new_tokens=4))
    alone = Answerer(model, talking)([kit.image(3), kit.image(4)], "What?", max_new_tokens=4)
    assert {a.index: a.token_ids for a in found} == {a.index: a.token_ids for a in alone}


def test_placeholders_in_texts_are_words_where_no_image_is_meant(model, talking, kit):
    chat = Answerer(model, talking).chat("Say <image>.", max_new_tokens=3)
    chat.ask(TURNS[0], kit.image(3))
    chat.messages[-1]["content"] = "an <image> of it"
    assert not chat.ask(TURNS[1]).error


def test_messages_hold_what_was_given(model, talking, kit, tmp_path):
    kit.image(3).save(tmp_path / "a.png")
    chat = Answerer(model, talking).chat(max_new_tokens=3)
    given = [tmp_path / "a.png", kit.image(4)]
    chat.ask("What?", given)
    chat.ask(TURNS[1], data_url(kit.image(5)))
    images = [part["image"] for part in chat.messages[0]["content"] if part["type"] == "image"]
    assert all(one is other for one, other in zip(images, given, strict=True))
    assert chat.messages[2]["content"][0]["image"].startswith("data:")
    chat.messages = None
    with pytest.raises(OptionError, match=r"chat\.messages is None; expected a list"):
        chat.ask(TURNS[1])


def test_text_of_bytes_that_are_not_utf8_is_refused(model, talking, kit):
    chat = Answerer(model, talking).chat("Answer \udce9.", max_new_tokens=3)
    with pytest.raises(InputError, match="is not UTF-8 text; write it as UTF-8"):
        chat.ask("What?")
    with pytest.raises(InputError, match="is not UTF-8 text; write it as UTF-8"):
        Answerer(model, talking)(kit.image(1), "What \udce9?")
    with pytest.raises(InputError, match="is not UTF-8 text; write it as UTF-8"):
        list(Answerer(model, talking).stream(kit.image(1), "What \udce9?"))


def test_an_open_file_is_read_once(model, talking, kit, tmp_path):
    kit.image(3).save(tmp_path / "a.png")
    chat = Answerer(model, talking).chat(max_new_tokens=3)
    with (tmp_path / "a.png").open("rb") as file:
        chat.ask(TURNS[0], file)
        chat.ask(TURNS[1])


def test_a_processor_without_a_template_holds_no_conversation(model, kit):
    processor = kit.build_processor()
    processor.chat_template = None
    chat = Answerer(model, processor).chat(max_new_tokens=3)
    chat.ask(TURNS[0], kit.image(3))
    with pytest.raises(InputError, match="has no chat template, and a conversation needs one"):
        chat.ask(TURNS[1])


def test_guides_read_a_conversation_too(model, talking, kit):
    """Guides that ask another question, or take the images away."""
    for guide in ("icd", "cfg:scale=1.5", "m3id"):
        decoder = Decoder(guide=registry.create("guide", guide, target=model), seed=0)
        chat = Answerer(model, talking, decoder).chat(max_new_tokens=4)
        chat.ask(TURNS[0], kit.image(3))
        found = chat.ask(TURNS[1])
        expected = whole(
            model,
            talking,
            chat.messages[:-1],
            max_new_tokens=4,
            decoder=Decoder(guide=registry.create("guide", guide, target=model), seed=0),
        )
        assert found.token_ids == expected.token_ids
    assert shared_prefill.WORTH < 1
