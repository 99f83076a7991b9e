"""Scores of texts by a recogniser: against their definition by full passes, and in the engine."""

import math
import random
import string
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

from mmdecode import Decoder, generate
from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.correction.calibration import (
    COLDEST,
    HOTTEST,
    calibrate,
    confidence,
    fit_temperature,
)
from mmdecode.asr.correction.corrector import Corrector
from mmdecode.asr.correction.fusion import Acoustic, AcousticScorer, pieces_of, shared_ids
from mmdecode.asr.correction.listener import Listener
from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.correction.spelling import Spelling, casings, spellings, split
from mmdecode.asr.recognizers.moonshine import MoonshineRecognizer as Recognizer
from mmdecode.asr.transcriber import load
from mmdecode.checkpoints import local_path
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.source import Source
from mmdecode.errors import OptionError
from mmdecode.guide.fusion import Given, SecondModel, Shallow, Static
from mmdecode.guide.uadf import UADF
from mmdecode.train.zoo.lm_synth import TEMPLATE, LMSynthOptions, build_tokenizer
from mmdecode.zoo import grammar
from mmdecode.zoo.real_clips import real_clips
from mmdecode.zoo.speech import speech_test
from tests.support import tiny_models, tiny_recognizers
from tests.support.moonshine import NAME, needs_wheel

OPTIONS = LMSynthOptions(vocabulary=400)


@pytest.fixture(scope="module")
def zoo():
    return load("zoo:whisper-synth", "cpu", None)


@pytest.fixture(scope="module")
def recogniser(zoo):
    model, processor = zoo
    ids = processor.tokenizer.convert_tokens_to_ids
    names = "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>".split()
    return Acoustic(model=model, tokenizer=processor.tokenizer, prompt=tuple(ids(names)))


@pytest.fixture(scope="module")
def clips():
    return [clip for clip in speech_test() if clip.duration_s < 8][:3]


@pytest.fixture(scope="module")
def features(zoo, clips):
    waves = [clip.samples("noisy") for clip in clips]
    return zoo[1].feature_extractor(waves, sampling_rate=16_000, return_tensors="pt").input_features


