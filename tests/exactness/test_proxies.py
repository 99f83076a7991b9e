"""Parts behind proxies that have only the names their bases declare decode the same ids."""

import pytest

import mmdecode as mm
from mmdecode.decoder import Decoder
from mmdecode.errors import IncompatibleError
from mmdecode.testing.checks import PROMPTS, SEED, run_rows
from mmdecode.testing.table import TableAdapter
from tests.exactness.test_matrix import MODEL, TRIPLES, make, mode
from tests.support import proxies

EVERY_PAIR = [triple for triple in TRIPLES if not triple.marks]


def found(draft, rule, guide, do_sample, wrap):
    """Ids, or the message if the three are refused."""
    parts = make("draft", draft), make("guide", guide), make("accept", rule)
    adapter = TableAdapter(MODEL)
    if wrap:
        drafter, guided, accepting = parts
        parts = proxies.drafter(drafter), proxies.guide(guided), proxies.rule(accepting)
        adapter = proxies.adapter(adapter)
    try:
        decoder = Decoder(*parts, seed=SEED)
        return run_rows(decoder, MODEL, PROMPTS, inputs={"mm_adapter": adapter}, **mode(do_sample))
    except IncompatibleError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:.*is inert in greedy generation:UserWarning")
@pytest.mark.one_in(6)
@pytest.mark.parametrize(("draft", "rule", "guide"), EVERY_PAIR)
def test_parts_that_answer_to_declared_names_alone_give_the_same_ids(draft, rule, guide):
    for do_sample in (False, True):
        expected = found(draft, rule, guide, do_sample, wrap=False)
        assert found(draft, rule, guide, do_sample, wrap=True) == expected


def test_a_name_that_a_base_does_not_declare_is_not_answered():
    part = proxies.drafter(make("draft", "lookup"))
    assert part.kinds and isinstance(part, mm.Drafter)
    with pytest.raises(proxies.Undeclared, match=r"PromptLookup\.under, which Drafter does not"):
        hasattr(part, "under")
    with pytest.raises(proxies.Undeclared, match="was set"):
        part.looks = True
