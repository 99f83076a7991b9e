"""``mmdecode evaluate pope|chair|mme|amber|spatial`` from end to end, on a tiny random LLaVA."""

import functools
import gzip
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmdecode.errors import InputError, MissingExtraError, OptionError, UnknownNameError
from mmdecode.evaluation.task import GROUP, task_of
from mmdecode.evaluation.vision.benchmarks import read_questions
from mmdecode.runs import crashes
from mmdecode.runs.rows import RowJournal
from mmdecode.vlm import loading
from tests.support.commands import invoke, json_of
from tests.support.files import json_lines, write_json_lines
from tests.support.pages import checked
from tests.vlm.conftest import build_model, build_processor, image

OBJECTS = ("ring", "star", "circle")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    processor = build_processor()
    build_model(processor).save_pretrained(path)
    processor.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """POPE's three splits on three images, of which the last is broken; captions; MME; spatial."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").mkdir()
    for index in range(2):
        image(index).save(folder / "images" / f"{index}.png")
    (folder / "images" / "2.png").write_text("no image")
    for split in ("random", "popular", "adversarial"):
        rows = [
            {
                "image": f"{index}.png",
                "text": f"Is there a {name} in the image?",
                "label": "yes" if name == "ring" else "no",
            }
            for index in range(3)
            for name in ("ring", "star" if split == "random" else "circle")
        ]
        write_json_lines(folder / f"my_pope_{split}.jsonl", rows)
    write_json_lines(
        folder / "objects.jsonl", [{"image": f"{i}.png", "objects": ["dog"]} for i in range(2)]
    )
    write_json_lines(
        folder / "mme.jsonl",
        [
            {"category": "color", "image": f"{i}.png", "question": f"{text}?", "answer": text}
            for i in range(2)
            for text in ("Yes", "No")
        ],
    )
    choices = [
        {"image": f"{i}.png", "question": "Where?", "options": ["left", "right"], "group": "one"}
        for i in range(2)
    ]
    write_json_lines(
        folder / "images" / "choices.jsonl",
        [row | {"answer": row["options"][i]} for i, row in enumerate(choices)],
    )
    write_json_lines(
        folder / "images" / "vsr.jsonl",
        [{"image": f"{i}.png", "caption": "It is left.", "label": i} for i in range(2)],
    )
    amber = folder / "amber"
    (amber / "image").mkdir(parents=True)
    image(0).save(amber / "image" / "0.png")
    asked = [{"id": i, "image": "0.png", "query": f"Is it {i}?"} for i in range(2)]
    (amber / "query_discriminative.json").write_text(json.dumps(asked))
    notes = [
        {"id": i, "type": "discriminative-relation", "truth": truth}
        for i, truth in enumerate(("yes", "no"))
    ]
    (amber / "annotations.json").write_text(json.dumps(notes))
    return folder


run = functools.partial(invoke, "evaluate", catch_exceptions=False)


def parsed(done):
    return json_of(done)


@pytest.fixture
def settings(checkpoint, data):
    def words(task="pope", source=None, *more):
        options = ["--model", checkpoint, "--device", "cpu", "--max-new-tokens", 3]
        where = ["--data", source or data, "--images", data / "images", "--resamples", 20]
        return [task, *options, *where, "--seeds", 2, "--warmup", 0, *more]

    return words


@pytest.fixture(scope="module")
def finished(tmp_path_factory, checkpoint, data):
    """A run with its controls, as JSON."""
    out = tmp_path_factory.mktemp("run") / "out"
    done = run(
        "pope", "--model", checkpoint, "--device", "cpu", "--data", data, "--max-new-tokens", 3,
        "--images", data / "images", "--guide", "vcd", "--seeds", 2, "--resamples", 20,
        "--suffix", "one-word", "--out", out, "--json",
    )  # fmt: skip
    return done, out


BAD_ROWS = {
    "pope": ["{", '{"image": "0.png"}', '{"image": "0.png", "text": "Is it?", "label": "perhaps"}'],
    "chair": ["3", '{"image": "0.png"}', '{"image": "0.png", "objects": ["dog"]}'],
    "mme": ["{", '{"category": "color", "image": "9.png", "question": "One?", "answer": "yes"}'],
    "spatial": ['{"image": "0.png"}', '{"image": "0.png", "question": "Where?", "options": [3]}'],
}


@pytest.mark.parametrize("task", BAD_ROWS)
def test_a_row_that_cannot_be_used_is_left_out_and_reported(task, settings, data, tmp_path):
    good = {
        "pope": data / "my_pope_popular.jsonl",
        "chair": data / "objects.jsonl",
        "mme": data / "mme.jsonl",
        "spatial": data / "images" / "choices.jsonl",
    }[task]
    bad = BAD_ROWS[task]
    table = tmp_path / f"{task}_popular.jsonl"
    table.write_text(good.read_text() + "".join(row + "\n" for row in bad))
    assert read_questions(task, [str(good)], images=data).left_out == []
    asked = read_questions(task, [str(table)], images=data)
    assert asked.items == read_questions(task, [str(good)], images=data).items
    assert len(asked.left_out) == len(bad)
    table.write_text("".join(row + "\n" for row in bad[:1]))
    with pytest.raises(InputError, match="line 1"):
        read_questions(task, [str(table)], images=data)


OWN = [("a", "0.png", "Is there a ring?", "yes"), ("b", "1.png", "Is there a star?", "no")]


@pytest.mark.parametrize("ending", ["csv", "tsv", "json", "csv.gz"])
def test_pope_reads_a_table_of_ones_own_next_to_its_images(ending, data, tmp_path):
    names = ("question_id", "image_path", "question", "answer")
    split = "\t" if ending == "tsv" else ","
    text = "\n".join(split.join(row) for row in (names, *OWN))
    if ending == "json":
        text = json.dumps([dict(zip(names, row, strict=True)) for row in OWN])
    table = tmp_path / f"mine.{ending}"
    table.write_bytes(gzip.compress(text.encode()) if ending[-2:] == "gz" else text.encode())
    image(0).save(tmp_path / "0.png")
    asked = read_questions("pope", [str(table)])
    assert [(one.image, one.question, one.target) for one in asked.items] == [
        row[1:] for row in OWN
    ]
    assert asked.folder == tmp_path and set(asked.files) == {"mine"}
    asked.check_images()
    if ending[-2:] != "gz" and ending != "json":
        table.write_text(text + "\nc\n")
        [problem] = read_questions("pope", [str(table)]).left_out
        assert "line 4 does not have the 4 columns" in problem


def test_figures_that_need_a_missing_package_are_refused_before_a_model_is_loaded(
    tmp_path, data, monkeypatch
):
    monkeypatch.setattr(loading, "load", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib; install it with: pip .*eval"):
        run("pope", "--model", "x", "--data", "zoo", "--out", tmp_path / "out")


def test_left_out_rows_are_counted_and_make_the_exit_code_1(settings, data, tmp_path):
    table, out = tmp_path / "choices.jsonl", tmp_path / "out"
    rows = (data / "images" / "choices.jsonl").read_text()
    table.write_text(rows + '{"image": "0.png"}\n' + rows.splitlines()[0] + "\n")
    done = run(*settings("spatial", table, "--greedy"), "--out", out, "--json")
    assert done.exit_code == 1
    found = parsed(done)
    assert found["conditions"]["rows_left_out"] == 2
    assert "line 3 has" in found["failures"][0]["error"]
    assert "again; keep one of each" in found["failures"][1]["error"]
    assert "2 rows of the data cannot be used and left out" in done.stderr
    assert len((out / "items.jsonl").read_text().splitlines()) == 2
    again = run("spatial", "--rescore", out, "--resamples", 20)
    assert "2 rows of the data cannot be used and left out" in again.stderr


def test_a_question_of_amber_without_annotation_is_left_out(settings, data, tmp_path):
    folder = tmp_path / "amber"
    shutil.copytree(data / "amber", folder)
    rows = json.loads((folder / "query_discriminative.json").read_text())
    rows += [{"id": 9, "image": "0.png", "query": "Is it?"}, {"id": 0}, 3]
    (folder / "query_discriminative.json").write_text(json.dumps(rows))
    asked = read_questions("amber", [str(folder)])
    assert [item.id for item in asked.items] == ["0", "1"] and len(asked.left_out) == 3


def test_a_run_prints_and_writes_everything(finished):
    done, out = finished
    assert done.exit_code == 1 and "failed; they count as wrong" in done.stderr
    found = parsed(done)
    assert [mode for mode in found["modes"] if not found["modes"][mode]["computed"]] == [
        "greedy", "sampled", "prompt_bias", "near_ties", "vcd", "plausible:beta=0.1, sampled",
        "vcd, sampled",
    ]  # fmt: skip
    assert {"greedy shifted to vcd", "always yes"} < set(found["modes"])
    assert found["questions"] == 9 and found["images"] == 3  # of 18 lines
    assert found["modes"]["sampled"]["seeds"] == [0, 1]
    assert found["modes"]["greedy"]["rows_per_token"] == 1
    assert found["modes"]["vcd"]["rows_per_token"] == 2
    assert found["modes"]["vcd"]["forwards_per_token"] in (1, None)
    assert found["modes"]["greedy"]["mean_seconds"] > 0
    conditions = found["conditions"]
    assert conditions["suffix"] == " Please answer this question with one word."
    assert conditions["prompt"] == (
        "USER: <image>\nIs there a ring in the image?"
        " Please answer this question with one word. ASSISTANT:"
    )
    for name in (
        "model",
        "files",
        "dtype",
        "device",
        "torch",
        "transformers",
        "seed",
        "batch_size",
    ):
        assert conditions[name] is not None, name
    assert set(conditions["files"]) == {"random", "popular", "adversarial"}
    pairs = {(one["first"], one["second"]) for one in found["comparisons"]}
    assert ("plausible:beta=0.1, sampled", "vcd, sampled") in pairs
    assert ("greedy shifted to vcd", "vcd") in pairs and ("sampled", "vcd, sampled") in pairs
    assert ("greedy", "vcd, sampled") not in pairs
    rows = json_lines(out / "items.jsonl")
    assert len(rows) == 9 * (1 + 2 + 1 + 1 + 1 + 2 + 2)
    assert {row["image"] for row in rows if row["error"]} == {"2.png"}
    for name in ("summary.json", "report.html", "table.md", "differences.png"):
        assert (out / name).exists(), name
    assert {failure["mode"] for failure in found["failures"]} == {
        mode for mode in found["modes"] if not found["modes"][mode]["computed"]
    }


def test_rescoring_gives_the_same_numbers_without_the_model(finished, tmp_path, monkeypatch):
    done, out = finished
    monkeypatch.setattr(loading, "load", None)
    with pytest.raises(OptionError, match="draws its own images"):
        run("pope", "--model", "m", "--data", "zoo", "--images", tmp_path)
    again = run("pope", "--rescore", out, "--resamples", 20, "--out", tmp_path / "a", "--json")
    before, after = parsed(done), parsed(again)
    for found in (before, after):
        del found["files"], found["conditions"]
    assert again.exit_code == 1 and after == before
    other = run("pope", "--rescore", out, "--resamples", 20, "--parser", "original", "--json",
                "--out", tmp_path / "b")  # fmt: skip
    assert parsed(other)["parser"] == "original"
    assert parsed(other)["modes"]["greedy"]["sets"]["random"]["unparsed"] < 1
    own = run("pope", "--rescore", out, "--resamples", 20)
    assert "replacing the report" in own.stderr
    assert own.stdout.startswith("None of the 2 methods is shown to help")
    shown, whole = own.stdout, (out / "table.md").read_text()
    assert "| mode | random % | popular % | adversarial % | accuracy % | F1 % |" in shown
    assert "| mode | set | accuracy %" in whole and "| mode | set | accuracy %" not in shown
    assert "comparisons are in" in shown and shown.splitlines()[0] in whole
    with pytest.raises(OptionError, match="'evaluate pope'"):
        run("mme", "--rescore", out)


def test_an_interrupted_run_is_continued(finished, settings, tmp_path, monkeypatch):
    class Stopped(Exception):
        pass

    def stop_early(self, row, add=RowJournal.add):
        if len(self.rows) == 20:
            raise Stopped
        add(self, row)

    more = ["--guide", "vcd", "--suffix", "one-word", "--out", tmp_path]
    with monkeypatch.context() as patch:
        patch.setattr(RowJournal, "add", stop_early)
        with pytest.raises(Stopped):
            run(*settings("pope", None, *more, "--warmup", 1))
    assert len((tmp_path / "items.jsonl").read_text().splitlines()) == 20
    with pytest.raises(OptionError, match="--resume"):
        run(*settings("pope", None, *more))
    with pytest.raises(OptionError, match="warmup was 1, is 0"):
        run(*settings("pope", None, *more, "--resume"))
    done = run(*settings("pope", None, *more, "--warmup", 1, "--resume"))
    assert done.exit_code == 1 and "\n| greedy | " in done.stdout
    assert answers(tmp_path) == answers(finished[1])


def test_a_comparison_that_is_stopped_says_last_how_far_it_got(settings, tmp_path, monkeypatch):
    def stop_early(self, row, add=RowJournal.add):
        if len(self.rows) == 3:
            raise KeyboardInterrupt
        add(self, row)

    monkeypatch.setattr(RowJournal, "add", stop_early)
    done = run(*settings("pope", None, "--greedy", "--no-controls", "--out", tmp_path))
    assert done.exit_code == 130
    last = done.stderr.splitlines()[-1]
    # two of the three rows are about an image that is broken
    assert last == f"stopped: 1 of 9 done in {tmp_path}; go on with --resume"


def test_rows_about_an_image_that_changed_are_computed_again(
    checkpoint, data, tmp_path, monkeypatch
):
    shutil.copytree(data / "images", tmp_path / "images")
    out = tmp_path / "out"
    words = ["pope", "--model", checkpoint, "--device", "cpu", "--data", data, "--resamples", 20,
             "--images", tmp_path / "images", "--max-new-tokens", 3, "--warmup", 0,
             "--guide", "vcd", "--greedy", "--no-controls", "--out", out]  # fmt: skip
    run(*words)
    before, added = answers(out), []
    image(7).save(tmp_path / "images" / "0.png")
    add = RowJournal.add
    monkeypatch.setattr(RowJournal, "add", lambda self, row: added.append(row) or add(self, row))
    done = run(*words, "--resume")
    assert "1 changed since and done again" in done.stderr
    assert {row.image for row in added if row.error is None} == {"0.png"}
    assert len(added) > 2
    after = answers(out)
    assert [row["id"] for row in after] == [row["id"] for row in before]
    same = [one == other for one, other in zip(before, after, strict=True)]
    assert all(fits for row, fits in zip(before, same, strict=True) if row["image"] != "0.png")
    assert not all(same)
    assert "changed since" not in run(*words, "--resume").stderr


def answers(folder):
    lines = (folder / "items.jsonl").read_text().splitlines()
    return [json.loads(line) | {"seconds": None} for line in lines]


def test_a_limit_is_announced_and_splits_can_be_chosen(settings, tmp_path):
    words = ("--limit", 2, "--split", "random", "--greedy", "--no-controls")
    done = run(*settings("pope", None, *words, "--out", tmp_path))
    assert done.exit_code == 0, done.output
    assert "--limit 2: a smoke test, not a result" in done.stderr
    assert "only a part of the set was scored" in done.stdout
    assert "always yes" not in done.stdout and "popular" not in done.stdout
    assert len(answers(tmp_path)) == 2


def test_a_limit_that_leaves_nothing_out_is_no_limit(settings, tmp_path):
    words = ("--split", "random", "--greedy", "--no-controls", "--out", tmp_path)
    limited = run(*settings("pope", None, *words, "--limit", 6))
    assert limited.exit_code == 1 and len(answers(tmp_path)) == 6  # an image is broken
    assert "smoke test" not in limited.stderr and "part of the set" not in limited.stdout
    again = run(*settings("pope", None, *words, "--resume"))
    assert again.stdout == limited.stdout


def test_old_files_are_warned_of(settings, data, tmp_path):
    text = (
        (data / "my_pope_random.jsonl")
        .read_text()
        .replace("a ring in the image", "a ring in the imange")
    )
    with gzip.open(tmp_path / "random.jsonl.gz", "wt") as file:
        file.write(text)
    done = run(*settings("pope", tmp_path / "random.jsonl.gz", "--greedy", "--no-controls"))
    assert "questions of random say 'imange'" in done.stderr.replace("\n", " ")


def test_captions_are_scored(settings, data, tmp_path):
    words = ("--guide", "vcd", "--prompt", "What is here?", "--out", tmp_path, "--json")
    found = parsed(run(*settings("chair", data / "objects.jsonl", *words)))
    assert {"greedy", "sampled", "vcd", "vcd, sampled"} <= set(found["modes"])
    assert any("cut to" in mode for mode in found["modes"])
    assert found["conditions"]["prompt"] == "USER: <image>\nWhat is here? ASSISTANT:"
    assert found["vocabulary"]["names"] == 80
    again = parsed(run("chair", "--rescore", tmp_path, "--resamples", 20, "--json"))
    assert again["modes"] == found["modes"]


def test_the_other_tasks_are_scored(settings, data):
    words = ("--greedy", "--no-controls", "--json")
    found = parsed(run(*settings("mme", data / "mme.jsonl", "--limit", 1, *words)))
    assert found["questions"] == 2 and "color" in found["modes"]["greedy"]["task"]
    found = parsed(run(*settings("spatial", data / "images" / "choices.jsonl", *words)))
    assert found["modes"]["greedy"]["sets"]["all"]["pairs"] == 1
    amber = settings("amber", data / "amber", *words)
    del amber[amber.index("--images") : amber.index("--images") + 2]
    assert parsed(run(*amber))["modes"]["greedy"]["task"]["amber"][0]["relation"]


def test_statements_are_judged_resumed_compared_and_shown(settings, data, tmp_path):
    out = tmp_path / "out"
    words = settings("vsr", data / "images" / "vsr.jsonl", "--greedy", "--guide", "vcd")
    found = parsed(run(*words, "--out", out, "--json"))
    assert found["task"] == "vsr" and found["questions"] == 2
    assert {"greedy shifted to vcd", "always yes"} < set(found["modes"])
    assert {one["second"] for one in found["comparisons"]} >= {"vcd"}
    page = (out / "report.html").read_text()
    assert checked(page) and "It is left. Is this statement about the image true?" in page
    lines = (out / "items.jsonl").read_text().splitlines(keepends=True)
    (out / "items.jsonl").write_text("".join(lines[:-2]))
    again = parsed(run(*words, "--out", out, "--json", "--resume"))
    assert len(answers(out)) == len(lines)
    assert again["modes"]["vcd"]["sets"] == found["modes"]["vcd"]["sets"]


OWN_TASK = Path(__file__).parents[2] / "examples" / "own_task.py"


def test_a_task_of_ones_own_is_a_python_file(settings, data, tmp_path):
    table, out = tmp_path / "photos.csv", tmp_path / "out"
    rows = ["0.png,Is it red?,Yes", "0.png,Is it blue?,no", "1.png,Is it red?,no", "1.png,Is it?,x"]
    table.write_text("\n".join(["image,question,answer", *rows]) + "\n")
    done = run(*settings(OWN_TASK, table, "--greedy", "--no-controls", "--out", out, "--json"))
    assert done.exit_code == 1
    found = parsed(done)
    assert found["task"] == "photos" and found["questions"] == 3
    assert found["modes"]["greedy"]["task"]["images right"] in (0.0, 0.5, 1.0)
    assert "line 5: the answer 'x' is neither yes nor no" in found["failures"][0]["error"]
    again = run(OWN_TASK, "--rescore", out, "--resamples", 20)
    assert again.exit_code == 0 and "| mode | accuracy %" in again.stdout
    assert "images right" in again.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TASK = 3", "gives int; expected TASK = a task"),
        ("import nothing_of_that_name", "cannot be run: ModuleNotFoundError"),
        ("", "gives NoneType"),
        (None, "cannot be run: FileNotFoundError"),
    ],
)
def test_a_file_without_a_task_is_refused(text, message, tmp_path):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message):
        run(file, "--model", "x")


ITEM = "YesNoItem(id='1', image='0.png', question='Is it red?', target='yes'"


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("YesNo", "raise KeyError('label')", r"cannot read .*: KeyError: 'label' \(.*py, line 3\)"),
        ("YesNo", "json.loads('x')", r"JSONDecodeError: .* \(.*mine.py, line 3\)"),
        ("YesNo", "pass", "TypeError: 'NoneType' object is not iterable"),
        ("YesNo", "return []", "task mine finds no question in"),
        ("YesNo", "left_out.append('row 1 is bad'); return []", "row 1 is bad; no other row"),
        ("Choice", f"yield {ITEM})", "reads YesNoItem from .*; a ChoiceTask takes ChoiceItem"),
        ("YesNo", f"yield {ITEM}, sets='all')", "1 has the sets 'all'; expected \\('all',\\)"),
        ("YesNo", f"yield {ITEM})", "scores\\(\\) of task mine fails: ZeroDivisionError.*line 4"),
    ],
)
def test_errors_of_a_task_of_ones_own_name_their_line(
    kind, body, message, settings, data, tmp_path
):
    file = tmp_path / "mine.py"
    scored = ", scores=scored" * (kind == "YesNo")
    file.write_text(
        f"import json; from mmdecode.evaluation import YesNoItem, YesNoTask, ChoiceTask\n"
        f"def read(path, left_out):\n    {body}\n"
        f"def scored(items, right): return 1 / 0\n"
        f"TASK = {kind}Task(name='mine', items=read{scored})\n"
    )
    with pytest.raises(InputError, match=message):
        run(*settings(file, data / "my_pope_random.jsonl", "--greedy", "--no-controls"))


def test_a_choice_task_of_ones_own_has_its_name_on_its_page(settings, data, tmp_path):
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(
        "from mmdecode.evaluation import ChoiceItem, ChoiceTask\n"
        "TASK = ChoiceTask(name='sizes', items=lambda path, left_out: [\n"
        "    ChoiceItem(id='1', image='0.png', question='How big?', options=('big', 'small'),\n"
        "               target='big')])\n"
    )
    words = settings(file, data / "my_pope_random.jsonl", "--greedy", "--out", out)
    found = parsed(run(*words, "--json"))
    assert found["task"] == "sizes"
    assert "<h1>sizes: choices</h1>" in (out / "report.html").read_text()
    assert "up to 100.0 % of the answers name no option" in (out / "table.md").read_text()
    with pytest.raises(OptionError, match=r"of sizes, not of vsr; .* or with the file"):
        run("vsr", "--rescore", out)
    with pytest.raises(OptionError) as caught:
        run(*words, "--guide", "vcd", "--resume")
    assert "modes was ['greedy'], is ['greedy', 'vcd'])" in str(caught.value)


def test_a_task_of_another_package_has_a_name(monkeypatch):
    entry = importlib.metadata.EntryPoint(
        "statements", "mmdecode.evaluation.vision.tasks.vsr:TASK", GROUP
    )
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [entry] if group == GROUP else []
    )
    assert task_of("statements").name == "vsr"
    with pytest.raises(UnknownNameError, match="did you mean 'statements'"):
        task_of("statement")


def test_misuse_is_refused_before_a_model_is_loaded(settings, data, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", None)
    for words, error, message in (
        (("pope",), OptionError, r"no model; give --model, .*, or --rescore"),
        (("pope", "--model", "x", "--rescore", "y"), OptionError, "one of --model and --rescore"),
        (("pope", "--rescore", tmp_path, "--limit", 3), OptionError, "--limit does nothing"),
        (("pope", "--rescore", tmp_path), InputError, "earlier run"),
        (("pope", "--model", "x"), OptionError, "give --data"),
        (("pope", "--model", "x", "--data", "missing"), InputError, "does not exist"),
        (("pope", "--model", "x", "--data", data), OptionError, "--images"),
        (("pope", "--model", "x", "--data", data, "--images", tmp_path), InputError, "none of"),
        (("pope", "--model", "x", "--data", "zoo", "--split", "rnd"), UnknownNameError, "split"),
        (("pope", "--model", "x", "--data", "zoo", "--part", "dev"), UnknownNameError, "part"),
        (("pope", "--model", "x", "--data", "zoo", "--guide", "vdc"), UnknownNameError, "guide"),
        (("pope", "--model", "x", "--parser", "p"), UnknownNameError, "parser"),
        (("pope", "--model", "x", "--resume"), OptionError, "--out"),
        (("amber", "--model", "x", "--data", "zoo"), OptionError, "no set for amber"),
        (("chair", "--model", "x", "--data", data), OptionError, "one file"),
    ):
        with pytest.raises(error, match=message):
            run(*words)


def test_the_zoo_has_questions_for_each_task():
    for task, count in (("pope", 300 * 3), ("chair", 200), ("mme", 480), ("spatial", 400)):
        for part in ("development", "test"):
            questions = read_questions(task, part=part)
            assert len(questions.items) >= count
            assert not questions.warnings
            assert questions.image(questions.items[0].image).read().size == (64, 64)


def test_the_zoo_model_runs_on_the_zoo(tmp_path):
    done = run(
        "pope", "--model", "zoo:llava-scenes", "--data", "zoo", "--guide", "vcd", "--greedy",
        "--limit", 6, "--max-new-tokens", 2, "--resamples", 20, "--device", "cpu", "--out",
        tmp_path, "--json", "--part", "development",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = parsed(done)
    assert found["questions"] == 6 and found["conditions"]["part"] == "development"
    assert found["modes"]["greedy"]["sets"]["random"]["margin"] is not None
    assert "data:image/png" in (tmp_path / "report.html").read_text()


def test_a_part_holds_whole_images_pairs_and_sets(data):
    pope = read_questions("pope", [str(data)], images=data / "images").limited(3)
    assert [(item.image, item.sets) for item in pope.items] == [
        ("0.png", ("random", "popular", "adversarial")),
        ("0.png", ("random",)),
        ("0.png", ("popular", "adversarial")),
    ]
    for task, odd, whole in (("mme", 3, 4), ("spatial", 5, 8), ("spatial", 4, 4)):
        assert len(read_questions(task).limited(odd).items) == whole
    assert len(read_questions("chair").limited(5).items) == 5


def test_a_question_that_is_asked_twice_is_asked_once(tmp_path):
    for name in ("a", "b", "a"):
        with (tmp_path / "objects.jsonl").open("a") as file:
            file.write(json.dumps({"image": name, "objects": ["dog"]}) + "\n")
    asked = read_questions("chair", [str(tmp_path / "objects.jsonl")], images=tmp_path)
    assert [item.id for item in asked.items] == ["a", "b"]
    assert ["contains the question 'a' again" in problem for problem in asked.left_out] == [True]


def test_an_image_at_which_a_run_died_is_read_apart(settings, data, tmp_path, monkeypatch):
    (tmp_path / ".reading").write_bytes(str(data / "images" / "0.png").encode())
    monkeypatch.setattr(
        crashes.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, -6)
    )
    words = settings("chair", data / "objects.jsonl", "--greedy", "--out", tmp_path)
    done = run(*words)
    assert done.exit_code == 1 and "0.png: crashes the library that decodes it" in done.stderr
    rows = json_lines(tmp_path / "items.jsonl")
    errors = {row["id"]: row["error"] for row in rows}
    assert errors["0.png"] and errors["1.png"] is None
    assert (tmp_path / ".reading").exists()


def test_help_names_both_kinds_of_models():
    text = invoke("--help").stdout
    assert "Score models on speech or images" in " ".join(text.split())
    assert "Score models on speech or images" in run("--help").stdout


def test_changed_images_are_shared_if_noise_is_named_by_images(settings, data):
    read = {}
    for by in ("request", "image"):
        more = ("--greedy", "--no-controls", "--guide", "vcd", "--noise-by", by, "--json")
        found = parsed(run(*settings("pope", data, "--split", "random", *more)))
        read[by] = found["conditions"]["prompt_tokens_read"]
        assert ("noise_by" in found["conditions"]) == (by == "image")
    assert read["image"] < read["request"], read
