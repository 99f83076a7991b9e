import json
import random
from dataclasses import replace

import pytest
import torch

from mmdecode.checkpoints import ZOO
from mmdecode.train.zoo import llava_scenes
from mmdecode.train.zoo.llava_scenes import (
    PATCHES,
    Learner,
    LlavaScenesOptions,
    Packer,
    build_model,
    build_processor,
    export,
    losses,
    pope_accuracy,
    rate_at,
    rendered_batch,
    run,
    sampled_exchanges,
    states_of,
)
from mmdecode.zoo.scene_sets import scene_of, scene_rows
from mmdecode.zoo.scenes import COLOURS, HELD_OUT, NOUNS, Scene, Thing, draw_scene, render

pytest.importorskip("PIL")
from PIL import Image

OPTIONS = LlavaScenesOptions(
    tower_steps=2,
    steps=4,
    vision_width=32,
    vision_layers=1,
    width=32,
    layers=2,
    batch=2,
    tower_batch=4,
    questions=(3, 4),
)
pytestmark = pytest.mark.filterwarnings("ignore:.*torchvision.*")


@pytest.fixture(scope="module")
def processor():
    return build_processor(OPTIONS)


@pytest.fixture(scope="module")
def model(processor):
    return build_model(OPTIONS, processor).eval()


def packed_logits(model, packer, scene, made, blind):
    rows = packer.collate([packer.pack(made, blind), packer.pack(made[:1], blind[:1])])
    with torch.no_grad():
        hidden, _ = states_of(model, packer, rows, rendered_batch([scene, scene]).pixels)
        return rows, model.lm_head(hidden)


def test_packed_exchanges_equal_the_processors_prompts_one_by_one(processor, model):
    scene = draw_scene(11)
    made = sampled_exchanges(scene, random.Random(3), OPTIONS)
    blind = [index == 1 for index in range(len(made))]
    packer = Packer(processor)
    rows, logits = packed_logits(model, packer, scene, made, blind)
    for index, one in enumerate(made):
        content = [] if blind[index] else [{"type": "image"}]
        content.append({"type": "text", "text": one.request})
        turn = [{"role": "user", "content": content}]
        prompt = processor.apply_chat_template(turn, add_generation_prompt=True)
        images = None if blind[index] else Image.fromarray(render(scene))
        text = f"{prompt} {one.answer}</s>"
        inputs = processor(images=images, text=text, return_tensors="pt")
        with torch.no_grad():
            alone = model(**inputs).logits[0]
        number = -(index + 1) if blind[index] else index + 1
        mine = rows["part"][0] == number
        ids = inputs["input_ids"][0]
        assert rows["ids"][0][mine].tolist() == ids[-int(mine.sum()) :].tolist()
        torch.testing.assert_close(logits[0][mine], alone[-int(mine.sum()) :])
        answer = rows["ids"][0][mine & rows["answers"][0]]
        assert processor.decode(answer) == f" {one.answer}</s>"


def test_pixels_are_those_of_the_processor(processor):
    scene = draw_scene(12)
    expected = processor.image_processor(Image.fromarray(render(scene)), return_tensors="pt")
    torch.testing.assert_close(
        rendered_batch([scene]).pixels, expected["pixel_values"], atol=1e-5, rtol=0
    )


def test_patches_are_labelled_by_what_covers_them():
    one = Thing(name="square", colour="blue", texture="plain", size=24, centre=(44, 12))
    shown = rendered_batch([Scene(seed=1, things=(one,), noise=0.1, clutter=0)])
    labels = shown.nouns.view(8, 8)
    assert labels[:3, 4:7].unique().tolist() == [NOUNS.index("square") + 1]
    assert (labels > 0).sum() == 9
    assert torch.equal(shown.colours > 0, shown.nouns > 0)
    assert shown.colours.max() == tuple(COLOURS).index("blue") + 1
    assert shown.present[0].nonzero().flatten().tolist() == [NOUNS.index("square")]
    assert labels.numel() == PATCHES


def test_an_exchange_attends_to_its_image_and_neither_to_its_neighbours_nor_to_padding(
    processor, model
):
    packer = Packer(processor)
    scene = draw_scene(13)
    made = sampled_exchanges(scene, random.Random(4), OPTIONS)[:3]
    _, together = packed_logits(model, packer, scene, made, [False] * 3)
    rows, alone = packed_logits(model, packer, scene, made[2:], [False])
    length = int((rows["part"][0] == 1).sum())
    end = int((packer.collate([packer.pack(made, [False] * 3)])["part"] < 4).sum())
    torch.testing.assert_close(
        together[0, end - length : end], alone[0, len(packer.prefix) : len(packer.prefix) + length]
    )


def test_rate_rises_twice_and_falls_twice():
    options = LlavaScenesOptions(tower_steps=1000, steps=3000)
    rates = [rate_at(step, options) / options.peak_rate for step in range(3000)]
    assert rates[0] == rates[1000] == pytest.approx(1 / 200)
    assert rates[500] == rates[2000] == 1
    assert rates[999] < 0.03 and rates[2999] < 0.03


