"""Speed of drafters on any model: passes, seconds, and whether the tokens equal undrafted output.

All ways of decoding get the same prompts in the same process, interleaved batch by batch. The
undrafted loop is measured twice: the difference between its two runs shows the timing error. A pass
is a forward pass of the target after the prefill; the first token, which the prefill yields, is not
counted. Each way is timed to the end of its answers and, in another call, to the first token; the
difference is decoding time. Intervals are paired bootstraps over batches, see
`mmdecode.evaluation.speed.stopwatch.Cost.over`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.special import entr

from mmdecode._compat import input_device
from mmdecode.api import generate
from mmdecode.decoder import Decoder
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Drafter, DraftSession, Guide
from mmdecode.engine.request import token_ids, up_to_end
from mmdecode.errors import OptionError
from mmdecode.evaluation.speed.stopwatch import Cost, interleaved, timed

Inputs = Mapping[str, Any]
"""Inputs of a model for a batch of prompts that are padded on the left."""
PLAIN, AGAIN = "undrafted", "undrafted, again"
PEERS: Mapping[str, Mapping[str, Any]] = {
    "generate": {},
    "generate, lookup": {"prompt_lookup_num_tokens": 4},
}
"""Options of transformers' own loop, without a draft and with prompt lookup."""
REASONS = {
    "Image features and image tokens do not match": "transformers' assisted generation shows the "
    "image again in each pass, which this model refuses",
    "only supported for batch_size": "transformers' assisted generation decodes one prompt at a "
    "time; it is timed with --batch-size 1",
    "is not supported with stateful models": "transformers' assisted generation needs a cache that "
    "can be cut, and this model's cannot",
}
"""Explanation of errors of transformers' assisted generation, by a part of the error message."""
_CLOCKED = 4  # batches on which a draft's own time is taken


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Decoding settings that all drafters share.

    Attributes:
        max_new_tokens: Largest number of tokens of an answer, at least 2.
        temperature: Sampling temperature; 0: greedy decoding.
        seed: Seed of sampling.
        repeats: Number of times that each call is timed; medians are reported.

    Raises:
        OptionError: A value is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2 or self.repeats < 1 or not 0 <= self.temperature < math.inf:
            raise OptionError(
                f"max_new_tokens={self.max_new_tokens}, repeats={self.repeats}, "
                f"temperature={self.temperature}; expected at least 2, 1 and 0"
            )

    def generation(self) -> dict[str, Any]:
        """Arguments of ``generate``."""
        sampled = self.temperature > 0
        warpers = {"temperature": self.temperature, "top_p": 1.0, "top_k": 0}
        given = warpers if sampled else dict.fromkeys(warpers)
        return {"do_sample": sampled, "num_beams": 1, **given}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measurements of one way of decoding.

    Attributes:
        way: Name of the way.
        identical: Share of the answers that equal the undrafted loop's token by token; ``None``:
            not expected, since transformers samples with other random numbers.
        tokens_per_pass: Tokens committed per row and pass, the bonus or correction token included;
            ``None``: passes were not counted.
        accepted_per_pass: Drafted tokens accepted per row and pass; ``None``: not counted.
        by_depth: Share of passes that accepted at least 1, 2, ... drafted tokens; ``None``: not
            counted.
        draft_share: Share of decoding time spent in the drafter; ``None``: not measured.
        first_token_ms: Mean time from the prompts to the first token, in milliseconds per batch.
        ms_per_token: Time after the first token over the number of later tokens of all rows.
        decode: Speedup over the undrafted loop per token after the first token, with the low and
            high end of its interval.
        end_to_end: Speedup per token with the prefill included, with its interval.
        tokens: Mean number of tokens of an answer.
        seconds: Time of whole calls, by repeat and batch.
    """

    way: str
    identical: float | None
    tokens_per_pass: float | None = None
    accepted_per_pass: float | None = None
    by_depth: list[float] | None = None
    draft_share: float | None = None
    first_token_ms: float
    ms_per_token: float
    decode: tuple[float, float, float]
    end_to_end: tuple[float, float, float]
    tokens: float
    seconds: list[list[float]]


def measure(
    model: Any,
    batches: Sequence[Inputs],
    drafts: Mapping[str, Drafter],
    setting: Setting,
    *,
    guide: Guide | None = None,
    peers: Mapping[str, Mapping[str, Any]] | None = None,
    compile: bool = False,
    done: Callable[[], object] = lambda: None,
) -> list[Speed]:
    """Times every drafter, the undrafted loop and transformers' own loop on the same prompts.

    Args:
        model: Model of transformers.
        batches: Batches of prompts.
        drafts: Drafters by name.
        setting: Decoding settings.
        guide: Guide of all ways; ``None``: no guide.
        peers: Ways of transformers to compare with, such as assisted generation: options of
            ``model.generate`` by name. They cannot be combined with a guide.
        compile: Whether to compile, as in `Decoder`; it does not apply to peers. ``draft_share`` is
            then not measured.
        done: Called after each timed call; `calls` tells their number.

    Returns:
        Measurements of the undrafted loop, of its second run, of the drafters and of the peers.

    Raises:
        OptionError: Both peers and a guide are given, or there is no batch.
    """
    if not batches:
        raise OptionError("no batch of prompts; give more requests, or a smaller batch size")
    if peers and guide is not None:
        raise OptionError("transformers' generate supports no guide; give either peers or a guide")
    decoders = {
        name: Decoder(draft, guide, seed=setting.seed, compile=compile)
        for name, draft in {PLAIN: None, AGAIN: None, **drafts}.items()
    }
    keyed = _keyed(batches, setting)
    runs = {
        name: partial(_decoded, partial(generate, model, decoder=decoder), keyed, setting)
        for name, decoder in decoders.items()
    }
    for name, options in (peers or {}).items():
        runs[name] = partial(_decoded, model.generate, batches, setting, **options)
    ways = {
        f"{name}/{length}": partial(run, length)
        for name, run in runs.items()
        for length in (1, setting.max_new_tokens)
    }
    device = input_device(model)
    interleaved(ways, 1, 1, device, done)  # what is made at first use
    for decoder in decoders.values():
        decoder.stats.reset()
    seconds, results = interleaved(ways, len(batches), setting.repeats, device, done)
    seen: dict[str, _Way] = {}
    for name, run in runs.items():
        whole, first = f"{name}/{setting.max_new_tokens}", f"{name}/1"
        kept = results[whole][: len(batches)]  # of the first repeat
        seen[name] = _Way(
            run=run,
            decoder=decoders.get(name),
            answers=[_answers(model, *pair) for pair in zip(batches, kept, strict=True)],
            whole=np.array(seconds[whole]),
            first=np.median(seconds[first], 0),
        )
    return [way.speed(name, seen[PLAIN], setting, device) for name, way in seen.items()]


def working(
    model: Any, inputs: Inputs, peers: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    """Tries ways of transformers on a few tokens.

    Returns:
        The ways that work, and the reason for each other way, by name.
    """
    found: dict[str, Mapping[str, Any]] = {}
    failed = {}
    for name, options in peers.items():
        try:
            model.generate(**inputs, **options, do_sample=False, max_new_tokens=4)
        except Exception as problem:  # whatever it is, it is not ours
            failed[name] = reason_of(problem)
        else:
            found[name] = options
    return found, failed


def reason_of(problem: Exception) -> str:
    """Explains in words why transformers' own ``generate`` raised an error."""
    text = f"{type(problem).__name__}: {problem}".partition("\n")[0][:200]
    known = (reason for part, reason in REASONS.items() if part in text)
    return next(known, f"transformers' generate fails on this model: {text}")


