"""``mmdecode train``: trains drafters, transcript correctors, or the shipped models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmdecode.cli.flags import Device, Overwrite, model_help
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.cli.shared import Group
from mmdecode.runs.console import console

RESULTS = {
    "whisper-synth": "model",
    "whisper-synth-medusa": "heads",
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


@app.command()
def medusa(
    model: Annotated[
        str,
        typer.Option(help=model_help("The target, usually a recogniser", "openai/whisper-small")),
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Table with a 'path' per recording, folder of audio or zoo:real-clips; if the "
            "target is no recogniser, a table of questions.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output folder of the heads.")],
    kind: Annotated[str, typer.Option(help="Layout of the heads: 'block' or 'linear'.")] = "block",
    heads: Annotated[int, typer.Option(help="Number of heads, one per drafted token.")] = 5,
    epochs: Annotated[int, typer.Option(help="Passes over the samples.")] = 12,
    nodes: Annotated[int, typer.Option(help="Nodes of the draft tree; 0: draft a chain.")] = 12,
    vocabulary: Annotated[
        int,
        typer.Option(
            help="Number of tokens that the heads score, the most frequent of the transcripts; "
            "0: all. Fewer are faster where a small model has a large vocabulary.",
            min=0,
        ),
    ] = 0,
    limit: Annotated[int | None, typer.Option(help="Maximum number of recordings.")] = None,
    language: Annotated[str, typer.Option(help="Language code of the recordings.")] = "en",
    device: Device = "auto",
    dtype: TrainingDtype = "auto",
    overwrite: Overwrite = False,
    seed: Annotated[int, typer.Option(help="Seed of sample order and held-out split.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Train Medusa heads on a recogniser's own transcripts; run again to resume.

    For a target that is no recogniser this runs 'mmdecode train drafter --kind medusa', which has
    more options.
    """
    from mmdecode.asr.recognizers import recognises
    from mmdecode.checkpoints import config_of, loading, local_path
    from mmdecode.errors import OptionError
    from mmdecode.runs.files import overwriting, refuse_foreign_in
    from mmdecode.train.drafters.medusa import MedusaOptions, train_from_manifest

    refuse_foreign_in(out, overwrite, but=["README.md"])
    with loading(model):
        kind_of_model = config_of(local_path(model)).model_type
    if not recognises(kind_of_model):
        if vocabulary:
            raise OptionError("--vocabulary needs a recogniser as target; leave it out")
        drafter(
            model,
            out,
            str(data),
            kind="medusa",
            heads=heads,
            limit=limit,
            device=device,
            dtype=dtype,
            overwrite=overwrite,
            seed=seed,
            json=json,
        )
        return

    options = MedusaOptions(
        kind=kind, num_heads=heads, epochs=epochs, nodes=nodes, vocabulary=vocabulary, seed=seed
    )
    with overwriting(overwrite):
        report = train_from_manifest(
            model,
            data,
            out,
            options,
            limit=limit,
            device=device,
            dtype=dtype,
            language=language,
            overwrite=overwrite,
        )
    tree = report["expected_tokens_per_pass_tree"]
    console.print(
        f"heads in [bold]{out}[/bold]; held-out tokens per pass: chain "
        f"{report['expected_tokens_per_pass_chain']}, tree {tree}{_compare(f'medusa:path={out}')}"
    )
    if json:
        emit_json(report)


