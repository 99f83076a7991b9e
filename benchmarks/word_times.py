"""Errors of word timestamps on joined single words, whose times are known.

    python benchmarks/word_times.py                    the shipped test set
    python benchmarks/word_times.py --speak 120        more of its kind; needs espeak-ng

The words are given, not recognised: zoo:whisper-synth, trained on whole sentences only, does not
recognise joined words, and alignment is what is measured. Prints one JSON object.
"""

import argparse
import json

import numpy as np
import torch
from transformers import LogitsProcessorList

from mmdecode.asr.alignment.cross_attention import Spoken, Timer
from mmdecode.asr.alignment.words import timed_words
from mmdecode.asr.transcriber import load
from mmdecode.errors import run_script
from mmdecode.train.drafters.transcripts import whisper_prompt
from mmdecode.zoo.joined_words import RATE, Joined, draw_joined_words, joined_words


@torch.no_grad()
def measure(model, processor, method: str, data: list[Joined]) -> dict:
    """Errors in seconds over all words."""
    ids = processor.tokenizer.convert_tokens_to_ids
    frame_s = processor.feature_extractor.chunk_length / model.config.max_source_positions
    stamps = model.generation_config.no_timestamps_token_id + 1
    timer = Timer(model, processor.tokenizer, method, stamps=stamps, frame_s=frame_s, rate=RATE)
    prompt = whisper_prompt(model, 1, 0)[0].tolist()
    assert prompt[-1] == ids("<|notimestamps|>")
    errors, monotone, words = [], True, 0
    for joined in data:
        features = processor.feature_extractor(
            joined.wave, sampling_rate=RATE, return_tensors="pt"
        ).input_features
        audio = model.get_encoder()(features).last_hidden_state
        tokens = processor.tokenizer.encode(" " + joined.text, add_special_tokens=False)
        duration_s = len(joined.wave) / RATE
        window = Spoken(
            prompt=prompt,
            tokens=tokens,
            rules=LogitsProcessorList(),
            offset_s=0.0,
            frames=int(np.ceil(duration_s / frame_s)),
            features=features[0],
            samples=joined.wave,
        )
        timed = timer([window], audio)
        [found] = timed_words(timed, processor.tokenizer, "en", lambda *span: span, duration_s)
        assert len(found) == len(joined.times), "every word is timed"
        words += len(found)
        edges = [edge for word in found for edge in (word.start_s, word.end_s)]
        monotone &= edges == sorted(edges) and edges[-1] <= duration_s + 1e-6
        errors += [
            (word.start_s - start, word.end_s - end)
            for word, (start, end) in zip(found, joined.times, strict=True)
        ]
    missed = np.abs(np.array(errors)).T
    return {
        "words": words,
        "median_start_s": round(float(np.median(missed[0])), 4),
        "median_end_s": round(float(np.median(missed[1])), 4),
        "p90_s": round(float(np.quantile(missed, 0.9)), 4),
        "monotone_and_inside": bool(monotone),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="zoo:whisper-synth")
    parser.add_argument("--methods", nargs="+", default=["ctc", "attention"])
    parser.add_argument("--speak", type=int, default=0, help="sentences to speak with espeak-ng")
    arguments = parser.parse_args()
    model, processor = load(arguments.model, "cpu", None)
    seconds = processor.feature_extractor.chunk_length
    if arguments.speak:
        data = draw_joined_words(arguments.speak, 5, "test", seconds)
    else:
        data = joined_words()
    results = {m: measure(model, processor, m, data) for m in arguments.methods}
    print(json.dumps({"model": arguments.model, "sentences": len(data)} | results, indent=1))


if __name__ == "__main__":
    run_script(main)
