"""Which ids every shipped model generates with every drafter and guide, kept in a file.

    python -m tests.exactness.baseline --write            # makes the file
    python -m tests.exactness.baseline --add              # adds entries that it lacks
    python -m tests.exactness.baseline [PREFIX ...]       # says which entries differ from it

Only public names are used, so that whatever stands under them can be rewritten. An entry is called
``model/guide/drafter/rule/how``, with ``none`` for no guide and no drafter; ``how`` is one of

- ``batch``: two rows of different length,
- ``alone``: the second of them,
- ``captured``: two rows with ``compile=True``, rounds being recorded on a tape.

Its value is the list of ids by row, or the class of the error by which it is refused. The file has
them in sections:

- ``exact``: greedy and coupled ids, which no drafter may change;
- ``rejection``: ids under rejection sampling without a guide, and ``guided rejection`` with one:
  samples of a seed depend on what is drafted, so another way to draft may change them by design,
  and drafters that depend on measured times or on the processor are left out;
- ``counts``: passes summed over rows, tokens drafted and tokens accepted, without a guide and for
  drafters that do not depend on measured times or on the processor: another way to draft may
  change these too.

A guide that is refused without a drafter is not tried with one.
"""

import argparse
import copy
import functools
import json
import sys
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from PIL import Image

import mmdecode
from mmdecode import Decoder, registry
from mmdecode.asr.recognizers.whisper_features import window_waveform
from mmdecode.draft.ctc import CTC
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.source import Source
from mmdecode.errors import MMDecodeError
from mmdecode.guide.ctc import CTCScore
from mmdecode.models.ctc_head import CTCHead
from mmdecode.train.drafters.recipes import RECIPES, Options
from mmdecode.vlm import Answerer
from mmdecode.zoo.scenes import draw_scene, render
from mmdecode.zoo.speech import speech_test
from tests.support.taping import taping

FILE = Path(__file__).parents[1] / "data" / "baseline_ids.json"
SEED = 7
ROWS = ("first", "second")
RULES = ("greedy", "coupled", "rejection")
SECTIONS = ("exact", "rejection", "guided rejection", "counts")
SAME = "same"
"""In the file: the ids of the same entry without a drafter."""


@dataclass(frozen=True)
class Case:
    """What is decoded, and how."""

    model: str
    guide: str
    drafter: str
    rule: str
    how: str

    @property
    def name(self):
        return "/".join((self.model, self.guide, self.drafter, self.rule, self.how))

    @property
    def section(self):
        if self.rule != "rejection":
            return "exact"
        return "rejection" if self.guide == "none" else "guided rejection"


# Models and what they are given


