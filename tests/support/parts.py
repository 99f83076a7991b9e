"""Feeds incremental encoders in parts."""


def fed(made, samples, sizes, looks=frozenset()):
    """Final states of each part of these sizes, and the rest; ``looks``: where it also looks."""
    found, at = [], 0
    for index, size in enumerate([*sizes, len(samples)]):
        found.append(made.feed(samples[at : at + size]))
        at += size
        if index in looks:
            made.provisional()
    return found, made.provisional()
