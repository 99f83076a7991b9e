"""Names of drafters, rules, guides, correctors, adapters and checkpoints, and what they stand for.

A method in a string is ``name`` or ``name:key=value,key=value``; guides compose with ``+``. Nothing
here imports torch: a method's module is imported when the method is asked for.

Outsiders register theirs with an entry point, no change here needed:

    [project.entry-points."mmdecode.draft"]
    mydraft = "mypackage.draft:MyDraft"

The groups are ``mmdecode.draft``, ``mmdecode.accept``, ``mmdecode.guide``, ``mmdecode.correct``,
``mmdecode.adapters``, ``mmdecode.recognizers`` and ``mmdecode.checkpoints``. A plug-in class may
carry ``summary``, ``law`` and ``source`` as class attributes; ``mmdecode methods`` shows them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import re
import sys
import warnings
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from mmdecode.errors import (
    MMDecodeError,
    OptionError,
    UnknownNameError,
    UnsupportedModelError,
    did_you_mean,
    refuse_unknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "KINDS",
    "Entry",
    "adapter_class",
    "adapter_for",
    "create",
    "create_all",
    "describe",
    "image_adapter_class",
    "image_adapter_for",
    "names",
    "parse",
    "recognizer_class",
    "resolve",
    "resolve_all",
    "scheme_class",
    "schemes",
]

KINDS = ("draft", "accept", "guide", "correct", "adapters", "recognizers", "checkpoints")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One registered name.

    Attributes:
        kind: One of ``KINDS``.
        name: What a user types.
        target: Where the class is, as ``module:Attr``.
        summary: One line.
        law: ``exact`` (the output law is the guide's), ``exact for v`` (a law of its own),
            ``heuristic``, or ``-`` where the question belongs to another part.
        source: The paper.
        plugin: The distribution an entry point came from; empty for our own.
    """

    kind: str
    name: str
    target: str
    summary: str = ""
    law: str = "-"
    source: str = ""
    plugin: str = ""


