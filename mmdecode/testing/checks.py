"""Checks that a drafter, an acceptance rule, a guide or an adapter has the required properties.

`check_draft`, `check_accept`, `check_guide` and `check_adapter` are for classes that you write, and
raise AssertionError with the property that does not hold and the difference. They are composed of
`assert_lossless` (same tokens as a plain loop) and `assert_distribution` (counts of whole sequences
against exact enumeration). These two are tested themselves: implementations with known mistakes,
the mutants under ``tests/exactness``, must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmdecode.decoder import Decoder
from mmdecode.engine.adapter import MAIN
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import Call
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.errors import IncompatibleError
from mmdecode.testing import drafts
from mmdecode.testing.table import (
    Table,
    coupled,
    decode,
    greedy,
    left_pad,
    new_tokens,
    plain_loop,
)
from mmdecode.testing.watching import (
    checking,
    made,
    watched_draft,
    watched_guide,
    watched_rule,
)

RowDistribution = Callable[[list[int], list[int]], Tensor]
"""Function from a row's prompt and its generated tokens to next-token scores ``(V,)``."""

PROMPTS = ([1, 2, 3], [0, 0, 2, 1, 4, 2], [3], [2, 2])
SEED = 5
LEVEL = 1e-4
"""A distribution is rejected below this p-value; seeds are fixed, so a test is not flaky."""


def distribution_of(model: Table) -> RowDistribution:
    """Returns the unguided next-token distribution of a table model, as a function."""
    return lambda prompt, new: model.target_logits([*prompt, *new])


def run_rows(
    decoder: Decoder, model: Any, prompts: Sequence[Sequence[int]], **options: Any
) -> list[list[int]]:
    """Decodes prompts in one padded batch, with options of `decode`; returns each row's tokens."""
    ids, mask = left_pad(prompts)
    options.setdefault("request", [str(list(p)) for p in prompts])
    sequences = decode(model, ids, decoder, mask=mask, **options)
    return new_tokens(sequences, ids.shape[1], model.config.vocab_size)


def assert_lossless(
    decoder: Decoder,
    model: Any,
    distribution: RowDistribution,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    do_sample: bool,
    eos: list[int] | None = None,
    processors: Callable[[], Iterable[Any]] = tuple,
    criteria: Callable[[], Iterable[Any]] = tuple,
    max_new_tokens: int = 12,
) -> list[list[int]]:
    """Asserts that each row equals what `plain_loop` generates for it alone; returns the rows.

    Args:
        decoder: Decoder under test, with a seed if it samples.
        model: A table model.
        distribution: Distribution that the rows should follow.
        prompts: Prompts, one per row.
        do_sample: Whether to sample, by the rule ``coupled``.
        eos: End-of-sequence ids.
        processors: Function that makes new logits processors; called for each loop.
        criteria: Function that makes new stopping criteria.
        max_new_tokens: Most new tokens per row.
    """
    found = run_rows(
        decoder,
        model,
        prompts,
        do_sample=do_sample,
        eos=eos,
        processors=processors(),
        criteria=criteria(),
        max_new_tokens=max_new_tokens,
    )
    width = max(map(len, prompts))
    for row, prompt in enumerate(prompts):
        expected = plain_loop(
            lambda prefix, p=list(prompt): distribution(p, prefix[len(p) :]),  # type: ignore[misc]
            prompt,
            coupled(int(decoder.seed or 0), str(list(prompt))) if do_sample else greedy,
            padding=[0] * (width - len(prompt)),
            processors=processors(),
            criteria=criteria(),
            eos=eos or (),
            max_new_tokens=max_new_tokens,
        )
        assert found[row] == expected, (
            f"row {row} (prompt {list(prompt)}, do_sample={do_sample}): generated {found[row]}; "
            f"the plain loop generates {expected}"
        )
    return found


