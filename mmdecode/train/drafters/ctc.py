"""Training of a CTC head for a speech recogniser, on the model's own transcripts.

The model stays frozen. The labels are its own greedy transcripts of the training audio, since these
are the tokens that verification accepts, spelled with the head's subwords. The encoder states of
all recordings are computed once and stored in half precision, so that an epoch runs the head alone.

Sources: Graves et al. 2006 (connectionist temporal classification); Saon et al. 2026,
arXiv:2603.11243 (a CTC text as a draft; there the encoder learns too).
"""

from __future__ import annotations

import math
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.asr.correction.guard import edits_of
from mmdecode.decoder import Decoder
from mmdecode.engine.request import up_to_end
from mmdecode.errors import InputError, OptionError
from mmdecode.models.ctc_head import BLANK, CTCHead
from mmdecode.quantization.models import refuse_learning
from mmdecode.runs.files import marked_json, refuse_foreign_in, write_file, write_folder
from mmdecode.train.drafters.medusa import recognizers_of, set_rate
from mmdecode.train.drafters.recordings import STATE, forget, read_windows, refuse_finished, stored
from mmdecode.train.drafters.transcripts import batches_of
from mmdecode.train.loop import Epochs

if TYPE_CHECKING:
    from mmdecode.asr.recognizers.base import Recognizer