_BUILTIN = (
    Entry(
        kind="draft",
        name="lookup",
        target="mmdecode.draft.lookup:PromptLookup",
        summary="copies what followed the last tokens where they occurred before",
        law="exact",
        source="Saxena 2023, prompt lookup decoding (PLD)",
    ),
    Entry(
        kind="draft",
        name="assistant",
        target="mmdecode.draft.assistant:Assistant",
        summary="a smaller model drafts a chain",
        law="exact",
        source="Leviathan et al. 2023",
    ),
    Entry(
        kind="draft",
        name="amateur",
        target="mmdecode.draft.amateur:Amateur",
        summary="the model itself drafts, without the image",
        law="exact",
        source="speculative contrastive decoding, Yuan et al. 2024",
    ),
    Entry(
        kind="draft",
        name="medusa",
        target="mmdecode.draft.medusa:Medusa",
        summary="extra heads on the model's own last hidden state draft a tree",
        law="exact",
        source="Cai et al. 2024; for Whisper, Segal-Feldman et al. 2024",
    ),
    Entry(
        kind="draft",
        name="hydra",
        target="mmdecode.draft.hydra:Hydra",
        summary="heads on the model's own last state that read what is drafted before them",
        law="exact",
        source="Hydra, Ankner et al. 2024",
    ),
    Entry(
        kind="draft",
        name="eagle",
        target="mmdecode.draft.eagle:Eagle",
        summary="a small layer over the model's own states drafts a tree",
        law="exact",
        source="EAGLE, Li et al. 2024; EAGLE-3, Li et al. 2025",
    ),
    Entry(
        kind="draft",
        name="vispec",
        target="mmdecode.draft.vispec:ViSpec",
        summary="a layer like eagle's that sees a few learned summaries of each image",
        law="exact",
        source="ViSpec, Kang et al. 2025",
    ),
    Entry(
        kind="draft",
        name="dream",
        target="mmdecode.draft.dream:Dream",
        summary="three blocks that cross-attend to the model's own states draft a tree",
        law="exact",
        source="DREAM, Hu et al. 2025",
    ),
    Entry(
        kind="draft",
        name="flash",
        target="mmdecode.draft.flash:Flash",
        summary="several tokens a pass of a layer that sees latents of each image",
        law="exact",
        source="FLASH, Wang et al. 2025",
    ),
    Entry(
        kind="draft",
        name="recycling",
        target="mmdecode.draft.recycling:Recycling",
        summary="a tree of what the model held likely after the same tokens before",
        law="exact",
        source="Luo et al. 2024",
    ),
    Entry(
        kind="draft",
        name="source",
        target="mmdecode.draft.source:Source",
        summary="goes on as a source text does that the output mostly copies",
        law="exact",
        source="Sun et al. 2021 (aggressive decoding); Yang et al. 2023",
    ),
    Entry(
        kind="draft",
        name="jacobi",
        target="mmdecode.draft.jacobi:Jacobi",
        summary="guesses of one pass are the drafts of the next: for image tokens",
        source="Teng et al. 2024",
    ),
    Entry(
        kind="draft",
        name="layer_skip",
        target="mmdecode.draft.layer_skip:LayerSkip",
        summary="some of the model's own layers draft a chain",
        law="exact",
        source="Zhang et al. 2023 (Draft & Verify); LayerSkip, Elhoushi et al. 2024",
    ),
    Entry(
        kind="draft",
        name="kangaroo",
        target="mmdecode.draft.kangaroo:Kangaroo",
        summary="the model's own first layers and a trained adapter draft while they are sure",
        law="exact",
        source="Kangaroo, Liu et al. 2024",
    ),
    Entry(
        kind="draft",
        name="clasp",
        target="mmdecode.draft.layer_search:Clasp",
        summary="the model without the layers that the last tokens could spare drafts a chain",
        law="exact",
        source="CLaSp, Chen et al. 2025",
    ),
    Entry(
        kind="draft",
        name="swift",
        target="mmdecode.draft.layer_search:Swift",
        summary="the model without sublayers that a search found to be spared drafts a chain",
        law="exact",
        source="SWIFT, Xia et al. 2024",
    ),
    Entry(
        kind="draft",
        name="sparse",
        target="mmdecode.draft.sparse:Sparse",
        summary="the model drafts with the image tokens alone that the question attends to most",
        law="exact",
        source="Sparse-to-Dense, Zhang et al. 2025",
    ),
    Entry(
        kind="draft",
        name="lookahead",
        target="mmdecode.draft.lookahead:Lookahead",
        summary="n-grams of the model's own guesses for the places ahead",
        law="exact",
        source="Lookahead Decoding, Fu et al. 2024",
    ),
    Entry(
        kind="draft",
        name="first_of",
        target="mmdecode.draft.first_of:FirstOf",
        summary="a text at hand, such as the last window's, before another draft",
        law="exact",
        source="arXiv:2304.04487, Yang et al. 2023, in front of any draft",
    ),
    Entry(
        kind="draft",
        name="adaptive",
        target="mmdecode.draft.adaptive:Adaptive",
        summary="another draft, cut to the depth that measured fastest, or switched off",
        law="exact",
        source="goodput control as in SmartSpec, Liu et al. 2024",
    ),
    Entry(
        kind="accept",
        name="greedy",
        target="mmdecode.accept.exact:GreedyMatch",
        summary="keeps drafted tokens that equal the argmax",
        law="exact",
        source="Stern et al. 2018",
    ),
    Entry(
        kind="accept",
        name="coupled",
        target="mmdecode.accept.exact:Coupled",
        summary="keeps drafted tokens that equal the keyed Gumbel-max sample",
        law="exact",
        source="Gumbel-max coupling; the same seed gives the same tokens with any draft",
    ),
    Entry(
        kind="accept",
        name="membership",
        target="mmdecode.accept.exact:Membership",
        summary="samples first and follows the sample while it was drafted",
        law="exact",
        source="one-hot case of Leviathan et al. 2023",
    ),
    Entry(
        kind="accept",
        name="rejection",
        target="mmdecode.accept.rejection:Rejection",
        summary="rejection sampling of sampled chains and trees, with the residual law",
        law="exact",
        source="Leviathan et al. 2023; SpecInfer, Miao et al. 2023; RSD, Jeon et al. 2024",
    ),
    Entry(
        kind="accept",
        name="typical",
        target="mmdecode.accept.typical:Typical",
        summary="keeps drafted tokens that are likely enough for the law's entropy",
        law="heuristic",
        source="Cai et al. 2024",
    ),
    Entry(
        kind="accept",
        name="judge",
        target="mmdecode.accept.judge:Judge",
        summary="keeps drafted tokens nearly as likely as the likeliest",
        law="heuristic",
        source="in the spirit of Bachmann et al. 2025",
    ),
    Entry(
        kind="accept",
        name="ensemble",
        target="mmdecode.accept.ensemble:Ensemble",
        summary="rejection sampling against a mixture of target and draft",
        law="exact for v",
        source="Narasimhan et al. 2024",
    ),
    Entry(
        kind="accept",
        name="lantern",
        target="mmdecode.accept.lantern:LANTERN",
        summary="image codes that look alike lend a drafted one their probability",
        law="heuristic",
        source="Jang et al. 2024; LANTERN++, Park et al. 2025",
    ),
    Entry(
        kind="accept",
        name="cool",
        target="mmdecode.accept.cool:Cool",
        summary="rejection sampling with odds that are too good by a factor which cools down",
        law="heuristic",
        source="Cool-SD, arXiv:2601.09212",
    ),
    Entry(
        kind="accept",
        name="grouped",
        target="mmdecode.accept.grouped:Grouped",
        summary="compares groups of like image codes where their odds are better",
        law="heuristic",
        source="GSD, So et al. 2025",
    ),
    Entry(
        kind="guide",
        name="cfg",
        target="mmdecode.guide.cfg:CFG",
        summary="classifier-free guidance: away from the unconditional branch",
        source="Ho and Salimans 2022; for text, Sanchez et al. 2023",
    ),
    Entry(
        kind="guide",
        name="contrast",
        target="mmdecode.guide.linear:Contrast",
        summary="linear combination of branches with a plausibility cut",
        source="Li et al. 2023; in the form of VCD, Leng et al. 2024",
    ),
    Entry(
        kind="guide",
        name="vcd",
        target="mmdecode.guide.vcd:VCD",
        summary="away from what the model says of a noised image",
        source="Leng et al. 2024",
    ),
    Entry(
        kind="guide",
        name="icd",
        target="mmdecode.guide.icd:ICD",
        summary="away from what the model says under a disturbing instruction",
        source="Wang et al. 2024",
    ),
    Entry(
        kind="guide",
        name="m3id",
        target="mmdecode.guide.m3id:M3ID",
        summary="away from the answer without the image, more with every token",
        source="Favero et al. 2024",
    ),
    Entry(
        kind="guide",
        name="ritual",
        target="mmdecode.guide.ritual:RITUAL",
        summary="together with what the model says of a transformed image",
        source="Woo et al. 2024",
    ),
    Entry(
        kind="guide",
        name="agla",
        target="mmdecode.guide.agla:AGLA",
        summary="together with the part of the image that is attended to most; the mask is ours",
        source="An et al. 2024, in its style",
    ),
    Entry(
        kind="guide",
        name="cfg_image",
        target="mmdecode.guide.cfg_image:CFGImage",
        summary="classifier-free guidance: away from the model without the image",
        source="Kornblith et al. 2023; Ho and Salimans 2022",
    ),
    Entry(
        kind="guide",
        name="guidance",
        target="mmdecode.guide.guidance:Guidance",
        summary="classifier-free guidance of image tokens, on raw logits",
        source="Ho and Salimans 2022",
    ),
    Entry(
        kind="guide",
        name="rbd",
        target="mmdecode.guide.rbd:RBD",
        summary="away from a noised image, towards its most attended tokens; weights are ours",
        source="Liang et al. 2024, in its style",
    ),
    Entry(
        kind="guide",
        name="plausible",
        target="mmdecode.guide.plausible:Plausible",
        summary="control: the plausibility cut alone; for sampling",
        source="Yin et al. 2025",
    ),
    Entry(
        kind="guide",
        name="temperature_matched",
        target="mmdecode.guide.plausible:TemperatureMatched",
        summary="control: the cut at the temperature that a method hides; for sampling",
        source="Yin et al. 2025",
    ),
    Entry(
        kind="guide",
        name="margin_shift",
        target="mmdecode.guide.margin_shift:MarginShift",
        summary="control: a constant towards yes at the first token",
        source="Yin et al. 2025, its mechanism",
    ),
    Entry(
        kind="guide",
        name="prompt_bias",
        target="mmdecode.guide.prompt_bias:PromptBias",
        summary="control: the model is asked to answer yes (PBA)",
        source="Yin et al. 2025",
    ),
    Entry(
        kind="guide",
        name="near_ties",
        target="mmdecode.guide.near_ties:NearTies",
        summary="control: near ties of yes and no go to yes (OLM)",
        source="Yin et al. 2025",
    ),
    Entry(
        kind="guide",
        name="dola",
        target="mmdecode.guide.dola:DoLa",
        summary="the last layer against the early one that differs most",
        source="Chuang et al. 2024",
    ),
    Entry(
        kind="guide",
        name="dcla",
        target="mmdecode.guide.dcla:DCLA",
        summary="hidden states that drift from earlier layers are pulled back",
        source="DCLA 2025; range and weights are ours",
    ),
    Entry(
        kind="guide",
        name="dfd",
        target="mmdecode.guide.dfd:DFD",
        summary="a temperature for each token, low where layers disagree; for sampling",
        source="Dynamic Focus Decoding 2025",
    ),
    Entry(
        kind="guide",
        name="scalingvis",
        target="mmdecode.guide.scalingvis:ScalingVis",
        summary="attention of the last prompt token to the image, sharpened or smoothed",
        source="Chen et al. 2025",
    ),
    Entry(
        kind="guide",
        name="adaptvis",
        target="mmdecode.guide.adaptvis:AdaptVis",
        summary="as scalingvis, sharpened or smoothed by the model's confidence",
        source="Chen et al. 2025",
    ),
    Entry(
        kind="guide",
        name="pai",
        target="mmdecode.guide.pai:PAI",
        summary="more attention to the image, and away from the answer without it",
        source="Liu et al. 2024",
    ),
    Entry(
        kind="guide",
        name="conscious_gaze",
        target="mmdecode.guide.conscious_gaze:ConsciousGaze",
        summary="more attention to the image where image and words act together",
        source="Conscious Gaze 2025",
    ),
    Entry(
        kind="guide",
        name="dagcd",
        target="mmdecode.guide.dagcd:DAGCD",
        summary="words of attended image tokens become likelier, the more in doubt",
        source="Huang et al. 2025",
    ),
    Entry(
        kind="guide",
        name="damro",
        target="mmdecode.guide.damro:DAMRO",
        summary="away from the image tokens that the image encoder attends to most",
        source="Gong et al. 2024",
    ),
    Entry(
        kind="guide",
        name="causalmm",
        target="mmdecode.guide.causalmm:CausalMM",
        summary="away from counterfactual attention in the encoder or the language model",
        source="Zhou et al. 2024",
    ),
    Entry(
        kind="guide",
        name="whisper_cd",
        target="mmdecode.guide.whisper_cd:WhisperCD",
        summary="away from what Whisper writes of noise, silence and a shifted recording",
        source="Whisper-CD 2026; the gates are ours",
    ),
    Entry(
        kind="correct",
        name="uadf",
        target="mmdecode.asr.correcting:UADFCorrection",
        summary="a language model corrects, the audio weighs in where it is unsure",
        source="Chen et al. 2024; unlike tokenizers by text are ours",
    ),
    Entry(
        kind="correct",
        name="static",
        target="mmdecode.asr.correcting:StaticCorrection",
        summary="a language model corrects, the audio weighs in with a fixed weight",
        source="late fusion, the baseline of Chen et al. 2024",
    ),
    Entry(
        kind="correct",
        name="shallow",
        target="mmdecode.asr.correcting:ShallowCorrection",
        summary="a language model corrects, log-probabilities of the audio are added",
        source="shallow fusion, Gulcehre et al. 2015, with the roles exchanged",
    ),
    Entry(
        kind="correct",
        name="llm",
        target="mmdecode.asr.correcting:LanguageModelCorrection",
        summary="a language model corrects and hears nothing",
        source="Chen et al. 2023 (HyPoradise)",
    ),
    Entry(
        kind="adapters",
        name="whisper",
        target="mmdecode.adapters.whisper:WhisperAdapter",
        summary="Whisper and its distilled relatives",
        source="Radford et al. 2023",
    ),
    Entry(
        kind="adapters",
        name="moonshine",
        target="mmdecode.adapters.moonshine:MoonshineAdapter",
        summary="Moonshine, which reads samples and has rotary positions",
        source="Jeffries et al. 2024",
    ),
    Entry(
        kind="adapters",
        name="t5",
        target="mmdecode.adapters.t5:T5Adapter",
        summary="T5, Flan-T5 and mT5",
        source="Raffel et al. 2020",
    ),
    Entry(
        kind="adapters",
        name="umt5",
        target="mmdecode.adapters.t5:UMT5Adapter",
        summary="umT5, with a bias of distances in every layer",
        source="Chung et al. 2023",
    ),
    Entry(
        kind="adapters",
        name="bart",
        target="mmdecode.adapters.bart:BartAdapter",
        summary="BART, mBART, Pegasus, Marian, Blenderbot and PLBart",
        source="Lewis et al. 2020",
    ),
    Entry(
        kind="adapters",
        name="decoder_only",
        target="mmdecode.adapters.decoder_only:DecoderOnlyAdapter",
        summary="Llama, Qwen, Mistral, Gemma and other causal language models",
    ),
    Entry(
        kind="adapters",
        name="default",
        target="mmdecode.adapters.default:DefaultAdapter",
        summary="any other causal language model, after a check at its first use",
    ),
    Entry(
        kind="adapters",
        name="vision_language",
        target="mmdecode.adapters.vision_language:VisionLanguageAdapter",
        summary="models that read images at placeholder tokens: InternVL, Janus, Emu3",
    ),
    Entry(
        kind="adapters",
        name="llava",
        target="mmdecode.adapters.vision_language:LlavaAdapter",
        summary="LLaVA and LLaVA-NeXT",
        source="Liu et al. 2023, 2024",
    ),
    Entry(
        kind="adapters",
        name="instructblip",
        target="mmdecode.adapters.instructblip:InstructBlipAdapter",
        summary="the language model of InstructBLIP, and the views of its images",
        source="Dai et al. 2023",
    ),
    Entry(
        kind="adapters",
        name="idefics",
        target="mmdecode.adapters.vision_language:IdeficsAdapter",
        summary="Idefics3 and SmolVLM",
    ),
    Entry(
        kind="adapters",
        name="gemma3",
        target="mmdecode.adapters.vision_language:Gemma3Adapter",
        summary="Gemma3, whose images are read in both directions",
    ),
    Entry(
        kind="adapters",
        name="qwen_vl",
        target="mmdecode.adapters.vision_language:QwenVLAdapter",
        summary="Qwen2-VL, Qwen2.5-VL and Qwen3-VL, with positions in three dimensions",
    ),
    Entry(
        kind="adapters",
        name="paligemma",
        target="mmdecode.adapters.vision_language:PaliGemmaAdapter",
        summary="PaliGemma, whose prompt is read in both directions",
    ),
    Entry(
        kind="adapters",
        name="chameleon",
        target="mmdecode.adapters.vision_language:ChameleonAdapter",
        summary="Chameleon, writing text",
    ),
    Entry(
        kind="adapters",
        name="llamagen",
        target="mmdecode.adapters.llamagen:LlamaGenAdapter",
        summary="LlamaGen, writing image tokens of a class or a caption",
        source="Sun et al. 2024",
    ),
    Entry(
        kind="adapters",
        name="janus_images",
        target="mmdecode.adapters.janus_images:JanusImagesAdapter",
        summary="Janus and Janus-Pro, writing image tokens",
        source="Wu et al. 2024; Chen et al. 2025",
    ),
    Entry(
        kind="adapters",
        name="emu3_images",
        target="mmdecode.adapters.emu3_images:Emu3ImagesAdapter",
        summary="Emu3, writing image tokens",
        source="Wang et al. 2024",
    ),
    Entry(
        kind="adapters",
        name="chameleon_images",
        target="mmdecode.adapters.chameleon_images:ChameleonImagesAdapter",
        summary="Chameleon and Anole, writing image tokens",
        source="Chameleon Team 2024; Chern et al. 2024",
    ),
    Entry(
        kind="adapters",
        name="imagegpt",
        target="mmdecode.adapters.imagegpt:ImageGPTAdapter",
        summary="ImageGPT, writing pixels as tokens",
        source="Chen et al. 2020",
    ),
    Entry(
        kind="adapters",
        name="table",
        target="mmdecode.testing.table:TableAdapter",
        summary="the exact table models of mmdecode.testing",
    ),
    Entry(
        kind="checkpoints",
        name="moonshine",
        target="mmdecode.models.moonshine.wheel:MoonshineWheel",
        summary="moonshine:tiny-en, a published recogniser from a Python wheel",
        source="Jeffries et al. 2024",
    ),
    Entry(
        kind="recognizers",
        name="whisper",
        target="mmdecode.asr.recognizers.whisper:WhisperRecognizer",
        summary="Whisper and its distillations: prompts, timestamps, languages, word times",
        source="Radford et al. 2023",
    ),
    Entry(
        kind="recognizers",
        name="moonshine",
        target="mmdecode.asr.recognizers.moonshine:MoonshineRecognizer",
        summary="Moonshine: raw samples, windows cut at pauses",
        source="Jeffries et al. 2024, arXiv:2410.15608",
    ),
    Entry(
        kind="recognizers",
        name="generic",
        target="mmdecode.asr.recognizers.generic:GenericRecognizer",
        summary="other encoder-decoders of AutoModelForSpeechSeq2Seq: windows cut at pauses",
    ),
)


