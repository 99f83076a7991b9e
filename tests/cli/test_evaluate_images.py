"""``mmdecode evaluate images`` from end to end, on a tiny random LlamaGen."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.commands import invoke, json_of
from tests.support.files import json_lines

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("timm")

from mmdecode.accept.rejection import Rejection
from mmdecode.decoder import Decoder
from mmdecode.draft.jacobi import Jacobi
from mmdecode.errors import InputError, MMDecodeError, OptionError, UnknownNameError
from mmdecode.evaluation.images import references as image_truth
from mmdecode.evaluation.images.report import ALARM, ImageReport, small, verdict
from mmdecode.evaluation.images.runs import (
    AGAIN,
    PLAIN,
    ROWS,
    ImageRow,
    Mode,
    Recorder,
    forced_logits,
    modes_of,
    read_images,
)
from mmdecode.evaluation.report.layout import MADE_BY
from mmdecode.evaluation.report.plots import sheet
from mmdecode.image_ar.generator import ImageGenerator
from mmdecode.image_ar.loading import load
from mmdecode.image_ar.sampling import guided
from mmdecode.models.image_classifier import Classifier
from mmdecode.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration
from mmdecode.models.vq import VQConfig, VQModel
from mmdecode.runs.items import Failed
from mmdecode.runs.rows import RowJournal
from mmdecode.zoo import scene_images
from tests.support.pages import checked

CODES, GRID, CLASSES = 12, 4, 3
LANTERN = "jacobi:window=6 + lantern:delta=0.4"


def build(folder, levels=3):
    """A transformer that hangs on its neighbours, and its tokenizer."""
    torch.manual_seed(1)
    config = {
        "vocab_size": CODES,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "grid_size": GRID,
        "num_classes": CLASSES,
        "initializer_range": 0.25,
    }
    LlamaGenForImageGeneration(LlamaGenConfig(**config)).save_pretrained(folder)
    vq = VQConfig(
        codebook_size=CODES,
        codebook_dim=4,
        channels=8,
        channel_multipliers=(1,) * levels,
        residual_blocks=1,
        latent_channels=8,
        norm_groups=2,
    )
    VQModel(vq).save_pretrained(folder / "vq")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    from PIL import Image

    folder, dice = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(8):
        pixels = dice.integers(0, 255, (16, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def evaluate(checkpoint, *options):
    arguments = ["evaluate", "images", "--model", str(checkpoint), "--permutations", "99"]
    arguments += ["--resamples", "20", "--batch-size", "4", "--guidance", "1.5", *options]
    return invoke(*arguments, catch_exceptions=False)


def test_every_number_from_a_checkpoint_to_the_page(checkpoint, image_folder, tmp_path):
    folder = tmp_path / "run"
    options = ["-n", "9", "--modes", "plain,exact,relaxed", "--also", LANTERN]
    options += ["--classifier", "zoo:scene-classifier", "--real", str(image_folder)]
    result = evaluate(
        checkpoint, *options, "--training", str(image_folder), "--out", str(folder), "--json"
    )
    assert result.exit_code == 0, result.output
    summary = json_of(result)
    modes = summary["modes"]
    assert list(modes) == [PLAIN, AGAIN, "exact", "relaxed", LANTERN]
    assert [mode["claims"] for mode in modes.values()] == ["exact"] * 3 + ["heuristic"] * 2
    assert modes["exact"]["same"] == 1
    assert modes["exact"]["verdict"] == "the very same images"
    assert modes["exact"]["equivalence"]["ratio"] == 1
    assert modes["exact"]["passes"] < modes[PLAIN]["passes"] == GRID**2 - 1
    assert modes["exact"]["tokens_per_pass"] > modes[PLAIN]["tokens_per_pass"] == 1
    assert modes[AGAIN]["same"] < 0.5
    assert set(modes[PLAIN]["tests"]) == {"tokens"}
    assert "codes" in modes[AGAIN]["tests"] and "first of pass" not in modes[AGAIN]["tests"]
    assert {"first of pass", "pairs of these", "likelihood"} < set(modes["relaxed"]["tests"])
    assert modes[PLAIN]["pictures"]["from_real"]["value"] > 0
    assert "accuracy" not in modes[PLAIN]["pictures"]  # 28 classes, of which this has three
    assert summary["real_pictures"]["floor_images"] == 4
    assert modes[PLAIN]["pictures"]["memory"]["held_out"] > 0
    assert summary["conditions"]["sampling"]["top_k"] == 2000
    rows = json_lines(folder / "images.jsonl")
    assert len(rows) == 5 * 9
    assert {row["condition"] for row in rows} == {0, 1, 2}
    page = (folder / "report.html").read_text()
    checked(page)
    assert (folder / "table.md").read_text().startswith(MADE_BY)
    assert page.count("data:image/png;base64,") == 5
    assert "the very same images" in page
    assert "the very same images" in (folder / "table.md").read_text()


def test_a_run_goes_on_at_the_next_image(checkpoint, tmp_path, monkeypatch):
    options = ["-n", "6", "--modes", "fast", "--json"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    evaluate(checkpoint, *options, "--out", str(whole))
    evaluate(checkpoint, *options, "--out", str(cut))
    rows = (whole / "images.jsonl").read_text().splitlines()
    begun = [*rows[:5], rows[7], rows[13][:40]]  # the last one was being written
    (cut / "images.jsonl").write_text("\n".join(begun))
    for name in ("summary.json", "table.md", "report.html"):
        (cut / name).unlink()
    generated = []
    original = Recorder.run

    def run(self, journal, progress):
        return original(self, journal, lambda row: (generated.append(row), progress(row)))

    monkeypatch.setattr(Recorder, "run", run)
    with pytest.raises(OptionError, match="--resume"):
        evaluate(checkpoint, *options, "--out", str(cut))
    with pytest.raises(OptionError, match="other settings"):
        evaluate(checkpoint, *options, "--top-k", "3", "--out", str(cut), "--resume")
    result = evaluate(checkpoint, *options, "--out", str(cut), "--resume")
    assert result.exit_code == 0
    assert len(generated) == 18 - 6
    for first, second in zip(rows, (cut / "images.jsonl").read_text().splitlines(), strict=True):
        one, other = json.loads(first), json.loads(second)
        one.pop("seconds"), other.pop("seconds")
        assert one == other
    first, second = (json.loads((f / "summary.json").read_text()) for f in (whole, cut))
    assert first["modes"]["fast"]["tests"] == second["modes"]["fast"]["tests"]


def test_scenes_are_rendered_and_go_through_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(scene_images, "CORPUS_IMAGES", 6)
    model = load(str(build(tmp_path, levels=5)))
    classifier = Classifier.from_pretrained()
    truth = image_truth.truth_of(model, classifier, image_truth.SCENES, count=10)
    right = truth.unseen.probabilities.argmax(1) == truth.classes
    assert right.mean() > 0.7
    assert np.abs(truth.unseen.features - truth.decoded.features).max() > 0.1
    assert [one.shape for one in truth.training] == [(6, 768), (10,)]


def test_a_damaged_row_is_named(tmp_path):
    (tmp_path / "images.jsonl").write_text('{"mode": "plain"}\n')
    with pytest.raises(InputError, match="line 1"):
        read_images(tmp_path / "images.jsonl")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (["--modes", "quick"], OptionError, "no mode 'quick'"),
        (["--also", "jacoby"], UnknownNameError, "jacobi"),
        (["--class-id", "3"], OptionError, "class 3"),
        (["--prompts", "p.txt"], OptionError, "draws of classes"),
        (["--resume"], OptionError, "--out"),
        (["--top-p", "0"], OptionError, "top_p"),
        (["--classifier", "zoo:scenes"], UnknownNameError, "zoo model"),
        (["--classifier", "zoo:scene-classifier", "--real", "scenes"], MMDecodeError, "64 x 64"),
        (["--classifier", "zoo:scene-classifier", "--real", "nowhere"], InputError, "not a folder"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_evaluated_is_refused(checkpoint, options, error, words):
    with pytest.raises(error, match=words):
        evaluate(checkpoint, "-n", "2", "--modes", "plain", *options)


def test_images_that_fail_are_reported_and_left_out(checkpoint, monkeypatch):
    original = ImageGenerator.images

    def images(self, requests, **options):
        for image in original(self, requests, **options):
            if image.ordinal == 1 and image.condition == 2 and self.guarantee == "heuristic":
                failed = Failed.of(InputError("lost"), "")
                lost = {"error": failed.error, "kind": failed.kind}
                none = torch.empty(0)
                yield replace(image, codes=none, tokens=none, commits=none, **lost)
            else:
                yield image

    monkeypatch.setattr(ImageGenerator, "images", images)
    result = evaluate(checkpoint, "-n", "8", "--modes", "relaxed", "--json")
    assert result.exit_code == 1
    summary = json_of(result)
    assert summary["failures"][0]["mode"] == "relaxed"
    assert summary["failures"][0]["error"] == "lost"
    assert summary["modes"]["relaxed"]["failed"] == 1


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_forced_logits_are_those_of_one_pass_over_the_image(checkpoint, guidance):
    model = load(str(checkpoint))
    network, labels = model.adapter.model, torch.tensor([0, 2])
    codes = torch.randint(CODES, (2, GRID, GRID), generator=torch.Generator().manual_seed(0))
    found = forced_logits(model, labels.tolist(), codes, guidance)
    with torch.no_grad():
        rows = [
            network.code_logits(condition, codes.flatten(1))
            for condition in (labels, network.unconditional(labels))
        ]
    torch.testing.assert_close(found, guided(*rows, guidance), atol=1e-4, rtol=1e-4)
    assert found.std() > 0.5


def test_modes_take_turns_and_draw_the_same_conditions(checkpoint, tmp_path):
    modes = modes_of(["ar", "exact", "exact"])
    assert [mode.name for mode in modes] == [PLAIN, AGAIN, "exact"]
    recorder = Recorder(load(str(checkpoint)), modes, [0, 1, 0, 2], batch=2)
    journal = RowJournal(tmp_path / ROWS, read_images, ImageRow.key, {}, False)
    recorder.run(journal)
    journal.close()
    assert [(row.condition, row.ordinal) for row in recorder.requests] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (2, 0),
    ]
    order = [row.mode for row in read_images(tmp_path / "images.jsonl")]
    assert order == [name for mode in modes for name in [mode.name] * 4]


class OldLaw(Rejection):
    """Tests drafts by the distribution they were first drawn from, however often redrawn."""

    def odds(self, asked):
        first, second = super().odds(asked)
        return first, torch.full_like(second, 1 / CODES)


def test_a_rule_with_stale_bookkeeping_is_not_exact(checkpoint):
    model = load(str(checkpoint))
    modes = [
        *modes_of(["fast"]),
        Mode(name="old distribution", draft="jacobi:window=8", accept="rejection"),
    ]
    recorder = Recorder(model, modes, [i % CLASSES for i in range(240)], batch=240)
    recorder.generators["old distribution"] = ImageGenerator(
        model, Decoder(draft=Jacobi(window=8), accept=OldLaw()), seed=3
    )
    report = ImageReport(recorder, recorder.run(), permutations=99, resamples=20)
    modes = report.summary["modes"]
    assert modes["old distribution"]["claims"] == "exact"
    assert modes["old distribution"]["verdict"].startswith("NOT EXACT")
    for name in (AGAIN, "fast"):
        assert modes[name]["verdict"].startswith("no difference found")
        assert min(test["p_holm"] for test in modes[name]["tests"].values()) > 10 * ALARM


def test_the_verdict_in_words():
    mode = {
        "claims": "exact",
        "same": 0.0,
        "equivalence": {"shown": False},
        "tests": {"tokens": {"p_holm": 0.5}, "codes": {"p_holm": 0.0101}},
    }
    assert verdict(mode) == "no difference found; equal likelihood not shown with so few images"
    mode["equivalence"]["shown"] = True
    assert verdict(mode) == "no difference found; equal likelihood shown"
    mode["tests"]["codes"]["p_holm"] = ALARM / 2
    assert verdict(mode) == "NOT EXACT: codes, p = 0.0005"
    assert verdict({**mode, "claims": "heuristic"}) == "another distribution: codes, p = 0.0005"


def test_a_sheet_holds_all_images_and_points_are_small():
    shown = np.zeros((13, 8, 8, 3), dtype=np.uint8)
    assert sheet(shown, "plain")[:4] == b"\x89PNG"
    assert small(torch.zeros(2, 3, 64, 64)).shape == (2, 3 * 16 * 16)