MOST = 32_000
"""Most subwords of a head, whose numbers are stored in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class CTCOptions:
    """Settings of the training of a CTC head.

    Attributes:
        vocabulary: Maximum number of subwords of the head, at most 32,000: single characters, and
            the most frequent tokens of the transcripts. Other tokens are spelled with them.
        inner: Width of the convolutions.
        kernel: Width of a convolution in frames; an odd number.
        strides: Stride of each convolution. Their product is the number of encoder states per frame
            of logits.
        feed_forward: Width of the feed-forward part of each convolution, which makes it a residual
            block without ``inner``, see `mmdecode.models.ctc_head`; 0: plain convolutions.
        epochs: Number of epochs; the weights of the epoch with the fewest errors on held-out
            samples are kept.
        peak_rate: Highest learning rate (AdamW, cosine schedule).
        batch: Samples per step.
        dropout: Fraction of the encoder states' elements that is dropped in training.
        seed: Seed of weights, sample order and held-out split.
    """

    vocabulary: int = 1000
    inner: int = 288
    kernel: int = 5
    strides: tuple[int, ...] = (2, 1)
    feed_forward: int = 0
    epochs: int = 15
    peak_rate: float = 2e-3
    batch: int = 16
    dropout: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vocabulary > MOST:
            raise OptionError(
                f"vocabulary={self.vocabulary}; expected at most {MOST}: a head spells other tokens"
            )
        counts = (self.vocabulary, self.inner, self.epochs, self.batch, *self.strides)
        if min(counts) < 1 or self.kernel % 2 == 0 or not self.strides:
            raise OptionError(
                f"vocabulary={self.vocabulary}, inner={self.inner}, epochs={self.epochs}, "
                f"batch={self.batch}, strides={self.strides}, kernel={self.kernel}; expected "
                "numbers of at least 1, at least one stride, and an odd kernel"
            )


@dataclass
class Sample:
    """Transcript of a window with its encoder states.

    Attributes:
        ids: Text tokens of the transcript, without the end token.
        states: Encoder states, ``(S, H)`` float16.
        spans: First and last encoder state of each token; labels elsewhere are learned as errors.
            ``None``: not known, labels may be anywhere.
    """

    ids: list[int]
    states: Tensor
    spans: list[tuple[int, int]] | None = None


def collect(
    recognizer: Recognizer, windows: Sequence[np.ndarray], language: int | None = None
) -> Iterator[Sample]:
    """Encodes and transcribes windows greedily, see `mmdecode.train.drafters.transcripts`.

    Args:
        recognizer: Recogniser, which encodes windows.
        windows: Waveforms at the recogniser's rate, each at most a window long.
        language: Token of the language; ``None``: there is none.
    """
    ends = sorted(recognizer.eos_token_ids)
    for batch in batches_of([recognizer], windows, Decoder(), language):
        states, mask = batch.encoded.states, batch.encoded.mask
        assert states is not None, "the engine has an adapter"
        for row, tokens in enumerate(batch.ids[:, batch.prompt :].tolist()):
            kept = states[row] if mask is None else states[row][mask[row]]
            ids = up_to_end(tokens[: batch.limits[row]], ends)
            text = [int(token) for token in recognizer.text_tokens(ids) if token not in ends]
            yield Sample(text, kept.half().cpu())


LONGEST = 8
"""Most subwords that spell a token where its prefix score is asked for; others have none."""


class Speller:
    """Subwords of a head, and the spelling of the model's other tokens with them.

    Args:
        tokenizer: The model's tokenizer.
        ids: Token ids of the subwords.
    """

    def __init__(self, tokenizer: Any, ids: Sequence[int]) -> None:
        self._piece: Callable[[int], str] = tokenizer.convert_ids_to_tokens
        self.ids = list(ids)
        self._index = {self._piece(token): index for index, token in enumerate(self.ids)}
        self._longest = max(map(len, self._index), default=0)

    @classmethod
    def of(cls, tokenizer: Any, samples: Iterable[Sequence[int]], size: int) -> Speller:
        """Makes the speller of characters and of the most frequent tokens of transcripts.

        Args:
            tokenizer: The model's tokenizer.
            samples: Ids of the transcripts.
            size: Maximum number of subwords.
        """
        counts = Counter(token for ids in samples for token in ids)
        pieces = map(tokenizer.convert_ids_to_tokens, counts)
        characters = {character for piece in pieces for character in cls._characters(piece)}
        found = tokenizer.convert_tokens_to_ids(sorted(characters))
        known = [token for token in found if token not in (None, tokenizer.unk_token_id)]
        frequent = [token for token, _ in counts.most_common() if token not in known]
        return cls(tokenizer, sorted([*known, *frequent][:size]))

    @staticmethod
    def _characters(piece: str) -> str:
        """Returns the characters of a piece; none if it is a byte by its number."""
        return "" if re.fullmatch("<0x..>", piece) else piece

    def spelled(self, ids: Iterable[int]) -> list[int]:
        """Returns the indices of subwords that spell tokens; those that none spell are left out.

        Args:
            ids: Ids of the model's tokens.
        """
        return [index for token in ids for index in self._of(self._piece(token))]

    def labels(self, tokenizer: Any, size: int) -> Tensor:
        """Returns the labels of each text token, ``(size, K)`` int16, see `CTCHead.spellings`.

        Args:
            tokenizer: The model's tokenizer.
            size: Size of the model's vocabulary.
        """
        others = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        text = [token for token in range(min(size, len(tokenizer))) if token not in others]
        rows = {token: self.spelled([token]) for token in text}
        rows = {token: row for token, row in rows.items() if 0 < len(row) <= LONGEST}
        found = torch.zeros(size, max(map(len, rows.values()), default=0), dtype=torch.int16)
        for token, row in rows.items():
            found[token, : len(row)] = torch.tensor(row) + 1
        return found

    def _of(self, piece: str) -> list[int]:
        if piece in self._index:
            return [self._index[piece]]
        found, at = [], 0
        while at < len(piece):
            sizes = range(min(self._longest, len(piece) - at), 0, -1)
            size = next((n for n in sizes if piece[at : at + n] in self._index), 0)
            if not size or not self._characters(piece):
                return []
            found.append(self._index[piece[at : at + size]])
            at += size
        return found


OUTSIDE = 20.0
"""Cost of a label outside the span of its token, in nats."""


def outside(samples: Sequence[Sample], speller: Speller, stride: int, like: Tensor) -> Tensor:
    """Computes the costs of labels by their frame, ``(B, T, N + 1)``: 0 or `OUTSIDE`.

    Args:
        samples: Samples; those without spans have no costs.
        speller: Subwords of the head.
        stride: Encoder states per frame.
        like: Logits of the samples, of the same shape.
    """
    costs = like.new_zeros(like.shape)
    for row, sample in enumerate(samples):
        if sample.spans is None:
            continue
        costs[row, :, 1:] = OUTSIDE
        for token, (first, last) in zip(sample.ids, sample.spans, strict=True):
            frames = slice(first // stride, last // stride + 1)
            costs[row, frames, [index + 1 for index in speller.spelled([token])]] = 0.0
    return costs


def ctc_losses(
    logits: Tensor,
    frames: Tensor,
    targets: Sequence[Sequence[int]],
    costs: Tensor | None = None,
) -> Tensor:
    """Computes the CTC loss of each row per target token, ``(B,)``.

    Rows with too few frames for their targets have a loss of zero.

    Args:
        logits: Logits ``(B, T, N + 1)`` of a `CTCHead`.
        frames: Number of frames of each row, ``(B,)``.
        targets: Indices of subwords of each row.
        costs: Cost of each label in each frame, ``(B, T, N + 1)``, see `outside`.
    """
    sizes = torch.tensor([len(row) for row in targets])
    flat = torch.tensor([index + 1 for row in targets for index in row], device=logits.device)
    scores = logits.float().log_softmax(-1)
    left: Tensor | None = None
    if costs is not None:  # the gradient of torch's loss is that of normalised scores only
        left = (scores - costs).logsumexp(-1)
        scores = scores - costs - left[..., None]
    losses = F.ctc_loss(
        scores.transpose(0, 1),
        flat,
        frames.cpu(),
        sizes,
        blank=BLANK,
        reduction="none",
        zero_infinity=True,
    )
    if left is not None:
        repeats = torch.tensor([sum(map(operator.eq, row, row[1:])) for row in targets])
        fits = (sizes + repeats).to(frames) <= frames
        order = torch.arange(left.shape[1], device=left.device)
        real = (order < frames.to(order)[:, None]) & fits.to(order.device)[:, None]
        losses = losses - (left * real).sum(1)
    return losses / sizes.clamp_min(1).to(losses)


def train_head(
    model: Any,
    tokenizer: Any,
    samples: Sequence[Sample],
    options: CTCOptions,
    state_file: Path | None = None,
    further: Callable[[int], Sequence[Sample]] | None = None,
    begin: CTCHead | None = None,
) -> tuple[CTCHead, dict[str, Any]]:
    """Trains a head for a model; a twentieth of the samples, at least 10, is held out.

    Args:
        model: The recogniser that the head drafts for; its weights stay frozen.
        tokenizer: Its tokenizer.
        samples: Transcripts and encoder states, as `collect` yields them.
        options: Settings.
        state_file: File of the training state, written after each epoch; an interrupted training
            resumes from it. ``None``: no state is written.
        further: Returns the samples of an epoch from its number, of which the first is 1; subwords
            and held-out samples are those of ``samples``. ``None``: every epoch has ``samples``.
        begin: Head whose training goes on, with its shape and subwords. ``None``: a new one.

    Returns:
        The head; and a report with settings, number of subwords and held-out errors by epoch.

    Raises:
        InputError: There are fewer than 20 samples.
        OptionError: ``state_file`` is of a training with other settings or samples.
    """
    if len(samples) < 20:
        raise InputError(f"{len(samples)} training samples; expected at least 20: add recordings")
    torch.manual_seed(options.seed)
    order = torch.randperm(len(samples)).tolist()
    held = max(10, len(samples) // 20)
    valid = [samples[i] for i in order[:held]]
    rest: Sequence[Sample] = [samples[i] for i in order[held:]]
    table = model.get_input_embeddings().weight.detach()
    if begin is None:
        speller = Speller.of(tokenizer, [sample.ids for sample in rest], options.vocabulary)
        head = new_head(options, speller, tokenizer, table, samples[0].states.shape[1])
    else:
        head, speller = begin, Speller(tokenizer, begin.ids.tolist())
    embeddings = table[speller.ids].float()
    head, stride = head.to(embeddings.device), math.prod(head.strides)
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.peak_rate, weight_decay=0.01)
    settings = _settings(options, samples, begin)
    epochs = Epochs(head, optimizer, settings, state_file)
    for epoch in epochs.left(options.epochs, "CTC head"):
        torch.manual_seed(options.seed * 1000 + epoch)
        if epoch and further is not None:
            rest = further(epoch)
        batches = _alike(rest, options.batch)
        head.train()
        for done, number in enumerate(torch.randperm(len(batches)).tolist()):
            step = epoch * len(batches) + done
            set_rate(optimizer, options.peak_rate, step, options.epochs * len(batches))
            batch = [rest[row] for row in batches[number]]
            states, lengths = _padded(batch, embeddings)
            logits = head(F.dropout(states, options.dropout), lengths, embeddings)
            wanted = [speller.spelled(sample.ids) for sample in batch]
            known = any(sample.spans is not None for sample in batch)
            costs = outside(batch, speller, stride, logits) if known else None
            ctc_losses(logits, head.lengths(lengths), wanted, costs).mean().backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        head.eval()
        epochs.end(-word_errors(head, tokenizer, valid, embeddings, options.batch))
    epochs.load_best()
    rates = [round(-score, 4) for score in epochs.scores]
    report = {
        "options": asdict(options),
        "samples": len(samples),
        "subwords": len(speller.ids),
        "parameters": sum(one.numel() for one in head.parameters()),
        "word_errors_by_epoch": rates,
        "word_errors": min(rates),
    }
    return head.eval(), report


def _settings(options: CTCOptions, samples: Sequence[Sample], begin: CTCHead | None) -> list[Any]:
    """Returns what a training must share with the one that it resumes."""
    found = [asdict(options), len(samples), sum(sum(sample.ids) for sample in samples)]
    spans = [sum(map(sum, sample.spans)) for sample in samples if sample.spans is not None]
    if spans:
        found += [sum(spans), OUTSIDE]
    if begin is not None:
        found.append(
            sum(float(weight.detach().double().abs().sum()) for weight in begin.parameters())
        )
    return found


def new_head(
    options: CTCOptions, speller: Speller, tokenizer: Any, table: Tensor, width: int
) -> CTCHead:
    """Makes a head with random weights.

    Args:
        options: Settings.
        speller: Its subwords.
        tokenizer: The model's tokenizer.
        table: The model's token embeddings, ``(V, hidden_size)``.
        width: Width of the encoder's states.
    """
    labels = speller.labels(tokenizer, len(table))
    head = CTCHead(
        {
            "source_size": width,
            "hidden_size": table.shape[1],
            "inner_size": options.inner,
            "kernel": options.kernel,
            "strides": list(options.strides),
            "feed_forward": options.feed_forward,
            "subwords": len(speller.ids),
            "vocab_size": len(table),
            "spelled": labels.shape[1],
        }
    )
    head.ids.copy_(torch.tensor(speller.ids))
    head.spellings.copy_(labels)
    return head


def word_errors(
    head: CTCHead, tokenizer: Any, samples: Sequence[Sample], embeddings: Tensor, batch: int
) -> float:
    """Returns the word error rate of a head's texts against the labels of samples.

    Args:
        head: The head.
        tokenizer: The model's tokenizer.
        samples: Transcripts and encoder states.
        embeddings: Embeddings of the head's subwords.
        batch: Samples per pass.
    """
    wrong = words = 0
    for rows in _alike(samples, batch):
        part = [samples[row] for row in rows]
        texts = head.greedy(*_padded(part, embeddings), embeddings)
        for sample, ids in zip(part, texts, strict=True):
            expected = tokenizer.decode(sample.ids).split()
            wrong += edits_of(tokenizer.decode(ids).split(), expected)
            words += len(expected)
    return wrong / max(1, words)


def _alike(samples: Sequence[Sample], size: int) -> list[list[int]]:
    """Splits samples into batches of similar length, as indices."""
    order = sorted(range(len(samples)), key=lambda row: len(samples[row].states))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _padded(samples: Sequence[Sample], like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns encoder states ``(B, S, H)`` and their numbers ``(B,)``."""
    states = [sample.states.to(like) for sample in samples]
    lengths = torch.tensor([len(one) for one in states], device=like.device)
    return nn.utils.rnn.pad_sequence(states, batch_first=True), lengths


