"""Late fusion of a general recogniser and a language model of a domain, rivals and controls.

    for name in grammar docstrings general; do
      mmdecode train zoo lm-$name-moonshine --work outputs/lm-$name    # half an hour each
    done
    python benchmarks/fusion.py --page docs/fusion.md                  # hours on one core; resumes
    python benchmarks/fusion.py --domain docstrings --page docs/fusion.md
    python benchmarks/fusion.py --domain real --page docs/fusion.md

Held-out sentences in held-out voices are spoken (espeak-ng, `mmdecode.zoo.rebuilt`), clean and in
noise; one part has sentence templates that neither model has seen. The recogniser is a published
one; the language model is small and was trained on other sentences of the domain. Compared are the
recogniser's greedy text, the first hypothesis of its beam search, a beam as dear as fusion,
rescoring, correction without the audio (with and without the edit guard), static late fusion,
shallow fusion, and uncertainty-aware dynamic fusion (UADF); and, as controls, the fusion that was
best on the development part with language models of another domain and of general text. `o_nb` is
the best hypothesis of each list, `o_cp` the best text of its words.

Settings are chosen on a development part of the grammar: weights first, then the number of
candidates, each with and without the guard; ties go to the first. They are frozen for all other
parts and domains. Only temperatures, which belong to a language model, are fitted for docstrings,
on sentences that are not tested; for real clips they are those of the grammar. Rows are written as
they come, and a run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import SECTION, parsed, table, write_page, write_result

from mmdecode.asr import Transcriber
from mmdecode.asr.correction.calibration import calibrate
from mmdecode.asr.correction.corrector import GUARD, Corrector
from mmdecode.asr.correction.fusion import Acoustic
from mmdecode.asr.correction.n_best_lists import NBestList, lists_of
from mmdecode.asr.correction.selection import TextScorer, highest, joined_scores
from mmdecode.asr.correction.transcripts import (
    Corrected,
    FusedCorrection,
    LanguageModelCorrection,
)
from mmdecode.checkpoints import local_path
from mmdecode.errors import run_script
from mmdecode.evaluation.nbest.n_best import Aligner, count_lists
from mmdecode.evaluation.speech.wer import count_steps, summed
from mmdecode.evaluation.speed.stopwatch import machine
from mmdecode.evaluation.stats.intervals import mapsswe, paired_bootstrap
from mmdecode.guide.fusion import Fusion, Given, Shallow, Static
from mmdecode.guide.uadf import UADF
from mmdecode.runs.console import only_our_output, progress_bar
from mmdecode.runs.files import (
    append_line,
    check_settings,
    complete_lines,
    note_settings,
    open_append,
    run_of,
)
from mmdecode.train.zoo.sentences import docstring_sentences
from mmdecode.zoo.real_clips import RealClip, all_clips
from mmdecode.zoo.rebuilt import Utterance, utterances, voiced
from mmdecode.zoo.synthesis import Espeak

HERE = Path(__file__).parent
BATCH = 8
STAGE = 40
BEAMS, LISTED = 8, 5
GREEDY, FIRST, RESCORED, ALONE, FREE = "greedy", "1-best", "rescored", "llm", "llm, free"
FUSIONS: dict[str, type[Fusion]] = {"static": Static, "shallow": Shallow, "uadf": UADF}
RIVALS = (FIRST, RESCORED, ALONE, FREE)
GRIDS: dict[str, list[dict[str, float]]] = {
    RESCORED: [{"weight": w} for w in (0.1, 0.2, 0.4, 0.8)],
    "static": [{"weight": w} for w in (0.5, 1.0, 4.0)],
    "shallow": [{"weight": w} for w in (0.5, 1.0, 2.0)],
    "uadf": [{"scale": 1.0}, {"scale": 1.0, "beta": 0.0}, {"scale": 4.0, "beta": 0.0}],
}
"""Settings that are tried for each method, the setting of its paper first where it names one."""
CANDIDATES = (8, 16, 32)
SECTIONS = {"grammar": SECTION, "docstrings": "docstrings", "real": "real clips"}
Item = Utterance | RealClip


@dataclass(frozen=True)
class Recognised:
    """Recognised utterances: N-best lists, the recogniser's inputs, and its greedy texts."""

    lists: list[NBestList]
    audio: list[Given]
    greedy: list[str]
    waves: list[np.ndarray]


