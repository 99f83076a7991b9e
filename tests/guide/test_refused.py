"""What a guide and a model do not have for each other is said before any model runs."""

import pytest

import mmdecode
from mmdecode.engine.contracts import BranchSpec
from mmdecode.engine.decoder import Decoder
from mmdecode.errors import IncompatibleError
from mmdecode.guide.linear import Linear
from tests.conformance import test_instructblip as instructblip
from tests.conformance.test_whisper import inner_generate
from tests.guide.vision import decode


@pytest.mark.parametrize(("name", "cls"), [("dola", "DoLa"), ("dfd", "DFD"), ("dcla", "DCLA")])
def test_a_guide_that_looks_into_layers_is_named_where_they_are_not_shown(name, cls):
    with pytest.raises(IncompatibleError, match=f"guide {cls} does not fit Whisper"):
        inner_generate(Decoder(guide=name))


def test_a_branch_in_the_place_of_one_that_shares_its_pass_is_refused():
    class Clash(Linear):
        def __init__(self):
            law = BranchSpec(name="law", stage=2, replaces="main")
            super().__init__([BranchSpec(name="beside", view="no_image"), law], [0, 0.5, 0.5])

    with pytest.raises(IncompatibleError, match=r"in the place of 'main'.* with beside"):
        decode(Clash())


def test_an_unknown_view_is_refused_for_the_model_that_the_caller_knows():
    decoder = Decoder(guide="contrast:view=nonsense")
    with pytest.raises(IncompatibleError, match="InstructBlipForConditionalGeneration"):
        mmdecode.generate(
            instructblip.model(), decoder=decoder, max_new_tokens=2, **instructblip.inputs()
        )
