"""Correction of ``zoo:whisper-synth``'s N-best lists, with and without access to the audio.

    python benchmarks/fusion.py --utterances 1000 --unseen 300     # hours on one core; resumes
    python benchmarks/fusion.py --utterances 20 --unseen 10 --development 10 --snr 3

Held-out sentences in held-out voices are spoken again (espeak-ng, `mmdecode.zoo.rebuilt`) in noise
of several levels; one part has sentence templates that neither model has seen. Compared are the
first hypothesis of a beam search, rescoring by a language model, correction by a language model
without audio, static late fusion, shallow fusion and uncertainty-aware dynamic fusion, next to
the best hypothesis of each list (o_nb) and the best text of its words (o_cp). Temperatures and
weights are chosen on a development part: `GRIDS` lists what is tried, ties go to the first. Rows
are written as they come, and a run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pages import parsed, table, write_page, write_result

from mmdecode.asr import Transcriber
from mmdecode.asr.correction.calibration import calibrate
from mmdecode.asr.correction.corrector import Corrector
from mmdecode.asr.correction.fusion import Acoustic
from mmdecode.asr.correction.n_best_lists import NBestList, lists_of
from mmdecode.asr.correction.selection import TextScorer, highest, joined_scores
from mmdecode.asr.correction.transcripts import FusedCorrection, LanguageModelCorrection
from mmdecode.asr.recognizers.whisper_prompts import Prompts
from mmdecode.cli.progress import progress_bar
from mmdecode.errors import run_script
from mmdecode.evaluation.nbest.n_best import Aligner, count_lists
from mmdecode.evaluation.speech.wer import count_steps, summed
from mmdecode.evaluation.speed.stopwatch import load
from mmdecode.evaluation.stats.intervals import mapsswe, paired_bootstrap
from mmdecode.guide.fusion import Fusion, Given, Shallow, Static
from mmdecode.guide.uadf import UADF
from mmdecode.runs.console import only_our_output
from mmdecode.runs.files import (
    append_line,
    check_settings,
    complete_lines,
    note_settings,
    open_append,
    run_of,
)
from mmdecode.zoo.rebuilt import Utterance, utterances
from mmdecode.zoo.synthesis import Espeak

HERE = Path(__file__).parent
RATE = 16_000
BATCH = 16
STAGE = 48
FIRST, RESCORED, ALONE = "1-best", "rescored", "llm"
FUSIONS: dict[str, type[Fusion]] = {"static": Static, "shallow": Shallow, "uadf": UADF}
GRIDS: dict[str, list[dict[str, float]]] = {
    RESCORED: [{"weight": w} for w in (0.1, 0.2, 0.4, 0.8)],
    "static": [{"weight": w} for w in (0.5, 1.0, 2.0, 4.0, 8.0)],
    "shallow": [{"weight": w} for w in (0.25, 0.5, 1.0, 2.0)],
    "uadf": [
        {"scale": 1.0},
        {"scale": 1.0, "beta": 0.0},
        {"scale": 4.0},
        {"scale": 4.0, "beta": 0.0},
    ],
}
"""Settings that are tried for each method, the setting of its paper first where it names one."""


@dataclass(frozen=True)
class Recognised:
    """Recognised utterances: N-best lists, and the recogniser's inputs for fusion."""

    lists: list[NBestList]
    audio: list[Given]


