"""Benchmarks are tried on toys or on a clip; pages show what their result files hold."""

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from mmdecode import registry
from mmdecode.quantization.models import weight_bytes
from mmdecode.runs.files import is_own
from mmdecode.zoo.real_clips import RATE, real_clips
from mmdecode.zoo.speech import speech_test
from tests.support.files import write_json_lines
from tests.support.moonshine import needs_wheel

ROOT = Path(__file__).parents[1]


@pytest.fixture
def drafters(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import drafters

    return drafters


def run(*words, script="step_speed.py", path=""):
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_step_speed_measures_toys_and_finds_the_ids_of_generate(tmp_path):
    words = ["--device", "cpu", "--dtype", "float32", "--scale", "tiny", "--repeats", "1"]
    run(*words, "--out", str(tmp_path))
    (path,) = tmp_path.glob("step-cpu-*.json")
    shapes = json.loads(path.read_text())["shapes"]
    assert [shape["shape"] for shape in shapes] == ["whisper", "llama"]
    for shape in shapes:
        rows = {row["engine"]: row for row in shape["rows"]}
        assert rows["undrafted"]["same_ids_as_generate"]
        drafted = [row for name, row in rows.items() if name.startswith("free drafter")]
        lengths = [row["tokens_per_pass"] for row in drafted]
        assert len(lengths) == 3 and lengths == sorted(lengths)
        assert shape["floor_ms"] > 0


@pytest.mark.slow
def test_steps_of_int8_toys_read_a_quarter_of_the_weights(tmp_path):
    words = ["--device", "cpu", "--dtype", "float32", "--scale", "tiny", "--repeats", "1"]
    run(*words, "--quantize", "int8", "--out", str(tmp_path))
    (path,) = tmp_path.glob("step-cpu-int8-*.json")
    result = json.loads(path.read_text())
    assert result["machine"]["weights"] == "int8"
    for shape in result["shapes"]:
        rows = {row["engine"]: row for row in shape["rows"]}
        assert rows["undrafted"]["ms_per_token"] > 0 and len(rows) == 5


def test_weights_of_a_rounded_toy_are_counted(benchmarks):
    rounding, steps = importlib.import_module("rounding"), importlib.import_module("step_speed")
    given = (torch.device("cpu"), torch.float32)
    for shape in steps.shapes("tiny").values():
        whole, rounded = steps.build(shape, *given)[0], steps.build(shape, *given, "int8")[0]
        assert rounding.weight_count(rounded) >= rounding.weight_count(whole)
        share = weight_bytes(rounded) / weight_bytes(whole)
        assert 0.25 < share < 0.65  # toys have many norms and an untied output matrix
        assert steps.step_bytes(rounded, shape) < steps.step_bytes(whole, shape)
    assert rounding.form_of("cpu", compiled=True, quantize="int8") == "cpu-compiled-int8"


def test_engines_that_compile_run_where_they_are_named(benchmarks):
    peers = importlib.import_module("peers")
    assert set(peers.ASKED_FOR) < set(peers.MAKERS)
    assert "compiled" in peers.names(1, torch.device("cpu"))
    assert "torchao int8" not in peers.names(1, torch.device("cuda"))


@pytest.mark.slow
def test_step_speed_says_that_it_was_not_run(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "not run" in run()


@pytest.mark.slow
def test_drafters_are_measured_on_a_clip(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\nold\n<!-- end of tables -->\nbehind\n")
    words = ["--limit", "1", "--repeats", "1", "--warm", "0", "--out", str(tmp_path)]
    run(*words, "--page", str(page), script="drafters.py")
    (path,) = tmp_path.glob("drafters-cpu-*.json")
    result = json.loads(path.read_text())
    cases = {
        case["case"]: {row["drafter"]: row for row in case["rows"]} for case in result["cases"]
    }
    for rows in cases.values():
        assert all(row["identical"] in (True, None) for row in rows.values())
        assert rows["undrafted"]["tokens_per_pass"] == 1
    greedy = cases["greedy"]
    assert greedy["assistant: the model itself"]["accepted_share"] == 1
    assert greedy["medusa, block, 12 nodes"]["tokens_per_pass"] > 2
    judged = {name for name, row in cases["sampled"].items() if row["identical"] is None}
    assert judged and all(re.search("rejection|membership", name) for name in judged)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n") and "old" not in text
    assert path.name in text and "| lookup |" in text


@pytest.mark.slow
def test_drafters_are_measured_following_a_guide_and_not(tmp_path):
    words = ["--guide", "vcd", "--only", "medusa", "--only", "assistant, text only"]
    words += ["--scenes", "2", "--tokens", "12", "--out", str(tmp_path)]
    run(*words, script="guided_drafts.py")
    (path,) = tmp_path.glob("guided-drafts-cpu-*.json")
    cases = json.loads(path.read_text())["cases"]
    assert [case["sampled"] for case in cases] == [False, True]
    for medusa, assistant in (case["rows"] for case in cases):
        assert medusa["identical"] and assistant["identical"]
        assert not medusa["why_unguided"] and "words" in assistant["why_unguided"][0]
        assert len(set(assistant["tokens_per_pass"])) == 1


def page_and_result(page, tables, name="tables"):
    """A page whose tables are those of its result file, and the result."""
    text = (ROOT / "docs" / page).read_text()
    shown = re.search(f"<!-- {name} -->\n(.*)\n<!-- end of {name} -->", text, re.DOTALL)[1]
    name = re.search("benchmarks/results/([\\w.-]+json)", shown)[1]
    result = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    assert shown == tables(result, name)
    return text, result


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("asr_speed.md", "asr_tables"),
        ("streaming.md", "streaming"),
        ("guidance_cost.md", "guidance_cost"),
        ("guided_drafts.md", "guided_drafts"),
        ("real_speech.md", "real_speech_tables"),
        ("serve.md", "serve_tables"),
        ("causal.md", "causal"),
        ("ctc.md", "ctc"),
        ("punctuation.md", "punctuation"),
        ("alternatives.md", "alternatives"),
    ],
)
def test_a_page_shows_its_result_file(page, module, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page_and_result(page, importlib.import_module(module).tables)


def test_the_page_of_int8_shows_its_result_file(benchmarks):
    from asr_tables import wide_tables

    _, result = page_and_result("int8_speed.md", wide_tables)
    assert all(row["decode_s"] for row in result["best"] if row["exact"])


def test_an_object_in_another_process(benchmarks):
    from apart import Apart, Kept

    there = Apart(list, ["a", "b"])
    assert there.call("index", "b") == 1
    kept = there.keep("copy")
    assert isinstance(kept, Kept)
    assert there.call("__add__", kept) == ["a", "b", "a", "b"]
    with pytest.raises(ValueError, match="is not in list"):
        there.call("index", "c")


def test_parts_of_a_window_add_up(benchmarks):
    from asr_tables import parts_of

    row = {"windows": 2, "decode_s": 1.0, "first_s": 0.2, "tokens": 22, "encoder_s": 3.0}
    assert parts_of(row) == pytest.approx((1500, 100, 40))


def test_an_engine_whose_ids_differ_has_a_whole_line(benchmarks):
    from asr_tables import wide_table

    case = {"batch": 1, "timestamps": False, "identical_share": 1, "wer": None}
    row = {"windows": 2, "decode_s": 1.0, "first_s": 0.2, "tokens": 22, "encoder_s": 3.0}
    row |= case | {"engine": "CTranslate2 int8", "tokens_per_pass": None}
    shown = wide_table([row, row | {"engine": "medusa", "decode_s": None}], 1, False)
    assert len({line.count("|") for line in shown.splitlines()}) == 1
    assert "| 1.00 | 1.00 | 1.00 |" in shown


MARKED = {
    "asr_speed.md": "tables", "bias.md": "tables", "fusion.md": "tables",
    "int8_speed.md": "tables",
    "drafters.md": "tables", "guidance_cost.md": "tables",
    "guided_drafts.md": "tables", "hallucination.md": "tables", "image_speed.md": "tables",
    "real_speech.md": "tables", "real_sizes.md": "tables",
    "serve.md": "tables", "streaming.md": "tables", "vlm_speed.md": "tables",
    "results.md": "measured",
}  # fmt: skip


def test_sentences_on_published_checkpoints_follow_from_the_results(benchmarks):
    measured, pages = importlib.import_module("measured"), importlib.import_module("pages")
    begin, end = pages.marks(measured.NAME)
    shown = measured.shown(ROOT / "benchmarks" / "results")
    text = measured.PAGE.read_text(encoding="utf-8")
    assert f"{begin}\n{shown}\n{end}" in text, "run: python benchmarks/measured.py"


def test_listed_names_are_counted_as_words(benchmarks):
    bias = importlib.import_module("bias")
    assert bias.has("Mr. Okonkwo's", "okonkwo") and not bias.has("the annual", "ann")
    texts = {"with": ["Ann", "ann.", "Anna", "Bo", "Ann Bo", "x"], "without": ["a b", "a Bo"]}
    found = bias.judged(["Ann", "Bo"], ["a b", "a b"], texts)
    assert (found["recall"], found["another"], found["false_alarms"]) == (4 / 6, 1 / 6, 0.5)
    assert found["wer"] == 1 / 4 and len(set(bias.NAMES)) == 50


@pytest.mark.slow
def test_the_benchmark_of_bias_runs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- tables -->\n<!-- end of tables -->\n")
    words = ["--names", "2", "--sentences", "2", "--bonus", "0", "8", "--page", str(page)]
    program = [sys.executable, "benchmarks/bias.py", *words, "--report", str(tmp_path / "b.json")]
    subprocess.run(program, check=True, cwd=ROOT)
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["pay"], row["bonus"]) for row in rows] == [
        ("spread", 0),
        ("spread", 8),
        ("end", 8),
    ]
    assert "| no bias | 0 |" in page.read_text()


