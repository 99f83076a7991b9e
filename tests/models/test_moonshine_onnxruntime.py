"""The converted checkpoint next to the publisher's own graphs, where onnxruntime is installed.

Those graphs round the input of every linear layer to 8 bits. A copy of the checkpoint that does the
same equals them to the last digits, but for inputs where a value lies so near to the middle of two
steps that the order of a sum decides: of short ones many have none.
"""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.moonshine.modeling_moonshine import MoonshineEncoderModelOutput

import mmdecode as mm
from mmdecode.models.moonshine import convert, wheel
from mmdecode.zoo.real_clips import real_clips
from tests.support.moonshine import NAME, needs_wheel

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytestmark = needs_wheel


SAMPLES = 1600


class Published:
    """The publisher's two graphs."""

    def __init__(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(
                str(wheel.assets() / name), options, providers=["CPUExecutionProvider"]
            )
            for name in (convert.ENCODER, convert.DECODER)
        )
        names = [one.name for one in self.decoder.get_inputs()]
        self.empty = {n: np.zeros((1, 8, 0, 36), "f4") for n in names if n.startswith("past")}

    def encode(self, samples):
        """States (1, frames, 288) of samples (1, n)."""
        mask = np.ones(samples.shape, "i8")
        return self.encoder.run(None, {"input_values": samples, "attention_mask": mask})[0]

    def step(self, states, num_samples, ids, past=None):
        """Logits (1, len(ids), vocabulary) and the next past."""
        given = {
            "input_ids": np.array([ids]),
            "encoder_hidden_states": states,
            "encoder_attention_mask": np.ones((1, num_samples), "i8"),
            "use_cache_branch": np.array([past is not None]),
            **(past or self.empty),
        }
        logits, *present = self.decoder.run(None, given)
        made = [one.name for one in self.decoder.get_outputs()[1:]]
        made = [name.replace("present", "past_key_values") for name in made]
        made = dict(zip(made, present, strict=True))
        for name in past or ():
            if ".encoder." in name:  # the branch with a past does not give these again
                made[name] = past[name]
        return logits, made

    def generate(self, states, num_samples, most):
        ids, past = [1], None
        while len(ids) < most and ids[-1] != 2:
            logits, past = self.step(states, num_samples, ids[-1:], past)
            ids.append(int(logits[0, -1].argmax()))
        return ids


class Rounded(nn.Module):
    """A linear layer whose input has 8 bits."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, hidden):
        low, high = hidden.min().clamp(max=0), hidden.max().clamp(min=0)
        step = (high - low) / 255
        zero = (-low / step).round()
        return self.linear((((hidden / step).round() + zero).clamp(0, 255) - zero) * step)


@pytest.fixture(scope="module")
def published():
    return Published()


@pytest.fixture(scope="module")
def model():
    return mm.load(NAME, "cpu")[0]


@pytest.fixture(scope="module")
def rounded():
    model = mm.load(NAME, "cpu")[0]
    model.set_attn_implementation("eager")  # sums as the graphs do
    for module in list(model.modules()):
        for name, inner in list(module.named_children()):
            if isinstance(inner, nn.Linear):
                setattr(module, name, Rounded(inner))
    return model


def noise(seed):
    return torch.randn(1, SAMPLES, generator=torch.Generator().manual_seed(seed)) * 0.1


@torch.inference_mode()
def test_the_encoder_with_rounded_inputs_is_the_published_one(published, rounded):
    found = []
    for seed in range(8):
        states = rounded.model.encoder(noise(seed)).last_hidden_state.numpy()
        found.append(float(abs(states - published.encode(noise(seed).numpy())).max()))
    assert sorted(found)[2] < 1e-5, found


@torch.inference_mode()
def test_the_decoder_with_rounded_inputs_is_the_published_one(published, model, rounded):
    found = []
    for seed in range(8):
        encoded = model.model.encoder(noise(seed))
        ids = torch.randint(3, 32_000, (1, 6), generator=torch.Generator().manual_seed(seed))
        logits = rounded(encoder_outputs=encoded, decoder_input_ids=ids).logits.numpy()
        states = encoded.last_hidden_state.numpy()
        theirs, _ = published.step(states, SAMPLES, ids[0].tolist())
        found.append(float(abs(logits - theirs).max()))
    assert sorted(found)[2] < 1e-4, found


@pytest.fixture(scope="module", params=["jfk", "librivox-0930"])
def samples(request):
    return next(one for one in real_clips() if one.name == request.param).samples()[None]


@torch.inference_mode()
def test_of_the_same_states_of_a_recording_both_write_the_same_ids(published, rounded, samples):
    states = published.encode(samples)
    encoded = MoonshineEncoderModelOutput(torch.from_numpy(states), attention_mask=None)
    ids = rounded.generate(encoder_outputs=encoded, max_length=60)[0].tolist()
    assert len(ids) > 10
    assert ids == published.generate(states, samples.shape[1], 60)


@torch.inference_mode()
def test_unrounded_it_writes_the_same_ids_of_these_recordings(published, model, samples):
    ids = model.generate(input_values=torch.from_numpy(samples), max_length=60)
    states = published.encode(samples)
    assert ids[0].tolist() == published.generate(states, samples.shape[1], 60)
    given = {"input_values": torch.from_numpy(samples), "decoder_input_ids": ids[:, :-1]}
    ours = model(**given).logits.numpy()
    theirs, _ = published.step(states, samples.shape[1], ids[0, :-1].tolist())
    assert (ours.argmax(-1) == theirs.argmax(-1)).mean() > 0.9
    assert abs(ours - theirs).max() < 5
