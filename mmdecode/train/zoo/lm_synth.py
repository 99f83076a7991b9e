"""Recipe of ``zoo:lm-synth``: a small language model that corrects a recogniser's transcripts.

Output: a ``LlamaForCausalLM`` of about 1.4 M parameters with a SentencePiece-like tokenizer, other
than the recogniser's. It is trained on sentences of a domain (`mmdecode.train.zoo.sentences`), and
on N-best lists (a recogniser's N best hypotheses for an utterance) with references. Real lists are
recognised from noisy synthetic speech; in artificial lists, words are replaced by similar words.
All sentences are training sentences of the domain, and in no test set. `RECIPES` has the settings
of each model: ``lm-synth``, which ships, corrects ``zoo:whisper-synth``; the other models correct a
published recogniser, and do not ship.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from mmdecode.asr.correction.n_best_lists import NBestList, lists_of, read_lists, split, write_lists
from mmdecode.asr.correction.prompts import ListPrompts, PromptOptions
from mmdecode.runs.files import write_file, write_folder
from mmdecode.train.loop import BITS, FitOptions, fit, save_half, write_state
from mmdecode.train.zoo.sentences import Domain, training_sentences, vocabulary
from mmdecode.zoo import synthesis

TEMPLATE = "{best}\n{others}\n=>"
SHARD = 100
PROMPT_SHARE = 0.2
"""Loss weight of prompt tokens, whose prediction teaches the model to copy hypotheses."""
HELD_OUT = 0.1
"""Share of the real lists that are held out to decide when training stops. In a domain whose
sentences are limited in number, the held-out sentences also occur in examples without lists."""


@dataclass(frozen=True, kw_only=True)
class LMSynthOptions:
    """Settings of the recipe.

    Attributes:
        domain: Domain of the sentences, see `mmdecode.train.zoo.sentences`.
        recogniser: Checkpoint that recognises the real lists.
        lists: Number of real N-best lists.
        snr_db: Minimum and maximum signal-to-noise ratio of the real lists' speech, in decibels.
        clean: Share of the real lists whose speech has no noise.
        vocabulary: Vocabulary size of the tokenizer.
        width, layers, heads, inner: Sizes of the model; ``inner`` is its feed-forward width.
        plain: Share of a step's examples that are sentences without a list.
        real: Share of a step's examples that are real lists; the remaining ones are artificial.
        prompts: Format of the prompts.
        fit: Steps, learning rates and early stopping.
    """

    domain: Domain = "grammar"
    recogniser: str = "zoo:whisper-synth"
    lists: int = 2400
    snr_db: tuple[float, float] = (-5.0, 8.0)
    clean: float = 0.0
    vocabulary: int = 800
    width: int = 128
    layers: int = 8
    heads: int = 4
    inner: int = 256
    plain: float = 0.25
    real: float = 0.35
    prompts: PromptOptions = field(
        default_factory=lambda: PromptOptions(template=TEMPLATE, count=3)
    )
    fit: FitOptions = field(
        default_factory=lambda: FitOptions(
            steps=4000, batch=24, peak_rate=2e-3, matrix_rate=0.02, every=200, patience=8
        )
    )


def _for_moonshine(domain: Domain, vocabulary: int, steps: int = 1600) -> LMSynthOptions:
    """Settings of a corrector of a published recogniser's lists, for sentences of a domain."""
    return LMSynthOptions(
        domain=domain,
        recogniser="moonshine:tiny-en",
        lists=1200,
        snr_db=(6.0, 27.0),
        clean=0.25,
        vocabulary=vocabulary,
        fit=FitOptions(
            steps=steps, batch=24, peak_rate=2e-3, matrix_rate=0.02, every=200, patience=4
        ),
    )


RECIPES: Mapping[str, LMSynthOptions] = {
    "lm-synth": LMSynthOptions(),
    "lm-grammar-moonshine": _for_moonshine("grammar", 800, 2400),
    "lm-docstrings-moonshine": _for_moonshine("docstrings", 2000),
    "lm-general-moonshine": _for_moonshine("general", 2000),
}
"""Settings of each model, by its name for ``mmdecode train zoo``."""


