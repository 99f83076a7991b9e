"""Whisper-CD: formula, gates and the waveforms of its branches."""

import math
from types import SimpleNamespace

import pytest
import torch

import mmdecode as mm
from mmdecode.adapters.audio.transforms import changed
from mmdecode.decoder import Decoder
from mmdecode.engine.call import Call, Plan
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.linear import Linear
from mmdecode.guide.whisper_cd import (
    WhisperCD,
    delayed,
    distance,
    first_text,
    joined,
    noised,
    scrambled,
    silent,
)
from tests.support.tiny import prompts, text_model, whisper_model

V, END, NO_TIMES = 12, 8, 10  # text, end, a special token, no times, one time
ADAPTER = SimpleNamespace(vocab=V, end=END, no_timestamps=NO_TIMES)
NAMES = ("main", "noised", "silent", "shifted")


def context(prompt=(9, 9), new=(), adapter=ADAPTER, rows=1):
    prompt, new = (torch.tensor([part], dtype=torch.long).repeat(rows, 1) for part in (prompt, new))
    return Call.of(prompt, generated=new, room=2, plan=Plan(adapter=adapter))


def logits(seed, rows=3):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(2, rows, V, generator=generator)


def outputs_of(*each):
    return {name: BranchOutput(logits=values) for name, values in zip(NAMES, each, strict=False)}


def distribution(guide, scores, call=None, proposal=None):
    constants = guide.begin(call or context(), {})
    return guide.apply(constants, call, proposal, scores)


def texts(values):
    return values[..., :END]


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_negatives_that_agree_with_the_clean_branch_leave_its_distribution(tau):
    same = logits(0)
    found = distribution(WhisperCD(2.0, tau, beta=0, gate=0), outputs_of(same, same, same, same))
    torch.testing.assert_close(found.log_softmax(-1), same.log_softmax(-1))
    assert torch.equal(found.argmax(-1), same.argmax(-1))
    torch.testing.assert_close(joined([same] * 3, tau), same.log_softmax(-1))


def test_a_sum_instead_of_the_mean_is_found():
    same = logits(0)
    by_sum = joined([same] * 3, 1.0) + math.log(3)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(by_sum, same.log_softmax(-1))


@pytest.mark.parametrize("name", ["snr", "silence", "shift"])
def test_one_negative_is_the_plain_contrast_of_two(name):
    given = {"snr": 5.0, "silence": True, "shift": 0.5}
    only = {"snr": None, "silence": False, "shift": None, name: given[name]}
    guide = WhisperCD(0.7, 1.0, beta=0, gate=0, **only)
    main, negative = logits(1), logits(2)
    (branch,) = guide.branches
    scores = {"main": BranchOutput(logits=main), branch.name: BranchOutput(logits=negative)}
    plain = Linear.contrast(branch, 0.7, 0).apply(None, None, None, scores)
    torch.testing.assert_close(
        texts(distribution(guide, scores)).log_softmax(-1), texts(plain).log_softmax(-1)
    )


def test_several_negatives_are_one_mixture_at_temperature_one():
    main, *negatives = (logits(seed) for seed in range(4))
    found = distribution(WhisperCD(1.0, 1.0, beta=0, gate=0), outputs_of(main, *negatives))
    mixture = torch.stack([one.softmax(-1) for one in negatives]).mean(0).log()
    expected = 2 * main.log_softmax(-1) - mixture
    torch.testing.assert_close(texts(found).log_softmax(-1), texts(expected).log_softmax(-1))


def test_the_lower_the_temperature_the_more_the_most_likely_decides():
    values = [logits(seed) for seed in range(3)]
    loudest = torch.stack([one.log_softmax(-1) for one in values]).amax(0)
    torch.testing.assert_close(joined(values, 0.001), loudest, atol=0.01, rtol=0)


def test_all_but_text_keeps_its_probability():
    main, *negatives = (logits(seed) for seed in range(4))
    found = distribution(WhisperCD(3.0, 1.0, beta=0.2, gate=0), outputs_of(main, *negatives))
    assert torch.equal(found[..., END:], main[..., END:])
    torch.testing.assert_close(found.softmax(-1)[..., END:], main.softmax(-1)[..., END:])
    assert not torch.allclose(texts(found).softmax(-1), texts(main).softmax(-1), atol=0.05)


