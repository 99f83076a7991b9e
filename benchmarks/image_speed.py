"""Speed of image generation against our plain loop: passes, time, memory, and identity.

    python benchmarks/image_speed.py --page docs/image_speed.md     # CPU, about 20 minutes

One process, ways interleaved batch by batch, guidance and sampling as the model's card fixes them.
A pass is one scoring of the window after the prompt was read; guidance pairs count once, and the
token that the prompt decides counts in neither tokens nor passes. Time is from the class to whole
images of codes, and again with pixels. Under the coupled rule the codes of every image are compared
with those of the plain loop; a divergence has to carry a certificate (no token may be worse than
the best one by more than twice what two ways of computing the same distribution differ). Peak
memory is in a process of its own for each way.

The load of the machine is printed at the start and at the end; close everything else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peak_memory
import torch
from pages import parsed, table, warn_if_busy, write_page, write_result
from rounding import add_quantize, form_of
from toys import toy, toy_device

from mmdecode import registry
from mmdecode.checkpoints import paired
from mmdecode.decoder import Decoder
from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import interleaved, load, machine, ratio, timed
from mmdecode.image_ar import raster
from mmdecode.image_ar.loading import RasterModel
from mmdecode.image_ar.loading import load as load_model
from mmdecode.image_ar.sampling import Sampling, guided
from mmdecode.runs.console import only_our_output

HERE = Path(__file__).parent
PLAIN = "plain"


@dataclass(frozen=True)
class Way:
    """A drafter and an acceptance rule.

    Attributes:
        draft: Drafter as `Decoder` takes it; ``None``: no drafter.
        accept: Acceptance rule.
    """

    draft: str | None
    accept: str = "auto"


def ways(
    windows: Sequence[int], small: str | None = None, eagle: str | None = None
) -> dict[str, Way]:
    """What is measured, by name.

    Args:
        windows: Lengths of windows.
        small: A small model that drafts; ``None``: none.
        eagle: A drafter that reads the model's states; ``None``: none.
    """
    found = {PLAIN: Way(None), "plain, again": Way(None)}
    for window in windows:
        found |= {
            f"SJD {window}": Way(f"jacobi:window={window},continuation=redraw", "rejection"),
            f"adaptive {window}": Way(f"jacobi:window={window}", "rejection"),
            f"shared noise {window}": Way(
                f"jacobi:window={window},continuation=shared", "rejection"
            ),
            f"coupled {window}": Way(f"jacobi:window={window}", "coupled"),
        }
    middle = windows[len(windows) // 2]
    found |= {
        f"adaptive {middle}, random": Way(f"jacobi:window={middle},start=random", "rejection"),
        f"adaptive {middle}, siblings": Way(
            f"jacobi:window={middle},siblings=3,levels=2", "rejection"
        ),
        f"Cool-SD {middle}": Way(f"jacobi:window={middle}", "cool_sd:delta=2,nu=0"),
        f"LANTERN {middle}": Way(f"jacobi:window={middle}", "lantern:delta=0.1,k=20"),
        f"grouped {middle}": Way(f"jacobi:window={middle}", "gsd"),
    }
    if small is not None:
        for length in (3, 5):
            draft = f"assistant:model={small},length={length}"
            found[f"drafter, {length} tokens"] = Way(draft, "rejection")
    if eagle is not None:
        chain = f"eagle:path={eagle},length=4"
        found |= {
            "eagle 4": Way(chain, "rejection"),
            "eagle 4, coupled": Way(chain, "coupled"),
            "eagle, tree of 14": Way(f"eagle:path={eagle},depth=4,top_k=2,nodes=14", "rejection"),
            "LANTERN eagle 4": Way(chain, "lantern:delta=0.1,k=20"),
            "LANTERN++ eagle 4": Way(chain, "lantern:lambda_=5,k=10"),
        }
    return found


class Subject:
    """A model with its card's settings."""

    def __init__(
        self, name: str, device: torch.device, compiled: bool = False, quantize: str | None = None
    ) -> None:
        self.name = name
        self.compiled, self.quantize = compiled, quantize
        self.model: RasterModel = load_model(name, device, quantize=quantize)
        self.adapter = self.model.adapter
        self.sampling = Sampling(**self.model.preset.sampling)
        self.guidance = self.model.preset.guidance

    def decoder(self, way: Way) -> Decoder:
        """A new decoder."""
        draft: Any = way.draft
        if draft is not None:
            draft = registry.create("draft", draft, target=self.adapter.model, model_id=self.name)
        return Decoder(draft, accept=way.accept, compile=self.compiled)

    def labels(self, batch: int, item: int) -> list[int]:
        """Classes of a batch."""
        return [(item * batch + row) % self.model.classes for row in range(batch)]

    def draw(
        self, decoder: Decoder, batch: int, item: int, only: int | None = None
    ) -> torch.Tensor:
        """Codes of a batch of images, or of one of its rows; item and row name the noise."""
        rows = range(batch) if only is None else [only]
        labels = self.labels(batch, item)
        labels = [labels[row] for row in rows]
        generated = raster.generate(
            self.adapter.model,
            decoder=decoder,
            adapter=self.adapter,
            guidance=self.guidance,
            sampling=self.sampling,
            seed=0,
            request=[f"{item}/{row}" for row in rows],
            **self.model.given(labels),
        )
        return generated.codes.cpu()