class Bench:
    """Recogniser, language model and speech synthesis of the benchmark.

    Args:
        recogniser: Checkpoint of the recogniser.
        language: Checkpoint of the language model.
    """

    def __init__(self, recogniser: str, language: str) -> None:
        self.transcriber = Transcriber.from_pretrained(
            recogniser, device="cpu", n_best=5, timestamps=False, batch_size=BATCH
        )
        model, processor = self.transcriber.model, self.transcriber.processor
        prompts = Prompts.of(model.generation_config, self.transcriber.options)
        self.prompt = tuple(prompts.initial(prompts.language))
        self.extractor = processor.feature_extractor
        self.recogniser = Acoustic(model=model, tokenizer=processor.tokenizer)
        self.language = language
        self.corrector = Corrector.from_pretrained(
            language, device="cpu", batch_size=BATCH, max_new_tokens=60, draft=None
        )

    @cached_property
    def engine(self) -> Espeak:
        """The speech synthesiser."""
        return Espeak()

    @cached_property
    def scorer(self) -> TextScorer:
        """The language model as a scorer of texts."""
        return TextScorer(self.corrector.model, self.corrector.prompts.tokenizer, batch_size=64)

    def recognise(self, some: Sequence[Utterance], snr_db: float) -> Recognised:
        """Synthesises utterances in noise and recognises them."""
        waves = [one.noisy(one.spoken(self.engine), snr_db) for one in some]
        found = self.transcriber(waves, on_error="raise")
        lists = []
        for one, transcript in zip(some, found, strict=True):
            first = lists_of(transcript)[0]
            lists.append(NBestList(one.name, first.hypotheses, first.scores, one.text))
        features = self.extractor(waves, sampling_rate=RATE, return_tensors="pt").input_features
        return Recognised(lists, [Given(features=one, prompt=self.prompt) for one in features])

    def corrected(self, recognised: Recognised) -> list[str]:
        """Texts corrected by the language model alone."""
        self.corrector.decoder = replace(self.corrector.decoder, guide=None)
        found = LanguageModelCorrection(self.corrector)(recognised.lists)
        return [one.correction.text for one in found]

    def fused(
        self, name: str, options: dict[str, float], heat: dict[str, float]
    ) -> FusedCorrection:
        """Correction with a fusion of recogniser and language model."""
        kind: Callable[..., Fusion] = FUSIONS[name]
        return FusedCorrection(
            self.corrector, self.recogniser, lambda branch: kind(branch, **options, **heat)
        )

    def rescored(self, lists: Sequence[NBestList], weight: float) -> list[str]:
        """The hypothesis that recogniser and language model together prefer."""
        scores = self.scorer.of_lists(lists)
        return [
            one.hypotheses[highest(joined_scores(one, [s.mean for s in own], weight)).index]
            for one, own in zip(lists, scores, strict=True)
        ]

    def texts(
        self, recognised: Recognised, tuned: dict[str, Any]
    ) -> tuple[dict[str, list[str]], Any]:
        """Texts of every method, and which model decided each word of UADF."""
        found = {FIRST: [one.best for one in recognised.lists]}
        found[RESCORED] = self.rescored(recognised.lists, **tuned["options"][RESCORED])
        found[ALONE] = self.corrected(recognised)
        decided: list[list[str]] = []
        for name in FUSIONS:
            way = self.fused(name, tuned["options"][name], tuned["temperatures"])
            rows = way(recognised.lists, recognised.audio)
            found[name] = [one.correction.text for one in rows]
            decided = [[word.by for word in one.words] for one in rows]
        return found, decided


def tune(bench: Bench, recognised: Recognised) -> dict[str, Any]:
    """Fits temperatures, then for each method the setting with the fewest errors."""
    way = bench.fused("uadf", {}, {})
    fitted = calibrate(way.corrector, recognised.lists, recognised.audio)
    heat = {"main_temperature": fitted.main, "acoustic_temperature": fitted.acoustic}
    aligner = Aligner()

    def errors(texts: Sequence[str]) -> int:
        pairs = zip(recognised.lists, texts, strict=True)
        return sum(aligner.errors(one.reference or "", text) for one, text in pairs)

    tried: dict[str, list[int]] = {}
    for name, grid in GRIDS.items():
        tried[name] = []
        for options in grid:
            if name == RESCORED:
                texts = bench.rescored(recognised.lists, **options)
            else:
                rows = bench.fused(name, options, heat)(recognised.lists, recognised.audio)
                texts = [one.correction.text for one in rows]
            tried[name].append(errors(texts))
    return {
        "temperatures": heat,
        "tokens": fitted.tokens,
        "lists": len(recognised.lists),
        "errors": {FIRST: errors([one.best for one in recognised.lists])} | tried,
        "options": {n: GRIDS[n][int(np.argmin(values))] for n, values in tried.items()},
    }