def names(kind: str) -> list[str]:
    """Returns the names of one kind, our own first; loads no method."""
    return list(_entries(kind))


def describe(kind: str) -> list[Entry]:
    """Returns the entries of one kind.

    Plug-ins are loaded, since their summary is in their class; one that fails to load is left out
    with a warning that names it.
    """
    entries = []
    for entry in _entries(kind).values():
        if not entry.plugin:
            entries.append(entry)
            continue
        try:
            cls = _load(entry)
        except Exception as error:  # a plug-in may fail in any way, and the others must still work
            warnings.warn(f"left out: {error}", RuntimeWarning, stacklevel=2)
            continue
        first_line = (inspect.getdoc(cls) or "").partition("\n")[0]
        entries.append(
            replace(
                entry,
                summary=str(getattr(cls, "summary", first_line)),
                law=str(getattr(cls, "law", "-")),
                source=str(getattr(cls, "source", "")),
            )
        )
    return entries


def parse(kind: str, spec: str) -> list[tuple[str, dict[str, Any]]]:
    """Splits a string into names and options; imports nothing.

    Args:
        kind: One of ``KINDS``.
        spec: ``name`` or ``name:key=value,key=value``. Values are read as int, float, ``true`` or
            ``false``, ``none``, else as text. For guides, ``+`` separates several; a ``+`` before
            a digit belongs to a number.

    Returns:
        One (name, options) per method, in the order given.

    Raises:
        OptionError: A part is not ``key=value``, or a key is given twice.
    """
    parts = re.split(r"\+(?=[^\d.])", spec) if kind == "guide" else [spec]
    return [_parse_one(kind, part.strip()) for part in parts]


