"""Every drafter on the shipped Whisper: tokens per pass and time, against our own undrafted loop.

    python benchmarks/drafters.py --page docs/drafters.md       # CPU, about 5 minutes

One process, the same encoder states for all, interleaved clip by clip; the undrafted loop runs
twice, and the difference of its two runs is the timing error. Speed is decode time per
token, prefill of the decoder included and encoder left out, over that of the undrafted loop; its
interval is a paired bootstrap over clips. Ids are compared with the undrafted ones. Planned trees
are calibrated on the long recording, whose sentences are in none of the clips. Sampling rules other
than the coupled one draw another sample of the same distribution: compare their speed per token.

The load of the machine is printed at the start and at the end; close everything else.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import parsed, table, warn_if_busy, write_page, write_result
from speech import clean, encode, engine, windows
from torch.special import entr
from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

from mmdecode import registry
from mmdecode.checkpoints import local_path
from mmdecode.decoder import Decoder
from mmdecode.draft import Adaptive, Assistant, FirstOf, Medusa, Source
from mmdecode.draft.trees import expected_length, plan
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import Cost, interleaved, load, machine
from mmdecode.runs.console import only_our_output
from mmdecode.testing.drafts import Siblings
from mmdecode.train.drafters.medusa import MedusaOptions, ranks
from mmdecode.train.drafters.transcripts import collect, whisper_prompt
from mmdecode.zoo import grammar
from mmdecode.zoo.speech import speech_test

HERE = Path(__file__).parent
MODEL = "zoo:whisper-synth"
HEADS = {"block": f"{MODEL}-medusa", "linear": f"{MODEL}-medusa-linear"}
NODES = (5, 12)
UNDRAFTED = "undrafted"
KEPT = "recycling:nodes=8,keep=true"


@dataclass(frozen=True)
class Case:
    """Settings of one table: timestamps, batch size and temperature.

    Attributes:
        title: Title on the page.
        timestamps: Whether times are predicted.
        batch: Rows decoded at once.
        temperature: 0 is greedy.
    """

    title: str
    timestamps: bool = False
    batch: int = 1
    temperature: float = 0.0


@dataclass(frozen=True)
class Way:
    """A drafter and the rule that judges it.

    Attributes:
        draft: The drafter, or its name.
        accept: ``auto`` is greedy or coupled.
        again: Whether each repeat begins with a new one: a table that is kept from clip to clip
            must not have seen a clip before.
    """

    draft: Any = None
    accept: str = "auto"
    again: bool = False


@dataclass(frozen=True)
class Subject:
    """Models and data of the benchmark.

    Attributes:
        model: The Whisper.
        features: Features of the clips, ``(N, mel, frames)``.
        medusa: Heads by name.
        trees: Planned rank paths by heads and number of nodes.
        bigram: Log of q(next | previous) of the training sentences, ``(V, V)``.
    """

    model: Any
    features: torch.Tensor
    medusa: dict[str, Medusa]
    trees: dict[tuple[str, int], list[tuple[int, ...]]]
    bigram: torch.Tensor

    def heads(self, kind: str, paths: Sequence[tuple[int, ...]]) -> Medusa:
        """Heads with a tree of their own."""
        return Medusa(self.medusa[kind].heads, self.medusa[kind].block, list(paths))


def greedy_ways(subject: Subject) -> dict[str, Way]:
    """Every registered drafter in the settings that a user would try first."""
    block, linear = subject.medusa["block"], subject.medusa["linear"]
    drafts: dict[str, Any] = {
        UNDRAFTED: None,
        "undrafted, again": None,
        "lookup": "lookup",
        "recycling, 40 nodes": "recycling",
        "recycling, 8 nodes, table kept": KEPT,
        "layer_skip, first 2 of 8 layers": "layer_skip:exit_layer=2",
        "layer_skip, first 4": "layer_skip:exit_layer=4",
        "layer_skip, first 6": "layer_skip:exit_layer=6",
        "assistant: the model itself": Assistant(subject.model),
        "source: heard three quarters": Source(),
        "medusa, block, 5 nodes": subject.heads("block", block.paths[:5]),
        "medusa, block, 12 nodes": subject.heads("block", block.paths),
        "medusa, block, 12 planned": subject.heads("block", subject.trees["block", 12]),
        "medusa, linear, 5 nodes": subject.heads("linear", linear.paths[:5]),
        "first_of: the source, then medusa, block, 5 nodes": FirstOf(
            Source(least=2), subject.heads("block", block.paths[:5])
        ),
        "adaptive over lookup": Adaptive("lookup"),
        "adaptive over recycling": Adaptive("recycling"),
        "adaptive over layer_skip, first 4": Adaptive("layer_skip:exit_layer=4"),
        "adaptive over the model itself": Adaptive(Assistant(subject.model)),
        "adaptive over medusa, block": Adaptive(subject.heads("block", block.paths)),
    }
    return {name: Way(draft, again=draft == KEPT) for name, draft in drafts.items()}


BATCHED = (
    UNDRAFTED,
    "undrafted, again",
    "layer_skip, first 4",
    "source: heard three quarters",
    "medusa, block, 5 nodes",
    "medusa, block, 12 nodes",
    "medusa, linear, 5 nodes",
    "first_of: the source, then medusa, block, 5 nodes",
    "adaptive over medusa, block",
    "adaptive over recycling",
)
"""Drafters that run at batch 8 too."""


def sampled_ways(subject: Subject) -> dict[str, Way]:
    """Rules by the kinds of proposal they take."""
    skip = "layer_skip:exit_layer=4"
    block = subject.heads("block", subject.medusa["block"].paths)
    chain = partial(Siblings, subject.bigram, (1, 1))
    tree = partial(Siblings, subject.bigram, (2, 2))
    return {
        UNDRAFTED: Way(),
        "undrafted, again": Way(),
        "medusa, block, 12 nodes; coupled": Way(block),
        "medusa, block, 12 nodes; membership": Way(block, "sample_match"),
        "layer_skip, first 4; coupled": Way(skip),
        "layer_skip, first 4; rejection": Way(skip, "rejection"),
        "layer_skip, first 4; membership": Way(skip, "sample_match"),
        "bigram table, chain of 2; rejection": Way(chain(("iid",)), "rejection"),
        "bigram table, 2 x 2 drawn independently; rejection": Way(tree(("iid",)), "rejection"),
        "bigram table, 2 x 2 drawn without replacement; rejection": Way(
            tree(("without_replacement",)), "rejection"
        ),
        "bigram table, 2 x 2 likeliest; membership": Way(tree(("deterministic",)), "sample_match"),
        "recycling, 8 nodes, table kept; membership": Way(KEPT, "sample_match", again=True),
    }


def bigrams(tokenizer: Any, size: int) -> torch.Tensor:
    """Log-probabilities of the next token in the grammar's training sentences, ``(V, V)``."""
    counts = torch.full((size, size), 1e-3)
    eos = tokenizer.eos_token_id
    for text in grammar.sentences(3000, 0, "train"):
        ids = [*tokenizer(" " + text, add_special_tokens=False).input_ids, eos]
        before = torch.tensor([tokenizer.convert_tokens_to_ids("<|notimestamps|>"), *ids[:-1]])
        counts[before, torch.tensor(ids)] += 1
    return (counts / counts.sum(1, keepdim=True)).log()


