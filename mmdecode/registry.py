"""Names of drafters, rules, guides, correctors, adapters and checkpoints, and what they stand for.

A method in a string is ``name`` or ``name:key=value,key=value``; guides compose with ``+``. Nothing
here imports torch: a method's module is imported when the method is asked for, and what it says of
itself is read from its source.

Outsiders register theirs with an entry point, no change here needed:

    [project.entry-points."mmdecode.draft"]
    mydraft = "mypackage.draft:MyDraft"

The groups are ``mmdecode.draft``, ``mmdecode.accept``, ``mmdecode.guide``, ``mmdecode.correct``,
``mmdecode.adapters``, ``mmdecode.recognizers`` and ``mmdecode.checkpoints``. A class says what it
does in ``summary``, which paper it follows in ``source`` and, an acceptance rule, what it promises
in ``guarantee``: class attributes that ``mmdecode methods`` shows.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import pkgutil
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One registered name.

    Attributes:
        kind: One of ``KINDS``.
        name: What a user types.
        target: Where the class is, as ``module:Attr``.
        summary: One line.
        guarantee: Of a rule, what its output follows: ``exact`` (the guided distribution),
            ``exact for ...`` (another, which is named) or ``lossy`` (none); of a drafter ``as the
            rule``; of others ``-``.
        source: The paper.
        plugin: The distribution an entry point came from; empty for our own.
    """

    kind: str
    name: str
    target: str
    summary: str = ""
    guarantee: str = "-"
    source: str = ""
    plugin: str = ""


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
        "jacobi": "mmdecode.draft.jacobi:Jacobi",
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
        "membership": "mmdecode.accept.exact:Membership",
        "rejection": "mmdecode.accept.rejection:Rejection",
        "typical": "mmdecode.accept.typical:Typical",
        "judge": "mmdecode.accept.judge:Judge",
        "ensemble": "mmdecode.accept.ensemble:Ensemble",
        "lantern": "mmdecode.accept.lantern:LANTERN",
        "cool": "mmdecode.accept.cool:Cool",
        "grouped": "mmdecode.accept.grouped:Grouped",
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
        "plausible": "mmdecode.guide.plausible:Plausible",
        "temperature_matched": "mmdecode.guide.plausible:TemperatureMatched",
        "margin_shift": "mmdecode.guide.margin_shift:MarginShift",
        "prompt_bias": "mmdecode.guide.prompt_bias:PromptBias",
        "near_ties": "mmdecode.guide.near_ties:NearTies",
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
    },
    "correct": {
        "uadf": "mmdecode.asr.correcting:UADFCorrection",
        "static": "mmdecode.asr.correcting:StaticCorrection",
        "shallow": "mmdecode.asr.correcting:ShallowCorrection",
        "llm": "mmdecode.asr.correcting:LanguageModelCorrection",
    },
    "adapters": {
        "whisper": "mmdecode.adapters.whisper:WhisperAdapter",
        "moonshine": "mmdecode.adapters.moonshine:MoonshineAdapter",
        "t5": "mmdecode.adapters.t5:T5Adapter",
        "umt5": "mmdecode.adapters.t5:UMT5Adapter",
        "bart": "mmdecode.adapters.bart:BartAdapter",
        "decoder_only": "mmdecode.adapters.decoder_only:DecoderOnlyAdapter",
        "default": "mmdecode.adapters.default:DefaultAdapter",
        "vision_language": "mmdecode.adapters.vision_language:VisionLanguageAdapter",
        "llava": "mmdecode.adapters.vision_language:LlavaAdapter",
        "instructblip": "mmdecode.adapters.instructblip:InstructBlipAdapter",
        "idefics": "mmdecode.adapters.vision_language:IdeficsAdapter",
        "gemma3": "mmdecode.adapters.vision_language:Gemma3Adapter",
        "qwen_vl": "mmdecode.adapters.vision_language:QwenVLAdapter",
        "paligemma": "mmdecode.adapters.vision_language:PaliGemmaAdapter",
        "chameleon": "mmdecode.adapters.vision_language:ChameleonAdapter",
        "llamagen": "mmdecode.adapters.llamagen:LlamaGenAdapter",
        "janus_images": "mmdecode.adapters.janus_images:JanusImagesAdapter",
        "emu3_images": "mmdecode.adapters.emu3_images:Emu3ImagesAdapter",
        "chameleon_images": "mmdecode.adapters.chameleon_images:ChameleonImagesAdapter",
        "imagegpt": "mmdecode.adapters.imagegpt:ImageGPTAdapter",
        "table": "mmdecode.testing.table:TableAdapter",
    },
    "recognizers": {
        "whisper": "mmdecode.asr.recognizers.whisper:WhisperRecognizer",
        "moonshine": "mmdecode.asr.recognizers.moonshine:MoonshineRecognizer",
        "generic": "mmdecode.asr.recognizers.generic:GenericRecognizer",
    },
    "checkpoints": {
        "moonshine": "mmdecode.models.moonshine.wheel:MoonshineWheel",
    },
}
KINDS = tuple(_BUILTIN)
_ATTRIBUTES = ("summary", "guarantee", "source")
"""What a class says of itself in string literals."""


