"""Guides that do not fit a model are refused before any model runs."""

import pytest

import mmdecode
from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.linear import Linear
from tests.conformance import test_instructblip as instructblip
from tests.conformance.test_whisper import inner_generate
from tests.support.vision import decode


@pytest.mark.parametrize(("name", "cls"), [("dola", "DoLa"), ("dfd", "DFD"), ("dcla", "DCLA")])
def test_a_guide_that_looks_into_layers_is_named_where_they_are_not_shown(name, cls):
    with pytest.raises(IncompatibleError, match=f"guide {cls} does not fit Whisper"):
        inner_generate(Decoder(guide=name))


def test_a_branch_that_replaces_one_that_shares_its_pass_is_refused():
    class Clash(Linear):
        def __init__(self):
            edited = BranchSpec(name="edited", stage=2, replaces_after_prefill="main")
            super().__init__(
                [BranchSpec(name="beside", transform="no_image"), edited], [0, 0.5, 0.5]
            )

    with pytest.raises(IncompatibleError, match=r"replaces 'main' after prefill.* with beside"):
        decode(Clash())


@pytest.mark.parametrize(
    ("transform", "function"),
    [(name, "change") for name in ("pixels", "questions", "pictures", "features", "patches")]
    + [("tokens", "select"), ("tower", "edit")],
)
def test_a_transform_that_needs_a_function_is_refused_to_a_string(transform, function):
    needs = rf"transform '{transform}'.* needs '{function}'"
    says = rf"{needs}.*use no_image or only_images, or build .* Python"
    with pytest.raises(OptionError, match=says):
        decode(f"contrast:transform={transform}")
    with pytest.raises(OptionError, match=says):
        decode(None, draft=f"amateur:transform={transform}")
    with pytest.raises(OptionError, match=says):
        mmdecode.generate(
            instructblip.model(),
            decoder=Decoder(guide=f"contrast:transform={transform}"),
            max_new_tokens=2,
            **instructblip.inputs(),
        )


def test_an_unknown_view_is_answered_with_those_that_a_string_can_name():
    with pytest.raises(IncompatibleError, match="use one of no_image, only_images, or build"):
        decode("contrast:transform=noise")


def test_the_released_form_of_causalmm_is_about_images():
    with pytest.raises(OptionError, match="edits none"):
        registry.create("guide", "causalmm:level=language,released=true")


def test_an_unknown_view_is_refused_for_the_model_that_the_caller_knows():
    decoder = Decoder(guide="contrast:transform=nonsense")
    with pytest.raises(IncompatibleError, match="InstructBlipForConditionalGeneration"):
        mmdecode.generate(
            instructblip.model(), decoder=decoder, max_new_tokens=2, **instructblip.inputs()
        )
