"""What a decoder drafted in each round, beside what was written before it."""


def rounds_of(decoder, call):
    """By row, ``(tokens written so far, drafted tokens)`` of every round with a draft."""
    decoder.trace = []
    call()
    rows = []
    for trace in decoder.trace:
        written, rounds = [], []
        for step in trace:
            if step.drafted:
                rounds.append((list(written), list(step.drafted)))
            written += [*step.accepted, step.decided][: step.kept]
        rows.append(rounds)
    return rows