def real_row(way, threads, ms, over, **more):
    row = {"way": way, "batch": 1, "threads": threads, "clips": 9, "identical": 9, "rtf": 0.05}
    row |= {"ms_per_token": ms, "over_generate": over, "tokens_per_pass": None}
    return row | {"word_errors": 3, "words": 200} | more


def test_rows_of_a_published_checkpoint_are_measured_or_called_not_measured(benchmarks, tmp_path):
    measured = importlib.import_module("measured")
    results = ROOT / "benchmarks" / "results"
    synthetic = measured.newest(results, "asr-cpu-*.json")
    none = measured.first_table(None, synthetic)
    assert none.count("**published** |") == 3 and none.count("| not measured |") == 6
    assert "not measured yet" in none
    rows = [
        real_row("generate", 1, 11.0, [1, 1, 1]),
        real_row("generate", 2, 12.0, [1, 1, 1]),
        real_row("undrafted", 1, 8.0, [1.4, 1.3, 1.5], tokens_per_pass=1.0),
        real_row("undrafted", 2, 3.0, [4, 4, 4]),
        real_row("lookup", 1, 9.0, [1.2, 1.1, 1.3], identical=8, tokens_per_pass=1.1),
        real_row("recycling, 8 nodes", 1, 10.0, [1.1, 1, 1.2], tokens_per_pass=1.3),
        real_row("onnxruntime, the publisher's int8", 1, 4.0, [2.5, 2.4, 2.6], identical=2),
        real_row("transformers' pipeline", 1, None, None),
    ]
    facts = {"date": "2026-01-02", "clips": 9, "audio_s": 65.4, "reference_words": 200}
    facts |= {"load_at_start": 0.24}
    result = {"machine": facts, "short": rows}
    (tmp_path / "real-speech-cpu-a.json").write_text(json.dumps(result))
    cut_short = {"machine": facts | {"date": "2026-01-03", "limited": True}, "short": []}
    (tmp_path / "real-speech-cpu-b.json").write_text(json.dumps(cut_short))
    real = measured.newest(tmp_path, "real-speech-cpu-*.json")
    first = measured.first_table(real, synthetic).splitlines()
    assert first[2].endswith("no draft | 1.40 [1.30, 1.50] | 1.00 | 9 of 9 | 3 (1.5 %) |")
    assert first[3].endswith(
        "the quickest drafter: lookup | 1.20 [1.10, 1.30] | 1.10 | 8 of 9 | 3 (1.5 %) |"
    )
    assert first[4].endswith("int8 | 2.50 [2.40, 2.60] |  | 2 of 9 | 3 (1.5 %) |")
    assert "9 recordings of people, 65 s, 200 words" in first[-1] and "-cpu-a.json" in first[-1]


