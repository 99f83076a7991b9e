"""How much faster N-best lists are corrected when the answers are drafted from the hypotheses.

    python benchmarks/correction_speed.py --corrector outputs/corrector      # CPU, about 5 minutes

Lists of the test part of a shipped set, with and without the draft, in batches of 1 and 8,
interleaved batch by batch; answers are compared. ``mmdecode train corrector`` makes the corrector.

The load of the machine is kept with the results; close everything else.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import parsed, warn_if_busy, write_result

from mmdecode.asr.correction.corrector import Corrector
from mmdecode.asr.correction.n_best_lists import read_lists, split
from mmdecode.errors import run_script
from mmdecode.evaluation.nbest.n_best import SHIPPED
from mmdecode.evaluation.speed.stopwatch import Cost, interleaved, load, machine
from mmdecode.runs.console import only_our_output
from mmdecode.train.corrector import JUDGED

HERE = Path(__file__).parent
DRAFTS = {"undrafted": None, "undrafted, again": None, "from the hypotheses": "hypotheses"}


def measure(arguments: argparse.Namespace, batch: int) -> dict[str, Any]:
    """All ways at one batch size."""
    lists = split(read_lists(SHIPPED[arguments.data]), JUDGED)[1][: arguments.lists]
    lists = sorted(lists, key=lambda one: len(one.best))
    groups = [lists[at : at + batch] for at in range(0, len(lists) - batch + 1, batch)]
    correctors = {
        name: Corrector.from_pretrained(
            arguments.corrector, device=arguments.device, draft=draft, batch_size=batch
        )
        for name, draft in DRAFTS.items()
    }
    calls = {
        name: partial(lambda own, item, repeat: own(groups[item]), own)
        for name, own in correctors.items()
    }
    device = torch.device(arguments.device)
    interleaved(calls, 2, 1, device)
    for own in correctors.values():
        own.stats.reset()
    seconds, results = interleaved(calls, len(groups), arguments.repeats, device)
    rows = []
    kept = {name: results[name][: len(groups)] for name in DRAFTS}
    counts = [sum(one.tokens for one in group) for group in kept["undrafted"]]
    costs = {n: Cost(np.median(seconds[n], 0), np.maximum(counts, 1)) for n in DRAFTS}
    for name, own in correctors.items():
        value, low, high = costs[name].over(costs["undrafted"])
        rows.append(
            {
                "way": name,
                "tokens_per_pass": round(own.stats.acceptance_length, 3),
                "ms_per_list": round(1e3 * float(np.mean(costs[name].amount)) / batch, 2),
                "over_undrafted": [value, low, high],
                "identical": [[one.raw for one in group] for group in kept[name]]
                == [[one.raw for one in group] for group in kept["undrafted"]],
            }
        )
        print(f"batch {batch}", rows[-1], flush=True)
    return {"batch": batch, "lists": len(groups) * batch, "rows": rows}


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corrector", default="outputs/corrector", help="a trained corrector")
    parser.add_argument("--data", default="ls_other", help="a shipped set")
    parser.add_argument("--lists", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--report", type=Path, default=HERE / "results" / "correction-speed.json")
    arguments = parsed(parser)
    only_our_output()
    facts = machine(torch.device(arguments.device), "float32")
    warn_if_busy(facts)
    cases = [measure(arguments, batch) for batch in (1, 8)]
    facts["load_at_end"] = load()
    card = json.loads((Path(arguments.corrector) / "card.json").read_text())["what"]
    result = {"machine": facts, "corrector": card, "data": arguments.data, "cases": cases}
    write_result(arguments.report, result)


if __name__ == "__main__":
    run_script(main)