def right_ranks(model: Any, extractor: Any, medusa: dict[str, Medusa]) -> dict[str, torch.Tensor]:
    """Whether rank r of head k was right in the long recording, ``(heads, positions, ranks)``."""
    wave, size = speech_test(long=True)[0].samples(), extractor.n_samples
    waves = [wave[at : at + size] for at in range(0, len(wave) - size, size)]
    features = extractor(waves, sampling_rate=16_000, return_tensors="pt").input_features
    batches = [
        (chunk, whisper_prompt(model, len(chunk), times))
        for times in (0, 1)
        for chunk in features.split(8)
    ]
    samples = [*collect(model, batches, Decoder(), model.config.max_target_positions - 8)]
    adapter, options = registry.adapter_for(model), MedusaOptions(top=8)
    return {
        kind: ranks(adapter, draft.heads, draft.block, samples, options)
        for kind, draft in medusa.items()
    }


def conditional_rates(hits: torch.Tensor, ranks_above: int | None = None) -> list[list[float]]:
    """How often the child of each rank was right where some node above it was, by depth.

    Args:
        hits: ``(heads, positions, ranks)``.
        ranks_above: Ranks that count above; 1 is the path of first choices, ``None`` all.
    """
    alive = torch.ones(hits.shape[1], dtype=torch.bool)
    rates = []
    for level in hits:
        rates.append(level[alive].float().mean(0).nan_to_num().tolist())
        alive = alive & level[:, :ranks_above].any(-1)
    return rates