def train_from_manifest(
    model_name: str,
    manifest: Path,
    out: Path,
    options: CTCOptions,
    *,
    limit: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    language: str = "en",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Trains a CTC head for a recogniser on audio files: ``mmdecode train ctc``.

    Args:
        model_name: The recogniser: folder, Hub id, ``zoo:NAME`` or ``moonshine:tiny-en``.
        manifest: Folder of audio files, or table with a column ``path`` or ``audio`` of paths,
            absolute or relative to the table. Recordings are split into the model's windows.
        out: Folder of the head.
        options: Settings.
        limit: Maximum number of recordings; ``None``: all.
        device: Device of the training.
        dtype: Dtype in which the model transcribes, see `mmdecode.checkpoints.dtype_of`; the head
            is trained in float32.
        language: Language of the recordings; used only if the checkpoint is multilingual.
        overwrite: Whether to replace a head that is trained.

    Returns:
        The report, also written to ``out/report.json``.

    Raises:
        InputError: No recording can be read.
        OptionError: The folder holds a trained head, and ``overwrite`` is not set.
        UnsupportedModelError: The model is no recogniser that the engine has an adapter for.
    """
    from mmdecode.asr.output.inputs import recordings_in
    from mmdecode.asr.output.manifest import opened
    from mmdecode.asr.transcriber import load

    refuse_foreign_in(out, but=["README.md"])
    refuse_finished(out, overwrite)
    entries = recordings_in(manifest, limit)
    model, processor = load(model_name, device, dtype)
    refuse_learning(model)
    recognizer = recognizers_of(model.eval(), processor, language)[0]  # without timestamps
    began, state = time.time(), out / STATE
    spoken_in = recognizer.language_of(opened(entries[0], language))
    samples = stored(
        state,
        Sample,
        read_windows(recognizer, entries, language),
        lambda part: collect(recognizer, part, spoken_in),
        (model_name, str(model.dtype), language),
    )
    head, report = train_head(model, recognizer.tokenizer, samples, options, state / "head.pt")
    write_folder(out, head.save_pretrained)
    report |= {"model": model_name, "seconds": round(time.time() - began, 1)}
    write_file(out / "report.json", marked_json(report))
    forget(state)
    return report
