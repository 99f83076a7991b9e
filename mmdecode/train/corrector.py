"""``mmdecode train corrector``: trains a language model to correct a recogniser's N-best lists.

An N-best list has the recogniser's N best hypotheses for one utterance; the corrector reads them
and answers with the text. There are three methods: LoRA adapters for an existing model (with peft),
fine-tuning of all its weights, or a small model from scratch with its own tokenizer. The loss
covers the answer and its end token, not the prompt and not padding. Training stops when the
likelihood of the development lists no longer improves.

Lists are split by their ids alone, so the split is the same in any file and any order. An id is
hashed to a number from 0 to 1: lists below `TRAINED` are for training, lists from `TRAINED` to
`JUDGED` for development, and the others for testing. The function
`mmdecode.asr.correction.n_best_lists.split` with the share `JUDGED` returns these test lists.

Sources: Hu et al. 2021, arXiv:2106.09685 (LoRA); settings as in HyPoradise (Chen et al. 2023) and
FlanEC (La Quatra et al. 2024). Differs from both in the loss: HyPoradise also trains on the prompt;
FlanEC also trains on padding, and its answers have two end tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mmdecode.asr.correction.corrector import Corrector
from mmdecode.asr.correction.language_models import imported_peft, load
from mmdecode.asr.correction.n_best_lists import NBestList, hash_fraction
from mmdecode.asr.correction.prompts import NO_LABEL, ListPrompts, PromptOptions
from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.speech.wer import count_errors
from mmdecode.quantization.models import refuse_learning
from mmdecode.runs.files import (
    RUN,
    check_settings,
    marked_json,
    note_settings,
    refuse_foreign_in,
    write_file,
    write_folder,
)
from mmdecode.train.loop import BITS, FitOptions, fit, save_half, write_state

METHODS = ("lora", "full", "scratch")
TRAINED, JUDGED = 0.7, 0.8
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "q", "k", "v", "o", "c_attn")
"""Names of a layer's attention projections in LLaMA, BART, T5 and GPT-2."""


@dataclass(frozen=True, kw_only=True)
class CorrectorOptions:
    """Settings of a corrector's training.

    Attributes:
        method: ``lora``: adapters; ``full``: all weights; ``scratch``: a new small model.
        prompts: Format of the prompt.
        rank, alpha, dropout: Settings of LoRA.
        targets: Layers that get LoRA adapters: ``attention`` or ``all-linear``.
        longest: Maximum length of a prompt or an answer in tokens; longer lists are left out.
        copies: Share of each batch whose task is to copy the first hypothesis, useful for method
            ``scratch``: each different word of a list is replaced by a random word, consistently in
            all hypotheses, and the answer is the first hypothesis.
        decoded: Number of development lists that are corrected at the end, for the word error rates
            in ``card.json``.
        fit: Steps, learning rates and early stopping.
    """

    method: str = "lora"
    prompts: PromptOptions = field(default_factory=PromptOptions)
    rank: int = 16
    alpha: int = 16
    dropout: float = 0.05
    targets: str = "attention"
    longest: int = 512
    copies: float = 0.0
    decoded: int = 200
    fit: FitOptions = field(
        default_factory=lambda: FitOptions(
            steps=2000, batch=16, peak_rate=2e-4, weight_decay=0.01, every=100, patience=5
        )
    )

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UnknownNameError.of("method", self.method, METHODS)
        if self.targets not in ("attention", "all-linear"):
            raise UnknownNameError.of("targets", self.targets, ("attention", "all-linear"))
        if self.rank < 1 or not 0 <= self.copies < 1:
            raise OptionError(
                f"rank={self.rank}, copies={self.copies}; expected rank >= 1 and 0 <= copies < 1"
            )


FROM_SCRATCH = CorrectorOptions(
    method="scratch",
    prompts=PromptOptions(template="{best}\n{others}", count=2),
    longest=256,
    copies=0.5,
    fit=FitOptions(
        steps=2500,
        batch=32,
        peak_rate=2e-3,
        matrix_rate=0.02,
        weight_decay=0.05,
        every=100,
        patience=4,
    ),
)
"""Settings to train a model of two million parameters from scratch on one CPU core."""