def resolve_all(kind: str, spec: str) -> list[tuple[type, dict[str, Any]]]:
    """Like ``resolve``, for strings in which several guides are composed with ``+``."""
    known = _entries(kind)
    found = []
    for name, options in parse(kind, spec):
        if name not in known:
            raise UnknownNameError.of(kind, name, known)
        found.append((_load(known[name]), options))
    return found


def resolve(kind: str, spec: str) -> tuple[type, dict[str, Any]]:
    """Turns a string into a class and its options.

    Args:
        kind: One of ``KINDS``.
        spec: ``name`` or ``name:key=value,key=value``.

    Raises:
        UnknownNameError: No method of this kind has the name.
        OptionError: The string cannot be read, or names several guides.
    """
    return _only(kind, spec, resolve_all(kind, spec))


def create(kind: str, spec: str, **context: Any) -> Any:
    """Builds the one method a string names.

    Args:
        kind: One of ``KINDS``.
        spec: ``name`` or ``name:key=value,key=value``.
        **context: Objects at hand (a model, say), passed on where the method has a parameter of
            that name; an option in the string wins.

    Returns:
        What the class method ``from_options`` returns where the class has one, else an instance.

    Raises:
        UnknownNameError: No method of this kind has the name.
        OptionError: The string cannot be read, names several guides, or has a key the method does
            not take or lacks one it needs.
    """
    return _only(kind, spec, create_all(kind, spec, **context))


