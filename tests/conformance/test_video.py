"""Videos as the Qwen-VL processors hand them over: grids of time, height and width."""

import pytest
import torch

from mmdecode.adapters.vision import pixels
from mmdecode.errors import IncompatibleError
from tests.conformance.test_transforms import seen
from tests.support.tiny_vlm import IMAGE, NEW, QWEN, VOCAB, plain, vision_model, without_tokens

VIDEO = 77
GRID = (2, 4, 4)  # two groups of frames of 16 x 16 pixels: 2 x 4 tokens
START, STOP = 75, 76
ROWS = (("video",), (), ("image", "video"))


def tokens_of(family, kind):
    """Placeholders; Qwen3 sets each group of frames apart, with words that tell the time."""
    if kind == "image":
        return [START, *[IMAGE] * 4, STOP]
    if family == "qwen3_vl":
        return [5, START, *[VIDEO] * 4, STOP, 6, START, *[VIDEO] * 4, STOP]
    return [START, *[VIDEO] * 8, STOP]


def video_inputs(family, rows=ROWS):
    """Left-padded prompts, patches in the order of the rows."""
    made, values = [], {"image": [], "video": []}
    for kinds in rows:
        made.append([1 + len(kinds), *(t for k in kinds for t in tokens_of(family, k)), 9, 11])
        for kind in kinds:
            generator = torch.Generator().manual_seed(len(kinds) * 10 + (kind == "video"))
            count = 32 if kind == "video" else 16
            values[kind].append(torch.randn(count, 96, generator=generator))
    width = max(map(len, made))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in made])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in made]),
        "mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == VIDEO).long(),
    }
    if values["image"]:
        inputs["pixel_values"] = torch.cat(values["image"])
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * len(values["image"]))
    if values["video"]:
        inputs["pixel_values_videos"] = torch.cat(values["video"])
        inputs["video_grid_thw"] = torch.tensor([GRID] * len(values["video"]))
    return inputs


def same(values, draw):
    return values


def noised(values, draw):
    return values + torch.randn(values.shape, generator=draw)


@pytest.mark.parametrize("family", QWEN)
def test_a_transform_that_changes_nothing_is_the_main_branch(family):
    inputs = video_inputs(family)
    expected = plain(family, inputs=inputs)
    assert expected.max() < VOCAB
    assert seen(family, "pixels", inputs=inputs, change=same).tolist() == expected.tolist()


@pytest.mark.parametrize("family", QWEN)
def test_a_video_is_changed_alike_in_every_batch(family):
    inputs = video_inputs(family)
    expected = plain(family, inputs=inputs)[:, -NEW:]
    together = seen(family, "pixels", inputs=inputs, change=noised)[:, -NEW:]
    assert together[0].tolist() != expected[0].tolist()
    assert together[1].tolist() == expected[1].tolist()  # a row without any
    for row in (0, 2):
        alone = seen(
            family, "pixels", inputs=video_inputs(family, ROWS[row : row + 1]), change=noised
        )
        assert alone[0, -NEW:].tolist() == together[row].tolist()


@pytest.mark.parametrize("family", QWEN)
def test_the_frames_of_a_video_are_transformed_as_one(family):
    """A flip on its pictures is the flip of the frames that the processor was given."""
    generator = torch.Generator().manual_seed(0)
    vision = vision_model(family).config.vision_config
    assert (vision.patch_size, vision.spatial_merge_size) == (4, 2)
    frames = torch.randint(0, 256, (4, 3, 16, 16), generator=generator) / 255

    def shown(frames):
        mean, deviation = (torch.tensor(values)[:, None, None] for values in pixels.NORMS[0])
        patches = pixels.to_patches((frames - mean) / deviation, GRID, 2, 2)
        return video_inputs(family, [("video",)]) | {"pixel_values_videos": patches}

    seen_frames = []

    def flip(values, draw):
        seen_frames.append(values.clone())
        return values.flip(-1)

    found = seen(family, "pictures", inputs=shown(frames), change=flip)
    assert len(seen_frames) == 1 and torch.allclose(seen_frames[0], frames, atol=1e-5)
    expected = plain(family, inputs=shown(frames.flip(-1)))
    assert found.tolist() == expected.tolist() != plain(family, inputs=shown(frames)).tolist()


@pytest.mark.parametrize("family", QWEN)
def test_without_its_video_a_prompt_is_the_text_around_it(family):
    inputs = video_inputs(family)
    expected = plain(family, inputs=without_tokens(inputs, {IMAGE, VIDEO}))[:, -NEW:]
    assert seen(family, "no_image", inputs=inputs)[:, -NEW:].tolist() == expected.tolist()


@pytest.mark.parametrize("transform", ["features", "tokens"])
def test_features_of_a_video_are_refused(transform):
    options = {"features": {"change": same}, "tokens": {"select": lambda f, s: s.topk(1).indices}}
    with pytest.raises(IncompatibleError, match="give the frames as images"):
        seen("qwen2_vl", transform, inputs=video_inputs("qwen2_vl"), **options[transform])
