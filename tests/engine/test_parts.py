"""What is given to a decoder as its parts."""

import pytest

import mmdecode as mm
from mmdecode.draft.lookup import PromptLookup
from mmdecode.engine.capabilities import DrafterCapabilities, RuleCapabilities
from mmdecode.errors import OptionError


@pytest.mark.parametrize(
    ("part", "given", "message"),
    [
        ("draft", 5, "draft=5 is no draft (no begin); give a name as 'mmdecode methods draft'"),
        ("draft", 0, "draft=0 is no draft"),
        ("draft", ["lookup"], "draft=['lookup'] is no draft"),
        ("draft", PromptLookup, "it is a class; make one"),
        ("guide", 5, "guide=5 is no guide"),
        ("guide", PromptLookup(), "is no guide (no neutral, apply)"),
        ("accept", 5, "accept=5 is no accept"),
        ("accept", None, "accept=None is no accept"),
        ("seed", "a", "seed='a'; expected a whole number"),
        ("seed", 1.5, "seed=1.5; expected a whole number"),
    ],
)
def test_what_is_no_part_of_a_decoder_is_refused(part, given, message):
    with pytest.raises(OptionError) as raised:
        mm.Decoder(**{part: given})
    assert message in str(raised.value)


def test_a_capability_that_does_not_exist_is_refused_with_the_one_that_was_meant():
    with pytest.raises(OptionError, match=r"'graph_saf'; did you mean 'graph_safe'\?"):
        DrafterCapabilities(graph_saf=True)
    with pytest.raises(OptionError, match=r"'drafter_invariance'; did you mean"):
        RuleCapabilities(drafter_invariance=True)


def test_a_name_that_is_nearly_one_of_a_parts_base_is_refused():
    with pytest.raises(OptionError, match=r"Hasty.begins is nothing .*'begin'"):

        class Hasty(mm.Drafter):
            def begins(self, call, prefill):
                """Misspelt."""

    class Late(mm.Drafter):
        def __init__(self):
            self.capability = DrafterCapabilities(graph_safe=True)

        def begin(self, call, prefill):
            """Nothing."""

    with pytest.raises(OptionError, match=r"Late.capability is nothing .*'capabilities'"):
        mm.Decoder(Late())


def test_a_part_without_its_base_is_refused():
    class Alone:
        def begin(self, call, prefill):
            """Nothing."""

    with pytest.raises(OptionError, match=r"class Alone is no subclass of mmdecode\.Drafter"):
        mm.Decoder(Alone())
