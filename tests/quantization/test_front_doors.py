"""``quantize`` of every loader: int8 products run, and a draft changes no token of the model."""

import copy
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import mmdecode as mm
from mmdecode import registry
from mmdecode.asr import Transcriber
from mmdecode.asr.correction.corrector import Corrector
from mmdecode.asr.correction.selection import TextScorer
from mmdecode.errors import OptionError, UnsupportedModelError
from mmdecode.evaluation.vision.benchmarks import read_questions
from mmdecode.image_ar import ImageGenerator
from mmdecode.image_ar.loading import config_of
from mmdecode.quantization import is_quantized
from mmdecode.quantization.attention import attend_by_rows
from mmdecode.quantization.models import refuse_device
from mmdecode.vlm import Answerer
from mmdecode.zoo.speech import speech_test
from tests.support.int8 import counted
from tests.support.tiny import MOONSHINE_DRAFTS, NEW, model_of, waves


def decoder_of(draft, model, name):
    drafter = registry.create("draft", draft, target=model, model_id=name)
    return mm.Decoder(drafter, seed=0)


@pytest.fixture(scope="module")
def recogniser():
    found = Transcriber.from_pretrained("zoo:whisper-synth", device="cpu", quantize="int8")
    found(str(speech_test()[0].path))  # the first call also compares the lean step with modules
    return found


def transcribed(transcriber, clips):
    """Tokens, int8 products and passes."""
    transcriber.stats.reset()
    with counted() as count:
        found = [one.tokens for one in transcriber(clips)]
    return found, count.products, transcriber.stats.passes


@pytest.mark.parametrize("draft", ["medusa", "lookup"])
def test_a_drafted_whisper_says_the_same(recogniser, draft):
    model = recogniser.model
    layers, encoder = model.config.decoder_layers, model.config.encoder_layers
    clip = [str(speech_test()[0].path)]
    plain, products, passes = transcribed(recogniser, clip)
    # six matrices of an encoder's layer; in a pass eight matrices of each decoder layer, the
    # projections to keys and values, two of the states, and the output matrix
    once, each = 6 * encoder, 12 * layers + 1
    assert products == once + (passes + 1) * each  # the prompt is read before the passes
    drafter = decoder_of(draft, model, "zoo:whisper-synth")
    drafted = Transcriber(model, recogniser.processor, drafter, recogniser.options)
    found, products, passes = transcribed(drafted, clip)
    assert found == plain
    assert len(plain[0]) > 10
    # Medusa has a layer of its own, whose first call reads the prompt, and its heads apply the
    # output matrix in every proposal
    own = passes + 12 * (passes + 2) if draft == "medusa" else 0
    assert products == once + (passes + 1) * each + own


def test_a_drafted_whisper_says_the_same_in_a_batch(recogniser):
    clips = [str(clip.path) for clip in speech_test()[:2]]
    decoder = decoder_of("medusa", recogniser.model, "zoo:whisper-synth")
    drafted = Transcriber(recogniser.model, recogniser.processor, decoder, recogniser.options)
    together = transcribed(recogniser, clips)[0]
    assert transcribed(drafted, clips)[0] == together
    assert [transcribed(drafted, [clip])[0][0] for clip in clips] == together


def test_a_drafted_vision_model_says_the_same():
    data = read_questions("pope", ("zoo",))
    images = [data.image(name) for name in dict.fromkeys(i.image for i in data.items)][:2]
    first = Answerer.from_pretrained("zoo:llava-scenes", device="cpu", quantize="int8")
    layers = first.model.config.text_config.num_hidden_layers

    def answers(answerer):
        asked = ["Describe the image."] * len(images)
        with counted() as count:
            found = answerer(images, asked, max_new_tokens=24, batch_size=1)
        assert count.products >= answerer.stats.passes * (7 * layers + 1)
        return [(one.text, one.margin) for one in found], answerer.stats.passes

    plain, passes = answers(first)
    for draft in ("medusa", "lookup"):
        decoder = decoder_of(draft, first.model, "zoo:llava-scenes")
        drafted, fewer = answers(Answerer(first.model, first.processor, decoder))
        assert drafted == plain
        assert fewer < passes


@pytest.mark.slow
def test_drafted_images_are_the_same():
    layers = config_of("zoo:llamagen-digits").num_hidden_layers

    def generated(**how):
        generator = ImageGenerator.from_pretrained(
            "zoo:llamagen-digits", device="cpu", quantize="int8", seed=3, **how
        )
        with counted() as count:
            codes = generator([3])[0].codes
        passes = generator.stats.passes
        # the prompt is read before the passes
        assert count.products == (passes + 1) * (5 * layers + 1)
        return codes, passes

    plain, passes = generated()
    drafted, fewer = generated(draft="jacobi:window=16")
    assert torch.equal(plain, drafted)
    assert fewer < passes


