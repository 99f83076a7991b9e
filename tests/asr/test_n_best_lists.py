"""N-best lists in files: HyPoradise's formats, our own, the transcriber's results."""

import gzip
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdecode.asr.correction.n_best_lists import (
    FORMS,
    NBestList,
    hash_fraction,
    lists_of,
    read_lists,
    split,
    write_lists,
)
from mmdecode.asr.output import jobs
from mmdecode.asr.output.manifest import Entry
from mmdecode.asr.results import Failure, Hypothesis, Transcript
from mmdecode.errors import InputError, UnknownNameError
from tests.support.files import write_json_lines

WORDS = st.text("abc ,'", min_size=1, max_size=8).map(lambda text: f"x{text}".strip())
LISTS = st.lists(
    st.builds(
        lambda hypotheses, scored, reference: (hypotheses, scored, reference),
        st.lists(WORDS, min_size=1, max_size=4),
        st.booleans(),
        WORDS,
    ),
    min_size=1,
    max_size=3,
)


def built(examples):
    return [
        NBestList(
            f"n{number}",
            tuple(hypotheses),
            tuple(-0.125 * rank for rank in range(len(hypotheses))) if scored else None,
            reference,
            f"{number}.wav",
        )
        for number, (hypotheses, scored, reference) in enumerate(examples)
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15, deadline=None)
@given(examples=LISTS)
def test_lists_come_back_as_they_were_written(form, name, examples, tmp_path_factory):
    lists = built(examples)
    path = tmp_path_factory.getbasetemp() / f"{form}-{name}"
    write_lists(lists, path, form)
    assert read_lists(path) == lists


def test_files_have_the_fields_of_the_formats(tmp_path):
    lists = [NBestList("u1", ("a b", "a c", "a d"), (-0.1, -0.2, -0.3), "a b")]
    rows = {}
    for form in FORMS:
        write_lists(lists, tmp_path / f"{form}.json", form)
        [rows[form]] = json.loads((tmp_path / f"{form}.json").read_text())
    assert rows["generator"] == {
        "id": "u1",
        "input": ["a b", "a c", "a d"],
        "output": "a b",
        "am_score": [-0.1, -0.2, -0.3],
    }
    assert rows["lora"] == {
        "id": "u1",
        "input1": "a b",
        "input2": "a c. a d.",
        "output": "a b",
        "am_score": [-0.1, -0.2, -0.3],
    }
    assert rows["lists"] == {
        "id": "u1",
        "hypotheses": ["a b", "a c", "a d"],
        "scores": [-0.1, -0.2, -0.3],
        "reference": "a b",
    }


def test_other_hypotheses_may_be_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"input1": "a", "input2": "b. c\nd", "output": "a"}]))
    assert read_lists(path)[0].hypotheses == ("a", "b. c", "d")


@pytest.mark.parametrize("hypotheses", [("a", "b. c"), ("a", ""), ("a", "b\nc")])
def test_what_a_format_cannot_tell_apart_is_refused(hypotheses, tmp_path):
    with pytest.raises(InputError, match="'u' has empty hypotheses or full stops"):
        write_lists([NBestList("u", hypotheses, reference="a")], tmp_path / "a.json", "lora")
    with pytest.raises(InputError, match="'u' has no reference"):
        write_lists([NBestList("u", hypotheses)], tmp_path / "a.json", "generator")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UnknownNameError, match="did you mean 'lora'"):
        write_lists([], tmp_path / "a.json", "lore")


