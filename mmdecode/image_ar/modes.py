"""Named modes of decoding in raster order: combinations of a drafter and an acceptance rule.

* ``ar``: token by token, without a drafter.
* ``exact``: a Jacobi window with the coupled rule, which gives the image of ``ar`` with that seed.
* ``fast``: a Jacobi window with speculative sampling (rejection); the images differ from those of
  ``ar`` with the same seed, but have the same distribution.
* ``relaxed``: a Jacobi window with LANTERN++, or with Cool-SD if the model has no codebook. Lossy.
* ``zipar``, or ``zipar:window=8``: several rows of codes in parallel, without drafter and rule; see
  `mmdecode.image_ar.rows`. Lossy.
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
"""Jacobi window of the modes, in tokens; images with fewer tokens have a smaller window."""

ROWS = "zipar"
"""The mode that decodes rows in parallel."""
_LEAD = 8  # codes; the default window of `ROWS`


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A preset of drafter and rule.

    Attributes:
        drafts: Whether tokens are drafted by a Jacobi window.
        accept: Name of the acceptance rule, with its options.
        without_codebook: The rule for models without a codebook; ``None``: ``accept``.
    """

    drafts: bool = True
    accept: str
    without_codebook: str | None = None

    def rule(self, codebook: bool) -> str:
        """Returns the rule for a model with or without a codebook."""
        return self.accept if codebook else self.without_codebook or self.accept


MODES = {
    "ar": Mode(drafts=False, accept="auto"),
    "exact": Mode(accept="coupled"),
    "fast": Mode(accept="rejection"),
    "relaxed": Mode(accept="lantern:lambda_=5,k=10", without_codebook="cool_sd:delta=2,nu=0"),
}


def check_mode(mode: str | None, draft: Any, accept: Any) -> None:
    """Checks that a mode can be combined with a drafter and a rule.

    Raises:
        UnknownNameError: There is no such mode.
        OptionError: The mode already sets the drafter or the rule.
    """
    if mode is None:
        return
    if lead_of(mode) is not None:
        if draft is not None or accept != "auto":
            raise OptionError(
                f"mode {mode!r} uses no drafter and no rule; leave out draft and rule, or the mode"
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
    """Returns the ``window`` of mode ``zipar``, in codes; ``None`` for any other mode.

    Raises:
        OptionError: ``window`` is no positive integer, or there is another option.
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
    """Builds a decoder from a mode, or from a drafter and a rule.

    Args:
        mode: A name in `MODES`; ``None``: use ``draft`` and ``accept``.
        draft: Drafter, or its name with options; it replaces the mode's Jacobi window.
        accept: The acceptance rule; used without a mode.
        adapter: Adapter of the model.
        compile: See `Decoder`.
        **at_hand: Objects that a drafter's constructor may take, see `mmdecode.registry.create`.

    Raises:
        UnknownNameError: A name is not registered.
        OptionError: Mode, drafter and rule cannot be combined.
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
    """Returns ``exact`` if images have the model's distribution, ``heuristic`` if they do not."""
    if isinstance(decoder.accept, str):  # auto and fastest choose exact rules
        return "exact"
    return "heuristic" if decoder.accept.guarantee == "lossy" else "exact"
