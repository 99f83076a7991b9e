from bigram_draft import Bigram

from mmdecode.decoder import Decoder
from mmdecode.testing import check_draft
from mmdecode.testing.checks import run_rows
from mmdecode.testing.table import Table


def test_it_changes_speed_and_nothing_else():
    check_draft(lambda: Bigram(length=3))


def test_a_prompt_may_hold_ids_that_are_never_generated():
    model, prompts = Table(5), [[7, 1, 7], [2, 9, 2]]
    assert run_rows(Decoder(Bigram()), model, prompts) == run_rows(Decoder(), model, prompts)


def test_what_a_token_was_last_followed_by_is_drafted():
    model = Table(3, sharpness=0.0, bias={2: 1.0})  # always 2
    decoder = Decoder(Bigram())
    assert run_rows(decoder, model, [[2, 1, 2, 2]], max_new_tokens=11) == [[2] * 11]
    assert decoder.stats.rounds == 2  # of five tokens each, after the first