class Example(NamedTuple):
    """Training example as token ids.

    Attributes:
        prompt: Token ids of the prompt.
        answer: Token ids of the answer, with one end token.
    """

    prompt: list[int]
    answer: list[int]

    @property
    def size(self) -> int:
        """Length of the prompt or of the answer in tokens, whichever is longer."""
        return max(len(self.prompt), len(self.answer))


@dataclass(frozen=True, kw_only=True)
class Data:
    """N-best lists with references, split into training and development.

    Attributes:
        training: Lists to train on.
        development: Lists whose likelihood decides when training stops.
    """

    training: list[NBestList]
    development: list[NBestList]

    @classmethod
    def of(cls, lists: Sequence[NBestList]) -> Data:
        """Splits lists by the hashes of their ids; see the module.

        Test lists and lists without a reference are left out.

        Raises:
            InputError: No list remains for training, or none for development.
        """
        known = [one for one in lists if one.reference is not None]
        parts = cls(
            training=[one for one in known if hash_fraction(one.id) < TRAINED],
            development=[one for one in known if TRAINED <= hash_fraction(one.id) < JUDGED],
        )
        if not parts.training or not parts.development:
            raise InputError(
                f"of {len(lists)} lists, {len(known)} have a reference, {len(parts.training)} of "
                f"them for training and {len(parts.development)} for development; expected at "
                "least 1 of each: give more lists"
            )
        return parts


def example_of(prompts: ListPrompts, hypotheses: Sequence[str], answer: str) -> Example:
    """Encodes the hypotheses of a list and its answer as an example."""
    return Example(prompts.prompt(hypotheses), prompts.answer(answer))


class Batches:
    """Batches of lists of similar length; each list occurs once in an epoch.

    A batch depends only on the lists, the settings and the step, so that training can be resumed.

    Args:
        prompts: Formats and encodes the prompts.
        lists: Training lists.
        options: Settings.

    Raises:
        InputError: All lists are longer than ``options.longest`` tokens.
    """

    def __init__(
        self, prompts: ListPrompts, lists: Sequence[NBestList], options: CorrectorOptions
    ) -> None:
        self.prompts, self.options = prompts, options
        pairs = [(example_of(prompts, *pair), pair) for pair in map(_pair, lists)]
        fitting = [pair for pair in pairs if pair[0].size <= options.longest]
        if not fitting:
            raise InputError(
                f"all {len(lists)} lists have more than {options.longest} tokens; raise the limit"
            )
        fitting.sort(key=lambda pair: pair[0].size)
        self.examples = [example for example, _ in fitting]
        self._pairs = [pair for _, pair in fitting]
        self.left_out = len(lists) - len(fitting)
        counts = Counter(word for one in lists for word in one.best.split())
        self._words = np.array(sorted(counts))
        weights = np.sqrt([counts[word] for word in self._words])
        self._shares = weights / weights.sum()

    def __call__(self, step: int) -> list[Example]:
        """Returns the examples of a step, copying examples last."""
        fit = self.options.fit
        copied = round(self.options.copies * fit.batch)
        size = fit.batch - copied
        chunks = math.ceil(len(self.examples) / size)
        dice = torch.Generator().manual_seed(fit.seed * 2**32 + step // chunks)
        start = int(torch.randperm(chunks, generator=dice)[step % chunks]) * size
        rows = range(start, min(start + size, len(self.examples)))
        taken = [self.examples[row] for row in rows]
        words = np.random.default_rng([fit.seed, step])
        copies = [self._copy(self._pairs[row][0], words) for row in words.choice(rows, copied)]
        return taken + [one for one in copies if one.size <= self.options.longest]

    def _copy(self, hypotheses: Sequence[str], dice: np.random.Generator) -> Example:
        """Builds a copying example: words replaced by random ones, answer = first hypothesis."""
        shown = self.prompts.shown(hypotheses)
        known = sorted({word for text in shown for word in text.split()})
        others = dict(zip(known, dice.choice(self._words, len(known), p=self._shares), strict=True))
        texts = [" ".join(str(others[word]) for word in text.split()) for text in shown]
        return example_of(self.prompts, texts, texts[0])


def loss_at(model: nn.Module, device: torch.device, batches: Batches, step: int) -> Tensor:
    """Computes the mean negative log-likelihood of a step's answers, in nats per token."""
    torch.manual_seed(batches.options.fit.seed * 2**32 + step)  # dropout, also after a resumption
    model.train()
    inputs = batches.prompts.collated(batches(step))
    return model(**{name: part.to(device) for name, part in inputs.items()}).loss


@torch.no_grad()
def bits_per_token(
    model: nn.Module, device: torch.device, prompts: ListPrompts, examples: Sequence[Example]
) -> float:
    """Computes the mean negative log2-likelihood of answers per token, end tokens included."""
    model.eval()
    total, tokens = 0.0, 0
    for start in range(0, len(examples), 32):
        inputs = prompts.collated(examples[start : start + 32])
        count = int((inputs["labels"] != NO_LABEL).sum())
        total += float(model(**{n: p.to(device) for n, p in inputs.items()}).loss) * count
        tokens += count
    return total / tokens * BITS


def with_adapters(model: Any, base: str, options: CorrectorOptions) -> Any:
    """Adds LoRA adapters to a model and freezes its other weights.

    Args:
        model: Model to adapt.
        base: Name or path of the model; it is written into the configuration of the adapters.
        options: Settings.

    Raises:
        MissingExtraError: peft is not installed.
    """
    found = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = sorted(found & {*ATTENTION}) if options.targets == "attention" else []
    seq2seq = model.config.is_encoder_decoder
    with imported_peft("training with LoRA") as peft:
        config = peft.LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules=targets or "all-linear",
            task_type=peft.TaskType.SEQ_2_SEQ_LM if seq2seq else peft.TaskType.CAUSAL_LM,
        )
        learner = peft.get_peft_model(model, config)
    learner.peft_config["default"].base_model_name_or_path = base
    return learner


