"""Steps after the prompt: sampling, processors and undrafted loops. A part of real_sizes.py.

Passes are clocked from one run of the first decoder layer to the next, so that everything a pass
costs is in it and the prompt is not; undrafted loops of small models are timed as whole calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import size_models as models
import torch
from memory import repeated
from size_models import Subject
from size_prefill import decode
from size_rows import Clock, Pair, Row, paths_of, row
from torch import Tensor

from mmdecode.cli.bench import SCENES, prompts_of
from mmdecode.decoder import Decoder
from mmdecode.draft.lookup import LookupSession, PromptLookup
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, DraftSession
from mmdecode.engine.proposal import Proposal
from mmdecode.loading import load as load_model
from mmdecode.testing.drafts import TestDrafter
from mmdecode.testing.memory import LiveStorage
from mmdecode.vlm import Answerer

NODES = 5
EVERYDAY = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature .7, top-k 20, top-p .8, repetition penalty 1.05": EVERYDAY,
    "top-p .8 alone": {"temperature": 1.0, "top_k": 0, "top_p": 0.8},
}
RULES = ("coupled", "rejection", "sample_match")
AT_ALL_NODES = ["processors at all nodes"]
UNMASKED = ["step unmasked"]


class Chain(TestDrafter):
    """Proposes the same tokens in every round, for the time of a pass whatever is accepted.

    Args:
        tokens: A chain, ``(n,)``.
        log_q: Its distributions, ``(B, n, V)``, as a drafter that samples supplies them; ``None``:
            it has none.
    """

    def __init__(self, tokens: Tensor, log_q: Tensor | None = None) -> None:
        self.tokens, self.log_q = tokens, log_q
        self.kinds = ("deterministic",) if log_q is None else ("iid",)

    def draft(self, call: Call, budget: int) -> Proposal:
        """The chain in every row."""
        tokens = self.tokens.expand(call.batch, -1)
        return Proposal(tokens=tokens, kind=call.plan.kind, log_q=self.log_q)


class Wrong(PromptLookup):
    """Lookup that proposes as many tokens in every round, and never what it found.

    A pass then costs the same work and commits one token, whatever the text repeats.
    """

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session."""
        return WrongSession(call, self.length, self.ngram, prefill.logits.shape[-1])


class WrongSession(LookupSession):
    """Session of `Wrong`."""

    def propose(self, budget: int) -> Proposal:
        """Chains of the ids after those that lookup finds."""
        found = super().propose(budget)
        return replace(found, tokens=(found.tokens.clamp_min(0) + 1) % self.vocab)


def first_layer(model: Any) -> Any:
    """The layer whose runs are counted as passes."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    return decoder.layers[0]


def chain(vocab: int) -> Tensor:
    """Five words that a random model will not continue with."""
    return models.words(1, NODES, vocab, seed=5)[0]


def sampling(
    tiny: bool, repeats: int, batches: Sequence[int] = (1, 8), new: int = 12
) -> Iterator[Row]:
    """Sampled steps against ``generate``'s, and sampled passes against greedy ones."""
    for batch in batches:
        subject = models.qwen(batch, tiny=tiny)
        vocab = subject.model.config.vocab_size
        clock, tokens = Clock(first_layer(subject.model), NODES + 1), chain(vocab)
        dice = torch.Generator().manual_seed(0)
        log_q = (4 * torch.randn(batch, NODES, vocab, generator=dice)).log_softmax(-1)
        for name, options in SETTINGS.items():
            held = models.nucleus(subject, 0.8, options["temperature"])
            what = f"{subject.note}; batch {batch}, a nucleus of {held} tokens at .8"
            make: Callable[..., Row] = partial(row, "sampling", name, what)
            expects = AT_ALL_NODES if "repetition_penalty" in options else []
            sampled = {"do_sample": True, **options}
            greedy = {name: options[name] for name in ("repetition_penalty",) if name in options}
            undrafted = Decoder(seed=0)
            ways: dict[str, tuple[Decoder | None, dict[str, Any]]] = {
                "generate": (None, sampled),
                "undrafted": (undrafted, sampled),
                "greedy": (Decoder(Chain(tokens)), greedy),
            }
            for rule in RULES:
                own = log_q if rule == "rejection" else None
                ways[rule] = (Decoder(Chain(tokens, own), accept=rule, seed=0), sampled)
            pair = Pair(
                {n: partial(decode, subject, new, d, **o) for n, (d, o) in ways.items()},
                repeats,
                clock,
                lambda ways=ways: [d.stats.reset() for d, _ in ways.values() if d],  # type: ignore[misc]
            )
            yield make(
                **pair.between("undrafted", "generate"),
                measure="undrafted step, sampled",
                bar=1.0,
                expects=expects,
                paths=paths_of(undrafted),
            )
            for rule in RULES:
                decoder = ways[rule][0]
                yield make(
                    **pair.between(rule, "greedy"),
                    measure=f"pass over {NODES} nodes, {rule}",
                    reference="the same, greedy" + ", same penalty" * bool(greedy),
                    bar=1.25,
                    expects=expects,
                    paths=paths_of(decoder),
                )
        yield memory_of_q(subject, batch, log_q)


