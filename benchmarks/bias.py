"""The guide ``bias``: how many rare names are written, and how often one is that nobody said.

    python benchmarks/bias.py --page docs/bias.md              # half an hour on two cores
    python benchmarks/bias.py --names 5 --sentences 10 --bonus 0 4

Fifty rare surnames in three sentences each, and real sentences without any of them (references of
LibriSpeech) are spoken by espeak-ng, in voices that the zoo tests with, and transcribed by a
published recogniser, once for each bonus and way of paying it. *Recall* is the share of names that
are written, *false alarms* the share of the other sentences with a listed name in them; the words
of those sentences say what a bonus costs besides. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pages import parsed, table, write_page, write_result

from mmdecode import Decoder
from mmdecode.asr import Transcriber
from mmdecode.asr.correction.n_best_lists import read_lists
from mmdecode.asr.transcriber import load as load_recogniser
from mmdecode.asr.transcriber import make_options
from mmdecode.errors import run_script
from mmdecode.evaluation.nbest.n_best import SHIPPED
from mmdecode.evaluation.speech.wer import wer
from mmdecode.evaluation.speed.stopwatch import machine
from mmdecode.guide.bias import Bias
from mmdecode.runs.console import only_our_output, progress_bar
from mmdecode.zoo import synthesis

HERE = Path(__file__).parent
NAMES = """Abernathy Achterberg Beauregard Bramwell Castellano Cholmondeley Delacroix Dombrowski
Eisenberg Engstrom Featherstone Fitzwilliam Gutierrez Hakobyan Haverford Ibrahimovic Iverson
Jankowski Jorgensen Kilpatrick Kowalczyk Lamoureux Lindqvist Mbeki Montague Nakamura Novotny
Okonkwo Ostrander Papadakis Pemberton Quintero Rademacher Rasmussen Stavros Szymanski Takahashi
Thistlewood Underhill Uzunov Vasquez Villanueva Whitcombe Wojcik Xenakis Yarborough Yevtushenko
Zabriskie Zimmermann Featheringham""".split()
CARRIERS = (
    "Please send the letter to {} before the end of the week.",
    "I met {} at the station yesterday morning.",
    "The report was written by {} and two of his students.",
)
WAYS = ("spread", "end")


def spoken(texts: Sequence[str], seed: str) -> list[np.ndarray]:
    """Speech of texts in random voices, with a pause at both ends."""
    engine, rng = synthesis.Espeak(), random.Random(seed)
    pause = np.zeros(synthesis.SAMPLING_RATE // 4, dtype=np.float32)
    waves = []
    for text in texts:
        voice = synthesis.Voice.draw(rng, synthesis.TEST_VARIANTS)
        waves.append(np.concatenate([pause, engine.speak(text, voice), pause]))
    return waves


def sentences(count: int) -> list[str]:
    """Real sentences of 5 to 20 words without a listed name."""
    listed = {name.lower() for name in NAMES}
    texts = [one.reference or "" for one in read_lists(SHIPPED["ls_clean"])]
    usable = [t for t in texts if 5 <= len(t.split()) <= 20 and not listed & set(t.split())]
    return random.Random(2026).sample(usable, count)


def has(text: str, name: str) -> bool:
    """Whether a name is a word of a text."""
    return re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE) is not None


def judged(
    names: Sequence[str], references: Sequence[str], texts: dict[str, list[str]]
) -> dict[str, Any]:
    """What one setting has done to the sentences with names and to those without."""
    asked = [name for name in names for _ in CARRIERS]
    found = [has(text, name) for name, text in zip(asked, texts["with"], strict=True)]
    wrong = [any(has(text, name) for name in names) for text in texts["without"]]
    others = [
        any(has(text, name) for name in names if name != own)
        for own, text in zip(asked, texts["with"], strict=True)
    ]
    score = wer(list(references), texts["without"])
    return {
        "recall": sum(found) / len(found),
        "names": len(found),
        "another": sum(others) / len(others),
        "false_alarms": sum(wrong) / len(wrong),
        "sentences": len(wrong),
        "wer": score.value,
        "low": score.low,
        "high": score.high,
    }


def shown(results: dict[str, Any]) -> str:
    """The table."""
    rows = []
    for row in results["rows"]:
        rows.append(
            [
                row["pay"] if row["bonus"] else "no bias",
                f"{row['bonus']:g}",
                f"{100 * row['recall']:.1f}",
                f"{100 * row['another']:.1f}",
                f"{100 * row['false_alarms']:.2f}",
                f"{100 * row['wer']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]",
            ]
        )
    first = results["rows"][0]
    head = ["paid", "bonus, nats", "recall of names, %", "another listed name, %"]
    head += ["false alarms, %", "WER of sentences without names, %"]
    return (
        f"{results['model']}, {first['names']} sentences with one of {results['listed']} listed "
        f"names, {first['sentences']} without; {results['packages']}, {results['date']}.\n\n"
        f"{table(head, rows)}"
    )


def main() -> None:
    """Measures every setting."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="moonshine:tiny-en")
    parser.add_argument("--names", type=int, default=len(NAMES), help="how many are listed")
    parser.add_argument("--sentences", type=int, default=500, help="without names")
    parser.add_argument("--bonus", type=float, nargs="+", default=[0, 2, 4, 6, 8, 12])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--report", type=Path, default=HERE / "results" / "bias.json")
    parser.add_argument("--page", type=Path, help="Markdown whose tables are replaced")
    arguments = parsed(parser)
    only_our_output()
    names, references = NAMES[: arguments.names], sentences(arguments.sentences)
    texts = {"with": [c.format(name) for name in names for c in CARRIERS], "without": references}
    waves = {part: spoken(own, f"bias/{part}") for part, own in texts.items()}
    model, processor = load_recogniser(arguments.model, "cpu", "fp32", None)
    options = make_options({"batch_size": arguments.batch_size})
    settings = [(pay, bonus) for pay in WAYS for bonus in arguments.bonus]
    settings = [one for one in settings if one[1] or one[0] == WAYS[0]]
    facts = machine(model.device, "float32")
    results: dict[str, Any] = {
        "model": arguments.model,
        "listed": len(names),
        "date": facts["date"],
        "packages": f"torch {facts['torch']}, transformers {facts['transformers']}",
        "rows": [],
    }
    with progress_bar() as bar:
        task = bar.add_task("transcribing", total=len(settings))
        for pay, bonus in settings:
            guide = Bias(names, bonus, pay, processor.tokenizer) if bonus else None
            transcriber = Transcriber(model, processor, Decoder(guide=guide, seed=0), options)
            found = {
                part: [one.text for one in transcriber(own, on_error="raise")]
                for part, own in waves.items()
            }
            results["rows"].append({"pay": pay, "bonus": bonus} | judged(names, references, found))
            write_result(arguments.report, results)
            bar.advance(task)
    print(shown(results))
    if arguments.page is not None:
        write_page(arguments.page, shown(results))


if __name__ == "__main__":
    run_script(main)