def create_all(kind: str, spec: str, **context: Any) -> list[Any]:
    """Like ``create``, for strings in which several guides are composed with ``+``."""
    parsed = parse(kind, spec)
    return [
        _build(kind, name, cls, options, context)
        for (name, _), (cls, options) in zip(parsed, resolve_all(kind, spec), strict=True)
    ]


def _only(kind: str, spec: str, found: list[Any]) -> Any:
    if len(found) != 1:
        raise OptionError(f"{spec!r} names {len(found)} {kind}s, expected one; give a single name")
    return found[0]


def _build(
    kind: str, name: str, cls: type, options: dict[str, Any], context: dict[str, Any]
) -> Any:
    build: Callable[..., Any] = getattr(cls, "from_options", cls)
    parameters = inspect.signature(build).parameters.values()
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = [p.name for p in takes]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        offered = [key for key in accepted if key not in context]
        listing = f"accepted keys: {', '.join(offered) or '(none)'}"
        for key in options:
            if key not in accepted:
                hint = did_you_mean(key, offered)
                inner = [v for v in options.values() if re.match(r"\w+:.+=", str(v))]
                nested = f"; for more options of {inner[0]!r}, build it in Python" if inner else ""
                raise OptionError(
                    f"{kind} {name!r} takes no option {key!r}{hint}; {listing}{nested}"
                )
        context = {key: value for key, value in context.items() if key in accepted}
    for parameter in takes:
        _check_kind(kind, name, parameter, options)
    arguments = {**context, **options}
    missing = [p.name for p in takes if p.default is p.empty and p.name not in arguments]
    if missing:
        example = f"{name}:{missing[0]}=..."
        raise OptionError(f"{kind} {name!r} needs {', '.join(missing)}; write {example!r}")
    return build(**arguments)


