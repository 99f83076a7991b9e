"""What a decoder drafted in each round, next to what was written before it; and its sessions."""

from tests.support.traced import traced


def rounds_of(decoder, call):
    """By row of ``call(decoder)``: ``(tokens so far, drafted tokens)`` of drafted rounds."""
    decoder = traced(decoder)
    call(decoder)
    rows = []
    for trace in decoder.trace:
        written, rounds = [], []
        for step in trace:
            if step.drafted:
                rounds.append((list(written), list(step.drafted)))
            written += [*step.accepted, step.decided][: step.kept]
        rows.append(rounds)
    return rows


def sessions_of(drafter):
    """A list to which every session is appended that ``drafter`` opens from now on."""
    sessions, begin = [], drafter.begin

    def noted(*given):
        sessions.append(begin(*given))
        return sessions[-1]

    drafter.begin = noted
    return sessions
