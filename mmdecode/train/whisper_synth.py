"""Recipe of ``zoo:whisper-synth``: a real Whisper, four orders of magnitude smaller, from scratch.

What it makes: a ``WhisperForConditionalGeneration`` of about 3.6 M parameters with 8-second
windows, its ``WhisperProcessor`` folder, and a small CTC head on the encoder (an auxiliary loss
that shortens the road to alignment, kept for forced alignment). Data are sentences of
`mmdecode.zoo.grammar` spoken by espeak-ng with many voices, noise and reverberation; test voices
and test sentences are never trained on.

Differs from OpenAI's Whisper in the frame rate only: 50 mel frames a second instead of 100
(``hop_length`` 320), hence timestamps in steps of 0.04 s. Plain ``generate`` must be told so
(``time_precision=0.04, time_precision_features=0.02``); our transcriber and transformers' pipeline
read it from the folder.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
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

from mmdecode.checkpoints import local_path
from mmdecode.errors import MMDecodeError
from mmdecode.train import medusa
from mmdecode.zoo import grammar, synthesis
from mmdecode.zoo.synthesis import SAMPLING_RATE

WINDOW_S = 8
HOP = 320  # samples between mel frames
STEP_S = 2 * HOP / SAMPLING_RATE  # seconds of one encoder frame and of one timestamp token
CTC_SYMBOLS = "_ 'abcdefghijklmnopqrstuvwxyz"  # index 0 is the blank


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the recipe.

    Attributes:
        minutes: Time box of the training proper; the learning rate follows the clock.
        utterances: Synthesised sentences the windows are cut from.
        width: Hidden size of encoder and decoder.
        encoder_layers, decoder_layers: Depths.
        merges: Byte-pair merges of the tokenizer; sets the tokens per word.
        peak_rate: Highest learning rate (AdamW).
        batch: Windows per step when they are short; full windows come in batches of half this.
        seed: Of everything.
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
    """A processor in Whisper's layout: byte-level BPE of the grammar, all special tokens."""
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


@dataclass(frozen=True)
class SpecialIds:
    """Token ids of the Whisper layout."""

    eot: int
    sot: int
    en: int
    transcribe: int
    prev: int
    no_speech: int
    no_timestamps: int
    first_timestamp: int

    @classmethod
    def of(cls, tokenizer: WhisperTokenizer) -> SpecialIds:
        """Looked up by their names."""
        names = (
            "endoftext startoftranscript en transcribe startofprev nospeech notimestamps".split()
        )
        ids = tokenizer.convert_tokens_to_ids([f"<|{n}|>" for n in names])
        eot, sot, en, transcribe, prev, no_speech, no_timestamps = ids
        return cls(eot, sot, en, transcribe, prev, no_speech, no_timestamps, no_timestamps + 1)


def build_model(options: Options, processor: WhisperProcessor) -> WhisperForConditionalGeneration:
    """The untrained model with its generation config."""
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
    """Letters from encoder frames: one linear layer, symbols `CTC_SYMBOLS`, blank first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, len(CTC_SYMBOLS))

    def forward(self, hidden: Tensor) -> Tensor:
        """Log-probabilities ``(B, T, symbols)`` from encoder states ``(B, T, width)``."""
        return self.proj(hidden).log_softmax(-1)


def ctc_ids(text: str) -> list[int]:
    """Symbols of a text: lower case, anything else than letters and apostrophes is dropped."""
    kept = re.sub(r"[^a-z' ]", "", text.lower())
    return [CTC_SYMBOLS.index(c) for c in " ".join(kept.split())]


# --- data -----------------------------------------------------------------------------------------


def synthesise_corpus(folder: Path, count: int, seed: int, shard: int = 1000) -> None:
    """Speak ``count`` training sentences into ``folder`` (shards of int16 samples); resumable."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    engine = synthesis.Espeak()
    for start in track(range(0, count, shard), description="speaking"):
        path = folder / f"{start:07d}.npz"
        if path.exists():
            continue
        rng = random.Random(f"{seed}/{start}")
        texts = grammar.sentences(shard, seed * 1_000_003 + start, "train")
        waves = [engine.speak(t, synthesis.Voice.draw(rng)) for t in texts]
        samples = np.concatenate([(w * 32767).astype(np.int16) for w in waves])
        ends = np.cumsum([len(w) for w in waves])
        partial = path.with_suffix(".tmp.npz")
        np.savez(partial, samples=samples, ends=ends, texts=np.array(texts))
        partial.rename(path)


@dataclass
class Window:
    """One training example before batching."""

    wave: Tensor  # (T,)
    ids: list[int]
    targets: list[int]  # same length, -100 where nothing is asked
    letters: list[int] | None  # None: a cut utterance, or no speech