def calls(batches: int, drafts: int, peers: int, setting: Setting) -> int:
    """Number of timed calls that `measure` makes."""
    return 2 * (2 + drafts + peers) * (1 + batches * setting.repeats)


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Observations of one way of decoding.

    Attributes:
        run: Decodes a batch again, given the number of tokens and the batch's index.
        decoder: Its decoder; ``None``: transformers' own loop.
        answers: Token ids up to the end-of-sequence token, by batch and row.
        whole: Seconds of whole calls, by repeat and batch.
        first: Seconds to the first token, the median over repeats, by batch.
    """

    run: Callable[..., Any]
    decoder: Decoder | None
    answers: list[list[list[int]]]
    whole: np.ndarray
    first: np.ndarray

    def cost(self, decoding: bool) -> Cost:
        """Cost of whole answers or, with ``decoding``, of the part after the first token."""
        skipped = 1 if decoding else 0
        counts = [sum(len(row) - skipped for row in rows) for rows in self.answers]
        spent = np.median(self.whole, 0) - (self.first if decoding else 0)
        return Cost(np.maximum(spent, 1e-9), np.maximum(counts, 1))

    def speed(self, name: str, plain: _Way, setting: Setting, device: torch.device) -> Speed:
        """Computes the measurements."""
        rows = list(chain.from_iterable(self.answers))
        undrafted = chain.from_iterable(plain.answers)
        same = [mine == theirs for mine, theirs in zip(rows, undrafted, strict=True)]
        decoding = self.cost(decoding=True)
        counts: dict[str, Any] = {}
        if self.decoder is not None:
            stats = self.decoder.stats
            counts["tokens_per_pass"] = round(stats.acceptance_length, 3)
            counts["accepted_per_pass"] = round(stats.accepted / max(stats.rounds, 1), 3)
            counts["by_depth"] = [round(share, 3) for share in stats.by_depth]
            if stats.drafted and not self.decoder.compile:
                counts["draft_share"] = self.draft_share(self.decoder.draft, setting, device)
        return Speed(
            way=name,
            # transformers draws with other noise
            identical=None
            if self.decoder is None and setting.temperature
            else sum(same) / len(same),
            first_token_ms=round(1e3 * float(self.first.mean()), 2),
            ms_per_token=round(1e3 * float(decoding.amount.sum() / decoding.tokens.sum()), 3),
            decode=decoding.over(plain.cost(decoding=True)),
            end_to_end=self.cost(decoding=False).over(plain.cost(decoding=False)),
            tokens=round(sum(map(len, rows)) / len(rows), 1),
            seconds=[[round(one, 5) for one in repeat] for repeat in self.whole.tolist()],
            **counts,
        )

    def draft_share(self, draft: Drafter, setting: Setting, device: torch.device) -> float:
        """Share of the time after the first token that the drafter takes, on the first batches.

        It is measured in separate calls, since timing each draft step needs a device
        synchronisation.
        """
        items = range(min(_CLOCKED, self.whole.shape[1]))
        calls = [partial(self.run, setting.max_new_tokens, item) for item in items]
        with _clocked(draft, device) as spent:
            whole = sum(timed(device, call)[0] for call in calls)
        return round(sum(spent) / max(whole - float(self.first[: len(items)].sum()), 1e-9), 3)


@contextmanager
def _clocked(draft: Drafter, device: torch.device) -> Iterator[list[float]]:
    """Context in which the seconds of each step of a drafter are added to the yielded list."""
    spent: list[float] = []
    begin = draft.begin
    patched: Any = draft

    def clocked(step: Callable[..., Any], *given: Any) -> Any:
        seconds, result = timed(device, partial(step, *given))
        spent.append(seconds)
        return result

    def opened(call: Call, prefill: BranchOutput) -> DraftSession:
        session: Any = begin(call, prefill)
        session.propose = partial(clocked, session.propose)
        session.observe = partial(clocked, session.observe)
        return session

    patched.begin = opened
    try:
        yield spent
    finally:
        del patched.begin


def _keyed(batches: Sequence[Inputs], setting: Setting) -> list[Inputs]:
    """Batches for our loop: for sampling, with names of the rows, on which their noise depends."""
    if not setting.temperature:
        return list(batches)
    rows = [range(len(batch["input_ids"])) for batch in batches]
    names = [[(item, row) for row in own] for item, own in enumerate(rows)]
    return [{**batch, "request": own} for batch, own in zip(batches, names, strict=True)]


def _decoded(
    call: Callable[..., Any],
    batches: Sequence[Inputs],
    setting: Setting,
    length: int,
    item: int,
    repeat: int = 0,
    **options: Any,
) -> Any:
    """Calls a function like ``generate`` for one batch; ``options`` replace those of all calls."""
    return call(**batches[item], **setting.generation() | {"max_new_tokens": length} | options)


def _answers(model: Any, batch: Inputs, output: Tensor) -> list[list[int]]:
    """Generated token ids of each row, up to the end-of-sequence token."""
    prompt, ends = batch["input_ids"].shape[1], token_ids(model.generation_config.eos_token_id)
    return [up_to_end(row[prompt:], ends) for row in output.tolist()]


@torch.no_grad()
def confidence(
    model: Any, batches: Sequence[Inputs], setting: Setting, guide: Guide | None
) -> dict[str, float]:
    """Measures the confidence of the target distribution along the undrafted loop's answers.

    Returns:
        ``entropy_bits``, the mean entropy in bits per token, and ``close``, the share of tokens at
        which the probabilities of the two most likely tokens differ by less than 0.05. Even a good
        drafter predicts such a token only by chance.
    """
    call = partial(generate, model, decoder=Decoder(guide=guide, seed=setting.seed))
    scored = {"output_scores": True, "return_dict_in_generate": True}
    keyed, distributions = _keyed(batches, setting), []
    for item, batch in enumerate(batches):
        output = _decoded(call, keyed, setting, setting.max_new_tokens, item, **scored)
        distribution = torch.stack(output.scores, 1).float().softmax(-1)
        answers = _answers(model, batch, output.sequences)
        distributions += [own[: len(ids)] for own, ids in zip(distribution, answers, strict=True)]
    whole = torch.cat(distributions)
    first, second = whole.topk(2).values.unbind(-1)
    return {
        "entropy_bits": round(float(entr(whole).sum(-1).mean()) / math.log(2), 3),
        "close": round(float((first - second < 0.05).float().mean()), 3),
    }
