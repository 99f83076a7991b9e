"""Options of ``mmdecode evaluate``, one vocabulary over all tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mmdecode.cli.flags import (
    Device,
    DeviceMap,
    Dtype,
    Language,
    MaxNewTokens,
    NoiseBy,
    Overwrite,
    PromptCacheBytes,
    Quantize,
    Resume,
    Timestamps,
    model_help,
)
from mmdecode.cli.flags import Task as SpeechTask

Texts = list[str] | None


def _option(kind: Any, text: str, *flags: str, **how: Any) -> Any:
    return Annotated[kind, typer.Option(*flags, help=text, **how)]


OPTIONS: dict[str, Any] = {
    "data": _option(
        Texts,
        "The task's data: a file or folder, 'zoo' for shipped questions, or zoo:NAME for shipped "
        "recordings; see above.",
    ),
    "model": _option(
        str | None,
        model_help("The model", "llava-hf/llava-1.5-7b-hf or openai/whisper-small"),
    ),
    "guide": _option(
        Texts,
        "A guide, as name or name:key=value,...; 'mmdecode methods guide' lists them. The plain "
        "model ('none') is always included. Repeat it for more.",
        "--guide",
    ),
    "draft": _option(
        Texts,
        "A drafter, as name or name:key=value,...; it is compared with decoding without a draft. "
        "Repeat it for more.",
    ),
    # questions on images
    "images": _option(Path | None, "Folder of the images."),
    "part": _option(
        str,
        "Part of the zoo's sets: development to tune on, test to report.",
    ),
    "split": _option(
        Texts, "POPE's random, popular or adversarial; default: all. Repeat for more."
    ),
    "prefix": _option(str, "First characters of the files' names, if --data is a folder."),
    "prompt": _option(str | None, "The instruction for the model; default: the data's own."),
    "synonyms": _option(
        Path | None, "File with a line 'NAME, SYNONYM, ...' per object; default: COCO's."
    ),
    "sample": _option(
        bool | None,
        "Only sample, or only decode greedily; default: both.",
        "--sample/--greedy",
    ),
    "seeds": _option(int, "Number of seeds of each sampled mode.", min=1),
    "controls": _option(
        bool,
        "Also run controls, which a good guide has to beat: plain decoding (greedy and, with "
        "sampling, sampled), with sampling a plausibility cut alone and a matched temperature; for "
        "yes/no questions an instruction to answer yes, the flip of answers with a small margin, "
        "and a constant shift of the margin.",
        "--controls/--no-controls",
    ),
    "suffix": _option(str, "Appended to each question: none, one-word, short, or any other text."),
    "parser": _option(
        str, "Rule that parses answers: leading, original, vcd, lmms, vlmevalkit or mme."
    ),
    "redraw": _option(
        bool,
        "Sample the yes/no answers of all seeds from the logits of one forward pass, unless the "
        "guide is random; or decode every seed.",
        "--redraw/--no-redraw",
    ),
    "prompt_cache": PromptCacheBytes,
    "noise_by": NoiseBy,
    # recordings
    "hypotheses": _option(
        Texts,
        "Score these transcripts instead of a model: [NAME=]FILE, as .jsonl, .csv, .tsv or .trn, "
        "or a folder of .txt. Without --data, FILE must be a result file of the Open ASR "
        "leaderboard, which contains references. Repeat it for more.",
    ),
    "normalizer": _option(str, "Text normaliser: none, basic, whisper (English) or leaderboard."),
    "scorer": _option(
        str | None,
        "How words are aligned: plain, merge (compounds match their parts) or sclite; default: "
        "merge with the leaderboard's normaliser, else plain.",
    ),
    "only_scored": _option(
        bool | None,
        "Leave out recordings without words in the reference, as the leaderboard does; default "
        "with its normaliser.",
        "--only-scored/--all-references",
    ),
    "group": _option(
        str | None,
        "Manifest column that is the unit of the bootstrap; default: speaker, if known.",
    ),
    "margin": _option(float, "Tolerated loss (non-inferiority margin), in WER points.", min=0),
    "points": _option(
        str | None,
        "Also compute PIER, the error rate of chosen words: tags (<tag ...> spans in references) "
        "or a script, such as latin; default: tags, if references have any.",
    ),
    "split_hyphens": _option(bool, "For PIER, split words at hyphens.", "--split-hyphens"),
    "segmented": _option(
        bool,
        "Texts in Japanese, Chinese, Thai and the like are split into words by spaces already. "
        "Without this option their characters are scored.",
        "--segmented",
    ),
    "hallucinations": _option(
        bool,
        "Also count hallucinations: words on non-speech, runs of insertions, repetition.",
        "--hallucinations",
    ),
    "punctuation": _option(
        bool, "Also score case, and , . ? ! after aligned words.", "--punctuation"
    ),
    "language": Language,
    "task": SpeechTask,
    "timestamps": Timestamps,
    "fallback": _option(
        bool,
        "Decode low-confidence windows again at higher temperatures, as Whisper does.",
        "--fallback/--no-fallback",
    ),
    "speech": _option(
        Texts,
        "Speech to measure word errors on: a manifest with texts, zoo (shipped clips, clean and "
        "with noise), or none; default: zoo. Repeat it for more sets.",
    ),
    "recordings": _option(
        Path | None, "Manifest of your own recordings without speech, added to the clips."
    ),
    "clips": _option(int, "Clips of each kind of sound and level.", min=2),
    "seconds": _option(float, "Length of each clip, in seconds.", min=1),
    "padding": _option(
        Literal["silence", "zeros", "auto"],
        "Padding of the last window; openai/whisper pads with silence.",
    ),
    # N-best lists
    "references": _option(
        Path | None, "Manifest with the reference texts of lists that have none."
    ),
    "methods": _option(
        Texts,
        "Methods, separated by commas: mbr, mbr+scores (minimum Bayes risk), table (learned "
        "replacements), lm:MODEL, lm-total:MODEL, lm+scores:MODEL (language model scores). The "
        "first hypotheses (1best) are always included. Repeat it for more.",
    ),
    "corrector": _option(
        Texts,
        model_help("A generative corrector, causal or seq2seq", "google/flan-t5-base")
        + " Repeat it for more.",
    ),
    "train_share": _option(
        float,
        "Share of the lists that a corrector was trained on; not tested.",
        min=0,
        max=1,
    ),
    "dev_share": _option(float, "Share of the lists to fit settings on; not tested.", min=0, max=1),
    # image models
    "n": _option(int, "Images of each mode.", "--count", "-n", min=2),
    "modes": _option(
        str,
        "Ways to sample, separated by commas: ar (or plain), exact, fast, relaxed. Plain decoding "
        "is always included, twice: with --seed, and with another seed.",
    ),
    "also": _option(
        Texts,
        "Another mode, as 'DRAFTER + ACCEPTANCE RULE', for example 'jacobi:window=16 + "
        "lantern:delta=0.1'. Repeat it for more.",
    ),
    "class_id": _option(
        list[int] | None, "A class to generate; default: all, in turn. Repeat it for more."
    ),
    "prompts": _option(Path | None, "For text-to-image models: a file with one prompt per line."),
    "guidance": _option(
        float | None, "Scale s of classifier-free guidance; 1: off; default: the model's."
    ),
    "temperature": _option(float | None, "Sampling temperature; default: the model's."),
    "top_k": _option(int | None, "Top-k filter; 0: off; default: the model's."),
    "top_p": _option(float | None, "Top-p filter; 1: off; default: the model's."),
    "classifier": _option(
        str,
        "Classifier of the images: a folder in timm's format, zoo:NAME, none, or auto: "
        "zoo:scene-classifier for zoo:llamagen-scenes, else none.",
    ),
    "real": _option(
        str,
        "Images that the model was not trained on: a folder, scenes (rendered), none, or auto: "
        "scenes for zoo:llamagen-scenes, else none.",
    ),
    "training": _option(
        Path | None, "Folder of the model's training images, to detect memorised samples."
    ),
    "permutations": _option(int, "Permutations of images in each two-sample test.", min=99),
    # runs
    "batch_size": _option(int, "Items decoded at once.", min=1),
    "max_new_tokens": MaxNewTokens,
    "warmup": _option(int, "Untimed runs of the first batch of each mode.", min=0),
    "limit": _option(int | None, "Use only this many items, for a smoke test.", min=1),
    "output": _option(Path | None, "Folder for rows, tables, figures and HTML page.", "--out"),
    "resume": Resume,
    "overwrite": Overwrite,
    "rescore": _option(Path | None, "Folder of an earlier run: score its rows again."),
    "resamples": _option(int, "Number of bootstrap samples.", min=1),
    "device": Device,
    "device_map": DeviceMap,
    "dtype": Dtype,
    "quantize": Quantize,
    "seed": _option(int, "First seed of sampling, and seed of guides and of every bootstrap."),
}
"""Options by the name under which a task gets their value."""


def with_help(option: Any, text: str) -> Any:
    """Returns an option with another help text."""
    kind, given = option.__origin__, option.__metadata__[0]
    own = typer.Option(*(given.param_decls or ()), help=text, min=given.min, max=given.max)
    return Annotated[kind, own]
