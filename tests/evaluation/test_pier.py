"""PIER: the reference's own counts, the card's oracles, tags that outlive a normaliser."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.speech import pier as measured
from mmdecode.evaluation.speech.normalisers import normaliser_of
from mmdecode.evaluation.speech.pier import pier, points_of, untagged
from mmdecode.evaluation.speech.wer import wer
from tests.support.commands import invoke, json_of

CASES = json.loads(
    (Path(__file__).parents[1] / "data" / "golden" / "pier" / "cases.json").read_text()
)["cases"]
SKIPPED_THERE = ("only_poi_sentence_skipped", "no_poi_sentence_skipped")
MEANINGLESS_THERE = ("readme_mandarin_unsegmented",)
OPTIONS = {"normaliser": "none", "resamples": 20}


def listed(value):
    return value if isinstance(value, list) else [value]


def scored(case):
    options = case["options"]
    return pier(
        listed(case["reference"]),
        listed(case["hypothesis"]),
        points="latin" if "scd_language" in options else "tags",
        split_hyphens=options.get("split_hyphen", False),
        **OPTIONS,
    )


def counts(part):
    return [part.hits, part.substitutions, part.deletions, part.insertions]


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c["name"] not in (*SKIPPED_THERE, *MEANINGLESS_THERE)],
    ids=lambda case: case["name"],
)
def test_counts_are_those_of_the_reference(case):
    found = scored(case)
    for part, name in ((found.interest, "poi"), (found.rest, "rest")):
        stored = case["result"][name]
        names = ("hits", "substitutions", "deletions", "insertions")
        errors = [stored[n] for n in names[1:]]
        if case["name"] == "hyphen_kept" and name == "poi":  # two alignments are minimal
            low, high = case["own_recompute_poi_edit_range_over_optimal_alignments"]
            assert low <= part.errors <= high
            continue
        if case["name"] != "hyphen_kept":
            assert counts(part) == [stored["hits"], *errors]
            assert 100 * part.value == pytest.approx(stored["PIER"], rel=1e-9)


@pytest.mark.parametrize("name", SKIPPED_THERE)
def test_sentences_of_points_only_or_without_any_count(name):
    (case,) = [case for case in CASES if case["name"] == name]
    found, stored = scored(case), case["result"]
    there = stored["poi"]["poiWords"] + stored["rest"]["otherWords"]
    assert found.interest.words + found.rest.words > there
    words = sum(len(untagged(text).split()) for text in listed(case["reference"]))
    assert found.interest.words + found.rest.words == words


def test_unsegmented_text_is_cut_into_characters_on_both_sides():
    (case,) = [case for case in CASES if case["name"] in MEANINGLESS_THERE]
    apart = [" ".join(measured.units(text)) for text in (case["reference"], case["hypothesis"])]
    found = scored(case)
    assert found == scored(case | {"reference": apart[0], "hypothesis": apart[1]})
    assert (found.interest.words, found.rest.words) == (2, 17)


REFERENCE, HYPOTHESIS = "私は <tag 東京> に 行きます", "私は 京都 に 行き ます"


def test_words_of_segmented_text_stay_whole():
    found = pier([REFERENCE], [HYPOTHESIS], segmented=True, **OPTIONS)
    assert (found.interest.words, found.interest.substitutions) == (1, 1)
    assert (found.rest.words, found.rest.hits, found.rest.errors) == (3, 2, 2)
    whole = wer([untagged(REFERENCE)], [HYPOTHESIS], segmented=True, **OPTIONS)
    assert (whole.words, whole.errors) == (4, found.interest.errors + found.rest.errors)
    assert whole.characters == len("私は東京に行きます")
    cut = pier([REFERENCE], [HYPOTHESIS], **OPTIONS)
    assert (cut.interest.words, cut.rest.words, cut.rest.errors) == (2, 7, 0)


def test_points_of_a_script_are_whole_words_of_segmented_text():
    reference, hypothesis = "これ は 大学pc です", "これ は 大学 です"
    found = pier([reference], [hypothesis], points="latin", segmented=True, **OPTIONS)
    assert (found.interest.words, found.interest.errors, found.rest.errors) == (1, 1, 0)
    assert pier([reference], [hypothesis], points="latin", **OPTIONS).rest.words == 7
    both = pier(["我 用 laptop"], ["我 用 lap top"], points="latin", segmented=True, **OPTIONS)
    assert both.interest.words == 1 and both == pier(
        ["我 用 laptop"], ["我 用 lap top"], points="latin", **OPTIONS
    )


WORDS = st.lists(st.sampled_from("a b c d e".split()), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    reference=WORDS,
    hypothesis=st.lists(st.sampled_from("a b c x".split()), max_size=6),
    data=st.data(),
)
def test_points_and_rest_add_up_to_all_errors(reference, hypothesis, data):
    flags = data.draw(st.lists(st.booleans(), min_size=len(reference), max_size=len(reference)))
    text = " ".join(f"<tag {w}>" if f else w for w, f in zip(reference, flags, strict=True))
    found = pier([text], [" ".join(hypothesis)], **OPTIONS)
    whole = wer([" ".join(reference)], [" ".join(hypothesis)], **OPTIONS)
    assert found.interest.errors + found.rest.errors == whole.errors
    assert found.interest.words == sum(flags)
    everything = pier([f"<tag {' '.join(reference)}>"], [" ".join(hypothesis)], **OPTIONS)
    assert everything.value == whole.value
    assert counts(everything.rest) == [0, 0, 0, 0]


def test_oracles_of_the_card():
    text = "one <tag two three> four <tag five>"
    plain = untagged(text)
    assert pier([text], [plain], **OPTIONS).value == 0
    assert pier([text], [plain.replace("two ", "")], **OPTIONS).value == 1 / 3
    outside = pier([text], ["won two three for five"], **OPTIONS)
    assert (outside.value, outside.rest.errors) == (0, 2)


@pytest.mark.parametrize(
    ("reference", "hypothesis", "interest", "rest"),
    [
        ("a <tag b> c", "a x b c", 1, 0),
        ("a <tag b> c", "a b x c", 0, 1),
        ("a <tag b>", "a b x y", 2, 0),
        ("<tag a> b", "a b x", 0, 1),
        ("", "x y", 0, 2),
    ],
)
def test_an_insertion_belongs_to_the_word_that_follows(reference, hypothesis, interest, rest):
    found = pier([reference], [hypothesis], **OPTIONS)
    assert (found.interest.insertions, found.rest.insertions) == (interest, rest)


def test_tags_keep_to_their_words_where_a_normaliser_drops_and_joins_words():
    text = "Um, we've got <tag twenty five> colours in the <tag Meeting>, uh, today."
    reference, marked = points_of(text, "tags", normaliser_of("whisper"))
    assert " ".join(reference) == "we have got 25 colors in the meeting today"
    assert [w for w, m in zip(reference, marked, strict=True) if m] == ["25", "meeting"]
    # by places in the raw text, as in the reference, other words would be marked
    raw = untagged(text).split()
    assert raw.index("Meeting,") != reference.index("meeting")


def test_part_of_an_unsegmented_text_can_be_tagged():
    reference, marked = points_of("我们<tag 会议>结束", "tags", str.strip)
    assert "".join(w for w, m in zip(reference, marked, strict=True) if m) == "会议"


def test_merged_words_are_those_of_the_error_rate():
    found = pier(["<tag white paper> is here"], ["whitepaper is here"], scorer="merge", **OPTIONS)
    assert counts(found.interest) == [2, 0, 0, 0]


def test_the_interval_draws_groups():
    reference, hypothesis = ["<tag a> b"] * 6, ["a b", "x b"] * 3
    apart = pier(reference, hypothesis, **OPTIONS)
    together = pier(reference, hypothesis, groups=["g"] * 6, **OPTIONS)
    assert apart.low < 0.5 < apart.high
    assert together.low == together.high == 0.5


def test_a_corpus_without_points_has_no_rate():
    found = pier(["a b"], ["a c"], **OPTIONS)
    assert (found.value, found.low, found.rest.value) == (None, None, 0.5)


@pytest.mark.parametrize(
    ("reference", "options", "error", "says"),
    [
        ("a <tag b", {}, InputError, "not closed"),
        ("a <tag b <tag c>>", {}, InputError, "contains another"),
        ("a", {"points": "latn"}, UnknownNameError, "did you mean 'latin'"),
        ("a", {"scorer": "sclite"}, OptionError, "sclite"),
    ],
)
def test_what_cannot_be_scored_is_refused(reference, options, error, says):
    with pytest.raises(error, match=says):
        pier([reference], ["a"], **options)


def test_sides_of_unlike_length_are_refused():
    with pytest.raises(OptionError, match="2 references and 1 hypotheses"):
        pier(["a", "b"], ["a"])


def test_the_command_keeps_a_given_segmentation(tmp_path):
    rows = {"audio_filepath": "a.wav", "duration": 1.0, "time": 0.1, "text": REFERENCE}
    results = tmp_path / "MODEL_m_DATASET_d.jsonl"
    results.write_text(json.dumps(rows | {"pred_text": HYPOTHESIS}) + "\n")
    command = ["evaluate", "wer", "--hypotheses", str(results), "--normalizer", "none", "--json"]
    kept, cut = (json_of(invoke(*command, *more)) for more in (["--segmented"], []))
    (mode,) = kept["modes"].values()
    assert (mode["words"], mode["pier"]["interest"]["substitutions"]) == (4, 1)
    assert kept["segmented"] and kept["by_characters"] == 0
    assert cut["by_characters"] == 1 and next(iter(cut["modes"].values()))["words"] == 9