def train(
    model: Any,
    tokenizer: Any,
    data: Data,
    options: CorrectorOptions,
    work: Path,
    out: Path,
    base: str = "",
) -> dict[str, Any]:
    """Trains a corrector, or resumes its training.

    Args:
        model: Model to train.
        tokenizer: Tokenizer of the model.
        data: Lists for training and development.
        options: Settings.
        work: Folder of the training state and of ``log.jsonl``, which has the bits per token of
            training and development answers.
        out: Folder of the trained corrector, which
            `mmdecode.asr.correction.corrector.Corrector.from_pretrained` loads.
        base: Name or path of ``model``, on which LoRA adapters are loaded again.

    Returns:
        The card: a summary of settings and results, also written to ``out/card.json``.

    Raises:
        OptionError: ``work`` belongs to a training with other settings or lists.
    """
    settings = {"options": asdict(options), "base": base, "lists": len(data.training)}
    if (work / RUN).exists():
        check_settings(work, settings, resume=True, replaceable=False)
    note_settings(work, settings)
    torch.manual_seed(options.fit.seed)
    prompts = ListPrompts(tokenizer, bool(model.config.is_encoder_decoder), options.prompts)
    batches = Batches(prompts, data.training, options)
    held_out = [example_of(prompts, *_pair(one)) for one in data.development]
    held_out = sorted((e for e in held_out if e.size <= options.longest), key=lambda e: e.size)
    device = model.device
    if options.method == "lora":
        model = with_adapters(model, base, options)
    learned = model
    if options.method == "lora":  # frozen weights are not saved with each state
        learned = nn.ParameterList([p for p in model.parameters() if p.requires_grad])
    before = bits_per_token(model, device, prompts, held_out)
    best = work / "best.pt"
    log = fit(
        learned,
        loss_at=partial(loss_at, model, device, batches),
        held_out=partial(bits_per_token, model, device, prompts, held_out),
        keep=lambda: write_state(best, learned.state_dict()),
        options=options.fit,
        work=work,
    )
    learned.load_state_dict(torch.load(best, map_location=device, weights_only=True))
    if options.method == "scratch":
        save_half(model, out)
        learned.load_state_dict({n: p.half().float() for n, p in learned.state_dict().items()})
    else:
        write_folder(out, model.save_pretrained)
    write_folder(out, tokenizer.save_pretrained)
    options.prompts.save(out)
    if options.method == "lora":
        model = model.merge_and_unload()
    best_at = min(log, key=lambda row: row["held_out"])
    card = {
        "what": f"corrector of N-best lists by {options.method}"
        + (f" on {base}" if base else f" of {model.num_parameters() / 1e6:.2f} M parameters"),
        "options": asdict(options),
        "lists": {
            "training": len(data.training) - batches.left_out,
            "too_long": batches.left_out,
            "development": len(held_out),
        },
        "steps": int(best_at["step"]),
        "minutes": round(log[-1]["seconds"] / 60, 1),
        "parameters_learnt": sum(p.numel() for p in learned.parameters()),
        "development_bits_per_token": {
            "before": round(before, 4),
            "after": round(best_at["held_out"], 4),
        },
        "development_decoded": decoded(model, tokenizer, data.development, options),
    }
    write_file(out / "card.json", marked_json(card))
    return card


