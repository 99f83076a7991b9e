import numpy as np
import pytest
import soundfile
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmdecode.asr.output.manifest import opened, read_manifest
from mmdecode.errors import InputError, UnknownNameError
from mmdecode.runs.tables import write_rows
from tests.support.files import write_json_lines


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"audio": "x/1.wav", "text": "one", "speaker": "s", "duration": 2}\n\n'),
        ("a.json", '{"audio_filepath": "x/1.wav", "text": "one", "duration": 2.0, "speaker": "s"}'),
        ("a.json", '[{"path": "x/1.wav", "transcript": "one", "speaker": "s", "duration_s": 2}]'),
        ("a.csv", "path,sentence,client_id,duration\nx/1.wav,one,s,2\n"),
        ("a.tsv", "\ufeffpath\tsentence\tclient_id\tduration\r\nx/1.wav\tone\ts\t2\r\n"),
    ],
)
def test_kinds_of_manifests_say_the_same(tmp_path, name, text):
    (entry,) = read_manifest(write(tmp_path, name, text), text=True)
    assert entry.id == "x/1.wav" and entry.audio == str(tmp_path / "x" / "1.wav")
    assert (entry.text, entry.speaker, entry.duration_s) == ("one", "s", 2)


def test_absolute_paths_ids_and_further_columns_are_kept(tmp_path):
    row = {"id": 7, "audio": "/data/x.wav", "text": 'say "5"', "set": "dev"}
    path = tmp_path / "a.jsonl"
    write_rows(path, [row])
    (entry,) = read_manifest(path)
    assert (entry.id, entry.audio, entry.fields) == ("7", "/data/x.wav", row)
    (entry,) = read_manifest(write(tmp_path, "a.tsv", 'audio\ttext\na.wav\tsay "5"\n'))
    assert entry.text == 'say "5"'


def test_recordings_that_ship_are_read_by_name(tmp_path, monkeypatch):
    entries = read_manifest("zoo:real-clips", text=True)
    assert len(entries) == 11 and all(opened(entry).name == entry.id for entry in entries)
    assert len(read_manifest("zoo:speech-test", text=True)) == 31
    with pytest.raises(UnknownNameError, match="did you mean 'zoo:real-clips'"):
        read_manifest("zoo:real-clip")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "zoo:real-clips", '{"audio": "mine.wav"}')
    assert [entry.id for entry in read_manifest("zoo:real-clips")] == ["mine.wav"]


def test_a_line_with_an_offset_is_a_part(tmp_path):
    rows = [
        {"audio": "a.wav", "offset": 0, "duration": 1.5},
        {"audio": "a.wav", "offset": "1.5", "duration": 2},
        {"audio": "a.wav", "offset": 12345.678},
        {"audio": "a.wav", "offset": 2, "id": "b"},
        {"audio": "a.wav", "offset": 0},
        {"audio": "b.wav", "offset": None, "duration": 9},
        {"audio": "c.wav", "offset": "", "duration": 9},
    ]
    write_rows(tmp_path / "a.jsonl", rows)
    found = read_manifest(tmp_path / "a.jsonl")
    assert [(e.id, e.offset_s, e.duration_s) for e in found] == [
        ("a.wav@0.0+1.5", 0.0, 1.5),
        ("a.wav@1.5+2.0", 1.5, 2.0),
        ("a.wav@12345.678", 12345.678, None),
        ("b", 2.0, None),
        ("a.wav", None, None),
        ("b.wav", None, 9.0),
        ("c.wav", None, 9.0),
    ]


def test_an_entry_is_opened_as_its_part_and_in_its_language(tmp_path):
    samples = np.arange(1_000, dtype=np.float32) / 1_000
    soundfile.write(tmp_path / "a.wav", samples, 10_000, subtype="FLOAT")
    rows = [{"offset": 0.02, "duration": 0.03, "lang": "de"}, {"duration": 0.03, "language": ""}]
    write_rows(tmp_path / "a.jsonl", [row | {"audio": "a.wav"} for row in rows])
    part, whole = read_manifest(tmp_path / "a.jsonl")
    [(rate, found)] = opened(part).read()
    np.testing.assert_array_equal(found[:, 0], samples[200:500])
    assert rate == 10_000 and len(next(opened(whole).read())[1]) == 1_000
    assert [opened(entry).language for entry in (part, whole)] == ["de", None]
    assert opened(part, "en").language is None, "what is asked for of all counts"
    assert opened(part).name == "a.wav@0.02+0.03"


def test_lines_of_nist_have_ids_and_no_recordings(tmp_path):
    path = write(tmp_path, "a.trn", "some (loud) words (spk-1)\n(spk-2)\n")
    entries = read_manifest(path, audio=False)
    assert [(e.id, e.text, e.audio) for e in entries] == [
        ("spk-1", "some (loud) words", None),
        ("spk-2", "", None),
    ]