def test_the_cut_keeps_what_is_likely_among_text():
    main, *negatives = (logits(seed) for seed in range(4))
    main[..., END] = 30  # the end is certain, and yet the most likely text stays
    found = distribution(WhisperCD(1.0, 1.0, beta=0.3, gate=0), outputs_of(main, *negatives))
    clean = texts(main).softmax(-1)
    kept = texts(found) > -torch.inf
    assert torch.equal(kept, clean >= 0.3 * clean.amax(-1, keepdim=True))
    assert kept.any(-1).all() and not kept.all()


def test_without_contrast_the_scores_are_the_models_own():
    main = logits(0)
    guide = WhisperCD(0.0, gate=0.5, beta=0)
    call = context(new=(1,))
    scores = outputs_of(main[:1, :1], main[:1, :1])
    scores["silent"] = scores["main"]
    found = distribution(guide, scores, call, Proposal.empty(1, call.device))
    assert torch.equal(found, main[:1, :1])
    assert [branch.name for branch in guide.branches] == ["silent"]
    assert WhisperCD(0, gate=0, beta=0).neutral
    assert WhisperCD(0, gate=0, beta=0).branches == []


def test_a_token_that_a_negative_rules_out_is_no_nan():
    main, negative = logits(0), logits(1)
    negative[..., 2] = -torch.inf
    main[..., 3] = -torch.inf
    guide = WhisperCD(1.0, beta=0, gate=0, snr=None, shift=None)
    found = distribution(
        guide, {"main": BranchOutput(logits=main), "silent": BranchOutput(logits=negative)}
    )
    assert not found.isnan().any()
    assert (found[..., 3] == -torch.inf).all()
    assert (texts(found).argmax(-1) == 2).all()


# The gate


def gated(main, silence, call, proposal=None, gate=0.1, noise=None, noise_weight=0.0):
    guide = WhisperCD(0.0, 1.0, 0, gate, noise_weight)
    scores = {"main": BranchOutput(logits=main), "silent": BranchOutput(logits=silence)}
    if noise is not None:
        scores["noised"] = BranchOutput(logits=noise)
    found = distribution(guide, scores, call, proposal or Proposal.empty(1, call.device))
    return [row.argmax().item() if (row == -torch.inf).any() else None for row in found[0]]


def test_a_window_that_sounds_like_silence_ends_where_text_would_begin():
    same = logits(0, rows=1)[:1]
    timed, untimed = (9, 9), (9, NO_TIMES)
    assert gated(same, same, context(timed, (11,))) == [END]
    assert gated(same, same, context(untimed)) == [END]
    assert gated(same, same, context(timed)) == [None], "a time comes first"
    assert gated(same, same, context(timed, (11, 3))) == [None], "there is text already"
    assert gated(same, logits(1, rows=1)[:1], context(timed, (11,))) == [None], "it differs"


def test_the_threshold_is_a_total_variation():
    first, second = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    assert distance(first, second).item() == pytest.approx(0.2)
    main = torch.full((1, 1, V), -30.0)
    main[..., :3], other = first, main.clone()
    other[..., :3] = second
    call = context((9, NO_TIMES))
    assert gated(main, other, call, gate=0.19) == [None]
    assert gated(main, other, call, gate=0.21) == [END]


def test_what_noise_changes_counts_against_the_evidence():
    main, other = torch.zeros(1, 1, V), torch.zeros(1, 1, V)
    main[..., 0], other[..., 1] = 30, 30  # as far apart as can be
    call = context((9, NO_TIMES))
    steady, shaken = {"noise": main}, {"noise": other}
    assert gated(main, other, call, gate=0.95, noise_weight=0.1, **steady) == [None]
    assert gated(main, other, call, gate=0.95, noise_weight=0.1, **shaken) == [END]
    assert gated(main, other, call, gate=0.85, noise_weight=0.1, **shaken) == [None]


def test_where_the_end_may_not_come_first_a_time_comes_before_it():
    guide = WhisperCD(0.0, beta=0, gate=0.1)
    call = context((9, NO_TIMES))
    ended = guide.begin(call, {}).ended
    assert ended.softmax(-1)[END] == 1
    suppressed = ended.clone()
    suppressed[END] = -torch.inf
    assert suppressed.argmax() == NO_TIMES + 1
    assert suppressed.softmax(-1)[NO_TIMES + 1] == 1