@pytest.fixture(scope="module")
def language():
    """An untrained language model that prefers a different text everywhere, and its tokenizer."""
    tokenizer = build_tokenizer(OPTIONS)
    model = tiny_models.llama(
        seed=3,
        vocab_size=len(tokenizer),
        intermediate_size=32,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model, tokenizer


# The definition, by full passes


class Definition:
    """Scores of one recording by a full pass for every prefix."""

    def __init__(self, recogniser, features):
        self.model, self.spelling = recogniser.model, recogniser.spelling
        self.prompt = list(recogniser.prompt)
        self.encode = recogniser.tokenizer
        self.names = {
            name: token
            for name, token in recogniser.tokenizer.get_vocab().items()
            if token < self.spelling.end and token not in recogniser.tokenizer.all_special_ids
        }
        with torch.no_grad():
            self.states = self.model.get_encoder()(features[None]).last_hidden_state
        self.distributions = {}

    def distribution(self, prefix):
        if tuple(prefix) not in self.distributions:
            with torch.no_grad():
                logits = self.model(
                    encoder_outputs=BaseModelOutput(last_hidden_state=self.states),
                    decoder_input_ids=torch.tensor([self.prompt + list(prefix)]),
                ).logits[0, -1]
            self.distributions[tuple(prefix)] = logits.double().log_softmax(-1)
        return self.distributions[tuple(prefix)]

    def ids(self, word):
        return self.encode(" " + word, add_special_tokens=False).input_ids

    def along(self, before, ids):
        return sum(float(self.distribution([*before, *ids[:i]])[t]) for i, t in enumerate(ids))

    def begins(self, prefix, piece):
        ids = [token for name, token in self.names.items() if name.startswith(piece)]
        return float(self.distribution(prefix)[ids].logsumexp(0)) if ids else -math.inf

    def finished(self, before, word, ended):
        end = self.spelling.end
        found = []
        for way in spellings(word):
            ids = self.ids(way)
            own, full = self.along(before, ids), [*before, *ids]
            after = float(self.distribution(full)[end]) if ended else self.begins(full, "Ġ")
            found.append((own + after, own + after if ended else own, full))
        return max(found, key=lambda one: one[0])[1:]

    def score(self, text, ended=False):
        words, pending = split(text)
        if ended and pending:
            words, pending = (*words, pending), ""
        before, value = [], 0.0
        for index, word in enumerate(words):
            own, before = self.finished(before, word, ended and index == len(words) - 1)
            value += own
        if ended:
            return value if words else float(self.distribution([])[self.spelling.end])
        if not pending:
            return value + self.begins(before, "Ġ")
        ways = []
        for way in casings(pending):
            ids = self.ids(way)
            names = self.encode.convert_ids_to_tokens(ids)
            parts = [
                self.along(before, ids[:i]) + self.begins([*before, *ids[:i]], "".join(names[i:]))
                for i in range(len(ids))
            ]
            ways.append(float(torch.tensor(parts, dtype=torch.float64).logsumexp(0)))
        return value + max(ways)


@pytest.fixture(scope="module")
def definitions(recogniser, features):
    """Of each row; what one test has computed the next need not."""
    return [Definition(recogniser, one) for one in features]


def test_the_space_after_a_word_decides_how_it_is_written(recogniser):
    spelling = recogniser.spelling
    [upper], [lower] = (spelling.ids(word) for word in ("The", "the"))
    spaced = (token for token, name in spelling.name.items() if name.startswith(spelling.space))
    other = next(token for token in spaced if token not in (upper, lower))
    size = spelling.end + 1

    def distribution(*values):
        made = np.full(size, np.log(1e-9))
        for token, value in values:
            made[token] = np.log(value)
        return made

    after = {(upper,): distribution((other, 0.01)), (lower,): distribution((other, 0.9))}
    listener = Listener(spelling, distribution((upper, 0.6), (lower, 0.3)))
    while (found := listener.score("The ")) is None:
        block = listener.block()
        distributions = [after.get(prefix, distribution()) for prefix in block.prefixes]
        listener.hear(block, dict(enumerate(distributions)))
    # more likely by itself, "The" is hardly a word of its own there
    assert found == pytest.approx(math.log(0.3 * 0.9), abs=1e-3)


class Fixed:
    """A scorer at work on texts alone, as the engine would run it."""

    def __init__(self, recogniser, features):
        rows = len(features)
        from tests.support.target_logits import context

        audio_inputs = [Given(one, recogniser.prompt) for one in features]
        call = context(rows, inputs={"audio": audio_inputs})
        call.rows.ids[:, 2:] = 0
        self.scorer = AcousticScorer(
            call,
            recogniser.model,
            recogniser.spelling,
            recogniser.prompt,
            None,
            [],
            4,
        )
        self.scorer._answer = lambda *arguments: self.scorer.choices.see(
            torch.zeros(rows, 1), [[frozenset()]] * rows
        )
        with torch.no_grad():
            self.scorer.prefill(call, {})
        self.passes = 0
        read = self.scorer._read

        def counted():
            self.passes += 1
            read()

        self.scorer._read = counted

    @torch.no_grad()
    def __call__(self, asked):
        return self.scorer.weigh(asked)


def texts_of(reference, rng):
    """Texts around what was said: beginnings, other words, other casings and marks."""
    words = reference.split()
    found = [("", False), ("", True), (" ", False), ("  ", True)]
    for _ in range(6):
        count = rng.randint(1, 4)
        some = words[:count]
        if rng.random() < 0.5:
            some[rng.randrange(count)] = rng.choice(sorted(grammar.vocabulary()))
        text = " ".join(some)
        if rng.random() < 0.3:
            text = rng.choice([text.lower(), text.upper(), text.rstrip(".") + ","])
        text = text[: rng.randint(1, len(text))] if rng.random() < 0.4 else text
        found.append((text + " " * rng.randint(0, 1), rng.random() < 0.3))
    return found


def test_scores_are_their_definition(recogniser, features, clips, definitions):
    rng = random.Random(1)
    asked = [texts_of(clip.text, rng) for clip in clips[:2]]
    found = Fixed(recogniser, features[:2])(asked)
    for row, texts in enumerate(asked):
        definition = definitions[row]
        expected = [definition.score(*one) for one in texts]
        assert found[row] == pytest.approx(expected, abs=2e-3), texts
        assert len({round(value, 3) for value in expected}) > 6


def test_scores_do_not_depend_on_what_was_asked_and_cached_before(recogniser, features, clips):
    words = clips[0].text.split()
    last = (" ".join(words), True)
    whole = Fixed(recogniser, features[:1])([[last]])[0]
    steps = Fixed(recogniser, features)
    for count in range(1, len(words)):
        text = " ".join(words[:count])
        steps([[(f"{text} {other}", False) for other in ("the", words[count][:2])], [], [None]])
        steps.scorer.listeners[0].commit(f"{text} {words[count][:1]}")  # a word may be begun
    found = steps([[last], [("The", False)], []])
    assert found[0] == pytest.approx(whole, abs=2e-3)
    assert int(steps.scorer.branches.cache.start[0]) > len(words) - 2  # the prefix was cached
    assert int(steps.scorer.branches.cache.start[1]) == len(recogniser.prompt)


def test_a_candidate_stands_for_the_text_with_it_and_the_end_for_the_text(recogniser, features):
    scorer = Fixed(recogniser, features[:1]).scorer
    scorer.eos_token_ids, scorer.pieces = frozenset([0]), [" the end", " dog", None]
    assert scorer._asked("a red", 1) == ("a red dog", False)
    assert scorer._asked("a red", 0) == ("a red", True)
    # special tokens, the padding of the vocabulary, unused rows and parts of a character
    assert scorer._asked("a red", 2) is scorer._asked("a red", 9) is None
    assert scorer._asked(None, 1) is scorer._asked("a \ufffd", 1) is None


def test_a_fork_goes_on_by_itself(recogniser, features, clips):
    words = clips[1].text.split()
    one = Fixed(recogniser, features[1:2])
    one([[(" ".join(words[:3]), False)]])
    one.scorer.listeners[0].commit(" ".join(words[:3]))
    one.scorer.select_rows(torch.tensor([0, 0]))
    texts = [(" ".join(words), False), (" ".join([*words[:3], "and"]), False)]
    found = one([[texts[0]], [texts[1]]])
    alone = Fixed(recogniser, features[1:2])([texts])[0]
    assert [row[0] for row in found] == pytest.approx(alone, abs=2e-3)


def test_what_is_written_as_the_recogniser_writes_takes_one_pass(recogniser, features, zoo):
    """The text that it would write itself: whatever is asked of it is read in one tree."""
    model, processor = zoo
    with torch.no_grad():
        ids = model.generate(
            features[:1], language="en", task="transcribe", return_timestamps=False, num_beams=1
        )
    text = processor.decode(ids[0], skip_special_tokens=True).strip()
    one = Fixed(recogniser, features[:1])
    value = one([[(text, True)]])[0][0]
    assert one.passes == 1
    other = Fixed(recogniser, features[:1])
    changed = other([[(text.lower(), True)]])[0][0]
    assert changed == pytest.approx(value, abs=2e-3)  # the most likely casing is its own
    assert other.passes > 1


def test_a_token_that_covers_more_than_the_last_piece_counts(recogniser, features):
    spelling = recogniser.spelling
    names = sorted(spelling.name.values(), key=len)
    whole = next(n for n in reversed(names) if n[0] == "Ġ" and n[1:].isascii() and n[1:].isalpha())
    begun = next(
        whole[1:end]
        for end in range(2, len(whole))
        if len(spelling.ids(whole[1:end])) > 1  # cut where the recogniser has no token
    )
    distribution = torch.full((len(recogniser.tokenizer),), -30.0)
    distribution[spelling.ids(whole[1:])[0]] = 0.0
    listener = Listener(spelling, distribution.log_softmax(-1).numpy())
    while listener.score(begun) is None:
        block = listener.block()
        listener.hear(
            block, {p: distribution.log_softmax(-1).numpy() for p in listener.unread(block)}
        )
    assert listener.score(begun) == pytest.approx(0.0, abs=1e-3)


# How words are written


def test_words_are_written_one_by_one(recogniser):
    for text in grammar.sentences(60, 5, "test"):
        whole = recogniser.tokenizer(f" {text}", add_special_tokens=False).input_ids
        parts = [token for word in text.split() for token in recogniser.spelling.ids(word)]
        assert whole == parts


def test_tokens_that_begin_with_a_piece_are_all_found(recogniser):
    spelling = recogniser.spelling
    rng = random.Random(0)
    names = rng.sample(sorted(spelling.name.values()), 60)
    for piece in [*(name[: rng.randint(1, len(name))] for name in names), "Ġ", "Ġqqq"]:
        expected = {token for token, name in spelling.name.items() if name.startswith(piece)}
        assert set(spelling.beginning(piece).tolist()) == expected
    assert max(spelling.name) < spelling.end


def test_spellings_and_words():
    assert casings("the") == ["the", "The", "THE"]
    ways = spellings("Mon,")
    assert ways[0] == "Mon," and {"mon.", "MON", "Mon?"} <= {*ways} and len(ways) == len({*ways})
    assert spellings("...") == ["..."]
    assert split("") == ((), "") and split(" \n") == ((), "")
    assert split("a b") == (("a",), "b") and split("a b ") == (("a", "b"), "")


def test_a_word_that_looks_like_a_special_token_is_none(recogniser, features):
    found = Fixed(recogniser, features[:1])([[("the <|en|>", False), ("<|en|> a", True)]])
    assert all(value < 0 for value in found[0])


def test_pieces_are_what_tokens_add(language):
    tokenizer = language[1]
    pieces = pieces_of(tokenizer, len(tokenizer) + 3)
    assert len(pieces) == len(tokenizer)
    for token in tokenizer.all_special_ids:
        assert pieces[token] is None
    text = "The cat sat on Monday."
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert "".join(pieces[token] for token in ids).strip() == text
    byte_level = AutoTokenizer.from_pretrained(local_path("zoo:whisper-synth"))
    found = pieces_of(byte_level, 300)
    assert found[byte_level.convert_tokens_to_ids("Ġ")] == " "
    half = byte_level.convert_tokens_to_ids("Ã")  # of a letter of two bytes
    assert found[half] is None


# In the engine


def given(recogniser, features):
    return [Given(features=one, prompt=recogniser.prompt) for one in features]


def prompts(rows):
    return ["Anna was", "the", "Peter put the"][:rows]


def fused(language, recogniser, features, kind=UADF, draft=None, rows=(0, 1, 2), route="text"):
    model, tokenizer = language
    spec = recogniser.branch(tokenizer, len(tokenizer), 6, route)
    rows = list(rows)
    texts = [prompts(3)[row] for row in rows]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    decoder = Decoder(draft, kind(spec))
    out = generate(
        model,
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        mm_inputs={"audio": given(recogniser, features[rows])},
        decoder=decoder,
        max_new_tokens=14,
        do_sample=False,
    )
    return out[:, inputs.input_ids.shape[1] :].tolist(), decoder


@torch.no_grad()
def by_definition(language, recogniser, definition, row, kind, count):
    """Greedy fusion by full passes of both models for every token."""
    model, tokenizer = language
    pieces = pieces_of(tokenizer, len(tokenizer))
    ids = tokenizer(prompts(3)[row]).input_ids
    new = []
    while len(new) < count and new[-1:] != [tokenizer.eos_token_id]:
        logits = model(torch.tensor([ids + new])).logits[0, -1]
        best = logits.topk(6).indices.tolist()
        text = tokenizer.decode(new, skip_special_tokens=True)
        distribution = logits.log_softmax(-1)
        scores = {}
        for token in best:
            if token == tokenizer.eos_token_id:
                scores[token] = definition.score(text, True)
            elif pieces[token] is not None:
                scores[token] = definition.score(text + pieces[token])
        acoustic = torch.full_like(distribution, -torch.inf)
        if scores:
            own = torch.tensor([*scores.values()]).log_softmax(-1)
            acoustic[[*scores]] = own.to(acoustic)
        guide = kind(recogniser.branch(tokenizer, len(tokenizer), 6, "text"))
        new.append(
            int(guide.fuse(distribution[None], acoustic[None])[0].argmax()) if scores else best[0]
        )
    return new


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [UADF, Static, Shallow])
def test_decoding_follows_the_definition(language, recogniser, features, definitions, kind):
    found, _ = fused(language, recogniser, features, kind)
    for row in range(2):
        expected = by_definition(language, recogniser, definitions[row], row, kind, count=6)
        assert found[row][: len(expected)] == expected
    plain, _ = fused(language, recogniser, features, lambda spec: UADF(spec, beta=1.0))
    assert found != plain