def build_tokenizer(options: LMSynthOptions) -> Any:
    """Trains a BPE tokenizer on training sentences; it treats a line as if a space preceded it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    bpe.decoder = decoders.Metaspace(prepend_scheme="always")
    characters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocabulary,
        special_tokens=["<s>", "</s>", "<pad>", "<unk>"],
        initial_alphabet=characters,
        show_progress=False,
    )
    texts = training_sentences(options.domain, 20_000, options.fit.seed)
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken("\n", normalized=False), AddedToken("=>", normalized=False)])
    bpe.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_model(tokenizer: Any, options: LMSynthOptions) -> Any:
    """Builds the untrained model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.fit.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.width,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=512,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


# Lists


def make_lists(folder: Path, options: LMSynthOptions) -> list[NBestList]:
    """Makes the real lists: synthesises noisy training sentences and recognises them.

    Args:
        folder: Folder of the lists, in files of `SHARD`; files that exist are read instead.
        options: Settings.
    """
    from mmdecode.asr import Transcriber

    engine: synthesis.Espeak | None = None
    transcriber: Transcriber | None = None
    found: list[NBestList] = []
    for start in track(range(0, options.lists, SHARD), description="speaking and hearing"):
        path = folder / f"{start:06d}.jsonl"
        if not path.exists():
            if transcriber is None or engine is None:
                engine = synthesis.Espeak()
                transcriber = Transcriber.from_pretrained(
                    options.recogniser, device="cpu", n_best=5, timestamps=False, batch_size=16
                )
            rng = random.Random(f"lists/{options.fit.seed}/{start}")
            seed = options.fit.seed * 1_000_003 + start + 7
            texts = training_sentences(options.domain, SHARD, seed)
            waves = [noisy(engine, text, rng, options) for text in texts]
            transcripts = transcriber(waves, on_error="raise")
            write_lists(
                [
                    NBestList(f"{start + offset:06d}", one.hypotheses, one.scores, text)
                    for offset, (text, transcript) in enumerate(
                        zip(texts, transcripts, strict=True)
                    )
                    for one in lists_of(transcript)[:1]
                ],
                path,
            )
        found += read_lists(path)
    return found


def noisy(
    engine: synthesis.Espeak, text: str, rng: random.Random, options: LMSynthOptions
) -> np.ndarray:
    """Synthesises a sentence in a random training voice and adds noise."""
    wave = torch.from_numpy(engine.speak(text, synthesis.Voice.draw(rng)))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    snr_db, tilt = rng.uniform(*options.snr_db), rng.uniform(0.0, 1.5)
    if options.clean and rng.random() < options.clean:
        return wave.numpy()
    return synthesis.add_noise(wave, snr_db, generator, tilt).clamp(-1, 1).numpy()


