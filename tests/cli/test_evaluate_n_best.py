"""``mmdecode evaluate nbest`` from end to end, with small fakes for the models."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as models_of
from transformers import PreTrainedTokenizerFast

from mmdecode.asr.correction import corrector as correction
from mmdecode.asr.correction import selection
from mmdecode.asr.correction.n_best_lists import NBestList, read_lists, write_lists
from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.nbest.methods import Output, parts_of
from mmdecode.evaluation.nbest.n_best import Aligner
from mmdecode.evaluation.nbest.report import NBestReport, NBestReports
from mmdecode.evaluation.report.layout import MADE_BY
from mmdecode.evaluation.speech.wer import wer
from tests.support import tiny_models
from tests.support.commands import invoke, json_of
from tests.support.files import json_lines, write_json_lines
from tests.support.pages import checked


def some_lists(count=80):
    """A third is right, a third has it second and third, a third is spelt another way."""
    kinds = [
        (("red is nice", "read is nice", "red is nigh"), "red is nice"),
        (("a read hat", "a red hat", "a red hat"), "a red hat"),
        (("the colour x", "the colour y"), "the color x"),
    ]
    return [
        NBestList(f"u{n}", texts, tuple(-0.1 * k for k in range(len(texts))), reference)
        for n in range(count)
        for texts, reference in [kinds[n % 3]]
    ]


@pytest.fixture
def data(tmp_path):
    write_lists(some_lists(), tmp_path / "toy.jsonl.gz", "generator")
    return tmp_path / "toy.jsonl.gz"


def run(*args, ok=True):
    result = invoke("evaluate", "nbest", "--resamples", "50", *args, catch_exceptions=ok)
    assert result.exit_code == 0 or not ok, result.output
    return result


def summary_of(result):
    return json_of(result)["sets"]


class Copier:
    asked = 0

    @classmethod
    def from_pretrained(cls, model, **options):
        assert options.pop("device") in ("cpu", "cuda")
        assert options == {"dtype": "float32", "batch_size": 16, "copy_below": -math.inf}
        return cls()

    def corrections(self, lists, watch=None):
        type(self).asked += len(lists)
        for one in lists:
            yield SimpleNamespace(
                id=one.id, text=one.best, refused=None, preference=None, error=None
            )


class Lengths:
    """A language model that likes short words."""

    @classmethod
    def from_pretrained(cls, model, **options):
        return cls()

    def of_lists(self, lists):
        return [
            [
                selection.TextScore(-float(len(text)), len(text.split()) + 1)
                for text in one.hypotheses
            ]
            for one in lists
        ]


@pytest.fixture
def models(monkeypatch):
    monkeypatch.setattr(correction, "Corrector", Copier)
    monkeypatch.setattr(selection, "TextScorer", Lengths)
    monkeypatch.setattr(Copier, "asked", 0)


def test_one_set_with_all_methods(data, models, tmp_path):
    names = "mbr,mbr+scores,table,lm:small,lm-total:small,lm+scores:small"
    [found] = summary_of(run("--data", data, "--methods", names, "--corrector", "c", "--json"))
    scores = found["methods"]
    test = parts_of(read_lists(data), 0.0, 0.5).test
    plain = wer([one.reference for one in test], [one.best for one in test], resamples=2)
    assert scores["1best"]["errors"] == plain.errors and scores["1best"]["wer"] == plain.value
    assert scores["1best"]["unchanged"] == found["test"] == len(test)
    assert scores["corrector:c"] == scores["corrector:c (threshold)"] == scores["1best"]
    assert scores["mbr"]["errors"] < plain.errors and scores["mbr"]["worse"] == 0
    assert scores["table"]["errors"] < plain.errors
    assert found["fixed"]["table"]["rules"] >= 1
    oracles = found["oracles"]
    assert oracles["o_cp"]["errors"] <= oracles["o_nb"]["errors"] <= scores["mbr"]["errors"]
    assert {one["second"] for one in found["comparisons"]} == {*scores} - {"1best"}
    assert all(one["p_holm"] >= one["mapsswe"]["p"] for one in found["comparisons"])
    for one in scores.values():
        assert one["improved"] + one["unchanged"] + one["worse"] == len(test)


def test_models_are_loaded_by_their_folder(data, tmp_path):
    words = [
        "<s>",
        "</s>",
        "<unk>",
        *{w for o in some_lists() for t in o.hypotheses for w in t.split()},
    ]
    vocab = {word: index for index, word in enumerate(words)}
    own = Tokenizer(models_of.WordLevel(vocab, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=own, **special).save_pretrained(tmp_path / "m")
    sizes = {"vocab_size": len(vocab), "hidden_size": 16, "intermediate_size": 24}
    language = tiny_models.llama(**sizes, bos_token_id=0, eos_token_id=1)
    language.save_pretrained(tmp_path / "m")
    model = tmp_path / "m"
    [found] = summary_of(
        run("--data", data, "--limit", 12, "--methods", f"lm:{model}", "--corrector", model,
            "--device", "cpu", "--json")
    )  # fmt: skip
    assert {f"lm:{model}", f"corrector:{model}"} <= {*found["methods"]}
    # what a random model writes is no transcript
    assert found["fixed"][f"corrector:{model}"]["refused"] == found["test"]
    assert found["methods"][f"corrector:{model}"]["edited"] == 0


class Stumbling(Lengths):
    """A language model that raises at some lists."""

    bad = ()

    def of_lists(self, lists):
        if any(one.id in self.bad for one in lists):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().of_lists(lists)


def test_a_list_at_which_a_model_raises_keeps_its_first_hypothesis(data, monkeypatch, tmp_path):
    monkeypatch.setattr(selection, "TextScorer", Stumbling)
    parts = parts_of(read_lists(data), 0.0, 0.5)
    bad = [parts.test[1].id, parts.development[0].id]
    args = ["--data", data, "--methods", "lm:small,lm+scores:small,table", "--out", tmp_path / "r"]
    monkeypatch.setattr(Stumbling, "bad", bad)
    result = run(*args, "--json", ok=False)
    assert result.exit_code == 1
    printed = json_of(result)
    assert {(one["method"], one["id"]) for one in printed["failures"]} == {
        (f"{kind}:small", name) for kind in ("lm", "lm+scores") for name in bad
    }
    assert "not enough memory" in printed["failures"][0]["error"]
    assert "4 failed; their first hypotheses count" in result.stderr
    [found] = printed["sets"]
    assert found["failed"] == {"lm:small": 2, "lm+scores:small": 2}
    texts = json_lines(tmp_path / "r" / "texts.jsonl")
    row = next(one for one in texts if one["id"] == bad[0])
    assert row["texts"]["lm:small"] == row["texts"]["1best"]
    monkeypatch.setattr(Stumbling, "bad", ())
    again = run(*args, "--resume", "--json")
    [whole] = summary_of(again)
    assert not whole["failed"] and len(texts) == whole["test"] == found["test"]
    assert whole["methods"]["table"] == found["methods"]["table"]


def test_a_list_without_scores_fails_alone(tmp_path):
    lists = some_lists()
    bad = parts_of(lists, 0.0, 0.5).test[0].id
    kept = [NBestList(o.id, o.hypotheses, None, o.reference) if o.id == bad else o for o in lists]
    write_lists(kept, tmp_path / "toy.jsonl")
    result = run("--data", tmp_path / "toy.jsonl", "--methods", "mbr+scores,table", ok=False)
    assert result.exit_code == 1 and "1 failed" in result.stderr
    assert f"failed (mbr+scores): toy: {bad}: the list {bad!r} has no scores" in result.stderr


def test_the_table_goes_below_the_oracle_of_lists_that_never_have_the_convention(data):
    [found] = summary_of(run("--data", data, "--normalizer", "none", "--json"))
    third = found["methods"]["table"]
    assert third["new_words"] == third["new_words_right"] > 0
    assert third["errors"] < found["oracles"]["o_nb"]["errors"]


def test_people_read_a_table(data):
    text = run("--data", data, "--limit", "40").stdout
    rows = [line for line in text.splitlines() if line.startswith("| toy")]
    assert [row.split(" | ")[1] for row in rows] == [
        "1best", "mbr", "mbr (threshold)", "table", "o_nb", "o_cp",
    ]  # fmt: skip
    assert "not a result to report" in text and "matched pairs" in text


def test_a_limit_that_leaves_nothing_out_is_no_limit(data):
    size = len(read_lists(data))
    for limit in (size - 1, size, size + 1):
        done = run("--data", data, "--limit", limit)
        assert ("a smoke test" in done.stderr) == (limit < size)
        assert ("not a result to report" in done.stdout) == (limit < size)


def test_files_hold_everything_and_the_summary_no_texts(data, models, tmp_path):
    out = tmp_path / "run"
    run("--data", data, "--corrector", "c", "--out", out)
    names = {path.name for path in out.iterdir() if path.name[0] != "."}
    assert names == {
        "rows.jsonl", "run.json", "summary.json", "table.md", "table.csv", "report.html",
        "texts.jsonl",
    }  # fmt: skip
    for name in ("summary.json", "table.md", "table.csv"):
        assert not re.search("colour|nice", (out / name).read_text())
    page = (out / "report.html").read_text()
    checked(page)
    assert (out / "table.md").read_text().startswith(MADE_BY)
    assert '<span class="substitute">read<del>red</del></span>' in page and "made better" in page
    assert '<th scope="row">read</th><td>red</td>' in page
    rows = json_lines(out / "texts.jsonl")
    assert {*rows[0]["texts"]} >= {"1best", "mbr", "table", "corrector:c"}
    assert len(rows) == json.loads((out / "summary.json").read_text())["sets"][0]["test"]


def test_a_run_goes_on_where_it_was_and_can_be_scored_again(data, models, tmp_path):
    out = tmp_path / "run"
    run("--data", data, "--corrector", "c", "--out", out)
    asked, rows = Copier.asked, (out / "rows.jsonl").read_text()
    lines = rows.splitlines(keepends=True)
    (out / "rows.jsonl").write_text("".join(lines[:-3]) + lines[-3][:10])
    with pytest.raises(OptionError, match="--resume"):
        run("--data", data, "--corrector", "c", "--out", out, ok=False)
    run("--data", data, "--corrector", "c", "--normalizer", "none", "--out", out, "--resume")
    assert Copier.asked == asked + 3 and (out / "rows.jsonl").read_text() == rows
    assert json.loads((out / "summary.json").read_text())["sets"][0]["normaliser"] == "none"
    other = tmp_path / "other" / "toy.jsonl"
    other.parent.mkdir()
    write_lists(some_lists(81), other)
    with pytest.raises(OptionError, match="other settings"):
        run("--data", other, "--corrector", "c", "--out", out, "--resume", ok=False)


def test_an_earlier_report_is_replaced_only_where_that_is_asked_for(data, models, tmp_path):
    out = tmp_path / "run"
    run("--data", data, "--corrector", "c", "--out", out)
    asked = Copier.asked
    (out / "table.csv").write_text("corrected by hand")
    with pytest.raises(OptionError, match=r"table\.csv: there already"):
        run("--data", data, "--corrector", "c", "--out", out, "--resume", ok=False)
    assert (out / "table.csv").read_text() == "corrected by hand"
    done = run("--data", data, "--corrector", "c", "--limit", "30", "--out", out, "--overwrite")
    assert Copier.asked > asked and "table.csv" in done.stderr
    assert len((out / "rows.jsonl").read_text().splitlines()) < 31
    assert "corrected by hand" not in (out / "table.csv").read_text()


def test_references_come_from_a_manifest(tmp_path):
    lists = some_lists(30)
    bare = [NBestList(one.id, one.hypotheses) for one in lists]
    write_lists(bare, tmp_path / "bare.jsonl")
    manifest = tmp_path / "said.jsonl"
    rows = [{"id": one.id, "text": one.reference} for one in lists]
    write_json_lines(manifest, rows)
    with pytest.raises(InputError, match="no reference"):
        run("--data", tmp_path / "bare.jsonl", ok=False)
    [found] = summary_of(run("--data", tmp_path / "bare.jsonl", "--references", manifest, "--json"))
    assert found["methods"]["1best"]["errors"] > 0


def test_shipped_sets_go_by_their_names(monkeypatch):
    found = summary_of(
        run("--data", "cv", "--data", "ls_clean", "--limit", "40", "--methods", "mbr", "--json")
    )
    assert [one["data"] for one in found] == ["cv", "ls_clean"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--resume"], OptionError, "--out"),
        (["--methods", "mbr,mrb"], UnknownNameError, "did you mean"),
        (["--dev-share", "0"], OptionError, "development"),
        (["--dev-share", "1"], OptionError, "a sum below 1"),
        (["--normalizer", "wisper"], UnknownNameError, "did you mean 'whisper'"),
        (["--data", "no/such.json"], InputError, "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(options, error, message, data):
    given = options if "--data" in options else ["--data", data, *options]
    with pytest.raises(error, match=message):
        run(*given, ok=False)
    with pytest.raises(OptionError, match="two files of --data"):
        run("--data", data, "--data", data, ok=False)


# The report as an object


def report_of(lists, texts, data="d"):
    parts = parts_of(lists, 0.0, 0.0)
    return NBestReport(data, parts, {"m": Output(texts=texts)}, Aligner("none"), resamples=50)


def test_a_report_shows_what_it_made_worse_and_how_certain_that_is(tmp_path):
    lists = some_lists(30)
    report = report_of(lists, ["wrong" for _ in lists])
    assert report.summary["methods"]["m"]["worse"] == 30
    [comparison] = report.comparisons
    assert comparison.bootstrap.p_second_better == 0
    shown = {heading for heading, examples in report.examples().items() if examples}
    assert shown == {"d: m, 5 that it made worse"}
    assert repr(report) == report.table() and "<table" in report._repr_html_()
    NBestReports([report, report_of(lists[:9], ["x"] * 9, "e")]).save(tmp_path)
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 39
    assert (tmp_path / "report.html").read_text().count("made worse") == 2


def test_what_is_held_back_is_a_mode_of_its_own():
    lists = some_lists(12)
    found = {"m": Output(texts=["x"] * 12, thresholded=[one.best for one in lists], threshold=1.0)}
    report = NBestReport("d", parts_of(lists, 0.0, 0.0), found, Aligner("none"), resamples=5)
    methods = report.summary["methods"]
    assert methods["m (threshold)"] == methods["1best"] != methods["m"]


def test_sentences_shared_with_the_other_parts_are_reported():
    lists = some_lists(60)
    found = NBestReport("d", parts_of(lists, 0.2, 0.3), {}, Aligner("none"), resamples=5).summary
    assert found["references_seen_before"] == 1.0
    assert found["training"] + found["development"] + found["test"] == 60
