"""What is given to a decoder as its parts."""

import pytest

import mmdecode as mm
from mmdecode.draft.lookup import PromptLookup
from mmdecode.errors import OptionError


@pytest.mark.parametrize(
    ("part", "given", "message"),
    [
        ("draft", 5, "draft=5 is no draft (no kinds); give a name as 'mmdecode methods draft'"),
        ("draft", 0, "draft=0 is no draft"),
        ("draft", ["lookup"], "draft=['lookup'] is no draft"),
        ("draft", PromptLookup, "it is a class; make one"),
        ("guide", 5, "guide=5 is no guide"),
        ("guide", PromptLookup(), "is no guide (no branches)"),
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
