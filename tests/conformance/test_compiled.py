"""Compiled passes of real models: traced once per shape, they generate what passes do as usual.

The backend here runs a traced graph as it is; one test has torch generate code and build it.
"""

import shutil
from weakref import WeakKeyDictionary

import pytest
from torch._dynamo.testing import CompileCounter

from mmdecode.decoder import Decoder
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.contracts import Requirements
from mmdecode.guide.linear import Linear
from tests.conformance import test_encoder_decoder
from tests.support import seams, tiny, tiny_vlm
from tests.support.tiny import TEXT_DRAFTS, WHISPER_DRAFTS


@pytest.fixture
def counter(monkeypatch):
    """A backend that counts the graphs it is given."""
    counter = CompileCounter()
    seams.BACKEND.plant(monkeypatch, lambda _: counter)
    seams.COMPILED.plant(monkeypatch, lambda _: WeakKeyDictionary())
    return counter


def assert_compiled(generate, make, counter, graphs):
    """Asserts that tokens are those of plain passes, and how many graphs stand for all of them."""
    expected = generate(Decoder(make()))
    assert counter.frame_count == 0
    assert generate(Decoder(make(), compile=True)).tolist() == expected.tolist()
    assert 1 <= counter.frame_count <= graphs
    before = counter.frame_count
    generate(Decoder(make(), compile=True))
    assert counter.frame_count == before, "compiled anew for the same call"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", tiny.TEXT_CONFIGS)
def test_text_families(family, counter):
    assert_compiled(lambda d: tiny.ours(d, family), lambda: None, counter, graphs=1)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("family", tiny_vlm.CONFIGS)
def test_vision_language_families(family, counter):
    assert_compiled(lambda d: tiny_vlm.ours(d, family), lambda: None, counter, graphs=1)


def sequence_to_sequence(family, decoder):
    return test_encoder_decoder.generate(family, prompt=True, custom_generate=decoder)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_t5(family, counter):
    assert_compiled(lambda d: sequence_to_sequence(family, d), lambda: None, counter, graphs=1)


@pytest.mark.parametrize("family", ["bart", "umt5"])
def test_a_model_that_takes_a_hook_in_each_pass_is_run_as_usual(family, counter):
    expected = sequence_to_sequence(family, Decoder())
    with pytest.warns(UserWarning, match="could not be compiled and is run as usual"):
        found = sequence_to_sequence(family, Decoder(compile=True))
    assert found.tolist() == expected.tolist()
    assert not counter.frame_count
    sequence_to_sequence(family, Decoder(compile=True))  # no second attempt


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ["lookup", "assistant", "medusa_chain", "medusa_tree"])
@pytest.mark.parametrize("family", ["llama", "whisper"])
def test_drafts(family, name, counter):
    table = WHISPER_DRAFTS if family == "whisper" else TEXT_DRAFTS
    assert_compiled(lambda d: tiny.ours(d, family), lambda: table[name](family, []), counter, 4)


@pytest.mark.slow
def test_moonshine(counter):
    assert_compiled(lambda d: tiny.ours(d, "moonshine"), lambda: None, counter, graphs=2)


@pytest.mark.slow
def test_a_view_of_the_whole_model(counter):
    assert_compiled(
        lambda d: tiny.ours(d, "llama"), lambda: LayerSkip(skip=(), length=3), counter, 4
    )


def test_a_machine_without_a_compiler_runs_as_usual(counter, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no compiler is found")

    seams.BACKEND.plant(monkeypatch, lambda _: broken)
    expected = tiny.ours(Decoder(), "llama")
    with pytest.warns(UserWarning, match="no compiler is found"):
        assert tiny.ours(Decoder(compile=True), "llama").tolist() == expected.tolist()


def test_states_of_inner_layers_are_taken_as_usual(counter):
    class Guided(Linear):
        def needs(self, adapter):
            return Requirements(hidden=frozenset((1,)))

    other = BranchSpec(name="other", prompt="last_token")

    def generate(**options):
        decoder = Decoder(guide=Guided([other], [1.5, -0.5]), **options)
        return tiny.ours(decoder, "llama").tolist()

    expected = generate()
    with pytest.warns(UserWarning, match="states of inner layers"):
        assert generate(compile=True) == expected
    assert not counter.frame_count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(not shutil.which("g++"), reason="torch builds its code with g++")
def test_generated_code(monkeypatch):
    seams.COMPILED.plant(monkeypatch, lambda _: WeakKeyDictionary())
    seams.STEP.plant(monkeypatch, lambda _: 16)
    expected, _ = tiny.reference("llama", ())
    found = tiny.ours(Decoder(compile=True), "llama")
    assert found.tolist() == expected.tolist()