def measure(
    subject: Subject, chosen: dict[str, Way], batch: int, items: int, repeats: int, device: Any
) -> dict[str, Any]:
    """All ways at one batch size."""
    decoders = {name: subject.decoder(way) for name, way in chosen.items()}
    calls = {
        name: lambda item, repeat, d=decoder: subject.draw(d, batch, item)
        for name, decoder in decoders.items()
    }
    if items > 1:
        interleaved(calls, 1, 1, device)  # warm
    for decoder in decoders.values():
        decoder.stats.reset()
    seconds, results = interleaved(calls, items, repeats, device)
    codes = results[PLAIN][0]
    decoding = min(timed(device, partial(subject.adapter.decode, codes))[0] for _ in range(3))
    base = np.median(seconds[PLAIN], 0)
    rows = []
    for name, decoder in decoders.items():
        own = np.median(seconds[name], 0)
        gain, bounds = ratio(base, own)
        pairs = zip(torch.cat(results[name]), torch.cat(results[PLAIN]), strict=True)
        rows.append(
            {
                "way": name,
                "passes": round(decoder.stats.rounds / (items * repeats * batch), 2),
                "tokens_per_pass": round(decoder.stats.acceptance_length, 3),
                "ms_per_image": round(1e3 * float(own.mean()) / batch, 2),
                "ms_with_pixels": round(1e3 * (float(own.mean()) + decoding) / batch, 2),
                "gain": gain,
                "interval": bounds,
                "same_pictures": round(
                    float(np.mean([bool(torch.equal(a, b)) for a, b in pairs])), 4
                ),
                "rule": type(decoder.accept).__name__
                if not isinstance(decoder.accept, str)
                else decoder.accept,
            }
        )
        show(rows[-1])
    return {"batch": batch, "items": items, "repeats": repeats, "rows": rows}


