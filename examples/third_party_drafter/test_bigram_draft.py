from bigram_draft import Bigram

from mmdecode.testing import check_draft


def test_it_changes_speed_and_nothing_else():
    check_draft(lambda: Bigram(length=3))
