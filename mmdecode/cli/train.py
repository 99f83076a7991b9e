"""``mmdecode train``: trains drafters, transcript correctors, or the shipped models."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdecode.cli import flags
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.cli.shared import Group
from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.runs.console import console
from mmdecode.runs.files import overwriting, refuse_foreign_in

if TYPE_CHECKING:
    from mmdecode.train.loop import FitOptions

RESULTS = {
    "whisper-synth": "model",
    "whisper-synth-medusa": "heads",
    "whisper-synth-ctc": "ctc",
    "whisper-synth-320ms": "320ms",
    "whisper-synth-960ms": "960ms",
    "punctuation": "punctuation",
    "aligner": "aligner",
    "lm-synth": "model",
    "lm-grammar-moonshine": "model",
    "lm-docstrings-moonshine": "model",
    "lm-general-moonshine": "model",
    "spoken-sentences": "spoken-sentences",
    "joined-words": "joined-words",
    "speech-test": "speech-test",
    "llava-scenes": "model",
    "scenes-test": "scenes-test",
    "llamagen-scenes": "models",
    "llamagen-digits": "model",
    "var-scenes": "models",
    "scene-classifier": "model",
}
"""Subfolder of --work for each zoo model, by the model's name."""
TrainingDtype = Annotated[
    str,
    typer.Option(help="auto, fp32, fp16 or bf16 of the target; trained weights stay in fp32."),
]
ON_CUDA = ("llamagen-scenes", "llamagen-digits", "var-scenes")

app = typer.Typer(cls=Group, help="Train drafters, correctors or zoo models.", add_completion=False)


Trained = tuple[Any, str | None]
"""Report of a training and a line about it; ``None``: this is not the process that prints."""


def training(run: Callable[..., Trained]) -> Callable[..., Trained]:
    """Makes a function a command of the group, which prints its line, and its report on request."""

    @functools.wraps(flags.documented(run))
    def command(**given: Any) -> None:
        with overwriting(given["overwrite"]):
            report, line = run(**given)
        if line is None:
            return
        console.print(line)
        if given["json"]:
            emit_json(report)

    app.command(run.__name__.replace("_", "-"))(command)
    return run


@training
def medusa(
    model: Annotated[
        str, flags.model_option("The target, usually a recogniser", "openai/whisper-small")
    ],
    data: Path,
    out: Path,
    kind: str = "block",
    heads: int = 5,
    epochs: int = 12,
    nodes: int = 12,
    vocabulary: flags.AtLeast0 = 0,
    limit: int | None = None,
    language: str = "en",
    device: str = "auto",
    dtype: TrainingDtype = "auto",
    overwrite: bool = False,
    seed: int = 0,
    json: JsonFlag = False,
) -> Trained:
    """Train Medusa heads on a recogniser's own transcripts; run again to resume.

    For a target that is no recogniser this runs 'mmdecode train drafter --kind medusa', which has
    more options.

    Options:
        data: Table with a 'path' per recording, folder of audio or zoo:real-clips; if the target is
            no recogniser, a table of questions.
        kind: Layout of the heads: 'block' or 'linear'.
        heads: Number of heads, one per drafted token.
        nodes: Nodes of the draft tree; 0: draft a chain.
        vocabulary: Number of tokens that the heads score, the most frequent of the transcripts; 0:
            all. Fewer are faster where a small model has a large vocabulary.
        language: Language code of the recordings.
    """
    given = dict(locals())

    from mmdecode.asr.recognizers import recognises
    from mmdecode.checkpoints import config_of, loading, local_path
    from mmdecode.train.drafters.medusa import MedusaOptions, train_from_manifest

    refuse_foreign_in(out, overwrite, but=["README.md"])
    with loading(model):
        kind_of_model = config_of(local_path(model)).model_type
    if not recognises(kind_of_model):
        if vocabulary:
            raise OptionError("--vocabulary needs a recogniser as target; leave it out")
        same = flags.picked(given, "model out heads limit device dtype overwrite seed json")
        return drafter(**same, data=str(data), kind="medusa")
    options = MedusaOptions(**flags.fields_of(MedusaOptions, given), num_heads=heads)
    report = _trained_on_recordings(train_from_manifest, options, given)
    tree = report["expected_tokens_per_pass_tree"]
    return report, (
        f"heads in [bold]{out}[/bold]; held-out tokens per pass: chain "
        f"{report['expected_tokens_per_pass_chain']}, tree {tree}"
        f"{_comparison(given, 'medusa:path')}"
    )