def identity(
    subject: Subject, window: int, images: int, batch: int, together: int = 16
) -> dict[str, Any]:
    """Compares codes of coupled and plain images, and of a batch of 16 and single images.

    With int8 weights there is no certificate: all images have to be the same.
    """
    plain = subject.decoder(Way(None))
    drafted = subject.decoder(Way(f"jacobi:window={window}", "coupled"))
    differ, worst = [], 0.0
    for item in range(-(-images // batch)):
        left = subject.draw(plain, batch, item)
        right = subject.draw(drafted, batch, item)
        for row in range(batch):
            if not torch.equal(left[row], right[row]):
                if subject.quantize:
                    excess, noise = float("inf"), 0.0
                else:
                    excess, noise = certificate(subject, right[row], batch, item, row)
                differ.append({"image": item * batch + row, "excess": excess, "allowed": noise})
                worst = max(worst, excess - noise)
    batched = subject.draw(drafted, together, 0) if together else ()
    alone = [subject.draw(drafted, together, 0, only=row) for row in range(together)]
    return {
        "window": window,
        "images": -(-images // batch) * batch,
        "batch_16_as_alone": sum(
            torch.equal(row, one[0]) for row, one in zip(batched, alone, strict=True)
        ),
        "diverged": differ,
        "certified": worst <= 0,
    }


def certificate(
    subject: Subject, codes: torch.Tensor, batch: int, item: int, row: int
) -> tuple[float, float]:
    """Largest shortfall of a token from the best one, in float64, and the largest allowed."""
    adapter, model = subject.adapter, subject.adapter.model
    labels = torch.tensor([subject.labels(batch, item)[row]], device=model.device)
    flat = codes.flatten()[None].to(model.device)
    scores = []
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        conditional = model.code_logits(labels, flat)
        nothing = model.code_logits(model.unconditional(labels), flat)
        scores.append(guided(conditional, nothing, subject.guidance).double())
    model.to(torch.float32)
    noise = Noise.of(0, [request_key(f"{item}/{row}", 0)], model.device)
    positions = torch.arange(flat.shape[1], device=model.device)[None]
    gumbel = noise.gumbel(positions, Role.TARGET, adapter.vocab).double()
    total = subject.sampling.warp(scores[1]) + gumbel
    excess = total.amax(-1) - total.gather(2, flat[..., None])[..., 0]
    return float(excess.max()), 2 * float((scores[0] - scores[1]).abs().max())


def memory(arguments: argparse.Namespace, chosen: dict[str, Way]) -> dict[str, float]:
    """Peak megabytes over the loaded model, each way in a process of its own."""
    found = {}
    for way in chosen:
        command = [sys.executable, __file__, "--child", way, "--model", arguments.model]
        command += ["--memory", str(arguments.batch_size[0]), "--device", arguments.device]
        command += [
            "--small",
            arguments.small,
            "--eagle",
            arguments.eagle,
            *(["--compile"] if arguments.compile else []),
            *(["--quantize", arguments.quantize] if arguments.quantize else []),
        ]
        for window in arguments.window:
            command += ["--window", str(window)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        found[way] = float(answer.stdout.strip().splitlines()[-1])
    return found


def child(arguments: argparse.Namespace, chosen: dict[str, Way]) -> None:
    """Prints the peak memory of one way."""
    device = torch.device(arguments.device)
    subject = Subject(arguments.model, device, arguments.compile, arguments.quantize)
    decoder = subject.decoder(chosen[arguments.child])
    subject.draw(subject.decoder(Way(None)), 1, 0)
    before = peak_memory.now(device)
    peak_memory.reset(device)
    subject.draw(decoder, arguments.memory, 0)
    print(round(peak_memory.peak(device) - before, 1))


def show(row: dict[str, Any]) -> None:
    """One line as it comes."""
    low, high = row["interval"]
    print(
        f"  {row['way']:26s} {row['passes']:7.1f} passes  {row['tokens_per_pass']:5.2f} tokens/pass"
        f"  {row['ms_per_image']:8.1f} ms/image  x{row['gain']:.2f} [{low:.2f}, {high:.2f}]"
        f"  same {row['same_pictures']:.0%}",
        flush=True,
    )


def tables(result: dict[str, Any], name: str) -> str:
    """The page's tables."""
    facts, parts = result["machine"], []
    for case in result["cases"]:
        parts.append(f"### Batch {case['batch']}\n")
        rows = []
        for row in case["rows"]:
            peak = (
                result["memory"].get(row["way"]) if case["batch"] == result["memory_at"] else None
            )
            rows.append(
                [
                    row["way"],
                    f"{row['passes']:.1f}",
                    f"{row['tokens_per_pass']:.2f}",
                    f"{row['ms_per_image']:.1f}",
                    f"{row['ms_with_pixels']:.1f}",
                    f"x{row['gain']:.2f}",
                    "{:.2f} to {:.2f}".format(*row["interval"]),
                    f"{row['same_pictures']:.0%}",
                    "" if peak is None else f"{peak:.0f}",
                ]
            )
        header = ["way", "passes", "tokens/pass", "ms/image", "with pixels", "gain over plain"]
        header += ["95 % interval", "same pictures", "peak MB"]
        parts.append(table(header, rows) + "\n")
    same = result["identity"]
    parts.append(
        f"Coupled, window {same['window']}, {same['images']} images in {facts['dtype']}: "
        f"{len(same['diverged'])} differ from the plain loop's"
        + (", each within its certificate" if same["diverged"] and same["certified"] else "")
        + f"; {same['batch_16_as_alone']} of 16 images of a batch are those drawn alone.\n"
    )
    parts.append(
        f"{result['model']}, guidance {result['guidance']}, {result['sampling']}. "
        f"{facts['device']}, {facts['threads']} threads, {facts['dtype']}, torch {facts['torch']}, "
        f"{facts['date']}, load {facts['load_at_start']} to {facts['load_at_end']}; "
        f"`benchmarks/results/{name}`."
    )
    return "\n".join(parts)


def run(arguments: argparse.Namespace, chosen: dict[str, Way]) -> Path:
    """Measures, writes the result file and the page."""
    device = torch.device(arguments.device)
    subject = Subject(arguments.model, device, arguments.compile, arguments.quantize)
    quick, kind = arguments.quick, arguments.quantize or "float32"
    facts = toy_device(device, kind) if quick else machine(device, kind)
    facts |= {"threads": torch.get_num_threads()} | ({"load_at_start": load()} if quick else {})
    print(facts)
    warn_if_busy(facts)
    cases = []
    for batch in arguments.batch_size:
        print(f"batch {batch}")
        items = 1 if quick else max(2, arguments.count // batch)
        cases.append(measure(subject, chosen, batch, items, arguments.repeats, device))
    facts["load_at_end"] = load()  # nothing below is timed
    print("identity")
    sizes = (1, 0) if quick else (8, 16)
    same = identity(subject, arguments.window[-1], arguments.identical, *sizes)
    print(f"  {len(same['diverged'])} of {same['images']} differ, certified: {same['certified']}")
    peaks = memory(arguments, chosen) if arguments.peaks else {}
    result = {
        "model": arguments.model,
        "guidance": subject.guidance,
        "sampling": str(subject.sampling),
        "machine": facts,
        "compiled": arguments.compile,
        "cases": cases,
        "identity": same,
        "memory": peaks,
        "memory_at": arguments.batch_size[0],
    }
    form = form_of(device.type, compiled=arguments.compile, quantize=arguments.quantize)
    name = f"images-{form}-torch{torch.__version__.partition('+')[0]}-{facts['date']}.json"
    path = arguments.out / name
    write_result(path, result)
    print(f"load at the end {facts['load_at_end']}; wrote {path}")
    if arguments.page:
        write_page(arguments.page, tables(result, name))
    return path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="zoo:llamagen-scenes")
    parser.add_argument("--small", default="zoo:llamagen-scenes-small", help="drafter; '' for none")
    parser.add_argument(
        "--eagle", help="drafter over states, '' for none; default: what ships with the model"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_quantize(parser)
    parser.add_argument("-n", "--count", type=int, default=16, help="a way and repeat")
    parser.add_argument("--identical", type=int, default=200, help="images compared with plain")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--window", type=int, action="append", help="default: 8, 16 and 32")
    parser.add_argument("--batch-size", type=int, action="append", help="default: 1, 8 and 32")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--peaks", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action="store_true", help="every way, see `Decoder`")
    parser.add_argument("--quick", action="store_true", help="a smoke test of two ways")
    parser.add_argument("--page", type=Path, help="a Markdown page to put the tables into")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parsed(parser)
    if arguments.quick:
        small = {"window": [8], "batch_size": [1], "count": 1, "repeats": 1, "identical": 1}
        vars(arguments).update(small | {"small": "", "eagle": "", "peaks": False})
    arguments.window = arguments.window or [8, 16, 32]
    arguments.batch_size = arguments.batch_size or [1, 8, 32]
    if arguments.eagle is None:
        arguments.eagle = paired(arguments.model, "eagle") or ""
    chosen = ways(arguments.window, arguments.small or None, arguments.eagle or None)
    if arguments.quick:
        chosen = {name: chosen[name] for name in (PLAIN, "coupled 8")}
    only_our_output()
    if arguments.child:
        child(arguments, chosen)
    else:
        with toy(torch.device(arguments.device), arguments.quick and arguments.compile):
            run(arguments, chosen)


if __name__ == "__main__":
    run_script(main)