class Bench:
    """Recogniser, language models and speech synthesis of the benchmark.

    Args:
        recogniser: Checkpoint of the recogniser.
        language: Checkpoint of the language model of the domain.
        controls: Checkpoints of other language models, by name; loaded where they are used.
    """

    def __init__(self, recogniser: str, language: str, controls: Mapping[str, str]) -> None:
        self.folders = {"": language, **controls}
        self._correctors: dict[str, Corrector] = {}
        self.transcriber = Transcriber.from_pretrained(
            recogniser, device="cpu", n_best=BEAMS, timestamps=False, batch_size=BATCH
        )
        model, processor = self.transcriber.model, self.transcriber.processor
        self.recogniser = Acoustic(model=model, tokenizer=processor.tokenizer)

    def corrector(self, control: str = "") -> Corrector:
        """The corrector of the domain, or a control."""
        if control not in self._correctors:
            self._correctors[control] = Corrector.from_pretrained(
                self.folders[control], device="cpu", batch_size=BATCH, max_new_tokens=60, draft=None
            )
        return self._correctors[control]

    @cached_property
    def engine(self) -> Espeak:
        """The speech synthesiser."""
        return Espeak()

    @cached_property
    def scorer(self) -> TextScorer:
        """The language model of the domain as a scorer of texts."""
        own = self.corrector()
        return TextScorer(own.model, own.prompts.tokenizer, batch_size=64)

    def waves(self, some: Sequence[Item], snr_db: float) -> list[np.ndarray]:
        """Synthesises utterances in noise, or reads clips."""
        return [
            one.samples()
            if isinstance(one, RealClip)
            else one.noisy(one.spoken(self.engine), snr_db)
            for one in some
        ]

    def audio(self, waves: Sequence[np.ndarray]) -> list[Given]:
        """Inputs of the recogniser in a fusion."""
        ours = self.transcriber.recognizer
        prompt = tuple(ours.prompt(None, ()))
        return [Given(features=one, prompt=prompt) for one in ours.features(waves)]

    def recognise(self, some: Sequence[Item], snr_db: float) -> Recognised:
        """Recognises utterances in noise, or clips."""
        waves = self.waves(some, snr_db)
        found = self.transcriber(waves, on_error="raise")
        lists = []
        for one, transcript in zip(some, found, strict=True):
            first = lists_of(transcript)[0]
            scores = None if first.scores is None else first.scores[:LISTED]
            lists.append(NBestList(one.name, first.hypotheses[:LISTED], scores, one.text))
        return Recognised(lists, self.audio(waves), [one.text for one in found], waves)

    def corrected(self, recognised: Recognised) -> list[str]:
        """Texts corrected by the language model alone, without the edit guard."""
        corrector = self.corrector()
        corrector.decoder, corrector.guard = replace(corrector.decoder, guide=None), None
        return texts_of(LanguageModelCorrection(corrector)(recognised.lists))

    def fused(
        self, name: str, options: Mapping[str, Any], heat: Mapping[str, float], control: str = ""
    ) -> FusedCorrection:
        """Correction with a fusion of recogniser and language model."""
        kind: Callable[..., Fusion] = FUSIONS[name]
        given = {k: v for k, v in options.items() if k not in ("candidates", "guard")}
        corrector = self.corrector(control)
        corrector.guard = GUARD if options.get("guard", True) else None
        return FusedCorrection(
            corrector,
            self.recogniser,
            lambda branch: kind(branch, **given, **heat),
            options.get("candidates", CANDIDATES[0]),
        )

    def rescored(self, lists: Sequence[NBestList], weight: float) -> list[str]:
        """The hypothesis that recogniser and language model together prefer."""
        scores = self.scorer.of_lists(lists)
        return [
            one.hypotheses[highest(joined_scores(one, [s.mean for s in own], weight)).index]
            for one, own in zip(lists, scores, strict=True)
        ]

    def searched(self, waves: Sequence[np.ndarray], beams: int) -> list[str]:
        """Texts of a beam search."""
        wide = self.transcriber.with_options(n_best=0, beams=beams)
        return [one.text for one in wide(list(waves), on_error="raise")]

    def texts(
        self, recognised: Recognised, tuned: Mapping[str, Any]
    ) -> tuple[dict[str, list[str]], list[list[str]]]:
        """Texts of every method, and which model decided each word of UADF."""
        lists, audio = recognised.lists, recognised.audio
        found = {GREEDY: recognised.greedy, FIRST: [one.best for one in lists]}
        found[f"beam {tuned['beams']}"] = self.searched(recognised.waves, tuned["beams"])
        found[RESCORED] = self.rescored(lists, **tuned["options"][RESCORED])
        found[FREE] = self.corrected(recognised)
        decided: list[list[str]] = []
        for name in FUSIONS:
            rows = self.fused(name, tuned["options"][name], tuned["temperatures"][""])(lists, audio)
            found[name] = texts_of(rows)
            decided = [[word.by for word in one.words] for one in rows]
        return found, decided

    def controls(
        self, lists: Sequence[NBestList], audio: Sequence[Given], tuned: Mapping[str, Any]
    ) -> dict[str, list[str]]:
        """Texts of the best fusion with each of the other language models."""
        best, found = tuned["best"], {}
        for name in [name for name in self.folders if name]:
            way = self.fused(best, tuned["options"][best], tuned["temperatures"][name], name)
            found[name] = texts_of(way(lists, audio))
        return found

    def heat(self, recognised: Recognised, control: str = "") -> dict[str, float]:
        """Temperatures that calibrate a language model and the recogniser."""
        way = self.fused("uadf", {}, {}, control)
        fitted = calibrate(way.corrector, recognised.lists, recognised.audio)
        return {"main_temperature": fitted.main, "acoustic_temperature": fitted.acoustic}


