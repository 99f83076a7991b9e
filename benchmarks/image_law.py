"""Whether images drawn under the rejection rule are as likely as plain ones, and what a bug does.

    python benchmarks/image_law.py --page docs/image_speed.md     # CPU, about an hour

Images of the same classes are drawn by the plain loop, by a Jacobi window under the rejection rule,
and by two known mistakes: a window that keeps tokens with the law they had before they were tested
(stale law), and one that draws what replaces a rejected token from p in place of the residual. The
negative log-likelihood of each under the guided law before top-k and top-p is compared with that of
plain images: equivalent means that the 90 % interval of the difference lies within 1 %. Likelihood
alone is a weak witness, so each sample's tokens are also tested against the laws they should have
come from, all of them and those that begin a pass. Work goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from image_speed import Subject, Way
from pages import table, write_page
from stopwatch import load

import mmdecode.accept.rejection as rejection_rule
from mmdecode.accept import tail as tails
from mmdecode.cli.progress import only_our_output
from mmdecode.engine.contracts import Outcome
from mmdecode.evaluation.image_means import equivalence, mean_of, welch
from mmdecode.evaluation.image_runs import forced_logits
from mmdecode.evaluation.image_samples import likelihood

HERE = Path(__file__).parent


@contextmanager
def stale_law() -> Iterator[None]:
    """Tokens kept behind a rejection keep the law they had before."""
    sound = tails.with_tail

    def stale(outcome: Outcome, proposal: Any, law: Any, *others: Any) -> Outcome:
        result = sound(outcome, proposal, law, *others)
        size = proposal.size
        if not size:
            return result
        assert result.tail_tokens is not None and result.tail_law is not None
        source = (
            outcome.num_accepted[:, None] + 1 + torch.arange(size, device=proposal.tokens.device)
        )
        before = source.clamp_max(size - 1)
        kept = (result.tail_tokens == proposal.tokens.gather(1, before)) & (source < size)
        q = proposal.log_q.gather(1, before[..., None].expand_as(proposal.log_q))
        return replace(result, tail_law=torch.where(kept[..., None], q, result.tail_law))

    with mock.patch("mmdecode.accept.follow.with_tail", stale):
        yield


@contextmanager
def resampled_from_p() -> Iterator[None]:
    """What replaces a rejected token is drawn from p."""
    with mock.patch.object(rejection_rule, "residual", lambda p, q: p):
        yield


@contextmanager
def sound() -> Iterator[None]:
    """As it is."""
    yield


Bug = Callable[[], Any]


def samples(
    subject: Subject, way: Way, bug: Bug, images: int, batch: int, file: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the passes they came in, ``(n, rows, columns)``; drawn where not there yet."""
    parts = []
    file.mkdir(parents=True, exist_ok=True)
    for item in range(images // batch):
        part = file / f"{item:05d}.npz"
        if not part.exists():
            decoder = subject.decoder(way)
            decoder.trace = []
            with bug():
                codes = subject.draw(decoder, batch, item)
            commits = torch.stack([_commits(rows, codes[0].numel()) for rows in decoder.trace])
            unfinished = part.with_suffix(".tmp.npz")
            np.savez_compressed(
                unfinished, codes=codes.numpy().astype(np.uint16), commits=commits.numpy()
            )
            unfinished.rename(part)
        with np.load(part) as stored:
            parts.append((stored["codes"].astype(np.int64), stored["commits"]))
    columns = zip(*parts, strict=True)
    codes, commits = (torch.from_numpy(np.concatenate(column)) for column in columns)
    return codes, commits.view_as(codes)


def settings_of(subject: Subject, arguments: argparse.Namespace) -> str:
    """A name for all that the samples depend on, the weights included."""
    digest = hashlib.blake2b(digest_size=6)
    asked = (arguments.batch, arguments.window, subject.guidance, subject.sampling)
    digest.update(repr(asked).encode())
    for weight in subject.adapter.model.state_dict().values():
        digest.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _commits(rounds: list[Any], tokens: int) -> torch.Tensor:
    """The pass of each token of a row, from its trace."""
    counts = torch.tensor([one.kept for one in rounds])
    return torch.arange(len(rounds)).repeat_interleave(counts)[:tokens].to(torch.int16)


def run(arguments: argparse.Namespace) -> Path:
    """Draws, scores, writes the result file and the page."""
    device = torch.device(arguments.device)
    subject = Subject(arguments.model, device)
    arguments.work = arguments.work / settings_of(subject, arguments)
    window = f"jacobi:window={arguments.window}"
    cases: dict[str, tuple[Way, Bug]] = {
        "plain": (Way(None), sound),
        "plain, other noise": (Way("jacobi:window=1", "rejection"), sound),
        "adaptive": (Way(window, "rejection"), sound),
        "redraw": (Way(f"{window},continuation=redraw", "rejection"), sound),
        "bug: stale law": (Way(window, "rejection"), stale_law),
        "bug: resampled from p": (Way(window, "rejection"), resampled_from_p),
    }
    found: dict[str, Any] = {}
    plain = None
    for name, (way, bug) in cases.items():
        folder = arguments.work / name.replace(" ", "-").replace(":", "").replace(",", "")
        images = -(-arguments.images // arguments.batch) * arguments.batch  # whole batches
        codes, commits = samples(subject, way, bug, images, arguments.batch, folder)
        labels = [
            label
            for item in range(images // arguments.batch)
            for label in subject.labels(arguments.batch, item)
        ]

        def laws(part: slice, codes: Any = codes, labels: Any = labels) -> torch.Tensor:
            return forced_logits(subject.model, labels[part], codes[part], subject.guidance)

        scored = likelihood(laws, codes, subject.sampling, commits=commits, batch=40)
        mean = mean_of(scored.per_image, labels)
        plain = plain or mean
        found[name] = {
            "images": len(codes),
            "nats_per_token": mean.value / scored.tokens,
            "interval": [x / scored.tokens for x in (mean.low, mean.high)],
            "welch_p": welch(mean, plain).p if name != "plain" else None,
            "equivalence": asdict(equivalence(plain, mean)) if name != "plain" else None,
            "p_all": scored.all.p,
            "p_first": scored.first.p if scored.first else None,
        }
        print(name, json.dumps(found[name], default=str), flush=True)
    result = {"model": arguments.model, "window": arguments.window, "load": load(), "rows": found}
    path = arguments.out / f"image-law-{torch.__version__.partition('+')[0]}.json"
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    if arguments.page:
        write_page(arguments.page, tables(result, path.name), "law")
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
    return table(header, rows) + f"\n\nWindow {result['window']}; `benchmarks/results/{name}`."


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="zoo:llamagen-scenes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--work", type=Path, default=Path("outputs/image-law"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="a Markdown page to put the table into")
    arguments = parser.parse_args()
    only_our_output()
    run(arguments)


if __name__ == "__main__":
    main()
