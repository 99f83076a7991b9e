"""Likelihood of images sampled by the rejection rule and by known bugs, against plain sampling.

    python benchmarks/image_distribution.py --page docs/image_speed.md     # CPU, about an hour

Images of the same classes are drawn by the plain loop, by a Jacobi window under the rejection rule,
and by two known mistakes: a window that keeps tokens with the distribution they had before they
were tested (stale distribution), and one that draws what replaces a rejected token from p in place
of the residual. The negative log-likelihood of each under the guided distribution before top-k and
top-p is compared with that of plain images: equivalent means that the 90 % interval of the
difference lies within 1 %. Likelihood alone is a weak witness, so each sample's tokens are also
tested against the distributions they should have come from, all of them and those that begin a
pass. Work goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_speed import Subject, Way
from pages import parsed, table, write_page, write_result

from mmdecode.errors import run_script
from mmdecode.evaluation.images.runs import forced_logits
from mmdecode.evaluation.images.samples import likelihood
from mmdecode.evaluation.speed.stopwatch import machine
from mmdecode.evaluation.stats.image_tests import equivalence, mean_of, welch
from mmdecode.image_ar.backends import RoundCounts
from mmdecode.runs.console import only_our_output
from mmdecode.runs.files import write_arrays
from mmdecode.testing import mistakes

HERE = Path(__file__).parent


Bug = Callable[[], Any]


def samples(
    subject: Subject, way: Way, bug: Bug, images: int, batch: int, file: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the passes they came in, ``(n, rows, columns)``; drawn where not there yet."""
    parts = []
    for item in range(images // batch):
        part = file / f"{item:05d}.npz"
        if not part.exists():
            decoder = subject.decoder(way)
            counts = RoundCounts()
            decoder = replace(decoder, stats=counts)
            counts.watch(None)
            with bug():
                codes = subject.draw(decoder, batch, item)
            commits = counts.ended().to(torch.int16)
            arrays = {"codes": codes.numpy().astype(np.uint16), "commits": commits.numpy()}
            write_arrays(part, arrays, packed=True)
        with np.load(part) as stored:
            parts.append((stored["codes"].astype(np.int64), stored["commits"]))
    columns = zip(*parts, strict=True)
    codes, commits = (torch.from_numpy(np.concatenate(column)) for column in columns)
    return codes, commits.view_as(codes)


def settings_of(subject: Subject, arguments: argparse.Namespace) -> str:
    """A name for all that the samples depend on, the weights included."""
    digest = hashlib.blake2b(digest_size=6)
    asked = (arguments.batch_size, arguments.window, subject.guidance, subject.sampling)
    digest.update(repr(asked).encode())
    for weight in subject.adapter.model.state_dict().values():
        digest.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(arguments: argparse.Namespace) -> Path:
    """Samples, scores, and writes the result file and the page."""
    device = torch.device(arguments.device)
    subject = Subject(arguments.model, device)
    arguments.work = arguments.work / settings_of(subject, arguments)
    window = f"jacobi:window={arguments.window}"
    cases: dict[str, tuple[Way, Bug]] = {
        "plain": (Way(None), nullcontext),
        "plain, other noise": (Way("jacobi:window=1", "rejection"), nullcontext),
        "adaptive": (Way(window, "rejection"), nullcontext),
        "redraw": (Way(f"{window},continuation=redraw", "rejection"), nullcontext),
        "bug: stale law": (Way(window, "rejection"), mistakes.stale_law),
        "bug: resampled from p": (Way(window, "rejection"), mistakes.resampled_from_p),
    }
    if arguments.draw:
        cases = {name: cases[name] for name in arguments.draw}
    found: dict[str, Any] = {}
    plain = None
    for name, (way, bug) in cases.items():
        folder = arguments.work / name.replace(" ", "-").replace(":", "").replace(",", "")
        images = -(-arguments.count // arguments.batch_size) * arguments.batch_size  # whole batches
        codes, commits = samples(subject, way, bug, images, arguments.batch_size, folder)
        if arguments.draw:
            continue
        labels = [
            label
            for item in range(images // arguments.batch_size)
            for label in subject.labels(arguments.batch_size, item)
        ]

        def distributions(part: slice, codes: Any = codes, labels: Any = labels) -> torch.Tensor:
            return forced_logits(subject.model, labels[part], codes[part], subject.guidance)

        scored = likelihood(
            distributions, codes, subject.sampling, commits=commits, batch=arguments.batch_size
        )
        mean = mean_of(scored.per_image, labels)
        plain = plain or mean
        found[name] = {
            "images": len(codes),
            "nats_per_token": mean.value / scored.tokens,
            "interval": [x / scored.tokens for x in (mean.low, mean.high)],
            "welch_p": welch(mean, plain) if name != "plain" else None,
            "equivalence": asdict(equivalence(plain, mean)) if name != "plain" else None,
            "p_all": scored.all.p,
            "p_first": scored.first.p if scored.first else None,
        }
        print(name, json.dumps(found[name], default=str), flush=True)
    if arguments.draw:
        return arguments.work
    result = {
        "model": arguments.model,
        "guidance": subject.guidance,
        "sampling": str(subject.sampling),
        "window": arguments.window,
        "machine": machine(device, "float32"),
        "rows": found,
    }
    torch_version = torch.__version__.partition("+")[0]
    path = arguments.out / f"image-distribution-{device.type}-torch{torch_version}.json"
    write_result(path, result)
    if arguments.page:
        write_page(arguments.page, tables(result, path.name), "distribution")
    return path


def tables(result: dict[str, Any], name: str) -> str:
    """The page's table."""
    rows = []
    for way, row in result["rows"].items():
        same = row["equivalence"]
        rows.append(
            [
                way,
                str(row["images"]),
                f"{row['nats_per_token']:.4f}",
                "" if same is None else f"{same['low'] - 1:+.2%} to {same['high'] - 1:+.2%}",
                "" if same is None else ("yes" if same["shown"] else "no"),
                f"{row['p_all']:.2g}",
                "" if row["p_first"] is None else f"{row['p_first']:.2g}",
            ]
        )
    header = ["way", "images", "nats/token", "90 % interval against plain", "within 1 %"]
    header += ["p of tokens", "p of tokens that begin a pass"]
    facts = result["machine"]
    return (
        f"{table(header, rows)}\n\nWindow {result['window']}, guidance {result['guidance']:g}, "
        f"{facts['device']}, {facts['dtype']}, torch {facts['torch']}, {facts['date']}; "
        f"`benchmarks/results/{name}`."
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="zoo:llamagen-scenes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-n", "--count", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--work", type=Path, default=Path("outputs/image-distribution"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument(
        "--draw", action="append", help="only draw this way's images, beside other processes"
    )
    parser.add_argument("--page", type=Path, help="a Markdown page to put the table into")
    arguments = parsed(parser, page="distribution")
    only_our_output()
    run(arguments)


if __name__ == "__main__":
    run_script(main)