def test_drafts_and_batches_change_no_token(language, recogniser, features):
    plain, _ = fused(language, recogniser, features)
    accepted = 0
    for draft in (
        PromptLookup(ngram=1),
        Source(ids=[[*row[:5], 3, *row[5:]] for row in plain], length=8),
    ):
        found, decoder = fused(language, recogniser, features, draft=draft)
        assert found == plain
        accepted = max(accepted, decoder.stats.accepted)
    assert accepted > 8
    for row in range(3):
        alone, _ = fused(language, recogniser, features, rows=[row])
        assert alone[0] == plain[row][: len(alone[0])]


def test_what_each_would_have_chosen_is_kept_with_every_token(language, recogniser, features):
    model, tokenizer = language
    found = []
    for draft in (None, Source(ids=[[5, 6, 7]], length=4)):
        spec = recogniser.branch(tokenizer, len(tokenizer), 6, "text")
        built = []
        inner = spec.build

        def build(call, inner=inner, built=built):
            built.append(inner(call))
            return built[0]

        from dataclasses import replace

        inputs = tokenizer(prompts(3), return_tensors="pt", padding=True)
        rows = generate(
            model,
            **inputs,
            mm_inputs={"audio": given(recogniser, features)},
            decoder=Decoder(draft, UADF(replace(spec, build=build))),
            max_new_tokens=10,
        )[:, inputs.input_ids.shape[1] :].tolist()
        choices = built[0].choices
        for row in range(3):
            tokens = choices.tokens(row)
            assert rows[row][: len(tokens)] == tokens and len(choices.kept[row]) == len(tokens)
        found.append(choices.kept)
    assert found[0] == found[1]


