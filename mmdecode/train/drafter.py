"""``mmdecode train drafter``: drafters that read a model's states, for that model and its images.

The target answers its training prompts itself, once (on-policy: a drafter learns what verification
will ask for), and the answers are kept as ids. The states of a batch are computed when the batch is
learnt from, by the engine's own pass over prompt and answer, and kept in memory while there is
room; nothing but ids is written. Training
stops at the best measured drafting of a chain on held-out prompts, and not by a loss, since losses
saturate at the first position long before acceptance does at the last.

Kinds of drafters and their losses are in `mmdecode.train.drafter_recipes`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.special import entr

from mmdecode import registry
from mmdecode.draft.features import feature_needs, prompt_rows
from mmdecode.engine.contracts import Adapter, Context, Draft, Needs, Scores
from mmdecode.engine.decoder import Decoder, NoDraft
from mmdecode.engine.proposal import Kind
from mmdecode.engine.setup import token_ids
from mmdecode.errors import InputError
from mmdecode.files import RUN, append_line, check_settings, complete_lines, note_settings
from mmdecode.frontdoor import generate
from mmdecode.models.dream import Dream
from mmdecode.models.feature_drafter import FeatureDrafter
from mmdecode.train.drafter_recipes import RECIPES, Batch, Options, Sample
from mmdecode.train.early_states import EarlyStates
from mmdecode.train.fitting import BITS, fit, progress
from mmdecode.train.medusa import write_state
from mmdecode.vlm.requests import Request, read_requests

SCENES = "zoo:scenes"
BY_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Inputs with a value per prompt token."""

Build = Callable[[Sequence[Request]], dict[str, Any]]
"""Model inputs of some requests, padded on the left."""


class Collector(NoDraft):
    """Takes the states of a whole prompt from the engine's pass, and drafts nothing.

    Args:
        drafter: Whose rows are made; ``None``: none.
    """

    def __init__(self, drafter: FeatureDrafter | None) -> None:
        self.drafter = drafter
        self.found: Any = None

    def needs(self, adapter: Adapter) -> Needs:  # type: ignore[override]
        """What the drafter reads, of the whole prompt."""
        if self.drafter is None:
            return Needs(hidden=frozenset({"last"}), prompt_hidden=True)
        return feature_needs(self.drafter, adapter)

    def begin(self, ctx: Context, prefill: Scores, kind: Kind) -> None:
        """Notes them."""
        rows = None if self.drafter is None else prompt_rows(self.drafter, ctx, prefill)
        words = ctx.prompt_mask.bool() & ~ctx.adapter.image_mask(ctx.prompt_ids)
        self.found = rows, ctx.prompt_ids, prefill.prompt_hidden["last"], words, ctx.adapter


def collect(
    model: Any, drafter: FeatureDrafter | None, build: Build, samples: Sequence[Sample]
) -> Batch:
    """The target's states over prompts and answers.

    Args:
        model: The target.
        drafter: Whose rows are wanted.
        build: Makes inputs of requests.
        samples: Of which.
    """
    answers = [sample.answer for sample in samples]
    inputs = with_answers(build([sample.request for sample in samples]), answers)
    collector = Collector(drafter)
    early: Any = EarlyStates(registry.adapter_for(model)) if isinstance(drafter, Dream) else None
    generate(model, decoder=Decoder(collector, early), **inputs, **_greedily(1))
    rows, ids, last, words, adapter = collector.found
    lengths = torch.tensor([len(answer) for answer in answers], device=ids.device)
    order = torch.arange(ids.shape[1], device=ids.device)
    asked = order >= ids.shape[1] - lengths[:, None]
    inner = None if early is None else early.surest()
    return Batch(
        rows=rows, ids=ids, last=last, words=words, asked=asked, adapter=adapter, inner=inner
    )


class Batches:
    """The batch of each step; samples of about a length go together, each once in a pass over all.

    States are computed when a batch is asked for, and kept while there is room.

    Args:
        model: The target.
        drafter: Whose rows are wanted.
        build: Makes inputs of requests.
        samples: What is learnt.
        options: Settings; a batch depends on them and the step alone.
    """

    def __init__(
        self,
        model: Any,
        drafter: FeatureDrafter | None,
        build: Build,
        samples: Sequence[Sample],
        options: Options,
    ) -> None:
        self._collect = partial(collect, model, drafter, build)
        ordered = sorted(samples, key=lambda sample: len(sample.answer))
        size = options.fit.batch
        self._parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        self._seed = options.fit.seed
        self._kept: dict[int, Batch] = {}
        self._room = options.memory * 2**20

    def __call__(self, step: int) -> Batch:
        """Of a step."""
        epoch, place = divmod(step, len(self._parts))
        dice = torch.Generator().manual_seed(self._seed * 2**32 + epoch)
        index = int(torch.randperm(len(self._parts), generator=dice)[place])
        if index in self._kept:
            return self._kept[index]
        batch = self._collect(self._parts[index])
        size = batch.size()
        if size <= self._room:
            self._kept[index] = batch
            self._room -= size
        return batch