def test_a_list_without_an_id_is_called_alike_in_any_file_and_order(tmp_path):
    rows = [{"input": ["a", "b"], "output": "a"}, {"input": ["c"], "output": "c"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    write_json_lines(tmp_path / "b.jsonl", rows[::-1] * 2)
    first, second = (read_lists(tmp_path / name) for name in ("a.json", "b.jsonl"))
    assert [one.id for one in second[:2]] == [one.id for one in first[::-1]]
    assert [one.id for one in second[2:]] == [f"{one.id}-2" for one in second[:2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": ["a"], "output": "a"}\n{"input": []}\n', "line 2: the list .* is empty"),
        ('{"input": ["a", 1.5], "output": "a"}', "line 1: the row has float '1.5'"),
        ('{"input": ["a", null], "output": "a"}', "line 1: .* null"),
        ('{"input": "a", "output": "a"}', "line 1: the row has no hypotheses"),
        ('{"output": "a"}', "line 1: the row has no hypotheses"),
        ('{"input": ["a"], "am_score": [1, 2]}', "line 1: .* 2 scores for 1"),
        ('{"input": ["a"], "am_score": "high"}', "line 1: the row has the scores high"),
        ('{"input": ["a"], "am_score": [NaN]}', "line 1: the row has the scores"),
        ('{"id": "x", "input": ["a"]}\n{"id": "x", "input": ["b"]}', "line 2: .* of line 1"),
        ('{"id": "x", "n_best": null}', "line 1: .* transcribe with --n-best"),
        ('{"id": "x", "n_best": [[{"texts": "a"}]]}', "line 1: .* has an invalid 'n_best'"),
        ('{"n_best": [[{"text": "a", "score": 0}]]}', "line 1: .* names no recording"),
        ('{"input": ["a"]\n', "line 1 is not JSON"),
        ("", "holds no list"),
    ],
)
def test_damaged_files_are_refused_with_the_line(text, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=f"a.jsonl.*{message}"):
        read_lists(path)


CUT = gzip.compress(b'{"input": ["a"]}\n' * 9)[:-9]


@pytest.mark.parametrize("data", [b"no gzip", CUT], ids=["no gzip", "cut"])  # gzip tells the time
def test_damaged_gzip_is_refused(data, tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(InputError, match="a broken gzip"):
        read_lists(path)


def transcript(source, windows):
    return Transcript(
        source=source,
        index=0,
        text="",
        segments=[],
        language=None,
        duration_s=2.0,
        tokens=[],
        stats={},
        n_best=windows,
    )


ONE = [
    Hypothesis(text="a b", score=-0.25, tokens=[1]),
    Hypothesis(text="a", score=-0.5, tokens=[2]),
]
TWO = [Hypothesis(text="", score=-0.75, tokens=[])]


def test_windows_of_a_transcript_are_lists():
    [only] = lists_of(transcript("a.wav", [ONE]))
    assert only == NBestList("a.wav", ("a b", "a"), (-0.25, -0.5), audio="a.wav")
    assert [one.id for one in lists_of(transcript("a.wav", [ONE, TWO]))] == ["a.wav#1", "a.wav#2"]
    with pytest.raises(InputError, match="n_best=5"):
        lists_of(transcript("a.wav", None))


def test_results_of_the_command_are_lists(tmp_path):
    entries = [Entry(id=name, audio=f"/{name}") for name in ("a.wav", "b.wav", "c.wav")]
    folder = jobs.ResultFolder(tmp_path, {}, entries, ["json"])
    folder.open(folder.prepare())
    folder.add(transcript("a.wav", [ONE, TWO]))
    folder.add(Failure(source="b.wav", index=1, error="no", kind="InputError"))
    folder.add(transcript("c.wav", [[replace(ONE[0], score=float("-inf"))]]))
    folder.close()
    found = read_lists(tmp_path / "results.jsonl")
    assert found == [
        NBestList("a.wav#1", ("a b", "a"), (-0.25, -0.5), audio="/a.wav"),
        NBestList("a.wav#2", ("",), (-0.75,), audio="/a.wav"),
        NBestList("c.wav", ("a b",), None, audio="/c.wav"),
    ]
    alone = read_lists(tmp_path / "a.json")
    assert [replace(one, audio="/a.wav") for one in alone] == found[:2]


def test_parts_depend_on_the_id_alone():
    lists = [NBestList(f"u{number}", ("a",)) for number in range(2000)]
    first, rest = split(lists, 0.3)
    assert len(first) + len(rest) == 2000
    assert 0.27 < len(first) / 2000 < 0.33
    assert split(lists[::-1][:999], 0.3)[0] == [one for one in lists[::-1][:999] if one in first]
    smaller = split(lists, 0.2)[0]
    assert all(one in first for one in smaller)
    assert split(lists, 0.0)[0] == [] and split(lists, 1.0)[1] == []
    assert hash_fraction("u1") == pytest.approx(0.5726517085561724, abs=0)  # in every version
