"""Recipe of ``zoo:whisper-synth``: a Whisper of 3.6 M parameters, trained from scratch.

Output: a ``WhisperForConditionalGeneration`` with windows of 8 seconds, its ``WhisperProcessor``,
and a small CTC head on the encoder, which speeds up training as an auxiliary loss and is later used
for forced alignment. Training data are sentences of `mmdecode.zoo.grammar`, synthesised by
espeak-ng with many voices, noise and reverberation; test voices and test sentences are excluded.

The architecture differs from OpenAI's Whisper only in size, window length and frame rate: 50 mel
frames a second instead of 100 (``hop_length`` 320), hence timestamps in steps of 0.04 s. Plain
``generate`` needs ``time_precision=0.04, time_precision_features=0.02`` for this; our transcriber
and transformers' pipeline read these values from the model's folder.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.checkpoints import code_trusted, local_path
from mmdecode.errors import MMDecodeError
from mmdecode.runs.files import append_line, marked_json, open_append, write_file, write_folder
from mmdecode.train.drafters import medusa, transcripts
from mmdecode.train.loop import boxed, say_float32, write_state
from mmdecode.train.speech_windows import (
    CTC_SYMBOLS,
    HOP,
    STEP_S,
    WINDOW_S,
    Batch,
    SpecialIds,
    Stream,
    Windows,
    collate,
    synthesise_corpus,
)
from mmdecode.zoo import grammar


@dataclass(frozen=True, kw_only=True)
class WhisperSynthOptions:
    """Settings of the recipe.

    Attributes:
        minutes: Duration of the training without speech synthesis; the learning rate depends on
            the elapsed time, not on the step.
        utterances: Number of synthesised sentences.
        width: Hidden size of encoder and decoder.
        encoder_layers, decoder_layers: Number of layers.
        merges: Number of byte-pair merges of the tokenizer; the more, the fewer tokens per word.
        peak_rate: Highest learning rate (AdamW).
        batch: Short windows per step; batches of 8-second windows have half as many.
        seed: Seed of the training.
    """

    minutes: float = 80.0
    utterances: int = 30_000
    width: int = 128
    encoder_layers: int = 6
    decoder_layers: int = 8
    merges: int = 900
    peak_rate: float = 2e-3
    batch: int = 32
    seed: int = 0


def build_processor(merges: int, seed: int = 0) -> WhisperProcessor:
    """Builds a Whisper processor with a byte-level BPE tokenizer trained on the grammar.

    Args:
        merges: Number of byte-pair merges.
        seed: Seed of the sentences that the tokenizer is trained on.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    texts = [" " + t for t in grammar.sentences(20_000, seed, "train")]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=256 + merges, min_frequency=2, show_progress=False)
    model = json.loads(bpe.to_str())["model"]
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    tokenizer = WhisperTokenizer(vocab=model["vocab"], merges=pairs)
    special = ["<|endoftext|>", "<|startoftranscript|>"]
    special += [f"<|{code}|>" for code in LANGUAGES]
    special += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    special += ["<|nospeech|>", "<|notimestamps|>"]
    special += [f"<|{i * STEP_S:.2f}|>" for i in range(round(WINDOW_S / STEP_S) + 1)]
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer.pad_token = "<|endoftext|>"
    extractor = WhisperFeatureExtractor(
        feature_size=80, hop_length=HOP, chunk_length=WINDOW_S, n_fft=400
    )
    return WhisperProcessor(feature_extractor=extractor, tokenizer=tokenizer)