def names(kind: str) -> list[str]:
    """Returns the names of one kind, our own first; loads no method."""
    return list(_entries(kind))


def describe(kind: str) -> list[Entry]:
    """Returns the entries of one kind.

    Of our own, what a class says of itself is read from its source; plug-ins are loaded, and one
    that fails to load is left out with a warning that names it.
    """
    entries = []
    for entry in _entries(kind).values():
        try:
            told = _told_by(_load(entry)) if entry.plugin else _written_in(entry.target)
        except Exception as error:  # a plug-in may fail in any way, and the others must still work
            if not entry.plugin:
                raise
            warnings.warn(f"left out: {error}", RuntimeWarning, stacklevel=2)
            continue
        if kind == "draft":
            told["guarantee"] = "as the rule"
        entries.append(replace(entry, **told))
    return entries


def _told_by(cls: type) -> dict[str, str]:
    first_line = (inspect.getdoc(cls) or "").partition("\n")[0]
    found = {name: str(getattr(cls, name)) for name in _ATTRIBUTES if hasattr(cls, name)}
    return {"summary": first_line} | found


def _written_in(target: str) -> dict[str, str]:
    """The same of a class of this package by its source, up to its first method."""
    module, _, name = target.partition(":")
    package, _, path = module.partition(".")
    text = (pkgutil.get_data(package, path.replace(".", "/") + ".py") or b"").decode()
    [head] = re.findall(rf"^class {name}\b.*?(?=^ {{4}}(?:def|@)|^[^\s)]|\Z)", text, re.M | re.S)
    found = {}
    for node in ast.walk(ast.parse(head)):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(told)))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(told)))
            ) if name in _ATTRIBUTES:
                found[name] = told
    return found


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


def _ours(kind: str) -> dict[str, Entry]:
    return {n: Entry(kind=kind, name=n, target=where) for n, where in _BUILTIN[kind].items()}


def _in_order(kind: str) -> Iterator[Entry]:
    """Our own entries first; plug-ins are looked for only where none of these is taken."""
    yield from _ours(kind).values()
    yield from (entry for entry in _entries(kind).values() if entry.plugin)


@functools.lru_cache(maxsize=16)
def _scan(kind: str, path: tuple[str, ...]) -> dict[str, Entry]:
    """Reading the metadata of every distribution takes milliseconds; done once per ``sys.path``."""
    found = _ours(kind)
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
    for entry in _in_order("adapters"):
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
    entry = next((one for one in _in_order("checkpoints") if one.name == scheme), None)
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
        yield from (entry for entry in _ours("recognizers").values() if entry.name != "generic")
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
