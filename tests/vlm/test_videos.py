"""Videos: frames by number or time, ids those of the processor given the same frames."""

import re

import numpy as np
import pytest

from mmdecode.engine import shared_prefill
from mmdecode.errors import InputError, OptionError
from mmdecode.vlm import Answerer
from mmdecode.vlm.chat import request_of
from mmdecode.vlm.videos import is_video, read_video

av = pytest.importorskip("av")
RATE, COUNT = 10, 30


def write(path, count=COUNT, rate=RATE, size=(32, 32), codec="mpeg4"):
    """A video in which frame n has the grey level 8 n."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(count):
            array = np.full((size[1], size[0], 3), 8 * number, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(array, "rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    return write(tmp_path_factory.mktemp("videos") / "grey.mp4")


def numbers(found):
    """Which frames were read, by their grey level."""
    return [round(float(np.asarray(frame).mean()) / 8) for frame in found.frames]


def test_frames_by_number_are_at_equal_distances(video):
    found = read_video(video, 4)
    assert numbers(found) == [0, 10, 19, 29]
    assert found.seconds == pytest.approx([0, 1, 1.9, 2.9])
    assert (found.rate, found.total) == (RATE, COUNT)
    assert found.metadata()["frames_indices"] == [0, 10, 19, 29]
    assert numbers(read_video(video, 1)) == [0]
    assert numbers(read_video(video, 99)) == list(range(COUNT))


def test_frames_by_rate(video):
    found = read_video(video, fps=2)
    assert numbers(found) == [0, 5, 10, 15, 20, 25]
    assert found.seconds == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])
    assert numbers(read_video(video, fps=0.1)) == [0]
    with pytest.raises(InputError, match="has 3000 frames at 1000 per second"):
        read_video(video, fps=1000)


def test_what_is_a_video():
    assert is_video("a/b.MP4") and not is_video("a.png") and not is_video(b"a.mp4")


def test_files_that_cannot_be_read(tmp_path, video):
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"nothing at all")
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(video.read_bytes()[:200])
    for path, why in (
        (bad, "cannot be read as a video"),
        (cut, "cannot be read as a video"),
        (tmp_path / "none.mp4", "does not exist"),
        ("https://example.org/a.mp4", "is a URL"),
    ):
        with pytest.raises(InputError, match=why):
            read_video(path)


def test_a_model_that_reads_images_gets_the_frames(model, processor, video, kit):
    answerer = Answerer(model, processor)
    found = answerer(video, "What is there?", max_new_tokens=6, frames=3)
    frames = list(read_video(video, 3).frames)
    expected = answerer([frames], ["What is there?"], max_new_tokens=6)[0]
    assert found.token_ids == expected.token_ids and found.prompt.count("<image>") == 3
    marked = answerer(video, "Look: <image> What?", max_new_tokens=6, frames=2)
    assert "Look:<image>\n<image>\n What?" in marked.prompt.replace(" <image>", "<image>")
    mixed = answerer(
        [[kit.image(1), video]], ["Is <image> in <image>?"], max_new_tokens=4, frames=2
    )
    assert mixed[0].prompt.count("<image>") == 3
    twice = "has 1 image (a video counts as one) and 2 placeholders"
    with pytest.raises(InputError, match=re.escape(twice)):
        answerer(video, "<image> or <image>?", frames=3)
    with pytest.raises(OptionError, match="fps"):
        answerer(video, "What?", fps=-1)


@pytest.mark.parametrize("kind", ["video", "video_url", "input_video", "image_url"])
def test_messages_hold_videos(model, processor, video, tmp_path, kind):
    named = {"video": "video"}.get(kind, {"input_video": "video_url"}.get(kind, kind))
    path = video
    if kind != "image_url":  # its suffix says nothing
        path = tmp_path / "recording"
        path.write_bytes(video.read_bytes())
    part = {"type": kind, named: str(path) if kind == "video" else {"url": str(path)}}
    content = [part, {"type": "text", "text": "What is there?"}]
    answerer = Answerer(model, processor)
    request = request_of([{"role": "user", "content": content}])
    [found] = answerer.answers([request], max_new_tokens=4, frames=2)
    expected = answerer(video, "What is there?", max_new_tokens=4, frames=2)
    assert found.token_ids == expected.token_ids and not found.error


def test_a_video_by_another_name_is_recognised(model, processor, video, tmp_path):
    path = tmp_path / "recording.bin"
    path.write_bytes(video.read_bytes())
    with pytest.raises(InputError, match=r"is a video .*let its name end like one, such as \.mp4"):
        Answerer(model, processor)(path, "What?")


def test_an_animation_by_the_name_of_a_video_is_one(kit, tmp_path):
    images = [kit.image(seed) for seed in range(3)]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=100)
    (tmp_path / "a.gif").rename(tmp_path / "a.mp4")
    assert len(read_video(tmp_path / "a.mp4").frames) == 3


def test_one_video_that_fails_is_that_questions(model, processor, video, tmp_path):
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"nothing")
    found = Answerer(model, processor)([bad, video], "What?", max_new_tokens=3, frames=2)
    assert "cannot be read as a video" in found[0].error and not found[1].error


@pytest.fixture(scope="module")
def qwen():
    """A tiny random Qwen2.5-VL with a real processor."""
    return build_qwen()


def build_qwen():
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    special = ["<pad>", "<end>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["What is there in the image? one two"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        extra_special_tokens=special[2:],
    )
    template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<|image_pad|>{% elif part['type'] == 'video' %}"
        "<|video_pad|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    pixels = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=fast,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=template,
    )
    ids = fast.convert_tokens_to_ids(special[2:])
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(fast),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "tokens_per_second": 2,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids[0],
        video_token_id=ids[1],
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model, processor


@pytest.mark.parametrize("how", [{"frames": 4}, {"fps": 2.0}, {"frames": 3}])
def test_qwen_reads_a_video_as_one_with_its_times(qwen, video, how):
    model, processor = qwen
    frames = read_video(video, **how)
    inputs = processor(
        text=["<|video_pad|>What is there?"],
        videos=[list(frames.frames)],
        video_metadata=[frames.metadata()],
        do_sample_frames=False,
        return_tensors="pt",
    )
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    answerer = Answerer(model, processor)
    for cache in (0, 2**30):
        found = answerer(video, "What is there?", max_new_tokens=6, prompt_cache=cache, **how)
        assert found.token_ids == expected[0, inputs["input_ids"].shape[1] :].tolist()
    seconds = inputs["second_per_grid_ts"]
    spaced = (frames.seconds[-1] - frames.seconds[0]) / (len(frames.frames) - 1)
    assert float(seconds[0]) == pytest.approx(2 * spaced, rel=0.4)


def test_videos_of_qwen_are_shared_and_mixed_with_images(qwen, video, kit, monkeypatch):
    monkeypatch.setattr(shared_prefill, "WORTH", 2)
    model, processor = qwen
    answerer = Answerer(model, processor)
    texts = ["What is there?", "one two?", "Is <image> in <image>?"]
    entries = [video, video, [kit.image(2, (56, 56)), str(video)]]
    made = [
        answerer(entries, texts, max_new_tokens=5, frames=4, prompt_cache=cache)
        for cache in (2**30, 0)
    ]
    assert [a.error for a in made[0]] == [None] * 3
    assert [a.token_ids for a in made[0]] == [a.token_ids for a in made[1]]
    assert answerer.stats.prompt_tokens["reused"]