def with_answers(inputs: Mapping[str, Any], answers: Sequence[list[int]]) -> dict[str, Any]:
    """Inputs whose texts go on with answers, padded on the left again."""
    real = inputs["attention_mask"].bool()
    behind = {"input_ids": answers, "attention_mask": [[1] * len(a) for a in answers]}
    given = dict(inputs)
    for name in BY_TOKEN:
        if name not in inputs:
            continue
        added = behind.get(name, [[0] * len(answer) for answer in answers])
        rows = [
            torch.cat([own[there], own.new_tensor(more)])
            for own, there, more in zip(inputs[name], real, added, strict=True)
        ]
        longest = max(map(len, rows))
        given[name] = torch.stack([F.pad(row, (longest - len(row), 0)) for row in rows])
    return given


def _greedily(tokens: int) -> dict[str, Any]:
    given = dict.fromkeys(("temperature", "top_p", "top_k"))
    return {"max_new_tokens": tokens, "do_sample": False, "num_beams": 1, **given}


def answered(
    model: Any, build: Build, requests: Sequence[Request], options: Options, file: Path
) -> list[Sample]:
    """The target's own answers; those that ``file`` holds already are read from it."""
    known: dict[str, list[int]] = {}
    if file.exists():
        known = {row["id"]: row["answer"] for row in map(json.loads, complete_lines(file))}
    missing = [request for request in requests if request.id not in known]
    given = _greedily(options.max_new_tokens)
    if options.temperature:
        given |= {"do_sample": True, "temperature": options.temperature}
        given |= {"top_k": 0, "top_p": 1.0}
    ends = token_ids(model.generation_config.eos_token_id)
    decoder = Decoder(seed=options.fit.seed)
    with file.open("ab") as opened:
        for start in progress(range(0, len(missing), 32), "answers"):
            asked = missing[start : start + 32]
            inputs = build(asked)
            names = [request.id for request in asked]
            out = generate(model, decoder=decoder, request=names, **inputs, **given)
            for name, row in zip(
                names, out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True
            ):
                stop = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
                known[name] = row[: stop + 1]
                line = json.dumps({"id": name, "answer": known[name]}) + "\n"
                append_line(opened, line.encode())
    return [Sample(request, known[request.id]) for request in requests]


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """How well a chain is drafted.

    Attributes:
        tokens_per_pass: Committed tokens of a row's pass, the target's own token included.
        by_position: Share of passes that accepted at least so many drafted tokens, from 1 on.
    """

    tokens_per_pass: float
    by_position: list[float]


def measured(
    model: Any, build: Build, requests: Sequence[Request], draft: Draft, options: Options
) -> Drafted:
    """Greedy decoding of requests with a draft."""
    decoder = Decoder(draft)
    for start in range(0, len(requests), 32):
        inputs = build(requests[start : start + 32])
        generate(model, decoder=decoder, **inputs, **_greedily(options.max_new_tokens))
    found = decoder.stats.by_depth
    return Drafted(
        tokens_per_pass=decoder.stats.acceptance_length,
        by_position=[*found, *[0.0] * (options.length - len(found))],
    )


def entropy(model: Any, build: Build, samples: Sequence[Sample]) -> float:
    """Mean entropy of the target's law along answers, in bits a token."""
    total, tokens = 0.0, 0
    for start in range(0, len(samples), 32):
        batch = collect(model, None, build, samples[start : start + 32])
        law = batch.logits()[:, :-1][batch.asked[:, 1:]].softmax(-1)
        total += float(entr(law).sum())
        tokens += len(law)
    return total / max(tokens, 1) * BITS