@training
def ctc(
    model: Annotated[str, flags.model_option("The recogniser", "UsefulSensors/moonshine-tiny")],
    data: Path,
    out: Path,
    vocabulary: int = 1000,
    width: int = 288,
    epochs: int = 15,
    limit: int | None = None,
    language: str = "en",
    device: str = "auto",
    dtype: TrainingDtype = "auto",
    overwrite: bool = False,
    seed: int = 0,
    json: JsonFlag = False,
) -> Trained:
    """Train a CTC head on a recogniser's own transcripts, for --draft ctc:head=FOLDER.

    The recordings need no texts. Their encoder states are kept in memory, in half precision.

    Options:
        data: Table with a 'path' per recording, audio folder or zoo:real-clips.
        vocabulary: Maximum number of subwords.
        width: Width of the head's convolutions.
        language: Language code of the recordings.
    """
    given = dict(locals())

    from mmdecode.train.drafters.ctc import CTCOptions, train_from_manifest

    options = CTCOptions(**flags.fields_of(CTCOptions, given), inner=width)
    report = _trained_on_recordings(train_from_manifest, options, given)
    return report, (
        f"head in [bold]{out}[/bold]; word error rate against the model's own held-out "
        f"transcripts: {report['word_errors']:.1%}{_comparison(given, 'ctc:head')}"
    )


def _comparison(given: Mapping[str, Any], draft: str) -> str:
    """Returns advice how to find out whether a trained drafter is worth it."""
    words = ["--model", given["model"], "--data", str(given["data"])]
    command = shlex.join([*words, "--draft", f"{draft}={given['out']}"])
    return f"; whether they save time: mmdecode bench asr {command}"