def texts_of(rows: Sequence[Corrected]) -> list[str]:
    """Final texts of corrections."""
    return [one.correction.text for one in rows]


def guarded(text: str, hypotheses: Sequence[str]) -> str:
    """A corrected text, or the first hypothesis where the edit guard refuses it."""
    return hypotheses[0] if GUARD(text, hypotheses) else text


def tune(bench: Bench, recognised: Recognised) -> dict[str, Any]:
    """Fits temperatures, then for each method the setting with the fewest errors."""
    heat = {"": bench.heat(recognised)}
    aligner, lists = Aligner(), recognised.lists

    def errors(texts: Sequence[str]) -> int:
        pairs = zip(lists, texts, strict=True)
        return sum(aligner.errors(one.reference or "", text) for one, text in pairs)

    tried: dict[str, list[tuple[int, dict[str, Any]]]] = {
        RESCORED: [(errors(bench.rescored(lists, **given)), given) for given in GRIDS[RESCORED]]
    }
    positions = 0.0
    for name in FUSIONS:
        tried[name] = []

        def attempt(given: Mapping[str, Any], name: str = name) -> float:
            way = bench.fused(name, {**given, "guard": False}, heat[""])
            free = texts_of(way(lists, recognised.audio))
            kept = [guarded(text, one.hypotheses) for text, one in zip(free, lists, strict=True)]
            for guard, texts in ((True, kept), (False, free)):
                tried[name].append((errors(texts), {**given, "guard": guard}))
            return way.positions / len(lists)

        def best(name: str = name) -> dict[str, Any]:
            return min(tried[name], key=lambda one: one[0])[1]

        for given in GRIDS[name]:
            positions = attempt({**given, "candidates": CANDIDATES[0]})
        chosen = {k: v for k, v in best().items() if k != "guard"}
        for count in CANDIDATES[1:]:
            attempt({**chosen, "candidates": count})
    options = {name: min(rows, key=lambda one: one[0]) for name, rows in tried.items()}
    tokenizer = bench.recogniser.tokenizer
    tokens = np.mean([len(tokenizer(text).input_ids) for text in recognised.greedy])
    return {
        "temperatures": heat,
        "lists": len(lists),
        "words": sum(len((one.reference or "").split()) for one in lists),
        "errors": {FIRST: errors([one.best for one in lists]), "tried": tried},
        "options": {name: given for name, (_, given) in options.items()},
        "best": min(FUSIONS, key=lambda name: options[name][0]),
        "positions": round(positions, 1),
        # scored positions of the recogniser's decoder for each token that it writes
        "beams": int(min(32, max(BEAMS, round(positions / tokens)))),
    }


def items(domain: str, part: Any, count: int) -> Sequence[Item]:
    """The first utterances of a part of a domain."""
    if domain == "real":
        return all_clips()[:count]
    if domain == "docstrings":
        texts = docstring_sentences("test")
        random.Random(2027).shuffle(texts := [*texts])
        chosen = texts[-count:] if part == "development" else texts[:count]
        return voiced(chosen, f"docstrings_{part}")
    return utterances(part, count)


