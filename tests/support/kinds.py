"""Options of a training of drafters that hold for any kind."""

from mmdecode.train.drafters.recipes import OWN


def having(kind, **options):
    """Those of the options that a kind has."""
    return {name: value for name, value in options.items() if kind in OWN.get(name, (kind,))}