def test_the_page_shows_how_images_are_distributed(benchmarks):
    tables = importlib.import_module("image_distribution").tables
    page_and_result("image_speed.md", tables, "distribution")


def test_the_page_shows_what_is_written_with_int8_weights(benchmarks):
    tables = importlib.import_module("real_texts").tables
    _, result = page_and_result("real_speech.md", tables, "texts")
    assert result["same_tokens"] == len(result["rows"]) == len(real_clips())
    result["same_tokens"] -= 1
    assert "in 10 of 11. THEY HAVE TO BE THE SAME." in tables(result, "r.json")


@pytest.mark.parametrize("page", MARKED)
def test_a_page_is_filled_twice_and_its_own_text_stays(page, benchmarks, tmp_path):
    pages = importlib.import_module("pages")
    own = tmp_path / "page.md"
    own.write_text((ROOT / "docs" / page).read_text())
    for tables in ("| first |", "| second |"):
        pages.write_page(own, tables, MARKED[page])
    begin, end = pages.marks(MARKED[page])
    cut = re.compile(f"{begin}.*{end}", re.DOTALL)
    assert own.read_text() == cut.sub(
        f"{begin}\n| second |\n{end}", (ROOT / "docs" / page).read_text()
    )
    assert not is_own(own), "the rest of the page is not ours"


def test_a_benchmark_refuses_before_it_measures_and_replaces_its_own(benchmarks, tmp_path, capsys):
    pages = importlib.import_module("pages")

    def parsed(*words, **more):
        parser = argparse.ArgumentParser()
        parser.add_argument("--out", type=Path)
        parser.add_argument("--page", type=Path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["x.py", "--out", str(tmp_path), *map(str, words)])
            return pages.parsed(parser, **more)

    for number in range(2):
        parsed()
        pages.write_result(tmp_path / "made.json", {"number": number})
    assert json.loads((tmp_path / "made.json").read_text())["number"] == 1
    (tmp_path / "page.md").write_text("a page without marks")
    with pytest.raises(SystemExit):
        parsed("--page", tmp_path / "page.md")
    assert "no place for the tables" in capsys.readouterr().err
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(SystemExit):
        parsed()
    assert "notes.json: there already" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["bias", "correction_speed"])
def test_a_benchmark_with_a_single_result_refuses_one_that_is_not_its_own(
    script, benchmarks, tmp_path, capsys, monkeypatch
):
    theirs = tmp_path / "theirs.json"
    theirs.write_text("{}")
    words = ["--report", str(theirs)] + ["--corrector", "x"] * (script == "correction_speed")
    monkeypatch.setattr(sys, "argv", ["x.py", *words])
    with pytest.raises(SystemExit):
        importlib.import_module(script).main()
    assert "theirs.json: there already" in capsys.readouterr().err


def test_committed_results_are_known_as_ours():
    results = [*(ROOT / "benchmarks" / "results").rglob("*.json")]
    assert len(results) > 20
    assert not [str(path) for path in results if not is_own(path)]


@pytest.mark.slow
def test_fusion_is_tuned_measured_and_resumed_on_a_few_utterances(tmp_path):
    words = ["--recogniser", "zoo:whisper-synth", "--language", "zoo:lm-synth", "--no-controls"]
    words += ["--utterances", "2", "--unseen", "1", "--development", "1", "--snr", "9"]
    words += ["--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    shown = run(*words, script="fusion.py")
    assert "| test, 9 dB | 2 |" in shown and "| unseen, 9 dB | 1 |" in shown
    first = json.loads((tmp_path / "grammar.json").read_text())
    tuned, case = first["tuned"], first["cases"]["test, 9 dB"]
    assert 8 <= tuned["beams"] <= 32 and tuned["best"] in ("static", "shallow", "uadf")
    assert case["o_cp"] <= case["o_nb"] <= case["rates"]["1-best"]["wer"]
    words[words.index("--utterances") + 1] = "3"
    assert "| test, 9 dB | 3 |" in run(*words, script="fusion.py")
    [rows] = (tmp_path / "work").rglob("test-9.jsonl")
    assert len({json.loads(line)["id"] for line in rows.read_text().splitlines()}) == 3


@pytest.mark.slow
def test_streams_are_measured_on_a_clip(tmp_path):
    words = ["--limit", "1", "--parts", "curves", "--out", str(tmp_path)]
    assert "agreement" in run(*words, script="streaming.py")
    (path,) = tmp_path.glob("streaming-cpu-*.json")
    rows = json.loads(path.read_text())["curves"]
    assert len(rows) > 20 and all(row["wer"] >= 0 and row["dal"] > 0 for row in rows)


def test_the_page_of_drafters_shows_its_result_file(drafters):
    page, result = page_and_result("drafters.md", drafters.tables)
    rows = [row for case in result["cases"] for row in case["rows"]]
    assert False not in [row["identical"] for row in rows]
    registered = {e.name for e in registry.describe("draft") if not e.plugin}
    # measured on image tokens, on answers about images, or nowhere yet
    elsewhere = {"jacobi", "amateur", "eagle", "sparse", "swift", "clasp", "lookahead"}
    elsewhere |= {"vispec", "dream", "flash", "hydra", "kangaroo", "quantized", "ctc"}
    assert registered - elsewhere <= {re.match("\\w+", row["drafter"])[0] for row in rows}
    assert registered <= set(re.findall("^\\| `(\\w+)` ", page, re.MULTILINE))


def test_gains_are_per_token_and_compared_clip_by_clip(drafters):
    rng = np.random.default_rng(1)
    tokens, pace = rng.integers(5, 50, 40), rng.uniform(0.5, 5, 40)
    base = drafters.Cost(tokens * pace, tokens)
    value, low, high = drafters.Cost(tokens * pace / 2, tokens).over(base)
    assert (value, low, high) == (2, 2, 2)  # clips differ by far more than the ways do
    longer = drafters.Cost(tokens * pace * 3, tokens * 3)
    assert longer.over(base) == (1, 1, 1)
    noisy = drafters.Cost(tokens * pace * rng.uniform(0.4, 0.6, 40), tokens)
    value, low, high = noisy.over(base)
    assert 1.8 < low < value < high < 2.2
    few = drafters.Cost(np.array([1.0, 4.0]), np.array([1, 1]))
    assert drafters.Cost(np.array([1.0, 2.0]), np.array([1, 1])).over(few) == (1.667, 1, 2)


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "real")