def _check_kind(
    kind: str, name: str, parameter: inspect.Parameter, options: dict[str, Any]
) -> None:
    """Raises where an option is no number, or no whole one, as its parameter's annotation asks."""
    if parameter.name not in options:
        return
    value, wanted = options[parameter.name], str(parameter.annotation)
    if value is None and wanted.endswith(" | None"):
        return
    wanted = wanted.removesuffix(" | None")
    allowed: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
    if wanted not in allowed:
        return
    if not isinstance(value, allowed[wanted]) or (isinstance(value, bool) and wanted != "bool"):
        words = {"int": "a whole number", "float": "a number", "bool": "true or false"}[wanted]
        raise OptionError(
            f"{kind} {name!r}: {parameter.name} must be {words}, got {value!r}; write "
            f"{name}:{parameter.name}=..."
        )


def _parse_one(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    name, colon, rest = text.partition(":")
    if not name:
        raise OptionError(f"empty {kind} name in {text!r}; expected name or name:key=value")
    options: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise OptionError(
                f"cannot read {part!r} in {kind} {text!r}; expected name:key=value,key=value"
            )
        if key in options:
            raise OptionError(f"{key!r} is given twice in {kind} {text!r}; keep one")
        options[key] = _value(value.strip())
    return name.strip(), options


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _entries(kind: str) -> dict[str, Entry]:
    if kind not in KINDS:
        raise UnknownNameError.of("kind", kind, KINDS)
    return _scan(kind, tuple(sys.path))


@functools.lru_cache(maxsize=16)
def _scan(kind: str, path: tuple[str, ...]) -> dict[str, Entry]:
    """Reading the metadata of every distribution takes milliseconds; done once per ``sys.path``."""
    found = {entry.name: entry for entry in _BUILTIN if entry.kind == kind}
    for point in metadata.entry_points(group=f"mmdecode.{kind}"):
        plugin = point.dist.name if point.dist else "an unnamed distribution"
        if point.name in found:
            warnings.warn(
                f"{plugin} registers {kind} {point.name!r}, which exists already, and is ignored; "
                "its author has to choose another name",
                RuntimeWarning,
                stacklevel=4,
            )
            continue
        found[point.name] = Entry(kind=kind, name=point.name, target=point.value, plugin=plugin)
    return found


def _load(entry: Entry) -> type:
    if not entry.plugin:
        module, _, attribute = entry.target.partition(":")
        return getattr(importlib.import_module(module), attribute)
    try:
        point = metadata.EntryPoint(entry.name, entry.target, f"mmdecode.{entry.kind}")
        return point.load()
    except Exception as error:
        raise MMDecodeError(
            f"{entry.kind} {entry.name!r} of {entry.plugin} ({entry.target}) cannot be loaded: "
            f"{type(error).__name__}: {error}; repair or uninstall {entry.plugin}"
        ) from error


def adapter_class(model_type: str) -> Any:
    """The adapter class of a model type; ours come before those of plug-ins.

    Raises:
        UnsupportedModelError: No registered adapter names the type.
    """
    return _adapter_that("model_types", model_type, "decode it with plain generate, or ")


@functools.cache
def _adapter_that(lists: str, model_type: str, advice: str) -> Any:
    """The first adapter class whose attribute ``lists`` has the type."""
    known: list[str] = []
    ours = [entry for entry in _BUILTIN if entry.kind == "adapters"]
    for entry in itertools.chain(ours, _entries("adapters").values()):
        cls: Any = _load(entry)
        types = getattr(cls, lists, ())
        if model_type in types:
            return cls
        known += types
    raise UnsupportedModelError(
        f"no adapter for model_type {model_type!r}; expected one of "
        f"{', '.join(sorted(set(known)))}; {advice}register an adapter under the entry-point group "
        "mmdecode.adapters"
    )


def adapter_for(model: Any, around: Any = None) -> Any:
    """Builds the adapter for a model by its ``config.model_type``; see `adapter_class`.

    Args:
        model: The model that decodes.
        around: The model that ``generate`` was called on, where that is known. If it hands
            decoders a part of itself, ``model``, and has an adapter that says so by a static method
            ``inner(around) -> model``, that one is built, of ``around``.

    Raises:
        UnsupportedModelError: The model has no adapter of its own and the default one does not fit.
    """
    cls: Any
    if around is not None and around is not model:
        with contextlib.suppress(UnsupportedModelError):
            cls = adapter_class(_model_type(around))
            if hasattr(cls, "inner") and cls.inner(around) is model:
                return cls(around)
    try:
        cls = adapter_class(_model_type(model))
    except UnsupportedModelError:
        cls = _load(_entries("adapters")["default"])
        if not cls.fits(model):
            raise
    return cls(model)


def scheme_class(scheme: str) -> Any | None:
    """The class that finds checkpoints named ``SCHEME:NAME``; ``None``: none is registered.

    Those of plug-ins are looked for only where it is none of ours.
    """
    ours = (one for one in _BUILTIN if (one.kind, one.name) == ("checkpoints", scheme))
    entry = next(ours, None) or _entries("checkpoints").get(scheme)
    return None if entry is None else _load(entry)


def schemes() -> dict[str, Any]:
    """The classes of all schemes of checkpoints by name; one that fails to load is left out."""
    return {entry.name: _load(entry) for entry in describe("checkpoints")}


def recognizer_class(model_type: str) -> Any:
    """The recogniser class of a model type: ours, then those of plug-ins, then the generic one.

    Raises:
        UnsupportedModelError: It is no speech recogniser that transformers knows.
    """

    def special() -> Iterator[Entry]:
        ours = (entry for entry in _BUILTIN if entry.kind == "recognizers")
        yield from (entry for entry in ours if entry.name != "generic")
        yield from (entry for entry in describe("recognizers") if entry.plugin)

    known: list[str] = []
    for entry in special():
        cls: Any = _load(entry)
        if model_type in cls.model_types:
            return cls
        known += cls.model_types
    generic: Any = _load(_entries("recognizers")["generic"])
    if generic.fits(model_type):
        return generic
    raise UnsupportedModelError(
        f"a Transcriber runs speech recognisers with an encoder and a decoder, and this is a "
        f"{model_type} model; expected one of {', '.join(sorted(known))} or another of "
        "transformers' AutoModelForSpeechSeq2Seq, or register a recogniser under the entry-point "
        "group mmdecode.recognizers"
    )


def image_adapter_class(model: Any) -> Any:
    """The adapter class of a model that writes image tokens, which has a tuple ``image_types``.

    Raises:
        UnsupportedModelError: No registered adapter names the type there.
    """
    return _adapter_that("image_types", _model_type(model), "to write image tokens, ")


def image_adapter_for(model: Any, **options: Any) -> Any:
    """Builds the adapter for a model that writes image tokens.

    Args:
        model: The model.
        **options: Of the family's adapter.

    Raises:
        UnsupportedModelError: No adapter is registered for the model.
        OptionError: The adapter takes no such option.
    """
    cls = image_adapter_class(model)
    refuse_unknown(options, [n for n in inspect.signature(cls).parameters if n != "model"])
    return cls(model, **options)


def _model_type(model: Any) -> str:
    return getattr(getattr(model, "config", None), "model_type", type(model).__name__)
