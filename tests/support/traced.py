"""Decoders that keep the rounds of all their calls."""

import dataclasses
import functools

from mmdecode.decoder import Decoder


class Traced(Decoder):
    """Asks for a trace in every call; ``trace`` holds the rows of all."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.trace = []

    @functools.wraps(Decoder.__call__)  # generate asks which arguments it takes
    def __call__(self, *args, **options):
        if options.get("mm_trace") is None:
            options["mm_trace"] = self.trace
        return super().__call__(*args, **options)


def traced(decoder):
    """The same decoder with a trace; its counters are shared."""
    fields = dataclasses.fields(decoder)
    return Traced(**{one.name: getattr(decoder, one.name) for one in fields if one.init})