@pytest.fixture
def call(benchmarks, monkeypatch, capsys):
    """Runs a script in this process, where everything is imported already."""

    def called(script, *words):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
        importlib.import_module(script).main()
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    yield called
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_speech_is_measured_next_to_its_peers(call, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\n<!-- end of tables -->\n")
    words = ["--quick", "--parts", "short", "long", "--out", str(tmp_path), "--page", str(page)]
    call("asr_speed", *words, "--engines", "undrafted", "medusa", "CTranslate2")
    (path,) = tmp_path.glob("asr-cpu-*.json")
    result = json.loads(path.read_text())
    names = {"generate", "undrafted", "medusa", "CTranslate2"}
    assert {row["engine"] for row in result["best"]} == names
    cases = {(row["batch"], row["timestamps"]) for row in result["best"]}
    assert cases == {(1, False), (1, True), (2, False), (2, True)}
    rows = result["rows"] + result["long"]["rows"]
    assert all(row["identical_share"] == 1 for row in rows)
    assert all(0 < row["encoder_share"] < 1 for row in rows)
    assert len({row["wer"] for row in result["rows"]}) == 1 and rows[0]["wer"] < 0.5
    drafted = [row for row in result["rows"] if row["engine"] == "medusa"]
    assert all(row["tokens_per_pass"] > 2 for row in drafted)
    assert {(row["engine"], row["batch"]) for row in result["long"]["rows"]} == {
        (name, batch) for name in names for batch in (1, 2)
    }
    text = page.read_text()
    assert path.name in text and "**Long form**" in text and "| CTranslate2 |" in text


@pytest.mark.slow
def test_memory_is_that_of_one_engine(benchmarks):
    from asr_tables import memory_table
    from peak_memory import measure
    from peers import Checkpoint

    checkpoint = Checkpoint("zoo:whisper-synth", "zoo:whisper-synth-medusa")
    rows = measure(checkpoint, ["undrafted"], [1, 32])
    assert [row["engine"] for row in rows] == ["undrafted"]
    assert 14 < rows[0]["loaded_mb"] < 500, "the weights alone are 14"
    assert rows[0]["peak_mb"]["32"] > 10 and rows[0]["peak_mb"]["1"] < rows[0]["peak_mb"]["32"]
    assert "peak, batch 32" in memory_table(rows)


@pytest.mark.slow
def test_speech_is_measured_without_packages_that_a_gpu_machine_lacks(tmp_path):
    hidden = ("ctranslate2", "soundfile", "librosa", "jiwer", "kaldialign")
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *rest: (\n"
        f"    None if name.partition('.')[0] in {hidden} else find(name, *rest)\n"
        ")\n"
    )
    words = ["--quick", "--parts", "short", "long", "--engines", "undrafted", "CTranslate2"]
    shown = run(*words, "--out", str(tmp_path), script="asr_speed.py", path=str(tmp_path))
    assert "CTranslate2 is left out" in shown and "long form is left out" in shown
    (path,) = tmp_path.glob("asr-cpu-*.json")
    result = json.loads(path.read_text())
    assert {row["engine"] for row in result["best"]} == {"generate", "undrafted"}
    assert {row["wer"] for row in result["best"]} == {None} and "long" not in result


def test_an_exact_engine_whose_ids_differ_gets_no_time(benchmarks, monkeypatch):
    import asr_speed
    import peers

    def engine(ids, as_of="generate"):
        def decode(states):
            time.sleep(0.01)
            return [list(ids) for _ in states]

        return peers.Engine(decode, lambda features: features, as_of=as_of)

    makers = {
        "generate": engine([1, 2, 3]),
        "undrafted": engine([1, 2, 3]),
        "medusa": engine([1, 2]),
        "CTranslate2": engine([1, 2], None),
        "int8": engine([1], None),
        "int8, drafted": engine([1], "int8"),
        "int8, wrong": engine([2], "int8"),
    }
    monkeypatch.setattr(peers, "MAKERS", {n: lambda c, t, e=e: e for n, e in makers.items()})
    monkeypatch.setattr(asr_speed, "encode", lambda model, features: features)
    monkeypatch.setattr(asr_speed, "reference_texts", lambda checkpoint, count: None)
    checkpoint = peers.Checkpoint("none", "none")
    checkpoint.model, checkpoint.settings = None, None
    rows = asr_speed.measure(checkpoint, torch.zeros(4, 1), (2, False), [*makers], 3)
    asr_speed.compare(rows)
    times = {row["engine"]: row["ms_per_token_row"] for row in rows}
    shares = {row["engine"]: row["identical_share"] for row in rows}
    assert times["medusa"] is None and rows[2]["over_generate"] is None
    assert times["int8, wrong"] is None
    assert times["generate"] and times["CTranslate2"] and times["int8"] and times["int8, drafted"]
    assert [name for name, share in shares.items() if share] == ["generate", "undrafted"]


def test_the_encoder_is_subtracted_only_where_it_ran(benchmarks):
    from asr_speed import timing

    spent, encoder = [[5.0, 6.0], [5.0, 60.0], [4.0, 6.0]], [[1.0, 1.0], [1.0, 9.0], [1.0, 1.0]]
    assert timing(spent, encoder, True)["decode_s"] == 9
    after_encoder = timing(spent, encoder, False)
    assert after_encoder["decode_s"] == 11 and after_encoder["encoder_share"] == round(2 / 13, 3)
    assert after_encoder["spread"] == 6.5


def test_each_engine_is_shown_at_its_best(benchmarks):
    from asr_speed import best_of

    rows = [
        {"engine": "a", "threads": 1, "ms_per_token_row": 2.0},
        {"engine": "b", "threads": 1, "ms_per_token_row": None},
        {"engine": "a", "threads": 2, "ms_per_token_row": 1.0},
        {"engine": "b", "threads": 2, "ms_per_token_row": 3.0},
    ]
    assert [(row["engine"], row["threads"]) for row in best_of(rows)] == [("a", 2), ("b", 2)]
    assert best_of(rows[::-1])[0] is not rows[3] and best_of(rows[2:3])[0]["threads"] == 2


def test_recordings_are_joined_clips(benchmarks):
    from long_form_speed import recordings

    found = recordings(2, 9.0)
    assert all(len(wave) > 9 * 16_000 and text.count(".") + text.count("?") for wave, text in found)
    assert found[0][1] != found[1][1] and recordings(2, 9.0)[1][1] == found[1][1]


def test_peers_transcribe_a_manifest_and_are_scored(call, tmp_path):
    clips = speech_test()[:3]
    manifest, out = tmp_path / "manifest.jsonl", tmp_path / "theirs.jsonl"
    lines = [{"id": c.name, "audio": str(c.path), "text": c.text} for c in clips]
    write_json_lines(manifest, lines)
    words = ["transformers", "--model", "zoo:whisper-synth", "--data", str(manifest)]
    words += ["--report", str(out), "--device", "cpu", "--dtype", "float32", "--batch-size", "2"]
    call("run_peer", *words, "--fallback")
    from mmdecode.asr.output.manifest import read_manifest
    from mmdecode.evaluation.speech.samples import match

    samples = match(read_manifest(manifest, text=True), out, "transformers")
    assert all(sample.pred_text[0].isupper() and sample.time > 0 for sample in samples)
    assert [sample.id for sample in samples] == [clip.name for clip in clips]


FAKE_PEERS = {
    "faster_whisper": """
from types import SimpleNamespace
class WhisperModel:
    def __init__(self, model, device, compute_type): self.kind = compute_type
    def transcribe(self, wave, **options):
        assert len(wave) > 16_000 and "batch_size" not in options
        assert options["log_prob_threshold"] is options["no_speech_threshold"] is None
        return iter([SimpleNamespace(text=f" {self.kind}"), SimpleNamespace(text=" said")]), None
class BatchedInferencePipeline:
    def __init__(self, model): self.model = model
    def transcribe(self, wave, batch_size, **options):
        self.model.kind += f" by {batch_size}"
        return self.model.transcribe(wave, **options)
""",
    "whisper": """
from types import SimpleNamespace
def load_model(name, device):
    def transcribe(wave, logprob_threshold, **options):
        assert len(wave) > 16_000 and logprob_threshold is options["no_speech_threshold"] is None
        return {"text": " float32 said"}
    return SimpleNamespace(transcribe=transcribe)
""",
}


@pytest.mark.parametrize(
    ("package", "words", "text"),
    [
        ("faster-whisper", [], "float32 said"),
        ("faster-whisper", ["--compute-type", "int8"], "int8 said"),
        ("faster-whisper", ["--batch-size", "4"], "float32 by 4 by 4 said"),
        ("openai-whisper", [], "float32 said"),
    ],
)
def test_other_packages_are_called_as_they_want(call, monkeypatch, tmp_path, package, words, text):
    for name, code in FAKE_PEERS.items():
        exec(code, vars(fake := ModuleType(name)))
        monkeypatch.setitem(sys.modules, name, fake)
    manifest, out = tmp_path / "manifest.jsonl", tmp_path / "theirs.jsonl"
    entry = {"id": "a", "audio": str(speech_test()[0].path), "duration": 2.5}
    manifest.write_text(json.dumps(entry) + "\n")
    words = [package, *words, "--model", "m", "--data", str(manifest), "--report", str(out)]
    call("run_peer", *words, "--dtype", "float32")
    line = json.loads(out.read_text())
    assert (line["id"], line["pred_text"], line["duration"]) == ("a", text, 2.5)


FAKE_HUB = """
class Audio:
    def __init__(self, decode): assert not decode
class Set(list):
    def cast_column(self, name, kind): return self
    def take(self, count): return self[:count]
def load_dataset(path, name, split, streaming):
    assert streaming and (path, name, split) == ("some/set", "clean", "test")
    data = FILE.read_bytes()
    return Set({"id": i, "text": "A text.", "audio": {"bytes": data, "path": None},
                "speaker_id": 7} for i in (11, 12, 13))
"""


def test_a_set_of_the_hub_becomes_a_manifest(call, monkeypatch, tmp_path):
    from mmdecode.asr.output.manifest import read_manifest

    clip = speech_test()[0]
    fake = ModuleType("datasets")
    exec(FAKE_HUB, vars(fake))
    fake.FILE = clip.path
    monkeypatch.setitem(sys.modules, "datasets", fake)
    words = ["some/set", "--name", "clean", "--out", str(tmp_path / "set"), "--limit", "2"]
    call("prepare", *words)
    entries = read_manifest(tmp_path / "set" / "manifest.jsonl", text=True)
    assert [entry.id for entry in entries] == ["11", "12"]
    assert entries[0].speaker == "7" and abs(entries[0].duration_s - clip.duration_s) < 0.01
    assert Path(entries[1].audio).read_bytes() == clip.path.read_bytes()
    assert Path(entries[1].audio).suffix == ".ogg"


# The server


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_server_is_measured_in_every_part(call, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\n<!-- end of tables -->\n")
    words = ["--limit", "3", "--repeats", "1", "--clients", "2", "--streams", "1", "2"]
    words += ["--seconds", "3", "--requests", "12", "--readers", "4", "--patience", "2"]
    words += ["--uploads", "40", "--out", str(tmp_path)]
    call("serve", *words, "--parts", "files", "overload", "hostile")
    (path,) = tmp_path.glob("serve-cpu-*.json")
    words += ["--onto", str(path), "--page", str(page)]
    call("serve", *words, "--parts", "capacity", "vanish", "slow")
    parts = {name: one["rows"] for name, one in json.loads(path.read_text())["parts"].items()}
    assert [*parts] == ["files", "capacity", "overload", "vanish", "slow", "hostile"]
    assert all(row["median_s"] > 0 for row in parts["files"] if row["way"] == "server")
    for row in [*parts["capacity"], *parts["overload"]]:
        assert row["matched"] > 0 and row["delay_s"] > 0 and row["equal"] == 1
    assert [row["streams"] for row in parts["capacity"]] == [1, 2]
    assert parts["vanish"][0]["clients"] == 9 and parts["vanish"][0]["memory_mb"][0] > 100
    *kinds, total = parts["hostile"]
    assert total["uploads"] == sum(row["uploads"] for row in kinds) == 40
    assert total["statuses"]["400"] > 10 and total["children"] >= 1
    text = page.read_text()
    assert path.name in text and "All that has to hold, held." in text


def test_what_does_not_hold_is_named_and_ends_the_benchmark_of_the_server(
    benchmarks, monkeypatch, tmp_path, capsys
):
    shown, script = importlib.import_module("serve_tables"), importlib.import_module("serve")
    vanished = {"clients": 20, "requests": 500, "vanished": 20, "wrong": 0, "stuck": 0}
    vanished |= {"memory_mb": [900, 990], "grown_percent": 10.0, "grown_counts": True}
    kept = {"held": 1, "held_counts": True, "clients": 32}
    facts = dict.fromkeys(("command", "model", "draft", "chat_model", "device", "cores"), "x")
    facts |= dict.fromkeys(("threads", "dtype", "torch", "transformers", "date"), "x")

    def result(row, part="vanish"):
        own = {"rows": [row], "load": [0.1, 0.2]}
        return {"machine": facts, "parts": {part: own}}

    assert shown.missed(result(vanished)) == ["vanish, 20 clients: memory grew by 10.0 %"]
    assert shown.missed(result(vanished | {"grown_counts": False})) == []
    assert shown.missed(result(vanished | {"grown_percent": 5.0})) == []
    for name, words in shown.NONE_OF.items():
        found = shown.missed(result({"kind": "all", name: 3}, "hostile"))
        assert found == [f"hostile, all: 3 {words}"]
    assert "not closed" in shown.missed(result(kept, "slow"))[0]
    assert shown.missed(result(kept | {"held_counts": False}, "slow")) == []
    path = tmp_path / "serve.json"
    for row, code in ((vanished, 1), (vanished | {"grown_percent": 1.0}, 0)):
        path.write_text(json.dumps(result(row)))
        words = ["serve.py", "--result", str(path), "--out", str(tmp_path / "none")]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) if code else contextlib.nullcontext() as ended:
            script.main()
        assert ended is None or ended.value.code == 1
        written = capsys.readouterr()
        assert ("MISSED: vanish, 20 clients: memory grew" in written.out) == bool(code)
        assert ("MISSED" in written.err) == bool(code)


@pytest.mark.slow
def test_hostile_uploads_are_the_same_each_time_and_of_every_kind(benchmarks):
    made = importlib.import_module("serve_uploads")
    from PIL import Image

    clip = speech_test()[3]

    def uploads(count, seed):
        image = Image.new("RGB", (64, 64), "red")
        return list(made.uploads(count, clip, image, ["http://127.0.0.1:1/a"], seed))

    first = uploads(300, 0)
    assert first == uploads(300, 0) and first[:50] != uploads(50, 1)
    assert {one.kind for one in first} == set(made.MIX)
    assert all(len(one.data) < 1 << 22 for one in first)
    assert sum(b"127.0.0.1:1" in one.data for one in first if one.kind == "playlist") > 5
    harmful = [data for way, data in made.bombs() if way == "image"]
    assert any(struct.pack(">II", 20_000, 20_000) in data for data in harmful)


def test_a_text_of_another_client_is_noticed(benchmarks, monkeypatch):
    clients = importlib.import_module("serve_clients")
    own = [(bytes([number]), f"text {number}") for number in range(4)]

    class Client:
        async def aclose(self):
            pass

    server = SimpleNamespace(client=Client)

    async def answered(http, data, pieces=False):
        await asyncio.sleep(0.001)
        return 200, f"text {data[0] + wrong}"

    monkeypatch.setattr(clients, "transcribed", answered)
    for wrong in (0, 1):
        row = asyncio.run(clients.vanishing(server, own, 400, 0))
        assert row["wrong"] == wrong * (400 - row["vanished"]) and 5 < row["vanished"] < 40
        assert row["unanswered"] == row["failed"] == 0


# Real speech


def test_recordings_of_clips_are_the_same_each_time_and_know_who_spoke_when(benchmarks):
    joined = importlib.import_module("recordings").joined
    clips = [clip for clip in real_clips() if clip.duration_s < 4]
    found, again = joined(20, clips), joined(20, clips)
    assert np.array_equal(found.samples, again.samples) and found.parts == again.parts
    assert 20 <= found.seconds < 20 + 4 + 1.5
    assert {part.name for part in found.parts[: len(clips)]} == {clip.name for clip in clips}
    waves = {clip.name: clip.samples() for clip in clips}
    for part, following in zip(found.parts, [*found.parts[1:], None], strict=True):
        start, end = (round(at * RATE) for at in (part.start_s, part.end_s))
        assert np.array_equal(found.samples[start:end], waves[part.name])
        pause = (following.start_s if following else found.seconds) - part.end_s
        assert 0.5 <= pause <= 1.51
    assert found.text == " ".join(part.text for part in found.parts)
    assert not np.array_equal(found.samples, joined(20, clips, seed=1).samples)


def way(name, ms, identical=11, batch=1, length=None, **more):
    known = {"threads": 2, "clips": 11, "encoder_ms_per_audio_s": 7.0, "rtf": 0.04, "words": 174}
    own = {"way": name, "batch": batch, "ms_per_token": ms, "identical": identical}
    ratio = None if ms is None else [round(10 / ms, 2), 1.1, 1.9]
    counted = {"tokens_per_pass": length, "over_generate": ratio, "word_errors": 10}
    return known | own | counted | more


def measured(*rows, ratio=0.9):
    """A result of real_speech.py that holds these rows."""
    facts = {"torch": "2", "transformers": "5", "onnxruntime": "1", "command": "python x"}
    facts |= {"model": "m", "parameters": 1, "clips": 11, "audio_s": 65, "repeats": 3, "cores": 2}
    facts |= {"device": "d", "dtype": "f", "date": "t", "limited": False}
    facts |= {"load_at_start": 0.1, "load_at_end": 0.9}
    piped = way("transformers' pipeline", None, 9, 8)
    long = [
        way("undrafted", 6.0, 3, over_pipeline=ratio, rtf=0.03 * ratio),
        piped | {"over_pipeline": 1.0, "rtf": 0.03, "identical": None},
    ]
    recording = {"minutes": 30, "audio_s": 1800, "clips": 9, "windows": 3, "repeats": 1}
    return {
        "machine": facts,
        "refused": {"swift": "it needs more"},
        "short": [way("generate", 10.0), *rows],
        "long": [recording | {"rows": long}],
        "memory": {"seconds": 300, "rows": []},
    }


def test_sentences_on_real_speech_follow_from_the_measurements(benchmarks):
    script = importlib.import_module("real_speech")
    shown = importlib.import_module("real_speech_tables")

    def page_of(result):
        return shown.tables(result | {"bars": script.bars(result)}, "r.json")

    undrafted, int8 = way("undrafted", 6.0, length=1.0), way("onnxruntime, int8", 4.0, 9)
    slow, fast = way("lookup", 7.0, length=1.1), way("lookahead", 5.0, length=1.4)
    text = page_of(measured(undrafted, slow, int8, way("transformers' pipeline", None, 8)))
    assert "1.67 [1.10, 1.90] times as fast a token" in text
    assert text.count(": held.") == 2 and "MISSED" not in text
    assert "None of these drafts gains time: the best, lookup, is 0.86" in text
    assert "int8 graphs take less than our float32 loop, 4.00 ms" in text
    assert "Onnxruntime, int8 has them in 9 of 11" in text and "pipeline has them in 8" in text
    assert "Every row of ours has the ids" in text and "- swift: it needs more." in text
    assert "174 reference words" in text and "10 (5.7 %) wrong" in text
    text = page_of(measured(way("undrafted", 9.0, length=1.0), fast, ratio=1.2))
    assert text.count(": MISSED.") == 2 and "Some draft gains time here: the best" in text
    assert "lookahead, is 1.80 times" in text
    text = page_of(measured(undrafted, fast | {"identical": 10}))
    assert "DIFFERENT ids than `generate` in rows of ours: lookahead" in text


def test_int8_rows_are_compared_with_the_int8_model_and_the_publishers(benchmarks):
    script = importlib.import_module("real_speech")
    shown = importlib.import_module("real_speech_tables")

    def page_of(*rows):
        found = measured(way("undrafted", 6.0, length=1.0), *rows)
        return shown.tables(found | {"bars": script.bars(found)}, "r.json")

    own = way("undrafted int8", 5.0, 9, length=1.0, as_undrafted=11)
    drafted = way("lookup int8", 4.0, 9, length=1.4, as_undrafted=11)
    theirs = way("onnxruntime, the publisher's int8", 4.5, 8)
    close, apart = {"times_onnxruntime": [0.9, 0.8, 1.2]}, {"times_onnxruntime": [1.3, 1.2, 1.4]}
    text = page_of(own | close, drafted, theirs)
    assert "0.90 [0.80, 1.20] times as long a token as the publisher's int8 graphs" in text
    assert "at most 1.0 asked for: held. Wrong words: 10 (5.7 %) against 10 (5.7 %)." in text
    assert "Every float32 row of ours has the ids that plain `generate` gives" in text
    assert "Every int8 row of ours has the ids of the int8 model without a draft" in text
    assert "lookup int8, is 1.25 times" in text and "with the same weights" in text
    text = page_of(own | apart, drafted | {"as_undrafted": 10}, theirs)
    assert "at most 1.0 asked for: MISSED" in text
    assert "DIFFERENT ids than without a draft in int8 rows: lookup int8." in text
    assert "which did not run; at most 1.0 asked for." in page_of(own)


@pytest.mark.slow
@needs_wheel
def test_real_speech_is_measured_on_a_clip(call, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\n<!-- end of tables -->\n")
    words = ["--quick", "--parts", "short", "long", "--out", str(tmp_path), "--page", str(page)]
    assert "smoke test" in call("real_speech", *words, "--ways", "lookup", "recycling, 8 nodes")
    (path,) = tmp_path.glob("real-speech-cpu-*.json")
    result = json.loads(path.read_text())
    names = {row["way"] for row in result["short"]}
    kept = "recycling, 8 nodes, table kept"
    assert {"generate", "undrafted", "lookup", kept, "transformers' pipeline"} <= names
    assert {"undrafted int8", "lookup int8"} <= names
    assert "generate, padded batch" in {row["way"] for row in result["short"] if row["batch"] > 1}
    [recording] = result["long"]
    for row in [*result["short"], *recording["rows"]]:
        own = row["tokens_per_pass"] is not None
        assert own == row["way"].startswith(("undrafted", "lookup", "recycling"))
        if row["way"].endswith(" int8"):
            assert row.get("as_undrafted", 2) == 2
        elif own or row["way"] == "generate":
            assert row["identical"] == row.get("clips", recording["windows"]), row
            assert row["ms_per_token"] > 0 and row["encoder_ms_per_audio_s"] > 0
        assert 0 < row["rtf"] < 5
    assert all(row["word_errors"] < 0.2 * row["words"] for row in result["short"])
    bars = [bar["bar"] for bar in result["bars"]]
    assert bars == ["undrafted over generate", "int8 over the publisher's"]
    assert path.name in page.read_text()


@pytest.mark.slow
@needs_wheel
def test_memory_of_a_way_is_that_of_its_own_process():
    words = ["--child", "undrafted", "--minutes", "0.1", "--batch-size", "1,2", "--threads", "1"]
    row = json.loads(run(*words, script="real_speech.py").splitlines()[-1])
    assert row["way"] == "undrafted" and row["loaded_mb"] > 100  # 27 million weights of 4 bytes
    assert set(row["peak_mb"]) == {"1", "2"} and 0 <= row["recording_mb"] < 1000


def test_real_sizes_are_measured_on_a_toy_and_fill_their_own_section(call, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\nold\n<!-- end of tables -->\nbehind\n")
    words = ["--tiny", "--quick", "--json", "--parts", "host", "--only", "tiny llama"]
    words += ["--threads", "1", "--batch-size", "1", "--out", str(tmp_path), "--page", str(page)]
    last = call("real_sizes", *words).splitlines()[-1]
    [path] = tmp_path.glob("real-sizes-cpu-*.json")
    result = json.loads(path.read_text())
    assert json.loads(last) == {name: result[name] for name in json.loads(last)}
    [row] = result["rows"]
    assert row["same_ids"] and row["ours"] > 0 and row["theirs"] > 0 and row["load"] >= 0
    assert row["expects"] == ["step unmasked"] and row["bar"] == 1 and "batch 1" in row["what"]
    text = page.read_text()
    assert text.startswith("before\n<!-- tables -->\n") and text.endswith("-->\nbehind\n")
    assert "old" not in text and "Not to be quoted" in text and path.name in text
    assert "### Undrafted loops of small models" in text and "Image tokens" not in text


def size_row(**more):
    rows = importlib.import_module("size_rows")
    ran = {"expects": ["step unmasked"], "paths": {"step unmasked": 9, "prefill causal": 1}}
    return rows.row(
        "host", "toy", "a toy", **{"ours": 8.0, "theirs": 10.0, "bar": 1.0, **ran, **more}
    )


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({}, "met"),
        ({"ours": 10.0}, "met"),
        ({"ours": 10.2}, "missed"),
        ({"bar": 7.0, "absolute": True}, "missed"),
        ({"bar": 8.0, "absolute": True, "theirs": None}, "met"),
        ({"same_ids": False}, "missed: other ids"),
        ({"paths": {"step unmasked": 9, "step masked": 1}}, "missed: fell back, step masked"),
        ({"paths": {"step masked": 9, "prefill masked": 1}}, "missed: fell back, step masked"),
        ({"paths": {"prefill causal": 1}}, "missed: fell back, no step was counted"),
        ({"paths": {}}, "missed: fell back, no step was counted"),
        ({"paths": None}, "not decided: the path was not counted"),
        ({"paths": None, "ours": 11.0}, "missed"),
        ({"error": "ran out of memory", "ours": None}, "missed: ran out of memory"),
        ({"ours": None, "paths": None}, "not measured"),
        ({"bar": None, "expects": []}, "no bar"),
        ({"bar": None}, "met"),
    ],
)
def test_a_row_is_met_only_on_its_own_path_with_its_ids_within_its_bar(more, verdict, benchmarks):
    assert size_row(**more)["verdict"] == verdict


def test_a_page_shows_what_was_missed(benchmarks):
    rows = importlib.import_module("size_rows")
    found = [size_row(), size_row(ours=13.0), size_row(paths={"step masked": 9})]
    facts = dict.fromkeys(("device", "cores", "dtype", "torch", "transformers", "date"), "x")
    facts |= {"load_at_start": 0.1, "load_at_end": 1.9}
    result = {"machine": facts, "rows": found, "warning": rows.warning(0.1, 2.0, 2, False)}
    text = rows.tables(result, "r.json", {"host": "Loops", "arena": "Second"})
    assert "Rows: 1 met, 2 missed." in text and "Not to be quoted" not in text
    met, above, strange = text.split("### Loops\n\n")[1].splitlines()[2:5]
    assert met.endswith("| 0.80 | 1.00 | step unmasked (9), prefill causal (1) |  | met |")
    assert "| 1.30 | 1.00 |" in above and above.endswith("| **missed** |")
    assert strange.endswith("| step masked (9) |  | **missed: fell back, step masked** |")
    assert "Second" not in text
    for busy in ((2.0, 2.0, 2, False), (0.1, 4.0, 2, False), (0.1, 2.0, 2, True)):
        assert rows.warning(*busy).startswith("Not to be quoted")


def test_a_loop_that_falls_back_or_errs_is_missed_where_it_is_measured(benchmarks, monkeypatch):
    steps, rows = importlib.import_module("size_steps"), importlib.import_module("size_rows")

    def measured():
        [found] = steps.host(True, 1, batches=[2], only="tiny llama", new=3)
        return found["verdict"]

    monkeypatch.setattr(steps, "paths_of", lambda decoder: {"step masked": 2})
    assert measured() == "missed: fell back, step masked"
    monkeypatch.setattr(rows.Pair, "same", lambda *names: False)
    assert measured() == "missed: other ids"


@pytest.mark.slow
def test_every_part_of_real_sizes_runs_on_toys(call, tmp_path):
    words = ["--tiny", "--quick", "--threads", "1", "--batch-size", "1", "--out", str(tmp_path)]
    call("real_sizes", *words, "--parts", "sampling", "processors", "images", "arena")
    [path] = tmp_path.glob("real-sizes-cpu-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert {row["part"] for row in rows} == {"sampling", "processors", "images", "arena"}
    assert not [row for row in rows if row["error"] or row["same_ids"] is False]
    for row in rows:
        assert row["ours"] is not None or "not implemented" in row["note"]
    path.unlink()
    call("real_sizes", *words, "--parts", "prefill", "--only", "padded")
    [path] = tmp_path.glob("real-sizes-cpu-*.json")
    peak, time = json.loads(path.read_text())["rows"]
    assert peak["unit"] == "MB" and peak["ours"] > 0 and peak["theirs"] > 0 and peak["absolute"]
    assert time["same_ids"] and time["expects"] == ["prefill by rows", "prefill in chunks"]
    small = [*words, "--parts", "prefill", "--only", "padded", "--limit-gb", "0.2"]
    path.unlink()
    call("real_sizes", *small)
    [path] = tmp_path.glob("real-sizes-cpu-*.json")
    assert all(
        row["verdict"].startswith("missed: ran out of memory")
        for row in json.loads(path.read_text())["rows"]
    )
