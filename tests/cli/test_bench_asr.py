"""``mmdecode bench asr``: the same windows in all ways, one recommendation, and no crash."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from mmdecode.asr.output.manifest import opened, read_manifest
from mmdecode.asr.recognizers import of_type
from mmdecode.asr.recognizers.whisper import WhisperRecognizer
from mmdecode.asr.transcriber import Transcriber, load, make_options
from mmdecode.cli import bench_asr
from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.speed import recogniser_speed
from mmdecode.evaluation.speed.draft_speed import AGAIN, PLAIN
from mmdecode.evaluation.speed.recogniser_speed import (
    GENERATE,
    Errors,
    Measurement,
    RecogniserSpeed,
    Spoken,
    Way,
    batches_of,
    ways_of,
    windows_of,
)
from mmdecode.evaluation.speed.recommendation import with_errors
from mmdecode.quantization import products
from mmdecode.quantization.models import weight_bytes
from mmdecode.quantization.modules import Int8Linear
from tests.support.commands import invoke, json_of

MODEL = "zoo:whisper-synth"


@pytest.fixture(scope="module")
def recogniser():
    model, processor = load(MODEL, "cpu", "fp32")
    return WhisperRecognizer(model, processor, make_options({"max_new_tokens": 24}))


@pytest.fixture(scope="module")
def spoken(recogniser):
    sources = [opened(entry) for entry in read_manifest("zoo:speech-test", 2)]
    return windows_of(recogniser, sources)[0]


def clock(monkeypatch, seconds):
    """Each call takes what ``seconds`` gives for its kind and its way."""

    def timed(device, call):
        kind = call.func.__name__
        name = call.func.__self__.name if kind == "decode" else kind
        return seconds.get(name, 0.0), call()

    monkeypatch.setattr("mmdecode.evaluation.speed.stopwatch.timed", timed)
    monkeypatch.setattr(recogniser_speed, "timed", timed)


def test_all_ways_decode_the_windows_of_a_transcription(recogniser, spoken, monkeypatch):
    clock(monkeypatch, {"encode": 1.0, PLAIN: 3.0, AGAIN: 3.0, GENERATE: 7.0, "medusa": 1.0})
    measured = Measurement({"fp32": recogniser}, spoken, 1, [0, 1])
    ways = ways_of({"fp32": recogniser}, ["medusa", "medusa:path=gone"], MODEL, peers=True)
    calls = []
    measured.run(ways, 2, lambda: calls.append(1))
    assert len(calls) == measured.calls(len(ways), 2) == 6 * 5
    rows = {row.draft: row for row in measured.rows(ways)}
    assert list(rows) == [PLAIN, AGAIN, GENERATE, "medusa", "medusa:path=gone"]
    assert ways[0].decoder.stats.calls == 4  # the untimed batch is not counted
    assert min(len(ids) for ids in ways[0].tokens.values()) < 24  # it ended by itself
    failed = rows.pop("medusa:path=gone")
    assert "cannot be loaded" in failed.problem and failed.texts == ()

    transcriber = Transcriber(recogniser.model, recogniser.processor, None, recogniser.options)
    entries = read_manifest("zoo:speech-test", 2)
    texts = tuple(one.text for one in transcriber([opened(entry) for entry in entries]))
    assert len(texts) == 2 and all(row.texts == texts for row in rows.values())
    assert {(r.same_as_undrafted, r.same_as_fp32, r.other_texts) for r in rows.values()} == {
        (1.0, 1.0, 0)
    }
    assert rows["medusa"].speedup == (2.0, 2.0, 2.0)  # encoder included: 4 s against 2 s
    assert rows["medusa"].decoding_speedup == (3.0, 3.0, 3.0)
    assert rows[GENERATE].speedup[0] == 0.5 and rows[GENERATE].tokens_per_pass is None
    assert rows[PLAIN].tokens_per_pass == 1.0 < rows["medusa"].tokens_per_pass
    assert all(row.encoder_ms == 1000 for row in rows.values())
    tokens = sum(len(ids) + 1 for ids in ways[0].tokens.values())  # with end tokens
    assert rows[PLAIN].ms_per_token == pytest.approx(2 * 3000 / tokens, abs=1e-3)
    audio = sum(window.seconds for window in spoken)
    assert rows[PLAIN].rtfx == pytest.approx(audio / (2 * 4.0), abs=0.01)
    weights = sum(p.nbytes for p in recogniser.model.parameters())
    assert rows[PLAIN].megabytes == round(weights / 1e6, 1)


def fake(states, dtype=torch.float32):
    """A recogniser that encodes windows to ``states``, or to its inputs."""
    model = SimpleNamespace(device=torch.device("cpu"), dtype=dtype)
    return SimpleNamespace(model=model, encode=lambda inputs, seconds: states or inputs)


def test_each_way_decodes_the_encoder_states_of_its_precision():
    class Reading(Way):
        def decode(self, windows, encoded):
            read.append((self.precision, encoded))
            return [[1] for _ in windows]

    read = []
    recognizers = {"fp32": fake("float states"), "int8": fake("rounded states")}
    measured = Measurement(recognizers, [Spoken(0, [1], None, 1.0, "", [])] * 3, 2, [0])
    ways = [Reading(PLAIN, name, one, None) for name, one in recognizers.items()]
    measured.run(ways, 2)
    assert set(read) == {("fp32", "float states"), ("int8", "rounded states")}
    assert measured.turns == [[0, 1], [2]] * 2
    assert ways[1].tokens == {0: [1], 1: [1], 2: [1]}


def test_inputs_have_the_dtype_of_the_model():
    inputs = {"input_values": torch.ones(1, 2), "attention_mask": torch.ones(1, 2).long()}
    window = Spoken(0, [1], inputs, 1.0, "", [])
    [found] = recogniser_speed.encoding(fake(None, torch.bfloat16), [window])()
    assert [x.dtype for x in found.values()] == [torch.bfloat16, torch.int64]


def test_other_tokens_are_counted_by_precision(recogniser, spoken):
    measured = Measurement({"fp32": recogniser, "int8": recogniser}, spoken, 2, [0, 1])
    names = (PLAIN, "fp32"), (AGAIN, "fp32"), (PLAIN, "int8"), ("lookup", "int8")
    ways = [Way(name, kind, recogniser, None) for name, kind in names]
    measured.turns = [[0, 1]]
    measured.encoder = {"fp32": [1.0], "int8": [0.5]}
    kept = spoken_tokens(recogniser, spoken)
    changed = {0: kept[0], 1: kept[1][:3]}
    for way, tokens in zip(ways, (kept, kept, changed, changed), strict=True):
        way.tokens, way.seconds = tokens, [1.0]
    found = measured.rows(ways)
    assert [row.same_as_undrafted for row in found] == [1, 1, 1, 1]
    assert [row.same_as_fp32 for row in found] == [1, 1, 0.5, 0.5]
    assert [row.other_texts for row in found] == [0, 0, 1, 1]
    assert [row.encoder_ms for row in found] == [500, 500, 250, 250]  # two windows
    assert [row.exact for row in found] == [False, False, False, True]
    ways[3].tokens = kept
    assert measured.rows(ways)[3].same_as_undrafted == 0.5


def spoken_tokens(recogniser, spoken):
    way = Way(PLAIN, "fp32", recogniser, recogniser_speed.Decoder())
    with torch.no_grad():
        encoded = recogniser.encode([w.inputs for w in spoken], [w.seconds for w in spoken])
        return dict(enumerate(way.decode(spoken, encoded)))


def test_a_run_that_is_stopped_has_its_complete_turns(recogniser, spoken):
    measured = Measurement({"fp32": recogniser}, spoken, 1, [0, 1])
    ways = ways_of({"fp32": recogniser}, [], MODEL, peers=False)
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 8:  # of three for each turn: in the middle of the second one that counts
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured.run(ways, 1, stop)
    assert measured.turns == [[0]] and measured.complete == [0]
    rows = measured.rows(ways)
    assert [len(row.texts) for row in rows] == [1, 1]
    assert [len(way.seconds) for way in ways] == [1, 1]


def test_drafters_that_fail_or_help_nothing_are_not_among_the_quickest(
    recogniser, spoken, monkeypatch
):
    measured = Measurement({"fp32": recogniser}, spoken, 2, [0, 1])
    names = ["source", "medusa", "lookahead", "clasp", "recycling"]
    ways = [Way.drafted(name, "fp32", recogniser, MODEL) for name in names]
    seconds = {"encode": 1, "source": 0.1, "medusa": 2, "lookahead": 1, "clasp": 0, "recycling": 3}
    clock(monkeypatch, seconds)
    kept = measured.quickest(ways, 2)
    assert [way.name for way in kept] == ["medusa", "lookahead"]
    assert "does not fit" in ways[3].problem and ways[0].problem is None


def test_batches_have_prompts_of_one_length():
    windows = [Spoken(0, [1] * length, None, 1.0, "", []) for length in (2, 3, 2, 2, 3)]
    assert batches_of(windows, 2) == [[0, 2], [3], [1, 4]]


@pytest.mark.parametrize(
    ("dtypes", "rounding", "device", "fast", "names", "left_out"),
    [
        ([], None, "cpu", True, ["fp32", "bf16", "int8"], []),
        ([], None, "cpu", False, ["fp32", "int8"], ["bf16"]),
        ([], None, "cuda", True, ["fp32", "bf16"], ["int8"]),
        (["bfloat16"], None, "cpu", False, ["fp32", "bf16"], []),
        (["fp16", "fp32"], "int8", "cpu", True, ["fp32", "fp16", "int8"], []),
        ([], "int8", "cpu", True, ["fp32", "int8"], []),
    ],
)
def test_precisions(dtypes, rounding, device, fast, names, left_out, monkeypatch):
    monkeypatch.setattr(products, "gain", lambda to: 2.0 if fast else 0.5)
    found, missing = bench_asr.precisions(dtypes, rounding, torch.device(device))
    assert (list(found), list(missing)) == (names, left_out)
    assert found["fp32"] == ("fp32", None)
    assert found.get("int8", ("fp32", "int8")) == ("fp32", "int8")
    assert found.get("bf16", ("bf16", None)) == ("bf16", None)


def speed(draft=PLAIN, precision="fp32", **more):
    given = {"speedup": (1.7, 1.61, 1.82), "same_as_undrafted": 1.0, "same_as_fp32": 0.875}
    given |= {"ms_per_token": 19.074, "encoder_ms": 1031.83, "rtfx": 8.123, "megabytes": 14.52}
    return RecogniserSpeed(draft=draft, precision=precision, **given | more)


GIVEN = {
    "language": None,
    "task": None,
    "timestamps": True,
    "max_new_tokens": None,
    "batch_size": 8,
    "device": "cpu",
}


@pytest.mark.parametrize(
    ("row", "data", "given", "command"),
    [
        (speed(), ["a b.wav", "c"], {}, "'a b.wav' c --model M"),
        (speed("medusa"), ["t.jsonl"], {}, "--data t.jsonl --model M --draft medusa"),
        (speed("x", "int8"), ["c"], {}, "c --model M --draft x --quantize int8"),
        (speed("x", "bf16"), ["c"], {}, "c --model M --draft x --dtype bf16"),
        (
            speed("x", "fp8"),
            ["c"],
            {"device": "cuda:1"},
            "c --model M --draft x --quantize fp8 --device cuda:1",
        ),
        (
            speed(),
            ["zoo:real-clips"],
            {"language": "en", "timestamps": False, "max_new_tokens": 9, "batch_size": 2},
            "--data zoo:real-clips --model M --batch-size 2 --language en --max-new-tokens 9 "
            "--no-timestamps",
        ),
        (speed(), ["c"], {"device": "cuda:1"}, "c --model M --dtype fp32 --device cuda:1"),
    ],
)
def test_the_command_says_what_was_measured(row, data, given, command, monkeypatch):
    def device_of(name):
        return torch.device("cpu" if name == "auto" else name)

    def dtype_of(name, model="", device=None):
        half = name == "auto" and device_of(device).type == "cuda"
        return torch.bfloat16 if half or name == "bf16" else torch.float32

    monkeypatch.setattr(bench_asr, "device_of", device_of)
    monkeypatch.setattr(bench_asr, "dtype_of", dtype_of)
    found = bench_asr.command_of(row, "M", data, GIVEN | given)
    assert found == f"mmdecode transcribe {command}"


def shown(rows, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(bench_asr.table_of(rows, "title", width))
    return console.export_text()


def test_the_table_fits_a_narrow_terminal():
    errors = Errors(value=0.068, low=0.053, high=0.083, more=0, more_low=0, more_high=0)
    rows = [
        speed(AGAIN, tokens_per_pass=1.0, errors=errors),
        speed("medusa:path=[bold]", "int8", tokens_per_pass=3.214, errors=errors),
        speed("lookup", problem="does not fit"),
    ]
    narrow, wide = shown(rows, 80), shown(rows, 120)
    assert "…" not in narrow + wide
    for text in (AGAIN, "int8", "3.21", "19.1", "1032", "8.12", "1.61-1.82", "88%", "5.3-8.3"):
        assert text in narrow, text
    for text in ("medusa:path=[bold]", "1.70 [1.61, 1.82]", "6.8 [5.3, 8.3]", "14.5", "100%"):
        assert text in wide, text
    assert "WER" in wide and "WER" not in shown([speed()], 120)
    [failed] = [line for line in wide.splitlines() if "lookup" in line]
    assert failed.split()[2:] == ["-"] * 9


def test_notes_say_what_failed_and_what_was_left_out():
    rows = [speed("x", problem="why"), speed("x", "int8", problem="why"), speed("m", "int8")]
    rows.append(speed("b", same_as_undrafted=0.5, exact=True))
    left_out = {"a": "slower", "bf16": "no instructions", "c": "slower"}
    failed, broken, slower, other = bench_asr.notes_of(rows, left_out, None)
    assert failed == "x in fp32 and int8 was not measured: why"
    assert broken.startswith("b in fp32 does not keep the tokens of undrafted fp32")
    assert (slower, other) == ("left out: a, c (slower)", "left out: bf16 (no instructions)")
    assert bench_asr.notes_of([speed()], {}, "needs jiwer") == ["no word errors: needs jiwer"]


def test_texts_are_scored_only_if_all_recordings_have_one():
    rows = [speed(texts=("one", "two")), speed(AGAIN, texts=("one", "x"))]

    def scored(*texts):
        entries = [SimpleNamespace(text=text, language=None) for text in texts]
        return with_errors(rows, entries, None)

    found, unscored = scored("one", "two")
    assert [row.errors.value for row in found] == [0, 0.5] and unscored is None
    assert scored("one", None) == (rows, None)
    assert np.isfinite(found[1].errors.high)


def test_two_tables_and_no_readable_recording_are_refused(tmp_path):
    with pytest.raises(OptionError, match="names 2 tables"):
        raise invoke("bench", "asr", "--data", "a.jsonl", "--data", "b.csv").exception
    (tmp_path / "a.wav").write_bytes(b"none")
    done = invoke("bench", "asr", "--data", str(tmp_path), "--dtype", "fp32")
    assert isinstance(done.exception, InputError) and "none of the recordings" in str(
        done.exception
    )


@pytest.mark.slow
def test_the_command_measures_recommends_and_writes(tmp_path):
    out = tmp_path / "out"
    given = ["--limit", "2", "--repeats", "1", "--max-new-tokens", "6", "--out", str(out)]
    given += ["--quantize", "int8"]
    found = json_of(invoke("bench", "asr", *given, "--json"))
    written = json.loads((out / "results.json").read_text())
    assert found["rows"] == written["rows"] and found["recommendation"]["why"]
    rows = {(row["draft"], row["precision"]): row for row in found["rows"]}
    assert {(PLAIN, "fp32"), (AGAIN, "fp32"), (GENERATE, "fp32"), (PLAIN, "int8")} <= set(rows)
    assert any(draft == "medusa" for draft, _ in rows)
    assert all(row["same_as_undrafted"] == 1 for row in rows.values())
    assert all(row["errors"]["value"] <= 1 for row in rows.values())
    assert rows[PLAIN, "int8"]["megabytes"] < 0.5 * rows[PLAIN, "fp32"]["megabytes"]
    command = found["recommendation"]["command"]
    assert command.startswith(f"mmdecode transcribe --data zoo:speech-test --model {MODEL}")
    (out / "results.json").write_text("changed by its reader")
    done = invoke("bench", "asr", *given)
    assert "results.json" in str(done.exception)  # never replaced unasked


def test_memory_of_rounded_weights_counts_packed_matrices():
    layer = torch.nn.Linear(64, 32)
    assert weight_bytes(layer) == 4 * (64 * 32 + 32)
    # integers, a scale for each output, and the bias
    assert weight_bytes(torch.nn.Sequential(Int8Linear.of(layer))) == 64 * 32 + 4 * 32 + 4 * 32


@pytest.mark.slow
def test_a_model_that_is_rounded_already_is_refused(tmp_path):
    model, processor = load(MODEL, "cpu", "fp32", "int8")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    done = invoke("bench", "asr", "--model", str(tmp_path), "--limit", "1", "--device", "cpu")
    assert "has int8 weights; name the float model" in str(done.exception)


@pytest.mark.slow
def test_generate_decodes_a_moonshine(tmp_path):
    name = "moonshine:tiny-en"
    model, processor = load(name, "cpu", "fp32")
    ours = of_type("moonshine")(model, processor, make_options({"max_new_tokens": 8}))
    windows, _ = windows_of(ours, [opened(one) for one in read_manifest("zoo:real-clips", 1)])
    encoded = recogniser_speed.encoding(ours, windows[:1])()
    [way] = [w for w in ways_of({"fp32": ours}, [], name, True) if w.name == GENERATE]
    found = way.decode(windows[:1], encoded)
    [plain] = [w for w in ways_of({"fp32": ours}, [], name, False) if w.name == PLAIN]
    assert way.problem is None and found == plain.decode(windows[:1], encoded)


def test_an_int8_model_is_not_drafted_for_by_itself(recogniser):
    ways = ways_of({"fp32": recogniser, "int8": recogniser}, ["quantized"], MODEL, False)
    assert [(w.name, w.precision) for w in ways][2:] == [("quantized", "fp32"), (PLAIN, "int8")]