def batches(items: Sequence[Utterance]) -> Iterator[Sequence[Utterance]]:
    """Utterances in batches of `BATCH`."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def run(bench: Bench, part: str, snr_db: float, count: int, work: Path, tuned: Any) -> Path:
    """Runs every method on a part at a noise level; rows are appended to a file."""
    path = work / f"{part}-{snr_db:g}.jsonl"
    done = len(list(complete_lines(path))) if path.exists() else 0
    remaining = utterances(part, count)[done:]
    with open_append(path) as file, progress_bar() as bar:
        task = bar.add_task(f"{part}, {snr_db:g} dB", total=len(remaining))
        for some in batches(remaining):
            recognised = bench.recognise(some, snr_db)
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
            bar.advance(task, len(some))
    return path


def judged(path: Path) -> dict[str, Any]:
    """Rates, oracles and paired tests of one part at one level."""
    rows = [json.loads(line) for line in complete_lines(path)]
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
    for first, second in [(FIRST, w) for w in ways[1:]] + [
        (ALONE, "uadf"),
        ("shallow", "uadf"),
        ("static", "uadf"),
    ]:
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
        "decided": {who: round(by.count(who) / len(by), 4) for who in sorted({*by})},
    }


def shown(results: dict[str, Any]) -> str:
    """The table, and the tests below it."""
    names = [FIRST, RESCORED, ALONE, *FUSIONS]
    rows, tests = [], []
    for case, found in results["cases"].items():
        rates = [
            f"{100 * r['wer']:.1f} [{100 * r['low']:.1f}, {100 * r['high']:.1f}]"
            for r in (found["rates"][name] for name in names)
        ]
        oracles = [f"{100 * found[name]:.1f}" for name in ("o_nb", "o_cp")]
        rows.append([case, str(found["utterances"]), *rates, *oracles])
        for pair, test in found["tests"].items():
            interval = f"[{100 * test['low']:.2f}, {100 * test['high']:.2f}]"
            p = f"{test['p_mapsswe']:.2g}"
            tests.append([case, pair, f"{100 * test['difference']:+.2f}", interval, p])
    head = ["part", "utterances", *names, "o_nb", "o_cp"]
    test_head = ["part", "from, to", "points of WER gained", "95 % interval", "p (MAPSSWE)"]
    return f"{table(head, rows)}\n\n{table(test_head, tests)}"


def main() -> None:
    """Runs, or goes on."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recogniser", default="zoo:whisper-synth")
    parser.add_argument("--language", default="zoo:lm-synth")
    parser.add_argument("--utterances", type=int, default=1000, help="of the test, at each level")
    parser.add_argument("--unseen", type=int, default=300, help="of unseen templates, likewise")
    parser.add_argument("--development", type=int, default=40, help="at each level")
    parser.add_argument("--snr", type=float, nargs="+", default=[9.0, 3.0, 0.0], help="in dB")
    parser.add_argument("--work", type=Path, default=Path("outputs/fusion"))
    parser.add_argument("--report", type=Path, default=HERE / "results" / "fusion" / "zoo.json")
    parser.add_argument("--page", type=Path, help="Markdown whose tables are replaced")
    arguments = parsed(parser)
    only_our_output()
    settings = {n: getattr(arguments, n) for n in ("recogniser", "language", "development", "snr")}
    if run_of(arguments.work).exists():
        check_settings(arguments.work, settings, resume=True)
    note_settings(arguments.work, settings)
    begun = load()
    bench = Bench(arguments.recogniser, arguments.language)
    chosen = arguments.work / "tuned.json"
    if not chosen.exists():
        parts = [
            bench.recognise(some, level)
            for level in arguments.snr
            for some in batches(utterances("development", arguments.development))
        ]
        recognised = Recognised(
            [o for p in parts for o in p.lists], [a for p in parts for a in p.audio]
        )
        write_result(chosen, tune(bench, recognised))
    tuned = json.loads(chosen.read_text())
    wanted = {"test": arguments.utterances, "unseen": arguments.unseen}
    cases: dict[str, Any] = {}
    results = {"settings": settings | {"load_at_start": begun}, "tuned": tuned, "cases": cases}
    # all parts and levels grow together, so that a run that is stopped has some of each
    for goal in range(STAGE, max(wanted.values()) + STAGE, STAGE):
        for level in arguments.snr:
            for part, count in wanted.items():
                if count:
                    path = run(bench, part, level, min(goal, count), arguments.work, tuned)
                    cases[f"{part}, {level:g} dB"] = judged(path)
        write_result(arguments.report, results)
    print(shown(results))
    if arguments.page is not None:
        write_page(arguments.page, shown(results))


if __name__ == "__main__":
    run_script(main)