def test_ids_are_carried_over_where_both_write_the_same_tokens(recogniser, features, tmp_path):
    acoustic = recogniser.tokenizer
    end = recogniser.spelling.end
    ids = shared_ids(acoustic, Spelling(acoustic, end), len(acoustic))
    text = list(recogniser.spelling.name)
    assert ids[text].tolist() == text and ids[acoustic.eos_token_id] == end
    assert (ids[end + 1 :] == -1).all()
    own = build_tokenizer(OPTIONS)
    assert shared_ids(own, Spelling(acoustic, end), len(own)) is None
    spec = recogniser.branch(acoustic, len(acoustic))
    assert spec.build.func is SecondModel
    assert recogniser.branch(own, len(own)).build.func is AcousticScorer
    assert recogniser.branch(acoustic, len(acoustic), route="text").build.func is AcousticScorer
    with pytest.raises(OptionError, match="route='ids'"):
        recogniser.branch(own, len(own), route="ids")
    with pytest.raises(OptionError, match="auto, text or ids"):
        recogniser.branch(own, len(own), route="txt")
    with pytest.raises(OptionError, match="candidates=1"):
        recogniser.branch(own, len(own), 1)


# Temperatures


def test_temperatures_are_recovered_from_sampled_labels():
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(20_000, 12, generator=generator)
    for wanted in (0.3, 1.0, 2.5):
        distribution = (scores / wanted).softmax(-1)
        labels = torch.multinomial(distribution, 1, generator=generator)[:, 0]
        assert fit_temperature(scores, labels) == pytest.approx(wanted, rel=0.05)
    assert fit_temperature(scores, scores.argmax(-1)) == COLDEST
    assert fit_temperature(scores, torch.full((20_000,), -1)) == HOTTEST
    values = [confidence(scores, heat) for heat in (0.1, 0.5, 1.0, 4.0, 10.0)]
    assert values == sorted(values, reverse=True)


