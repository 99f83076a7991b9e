"""Named ways to draw in raster order: a draft and a rule that belong together.

* ``ar``: token by token, without a draft.
* ``exact``: a Jacobi window under the coupled rule: the picture that ``ar`` draws with that seed.
* ``fast``: a Jacobi window under the rejection rule: another picture of the same distribution.
* ``relaxed``: a Jacobi window under LANTERN++, or under Cool-SD where the model shows no codebook:
  another picture, of another distribution. Heuristic.
* ``zipar``, or ``zipar:window=8``: several rows of codes at once, see `mmdecode.image_ar.rows`; a
  loop of its own, without draft and rule. Heuristic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.jacobi import Jacobi
from mmdecode.errors import OptionError, UnknownNameError, refuse_unknown

if TYPE_CHECKING:
    from mmdecode.adapters.images.base import ImageAdapter
    from mmdecode.engine.contracts import AcceptanceRule, Drafter

WINDOW = 32
"""Default window of modes, unless the image is smaller."""

ROWS = "zipar"
"""The mode that draws rows side by side."""
_LEAD = 8  # codes, unless somebody says otherwise


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A preset.

    Attributes:
        drafts: Whether a window drafts.
        accept: The rule.
        without_codebook: The rule of models that show none, where it is another.
    """

    drafts: bool = True
    accept: str
    without_codebook: str | None = None

    def rule(self, codebook: bool) -> str:
        """The rule of a model that shows a codebook, or does not."""
        return self.accept if codebook else self.without_codebook or self.accept


MODES = {
    "ar": Mode(drafts=False, accept="auto"),
    "exact": Mode(accept="coupled"),
    "fast": Mode(accept="rejection"),
    "relaxed": Mode(accept="lantern:lambda_=5,k=10", without_codebook="cool_sd:delta=2,nu=0"),
}


def check_mode(mode: str | None, draft: Any, accept: Any) -> None:
    """Whether a mode goes with what else was asked for.

    Raises:
        UnknownNameError: There is no such mode.
        OptionError: The mode sets what was also given.
    """
    if mode is None:
        return
    if lead_of(mode) is not None:
        if draft is not None or accept != "auto":
            raise OptionError(
                f"mode {mode!r} is a loop of its own; leave out draft and rule, or the mode"
            )
        return
    if mode not in MODES:
        raise UnknownNameError.of("mode", mode, [*MODES, ROWS])
    if draft is not None and not MODES[mode].drafts:
        raise OptionError(f"mode {mode!r} is without a draft; leave out the draft or the mode")
    if accept != "auto":
        raise OptionError(
            f"mode {mode!r} has a rule of its own, {MODES[mode].accept!r}; leave out the rule or "
            "the mode"
        )


def lead_of(mode: str | None) -> int | None:
    """Codes that a row has to be ahead of the next one; ``None``: rows are not side by side.

    Raises:
        OptionError: ``window`` is no number of codes, or an option is another one.
    """
    if mode is None or mode.partition(":")[0] != ROWS:
        return None
    [(_, options)] = registry.parse("draft", mode)
    refuse_unknown(options, ["window"])
    lead = options.get("window", _LEAD)
    if type(lead) is not int or lead < 1:
        raise OptionError(f"mode {mode!r}: window={lead!r}; expected 1 code or more")
    return lead


def decoder_of(
    mode: str | None,
    draft: Drafter | str | None,
    accept: AcceptanceRule | str,
    *,
    adapter: ImageAdapter,
    compile: bool = False,
    **at_hand: Any,
) -> Decoder:
    """A decoder from a mode, or from a draft and a rule.

    Args:
        mode: One of `MODES`; ``None``: none.
        draft: In the place of the mode's window.
        accept: Without a mode.
        adapter: Adapter of the model.
        compile: See `Decoder`.
        **at_hand: For drafts that are named, see `mmdecode.registry.create`.

    Raises:
        UnknownNameError: A name is not registered.
        OptionError: Mode, draft and rule do not go together.
    """
    check_mode(mode, draft, accept)
    if isinstance(draft, str):
        draft = registry.create("draft", draft, **at_hand)
    if mode is not None:
        accept = MODES[mode].rule(adapter.codebook() is not None)
        if draft is None and MODES[mode].drafts:
            draft = Jacobi(window=min(WINDOW, adapter.layout.length))
    return Decoder(draft=draft, accept=accept, compile=compile)


def guarantee_of(decoder: Decoder) -> str:
    """``exact`` or ``heuristic``: whether images follow the distribution of the model."""
    if isinstance(decoder.accept, str):  # auto or fastest: exact rules both
        return "exact"
    return "heuristic" if decoder.accept.guarantee == "lossy" else "exact"