@pytest.mark.parametrize("family", ["moonshine", "moonshine_padded", "moonshine_streaming"])
def test_a_drafted_moonshine_says_the_same_of_recordings_of_uneven_length(family):
    model = mm.quantize(copy.deepcopy(model_of(family)))
    layers = model.config.num_hidden_layers

    def generated(draft=None):
        decoder = mm.Decoder(draft)
        with counted() as count:
            ids = mm.generate(model, **waves(3), decoder=decoder, max_new_tokens=NEW)
        assert count.products >= decoder.stats.passes * (8 * layers + 1)
        return ids, decoder.stats.passes

    plain, passes = generated()
    for draft in ("known", "known_tree"):
        rows = plain[:, -NEW:].tolist()
        drafted, fewer = generated(MOONSHINE_DRAFTS[draft](family, rows))
        assert torch.equal(drafted, plain)
        assert fewer < passes


def test_a_mask_with_one_row_is_that_of_every_query():
    query, key, value = torch.randn(3, 2, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([5, 3])[:, None] > torch.arange(5)
    found = attend_by_rows(query, key, value, mask[:, None, None])
    same = attend_by_rows(query, key, value, mask[:, None, None].expand(-1, -1, 5, -1))
    expected = scaled_dot_product_attention(query, key, value, mask[:, None, None])
    assert torch.equal(found, same)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize(
    "load",
    [
        lambda: mm.load("zoo:lm-synth", "cpu", quantize="int8")[0],
        lambda: mm.load("zoo:whisper-synth", "cpu", quantize="int8")[0],
        lambda: mm.load("zoo:llamagen-scenes", "cpu", quantize="int8")[0],
        lambda: TextScorer.from_pretrained("zoo:lm-synth", device="cpu", quantize="int8").model,
        lambda: Corrector.from_pretrained("zoo:lm-synth", device="cpu", quantize="int8").model,
    ],
)
def test_every_loader_rounds(load):
    assert is_quantized(load())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a rounded model, an input and what the model makes of it."""
    folder = tmp_path_factory.mktemp("int8")
    model, tokenizer = mm.load("zoo:lm-synth", "cpu")
    mm.quantize(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    inputs = tokenizer("one two three", return_tensors="pt")
    return folder, inputs, mm.generate(model, **inputs, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("to", [None, "int8"])
def test_a_rounded_checkpoint_is_loaded_as_such_with_and_without_the_option(saved, to):
    folder, inputs, expected = saved
    model, _ = mm.load(folder, "cpu", quantize=to)
    assert is_quantized(model)
    with counted() as count:
        found = mm.generate(model, **inputs, max_new_tokens=6, do_sample=False)
    assert count.products >= 5 * (7 * model.config.num_hidden_layers + 1)
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_a_new_process_loads_a_rounded_checkpoint(saved):
    folder, _, expected = saved
    code = (
        "import mmdecode as mm, sys\n"
        "model, tokenizer = mm.load(sys.argv[1], 'cpu')\n"
        "inputs = tokenizer('one two three', return_tensors='pt')\n"
        "ids = mm.generate(model, **inputs, max_new_tokens=6, do_sample=False)\n"
        "print(type(model.lm_head).__name__, ids[0].tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"Int8Linear {expected[0].tolist()}\n"


def test_what_cannot_be_rounded_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="zoo:var-scenes generates images scale by"):
        mm.load("zoo:var-scenes", "cpu", quantize="int8")
    with pytest.raises(OptionError, match="leave quantize out"):
        ImageGenerator.from_pretrained("zoo:var-scenes", device="cpu", quantize="int8")
    with pytest.raises(OptionError, match="leave out the map"):
        Answerer.from_pretrained("zoo:llava-scenes", device_map="auto", quantize="int8")
    with pytest.raises(OptionError, match="no quantize named 'int4'; did you mean 'int8'"):
        mm.load("zoo:lm-synth", "cpu", quantize="int4")


def test_a_rounded_model_stays_on_the_cpu(recogniser):
    with pytest.raises(UnsupportedModelError, match="int8 weights, whose products run on the CPU"):
        refuse_device(recogniser.model, torch.device("cuda"))
    refuse_device(recogniser.model, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="leave the map out"):
        recogniser.model.hf_quantizer.validate_environment(device_map={"": "cuda:0"})
    recogniser.model.hf_quantizer.validate_environment(device_map={"": "cpu"})