def partial_transcripts(model: Any, features: torch.Tensor, timestamps: bool) -> list[list[int]]:
    """Transcripts of the first three quarters of each clip's sound: the text a stream has by then.

    After the cut the features hold the clip's silence.
    """
    quietest = features.amin((1, 2), keepdim=True)
    audible = (features > quietest + 0.1).any(1)  # frames
    ends = (audible * torch.arange(audible.shape[1])).amax(1)
    frames = torch.arange(features.shape[2])
    kept = frames < (0.75 * ends)[:, None]
    part = torch.where(kept[:, None], features, quietest)
    run = engine(model, Decoder(), timestamps)
    return [row for clip in part.split(1) for row in clean(run(encode(model, clip)), model)]


def entropy_bits(subject: Subject, case: Case) -> float:
    """Mean entropy of the decoded distribution, rules and warpers applied, along its own output."""
    run = engine(
        subject.model,
        Decoder(seed=0),
        case.timestamps,
        case.temperature,
        output_scores=True,
        return_dict_in_generate=True,
    )
    entropies = []
    for item, clip in enumerate(subject.features.split(1)):
        scores = torch.cat(run(encode(subject.model, clip), mm_request=[(item, 0, 0)]).scores)
        entropies.append(entr(scores.softmax(-1)).sum(-1) / math.log(2))
    return float(torch.cat(entropies).mean())