def build_model(
    options: WhisperSynthOptions, processor: WhisperProcessor
) -> WhisperForConditionalGeneration:
    """Builds the untrained model with its generation config."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    tokenizer = processor.tokenizer
    ids = SpecialIds.of(tokenizer)
    torch.manual_seed(options.seed)
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        d_model=options.width,
        encoder_layers=options.encoder_layers,
        decoder_layers=options.decoder_layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * options.width,
        decoder_ffn_dim=4 * options.width,
        max_source_positions=round(WINDOW_S / STEP_S),
        max_target_positions=160,
        dropout=0.0,
        pad_token_id=ids.eot,
        bos_token_id=ids.eot,
        eos_token_id=ids.eot,
        decoder_start_token_id=ids.sot,
    )
    model = WhisperForConditionalGeneration(config)
    lang_to_id = {f"<|{c}|>": tokenizer.convert_tokens_to_ids(f"<|{c}|>") for c in LANGUAGES}
    suppressed = list(range(ids.sot, ids.no_timestamps))
    model.generation_config = GenerationConfig(
        decoder_start_token_id=ids.sot,
        bos_token_id=ids.eot,
        eos_token_id=ids.eot,
        pad_token_id=ids.eot,
        begin_suppress_tokens=[tokenizer.encode(" ", add_special_tokens=False)[0], ids.eot],
        suppress_tokens=suppressed,
        is_multilingual=True,
        lang_to_id=lang_to_id,
        task_to_id={
            "transcribe": ids.transcribe,
            "translate": tokenizer.convert_tokens_to_ids("<|translate|>"),
        },
        no_timestamps_token_id=ids.no_timestamps,
        prev_sot_token_id=ids.prev,
        max_initial_timestamp_index=round(1.0 / STEP_S),
        return_timestamps=False,
        max_length=config.max_target_positions,
        language="en",
        task="transcribe",
    )
    return model


class CTCHead(nn.Module):
    """CTC head on encoder states: one linear layer with `CTC_SYMBOLS` as its classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, len(CTC_SYMBOLS))

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes log-probabilities ``(B, T, symbols)`` from encoder states ``(B, T, width)``."""
        return self.proj(hidden).log_softmax(-1)


def encode(model: WhisperForConditionalGeneration, features: Tensor, offset: int = 0) -> Tensor:
    """Computes encoder states of features shorter than a window, which transformers refuses.

    Args:
        model: A Whisper.
        features: Log-mel features, ``(B, mel, frames)``.
        offset: Encoder position of the first frame.
    """
    encoder = model.model.encoder
    hidden = F.gelu(encoder.conv1(features))
    hidden = F.gelu(encoder.conv2(hidden)).transpose(1, 2)
    hidden = hidden + encoder.embed_positions.weight[offset : offset + hidden.shape[1]]
    for layer in encoder.layers:
        hidden = layer(hidden, None)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return encoder.layer_norm(hidden)


def losses(
    model: WhisperForConditionalGeneration, head: CTCHead, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Computes the decoder's cross-entropy and the encoder's CTC loss, each per token."""
    hidden = encode(model, batch.features, batch.offset)
    output = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
        decoder_input_ids=batch.ids,
        use_cache=False,
    )
    ce = F.cross_entropy(
        output.logits.float().flatten(0, 1),
        batch.targets.flatten(),
        ignore_index=-100,
        label_smoothing=0.03,
    )
    rows = batch.ctc_rows
    if not rows.any():
        return ce, ce.new_zeros(())
    log_probs = head(hidden[rows]).float().transpose(0, 1)
    lengths = torch.full((int(rows.sum()),), log_probs.shape[0], dtype=torch.long)
    ctc = F.ctc_loss(
        log_probs, batch.ctc_targets, lengths, batch.ctc_lengths[rows], zero_infinity=True
    )
    return ce, ctc


def rate_at(progress: float, step: int, peak: float) -> float:
    """Returns the learning rate: warm-up over 400 steps, then cosine decay to a fiftieth.

    Args:
        progress: Elapsed share of the training time, 0 to 1.
        step: Number of the step.
        peak: Highest learning rate.
    """
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, (step + 1) / 400) * (0.02 + 0.98 * cosine)


def train(options: WhisperSynthOptions, work: Path, out: Path) -> None:
    """Trains the model, or resumes its training.

    Args:
        options: Settings.
        work: Folder of the corpus, the training state and the log.
        out: Folder to write the model to.
    """
    processor = build_processor(options.merges, options.seed)
    model = build_model(options, processor)
    head = CTCHead(options.width)
    parameters = [*model.parameters(), *head.parameters()]
    decayed = [p for p in parameters if p.ndim > 1 and p.requires_grad]
    others = [p for p in parameters if p.ndim <= 1 and p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}],
        lr=options.peak_rate,
        betas=(0.9, 0.98),
    )
    state_file = work / "state.pt"
    step, spent = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent = state["step"], state["spent"]
    clock = torch.zeros(()).share_memory_()
    loader = torch.utils.data.DataLoader(
        Stream(work / "corpus", processor, options.batch, clock),
        batch_size=None,
        num_workers=1,
        prefetch_factor=4,
    )
    box = options.minutes * 60
    saved = time.time()
    seen = 0
    running = torch.zeros(2)
    model.train()
    for batch, elapsed in boxed(loader, spent):
        spent = elapsed
        clock.fill_(spent / box)
        if spent >= box:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(spent / box, step, options.peak_rate)
        ce, ctc = losses(model, head, batch)
        weight = 1.0 if spent / box < 0.3 else 0.4
        (ce + weight * ctc).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + len(batch.ids)
        running = 0.98 * running + 0.02 * torch.stack([ce, ctc]).detach()
        if step % 50 == 0:
            row = {
                "step": step,
                "minutes": round(spent / 60, 2),
                "ce": round(float(running[0]), 4),
                "ctc": round(float(running[1]), 4),
                "seen": seen,
            }
            with open_append(work / "log.jsonl") as log:
                append_line(log, json.dumps(row).encode() + b"\n")
        if time.time() - saved > 240:
            save_state(state_file, model, head, optimizer, step, spent)
            export(model, processor, options, out)
            saved = time.time()
    save_state(state_file, model, head, optimizer, step, spent)
    export(model, processor, options, out)