def memory_of_q(subject: Subject, batch: int, log_q: Tensor) -> Row:
    """Memory of the distributions of drafted nodes, and a call's peak with and without them."""
    sampled, found = {"do_sample": True, **EVERYDAY}, {}
    for name, own in (("coupled", None), ("rejection", log_q)):
        decoder = Decoder(Chain(chain(log_q.shape[-1]), own), accept=name, seed=0)
        with LiveStorage() as live:
            decode(subject, 4, decoder, **sampled)
        found[name] = live.peak / 1e6
    each = log_q.nbytes / batch / NODES
    return row(
        "sampling",
        "memory of q",
        f"batch {batch}, V = {log_q.shape[-1]:,}; {each / 1e3:,.0f} kB a node, "
        f"{log_q.nbytes / 1e6:.1f} MB for {batch} x {NODES} nodes, made before the call",
        measure="peak of live tensors without q itself, rejection",
        reference="coupled, which has none",
        unit="MB",
        ours=round(found["rejection"], 2),
        theirs=round(found["coupled"], 2),
    )


def processors(tiny: bool, repeats: int, new: int = 48) -> Iterator[Row]:
    """Drafted passes with a repetition penalty and no repeated 3-gram against passes without."""
    extra = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
    for vocab, batch in ((600, 2),) if tiny else ((32000, 4), (151936, 1)):
        size = {"width": 64} if tiny else {}
        subject = models.llama([64] * batch, vocab=vocab, period=16, **size)
        clock = Clock(first_layer(subject.model), NODES + 1)
        drafts = {
            "lookup": lambda: Decoder(Wrong(length=NODES)),
            "a chain of 5": lambda vocab=vocab: Decoder(Chain(chain(vocab))),
        }
        for name, made in drafts.items():
            ways = {"with": made(), "without": made()}
            options = {"with": extra, "without": {}}
            pair = Pair(
                {n: partial(decode, subject, new, d, **options[n]) for n, d in ways.items()},
                repeats,
                clock,
                lambda ways=ways: [d.stats.reset() for d in ways.values()],  # type: ignore[misc]
            )
            plain = decode(subject, new, **extra)
            nodes = {n: d.stats.drafted / max(d.stats.rounds, 1) for n, d in ways.items()}
            yield row(
                "processors",
                name,
                f"{subject.note}; batch {batch}; {nodes['with']:.1f} nodes a pass with processors, "
                f"{nodes['without']:.1f} without",
                **pair.between("with", "without"),
                measure="pass with penalty and no-repeat 3-gram",
                reference="without processors",
                bar=1.15,
                expects=AT_ALL_NODES,
                paths=paths_of(ways["with"]),
                same_ids=bool(torch.equal(pair.ids["with"], plain)),
            )


def zoo_text(name: str) -> Subject:
    """A shipped language model and a prompt of words."""
    model, _ = load_model(name, "cpu")
    ids = models.words(1, 16, model.config.vocab_size)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Subject(models.finished(model), inputs, name)


def zoo_scenes(name: str) -> Subject:
    """A shipped vision-language model and a question about a scene."""
    answerer = Answerer.from_pretrained(name, device="cpu")
    (inputs,) = prompts_of(answerer, SCENES, 1, 1)
    return Subject(models.finished(answerer.model), dict(inputs), name)


def zoo_speech(name: str) -> Subject:
    """A recogniser and the states of a window of noise, encoded before."""
    model, _ = load_model(name, "cpu")
    config = model.config
    if config.model_type == "whisper":
        sound = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions)
    else:
        sound = torch.randn(1, 32000)
    with torch.no_grad():
        states = model.get_encoder()(sound)
    start = config.decoder_start_token_id
    inputs = {"decoder_input_ids": torch.tensor([[start]]), "encoder_outputs": states}
    return Subject(models.finished(model, start), inputs, name)


ZOO: dict[str, Callable[[str], Subject]] = {
    "zoo:llava-scenes": zoo_scenes,
    "zoo:llava-scenes-text": zoo_text,
    "zoo:lm-synth": zoo_text,
    "zoo:whisper-synth": zoo_speech,
    "moonshine:tiny-en": zoo_speech,
}
"""Shipped and named models that ``generate`` runs; those of images are in size_images.py."""


def hosts(tiny: bool) -> dict[str, Callable[[], Subject]]:
    """Models whose undrafted loop is timed, by name."""
    own = models.tiny_models()
    return own if tiny else {name: partial(ZOO[name], name) for name in ZOO} | own


def host(
    tiny: bool,
    repeats: int,
    batches: Sequence[int] = (1, 8, 32),
    only: str | None = None,
    new: int = 32,
) -> Iterator[Row]:
    """The undrafted loop against ``generate``: whole calls, rows of equal length."""
    for name, made in hosts(tiny).items():
        if only is not None and only.lower() not in name.lower():
            continue
        try:
            single = made()
        except Exception as error:  # a published model that is not installed
            why = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
            yield row("host", name, "undrafted", note=why)
            continue
        for batch in batches:
            inputs = {
                key: repeated(value, batch) if batch > 1 else value
                for key, value in single.inputs.items()
            }
            subject, decoder = Subject(single.model, inputs, single.note), Decoder()
            calls = {
                "generate": partial(decode, subject, new),
                "undrafted": partial(decode, subject, new, decoder),
            }
            pair = Pair(calls, repeats, done=decoder.stats.reset)
            yield row(
                "host",
                name,
                f"{single.note}, batch {batch}, {new} tokens",
                **pair.between("undrafted", "generate", new),
                measure="undrafted, whole call over its tokens",
                bar=1.0,
                expects=UNMASKED,
                paths=paths_of(decoder),
                same_ids=pair.same("undrafted", "generate"),
            )