def train(
    model: Any, build: Build, requests: Sequence[Request], options: Options, work: Path, out: Path
) -> dict[str, Any]:
    """Trains a drafter; run again to go on.

    Args:
        model: The target, in float32; it is left as it is.
        build: Makes its inputs of requests.
        requests: The last ``options.held_out`` of them are not learnt.
        options: Settings.
        work: Folder of answers, state and log; the log's ``held_out`` is passes a token.
        out: Folder of the result, which the draft of the kind loads.

    Returns:
        The card, also written to ``out/card.json``.

    Raises:
        InputError: There are too few requests.
        OptionError: ``work`` belongs to a training with other settings or requests.
    """
    if len(requests) <= options.held_out:
        raise InputError(
            f"{len(requests)} requests, of which {options.held_out} are held out; expected more: "
            "give more data, or hold out fewer"
        )
    settings = {"options": asdict(options), "requests": [request.id for request in requests]}
    work.mkdir(parents=True, exist_ok=True)
    if (work / RUN).exists():
        check_settings(work, settings, resume=True)
    note_settings(work, settings)
    frozen = [p for p in model.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    recipe = RECIPES[options.kind]
    samples = answered(model, build, requests, options, work / "answers.jsonl")
    learnt, held_out = samples[: -options.held_out], samples[-options.held_out :]
    asked = [sample.request for sample in held_out]
    adapter = registry.adapter_for(model)
    torch.manual_seed(options.fit.seed)
    module = recipe.build(adapter, learnt, options).to(model.device)
    batches = Batches(model, recipe.reads(module), build, learnt, options)
    best = work / "best.pt"

    def loss_at(step: int) -> Tensor:
        return recipe.loss(module, batches(step), options, options.fit.dice(step))

    def judged() -> Drafted:
        return measured(model, build, asked, recipe.draft(module, options.length), options)

    log = fit(
        module,
        loss_at=loss_at,
        held_out=lambda: 1 / judged().tokens_per_pass,
        keep=lambda: write_state(best, module.state_dict()),
        options=options.fit,
        work=work,
    )
    module.load_state_dict(torch.load(best, map_location=model.device, weights_only=True))
    module.eval()
    recipe.save(module, out, adapter)
    result = judged()
    for parameter in frozen:
        parameter.requires_grad_(True)
    best_at = min(log, key=lambda row: row["held_out"])
    card = {
        "what": f"{options.kind} drafter for {type(model).__name__}",
        "options": asdict(options),
        "requests": {"learnt": len(learnt), "held_out": len(held_out)},
        "steps": int(best_at["step"]),
        "minutes": round(log[-1]["seconds"] / 60, 1),
        "parameters_learnt": sum(p.numel() for p in module.parameters()),
        "chain": options.length,
        "tokens_per_pass": round(result.tokens_per_pass, 3),
        "accepted_by_position": [round(share, 3) for share in result.by_position],
        "entropy_bits_per_token": round(entropy(model, build, held_out), 3),
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    return card


def train_from(
    model_id: str,
    data: str,
    out: Path,
    options: Options,
    *,
    limit: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """``mmdecode train drafter``.

    Args:
        model_id: A vision-language or causal language model: folder, Hub id or ``zoo:NAME``.
        data: `SCENES`, or a table of questions, with images or without.
        out: Folder of the drafter; answers, state and log lie in ``out/state``.
        options: Settings.
        limit: Use so many requests; of scenes 1,000 unless it says otherwise.
        device: Where to train.
    """
    model, build = loaded(model_id, device)
    requests = scene_requests(limit or 1000) if data == SCENES else read_requests(data, limit)
    card = train(model, build, requests, options, out / "state", out) | {"model": model_id}
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    return card


def loaded(model_id: str, device: str = "cpu") -> tuple[Any, Build]:
    """A model in float32, and what makes its inputs of requests."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    from mmdecode.asr.correction import load as load_text
    from mmdecode.checkpoints import config_of, loading, local_path
    from mmdecode.vlm.answerer import load
    from mmdecode.vlm.questions import Prompts

    with loading(model_id):
        sees = type(config_of(local_path(model_id))) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not sees:
        model, tokenizer = load_text(model_id, device)
        return model.eval(), partial(_texts, tokenizer, model.device)
    model, processor = load(model_id, device, None)
    return model.eval(), Prompts(model, processor).read


def _texts(tokenizer: Any, device: torch.device, requests: Sequence[Request]) -> dict[str, Tensor]:
    """Inputs of a language model, by its chat template where it has one."""
    texts = [request.text for request in requests]
    templated = tokenizer.chat_template is not None
    if templated:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            for text in texts
        ]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return dict(
        tokenizer(
            texts,
            padding=True,
            padding_side="left",
            add_special_tokens=not templated,
            return_tensors="pt",
        ).to(device)
    )


def scene_requests(count: int) -> list[Request]:
    """Requests about drawn scenes of the training side: captions, and one question in four."""
    from mmdecode.zoo.scene_text import DESCRIBE, exchanges
    from mmdecode.zoo.scenes import draw_scene

    requests = []
    for seed in range(count):
        rng = random.Random(f"drafter/{seed}")
        text = DESCRIBE[rng.choices(tuple(DESCRIBE), (1, 2, 3))[0]]
        if rng.random() < 0.25:
            text = exchanges(draw_scene(seed), rng, 1)[0].request
        requests.append(Request(f"scene {seed}", seed, text, (scene_image(seed),), named=True))
    return requests


def scene_image(seed: int) -> Any:
    """The picture of a scene, drawn when it is read."""
    from mmdecode.vlm.images import ImageSource, read_image
    from mmdecode.zoo.scenes import draw_scene, render

    name = f"scene {seed}"
    return ImageSource(name, lambda: read_image(render(draw_scene(seed)), name))