def save_state(
    path: Path,
    model: nn.Module,
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    spent: float,
) -> None:
    """Saves the state from which `train` resumes."""
    write_state(
        path,
        {
            "model": model.state_dict(),
            "head": head.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "spent": spent,
        },
    )


def export(
    model: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    options: WhisperSynthOptions,
    out: Path,
) -> None:
    """Saves float16 weights with ``dtype`` float32 in the configuration, and the processor."""
    clone = WhisperForConditionalGeneration(model.config)
    clone.load_state_dict(model.state_dict())
    clone.generation_config = model.generation_config

    def fill(into: Path) -> None:
        clone.half().save_pretrained(into)
        say_float32(into)
        processor.save_pretrained(into)
        write_file(into / "recipe.json", json.dumps(asdict(options), indent=2) + "\n")

    write_folder(out, fill)


def _speak(corpus: Path, count: int, seed: int) -> None:
    torch.set_num_threads(1)  # training has the others
    synthesise_corpus(corpus, count, seed)


def run(options: WhisperSynthOptions, work: Path, out: Path) -> dict[str, Any]:
    """Trains the model while another process synthesises the corpus; resumable."""
    import multiprocessing

    corpus = work / "corpus"
    speaker = multiprocessing.get_context("spawn").Process(
        target=_speak, args=(corpus, options.utterances, options.seed), daemon=True
    )
    speaker.start()
    while len(list(corpus.glob("*[0-9].npz"))) < 2:
        speaker.join(2)
        if speaker.exitcode not in (None, 0):
            raise MMDecodeError("synthesis of the corpus failed; see the error of espeak-ng above")
    train(options, work, out)
    last = (work / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return {"folder": str(out)} | json.loads(last)


def save_heads(draft: Any, target_config: dict[str, Any], out: Path) -> None:
    """Saves Medusa heads, with their target's configuration, into a folder."""
    write_folder(out, lambda into: draft.save_pretrained(into, target_config))


def run_heads(base: str, work: Path, out: Path, count: int = 4800) -> dict[str, Any]:
    """Trains Medusa heads of the kinds ``block`` and ``linear`` for a model of this recipe.

    Args:
        base: The model: folder or ``zoo:NAME``.
        work: Folder of the recipe, with the corpus that heads are trained on.
        out: Folder of the results, with one subfolder for each kind.
        count: Number of training windows.
    """
    from mmdecode.decoder import Decoder

    path = local_path(base)
    model = WhisperForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=code_trusted()
    ).eval()
    processor = WhisperProcessor.from_pretrained(path, trust_remote_code=code_trusted())
    windows = Windows(work / "corpus", processor, seed=991)
    windows.refresh()
    if not windows.shards:
        raise MMDecodeError(f"no corpus in {work / 'corpus'}; run the recipe whisper-synth first")

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for index in track(range(count // 16), description="transcribing"):
            sampled = [windows.draw(index % 4 > 0) for _ in range(16)]
            batch = collate(sampled, processor.feature_extractor, True, 0)
            yield batch.features, transcripts.whisper_prompt(model, 16, index % 2)

    samples = list(transcripts.collect(model, batches(), Decoder(), 120))
    reports = {}
    for kind in ("block", "linear"):
        options = medusa.MedusaOptions(kind=kind)
        draft, reports[kind] = medusa.train_heads(model, samples, options, work / f"{kind}.pt")
        draft.cpu_nodes = 5  # measured: 12 nodes give more tokens a pass and take more time
        save_heads(draft, medusa.target_config(model), out / kind)
        write_file(out / kind / "report.json", marked_json(reports[kind]))
    return {"folder": str(out)} | reports
