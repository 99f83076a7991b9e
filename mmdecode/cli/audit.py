"""``mmdecode audit``: checks that drafted output follows the model's own distribution."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from mmdecode import registry
from mmdecode.checkpoints import config_of, loading, local_path
from mmdecode.cli import flags
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.errors import InputError, MMDecodeError, OptionError, UnsupportedModelError
from mmdecode.runs.console import (
    console,
    only_our_output,
    out,
    print_line,
    progress_bar,
    warnings_shown,
)

if TYPE_CHECKING:
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.evaluation.audit.audit import AuditReport, Finding
    from mmdecode.evaluation.audit.plain import Case

ROWS = 30
"""Most sequences that the table shows; sequences that differ come first."""


def command(
    model: Annotated[
        str, flags.model_option("The model", "openai/whisper-small")
    ] = "zoo:whisper-synth",
    draft: str | None = None,
    guide: str | None = None,
    accept: str = "auto",
    data: flags.Texts = None,
    tokens: Path | None = None,
    sample: bool = False,
    temperature: Annotated[float, typer.Option(min=0.01)] = 1.0,
    draws: flags.AtLeast1 = 8,
    max_new_tokens: flags.Limit = None,
    language: str | None = None,
    timestamps: bool = True,
    device: str = "auto",
    dtype: str = "auto",
    quantize: flags.Rounding = None,
    seed: int = 0,
    limit: flags.Limit = None,
    json: JsonFlag = False,
) -> None:
    """Check that a draft does not change the output of your model, on your device and dtype.

    In float32 the tokens are compared with those of plain generate and of this library's loop
    without a draft. Where rounding makes tokens differ, as in half precision, the model scores the
    drafted tokens as plain generate would: the audit measures by how much it prefers another token,
    and whether that is more than the measured noise of scoring several tokens in one pass. The
    verdict is 'passes', 'fails' or, if the noise is as large as the model's own preferences,
    'inconclusive'. The exit code is 0 only if the verdict is 'passes'.

    With --quantize the rounded model is audited, and its distance to the float model, which is
    another model, is printed too.

    Long recordings are cut into windows, and each window is one input. Inputs are decoded one at a
    time, so errors that occur only in batches are not found.

    For example:

      mmdecode audit --model openai/whisper-small --draft lookup --data recordings/ --dtype bf16

      mmdecode audit --model my-llama --draft lookup --data prompts.txt

      mmdecode audit --model my-llama --data prompts.txt --tokens from_my_server.jsonl

    Options:
        draft: Drafter, as name or name:key=value,...; see 'mmdecode methods draft'.
        accept: The acceptance rule; see 'mmdecode methods accept'.
        data: For a Whisper an audio file or a folder of such files, else a text file with one
            prompt per line. Repeat it for more. Default for a Whisper: the shipped recordings.
        tokens: File with generated token ids to audit instead of a draft: JSON or JSON lines, with
            lists in the order of the data, or objects with 'name' and 'tokens'.
        sample: Audit sampling instead of greedy decoding.
        temperature: Temperature for --sample; the checkpoint's top-k, top-p and similar settings
            are not used.
        draws: Sequences per input, if --sample is judged by statistics.
        max_new_tokens: Most tokens per input; default for text models: 64. With --tokens: the limit
            of the run that generated them, if it had one.
        timestamps (--timestamps/--no-timestamps): Predict timestamps (Whisper).
        seed: Seed of the noise that sampling uses.
        limit: Audit only this many inputs.
    """
    from transformers import GenerationMixin

    from mmdecode.asr.correction.language_models import load as load_text
    from mmdecode.asr.recognizers.generic import GenericRecognizer
    from mmdecode.asr.transcriber import load as load_speech
    from mmdecode.asr.transcriber import make_options
    from mmdecode.decoder import Decoder
    from mmdecode.evaluation.audit.audit import audit
    from mmdecode.evaluation.audit.plain import UNCUT, Plain, distance
    from mmdecode.quantization.models import format_of, is_quantized

    if tokens is not None and (draft or guide or accept != "auto"):
        raise OptionError(
            "--tokens audits tokens that are already generated; leave out --draft, --guide and "
            "--accept"
        )
    if not sample and temperature != 1.0:
        raise OptionError(f"--temperature {temperature} needs --sample")
    with loading(model):
        family = config_of(local_path(model)).model_type
    only_our_output()
    speech = family == "whisper"
    if not speech and GenericRecognizer.fits(family):
        raise UnsupportedModelError(
            f"{model} is a speech recogniser ({family}); audit supports no recognisers but "
            "Whisper; name a Whisper or a language model with --model"
        )
    load: Callable[..., Any] = load_speech if speech else load_text
    sources = _recordings(data) if speech else _prompts(model, data)
    given = {"language": language, "timestamps": timestamps, "max_new_tokens": max_new_tokens}
    asked = make_options(given) if speech else None
    network, processor = load(model, device, dtype, quantize)
    cases, failures = _cases(network, processor, sources, asked, limit)
    if not cases:
        raise InputError("none of the inputs can be read: " + failures[0]["error"])
    decoder, foreign = None, None
    if tokens is not None:
        foreign = read_tokens(tokens, [case.name for case in cases])
    else:
        at_hand = registry.context_of(network, processor, model)
        drafter = registry.create("draft", draft, **at_hand) if draft else None
        guiding = registry.create("guide", guide, **at_hand) if guide else None
        decoder = Decoder(drafter, guiding, accept, seed)
    options: dict[str, Any] = {**UNCUT, "temperature": temperature} if sample else {}
    if not speech:
        longest = max((len(row) + 1 for row in (foreign or {}).values()), default=0)
        options["max_new_tokens"] = max_new_tokens or max(64, longest)

    def plain_of(network: Any) -> Plain:
        # Whisper's own generate cuts, repeats and strips; what it calls does none of that
        generate = partial(GenerationMixin.generate, network) if speech else None
        return Plain(network, generate, **options)

    plain = plain_of(network)
    with progress_bar() as bar:
        task = bar.add_task("auditing", total=len(foreign or cases))
        report = audit(
            network,
            cases,
            decoder,
            tokens=foreign,
            sample=sample,
            draws=draws,
            plain=plain,
            progress=lambda name: bar.advance(task),
        )
    apart = None
    if quantize is not None:
        other, processor = load(model, device, dtype)
        if not is_quantized(other):
            others, _ = _cases(other, processor, sources, asked, limit)
            apart = distance(plain, plain_of(other), cases, others)
    if json:
        audited = {"model": model, "draft": draft, "guide": guide, "accept": accept, "seed": seed}
        more = {"tokens": report.tokens, "given": audited, "failures": failures}
        if quantize is not None:
            audited["quantize"] = quantize
            more["distance"] = apart
        emit_json(dataclasses.asdict(report) | more)
    else:
        out.print(_table(report, format_of(plain.model)))
        colour = {"passes": "green", "fails": "red", "inconclusive": "yellow"}[report.verdict]
        print_line(report.words, out, colour)
        if apart is not None:
            print_line(apart.words)
    for failure in failures:
        print_line(f"failed: {failure['error']}", console, "red")
    if failures or report.verdict != "passes":
        raise typer.Exit(1)


def _recordings(data: list[str] | None) -> dict[str, str]:
    """Paths of the recordings by name; without ``data``, of those that ship."""
    from mmdecode.asr.output.inputs import find_audio
    from mmdecode.zoo.speech import speech_test

    if not data:
        return {clip.name: str(clip.path) for clip in speech_test()}
    with warnings_shown("always"):  # of links that are skipped
        return {path: path for path in find_audio(data)}


def _prompts(model: str, data: list[str] | None) -> dict[str, str]:
    """Prompts by name: the lines of the files."""
    if not data:
        raise OptionError(f"{model} is a text model; give --data FILE with one prompt per line")
    lines: list[str] = []
    for path in data:
        try:
            lines += Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"prompts {path}: {error}; expected a text file in UTF-8") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{', '.join(data)}: no prompt; expected one per line")
    return {f"line {index}": prompt for index, prompt in enumerate(prompts, 1)}


def _cases(
    model: Any,
    processor: Any,
    sources: Mapping[str, str],
    options: TranscribeOptions | None,
    limit: int | None,
) -> tuple[list[Case], list[dict[str, str]]]:
    """Makes a case of each prompt or, with ``options``, of each window of the recordings.

    Returns:
        The cases; and source and error of each recording that cannot be read.
    """
    from mmdecode.evaluation.audit.plain import Case

    cases: list[Case] = []
    failures = []
    for name, source in list(sources.items())[:limit]:
        if options is None:
            encoded = processor(source, return_tensors="pt").to(model.device)
            inputs = {key: encoded[key] for key in ("input_ids", "attention_mask")}
            cases.append(Case(name=name, inputs=inputs))
            continue
        try:
            cases += speech_cases(model, processor, name, source, options)
        except MMDecodeError as error:
            failures.append({"source": source, "error": str(error)})
    return cases[:limit], failures


def speech_cases(
    model: Any, processor: Any, name: str, path: str, options: TranscribeOptions | None = None
) -> Iterator[Case]:
    """Yields the windows of a recording as inputs of ``GenerationMixin.generate``.

    Args:
        model: A ``WhisperForConditionalGeneration``.
        processor: Its ``WhisperProcessor``.
        name: Name of the recording and of its first window; the second is called ``name#2``.
        path: Path of the recording.
        options: Options, of which language, task, timestamps and ``max_new_tokens`` are used;
            ``None``: the defaults.

    Raises:
        InputError: The recording cannot be read.
    """
    import torch
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
    from transformers.modeling_outputs import BaseModelOutput

    from mmdecode.asr.audio.reading import source_of
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.asr.recognizers.whisper import WhisperRecognizer
    from mmdecode.evaluation.audit.plain import Case

    options = options or TranscribeOptions()
    ours = WhisperRecognizer(model, processor, options)
    speech = ours.open(source_of(path, ours.rate, 0))
    for index, seek in enumerate(range(0, speech.frames, ours.window_frames)):
        features = ours.read(speech, seek, ours.window_frames)[None].to(model.device, model.dtype)
        with torch.no_grad():
            audio = BaseModelOutput(last_hidden_state=ours.encoder(features).last_hidden_state)
        spoken = ours.prompts.language
        if ours.detects:
            spoken = int(model.detect_language(encoder_outputs=audio)[0])
        ids = torch.tensor([ours.prompts.initial(spoken)], device=model.device)
        width, most = ids.shape[1], model.config.max_target_positions
        if options.max_new_tokens is not None:
            most = min(most, width + options.max_new_tokens)
        inputs = {"encoder_outputs": audio, "decoder_input_ids": ids, "max_length": most}
        if options.timestamps:
            stamps = WhisperTimeStampLogitsProcessor(model.generation_config, width)
            inputs["logits_processor"] = [stamps]
        yield Case(name=name if not index else f"{name}#{index + 1}", inputs=inputs)


def read_tokens(path: Path, names: Sequence[str]) -> dict[str, list[int]]:
    """Reads generated token ids, and returns them by the name of their input.

    Args:
        path: JSON or JSON lines: lists in the order of ``names``; objects with ``tokens`` and
            ``name`` (or ``source``); or one object that maps names to lists.
        names: Names of the inputs; the file may have file names without their folders instead.

    Raises:
        InputError: The file cannot be read, or names an input that does not exist.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"tokens {path}: {error}") from error
    try:
        try:
            rows = json_module.loads(text)
        except ValueError:
            rows = [json_module.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise InputError(f"tokens {path}: {error}; expected JSON or JSON lines") from error
    if isinstance(rows, Mapping) and "tokens" not in rows:
        rows = [{"name": name, "tokens": row} for name, row in rows.items()]
    if not isinstance(rows, list) or (rows and isinstance(rows[0], int)):
        rows = [rows]
    known = {name: [name] for name in names}
    for whole in names:
        if Path(whole).name not in names:
            known.setdefault(Path(whole).name, []).append(whole)
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        name, given = names[index] if index < len(names) else None, f"row {index + 1}"
        if isinstance(row, Mapping):
            given = str(row.get("name", row.get("source", name)))
            meant, row = known.get(given, []), row.get("tokens")
            if len(meant) > 1:
                raise InputError(
                    f"tokens {path}: {given} may mean {' or '.join(meant)}; give the whole path"
                )
            name = meant[0] if meant else None
        if name is None or name in found:
            raise InputError(
                f"tokens {path}: {given} is {'given twice' if name else 'no input'}; expected one "
                f"row for each input: {', '.join(names[:3])}, ..."
            )
        if not isinstance(row, list) or not all(type(token) is int for token in row):
            raise InputError(f"tokens {path}: {given} is not a list of token ids (integers)")
        found[name] = row
    return found


def _table(report: AuditReport, rounded: str | None) -> Table:
    weights = f", {rounded} weights" if rounded else ""
    title = (
        f"{report.model}, {report.dtype}{weights} on {report.device}: draft {report.draft}, guide "
        f"{report.guide}, rule {report.rule}; reference: {report.reference}"
    )
    table = Table(
        "input", "tokens", "as generate", "as undrafted", "flips", "largest gap", "first difference"
    )
    table.title, table.title_justify = title, "left"
    same = {None: "-", True: "yes", False: "no"}
    rows = sorted(
        report.judged, key=lambda item: (item.fault is None, not item.cut, item.first is None)
    )
    for item in rows[:ROWS]:
        table.add_row(
            escape(item.case),
            str(item.tokens),
            same[item.same_as_generate],
            same[item.same_as_undrafted],
            str(item.flips),
            f"{item.worst_gap:.2g}",
            f"cut at {item.tokens}" if item.cut else _difference(item.fault or item.first),
        )
    if len(rows) > ROWS:
        table.caption = f"and {len(rows) - ROWS} more"
    return table


def _difference(finding: Finding | None) -> str:
    if finding is None:
        return ""
    token, plain = ("ended" if one is None else one for one in (finding.token, finding.plain))
    kind = "rounding" if finding.explained else "FAULT"
    return f"{kind} at {finding.position}: {token} for {plain}, gap {finding.gap:.2g}"