def measure(
    subject: Subject, case: Case, ways: dict[str, Way], repeats: int, warm: int
) -> dict[str, Any]:
    """Every way on every clip of one case."""
    model, device = subject.model, subject.features.device
    batch = min(case.batch, len(subject.features))
    chunks = [c for c in subject.features.split(batch) if len(c) == batch]
    audio = [encode(model, chunk) for chunk in chunks]
    texts = partial_transcripts(model, subject.features, case.timestamps)
    decoders = {name: Decoder(way.draft, accept=way.accept, seed=0) for name, way in ways.items()}

    def decode(name: str, item: int, repeat: int) -> torch.Tensor:
        if item == 0 and ways[name].again:
            fresh = registry.create("draft", ways[name].draft)
            decoders[name] = replace(decoders[name], draft=fresh)
        run = engine(model, decoders[name], case.timestamps, case.temperature)
        first = item * batch
        return run(
            audio[item],
            mm_inputs={"source_ids": texts[first : first + batch]},
            mm_request=[(item, repeat, row) for row in range(batch)],
        )

    calls: dict[str, Any] = {"encoder": lambda item, repeat: encode(model, chunks[item])}
    calls |= {name: partial(decode, name) for name in decoders}
    if warm:
        interleaved(calls, min(warm, len(chunks)), math.ceil(warm / len(chunks)), device)
    for decoder in decoders.values():
        decoder.stats.reset()
    seconds, results = interleaved(calls, len(chunks), repeats, device)
    texts_of = {name: [clean(ids, model) for ids in results[name]] for name in ways}

    def cost(name: str) -> Cost:
        counts = [sum(len(row) + 1 for row in rows) for rows in texts_of[name]]
        spent, tokens = np.array(seconds[name]), np.array(counts).reshape(repeats, -1)
        if case.temperature:  # each repeat is another sample
            return Cost(spent.mean(0), tokens.mean(0))
        return Cost(np.median(spent, 0), tokens[0])

    base, encoder = cost(UNDRAFTED), np.median(seconds["encoder"], 0)
    rows = []
    for name, way in ways.items():
        own, stats = cost(name), decoders[name].stats
        promised = way.accept == "auto"  # tokens, and not their distribution alone
        value, low, high = own.over(base)
        whole, _, _ = Cost(own.amount + encoder, own.tokens).over(
            Cost(base.amount + encoder, base.tokens)
        )
        row = {
            "drafter": name,
            "identical": texts_of[name] == texts_of[UNDRAFTED] if promised else None,
            "tokens_per_pass": round(stats.acceptance_length, 3),
            "accepted_share": round(stats.acceptance_rate, 3) if stats.drafted else None,
            "ms_per_token": round(1e3 * own.amount.sum() / own.tokens.sum(), 3),
            "over_undrafted": value,
            "interval": [low, high],
            "with_encoder": whole,
            "passes": stats.passes,
            "accepted_histogram": stats.histogram,
            "tokens_per_clip": round(float(own.tokens.mean()) / batch, 2),
            "seconds": [[round(s, 5) for s in repeat] for repeat in seconds[name]],
        }
        if isinstance(way.draft, Adaptive):
            row["depths"] = [
                {"levels": d.levels, "calls": round(d.calls, 1), "tokens_per_s": round(d.speed)}
                for d in way.draft.measured
            ]
        rows.append(row)
        print(
            f"  {name:56s} {row['tokens_per_pass']:5.2f} tokens/pass {row['ms_per_token']:7.2f} "
            f"ms/token  x{value:.2f} [{low:.2f}, {high:.2f}]  "
            f"{ {True: 'identical', False: 'IDS DIFFER', None: ''}[row['identical']] }",
            flush=True,
        )
    return {
        "case": case.title,
        "timestamps": case.timestamps,
        "batch": batch,
        "temperature": case.temperature,
        "units": len(chunks),
        "repeats": repeats,
        "interval": "bootstrap over clips" if len(chunks) >= 8 else "range over batches",
        "encoder_share": round(float(encoder.sum() / (encoder.sum() + base.amount.sum())), 3),
        "rows": rows,
    }


