"""Results and errors of calls with inputs that fail."""

from types import SimpleNamespace

import pytest

from mmdecode import errors
from mmdecode.errors import InputError, MissingExtraError, MMDecodeError, OptionError
from mmdecode.runs.items import collected, error_of


def outcome(index, error=None, kind="InputError"):
    return SimpleNamespace(index=index, error=error, kind=error and kind)


def test_many_come_in_order_and_one_alone():
    found = collected(iter([outcome(1), outcome(0, "bad")]), single=False)
    assert [(one.index, one.error) for one in found] == [(0, "bad"), (1, None)]
    assert collected([outcome(0)], single=True).index == 0
    with pytest.raises(InputError, match=r"^bad$"):
        collected([outcome(0, "bad")], single=True)
    with pytest.raises(InputError, match=r"^bad$"):
        collected([outcome(1), outcome(0, "bad")], single=False, on_error="raise")
    assert collected([outcome(0, "bad")], single=True, on_error="return").error == "bad"


def test_a_wrong_option_is_refused_before_anything_is_computed():
    def never():
        raise AssertionError
        yield

    with pytest.raises(OptionError, match="on_error='stop'; expected 'raise' or 'return'"):
        collected(never(), single=False, on_error="stop")


def test_errors_come_back_as_they_were():
    """Every class of ours and every built-in one, from its name and its text."""
    for name in errors.__all__:
        known = getattr(errors, name)
        if not isinstance(known, type) or known is MissingExtraError:
            continue
        again = error_of(name, "what is wrong")
        assert type(again) is known and str(again) == "what is wrong"
    missing = MissingExtraError("reading needs x", extra="asr")
    again = error_of("MissingExtraError", str(missing))
    assert type(again) is MissingExtraError and str(again) == str(missing) and again.extra == "asr"
    for kind in ("MemoryError", "OutOfMemoryError"):
        assert type(error_of(kind, "full")) is MemoryError
    for unknown in (
        "UnicodeDecodeError",
        "InputError.mro",
        "print",
        "SystemExit",
    ):
        again = error_of(unknown, "full")
        assert type(again) is MMDecodeError and str(again) == f"{unknown}: full"
    assert str(error_of(None, "full")) == "full"