def test_both_models_are_calibrated_on_the_reference(language, recogniser, features, clips):
    model, tokenizer = language
    corrector = Corrector(model, tokenizer, template=TEMPLATE, count=2)
    guide = UADF(recogniser.branch(tokenizer, len(tokenizer), 6))
    corrector.decoder = replace(corrector.decoder, guide=guide)
    lists = [
        NBestList(clip.name, (clip.text, clip.text.lower()), reference=clip.text) for clip in clips
    ]
    audio = given(recogniser, features)
    found = calibrate(corrector, lists, audio)
    answers = [corrector.prompts.answer(one.reference) for one in lists]
    assert found.tokens == sum(map(len, answers))
    assert COLDEST <= found.acoustic <= HOTTEST
    # the language model's own, by one full pass for each text
    distributions, labels = [], []
    with torch.no_grad():
        for one, answer in zip(lists, answers, strict=True):
            prompt = corrector.prompts.prompt(one.hypotheses)
            logits = model(torch.tensor([prompt + answer])).logits[0]
            distributions.append(logits[len(prompt) - 1 : -1])
            labels += answer
    expected = fit_temperature(torch.cat(distributions), torch.tensor(labels))
    assert found.main == pytest.approx(expected, rel=1e-3)


def test_characters_of_other_scripts_do_not_break_a_score(recogniser, features):
    odd = ["\u4f60\u597d", "caf\u00e9", "\u00df", string.punctuation, "a" * 60]
    found = Fixed(recogniser, features[:1])([[(text, ended) for text in odd for ended in (0, 1)]])
    assert all(not math.isnan(value) for value in found[0])