def test_each_node_is_gated_by_its_own_path():
    """Root a time; then text, a time with text below it, and an unused node."""
    tree = Tree((-1, -1, 1, -1))
    proposal = Proposal(tokens=torch.tensor([[3, 11, 4, -1]]), kind="deterministic", tree=tree)
    call = context((9, 9), (11,))
    constants = WhisperCD(0.0, gate=0.1).begin(call, {})
    assert first_text(constants, call, proposal).tolist() == [[True, False, True, False, True]]


# What the no-speech token says

START, NO_SPEECH = 9, NO_TIMES - 1
ASKED = SimpleNamespace(
    **vars(ADAPTER), start=START, no_speech=NO_SPEECH, head=lambda states: states
)


def unspoken(guide, **probability):
    """Of a row whose text so far stands before the start, by what each branch says there."""
    call = context((3, 4, START, NO_TIMES), (11,), ASKED)
    prefill = {}
    for name, share in probability.items():
        distribution = torch.full((1, 4, V), 1 / V)
        distribution[:, 2] = (1 - share) / (V - 1)
        distribution[:, 2, NO_SPEECH] = share
        prefill[name] = BranchOutput(
            logits=distribution[:, -1:], prompt_hidden={"last": distribution.log()}
        )
    return guide.begin(call, prefill).unspoken


@pytest.mark.parametrize(
    ("noise", "ends"), [(0.4, False), (0.6, True)], ids=["less_likely", "likelier"]
)
def test_a_window_ends_by_its_no_speech_token_under_noise(noise, ends):
    guide = WhisperCD(0.0, beta=0, gate=0, no_speech=0.5)
    assert [branch.name for branch in guide.branches] == ["noised"] and not guide.neutral
    assert unspoken(guide, main=1 - noise, noised=noise).tolist() == [[ends]]


@pytest.mark.parametrize(
    ("clean", "scrambled", "ends"),
    [(0.1, 0.3, False), (0.1, 0.26, True), (0.3, 0.1, True), (0.9, 0.9, True)],
    ids=["speech", "too_little", "the_other_way", "noise"],
)
def test_a_window_ends_that_is_no_less_speech_when_it_is_scrambled(clean, scrambled, ends):
    guide = WhisperCD(0.0, beta=0, gate=0, structure=1.0)
    assert [branch.name for branch in guide.branches] == ["scrambled"] and not guide.neutral
    assert unspoken(guide, main=clean, scrambled=scrambled).tolist() == [[ends]]


@pytest.mark.parametrize("noise", [0.1, 0.9])
@pytest.mark.parametrize("scrambled", [0.1, 0.9])
def test_either_of_two_gates_is_enough(noise, scrambled):
    guide = WhisperCD(0.0, beta=0, gate=0, no_speech=0.5, structure=1.0)
    found = unspoken(guide, main=0.1, noised=noise, scrambled=scrambled)
    assert found.tolist() == [[noise > 0.5 or scrambled < 0.5]]


@pytest.mark.parametrize("gate", [0.0, 0.01])
def test_an_unspoken_window_ends_where_text_would_begin_and_no_other_row_does(gate):
    main = logits(0, rows=1)
    guide = WhisperCD(0.0, beta=0, gate=gate, structure=1.0)
    call = context((START, NO_TIMES), adapter=ASKED, rows=2)
    distribution = torch.zeros(2, 2, V)
    louder = distribution.clone()
    louder[1, 0, NO_SPEECH] = 9.0  # only of the second row
    outputs = {
        name: BranchOutput(logits=main, prompt_hidden={"last": states})
        for name, states in (("main", distribution), ("scrambled", louder))
    }
    outputs["silent"] = BranchOutput(logits=logits(1, rows=1))  # says something else
    proposal = Proposal.empty(2, call.device)
    constants = guide.begin(call, outputs)
    found = guide.apply(constants, call, proposal, outputs)
    assert found[0].argmax() == END and found[0].softmax(-1).max() == 1
    assert torch.equal(found[1], main[1])
    call.rows.ids, call.rows.length = torch.tensor([[START, NO_TIMES, 3]] * 2), torch.tensor([1, 1])
    assert torch.equal(guide.apply(constants, call, proposal, outputs), main), (
        "there is text already"
    )