def exact_joint(
    distribution: RowDistribution,
    prompt: Sequence[int],
    length: int,
    processors: Iterable[Any] = (),
) -> Tensor:
    """Enumerates the probabilities of all sequences of ``length`` tokens, ``(V, V, ...)``."""
    processors = list(processors)

    def below(new: list[int]) -> Tensor:
        scores = distribution(list(prompt), new)[None]
        for processor in processors:
            scores = processor(torch.tensor([[*prompt, *new]]), scores)
        p = scores[0].double().softmax(-1)
        if len(new) == length - 1:
            return p
        return torch.stack([p[t] * below([*new, t]) for t in range(len(p))])

    return below([])


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Returns the p-value of a G-test; pools expected counts below 5; 0 for an impossible count."""
    expected = probabilities.flatten() * counts.sum()
    counts = counts.flatten().double()
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    small = expected < 5
    if bool(small.any()):
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
    real = expected > 0
    expected, counts = expected[real], counts[real]
    statistic = 2 * torch.xlogy(counts, counts / expected).sum().clamp_min(0)
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom.clamp_min(0.5), statistic / 2))


def assert_distribution(
    make: Callable[[], Decoder],
    model: Any,
    distribution: RowDistribution,
    prompt: Sequence[int] = (1, 0, 2),
    *,
    length: int = 4,
    samples: int = 40_000,
    rows: int = 10_000,
    processors: Callable[[], Iterable[Any]] = tuple,
    joint: Tensor | None = None,
) -> Tensor:
    """Asserts that sampled sequences, and all their prefixes, follow the exact joint distribution.

    Args:
        make: Function that makes a new decoder; its seed is set here.
        model: A table model with a vocabulary of 5 or less.
        distribution: Next-token distribution that the rows should follow.
        prompt: Prompt of all rows, which differ in their sampling noise.
        length: Number of tokens that are generated and counted.
        samples: Number of sequences.
        rows: Batch size.
        processors: Function that makes new logits processors.
        joint: Expected probabilities of sequences, ``(V, V, ...)``; ``None``: products of the
            probabilities of ``distribution``.

    Returns:
        The sampled sequences, ``(samples, length)``.
    """
    vocab = model.config.vocab_size
    parts = []
    for index in range(samples // rows):
        decoder = replace(make(), seed=1000 + index)
        sequences = decode(
            model,
            torch.tensor([list(prompt)]).repeat(rows, 1),
            decoder,
            do_sample=True,
            processors=processors(),
            max_new_tokens=length,
            request=range(rows),
        )
        parts.append(sequences[:, len(prompt) :])
    sampled = torch.cat(parts)
    if joint is None:
        joint = exact_joint(distribution, prompt, length, processors())
    for count in range(1, length + 1):  # per prefix: the joint hides errors at late positions
        cell = (sampled[:, :count] * vocab ** torch.arange(count).flip(0)).sum(1)
        counts = torch.bincount(cell, minlength=vocab**count)
        exact = joint.flatten(count).sum(-1) if count < length else joint
        p = p_value(counts, exact)
        assert p > LEVEL, (
            f"the first {count} of {length} tokens have another distribution: p = {p:.2g}"
        )
    return sampled


def bigram(vocab: int, seed: int = 0, sharpness: float = 1.5) -> Tensor:
    """Makes random logits of a bigram model, next token by previous token, ``(V, V)``."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(vocab, vocab, generator=generator) * 2 - 1) * sharpness