def compare_trees(subject: Subject, hits: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Tokens per pass of shipped and planned trees on the clips; no time is taken."""
    audio = [encode(subject.model, clip) for clip in subject.features.split(1)]

    def passes(draft: Medusa, timestamps: bool) -> Cost:
        decoder, counts = Decoder(draft), []
        run = engine(subject.model, decoder, timestamps)
        for clip in audio:
            decoder.stats.reset()
            run(clip)
            counts.append((decoder.stats.rounds, decoder.stats.tokens - 1))
        return Cost(*np.array(counts).T)

    rows = []
    for (kind, nodes), planned in subject.trees.items():
        shipped = subject.medusa[kind].paths[:nodes]
        row: dict[str, Any] = {"heads": kind, "nodes": nodes, "planned_paths": planned}
        for name, paths in (("shipped", shipped), ("planned", planned)):
            row[f"expected_{name}"] = round(expected_length(hits[kind], paths), 3)
        for name, timestamps in (("plain", False), ("timestamps", True)):
            costs = [passes(subject.heads(kind, p), timestamps) for p in (shipped, planned)]
            lengths = [round(float(c.tokens.sum() / c.amount.sum()), 3) for c in costs]
            row[name] = {
                "shipped": lengths[0],
                "planned": lengths[1],
                "planned_over_shipped": costs[1].over(costs[0]),
            }
        rows.append(row)
    return rows


def speed(row: dict[str, Any]) -> str:
    """A ratio with its interval."""
    return f"{row['over_undrafted']:.2f} [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]"


def same(*rows: dict[str, Any]) -> str:
    """Whether ids were those of the undrafted loop in all cases."""
    found = [row["identical"] for row in rows]
    return "not promised" if None in found else "yes" if all(found) else "**no**"


def settled(row: dict[str, Any]) -> str:
    """The depth that an adaptive drafter used most."""
    if "depths" not in row:
        return ""
    levels = max(row["depths"], key=lambda depth: depth["calls"])["levels"]
    return {None: " (stays on)", 0: " (switched off)"}.get(levels, f" (cut to {levels})")


def accepted(row: dict[str, Any]) -> str:
    """Share of the proposed nodes that were kept."""
    return "" if row["accepted_share"] is None else f"{100 * row['accepted_share']:.0f} %"


def pair_table(plain: dict[str, Any], times: dict[str, Any]) -> str:
    """Greedy decoding without and with timestamps."""
    found = {row["drafter"]: row for row in times["rows"]}
    rows = []
    for row in plain["rows"]:
        other = found[row["drafter"]]
        rows.append(
            [
                row["drafter"],
                f"{row['tokens_per_pass']:.2f}",
                accepted(row),
                f"{row['ms_per_token']:.2f}",
                speed(row) + settled(row),
                f"{row['with_encoder']:.2f}",
                f"{other['tokens_per_pass']:.2f}",
                speed(other) + settled(other),
                same(row, other),
            ]
        )
    header = ["drafter", "tokens a pass", "accepted", "ms a token", "over undrafted"]
    more = ["with the encoder", "timestamps: tokens a pass", "timestamps: over undrafted"]
    return table([*header, *more, "same ids"], rows)


def sampled_table(case: dict[str, Any]) -> str:
    """Sampling, by rule."""
    rows = [
        [
            row["drafter"],
            f"{row['tokens_per_pass']:.2f}",
            accepted(row),
            f"{row['ms_per_token']:.2f}",
            speed(row),
            same(row),
            f"{row['tokens_per_clip']:.1f}",
        ]
        for row in case["rows"]
    ]
    header = ["drafter; rule", "tokens a pass", "accepted", "ms a token", "over undrafted"]
    return table([*header, "same ids", "tokens a clip"], rows)


def tree_table(rows: Sequence[dict[str, Any]]) -> str:
    """Shipped and planned trees."""
    lines = []
    for row in rows:
        line = [row["heads"], str(row["nodes"])]
        line += [f"{row[f'expected_{name}']:.2f}" for name in ("shipped", "planned")]
        for name in ("plain", "timestamps"):
            one = row[name]
            value, low, high = one["planned_over_shipped"]
            line += [f"{one['shipped']:.2f}", f"{one['planned']:.2f}"]
            line.append(f"{value:.2f} [{low:.2f}, {high:.2f}]")
        lines.append(line)
    header = ["heads", "nodes", "expected: shipped", "expected: planned"]
    clips = ["shipped", "planned", "planned over shipped"]
    return table([*header, *clips, *[f"timestamps: {name}" for name in clips]], lines)


def tables(result: dict[str, Any], name: str) -> str:
    """Tables of the page, from the result file called ``name``."""
    facts = result["machine"]
    cases = {case["case"]: case for case in result["cases"]}
    bits = {title: case["entropy_bits"] for title, case in cases.items() if "entropy_bits" in case}
    plain, times = cases["greedy"], cases["greedy, timestamps"]
    return "\n\n".join(
        [
            f"Written by `{facts['command']}` from `benchmarks/results/{name}`: "
            f"{facts['model']}, {facts['clips']} clips, {plain['repeats']} repeats, "
            f"{facts['device']} with {facts['cores']} cores, {facts['threads']} thread, "
            f"{facts['dtype']}, torch {facts['torch']}, transformers {facts['transformers']}, "
            f"{facts['date']}; load {facts['load_at_start']} at the start, "
            f"{facts['load_at_end']} at the end.",
            "**Greedy, batch 1.** Medians of the repeats. Entropy of the decoded distribution: "
            f"{bits['greedy']:.2f} bits a token, {bits['greedy, timestamps']:.2f} with timestamps. "
            f"The encoder takes {100 * plain['encoder_share']:.0f} % of the undrafted time.",
            pair_table(plain, times),
            f"**Greedy, batch {cases['batch']['batch']}.** The interval is the range over "
            f"{cases['batch']['units']} batches.",
            pair_table(cases["batch"], cases["batch, timestamps"]),
            "**Sampling at temperature 1, batch 1, without timestamps.** Entropy: "
            f"{bits['sampled']:.2f} bits a token.",
            sampled_table(cases["sampled"]),
            "**Trees.** Tokens a pass, expected on the recording that the plan was made from, and "
            "measured on the clips.",
            tree_table(result["trees"]),
        ]
    )


def run(arguments: argparse.Namespace) -> Path:
    """Measures everything and writes one file."""
    torch.set_num_threads(arguments.threads)
    path = local_path(MODEL)
    facts = machine(torch.device("cpu"), "float32")
    model = WhisperForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False
    ).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(path, trust_remote_code=False)
    features = windows(extractor, arguments.limit)
    facts |= {
        "command": "python benchmarks/drafters.py",
        "model": MODEL,
        "clips": len(features),
        "threads": arguments.threads,
    }
    print(json.dumps(facts, indent=2))
    warn_if_busy(facts)
    medusa = {kind: Medusa.from_pretrained(name) for kind, name in HEADS.items()}
    hits = right_ranks(model, extractor, medusa)
    trees = {
        (kind, nodes): plan(conditional_rates(hits[kind]), nodes)
        for kind in medusa
        for nodes in NODES
    }
    bigram = bigrams(
        AutoTokenizer.from_pretrained(path, trust_remote_code=False), model.config.vocab_size
    )
    subject = Subject(model, features, medusa, trees, bigram)
    cases = []
    for case in (
        Case("greedy"),
        Case("greedy, timestamps", timestamps=True),
        Case("batch", batch=8),
        Case("batch, timestamps", timestamps=True, batch=8),
        Case("sampled", temperature=1.0),
    ):
        print(f"\n{case.title}, batch {case.batch}")
        ways = sampled_ways(subject) if case.temperature else greedy_ways(subject)
        if case.batch > 1:
            ways = {name: ways[name] for name in BATCHED}
        cases.append(measure(subject, case, ways, arguments.repeats, arguments.warm))
        if case.batch == 1:
            cases[-1]["entropy_bits"] = round(entropy_bits(subject, case), 3)
    result = {
        "machine": facts,
        "cases": cases,
        "rates": {kind: conditional_rates(found) for kind, found in hits.items()},
        "rates_behind_first_choices": {k: conditional_rates(found, 1) for k, found in hits.items()},
        "trees": compare_trees(subject, hits),
    }
    facts["load_at_end"] = load()
    name = f"drafters-cpu-torch{torch.__version__.split('+')[0]}-{facts['date']}.json"
    write_result(arguments.out / name, result, indent=None)
    return arguments.out / name


def main() -> None:
    """Measures, and shows the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=16, help="clips; 23 fit one window")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", type=int, default=6, help="calls of each way before any counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    parser.add_argument("--result", type=Path, help="show this earlier result, measure nothing")
    arguments = parsed(parser)
    only_our_output()
    path = arguments.result or run(arguments)
    result = json.loads(path.read_text())
    print(f"\n{tables(result, path.name)}\n\nwritten: {path}")
    if arguments.page:
        write_page(arguments.page, tables(result, path.name))


if __name__ == "__main__":
    run_script(main)