@pytest.fixture
def quick(monkeypatch, processor):
    """Without what takes most of a small run: scores and the training of the tokenizer."""
    monkeypatch.setattr(llava_scenes, "build_processor", lambda options: processor)
    monkeypatch.setattr(llava_scenes, "pope_accuracy", lambda *given: {})
    monkeypatch.setattr(llava_scenes, "tower_accuracy", lambda *given: {})


@pytest.mark.parametrize("interrupted_at", [1, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch, quick, interrupted_at):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(OPTIONS, whole, whole / "model")
    write = llava_scenes.write_state

    def write_and_stop(path, state):
        write(path, state)
        if state["step"] == interrupted_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(llava_scenes, "write_state", write_and_stop)
    with pytest.raises(KeyboardInterrupt):
        llava_scenes.train(OPTIONS, parts, parts / "model", save_every_s=0)
    assert torch.load(parts / "state.pt", weights_only=True)["step"] == interrupted_at
    monkeypatch.setattr(llava_scenes, "write_state", write)
    result = run(OPTIONS, parts, parts / "model")
    assert result["step"] == OPTIONS.steps and result["folder"] == str(parts / "model")
    states = [torch.load(f / "state.pt", weights_only=True)["modules"] for f in (whole, parts)]
    assert states[0].keys() == states[1].keys()
    for name, weights in states[0].items():
        assert torch.equal(weights, states[1][name]), name


def test_both_losses_fall(tmp_path, processor, quick):
    options = replace(OPTIONS, tower_steps=15, steps=55, batch=4, tower_batch=16, peak_rate=1e-2)
    learner = Learner(options, processor)
    scenes = [draw_scene(HELD_OUT + index) for index in range(8)]

    def measured():
        with torch.no_grad():
            return losses(learner, Packer(processor), scenes, random.Random(0), options)

    before = measured()
    run(options, tmp_path, tmp_path / "model")
    learner.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)["modules"])
    after = measured()
    assert after[0] < 0.75 * before[0] and after[1] < 0.8 * before[1]


def test_exported_folder_loads_and_generates_as_packed_training_does(processor, model, tmp_path):
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    export(model, processor, OPTIONS, tmp_path)
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.dtype == loaded.model.vision_tower.dtype == torch.float32
    again = AutoProcessor.from_pretrained(tmp_path)
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}]
    prompt = again.apply_chat_template(turn, add_generation_prompt=True)
    assert prompt == "USER: <image>\nWhy? ASSISTANT:"
    inputs = again(images=Image.fromarray(render(draw_scene(1))), text=prompt, return_tensors="pt")
    assert (inputs["input_ids"] == loaded.config.image_token_id).sum() == PATCHES
    assert inputs["input_ids"][0, 0] == again.tokenizer.bos_token_id
    grown = loaded.generate(**inputs, max_new_tokens=3)
    assert torch.equal(grown[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])


def test_yes_and_no_are_one_token(processor):
    for word in ("Yes", "No", "True", "False", "Left", "Two"):
        assert len(processor.tokenizer(f" {word}", add_special_tokens=False).input_ids) == 1


def test_accuracy_is_counted_per_split(processor, model):
    scores = pope_accuracy(model, Packer(processor), 4, "test")
    assert set(scores) == {"random", "popular", "adversarial", "yes"}
    assert all(0 <= score <= 1 for score in scores.values())


@pytest.fixture(scope="module")
def shipped():
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    folder = ZOO / "llava-scenes"
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    return model, AutoProcessor.from_pretrained(folder)


@pytest.mark.slow
def test_shipped_model_scores_as_its_card_says(shipped):
    model, processor = shipped
    card = json.loads((ZOO / "llava-scenes" / "card.json").read_text())["pope"]
    scores = pope_accuracy(model, Packer(processor), 100, "test")
    assert scores == pytest.approx(card, abs=0.03)
    assert 0.8 < card["random"] < 0.93 and card["adversarial"] <= card["random"] - 0.03
    assert 0.4 < card["yes"] < 0.6


def test_shipped_model_generates_the_answer_that_packing_scores(shipped):
    model, processor = shipped
    rows = scene_rows("test", "pope_adversarial")[:24]
    images = [Image.fromarray(render(scene_of(row["image"]))) for row in rows]
    text = [f"USER: <image>\n{row['text']} ASSISTANT:" for row in rows]
    inputs = processor(images=images, text=text, return_tensors="pt", padding=True)
    grown = model.generate(**inputs, do_sample=False, max_new_tokens=4)
    answers = processor.batch_decode(
        grown[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert set(answers) <= {" Yes", " No"}
    right = [f" {row['label'].capitalize()}" == one for row, one in zip(rows, answers, strict=True)]
    scores = pope_accuracy(model, Packer(processor), 4, "test")
    assert sum(right) / 24 == pytest.approx(scores["adversarial"], abs=1e-3)


def test_shipped_folder_is_small():
    files = list((ZOO / "llava-scenes").iterdir())
    assert sum(file.stat().st_size for file in files) < 8e6