def test_the_prompt_is_read_for_the_no_speech_token_alone():
    assert not WhisperCD().needs(ADAPTER).prompt_hidden
    assert WhisperCD(structure=0.5).needs(ADAPTER).prompt_hidden
    assert WhisperCD(no_speech=0.5).needs(ADAPTER).prompt_hidden


# The waveforms of the branches


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def test_noise_has_its_level_below_the_window():
    wave = torch.sin(torch.arange(20_000) / 7)
    for snr in (-10.0, 0.0, 10.0):
        added = noised(snr, wave, draw()) - wave
        level = 10 * torch.log10(wave.square().mean() / added.square().mean())
        assert level.item() == pytest.approx(snr, abs=0.1)
    assert torch.equal(noised(5.0, wave, draw(1)), noised(5.0, wave, draw(1)))
    assert not torch.equal(noised(5.0, wave, draw(1)), noised(5.0, wave, draw(2)))
    nothing = torch.zeros(100)
    assert torch.equal(noised(10.0, nothing, draw()), nothing)


def test_what_is_later_begins_in_silence_and_loses_its_end():
    wave = torch.arange(1.0, 9.0)
    assert delayed(0.25, wave, draw()).tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
    assert silent(wave, draw()).tolist() == [0] * 8


def test_scrambled_samples_keep_their_spectrum_and_nothing_of_their_order():
    wave = torch.zeros(4000)
    wave[:1000] = torch.sin(torch.arange(1000) / 3)
    found = scrambled(wave, draw())
    spectra = [torch.fft.rfft(one).abs()[1:-1] for one in (found, wave)]
    torch.testing.assert_close(*spectra, atol=1e-2, rtol=1e-3)
    quarters = found.reshape(4, -1).square().sum(1) / found.square().sum()
    assert quarters.max() < 0.5, "the sound is still where it was"
    assert len(scrambled(wave[:-1], draw())) == 3999
    assert torch.equal(scrambled(torch.zeros(9), draw()), torch.zeros(9))
    assert not torch.equal(scrambled(wave, draw(1)), scrambled(wave, draw(2)))


# What is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": -1.0}, "alpha"),
        ({"beta": 1.5}, "beta"),
        ({"gate": -0.1}, "gate"),
        ({"tau": 0.0}, "tau"),
        ({"shift": 1.0}, "shift"),
        ({"doubt": 2.0}, "doubt"),
        ({"snr": None, "doubt": 0.1}, "use the branch with noise"),
        ({"snr": None, "no_speech": 0.5}, "use the branch with noise"),
        ({"no_speech": 1.5}, "no_speech"),
        ({"structure": math.inf}, "structure"),
        ({"structure": "much"}, "structure"),
        ({"snr": None, "silence": False, "shift": None}, "no branch to contrast"),
    ],
)
def test_options_out_of_range_are_refused(options, says):
    with pytest.raises(OptionError, match=says):
        WhisperCD(**options)


def test_a_model_that_hears_nothing_is_refused():
    with pytest.raises(
        IncompatibleError,
        match=r"WhisperCD does not fit .*inputs of kind audio, .* reads ids alone",
    ):
        mm.generate(
            text_model("llama"),
            **prompts(2),
            decoder=Decoder(guide=WhisperCD()),
            max_new_tokens=2,
        )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "waveforms were not given"),
        ([], "0 waveforms for 2 rows"),
        ([object()] * 3, "3 waveforms for 2 rows"),
    ],
)
def test_calls_without_the_waveforms_of_their_rows_are_refused(given, says):
    call = Call.of(torch.zeros(2, 1, dtype=torch.long), inputs={"audio": given})
    with pytest.raises(IncompatibleError, match=says):
        changed(call, WhisperCD().branches[0], None, None)


def test_a_plain_call_says_how_to_hand_over_the_waveform():
    model = whisper_model()
    features = torch.zeros(1, 8, 40)
    with pytest.raises(IncompatibleError, match="mm_inputs="):
        mm.generate(
            model, input_features=features, decoder=Decoder(guide="whisper_cd"), max_new_tokens=2
        )