def _trained_on_recordings(
    train: Callable[..., dict[str, Any]], options: Any, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Trains with the arguments of a command, and returns the report."""
    names = "limit device dtype language overwrite"
    return train(given["model"], given["data"], given["out"], options, **flags.picked(given, names))


@training
def drafter(
    model: Annotated[str, flags.model_option("The target", "llava-hf/llava-1.5-7b-hf")],
    out: Path,
    data: str = "zoo:scenes",
    kind: str = "eagle",
    steps: int | None = None,
    batch_size: int | None = None,
    rate: float | None = None,
    passes: int | None = None,
    length: int = 4,
    held_out: int = 32,
    tested: int = 64,
    temperature: float = 0.0,
    vocabulary: int | None = None,
    queries: int | None = None,
    tokens: int = 5,
    heads: int = 4,
    feature_sampling: bool = False,
    exit_layer: int = 2,
    limit: int | None = None,
    start: str | None = None,
    device: str = "auto",
    dtype: TrainingDtype = "auto",
    overwrite: bool = False,
    push: str | None = None,
    private: bool | None = None,
    seed: int = 0,
    json: JsonFlag = False,
) -> Trained:
    """Train a drafter on a decoder-only model's own states and answers; run again to resume.

    Heads for a speech recogniser are trained by 'mmdecode train medusa'. 'accelerate launch -m
    mmdecode train drafter ...' trains with several GPUs, a batch each.

    Options:
        data: Table of questions (with or without images) or of prompts, or zoo:scenes. For a
            class-conditional image model leave it at zoo:scenes: its classes are used.
        kind: Kind of drafter: 'eagle', 'eagle3', 'vispec', 'dream', 'flash', 'hydra', 'kangaroo',
            'medusa' or 'text'.
        batch_size: Requests per step.
        passes: Passes per step; from the second on, the drafter reads its own states.
        length: Length of the drafted chain in evaluations.
        held_out: Requests held out to choose the best checkpoint.
        tested: More held-out requests for the reported numbers; 0: use --held-out.
        temperature: Temperature of the target's text answers; 0: greedy.
        vocabulary: Vocabulary size of eagle3's head. Default: the target's.
        queries: Queries per image. Default: 2 for vispec, 64 for flash.
        tokens: For flash: drafted tokens per pass.
        heads: For medusa and hydra: number of heads.
        feature_sampling (--feature-sampling/--no-feature-sampling): For eagle and vispec: FSPAD,
            where embeddings gate features.
        exit_layer: For kangaroo: number of the target's layers to draft with.
        start (--from): Drafter to start from, of the same kind; for vispec also an eagle.
        push: Upload the result to USER/NAME on the Hugging Face Hub.
        private: Whether --push creates a private repository.
    """
    given = dict(locals())

    from mmdecode.train import hub
    from mmdecode.train.distributed import precision_of
    from mmdecode.train.drafters import trainer as recipe

    usual = recipe.Options(kind=kind)
    own: dict[str, Any] = {"draft_vocabulary": vocabulary, "fit": _paced(usual.fit, given)}
    options = recipe.Options(**flags.fields_of(recipe.Options, given), **own)
    if push is not None:
        hub.check_push(push)
    elif private is not None:
        raise OptionError("--private and --no-private need --push; give --push USER/NAME too")
    more: dict[str, Any] = {"precision": precision_of(dtype, model, device)}
    more |= flags.picked(given, "limit device start")
    card = recipe.train_from(model, data, out, options, **more)
    if not card:  # not the leading process
        return card, None
    line = (
        f"drafter in [bold]{out}[/bold]; with a chain of {length}, a pass commits "
        f"{card['tokens_per_pass']} tokens of held-out answers; the target's distribution has an "
        f"entropy of {card['entropy_bits_per_token']} bits per token"
    )
    if push is not None:
        console.print(line)
        line = f"pushed to {hub.push(out, push, private)}"
    return card, line


def _paced(usual: FitOptions, given: Mapping[str, Any]) -> FitOptions:
    """Returns settings of a training with the steps, batch, rate and seed that are given."""
    names = {"steps": "steps", "batch": "batch_size", "peak_rate": "rate", "seed": "seed"}
    pace = {field: given[name] for field, name in names.items() if given[name] is not None}
    return dataclasses.replace(usual, **pace)


@training
def alignment_heads(
    model: Annotated[str, flags.model_option("The recogniser", "openai/whisper-small")],
    data: Path | None = None,
    method: str = "ctc",
    limit: int = 80,
    most: int = 10,
    out: Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
    json: JsonFlag = False,
) -> Trained:
    """Find the cross-attention heads that align text with audio, for word times and streams.

    Options:
        data: Table with a 'path' per recording, folder of audio or zoo:real-clips. Default:
            sentences of the shipped models' training, spoken by espeak-ng.
        method: Forced aligner whose times are the reference: ctc (that of the model) or
            ctc:model=NAME, such as ctc:model=zoo:whisper-synth.
        limit: Number of recordings.
        most: Maximum number of attention heads.
        out: Model folder whose generation_config.json gets the heads.
    """
    from mmdecode.asr.transcriber import load
    from mmdecode.train import alignment_heads as recipe

    if out is not None:
        recipe.config_for_heads(out)  # checked before anything is computed
    target, processor = load(model, device, None)
    rate = processor.feature_extractor.sampling_rate
    waves = recipe.zoo_speech(limit) if data is None else recipe.recordings(data, rate, limit)
    report = recipe.find_heads(target, processor, waves, method, most)
    if out is not None:
        recipe.write_heads(out, report["alignment_heads"])
    return report, (
        f"alignment_heads {report['alignment_heads']}, median error in seconds by number of heads "
        f"{report['median_error_s_by_heads']}"
    )


@training
def corrector(
    data: Annotated[list[Path], typer.Option(exists=True)],
    out: Path,
    model: str | None = None,
    method: str = "lora",
    template: str | None = None,
    n_best: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    rate: float | None = None,
    rank: int = 16,
    targets: str = "attention",
    device: str = "auto",
    overwrite: bool = False,
    seed: int = 0,
    json: JsonFlag = False,
) -> Trained:
    """Train a corrector of N-best lists; run again to resume. A fifth of the lists is held out.

    Options:
        data: N-best lists with references; repeatable.
        model: Causal or seq2seq model, as google/flan-t5-base: a folder or a Hub id.
        method: 'lora', 'full' (all weights), or 'scratch' (without --model).
        template: Prompt: n_best, 1_best, flanec or a text with {best}, {others}.
        n_best: Maximum hypotheses in a prompt.
        batch_size: N-best lists per step.
        rank: Rank of the LoRA adapters.
        targets: Layers with LoRA adapters: attention or all-linear.
    """
    given = dict(locals())

    from mmdecode.asr.correction.n_best_lists import read_lists
    from mmdecode.train import corrector as recipe

    usual = recipe.FROM_SCRATCH if method == "scratch" else recipe.CorrectorOptions(method=method)
    asked: dict[str, Any] = {"template": template, "count": n_best}
    prompts = {name: value for name, value in asked.items() if value is not None}
    options = dataclasses.replace(
        usual,
        prompts=dataclasses.replace(usual.prompts, **prompts),
        rank=rank,
        targets=targets,
        fit=_paced(usual.fit, given),
    )
    lists = [one for file in data for one in read_lists(file)]
    card = recipe.train_from_lists(model, lists, out, options, device)
    found = card["development_decoded"]
    return card, (
        f"corrector in [bold]{out}[/bold]; on {found['lists']} held-out lists the WER is "
        f"{found['wer_best']:.2%} for the best hypothesis, {found['wer_corrected']:.2%} corrected"
    )


@training
def zoo(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(RESULTS)}.")],
    work: Path = Path("outputs/zoo"),
    out: Path | None = None,
    overwrite: bool = False,
    minutes: float = 80.0,
    base: str = "zoo:whisper-synth",
    device: str = "cpu",
    json: JsonFlag = False,
) -> Trained:
    """Retrain a zoo model; speech models need espeak-ng. Run again to resume.

    Options:
        work: Folder for corpus and training state.
        out: Folder for the result; default: WORK/model.
        minutes: Minutes of training for whisper-synth and its causal forms, without synthesis.
        base: For heads, aligner and causal forms: the Whisper they are made for.
        device: cpu, or for llamagen and var cuda, which trains for more steps.
    """
    from mmdecode.train.zoo.recipes import run_recipe

    if name not in RESULTS:
        raise UnknownNameError.of("zoo recipe", name, RESULTS)
    if device != "cpu" and name not in ON_CUDA:
        raise OptionError(
            f"--device {device} for {name}, which is trained on the CPU; leave it out, or retrain "
            f"a model that can be trained on CUDA: {', '.join(ON_CUDA)}"
        )
    folder = out or work / RESULTS[name]
    if name != "aligner":  # it is written into a model's folder, and checks its own file
        for part in (folder, *(one for one in folder.glob("*") if one.is_dir())):
            refuse_foreign_in(part)
    result = run_recipe(name, work, folder, minutes, base, device)
    return result, f"result in [bold]{folder}[/bold]"