@pytest.fixture(scope="module")
def published():
    return load(NAME, "cpu", None)


@pytest.mark.slow
@needs_wheel
def test_a_recogniser_that_marks_spaces_otherwise_scores_texts_by_their_tokens(published):
    model, processor = published
    hears = Recognizer(model, processor, TranscribeOptions())
    clips = real_clips()[:2]
    inputs = hears.features([clip.samples() for clip in clips])
    acoustic = Acoustic(model=model, tokenizer=processor.tokenizer, prompt=(1,))
    texts = [Transcriber(model, processor)(clip.samples()).text for clip in clips]
    asked = [[(text, True), (text.replace("a", "o", 1), True)] for text in texts]
    found = Fixed(acoustic, inputs)(asked)  # of unequal length: states are padded
    assert len({one["input_values"].shape for one in inputs}) == 2
    for (right, wrong), text, one in zip(found, texts, inputs, strict=True):
        assert right > wrong + 1
        alone = Fixed(acoustic, [one])([[(text, True), (text.split()[0], False)]])
        assert alone[0][0] == pytest.approx(right, abs=2e-3)
        with torch.no_grad():
            first = model(**one, decoder_input_ids=torch.tensor([[1]])).logits[0, 0].softmax(-1)
        ways = [processor.tokenizer.convert_tokens_to_ids(f"\u2581{way}") for way in casings("And")]
        begins = [acoustic.spelling.beginning(f"\u2581{way}") for way in casings("And")]
        assert all(way in found for way, found in zip(ways[:2], begins, strict=False))
        assert alone[0][1] == pytest.approx(
            max(first[b].sum().log().item() for b in begins), abs=0.05
        )


def test_words_of_a_tokenizer_that_adds_a_space_by_itself_have_one(marking):
    spelling = Spelling(marking, 1)
    assert spelling.space == "\u2581"
    assert [spelling.name[token] for token in spelling.ids("w3")] == ["\u2581w3"]
    names = {spelling.name[int(token)] for token in spelling.beginning("\u2581w1")}
    assert names == {"\u2581w1", *(f"\u2581w1{digit}" for digit in range(10))}
    assert not {0, 1, 2, 3} & set(spelling.name), "special tokens are no text"


@pytest.fixture
def marking():
    return tiny_recognizers.tokenizer()