class Text:
    """A language model, with two prompts."""

    texts = ("the station is", "every evening in the old garden the children and their aunt")
    plain, guided = 12, 5
    """New tokens without and with a guide."""

    def __init__(self, name):
        self.name = name
        self.model, self.processor = mmdecode.load(name, device="cpu")
        rows = [[0, 677, 266], [0, 677, 266, 528, 427, 511, 499, 302, 283]]
        if self.processor is not None:
            rows = [self.processor(text)["input_ids"] for text in self.texts]
        end = self.model.config.eos_token_id
        self.prompts = [row[:-1] if row[-1] == end else row for row in rows]

    def new_tokens(self, decoder):
        """How many are generated at most."""
        return self.plain if decoder.guide is None else self.guided

    def ids(self, decoder, rows, do_sample):
        """New ids by row."""
        prompts = [self.prompts[row] for row in rows]
        width = max(map(len, prompts))
        given = {
            "input_ids": torch.tensor([[2] * (width - len(p)) + p for p in prompts]),
            "attention_mask": torch.tensor(
                [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
            ),
            "max_new_tokens": self.new_tokens(decoder),
        }
        named = [ROWS[row] for row in rows]
        found = mmdecode.generate(
            self.model, decoder=decoder, request=named, do_sample=do_sample, **given
        )
        return found[:, width:].tolist()


class Speech(Text):
    """A recogniser, with two recordings."""

    plain, guided = 14, 6

    def __init__(self, name):
        self.name = name
        self.model, self.processor = mmdecode.load(name, device="cpu")
        clips = sorted(speech_test(), key=lambda clip: (clip.duration_s, clip.name))
        self.waves = [clips[row].samples() for row in (0, 6)]

    def ids(self, decoder, rows, do_sample):
        """Ids by row, up to the end."""
        waves = [self.waves[row] for row in rows]
        extractor = self.processor.feature_extractor
        features = self.processor(waves, sampling_rate=16_000, return_tensors="pt").input_features
        found = mmdecode.generate(
            self.model,
            decoder=decoder,
            input_features=features,
            request=[ROWS[row] for row in rows],
            mm_inputs={"audio": [window_waveform(wave, extractor) for wave in waves]},
            language="en",
            task="transcribe",
            max_new_tokens=self.new_tokens(decoder),
            temperature=float(do_sample),  # by which Whisper's own generate tells the two apart
        )
        return found.tolist()


class Vision(Text):
    """A vision-language model, with a question about each of two images."""

    plain, guided = 8, 5
    questions = ("Describe the image.", "Describe the image in detail, with colours and places.")

    def __init__(self, name):
        self.name = name
        made = Answerer.from_pretrained(name, device="cpu")
        self.model, self.processor = made.model, made.processor
        self.images = [Image.fromarray(render(draw_scene(2**40 + seed))) for seed in (3, 5)]

    def ids(self, decoder, rows, do_sample):
        """Ids by row, up to the end."""
        answers = Answerer(self.model, self.processor, decoder)(
            [self.images[row] for row in rows],
            [self.questions[row] for row in rows],
            ids=[ROWS[row] for row in rows],
            on_error="raise",
            max_new_tokens=self.new_tokens(decoder),
            margins=False,
            do_sample=do_sample,
        )
        return [list(answer.token_ids) for answer in answers]


class Images(Text):
    """A model of image tokens, which draws three by three of them."""

    side = 3

    def __init__(self, name):
        self.name = name
        self.model, self.processor = mmdecode.load(name, device="cpu")
        self.model.config.grid_size = self.side

    def ids(self, decoder, rows, do_sample):
        """Ids of the image by row."""
        found = mmdecode.generate(
            self.model,
            mode="image",
            decoder=decoder,
            guidance=1.0 if decoder.guide is None else None,
            request=[ROWS[row] for row in rows],
            do_sample=do_sample,
            **self.condition(rows),
        )
        return found.tokens.tolist()

    def condition(self, rows):
        """The condition: a class, or features of a caption."""
        if not self.model.config.caption_slots:
            return {"classes": [(4, 1)[row] for row in rows]}
        lengths = torch.tensor([(3, 7)[row] for row in rows])
        indices = torch.arange(7 * self.model.config.caption_size).view(7, -1)
        features = torch.stack([torch.sin(indices * (0.37 + row)) for row in rows])
        return {"features": features, "mask": torch.arange(7) < lengths[:, None]}


LESSER = {
    "llava-scenes-text": [],
    "llamagen-scenes-small": [],
    "llamagen-scenes-caption": ["guidance"],
}
"""Models that draft for others or are like others, and their guides."""
KINDS = (Text, Speech, Vision, Images)
MODELS = {
    "lm-synth": Text,
    "llava-scenes-text": Text,
    "whisper-synth": Speech,
    "llava-scenes": Vision,
    "llamagen-digits": Images,
    "llamagen-scenes": Images,
    "llamagen-scenes-small": Images,
    "llamagen-scenes-caption": Images,
}


@functools.cache
def subject(model):
    """A model and what it is given."""
    return MODELS[model](f"zoo:{model}")


# Drafters: the shipped ones, else untrained ones

OF_SPEECH = ("ctc",)
"""Drafters and guides that only recognisers have."""
UNTRAINED = ("medusa", "eagle", "vispec", "dream", "flash", "hydra", "kangaroo")
SHIPPED = {
    "whisper-synth": {
        "medusa": "medusa:path=zoo:whisper-synth-medusa",
        "medusa_linear": "medusa:path=zoo:whisper-synth-medusa-linear",
    },
    "llava-scenes": {
        "medusa": "medusa:path=zoo:llava-scenes-medusa",
        "eagle": "eagle:path=zoo:llava-scenes-eagle",
        "kangaroo": "kangaroo:path=zoo:llava-scenes-kangaroo",
        "assistant": "assistant:model=zoo:llava-scenes-text,length=3",
    },
    "llamagen-scenes": {
        "eagle": "eagle:path=zoo:llamagen-scenes-eagle",
    },
}
OPTIONS = {
    "amateur": {
        Text: "amateur:prompt=last_token",
        Speech: "amateur:prompt=last_token",
        Images: "amateur:transform=unconditional",
    },
    "jacobi": {Images: "jacobi:window=8"},
    "layer_skip": dict.fromkeys(KINDS, "layer_skip:exit_layer=2,length=3"),
    "adaptive": dict.fromkeys(KINDS, "adaptive:draft=lookup"),
}
UNSTEADY = ("adaptive", "quantized")
"""Drafters that draft by measured times, or by products of which some processors make others."""
FOLDER = tempfile.TemporaryDirectory(prefix="mmdecode-baseline-")


@functools.cache
def untrained(model, kind):
    """Folder of a drafter as a training begins with it."""
    folder = Path(FOLDER.name) / f"{model}-{kind}"
    image = isinstance(subject(model), Images)
    adapter_for = registry.image_adapter_for if image else registry.adapter_for
    adapter = adapter_for(subject(model).model)
    torch.manual_seed(0)
    module = RECIPES[kind].build(adapter, [], Options(kind=kind))
    RECIPES[kind].save(module, folder, adapter)
    return folder


@functools.cache
def untrained_ctc(model):
    """A CTC head with random weights, which finds a text of arbitrary subwords."""
    torch.manual_seed(0)
    width = subject(model).model.config.d_model
    sizes = {"source_size": width, "hidden_size": width, "inner_size": 16, "subwords": 40}
    head = CTCHead({**sizes, "kernel": 3, "strides": [4]})
    head.ids.copy_(torch.arange(600, 640))
    return head


@functools.cache
def smaller(model):
    """A random model of the same class and vocabulary with one layer."""
    whole = subject(model).model
    config = copy.deepcopy(whole.config)
    for name in ("num_hidden_layers", "encoder_layers", "decoder_layers"):
        if hasattr(config, name):
            setattr(config, name, 1)
    torch.manual_seed(0)
    return type(whole)(config).eval()


@functools.cache
def copied(model):
    """Texts that the output mostly copies: greedy ids, every fifth changed."""
    rows = reference(model, "none", "greedy", "batch")
    return [
        [token if position % 5 else token + 1 for position, token in enumerate(row, 1)]
        for row in rows
    ]


def source(case):
    texts = copied(case.model)
    return Source(length=4, ids=texts[1:] if case.how == "alone" else texts)


def drafter(case):
    """A new drafter of a case."""
    name, model = case.drafter, case.model
    shipped = SHIPPED.get(model, {}).get(name)
    if name == "none":
        return None
    if shipped:
        return registry.create("draft", shipped, target=subject(model).model)
    if name == "source":
        return source(case)
    if name == "ctc":
        return CTC(untrained_ctc(model), length=4)
    if name == "first_of":
        return FirstOf(source(case), registry.create("draft", "lookup"))
    if name == "assistant" and model == "llamagen-scenes":
        small = subject("llamagen-scenes-small").model
        return registry.create("draft", "assistant:length=3", model=small)
    if name == "assistant":
        return registry.create("draft", "assistant:length=3", model=smaller(model))
    if name in UNTRAINED:
        return registry.create("draft", f"{name}:path={untrained(model, name)}")
    return registry.create("draft", OPTIONS.get(name, {}).get(MODELS[model], name))


def drafters(model):
    """Names of drafters; those of untrained ones are left out that no training makes for it."""
    names = [name for name in registry.names("draft") if name not in UNTRAINED[1:]]
    if MODELS[model] is not Speech:
        names = [name for name in names if name not in OF_SPEECH] + [*UNTRAINED[1:]]
    more = [name for name in SHIPPED.get(model, ()) if name not in names]
    return ["none", *names, *more]


# Guides

NO_WORDS = (Text, Speech, Images)
GUIDE_OPTIONS = {
    "contrast": dict.fromkeys(KINDS, "contrast:prompt=last_token"),
    "bias": dict.fromkeys(KINDS, f"bias:words={FILE.parent / 'words.txt'},bonus=3"),
    "margin_shift": {
        Vision: "margin_shift:shift=2",
        **dict.fromkeys(NO_WORDS, "margin_shift:shift=2,yes=3,no=5"),
    },
    "near_ties": {
        Vision: "near_ties:gap=0.9,mass=0",
        **dict.fromkeys(NO_WORDS, "near_ties:gap=0.9,mass=0,yes=3,no=5"),
    },
}


def guide(case):
    """A new guide of a case."""
    if case.guide == "none":
        return None
    if case.guide == "ctc":
        return CTCScore(untrained_ctc(case.model))
    one = subject(case.model)
    tokenizer = getattr(one.processor, "tokenizer", one.processor)
    spec = GUIDE_OPTIONS.get(case.guide, {}).get(type(one), case.guide)
    return registry.create("guide", spec, target=one.model, tokenizer=tokenizer)


def guides(model):
    """Names of guides."""
    names = LESSER.get(model, registry.names("guide"))
    return ["none", *(n for n in names if MODELS[model] is Speech or n not in OF_SPEECH)]


def ways(guide):
    """How a guide is decoded with: captured with a few of them."""
    if guide == "none":
        return ("batch", "alone", "captured")
    return ("batch", "captured") if guide in ("cfg", "vcd", "guidance") else ("batch",)


# Decoding


def cases(models=None, half=False):
    """All of them; drafters are left out where the guide is refused without one.

    With ``half``, a drafter decodes with a guide either coupled or by the other two rules, and
    models like others only in batches.
    """
    for model in models or MODELS:
        for guided in guides(model):
            refused = isinstance(reference(model, guided, "greedy", "batch"), str)
            for how in ways(guided):
                for rule in RULES:
                    for name in drafters(model)[: 1 if refused else None]:
                        case = Case(model, guided, name, rule, how)
                        if not (half and left_out(case)):
                            yield case


def left_out(case):
    """Whether the half of the cases that a test decodes does without this one."""
    if case.model in LESSER and case.how != "batch":
        return True
    if "none" in (case.guide, case.drafter):
        return False
    guided, drafted = guides(case.model).index(case.guide), drafters(case.model).index(case.drafter)
    return (guided + drafted) % 2 == RULES.index(case.rule) % 2


@functools.cache
def outcome(case):
    """Ids by row or the class of the error, and what was drafted: see the top of the module."""
    try:
        decoder = Decoder(
            drafter(case),
            guide(case),
            "rejection" if case.rule == "rejection" else "auto",
            seed=SEED,
            compile=case.how == "captured",
        )
        rows = (1,) if case.how == "alone" else (0, 1)
        with warnings.catch_warnings(), taping() if case.how == "captured" else nullcontext():
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()
            ids = subject(case.model).ids(decoder, rows, case.rule != "greedy")
    except MMDecodeError as error:
        return type(error).__name__, None
    except Exception as error:
        error.add_note(case.name)
        raise
    stats = decoder.stats
    return ids, [stats.rounds, stats.drafted, stats.accepted]


def reference(model, guide, rule, how):
    return outcome(Case(model, guide, "none", rule, how))[0]


def record(chosen):
    """Entries of some cases by section and name."""
    sections = {name: {} for name in SECTIONS}
    for case in chosen:
        found, counts = outcome(case)
        if case.rule == "rejection" and case.drafter in UNSTEADY and not isinstance(found, str):
            continue  # samples depend on what is drafted
        sections[case.section][case.name] = found
        if counts is not None and case.guide == "none" and case.drafter not in UNSTEADY:
            sections["counts"][case.name] = counts
    return sections


def packed(entries):
    """Entries by ``model/guide/rule/how``; drafters with one error, or with the ids that there are
    without a drafter, are listed together."""
    groups = {}
    for name, found in entries.items():
        model, guided, drafter, rule, how = name.split("/")
        group = groups.setdefault(f"{model}/{guided}/{rule}/{how}", {})
        if drafter != "none" and found == group.get("none"):
            found = SAME
        if isinstance(found, str):
            group[found] = f"{group[found]} {drafter}" if found in group else drafter
        else:
            group[drafter] = found
    return groups


def unpacked(groups):
    """The entries that `packed` was given."""
    entries = {}
    for name, group in groups.items():
        model, guided, rule, how = name.split("/")
        for key, found in group.items():
            shared = isinstance(found, str)
            value = (group["none"] if key == SAME else key) if shared else found
            for drafter in found.split() if shared else [key]:
                entries[f"{model}/{guided}/{drafter}/{rule}/{how}"] = value
    return entries


def write(sections):
    """Makes the file: a line for each group."""
    compact = functools.partial(json.dumps, separators=(",", ":"))
    blocks = []
    for section, entries in sections.items():
        lines = [f"{compact(name)}:{compact(group)}" for name, group in packed(entries).items()]
        blocks.append(f"{compact(section)}:{{\n" + ",\n".join(lines) + "\n}")
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


@functools.cache
def kept():
    """The file's entries by section."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return {section: unpacked(groups) for section, groups in found.items()}


def differences(chosen):
    """Lines about the cases that are not as the file has them, and about entries it lacks."""
    return [
        f"{section}: {name}: {found}, not {kept()[section].get(name, 'in the file')}"
        for section, entries in record(chosen).items()
        if section in kept()
        for name, found in entries.items()
        if found != kept()[section].get(name)
    ]


def missing(chosen):
    """Lines about the file's entries that no case stands for."""
    known = {case.name for case in chosen}
    return [
        f"{section}: {name}: no such case any more"
        for section, entries in kept().items()
        for name in entries
        if name not in known
    ]


def main():
    """Makes the file, or compares with it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prefix", nargs="*", help="of the names of the entries to compare")
    parser.add_argument("--write", action="store_true", help="make the file")
    parser.add_argument("--add", action="store_true", help="add the entries that the file lacks")
    given = parser.parse_args()
    models = {name.partition("/")[0] for name in given.prefix} or None
    chosen = [case for case in cases(models) if case.name.startswith(tuple(given.prefix) or "")]
    if given.write:
        write(record(chosen))
        return
    if given.add:
        known = set().union(*kept().values())
        added = record(case for case in chosen if case.name not in known)
        write({section: entries | added[section] for section, entries in kept().items()})
        return
    lines = differences(chosen) + ([] if given.prefix else missing(chosen))
    print(*lines, f"{len(lines)} of {len(chosen)} cases differ", sep="\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