def test_a_limit_stops_before_later_lines_are_looked_at(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"audio": "1"}\nbroken\n')
    assert len(read_manifest(path, 1)) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "holds no line"),
        ("a.jsonl", b"\xff\xfe\x00", "not UTF-8"),
        ("a.jsonl", "RIFF", "line 1 is not JSON"),
        ("a.jsonl", "[" * 100_000, "is not JSON"),
        ("a.jsonl", "3", "line 1 holds int"),
        ("a.json", "[1]", "item 1 holds int"),
        ("a.jsonl", '{"text": "x"}', "neither 'id'"),
        ("a.jsonl", '{"id": "1"}', "line 1 names no recording; expected 'audio'"),
        ("a.jsonl", '{"audio": ["x"], "text": "x"}', "has list"),
        ("a.jsonl", '{"audio": "a\\u0000b", "text": "x"}', "has the path"),
        ("a.jsonl", '{"audio": "  ", "text": "x"}', "has the path"),
        ("a.jsonl", '{"audio": "a\\ud800", "text": "x"}', "invalid Unicode"),
        ("a.jsonl", '{"audio": "a", "text": "\\udfff"}', "invalid Unicode"),
        ("a.jsonl", '{"audio": "a", "text": true}', "has bool"),
        ("a.jsonl", '{"audio": "a"}', "has no text"),
        ("a.jsonl", '{"audio": "a", "text": "x", "duration": NaN}', "expected seconds"),
        ("a.jsonl", '{"audio": "a", "text": "x", "duration": -1}', "expected seconds"),
        ("a.jsonl", '{"audio": "a", "text": "x", "duration": {}}', "expected seconds"),
        ("a.jsonl", '{"audio": "a", "text": "x", "offset": -3.5}', "expected seconds"),
        ("a.jsonl", '{"audio": "a", "text": "x", "lang": ["en"]}', "has list"),
        ("a.jsonl", '{"audio": "a", "offset": 1, "text": ""}\n' * 2, "id 'a@1.0' of line 1"),
        ("a.jsonl", '{"audio": "a", "text": ""}\n{"audio": "a", "text": ""}', "id 'a' of line 1"),
        ("a.csv", "audio,text\na\n", "2 columns of the header"),
        ("a.csv", "audio,text\na,b,c\n", "2 columns of the header"),
        ("a.csv", 'audio,text\n"' + "x" * 200_000 + '",b\n', "cannot be read"),
        ("a.trn", "no id\n", "does not end with an id"),
    ],
)
def test_what_is_wrong_is_named_with_the_line(tmp_path, name, text, message):
    path = write(tmp_path, name, text)
    with pytest.raises(InputError, match=message) as caught:
        read_manifest(path, text=True)
    assert str(path) in str(caught.value)


def test_a_manifest_that_is_not_there(tmp_path):
    for path in (tmp_path, tmp_path / "missing.jsonl"):
        with pytest.raises(InputError, match="cannot be read as a manifest"):
            read_manifest(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KEYS = st.sampled_from("audio path text duration id offset speaker lang".split())


def entries_of(path):
    """Entries of a table; ``None``: it is refused."""
    try:
        return read_manifest(path)
    except InputError:
        return None


def test_no_table_ends_in_another_error(tmp_path):
    path, read = tmp_path / "fuzz.jsonl", []

    @settings(max_examples=80, deadline=None)
    @given(st.lists(st.dictionaries(KEYS, VALUES, max_size=6), max_size=3))
    @example([{"audio": "a.wav", "text": "a"}, {"path": "b.wav"}])
    def is_read_or_refused(rows):
        write_json_lines(path, rows)
        read.append(entries_of(path))

    is_read_or_refused()
    assert None in read and any(read)
    assert all(entry.id and entry.audio for entries in read for entry in entries or ())


def test_no_bytes_end_in_another_error(tmp_path):
    read = []

    @settings(max_examples=80, deadline=None)
    @given(st.binary(max_size=60), st.sampled_from(["f.jsonl", "f.csv", "f.tsv", "f.trn"]))
    @example(b"a word (talk-1)", "f.trn")
    @example(b'{"audio": "a.wav"}', "f.jsonl")
    def are_read_or_refused(data, name):
        (tmp_path / name).write_bytes(data)
        read.append(entries_of(tmp_path / name))

    are_read_or_refused()
    assert None in read and any(read)


def test_an_empty_id_names_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "", "audio": "a"}\n{"id": null, "audio": "b"}\n')
    assert [entry.id for entry in read_manifest(path)] == ["a", "b"]


def test_lines_that_lack_something_may_fail_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"audio": "a"}\n{"id": "b"}\n{"id": "a", "audio": "c"}\n{"audio": 3.5}\n')
    entries = read_manifest(path, failing=True)
    assert [entry.id for entry in entries] == ["a", "b", "a#3", "#4"]
    assert entries[0].problem is None and entries[0].audio == str(tmp_path / "a")
    assert "line 2 names no recording; expected 'audio'" in entries[1].problem
    assert "line 3 has the id 'a' of line 1" in entries[2].problem
    with pytest.raises(InputError, match="line 3 has the id"):
        opened(entries[2]).read()
    path.write_text('{"id": "b"}\n')
    with pytest.raises(InputError, match="line 1 names no recording"):
        read_manifest(path, failing=True)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("a.jsonl", [b'{"audio": "a"}', b"{", b'{"audio": "b"}'], "line 2 is not JSON"),
        ("a.jsonl", [b'{"audio": "a"}', b'{"audio": "\xff"}'], "line 2 is not UTF-8 text"),
        ("a.jsonl", [b'{"audio": "a"}', b"[1]", b'{"audio": "b"}'], "line 2 holds list"),
        ("a.json", [b"[", b'{"audio": "a"},', b"3]"], "item 2 holds int"),
        ("a.csv", [b"path,text", b"a,one", b"b", b"c,two"], "line 3 does not have the 2 columns"),
        ("a.trn", [b"one (a)", b"two", b"three (c)"], "line 2 does not end with an id"),
    ],
)
def test_lines_that_cannot_be_read_may_fail_alone(tmp_path, name, lines, message):
    path = tmp_path / name
    path.write_bytes(b"\n".join(lines) + b"\n")
    needed = {"audio": name != "a.trn"}
    with pytest.raises(InputError, match=message):
        read_manifest(path, **needed)
    problems = [entry.problem for entry in read_manifest(path, **needed, failing=True)]
    assert [problem is not None for problem in problems].count(True) == 1
    assert problems[0] is None and message in problems[1]