class Windows:
    """Endless windows cut from a corpus; silence, several utterances, cut ones, noise, rooms."""

    def __init__(self, folder: Path, processor: WhisperProcessor, seed: int) -> None:
        self.folder, self.tokenizer = folder, processor.tokenizer
        self.ids = SpecialIds.of(processor.tokenizer)
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.shards: list[tuple[np.ndarray, np.ndarray, list[str]]] = []
        self.known: set[Path] = set()
        burst = torch.zeros(2 * WINDOW_S * SAMPLING_RATE)
        burst[:1600] = 0.1  # unit power reference: the pool is noise of root mean square 0.1
        self.noises = [
            synthesis.add_noise(burst, 0.0, self.generator, tilt=i / 40) - burst for i in range(64)
        ]

    def refresh(self) -> None:
        """Load shards that have appeared since the last call."""
        for path in sorted(self.folder.glob("*[0-9].npz")):
            if path not in self.known:
                self.known.add(path)
                with np.load(path) as data:
                    self.shards.append((data["samples"], data["ends"], data["texts"].tolist()))

    def utterance(self) -> tuple[Tensor, str]:
        """One spoken sentence of the corpus and its text."""
        samples, ends, texts = self.rng.choice(self.shards)
        i = self.rng.randrange(len(texts))
        wave = samples[ends[i - 1] if i else 0 : ends[i]].astype(np.float32) / 32767
        return torch.from_numpy(wave), texts[i]

    def noise(self, length: int) -> Tensor:
        """A stretch of coloured noise of root mean square 0.1 from the pool."""
        track = self.rng.choice(self.noises)
        start = self.rng.randrange(len(track) - length)
        return track[start : start + length]

    def damage(self, wave: Tensor) -> Tensor:
        """A room, noise and another loudness, each with some probability."""
        rng = self.rng
        if rng.random() < 0.2:
            wave = synthesis.add_reverberation(wave, rng.uniform(0.1, 0.5), self.generator)
        if rng.random() < 0.6:
            loud = wave[wave.abs() > 0.02]
            level = float(loud.square().mean().sqrt()) if len(loud) else 0.1
            wave = wave + self.noise(len(wave)) * (10 * level * 10 ** (-rng.uniform(3, 30) / 20))
        return wave * 10 ** rng.uniform(-1, 0)

    def silence(self) -> Window:
        """No speech: only the no-speech token is asked, at the start of the transcript."""
        level = self.rng.choice([0.0, 1e-3, 1e-2, 1e-1, 1.0])
        wave = level * self.noise(WINDOW_S * SAMPLING_RATE)
        return Window(wave, [self.ids.sot], [self.ids.no_speech], None)

    def draw(self, full: bool, prompted: bool = False) -> Window:
        """One window; ``full`` windows last 8 seconds and may hold several utterances."""
        rng, ids = self.rng, self.ids
        if full and rng.random() < 0.06:
            return self.silence()
        limit = WINDOW_S * SAMPLING_RATE
        joined = full and rng.random() < 0.75
        with_times = rng.random() < 0.55
        late = full and not joined and not with_times  # begins anywhere; a timestamp may not
        lead = rng.randint(0, 5 * SAMPLING_RATE if late else SAMPLING_RATE // 2)
        wave = torch.zeros(0 if rng.random() < 0.3 else lead)
        segments: list[tuple[float, float, str]] = []
        cut = None
        while True:
            spoken, text = self.utterance()
            start = len(wave)
            if start + len(spoken) > limit:
                if segments and with_times and start < limit - SAMPLING_RATE // 4:
                    cut = start / SAMPLING_RATE
                    wave = torch.cat([wave, spoken])[:limit]
                break
            wave = torch.cat([wave, spoken])
            segments.append((start / SAMPLING_RATE, len(wave) / SAMPLING_RATE, text))
            if not joined or rng.random() < 0.15:
                break
            wave = torch.cat([wave, torch.zeros(rng.randint(1600, 12000))])
            if len(wave) > limit - SAMPLING_RATE:
                break
        if cut is None:
            wave = torch.cat([wave, torch.zeros(rng.randint(0, SAMPLING_RATE // 2))])[:limit]
        if not segments:  # a single utterance longer than the window: never with this grammar
            return self.draw(full, prompted)
        wave = self.damage(wave)

        tokens = [ids.sot, ids.en, ids.transcribe]
        asked = [ids.en, -100]
        if with_times:
            for start_s, end_s, text in segments:
                tokens += [self.stamp(start_s), *self.text(text), self.stamp(end_s)]
            if cut is not None:
                tokens += [self.stamp(cut)]
            asked = asked + tokens[3:] + [ids.eot]
        else:
            tokens += [ids.no_timestamps] + [t for s in segments for t in self.text(s[2])]
            asked = [*asked, -100, *tokens[4:], ids.eot]
        if prompted:
            before = [ids.prev, *self.text(self.utterance()[1])]
            tokens, asked = before + tokens, [-100] * len(before) + asked
        letters = None if cut is not None else ctc_ids(" ".join(s[2] for s in segments))
        return Window(wave, tokens, asked, letters)

    def shift(self, batch: Batch) -> Batch:
        """A batch of short windows as if it began somewhere in the full one.

        Without this the encoder learns sentences at the beginning of a window only: heard two
        seconds later, the same sentence was not recognised at all.
        """
        room = round(WINDOW_S / STEP_S) - batch.features.shape[-1] // 2
        batch.offset = self.rng.randint(0, max(room, 0))
        first, last = self.ids.first_timestamp, self.ids.first_timestamp + round(WINDOW_S / STEP_S)
        for ids in (batch.ids, batch.targets):
            ids += torch.where(ids >= first, batch.offset, 0)
            ids.clamp_(max=last)
        return batch

    def stamp(self, seconds: float) -> int:
        """The timestamp token nearest to a time."""
        return self.ids.first_timestamp + min(round(seconds / STEP_S), round(WINDOW_S / STEP_S))

    def text(self, text: str) -> list[int]:
        """Ids of a text in the middle of a transcript."""
        return self.tokenizer.encode(" " + text, add_special_tokens=False)


class Mel:
    """Whisper's log-mel features for a batch of equally long waves, in torch."""

    def __init__(self, extractor: WhisperFeatureExtractor) -> None:
        self.filters = torch.tensor(extractor.mel_filters, dtype=torch.float32).T  # (80, 201)
        self.window = torch.hann_window(400)

    def __call__(self, waves: Tensor) -> Tensor:
        """``(B, T)`` samples to ``(B, 80, T / hop)``."""
        spectrum = torch.stft(waves, 400, HOP, window=self.window, return_complex=True)
        mel = self.filters @ spectrum[..., :-1].abs().square()
        log = mel.clamp_min(1e-10).log10()
        return (torch.maximum(log, log.amax((1, 2), keepdim=True) - 8.0) + 4.0) / 4.0


@dataclass
class Batch:
    """Padded tensors of one step."""

    features: Tensor  # (B, 80, frames)
    ids: Tensor  # (B, L)
    targets: Tensor  # (B, L)
    letters: Tensor  # concatenated
    letter_lengths: Tensor  # (B,)
    ctc_rows: Tensor  # (B,) bool
    offset: int = 0  # encoder position of the first frame


def collate(windows: list[Window], mel: Mel, full: bool, pad: int) -> Batch:
    """Short windows are padded to the longest, full ones to the model's window."""
    unit = 16 * 2 * HOP
    longest = max(len(w.wave) for w in windows)
    size = WINDOW_S * SAMPLING_RATE if full else min(-(-longest // unit) * unit, 8 * SAMPLING_RATE)
    waves = torch.stack([F.pad(w.wave, (0, size - len(w.wave))) for w in windows])
    length = max(len(w.ids) for w in windows)
    ids = torch.tensor([w.ids + [pad] * (length - len(w.ids)) for w in windows])
    targets = torch.tensor([w.targets + [-100] * (length - len(w.targets)) for w in windows])
    letters = [w.letters or [] for w in windows]
    return Batch(
        features=mel(waves),
        ids=ids,
        targets=targets,
        letters=torch.tensor([c for row in letters for c in row]),
        letter_lengths=torch.tensor([len(row) for row in letters]),
        ctc_rows=torch.tensor([bool(row) for row in letters]),
    )


class Stream(torch.utils.data.IterableDataset):
    """Batches for the loader's worker; ``share`` of full windows follows the clock."""

    def __init__(
        self, options: Options, folder: Path, processor: WhisperProcessor, clock: Tensor
    ) -> None:
        self.options, self.folder, self.processor, self.clock = options, folder, processor, clock

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        windows = Windows(self.folder, self.processor, seed=time.time_ns() % 2**31)
        mel = Mel(self.processor.feature_extractor)
        pad = windows.ids.eot
        for step in range(10**9):
            if step % 200 == 0:
                windows.refresh()
            progress = float(self.clock)
            share = 0.1 if progress < 0.3 else 0.3 if progress < 0.75 else 0.7
            full = windows.rng.random() < share
            count = self.options.batch // (2 if full else 1)
            prompted = windows.rng.random() < 0.1
            batch = collate([windows.draw(full, prompted) for _ in range(count)], mel, full, pad)
            yield batch if full else windows.shift(batch)


# --- training -------------------------------------------------------------------------------------


def encode(model: WhisperForConditionalGeneration, features: Tensor, offset: int = 0) -> Tensor:
    """Encoder states for features of any length: the stock forward insists on the full window.

    Args:
        model: A Whisper.
        features: ``(B, mel, frames)``.
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
    """Cross-entropy of the decoder and CTC loss of the encoder, both per token."""
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
        log_probs, batch.letters, lengths, batch.letter_lengths[rows], zero_infinity=True
    )
    return ce, ctc


def rate_at(progress: float, step: int, peak: float) -> float:
    """Linear warm-up over 400 steps, then a cosine over the time box, down to a fiftieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, (step + 1) / 400) * (0.02 + 0.98 * cosine)


def train(options: Options, work: Path, out: Path) -> None:
    """Run the recipe; ``work`` holds corpus and training state, ``out`` receives the model."""
    work.mkdir(parents=True, exist_ok=True)
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
        Stream(options, work / "corpus", processor, clock),
        batch_size=None,
        num_workers=1,
        prefetch_factor=4,
    )
    box = options.minutes * 60
    log = (work / "log.jsonl").open("a")
    before = saved = time.time()
    seen = 0
    running = torch.zeros(2)
    model.train()
    for batch in loader:
        now = time.time()
        spent += min(now - before, 30.0)  # sleep of the machine costs nothing
        before = now
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
            log.write(json.dumps(row) + "\n")
            log.flush()
        if time.time() - saved > 240:
            save_state(state_file, model, head, optimizer, step, spent)
            export(model, head, processor, options, out)
            saved = time.time()
    save_state(state_file, model, head, optimizer, step, spent)
    export(model, head, processor, options, out)


def save_state(
    path: Path,
    model: nn.Module,
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    spent: float,
) -> None:
    """What `train` needs to go on."""
    medusa.write_state(
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
    head: CTCHead,
    processor: WhisperProcessor,
    options: Options,
    out: Path,
) -> None:
    """Half-precision weights, float32 in the config, processor and CTC head beside them."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    clone = WhisperForConditionalGeneration(model.config)
    clone.load_state_dict(model.state_dict())
    clone.generation_config = model.generation_config
    clone.half().save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    processor.save_pretrained(out)
    save_file({k: v.half() for k, v in head.state_dict().items()}, out / "ctc_head.safetensors")
    (out / "recipe.json").write_text(json.dumps(asdict(options), indent=2) + "\n")


def run(options: Options, work: Path, out: Path) -> dict[str, Any]:
    """The whole recipe: the corpus is spoken by a process beside the training; resumable."""
    import multiprocessing

    corpus = work / "corpus"
    speaker = multiprocessing.get_context("spawn").Process(
        target=synthesise_corpus, args=(corpus, options.utterances, options.seed), daemon=True
    )
    speaker.start()
    while len(list(corpus.glob("*[0-9].npz"))) < 2:
        speaker.join(2)
        if speaker.exitcode not in (None, 0):
            raise MMDecodeError("the corpus could not be spoken; see the error of espeak-ng above")
    train(options, work, out)
    last = (work / "log.jsonl").read_text().splitlines()[-1]
    return {"folder": str(out)} | json.loads(last)


def run_heads(base: str, work: Path, out: Path, count: int = 4800) -> dict[str, Any]:
    """Both kinds of heads for a model of this recipe, on windows of its corpus."""
    from mmdecode.engine.decoder import Decoder

    path = local_path(base)
    model = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    processor = WhisperProcessor.from_pretrained(path)
    windows = Windows(work / "corpus", processor, seed=991)
    windows.refresh()
    if not windows.shards:
        raise MMDecodeError(f"no corpus in {work / 'corpus'}; run the recipe whisper-synth first")
    mel = Mel(processor.feature_extractor)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for index in track(range(count // 16), description="transcribing"):
            batch = collate([windows.draw(index % 4 > 0) for _ in range(16)], mel, True, 0)
            yield batch.features, medusa.whisper_prompt(model, 16, index % 2)

    samples = list(medusa.collect(model, batches(), Decoder(), 120))
    reports = {}
    for kind in ("block", "linear"):
        options = medusa.MedusaOptions(kind=kind)
        draft, reports[kind] = medusa.train_heads(model, samples, options, work / f"{kind}.pt")
        draft.cpu_nodes = 5  # measured: 12 nodes give more tokens a pass and take more time
        draft.save_pretrained(out / kind, medusa.target_config(model))
        (out / kind / "report.json").write_text(json.dumps(reports[kind], indent=2) + "\n")
    return {"folder": str(out)} | reports
