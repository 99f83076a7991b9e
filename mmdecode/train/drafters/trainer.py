"""``mmdecode train drafter``: trains drafters on the hidden states of the model they draft for.

The target model first generates the answers to the training prompts, since these are the tokens
that verification accepts (on-policy training); their token ids are written to disk. The target's
hidden states over prompts and answers are computed when a batch is used, and cached in memory while
there is room. Training stops when the tokens per pass of drafting held-out prompts no longer
improve. The loss is not used for stopping, since it saturates at the first drafted position long
before acceptance saturates at the last.

Targets are in `mmdecode.train.drafters.targets`. Architectures of drafters and their losses are in
`mmdecode.train.drafters.recipes`; the option ``kind`` names the architecture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.special import entr

from mmdecode.decoder import Decoder
from mmdecode.draft.features import feature_needs, prompt_rows
from mmdecode.engine.adapter import MAIN, Adapter, BranchSpec
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Drafter, Requirements
from mmdecode.errors import InputError, OptionError
from mmdecode.guide.edited import Edited
from mmdecode.models.dream import DreamModel
from mmdecode.models.feature_drafter import FeatureDrafter
from mmdecode.runs.files import (
    RUN,
    append_line,
    check_settings,
    complete_lines,
    marked_json,
    note_settings,
    open_append,
    refuse_foreign_in,
    write_file,
)
from mmdecode.train.begin import begun
from mmdecode.train.distributed import PRECISIONS, Alone, Worker
from mmdecode.train.drafters.early_states import EarlyStates
from mmdecode.train.drafters.recipes import RECIPES, Batch, Options, Sample
from mmdecode.train.drafters.targets import Target, loaded, requests_for
from mmdecode.train.hub import write_model_page
from mmdecode.train.loop import BITS, fit, progress, write_state


class Collector(Edited):
    """Guide that collects the hidden states of a whole prompt and leaves the logits unchanged.

    Args:
        drafter: Drafter whose inputs are collected; ``None``: only the last states are collected.
        branches: Further branches, such as the unconditional one, whose states are collected.
        early: Recorder of the model's early layers; ``None``: they are not recorded.
    """

    neutral = False

    def __init__(
        self,
        drafter: FeatureDrafter | None,
        branches: Sequence[BranchSpec] = (),
        early: EarlyStates | None = None,
    ) -> None:
        self.drafter, self.branches = drafter, branches
        self.edits = () if early is None else early.edits
        self.found: Any = None

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns the states that the drafter requires, for all tokens of the prompt."""
        if self.drafter is None:
            return Requirements(hidden=frozenset({"last"}), prompt_hidden=True)
        return feature_needs(self.drafter, adapter)

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Stores the states of the prefill in ``found``."""
        specs, adapter = [MAIN, *self.branches], call.plan.adapter
        rows = None if self.drafter is None else prompt_rows(self.drafter, call, prefill, specs)
        prompts = [adapter.prompt(call, spec) for spec in specs]
        ids, last = (
            torch.cat(parts)
            for parts in (
                [prompt.ids for prompt in prompts],
                [prefill[spec.name].prompt_hidden["last"] for spec in specs],
            )
        )
        words = torch.cat([prompt.mask for prompt in prompts]).bool() & ~adapter.spans("image", ids)
        self.found = rows, ids, last, words


def collect(target: Target, drafter: FeatureDrafter | None, samples: Sequence[Sample]) -> Batch:
    """Computes the target's hidden states over prompts and answers, as a training batch.

    Args:
        target: The target.
        drafter: Drafter whose inputs are collected; ``None``: only the last states are collected.
        samples: Prompts and answers.
    """
    early = EarlyStates(target.adapter) if isinstance(drafter, DreamModel) else None
    collector = Collector(drafter, target.branches, early)
    target.read(Decoder(guide=collector), samples)
    rows, ids, last, words = collector.found
    lengths = torch.tensor([len(sample.answer) for sample in samples], device=ids.device)
    lengths = lengths.repeat(len(ids) // len(samples))
    order = torch.arange(ids.shape[1], device=ids.device)
    return Batch(
        rows=rows,
        ids=ids,
        last=last,
        words=words,
        asked=order >= ids.shape[1] - lengths[:, None],
        adapter=target.adapter,
        inner=None if early is None else early.lowest_entropy(),
        guided=target.guided,
    )


class Batches:
    """Batches of samples of similar length; each sample occurs once in an epoch.

    The states of a batch are computed when it is requested, and cached while there is room.

    Args:
        target: The target.
        drafter: Drafter whose inputs are collected; ``None``: only the last states are collected.
        samples: Training samples.
        options: Settings; for the same samples, a batch depends only on them and the step.
    """

    def __init__(
        self,
        target: Target,
        drafter: FeatureDrafter | None,
        samples: Sequence[Sample],
        options: Options,
    ) -> None:
        self._collect = partial(collect, target, drafter)
        ordered = sorted(samples, key=lambda sample: len(sample.answer))
        size = options.fit.batch
        self._parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        self._seed = options.fit.seed
        self._kept: dict[int, Batch] = {}
        self._room = options.memory * 2**20

    def __call__(self, step: int) -> Batch:
        """Returns the batch of a step."""
        epoch, position = divmod(step, len(self._parts))
        dice = torch.Generator().manual_seed(self._seed * 2**32 + epoch)
        index = int(torch.randperm(len(self._parts), generator=dice)[position])
        if index in self._kept:
            return self._kept[index]
        batch = self._collect(self._parts[index])
        size = batch.size()
        if size <= self._room:
            self._kept[index] = batch
            self._room -= size
        return batch


def answered(target: Target, requests: Sequence[Any], options: Options, file: Path) -> list[Sample]:
    """Generates the target's answers, unless ``file`` has them from an interrupted run.

    Args:
        target: The target.
        requests: Requests to answer.
        options: Settings.
        file: File of JSON lines to which each answer is appended.

    Returns:
        One sample for each request, in order.
    """
    known = _known(file)
    missing = [request for request in requests if request.id not in known]
    if missing:
        with open_append(file) as opened:
            for start in progress(range(0, len(missing), target.at_once), "answers"):
                asked = missing[start : start + target.at_once]
                answers = target.answers(asked, options)
                for request, answer in zip(asked, answers, strict=True):
                    line = json.dumps({"id": request.id, "answer": answer}) + "\n"
                    append_line(opened, line.encode())
        known = _known(file)
    return [Sample(request, known[request.id]) for request in requests]


def _known(file: Path) -> dict[str, list[int]]:
    if not file.exists():
        return {}
    return {row["id"]: row["answer"] for row in map(json.loads, complete_lines(file))}


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """Measured acceptance of a drafted chain.

    Attributes:
        tokens_per_pass: Mean number of tokens that a pass adds to a sequence, including the one
            that the target itself predicts.
        by_position: Shares of passes that accepted at least 1, 2, ... drafted tokens.
    """

    tokens_per_pass: float
    by_position: list[float]


def measured(target: Target, requests: Sequence[Any], draft: Drafter, options: Options) -> Drafted:
    """Generates answers to requests with a drafter and measures acceptance."""
    stats = target.drafted(draft, requests, options).stats
    found = stats.by_depth
    return Drafted(
        tokens_per_pass=stats.acceptance_length,
        by_position=[*found, *[0.0] * (options.length - len(found))],
    )


def entropy(target: Target, samples: Sequence[Sample]) -> float:
    """Computes the mean entropy of the target's next-token distribution over answers, in bits."""
    total, tokens = 0.0, 0
    for start in range(0, len(samples), 32):
        batch = collect(target, None, samples[start : start + 32])
        distribution = batch.logits()[:, :-1][batch.asked[:, 1:]].softmax(-1)
        total += float(entr(distribution).sum())
        tokens += len(distribution)
    return total / max(tokens, 1) * BITS


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Disables gradients of a model's weights inside the context and restores them afterwards."""
    learned = [p for p in model.parameters() if p.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


def train(
    target: Target,
    requests: Sequence[Any],
    options: Options,
    work: Path,
    out: Path,
    *,
    start: str | None = None,
    worker: Alone | None = None,
) -> dict[str, Any]:
    """Trains a drafter, or resumes its training.

    Args:
        target: The target, in float32 or the precision of ``worker``; its weights stay frozen.
        requests: Prompts in three consecutive groups: training prompts; ``options.held_out``
            prompts, on which checkpoints are compared; ``options.tested`` prompts, on which the
            final drafter is measured.
        options: Settings.
        work: Folder of answers, training state and log; ``held_out`` in the log is the number of
            passes per token.
        out: Folder of the trained drafter.
        start: Drafter to initialise from, see `mmdecode.train.begin`; ``None``: random weights.
        worker: Process, device and precision; ``None``: this process, in float32.

    Returns:
        The card: settings and results, also written to ``out/card.json``.

    Raises:
        InputError: There are too few requests, or ``start`` has weights of other shapes.
        OptionError: ``work`` has the state of a training with other settings or requests, or
            drafters of kind ``options.kind`` cannot be trained for the target.
    """
    worker = worker or Alone()
    if target.kinds is not None and options.kind not in target.kinds:
        raise OptionError(
            f"kind={options.kind!r} cannot be trained for {target.adapter.name}; expected "
            f"{' or '.join(target.kinds)}"
        )
    ends = [len(requests) - options.tested - options.held_out, len(requests) - options.tested]
    if ends[0] < 1:
        raise InputError(
            f"{len(requests)} requests leave none for training, since {options.held_out} are held "
            f"out and {options.tested} are for the test; give more data, or lower held_out or "
            "tested"
        )
    settings = {
        "options": asdict(options),
        "requests": [request.id for request in requests],
        "start": start,
        "precision": worker.precision,
        "processes": worker.size,
    }
    answers = work / "answers.jsonl"
    recipe = RECIPES[options.kind]
    untrained = recipe.build(target.adapter, [], options)  # refuses before anything is written
    if start is not None:
        begun(untrained, start, type(target.model).__name__)
    del untrained

    def prepare() -> None:
        if (work / RUN).exists():
            check_settings(work, settings, resume=True, replaceable=False)
        note_settings(work, settings)
        answered(target, requests, options, answers)

    worker.first(prepare)
    samples = answered(target, requests, options, answers)
    learned, held_out, tested = samples[: ends[0]], samples[ends[0] : ends[1]], samples[ends[1] :]
    model, adapter = target.model, target.adapter
    with frozen(model):
        torch.manual_seed(options.fit.seed)
        module = recipe.build(adapter, learned, options)
        if start is not None:
            module = begun(module, start, type(model).__name__)
        module = module.to(model.device, torch.float32)
        batches = Batches(target, recipe.reads(module), learned, options)
        best = work / "best.pt"

        def loss_at(step: int) -> Tensor:
            batch_index = worker.batch_index(step)
            batch = batches(batch_index)
            with worker.autocast():
                return recipe.loss(module, batch, options, options.fit.dice(batch_index))

        def judged(by: Sequence[Sample]) -> Drafted:
            asked = [sample.request for sample in by]
            return measured(target, asked, recipe.draft(module, options.length), options)

        log = fit(
            module,
            loss_at=loss_at,
            held_out=lambda: 1 / judged(held_out).tokens_per_pass,
            keep=lambda: write_state(best, module.state_dict()),
            options=options.fit,
            work=work,
            worker=worker,
        )

        def finish() -> dict[str, Any]:
            module.load_state_dict(torch.load(best, map_location=model.device, weights_only=True))
            module.eval()
            recipe.save(module, out, adapter)
            result = judged(tested or held_out)
            best_at = min(log, key=lambda row: row["held_out"])
            card = {
                "what": f"{options.kind} drafter for {type(model).__name__}",
                "options": asdict(options),
                "requests": {
                    "learnt": len(learned),
                    "held_out": len(held_out),
                    "tested": len(tested),
                },
                "precision": worker.precision,
                "started_from": start,
                "steps": int(best_at["step"]),
                "minutes": round(log[-1]["seconds"] / 60, 1),
                "parameters_learnt": sum(p.numel() for p in module.parameters()),
                "chain": options.length,
                "tokens_per_pass": round(result.tokens_per_pass, 3),
                "accepted_by_position": [round(share, 3) for share in result.by_position],
                "entropy_bits_per_token": round(entropy(target, tested or held_out), 3),
            }
            write_file(out / "card.json", marked_json(card))
            return card

        return worker.first(finish)


def train_from(
    model_id: str,
    data: str,
    out: Path,
    options: Options,
    *,
    limit: int | None = None,
    device: str | None = "cpu",
    precision: str = "fp32",
    start: str | None = None,
) -> dict[str, Any]:
    """Loads a target and trains a drafter for it: ``mmdecode train drafter``.

    Args:
        model_id: Vision-language, causal language or LlamaGen model: folder, Hub id or
            ``zoo:NAME``.
        data: Path of a table of questions (with or without images) or prompts; or `SCENES`, which
            means rendered scenes, or its classes for a class-conditional LlamaGen.
        out: Folder of the drafter, with a model page for the Hub; answers, training state and log
            are in ``out/state``.
        options: Settings.
        limit: Number of requests; ``None``: the whole table, or 1,000 scenes or class requests.
        device: Device of the training; ``None``: CUDA if it is available.
        precision: ``fp32``, ``bf16`` or ``fp16``, see `mmdecode.train.distributed`.
        start: Drafter to initialise from; ``None``: random weights.

    Returns:
        The card: settings and results; empty in processes of other ranks than 0.
    """
    refuse_foreign_in(out, but=["README.md"])  # a page of the user's is left as it is
    worker = Worker(device, precision)
    target = loaded(model_id, worker.device, PRECISIONS[precision])
    requests = requests_for(target, data, limit)
    card = train(target, requests, options, out / "state", out, start=start, worker=worker) | {
        "model": model_id,
        "data": data,
    }
    worker.leave()
    if worker.rank:
        return {}
    write_file(out / "card.json", marked_json(card))
    write_model_page(out, card)
    return card