def development(bench: Bench, domain: str, count: int, levels: Sequence[float]) -> Recognised:
    """Recognised sentences to choose settings on, ``count`` at each level."""
    some = items(domain, "development", count)
    parts = [bench.recognise(batch, level) for level in levels for batch in batches(some)]
    names = ("lists", "audio", "greedy", "waves")
    return Recognised(*([x for part in parts for x in getattr(part, name)] for name in names))


def batches(some: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Utterances in batches of `BATCH`."""
    for start in range(0, len(some), BATCH):
        yield some[start : start + BATCH]


def digests(folders: Sequence[str]) -> dict[str, str]:
    """First digits of the SHA-256 of language models' weights, by the name of the model."""
    return {
        Path(one).parent.name: hashlib.sha256(
            (Path(local_path(one)) / "model.safetensors").read_bytes()
        ).hexdigest()[:16]
        for one in folders
    }


def level_name(snr_db: float) -> str:
    """A noise level as text."""
    return "clean" if math.isinf(snr_db) else f"{snr_db:g} dB"


def run(bench: Bench, some: Sequence[Item], path: Path, snr_db: float, tuned: Any) -> None:
    """Runs every method on utterances at a noise level; rows are appended to a file."""
    done = number_of(path)
    with open_append(path) as file, progress_bar() as bar:
        task = bar.add_task(path.stem, total=len(some) - done)
        for batch in batches(some[done:]):
            recognised = bench.recognise(batch, snr_db)
            found, decided = bench.texts(recognised, tuned)
            for index, one in enumerate(recognised.lists):
                row = {
                    "id": one.id,
                    "reference": one.reference,
                    "hypotheses": one.hypotheses,
                    "texts": {name: texts[index] for name, texts in found.items()},
                    "decided": decided[index],
                }
                append_line(file, json.dumps(row).encode() + b"\n")
            bar.advance(task, len(batch))


def run_controls(bench: Bench, some: Sequence[Item], path: Path, snr_db: float, tuned: Any) -> None:
    """Adds the controls to the rows of a part, in a file of their own."""
    rows = [json.loads(line) for line in complete_lines(path)][: len(some)]
    done = number_of(own := controls_of(path))
    with open_append(own) as file, progress_bar() as bar:
        task = bar.add_task(own.stem, total=len(rows) - done)
        for start in range(done, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            lists = [
                NBestList(r["id"], tuple(r["hypotheses"]), None, r["reference"]) for r in batch
            ]
            audio = bench.audio(bench.waves(some[start : start + len(batch)], snr_db))
            found = bench.controls(lists, audio, tuned)
            for index in range(len(batch)):
                texts = {name: texts[index] for name, texts in found.items()}
                append_line(file, json.dumps(texts).encode() + b"\n")
            bar.advance(task, len(batch))


def number_of(path: Path) -> int:
    """Number of complete rows of a file."""
    return len(list(complete_lines(path))) if path.exists() else 0


def controls_of(path: Path) -> Path:
    """File of the controls' texts."""
    return path.with_suffix(".controls.jsonl")


def judged(path: Path, best: str) -> dict[str, Any]:
    """Rates, oracles and paired tests of one part at one level."""
    rows = [json.loads(line) for line in complete_lines(path)]
    for row in rows:
        for free, kept in ((FREE, ALONE), (best, f"{best}, guarded")):
            row["texts"][kept] = guarded(row["texts"][free], row["hypotheses"])
    aligner = Aligner()
    lists = [NBestList(r["id"], tuple(r["hypotheses"]), None, r["reference"]) for r in rows]
    counts = count_lists(lists, aligner)
    words = counts.first[:, 0]
    ways = list(rows[0]["texts"])
    steps = {w: [aligner.steps(r["reference"], r["texts"][w]) for r in rows] for w in ways}
    tables = {w: count_steps(found) for w, found in steps.items()}
    rates = {}
    for way, counted in tables.items():
        score = summed(counted, aligner.normaliser, aligner.scorer, None)
        rates[way] = {"wer": score.value, "low": score.low, "high": score.high}
    tests = {}
    for first, second in [(way, best) for way in ways if way not in (best, GREEDY)]:
        errors = [tables[w][:, 2:5].sum(1) for w in (first, second)]
        bootstrap = paired_bootstrap(errors[0], errors[1], words)
        tests[f"{first} to {second}"] = {
            "difference": bootstrap.difference,
            "low": bootstrap.low,
            "high": bootstrap.high,
            "p_mapsswe": mapsswe(steps[first], steps[second]).p,
        }
    by = [who for row in rows for who in row["decided"]]
    return {
        "utterances": len(rows),
        "words": int(words.sum()),
        "rates": rates,
        "o_nb": float(counts.best[:, 2:5].sum() / words.sum()),
        "o_cp": float(counts.missing.sum() / words.sum()),
        "tests": tests,
        "met": all(tests[f"{rival} to {best}"]["low"] > 0 for rival in RIVALS),
        "decided": {who: round(by.count(who) / len(by), 4) for who in sorted({*by})},
        "controls": controlled(rows, controls_of(path), {w: tables[w] for w in (FIRST, best)}),
    }


def controlled(
    rows: Sequence[Mapping[str, Any]], path: Path, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Rates of the controls on the sentences that they were run on, by language model.

    Args:
        rows: The rows of the part.
        path: File of the controls' texts.
        known: Counts of the ways that the controls are compared with, a row per sentence.
    """
    lines = [json.loads(line) for line in complete_lines(path)] if path.exists() else []
    if not lines:
        return {}
    kept, aligner = rows[: len(lines)], Aligner()
    tables = {way: counted[: len(lines)] for way, counted in known.items()}
    for way in lines[0]:
        pairs = zip(kept, lines, strict=True)
        tables[way] = count_steps([aligner.steps(r["reference"], t[way]) for r, t in pairs])
    words = tables[FIRST][:, 0]
    found: dict[str, Any] = {"utterances": len(kept)}
    for way, counted in tables.items():
        gain = paired_bootstrap(*(tables[w][:, 2:5].sum(1) for w in (FIRST, way)), words)
        found[way] = {
            "wer": float(counted[:, 2:5].sum() / words.sum()),
            "gained": [gain.difference, gain.low, gain.high],
        }
    return found


def shown(results: dict[str, Any]) -> str:
    """The table, and the tests below it."""
    rows, tests, head = [], [], []
    best = results["tuned"]["best"]
    for case, found in results["cases"].items():
        names = list(found["rates"])
        rates = [
            f"**{100 * r['wer']:.1f}**" if name == best else f"{100 * r['wer']:.1f}"
            for name, r in found["rates"].items()
        ]
        oracles = [f"{100 * found[name]:.1f}" for name in ("o_nb", "o_cp")]
        head = ["part", "utterances", "words", *names, "o_nb", "o_cp"]
        rows.append([case, str(found["utterances"]), str(found["words"]), *rates, *oracles])
        row = [case]
        for rival in RIVALS:
            test = found["tests"][f"{rival} to {best}"]
            row.append(points(test["difference"], test["low"], test["high"]))
        tests.append([*row, "yes" if found["met"] else "no"])
    facts = results["machine"]
    test_head = ["part", *(f"{rival} to {best}" for rival in RIVALS), "all beyond the interval"]
    return (
        f"WER, %; the fusion that was best on the development part is bold. "
        f"{results['settings']['recogniser']}; torch {facts['torch']}, transformers "
        f"{facts['transformers']}, {facts['date']}.\n\n{table(head, rows)}\n\n"
        f"Points of WER gained, with paired 95 % intervals (bootstrap over utterances):\n\n"
        f"{table(test_head, tests)}{controls_table(results['cases'])}"
    )


def controls_table(cases: Mapping[str, Any]) -> str:
    """The table of the controls; empty if there are none."""
    rows, names = [], []
    for case, one in cases.items():
        if found := one["controls"]:
            names = [name for name in found if name not in ("utterances", FIRST)]
            rows.append([case, str(found["utterances"]), *(gained(found[n]) for n in names)])
    if not rows:
        return ""
    return (
        "\n\nControls: WER, %, and points gained over 1-best, of that fusion with each language "
        f"model, on the first sentences of each part:\n\n"
        f"{table(['part', 'utterances', *names], rows)}"
    )


def gained(found: Mapping[str, Any]) -> str:
    """An error rate, and the points gained with their interval."""
    return f"{100 * found['wer']:.1f}; {points(*found['gained'])}"


def points(difference: float, low: float, high: float) -> str:
    """A difference and its interval in points."""
    return f"{100 * difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def arguments_of() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--domain", choices=list(SECTIONS), default="grammar")
    parser.add_argument("--recogniser", default="moonshine:tiny-en")
    parser.add_argument("--models", type=Path, default=Path("outputs"), help="with lm-DOMAIN/model")
    parser.add_argument("--language", help="another language model than lm-DOMAIN")
    parser.add_argument("--no-controls", action="store_true", help="also where there are models")
    parser.add_argument("--utterances", type=int, default=300, help="of the test, at each level")
    parser.add_argument("--unseen", type=int, default=100, help="of unseen templates, likewise")
    parser.add_argument("--controls", type=int, default=100, help="sentences of each, of a part")
    parser.add_argument("--development", type=int, default=32, help="at each level")
    parser.add_argument("--snr", type=float, nargs="+", default=[math.inf, 21.0, 15.0, 9.0])
    parser.add_argument("--work", type=Path, default=Path("outputs/fusion"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "fusion", help="folder")
    parser.add_argument("--page", type=Path, help="Markdown whose tables are replaced")
    return parsed(parser)


def main() -> None:
    """Runs, or goes on."""
    arguments = arguments_of()
    domain = arguments.domain
    report = arguments.out / f"{domain}.json"
    own = {"grammar": "grammar", "docstrings": "docstrings", "real": "general"}[domain]
    others = {"wrong domain": "grammar" if own == "docstrings" else "docstrings"}
    others |= {} if own == "general" else {"general text": "general"}
    folder = f"{arguments.models}/lm-{{}}/model"
    language = arguments.language or folder.format(own)
    controls = {name: folder.format(other) for name, other in others.items()}
    with_controls = not arguments.no_controls and all(Path(p).exists() for p in controls.values())
    controls = controls if with_controls else {}
    only_our_output()
    work = arguments.work / domain
    settings = {
        "recogniser": arguments.recogniser,
        "language": arguments.language or f"lm-{own}",
        "weights": digests([language]),
        "development": arguments.development,
    }
    if run_of(work).exists():
        check_settings(work, settings, resume=True)
    note_settings(work, settings)
    facts = machine(torch.device("cpu"), "float32")
    bench = Bench(arguments.recogniser, language, controls)
    chosen = arguments.work / "grammar" / "tuned.json"
    if not chosen.exists():
        if domain != "grammar":
            raise SystemExit(f"{chosen} is missing: run --domain grammar first, which tunes")
        recognised = development(bench, domain, arguments.development, arguments.snr)
        write_result(chosen, tune(bench, recognised))
    tuned = json.loads(chosen.read_text())
    known = tuned["temperatures"]
    fitted = work / "temperatures.json"
    if fitted.exists():
        known = json.loads(fitted.read_text())
    elif domain == "real":
        fitted = arguments.work / "grammar" / fitted.name
        if not with_controls or not fitted.exists():
            raise SystemExit(
                f"--domain real needs lm-docstrings/model in {arguments.models}, and {fitted}: run "
                "--domain grammar first, without --no-controls"
            )
        known = json.loads(fitted.read_text())
        known = {"": known["general text"], "wrong domain": known["wrong domain"]}
    elif with_controls or domain != "grammar":
        some = development(bench, domain, arguments.development, arguments.snr)
        known = {name: bench.heat(some, name) for name in bench.folders}
        write_result(fitted, known)
    tuned["temperatures"] = known
    wanted = {"test": arguments.utterances}
    wanted |= {"unseen": arguments.unseen} if domain == "grammar" and arguments.unseen else {}
    levels = [math.inf] if domain == "real" else arguments.snr
    cases: dict[str, Any] = {}
    settings = settings | {"controls": digests([*controls.values()])}
    results = {"settings": settings, "machine": facts, "tuned": tuned, "cases": cases}
    parts = [
        (part, count, level, work / f"{part}-{level:g}.jsonl")
        for level in levels
        for part, count in wanted.items()
    ]
    # all parts and levels grow together, so that a run that is stopped has some of each
    goals = range(STAGE, max(wanted.values()) + STAGE, STAGE)
    for goal in goals:
        done = all(number_of(path) >= min(goal, count) for _, count, _, path in parts)
        if not done or goal == goals[-1]:
            for part, count, level, path in parts:
                some = items(domain, part, min(goal, count))
                run(bench, some, path, level, tuned)
                if with_controls:
                    run_controls(bench, some[: arguments.controls], path, level, tuned)
                cases[f"{part}, {level_name(level)}"] = judged(path, tuned["best"])
            write_result(report, results)
    print(shown(results))
    if arguments.page is not None:
        write_page(arguments.page, shown(results), SECTIONS[domain])


if __name__ == "__main__":
    run_script(main)