def _batches(prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yields the batch, the batch in another order, and each row alone."""
    yield list(prompts)
    yield list(prompts)[::-1]
    yield from ([p] for p in prompts)


Run = Callable[..., Any]
"""Function of an object under test, a model, prompts and options; decodes, returns results."""


def _check_shared(
    make: Callable[[], Any], models: Sequence[Any], run: Run, agree: Callable[[Any, Any, str], None]
) -> None:
    """Asserts that an object shared by several calls gives the same results as new objects.

    Args:
        make: Function that makes the object under test.
        models: Two models.
        run: Function that decodes with the object.
        agree: Function that compares the result of ``run`` with the expected result.
    """
    first, other = models
    alone = run(make(), first, PROMPTS)
    with checking("one object can be used for several calls"):
        shared = make()
        run(shared, first, PROMPTS[:1], max_new_tokens=1)
        agree(run(shared, first, PROMPTS), alone, "after a call of one token")
        agree(run(shared, other, PROMPTS[:2]), run(make(), other, PROMPTS[:2]), "for another model")
        agree(run(shared, first, PROMPTS), alone, "after a call for another model")
    with checking("two threads can use one object at once"), ThreadPoolExecutor(1) as thread:
        shared, asked, found = make(), [], []

        def interrupt(ids: Tensor, scores: Any) -> Tensor:
            asked.append(ids)
            if len(asked) == 2:  # the other call begins and ends amid a drafted round of this one
                found.append(thread.submit(run, shared, other, PROMPTS[:2]).result())
            return torch.zeros(len(ids), dtype=torch.bool)

        agree(run(shared, first, PROMPTS, criteria=[interrupt]), alone, "interrupted by a call")
        agree(found[0], run(make(), other, PROMPTS[:2]), "during another thread's call")


def _check_shared_draft(make: Callable[[], Any], models: Sequence[Any], learns: bool) -> None:
    def run(draft: Any, model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
        decoder = Decoder(draft, seed=SEED)
        rows = run_rows(decoder, model, prompts, **options)
        stats = decoder.stats
        return rows, None if learns else (stats.drafted, stats.accepted)

    def agree(found: Any, expected: Any, where: str) -> None:
        (rows, counts), (others, due) = found, expected
        assert rows == others, f"{where} it generates {rows}, but a new object {others}"
        assert counts == due, (
            f"{where} it drafts and accepts {counts} tokens, but a new object {due}; keep the "
            "state of a call in the DraftSession, or pass learns=True if it learns from calls"
        )

    _check_shared(make, models, run, agree)


def _models(model: Any) -> tuple[Any, Any]:
    """Returns two models for a check: the given model and a copy, or two different tables."""
    if model is not None:
        return model, deepcopy(model)
    bias = {0: 1.0, 4: -0.5}
    return Table(5, seed=3, bias=bias), Table(5, seed=4, bias=bias)


def check_draft(make: Callable[[], Any], model: Any = None, *, learns: bool = False) -> None:
    """Checks that a drafter changes speed and nothing else.

    Tokens are compared with those of a plain loop, alone and in batches, greedy and sampled. If the
    drafter states probabilities, distributions are compared too, under rejection sampling. Then one
    object is used for several calls, for two models in turn, and by two threads at once.

    Args:
        make: Function that makes a new drafter, for a vocabulary of 5 tokens.
        model: Table model to draft for; ``None``: a random one with 5 tokens.
        learns: Whether its drafts may depend on earlier calls.

    Raises:
        AssertionError: A property does not hold; the message names it.
        OptionError: ``make`` makes no `Drafter`.
    """
    kinds = made("draft", make).kinds
    model, other = _models(model)
    with checking("a drafter changes no token"):
        for do_sample in (False, True):
            for prompts in _batches(PROMPTS):
                assert_lossless(
                    Decoder(watched_draft(make()), seed=SEED),
                    model,
                    distribution_of(model),
                    prompts,
                    do_sample=do_sample,
                    eos=[model.vocab - 1],
                )
    _check_shared_draft(make, (model, other), learns)
    names = {
        "iid": "rejection",
        "without_replacement": "rejection",
        "deterministic": "sample_match",
    }
    for kind, rule in names.items():
        if kind in kinds:
            with checking(f"drafts of kind {kind} are lossless under accept={rule!r}"):
                assert_distribution(
                    lambda rule=rule: Decoder(make(), accept=rule),  # type: ignore[misc]
                    model,
                    distribution_of(model),
                    samples=10_000,
                    length=3,
                )
    if not {"iid", "without_replacement"} & set(kinds):
        _refused(lambda: Decoder(make(), accept="rejection"), type(make()).__name__, "Rejection")


def check_accept(make: Callable[[], Any]) -> None:
    """Checks that an acceptance rule keeps the target distribution, for all kinds it accepts.

    Args:
        make: Function that makes a new rule; a lossy rule is checked with empty drafts only.

    Raises:
        AssertionError: A property does not hold; the message names it.
        OptionError: ``make`` makes no `AcceptanceRule`.
    """
    rule = made("accept", make)
    model = Table(4, seed=11, sharpness=1.5)
    proposers = [drafts.TestDrafter()]
    if rule.guarantee == "exact":
        if "deterministic" in rule.kinds:
            proposers += [drafts.Random(), drafts.FullTree(1), drafts.RandomTrees(4)]
        proposers += [
            drafts.Bigram(bigram(4), kinds=(kind,), ragged=ragged)
            for kind in rule.kinds
            if kind in ("iid", "coupled", "deterministic")
            for ragged in (False, True)
        ]
        proposers += [
            drafts.Siblings(bigram(4), kinds=(kind,), ragged=ragged)
            for kind in rule.kinds
            if kind in ("iid", "without_replacement")
            for ragged in (False, True)
        ]
    proposers = [p for p in proposers if set(p.kinds) & set(rule.kinds)]
    for draft in proposers:
        case = f"in mode {{}} with {type(draft).__name__} proposing {', '.join(draft.kinds)} tokens"
        if "greedy" in rule.modes:
            with checking(case.format("greedy")):
                assert_lossless(
                    Decoder(draft, accept=watched_rule(make())),
                    model,
                    distribution_of(model),
                    do_sample=False,
                    eos=[3],
                )
        if "sample" in rule.modes:
            with checking(case.format("sample")):
                assert_distribution(
                    lambda draft=draft: Decoder(draft, accept=watched_rule(make())),  # type: ignore[misc]
                    model,
                    distribution_of(model),
                    samples=10_000,
                    length=3,
                )
    for mode in {"greedy", "sample"} - set(rule.modes):
        draft = drafts.Bigram(bigram(4), kinds=tuple(rule.kinds[:1]))
        _refused(
            lambda mode=mode, draft=draft: run_rows(  # type: ignore[misc]
                Decoder(draft, accept=make()), model, PROMPTS, do_sample=mode == "sample"
            ),
            type(rule).__name__,
            "do_sample",
        )


def check_guide(
    make: Callable[[], Any], neutral: Callable[[], Any] | None = None, model: Any = None
) -> None:
    """Checks that a guide's distribution for a token depends on the tokens before it alone.

    Tokens and distributions are compared across drafts, batches and calls, which finds guides that
    keep state from one verification round or call to the next. Then one object is used for two
    models in turn and by two threads at once.

    Args:
        make: Function that makes a new guide, for a vocabulary of 5 tokens.
        neutral: Function that makes the guide with the setting that changes nothing.
        model: Table model; ``None``: a random one with 5 tokens.

    Raises:
        AssertionError: The distribution depends on drafts, other rows or earlier calls, or the
            neutral setting changes it.
        IncompatibleError: The guide declares that it looks back or ahead.
        OptionError: ``make`` makes no `Guide`.
    """
    made("guide", make)
    model, other = _models(model)
    with checking("a guide's distribution depends on the tokens before alone"):
        for do_sample in (False, True):
            options: dict[str, Any] = {"do_sample": do_sample, "eos": [model.vocab - 1]}
            undrafted = Decoder(None, watched_guide(make()), seed=SEED)
            plain = _distributions(undrafted, model, PROMPTS, **options)
            for draft in (
                drafts.Random(),
                drafts.RandomTrees(),
                drafts.FullTree(),
                drafts.Known([tokens for tokens, _ in plain], wrong_at=[3, 7]),
            ):
                drafted = Decoder(draft, watched_guide(make()), seed=SEED)
                found = _distributions(drafted, model, PROMPTS, **options)
                _agree(found, plain, f"with draft {type(draft).__name__}")
            for prompts in _batches(PROMPTS):
                expected = [plain[PROMPTS.index(prompt)] for prompt in prompts]
                found = _distributions(undrafted, model, prompts, **options)
                where = f"with the prompts {prompts} alone (is padding read?)"
                _agree(found, expected, where, "in the padded batch")
    if neutral is not None:
        with checking("a guide at its neutral setting changes nothing"):
            assert neutral().neutral, "its attribute neutral is False"
            for do_sample in (False, True):
                options = {"do_sample": do_sample, "eos": [model.vocab - 1]}
                found = _distributions(
                    Decoder(None, neutral(), seed=SEED), model, PROMPTS, **options
                )
                without = _distributions(Decoder(None, None, seed=SEED), model, PROMPTS, **options)
                _agree(found, without, "in its neutral setting", "without it", tolerance=0.0)

    def run(guide: Any, *given: Any, **options: Any) -> list[_Row]:
        return _distributions(Decoder(None, guide, seed=SEED), *given, **options)

    _check_shared(
        make,
        (model, other),
        run,
        lambda found, expected, where: _agree(found, expected, where, "by a new object"),
    )


_Row = tuple[list[int], Tensor]
"""Tokens of a row, and the processed scores that each was chosen from, ``(n, V)``."""


def _distributions(
    decoder: Decoder, model: Any, prompts: Sequence[Sequence[int]], **options: Any
) -> list[_Row]:
    ids, mask = left_pad(prompts)
    found = decode(
        model,
        ids,
        decoder,
        mask=mask,
        request=[str(list(p)) for p in prompts],
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    rows = new_tokens(found.sequences, ids.shape[1], model.config.vocab_size)
    distributions = torch.stack(found.scores, 1)
    return [
        (row, distribution[: len(row)])
        for row, distribution in zip(rows, distributions, strict=True)
    ]


def _agree(
    found: Sequence[_Row],
    expected: Sequence[_Row],
    where: str,
    otherwise: str = "undrafted",
    tolerance: float = 1e-4,
) -> None:
    """Asserts equal tokens and distributions; the latter may differ where tokens still agree."""
    tokens, others = [row for row, _ in found], [row for row, _ in expected]
    assert tokens == others, f"{where} the guide gives {tokens}, {otherwise} {others}"
    for row, ((_, distribution), (_, other)) in enumerate(zip(found, expected, strict=True)):
        same = torch.isclose(distribution, other, rtol=0, atol=tolerance).all(-1)
        position = int(same.long().argmin())
        assert bool(same.all()), (
            f"{where} the distribution at token {position} of row {row} is "
            f"{distribution[position].tolist()}, {otherwise} {other[position].tolist()}"
        )


def check_adapter(
    make: Callable[[Any], Any],
    model: Any,
    ids: Tensor,
    mask: Tensor,
    inputs: Mapping[str, Any] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Checks that an adapter scores draft trees like a plain pass over each node's own prefix.

    Args:
        make: Function that makes the adapter of a model.
        model: A small model in float32 or float64.
        ids: Prompts of different lengths, padded on the left, ``(B, P)``.
        mask: True where a token is not padding, ``(B, P)``.
        inputs: Further model inputs with the batch as first axis, such as encoder outputs.
        tolerance: Largest allowed difference of logits.

    Raises:
        AssertionError: Logits differ: masks, positions, cache slots or row order are wrong.
    """
    adapter = made("adapter", lambda: make(model) if callable(make) else make)
    tree = Tree((-1, -1, 0, 0, 2, 1))
    tokens = torch.arange(len(ids) * len(tree)).reshape(len(ids), -1) * 7 % adapter.vocab
    tokens[0, -1] = -1
    proposal = Proposal(tokens=tokens, kind="deterministic", tree=tree)
    second = Proposal(tokens=tokens.flip(1).clamp_min(1), kind="deterministic", tree=tree)
    accepted = torch.tensor([[0, 2, 4], [1, 5, -1], [0, 3, -1], [-1, -1, -1]])
    path = accepted[torch.arange(len(ids)) % 4]
    root = torch.ones(len(ids), 1, dtype=torch.long)
    call = Call.of(ids, mask, model_kwargs=inputs or {})
    branches = ModelRunner(adapter, [MAIN])
    with torch.no_grad():
        first = branches.prefill(call, {})["main"].logits[:, 0]
        _close(first, [_alone(adapter, call, b, []) for b in range(len(ids))], "prompt", tolerance)
        kept: list[list[int]] = [[] for _ in range(len(ids))]
        for step, drafted in enumerate((proposal, second)):
            call.rows.ids.scatter_(1, call.end()[:, None], root)
            call.rows.length = call.rows.length + 1
            kept = [[*k, 1] for k in kept]
            call.rows.cur_len = int(call.rows.length.max())
            logits = branches.score(call, drafted, {})["main"].logits
            for node in range(-1, drafted.size):
                rows = [b for b in range(len(ids)) if node < 0 or drafted.tokens[b, node] >= 0]
                expected = [
                    _alone(adapter, call, b, [*kept[b], *_path_tokens(drafted, b, node)])
                    for b in rows
                ]
                _close(logits[rows, node + 1], expected, f"node {node} of round {step}", tolerance)
            count = (path >= 0).sum(1) + 1
            branches.commit(path, count, drafted.is_chain)
            for b in range(len(ids)):
                kept[b] += [int(drafted.tokens[b, u]) for u in path[b].tolist() if u >= 0]
            for b, row in enumerate(kept):
                call.rows.ids[b, call.prompt_length : call.prompt_length + len(row)] = torch.tensor(
                    row
                )
            call.rows.length = torch.tensor([len(row) for row in kept])


def _path_tokens(proposal: Proposal, row: int, node: int) -> list[int]:
    assert proposal.tree is not None
    tokens: list[int] = []
    while node >= 0:
        tokens.insert(0, int(proposal.tokens[row, node]))
        node = proposal.tree.parents[node]
    return tokens


def _alone(adapter: Any, call: Call, row: int, new: list[int]) -> Tensor:
    """Returns the logits after a row's prompt and the tokens ``new``, from one plain pass."""
    prompt = call.request.prompt_ids[row][call.request.prompt_mask[row]]
    ids = torch.cat([prompt, torch.tensor(new, dtype=torch.long)])[None]
    inputs = {k: _one(v, row) for k, v in call.request.model_kwargs.items()}
    alone = Call.of(ids, model_kwargs=inputs)
    return ModelRunner(adapter, [MAIN]).prefill(alone, {})["main"].logits[0, 0]


def _one(value: Any, row: int) -> Any:
    if isinstance(value, Tensor):
        return value[row : row + 1]
    if isinstance(value, Mapping):  # an output object of transformers
        return type(value)(**{k: _one(v, row) for k, v in value.items()})
    return value


def _close(found: Tensor, expected: list[Tensor], where: str, tolerance: float) -> None:
    worst = float((found - torch.stack(expected)).abs().amax())
    assert worst <= tolerance, f"logits at {where} differ by {worst:.3g} from a plain pass"


def _refused(call: Callable[[], Any], *sides: str) -> None:
    try:
        call()
    except IncompatibleError as error:
        missing = [side for side in sides if side not in str(error)]
        assert not missing, f"the refusal does not name {', '.join(missing)}: {error}"
    else:
        raise AssertionError(f"{' and '.join(sides)} were not refused")
