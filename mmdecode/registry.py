"""Registry: names of drafters, rules, guides, correctors, adapters and checkpoints to classes.

Strings name a class as ``name`` or ``name:key=value,key=value``; ``+`` composes two guides, of
which the second must take another one, as `mmdecode.guide.bias.Bias` does. This module does not
import torch: a class is imported only when it is needed, and the
descriptions that ``mmdecode methods`` lists are parsed from the source.

Other packages register their classes with an entry point:

    [project.entry-points."mmdecode.draft"]
    mydraft = "mypackage.draft:MyDraft"

The group is ``mmdecode.`` followed by one of `KINDS`. ``mmdecode methods`` shows three class
attributes: ``summary`` (what the class does), ``source`` (its paper) and, for acceptance rules,
``guarantee`` (see `mmdecode.entries.Entry`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from typing import TYPE_CHECKING, Any

from mmdecode.entries import Entry, loadable, plugins
from mmdecode.errors import OptionError, UnknownNameError, UnsupportedModelError, refuse_unknown
from mmdecode.options import build, read

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "KINDS",
    "Entry",
    "adapter_class",
    "adapter_for",
    "classes",
    "context_of",
    "create",
    "describe",
    "image_adapter_class",
    "image_adapter_for",
    "names",
    "parse",
    "resolve",
]

_BUILTIN = {
    "draft": {
        "lookup": "mmdecode.draft.lookup:PromptLookup",
        "assistant": "mmdecode.draft.assistant:Assistant",
        "amateur": "mmdecode.draft.amateur:Amateur",
        "medusa": "mmdecode.draft.medusa:Medusa",
        "hydra": "mmdecode.draft.hydra:Hydra",
        "eagle": "mmdecode.draft.eagle:Eagle",
        "vispec": "mmdecode.draft.vispec:ViSpec",
        "dream": "mmdecode.draft.dream:Dream",
        "flash": "mmdecode.draft.flash:Flash",
        "recycling": "mmdecode.draft.recycling:Recycling",
        "source": "mmdecode.draft.source:Source",
        "ctc": "mmdecode.draft.ctc:CTC",
        "jacobi": "mmdecode.draft.jacobi:Jacobi",
        "quantized": "mmdecode.draft.quantized:Quantized",
        "layer_skip": "mmdecode.draft.layer_skip:LayerSkip",
        "kangaroo": "mmdecode.draft.kangaroo:Kangaroo",
        "clasp": "mmdecode.draft.layer_search:Clasp",
        "swift": "mmdecode.draft.layer_search:Swift",
        "sparse": "mmdecode.draft.sparse:Sparse",
        "lookahead": "mmdecode.draft.lookahead:Lookahead",
        "first_of": "mmdecode.draft.first_of:FirstOf",
        "adaptive": "mmdecode.draft.adaptive:Adaptive",
    },
    "accept": {
        "greedy": "mmdecode.accept.exact:GreedyMatch",
        "coupled": "mmdecode.accept.exact:Coupled",
        "sample_match": "mmdecode.accept.exact:SampleMatch",
        "rejection": "mmdecode.accept.rejection:Rejection",
        "typical": "mmdecode.accept.typical:Typical",
        "relative_threshold": "mmdecode.accept.relative_threshold:RelativeThreshold",
        "ensemble": "mmdecode.accept.ensemble:Ensemble",
        "lantern": "mmdecode.accept.lantern:LANTERN",
        "cool_sd": "mmdecode.accept.cool_sd:CoolSD",
        "gsd": "mmdecode.accept.gsd:GSD",
    },
    "guide": {
        "cfg": "mmdecode.guide.cfg:CFG",
        "contrast": "mmdecode.guide.linear:Contrast",
        "vcd": "mmdecode.guide.vcd:VCD",
        "icd": "mmdecode.guide.icd:ICD",
        "m3id": "mmdecode.guide.m3id:M3ID",
        "ritual": "mmdecode.guide.ritual:RITUAL",
        "agla": "mmdecode.guide.agla:AGLA",
        "cfg_image": "mmdecode.guide.cfg_image:CFGImage",
        "guidance": "mmdecode.guide.guidance:Guidance",
        "rbd": "mmdecode.guide.rbd:RBD",
        "plausible": "mmdecode.guide.controls.plausible:Plausible",
        "temperature_matched": "mmdecode.guide.controls.plausible:TemperatureMatched",
        "margin_shift": "mmdecode.guide.controls.margin_shift:MarginShift",
        "prompt_bias": "mmdecode.guide.controls.prompt_bias:PromptBias",
        "near_ties": "mmdecode.guide.controls.near_ties:NearTies",
        "dola": "mmdecode.guide.dola:DoLa",
        "dcla": "mmdecode.guide.dcla:DCLA",
        "dfd": "mmdecode.guide.dfd:DFD",
        "scalingvis": "mmdecode.guide.scalingvis:ScalingVis",
        "adaptvis": "mmdecode.guide.adaptvis:AdaptVis",
        "pai": "mmdecode.guide.pai:PAI",
        "conscious_gaze": "mmdecode.guide.conscious_gaze:ConsciousGaze",
        "dagcd": "mmdecode.guide.dagcd:DAGCD",
        "damro": "mmdecode.guide.damro:DAMRO",
        "causalmm": "mmdecode.guide.causalmm:CausalMM",
        "whisper_cd": "mmdecode.guide.whisper_cd:WhisperCD",
        "ctc": "mmdecode.guide.ctc:CTCScore",
        "bias": "mmdecode.guide.bias:Bias",
    },
    "correct": {
        "uadf": "mmdecode.asr.correction.transcripts:UADFCorrection",
        "static": "mmdecode.asr.correction.transcripts:StaticCorrection",
        "shallow": "mmdecode.asr.correction.transcripts:ShallowCorrection",
        "llm": "mmdecode.asr.correction.transcripts:LanguageModelCorrection",
    },
    "adapters": {
        "whisper": "mmdecode.adapters.audio.whisper:WhisperAdapter",
        "causal_whisper": "mmdecode.adapters.audio.causal_whisper:CausalWhisperAdapter",
        "moonshine": "mmdecode.adapters.audio.moonshine:MoonshineAdapter",
        "moonshine_streaming": (
            "mmdecode.adapters.audio.moonshine_streaming:MoonshineStreamingAdapter"
        ),
        "t5": "mmdecode.adapters.seq2seq.t5:T5Adapter",
        "umt5": "mmdecode.adapters.seq2seq.t5:UMT5Adapter",
        "bart": "mmdecode.adapters.seq2seq.bart:BartAdapter",
        "decoder_only": "mmdecode.adapters.text:DecoderOnlyAdapter",
        "default": "mmdecode.adapters.default:DefaultAdapter",
        "vision_language": "mmdecode.adapters.vision.base:VisionLanguageAdapter",
        "llava": "mmdecode.adapters.vision.llava:LlavaAdapter",
        "instructblip": "mmdecode.adapters.vision.instructblip:InstructBlipAdapter",
        "idefics": "mmdecode.adapters.vision.idefics:IdeficsAdapter",
        "gemma3": "mmdecode.adapters.vision.gemma3:Gemma3Adapter",
        "qwen_vl": "mmdecode.adapters.vision.qwen_vl:QwenVLAdapter",
        "paligemma": "mmdecode.adapters.vision.paligemma:PaliGemmaAdapter",
        "chameleon": "mmdecode.adapters.vision.chameleon:ChameleonAdapter",
        "llamagen": "mmdecode.adapters.images.llamagen:LlamaGenAdapter",
        "janus_images": "mmdecode.adapters.images.janus:JanusImagesAdapter",
        "emu3_images": "mmdecode.adapters.images.emu3:Emu3ImagesAdapter",
        "chameleon_images": "mmdecode.adapters.images.chameleon:ChameleonImagesAdapter",
        "imagegpt": "mmdecode.adapters.images.imagegpt:ImageGPTAdapter",
        "table": "mmdecode.testing.table:TableAdapter",
    },
    "recognizers": {
        "whisper": "mmdecode.asr.recognizers.whisper:WhisperRecognizer",
        "moonshine": "mmdecode.asr.recognizers.moonshine:MoonshineRecognizer",
        "moonshine_streaming": (
            "mmdecode.asr.recognizers.moonshine_streaming:MoonshineStreamingRecognizer"
        ),
        "causal_whisper": "mmdecode.asr.recognizers.causal_whisper:CausalWhisperRecognizer",
        "generic": "mmdecode.asr.recognizers.generic:GenericRecognizer",
    },
    "checkpoints": {
        "moonshine": "mmdecode.models.moonshine.wheel:MoonshineWheel",
    },
}
KINDS = tuple(_BUILTIN)


def names(kind: str) -> list[str]:
    """Returns the names of a kind, plug-ins last, without importing the classes."""
    return list(_entries(kind))


def describe(kind: str) -> list[Entry]:
    """Returns the entries of a kind with their descriptions.

    Classes of this package are not imported. Plug-ins are imported, and a plug-in that fails to
    load is left out with a warning.
    """
    ours = [entry.described() for entry in _ours(kind).values()]
    return ours + [entry.described() for entry in loadable(_others(kind).values())]


def parse(kind: str, spec: str) -> list[tuple[str, dict[str, Any]]]:
    """Parses a string to names and options; imports nothing.

    Args:
        kind: One of ``KINDS``.
        spec: ``name`` or ``name:key=value,key=value``, see `mmdecode.options.read`. ``+`` separates
            guides, unless a digit or a point follows, as in ``1e+3``.

    Returns:
        One (name, options) per named class, in the order given.

    Raises:
        OptionError: A part is not ``key=value``, or a key is given twice.
    """
    parts = re.split(r"\+(?=[^\d.])", spec) if kind == "guide" else [spec]
    return [read(kind, part.strip()) for part in parts]


def resolve(kind: str, spec: str) -> tuple[type, dict[str, Any]]:
    """Returns the class that a string names, and its options.

    Raises:
        UnknownNameError: No class of this kind has the name.
        OptionError: The string cannot be read, or names several guides.
    """
    found = _resolved(kind, spec)
    if len(found) != 1:
        raise OptionError(f"{spec!r} names {len(found)} {kind}s, expected one; give a single name")
    _, cls, options = found[0]
    return cls, options


def create(kind: str, spec: str, **context: Any) -> Any:
    """Builds the object that a string names, such as a drafter or a guide.

    Args:
        kind: One of ``KINDS``.
        spec: ``name`` or ``name:key=value,key=value``; of guides also two with ``+`` between them,
            of which the second gets the first as its argument ``guide``.
        **context: Objects, such as the target model, for constructor parameters of the same name;
            an option in the string takes precedence. See `context_of`.

    Returns:
        The result of the class method ``from_options`` if the class has one, else an instance.

    Raises:
        UnknownNameError: No class of this kind has the name.
        OptionError: The string cannot be read, names several guides that cannot be composed, has
            an unknown option, or lacks a required option.
    """
    (name, cls, options), *others = _resolved(kind, spec)
    made = build(kind, name, cls, options, context)
    for name, cls, options in others:
        if kind not in inspect.signature(cls).parameters:
            takers = [n for n, one in classes(kind) if kind in inspect.signature(one).parameters]
            raise OptionError(
                f"{spec!r} names {len(others) + 1} {kind}s, expected one: {name} cannot follow "
                f"another; only {', '.join(takers) or 'none'} can"
            )
        made = build(kind, name, cls, options, {**context, kind: made})
    return made


def context_of(model: Any, processor: Any = None, model_id: str | None = None) -> dict[str, Any]:
    """Returns the objects that parts may need, as arguments of `create`.

    Args:
        model: The model that decodes: ``target``.
        processor: Its processor or tokenizer, for ``tokenizer``; ``None``: there is none.
        model_id: Its name; ``None``: not known.
    """
    found = {"target": model}
    if processor is not None:
        found["tokenizer"] = getattr(processor, "tokenizer", processor)
    return found if model_id is None else {**found, "model_id": model_id}


def _resolved(kind: str, spec: str) -> list[tuple[str, type, dict[str, Any]]]:
    """Returns name, class and options of each part of a string."""
    known = _entries(kind)
    found = []
    for name, options in parse(kind, spec):
        if name not in known:
            raise UnknownNameError.of(kind, name, known)
        found.append((name, known[name].load(), options))
    return found


def classes(kind: str) -> Iterator[tuple[str, Any]]:
    """Imports the classes of a kind one by one, and yields their names and the classes.

    Plug-ins are searched for only after all classes of this package; a plug-in that fails to load
    is left out with a warning.
    """
    yield from ((entry.name, entry.load()) for entry in _ours(kind).values())
    yield from ((entry.name, entry.load()) for entry in loadable(_others(kind).values()))


def adapter_class(model_type: str) -> Any:
    """Returns the adapter class of a model type; plug-ins are searched last.

    Raises:
        UnsupportedModelError: No registered adapter supports the type.
    """
    return _adapter_that("model_types", model_type, "decode it with plain generate, or ")


def adapter_for(model: Any, around: Any = None) -> Any:
    """Builds the adapter for a model by its ``config.model_type``; see `adapter_class`.

    Args:
        model: The model that decodes.
        around: The model that ``generate`` was called on, if known. Some models pass only a
            submodel, ``model``, to decoders; the static method ``inner(around)`` of their adapter
            returns that submodel, and the adapter is then built for ``around``.

    Raises:
        UnsupportedModelError: No adapter lists the model's type, and the default adapter does not
            fit the model.
    """
    cls: Any
    if around is not None and around is not model:
        with contextlib.suppress(UnsupportedModelError):
            cls = adapter_class(_model_type(around))
            if cls.inner(around) is model:
                return cls(around)
    try:
        cls = adapter_class(_model_type(model))
    except UnsupportedModelError:
        cls = resolve("adapters", "default")[0]
        if not cls.fits(model):
            raise
    return cls(model)


def image_adapter_class(model: Any) -> Any:
    """Returns the adapter class whose ``image_types`` list a model that generates image tokens.

    Raises:
        UnsupportedModelError: No registered adapter lists the type.
    """
    return _adapter_that("image_types", _model_type(model), "to write image tokens, ")


def image_adapter_for(model: Any, **options: Any) -> Any:
    """Builds the adapter for a model that generates image tokens.

    Args:
        model: The model.
        **options: Options of the adapter, such as ``vq`` or ``grid``.

    Raises:
        UnsupportedModelError: No adapter is registered for the model.
        OptionError: The adapter does not take an option.
    """
    cls = image_adapter_class(model)
    refuse_unknown(options, [n for n in inspect.signature(cls).parameters if n != "model"])
    return cls(model, **options)


@functools.cache
def _adapter_that(lists: str, model_type: str, hint: str) -> Any:
    """Returns the first adapter class whose attribute named ``lists`` contains the type."""
    known: list[str] = []
    for _, cls in classes("adapters"):
        types = getattr(cls, lists, ())
        if model_type in types:
            return cls
        known += types
    raise UnsupportedModelError(
        f"no adapter for model_type {model_type!r}; expected one of "
        f"{', '.join(sorted(set(known)))}; {hint}register an adapter under the entry-point group "
        "mmdecode.adapters"
    )


def _model_type(model: Any) -> str:
    return getattr(getattr(model, "config", None), "model_type", type(model).__name__)


def _entries(kind: str) -> dict[str, Entry]:
    return _ours(kind) | _others(kind)


def _ours(kind: str) -> dict[str, Entry]:
    if kind not in KINDS:
        raise UnknownNameError.of("kind", kind, KINDS)
    return {n: Entry(kind=kind, name=n, target=where) for n, where in _BUILTIN[kind].items()}


def _others(kind: str) -> dict[str, Entry]:
    return plugins(kind, _BUILTIN[kind])