class Confusions:
    """Sampler of artificial N-best lists, with words replaced by words of similar spelling.

    Args:
        words: The words that replace others.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = sorted(words)
        self._known = frozenset(self.words)
        self._near: dict[str, list[str]] = {}

    def near(self, word: str) -> list[str]:
        """Returns the eight other words of most similar spelling; all words for an unknown word."""
        if word not in self._known:
            return self.words
        if word not in self._near:
            alike = SequenceMatcher(b=word, autojunk=False)
            ranked = []
            for other in self.words:
                alike.set_seq1(other)
                ranked.append((-alike.quick_ratio(), other))
            self._near[word] = [other for _, other in heapq.nsmallest(9, ranked)][1:]
        return self._near[word]

    def sample(self, text: str, rng: random.Random, count: int) -> list[str]:
        """Samples the hypotheses of a list for one sentence.

        Args:
            text: The sentence.
            rng: Random generator.
            count: Number of hypotheses. A replaced word may still be right in some of them.
        """
        share = rng.uniform(0.0, 0.4)
        ways: list[list[str]] = []
        for word in text.split():
            if rng.random() >= share:
                ways.append([word])
                continue
            others = [self._instead(word, rng) for _ in range(rng.choice([1, 1, 2]))]
            ways.append([word, *others] if rng.random() < 0.6 else others)
        return [" ".join(" ".join(rng.choice(way) for way in ways).split()) for _ in range(count)]

    def _instead(self, word: str, rng: random.Random) -> str:
        """Samples an error for a word: another word, a deletion, or an inserted word."""
        core = word.rstrip(".,?!")
        near = self.near(core.lower())
        dice = rng.random()
        if dice < 0.1:
            return word[len(core) :]
        other = rng.choice(near if dice < 0.7 else self.words)
        if dice > 0.93:
            other = f"{core.lower()} {other}"
        return (other[0].upper() + other[1:] if word[0].isupper() else other) + word[len(core) :]


# Training


@dataclass(frozen=True)
class Example:
    """Token ids of a training example, and the loss weight of each."""

    ids: list[int]
    weights: list[float]


class Examples:
    """Batches of training examples; a batch depends only on the seed and the step.

    Args:
        tokenizer: Tokenizer of the model.
        lists: Real lists to train on.
        options: Settings.
    """

    def __init__(self, tokenizer: Any, lists: Sequence[NBestList], options: LMSynthOptions) -> None:
        self.options, self.lists = options, list(lists)
        self.prompts = ListPrompts(tokenizer, seq2seq=False, options=options.prompts)
        self.bos = int(tokenizer.bos_token_id)
        self.confusions = Confusions(vocabulary(options.domain))

    def plain(self, text: str) -> Example:
        """Builds the example of a sentence without a list."""
        answer = self.prompts.answer(text)
        return Example([self.bos, *answer], [0.0, *[1.0] * len(answer)])

    def corrected(self, hypotheses: Sequence[str], text: str) -> Example:
        """Builds the example of a list and its reference."""
        prompt, answer = self.prompts.prompt(hypotheses), self.prompts.answer(text)
        weights = [PROMPT_SHARE] * len(prompt) + [1.0] * len(answer)
        return Example(prompt + answer, [0.0, *weights[1:]])

    def __call__(self, step: int) -> list[Example]:
        """Returns the examples of a step."""
        options = self.options
        rng = random.Random(f"{options.fit.seed}/{step}")
        texts = training_sentences(options.domain, options.fit.batch, rng.randrange(2**31))
        found = []
        for text in texts:
            dice = rng.random()
            if dice < options.plain:
                found.append(self.plain(text))
            elif dice < options.plain + options.real:
                one = rng.choice(self.lists)
                assert one.reference is not None, "lists of the recipe have references"
                found.append(self.corrected(one.hypotheses, one.reference))
            else:
                count = rng.randint(1, options.prompts.count)
                found.append(self.corrected(self.confusions.sample(text, rng, count), text))
        return found


def loss_of(model: Any, examples: Sequence[Example]) -> Tensor:
    """Computes the weighted mean of the negative log-likelihood, in nats per token."""
    ids = pad_sequence([torch.tensor(e.ids) for e in examples], batch_first=True)
    weights = pad_sequence([torch.tensor(e.weights) for e in examples], batch_first=True)[:, 1:]
    logits = model(input_ids=ids).logits[:, :-1]  # right padding needs no mask: attention is causal
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * weights).sum() / weights.sum()


def run(options: LMSynthOptions, work: Path, out: Path) -> dict[str, Any]:
    """Makes the lists and the tokenizer and trains the model; an interrupted run is resumed.

    Args:
        options: Settings.
        work: Folder of the lists and the training state.
        out: Folder to write the model to.
    """
    lists = make_lists(work / "lists", options)
    held_out, learned = split(lists, HELD_OUT)
    tokenizer = build_tokenizer(options)
    model = build_model(tokenizer, options)
    examples = Examples(tokenizer, learned, options)
    answers = [
        Example(e.ids, [w if w == 1.0 else 0.0 for w in e.weights])
        for e in (examples.corrected(one.hypotheses, one.reference or "") for one in held_out)
    ]
    best = work / "best.pt"

    def judged() -> float:
        parts = [answers[start : start + 32] for start in range(0, len(answers), 32)]
        return sum(float(loss_of(model, p)) * len(p) for p in parts) / len(answers) * BITS

    log = fit(
        model,
        loss_at=lambda step: loss_of(model, examples(step)),
        held_out=judged,
        keep=lambda: write_state(best, model.state_dict()),
        options=options.fit,
        work=work,
    )
    model.load_state_dict(torch.load(best, weights_only=True))
    save_half(model, out)
    write_folder(out, tokenizer.save_pretrained)
    options.prompts.save(out)
    write_file(out / "recipe.json", json.dumps(asdict(options), indent=2) + "\n")
    kept = min(log, key=lambda row: row["held_out"])
    return {
        "folder": str(out),
        "parameters": model.num_parameters(),
        "lists": len(learned),
        "held_out_lists": len(held_out),
        "step": kept["step"],
        "bits_per_answer_token": round(kept["held_out"], 4),
        "minutes": round(log[-1]["seconds"] / 60, 1),
    }