def decoded(
    model: Any, tokenizer: Any, lists: Sequence[NBestList], options: CorrectorOptions
) -> dict[str, Any]:
    """Corrects the first ``options.decoded`` lists; returns word error rates and edit counts."""
    chosen = lists[: options.decoded]
    corrector = Corrector(model, tokenizer, **asdict(options.prompts))
    found = corrector(chosen)
    references = [one.reference or "" for one in chosen]

    def rate(texts: Sequence[str]) -> float:
        counts = count_errors(references, texts, normaliser="none")
        return round(float(counts[:, 2:5].sum() / max(counts[:, 0].sum(), 1)), 4)

    return {
        "lists": len(chosen),
        "normaliser": "none",
        "wer_best": rate([one.best for one in chosen]),
        "wer_corrected": rate([one.text for one in found]),
        "wer_without_guard": rate([one.raw for one in found]),
        "refused": sum(one.refused is not None for one in found),
        "edited": sum(one.edited for one in found),
        "tokens_per_pass": round(corrector.stats.acceptance_length, 3),
    }


def train_from_lists(
    model_id: str | None,
    lists: Sequence[NBestList],
    out: Path,
    options: CorrectorOptions,
    device: str = "cpu",
) -> dict[str, Any]:
    """Loads or builds a model and trains it as a corrector: ``mmdecode train corrector``.

    Args:
        model_id: Model to train: folder, Hub id or ``zoo:NAME``; ``None`` for method ``scratch``.
        lists: N-best lists with references.
        out: Folder of the trained corrector; training state and log are in ``out/state``.
        options: Settings.
        device: Device of the training.

    Returns:
        The card: a summary of settings and results.

    Raises:
        OptionError: A model is given with method ``scratch``, or none with another method.
    """
    if (model_id is None) != (options.method == "scratch"):
        raise OptionError(
            f"method {options.method!r} with model {model_id!r}; 'scratch' builds its own model "
            "and takes none, the other methods need a model"
        )
    refuse_foreign_in(out)
    data = Data.of(lists)
    if model_id is None:
        tokenizer = build_tokenizer(data.training)
        model = build_model(tokenizer, options).to(device)
    else:
        model, tokenizer = load(model_id, device)
        refuse_learning(model)
    if options.method == "full":
        model_id = ""
    return train(model, tokenizer, data, options, out / "state", out, model_id or "")


def build_tokenizer(lists: Sequence[NBestList], size: int = 1536) -> Any:
    """Trains a byte-level BPE tokenizer on the texts of lists; it puts a space before each line.

    Args:
        lists: Training lists.
        size: Size of the vocabulary.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = sorted({text for one in lists for text in (*one.hypotheses, one.reference or "")})
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", bpe.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>", model_max_length=512
    )


def build_model(tokenizer: Any, options: CorrectorOptions) -> Any:
    """Builds a small untrained encoder-decoder: Pegasus layers with sinusoidal positions."""
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    torch.manual_seed(options.fit.seed)
    return PegasusForConditionalGeneration(
        PegasusConfig(
            vocab_size=len(tokenizer),
            d_model=128,
            encoder_layers=2,
            decoder_layers=4,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=384,
            decoder_ffn_dim=384,
            max_position_embeddings=512,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            activation_function="gelu",
            scale_embedding=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            forced_eos_token_id=None,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )


def _pair(one: NBestList) -> tuple[tuple[str, ...], str]:
    assert one.reference is not None, "lists of `Data` have references"
    return one.hypotheses, one.reference