@app.command()
def ctc(
    model: Annotated[
        str,
        typer.Option(help=model_help("The recogniser", "UsefulSensors/moonshine-tiny")),
    ],
    data: Annotated[
        Path,
        typer.Option(help="Table with a 'path' per recording, audio folder or zoo:real-clips."),
    ],
    out: Annotated[Path, typer.Option(help="Output folder of the head.")],
    vocabulary: Annotated[int, typer.Option(help="Maximum number of subwords.")] = 1000,
    width: Annotated[int, typer.Option(help="Width of the head's convolutions.")] = 288,
    epochs: Annotated[int, typer.Option(help="Passes over the samples.")] = 15,
    limit: Annotated[int | None, typer.Option(help="Maximum number of recordings.")] = None,
    language: Annotated[str, typer.Option(help="Language code of the recordings.")] = "en",
    device: Device = "auto",
    dtype: TrainingDtype = "auto",
    overwrite: Overwrite = False,
    seed: Annotated[int, typer.Option(help="Seed of sample order and held-out split.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Train a CTC head on a recogniser's own transcripts, for --draft ctc:head=FOLDER.

    The recordings need no texts. Their encoder states are kept in memory, in half precision.
    """
    from mmdecode.runs.files import overwriting
    from mmdecode.train.drafters.ctc import CTCOptions, train_from_manifest

    options = CTCOptions(vocabulary=vocabulary, inner=width, epochs=epochs, seed=seed)
    with overwriting(overwrite):
        report = train_from_manifest(
            model,
            data,
            out,
            options,
            limit=limit,
            device=device,
            dtype=dtype,
            language=language,
            overwrite=overwrite,
        )
    errors = f"{report['word_errors']:.1%}"
    console.print(
        f"head in [bold]{out}[/bold]; word error rate against the model's own "
        f"held-out transcripts: {errors}{_compare(f'ctc:head={out}')}"
    )
    if json:
        emit_json(report)


def _compare(draft: str) -> str:
    """Returns how to find out whether a trained draft saves time."""
    return f"; whether they save time: mmdecode bench asr --draft {draft}"


@app.command()
def drafter(
    model: Annotated[
        str,
        typer.Option(help=model_help("The target", "llava-hf/llava-1.5-7b-hf")),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the drafter and the training state.")],
    data: Annotated[
        str,
        typer.Option(
            help="Table of questions (with or without images) or of prompts, or zoo:scenes. "
            "For a class-conditional image model leave it at zoo:scenes: its classes are used."
        ),
    ] = "zoo:scenes",
    kind: Annotated[
        str,
        typer.Option(
            help="Kind of drafter: 'eagle', 'eagle3', 'vispec', 'dream', 'flash', 'hydra', "
            "'kangaroo', 'medusa' or 'text'."
        ),
    ] = "eagle",
    steps: Annotated[int | None, typer.Option(help="Maximum number of steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Requests per step.")] = None,
    rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    passes: Annotated[
        int | None,
        typer.Option(help="Passes per step; from the second on, the drafter reads its own states."),
    ] = None,
    length: Annotated[int, typer.Option(help="Length of the drafted chain in evaluations.")] = 4,
    held_out: Annotated[
        int, typer.Option(help="Requests held out to choose the best checkpoint.")
    ] = 32,
    tested: Annotated[
        int,
        typer.Option(help="More held-out requests for the reported numbers; 0: use --held-out."),
    ] = 64,
    temperature: Annotated[
        float, typer.Option(help="Temperature of the target's text answers; 0: greedy.")
    ] = 0.0,
    vocabulary: Annotated[
        int | None, typer.Option(help="Vocabulary size of eagle3's head. Default: the target's.")
    ] = None,
    queries: Annotated[
        int | None, typer.Option(help="Queries per image. Default: 2 for vispec, 64 for flash.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="For flash: drafted tokens per pass.")] = 5,
    heads: Annotated[int, typer.Option(help="For medusa and hydra: number of heads.")] = 4,
    feature_sampling: Annotated[
        bool, typer.Option(help="For eagle and vispec: FSPAD, where embeddings gate features.")
    ] = False,
    exit_layer: Annotated[
        int, typer.Option(help="For kangaroo: number of the target's layers to draft with.")
    ] = 2,
    limit: Annotated[int | None, typer.Option(help="Maximum number of requests.")] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", help="Drafter to start from, of the same kind; for vispec also an eagle."
        ),
    ] = None,
    device: Device = "auto",
    dtype: TrainingDtype = "auto",
    overwrite: Overwrite = False,
    push: Annotated[
        str | None, typer.Option(help="Upload the result to USER/NAME on the Hugging Face Hub.")
    ] = None,
    private: Annotated[
        bool | None, typer.Option(help="Whether --push creates a private repository.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Train a drafter on a decoder-only model's own states and answers; run again to resume.

    Heads for a speech recogniser are trained by 'mmdecode train medusa'. 'accelerate launch -m
    mmdecode train drafter ...' trains with several GPUs, a batch each.
    """
    from dataclasses import replace

    from mmdecode.errors import OptionError
    from mmdecode.runs.files import overwriting
    from mmdecode.train import hub
    from mmdecode.train.distributed import precision_of
    from mmdecode.train.drafters import trainer as recipe

    usual = recipe.Options(kind=kind)
    pace: dict[str, Any] = {"steps": steps, "batch": batch_size, "peak_rate": rate, "seed": seed}
    options = replace(
        usual,
        passes=passes,
        length=length,
        held_out=held_out,
        tested=tested,
        temperature=temperature,
        draft_vocabulary=vocabulary,
        queries=queries,
        tokens=tokens,
        heads=heads,
        feature_sampling=feature_sampling,
        exit_layer=exit_layer,
        fit=replace(usual.fit, **{k: v for k, v in pace.items() if v is not None}),
    )
    if push is not None:
        hub.check_push(push)
    elif private is not None:
        raise OptionError("--private and --no-private need --push; give --push USER/NAME too")
    with overwriting(overwrite):
        card = recipe.train_from(
            model,
            data,
            out,
            options,
            limit=limit,
            device=device,
            precision=precision_of(dtype, model, device),
            start=start,
        )
    if not card:  # not the leading process
        return
    console.print(
        f"drafter in [bold]{out}[/bold]; with a chain of {length}, a pass commits "
        f"{card['tokens_per_pass']} tokens of held-out answers; the target's distribution has an "
        f"entropy of {card['entropy_bits_per_token']} bits per token"
    )
    if push is not None:
        console.print(f"pushed to {hub.push(out, push, private)}")
    if json:
        emit_json(card)


@app.command("alignment-heads")
def alignment_heads(
    model: Annotated[
        str,
        typer.Option(help=model_help("A Whisper model", "openai/whisper-small")),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Table with a 'path' per recording, or folder of audio. Default: sentences of the "
            "shipped models' training, spoken by espeak-ng.",
            exists=True,
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Forced aligner whose times are the reference: ctc[:model=NAME].")
    ] = "ctc",
    limit: Annotated[int, typer.Option(help="Number of recordings.")] = 80,
    most: Annotated[int, typer.Option(help="Maximum number of attention heads.")] = 10,
    out: Annotated[
        Path | None,
        typer.Option(help="Model folder whose generation_config.json gets the heads."),
    ] = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Find the cross-attention heads that align text with audio, for word timestamps."""
    from mmdecode.asr.transcriber import load
    from mmdecode.runs.files import overwriting
    from mmdecode.train import alignment_heads as recipe

    with overwriting(overwrite):
        if out is not None:
            recipe.config_for_heads(out)  # checked before anything is computed
        target, processor = load(model, device, None)
        rate = processor.feature_extractor.sampling_rate
        waves = recipe.zoo_speech(limit) if data is None else recipe.recordings(data, rate, limit)
        report = recipe.find_heads(target, processor, waves, method, most)
        if out is not None:
            recipe.write_heads(out, report["alignment_heads"])
    console.print(
        f"alignment_heads {report['alignment_heads']}, median error in seconds by number of heads "
        f"{report['median_error_s_by_heads']}"
    )
    if json:
        emit_json(report)


@app.command()
def corrector(
    data: Annotated[
        list[Path],
        typer.Option(help="N-best lists with references; repeatable.", exists=True),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the corrector and the training state.")],
    model: Annotated[
        str | None,
        typer.Option(help="Causal or seq2seq model, as google/flan-t5-base: a folder or a Hub id."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="'lora', 'full' (all weights), or 'scratch' (without --model).")
    ] = "lora",
    template: Annotated[
        str | None,
        typer.Option(help="Prompt: n_best, 1_best, flanec or a text with {best}, {others}."),
    ] = None,
    n_best: Annotated[int | None, typer.Option(help="Maximum hypotheses in a prompt.")] = None,
    steps: Annotated[int | None, typer.Option(help="Maximum number of steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="N-best lists per step.")] = None,
    rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    rank: Annotated[int, typer.Option(help="Rank of the LoRA adapters.")] = 16,
    targets: Annotated[
        str, typer.Option(help="Layers with LoRA adapters: attention or all-linear.")
    ] = "attention",
    device: Device = "auto",
    overwrite: Overwrite = False,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Train a corrector of N-best lists; run again to resume. A fifth of the lists is held out."""
    from dataclasses import replace

    from mmdecode.asr.correction.n_best_lists import read_lists
    from mmdecode.runs.files import overwriting
    from mmdecode.train import corrector as recipe

    usual = recipe.FROM_SCRATCH if method == "scratch" else recipe.CorrectorOptions(method=method)
    asked: dict[str, Any] = {"template": template, "count": n_best}
    pace: dict[str, Any] = {"steps": steps, "batch": batch_size, "peak_rate": rate, "seed": seed}
    options = replace(
        usual,
        prompts=replace(usual.prompts, **{k: v for k, v in asked.items() if v is not None}),
        rank=rank,
        targets=targets,
        fit=replace(usual.fit, **{k: v for k, v in pace.items() if v is not None}),
    )
    lists = [one for file in data for one in read_lists(file)]
    with overwriting(overwrite):
        card = recipe.train_from_lists(model, lists, out, options, device)
    found = card["development_decoded"]
    console.print(
        f"corrector in [bold]{out}[/bold]; on {found['lists']} held-out lists the WER is "
        f"{found['wer_best']:.2%} for the best hypothesis, {found['wer_corrected']:.2%} corrected"
    )
    if json:
        emit_json(card)


@app.command()
def zoo(
    name: Annotated[
        str,
        typer.Argument(help=f"One of {', '.join(RESULTS)}."),
    ],
    work: Annotated[Path, typer.Option(help="Folder for corpus and training state.")] = Path(
        "outputs/zoo"
    ),
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result; default: WORK/model.")
    ] = None,
    overwrite: Overwrite = False,
    minutes: Annotated[
        float, typer.Option(help="Minutes of training for whisper-synth, without synthesis.")
    ] = 80.0,
    base: Annotated[
        str, typer.Option(help="For Medusa heads and the aligner: the Whisper they are made for.")
    ] = "zoo:whisper-synth",
    device: Annotated[
        str, typer.Option(help="cpu, or for llamagen and var cuda, which trains for more steps.")
    ] = "cpu",
    json: JsonFlag = False,
) -> None:
    """Retrain a zoo model; speech models need espeak-ng. Run again to resume."""
    from mmdecode.errors import OptionError, UnknownNameError
    from mmdecode.runs.files import overwriting, refuse_foreign_in
    from mmdecode.train.zoo.recipes import run_recipe

    if name not in RESULTS:
        raise UnknownNameError.of("zoo recipe", name, RESULTS)
    if device != "cpu" and name not in ON_CUDA:
        raise OptionError(
            f"--device {device} for {name}, which is trained on the CPU; leave it out, or retrain "
            f"a model that can be trained on CUDA: {', '.join(ON_CUDA)}"
        )
    folder = out or work / RESULTS[name]
    with overwriting(overwrite):
        if name != "aligner":  # it is written into a model's folder, and checks its own file
            for part in (folder, *(one for one in folder.glob("*") if one.is_dir())):
                refuse_foreign_in(part)
        result = run_recipe(name, work, folder, minutes, base, device)
    console.print(f"result in [bold]{folder}[/bold]")
    if json:
        emit_json(result)
