import numpy as np
import pytest
import torch

pytest.importorskip("scipy")
from scipy.stats import kstest, ttest_ind

from mmdecode.errors import OptionError, ShapeError
from mmdecode.evaluation.images.features import (
    floor,
    frechet,
    judged,
    kernel_distance,
    memory,
    nearest,
)
from mmdecode.evaluation.images.samples import likelihood
from mmdecode.evaluation.stats.image_tests import (
    code_groups,
    equivalence,
    mean_of,
    neighbours,
    two_sample,
    welch,
)
from mmdecode.image_ar.sampling import Sampling

CODES, SIDE, WINDOW = 6, 4, 5
NONE = CODES  # the neighbour of a border cell
LOGITS = 1.2 * torch.randn(CODES + 1, CODES + 1, CODES, generator=torch.Generator().manual_seed(5))
GROUPS = torch.arange(CODES)
PLAIN = Sampling()
CUT = Sampling(temperature=0.9, top_k=4)


def sampled(logits, dice):
    return logits.softmax(-1).multinomial(1, generator=dice)[:, 0]


def context(tokens, position):
    left = tokens[:, position - 1] if position % SIDE else torch.full_like(tokens[:, 0], NONE)
    above = tokens[:, position - SIDE] if position >= SIDE else torch.full_like(tokens[:, 0], NONE)
    return left, above


def sample(count, seed, sampling=PLAIN, *, fault=None, draft=None, of_row=range(SIDE)):
    """Images of a Markov field, drawn by plain sampling or by speculation, and their passes.

    The draft knows no neighbours; a pass ends where it is rejected, or with one more token after
    a window that was kept.
    """
    dice = torch.Generator().manual_seed(seed)
    tokens = torch.full((count, SIDE * SIDE), NONE)
    passes = torch.zeros_like(tokens)
    turn, kept = torch.zeros(count, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    for position in range(SIDE * SIDE):
        left, above = context(tokens, position)
        if fault == "stale" and position % SIDE in of_row:
            # the distribution was computed before the left neighbour changed
            again = sampled(sampling.warp(LOGITS[context(tokens, max(position - 1, 0))]), dice)
            left = torch.where(left == NONE, left, again)
        p = sampling.warp(LOGITS[left, above])
        if draft is None:
            tokens[:, position], passes[:, position] = sampled(p, dice), position
            continue
        q = sampling.warp(draft.expand_as(p))
        guess = sampled(q, dice)
        recorded = q if fault != "old q" else sampling.warp(LOGITS[NONE, NONE].expand_as(p))
        ratio = (p.log_softmax(-1) - recorded.log_softmax(-1)).gather(1, guess[:, None])[:, 0].exp()
        bonus = kept == WINDOW - 1
        passed = (torch.rand(count, generator=dice) < ratio) & ~bonus
        rest = (p.softmax(-1) - q.softmax(-1)).clamp_min(0) if fault != "from p" else p.softmax(-1)
        rest = torch.where(bonus[:, None], p.softmax(-1), rest + 1e-12)
        other = rest.multinomial(1, generator=dice)[:, 0]
        tokens[:, position] = torch.where(passed, guess, other)
        passes[:, position] = turn
        kept = torch.where(passed, kept + 1, 0)
        turn = turn + ~passed
    return tokens.view(count, SIDE, SIDE), passes.view(count, SIDE, SIDE)


DRAFT = LOGITS.mean((0, 1))


def scored(codes, commits=None, sampling=PLAIN, batch=256):
    def distributions(rows):
        flat = codes[rows].flatten(1)
        return torch.stack([LOGITS[context(flat, position)] for position in range(SIDE * SIDE)], 1)

    return likelihood(distributions, codes, sampling, commits=commits, groups=GROUPS, batch=batch)


def compared(first, second):
    tables = {
        "codes": lambda codes: codes.reshape(len(codes), -1, 1),
        "right": lambda codes: neighbours(codes, GROUPS.numpy()),
        "below": lambda codes: neighbours(codes, GROUPS.numpy(), 1),
    }
    return {
        name: two_sample(table(first.numpy()), table(second.numpy()), permutations=399).p
        for name, table in tables.items()
    }


def test_likelihood_of_two_known_images():
    codes = torch.zeros(2, SIDE, SIDE, dtype=torch.long)
    codes[1] = torch.arange(SIDE * SIDE).view(SIDE, SIDE) % CODES
    found = scored(codes, batch=1)
    by_hand = []
    for image in codes.flatten(1).tolist():
        total = 0.0
        for position, code in enumerate(image):
            left = image[position - 1] if position % SIDE else NONE
            above = image[position - SIDE] if position >= SIDE else NONE
            total -= float(LOGITS[left, above].log_softmax(-1)[code])
        by_hand.append(total)
    np.testing.assert_allclose(found.per_image, by_hand, rtol=1e-5)
    assert found.tokens == SIDE * SIDE
    assert not found.outside.any()


def test_likelihood_is_before_the_filters_and_forbidden_tokens_are_counted():
    codes, _ = sample(400, 1)
    cut, uncut = scored(codes, sampling=CUT), scored(codes, sampling=Sampling(temperature=0.9))
    np.testing.assert_array_equal(cut.per_image, uncut.per_image)
    assert not uncut.outside.any()
    flat = codes.flatten(1)
    forbidden = sum(
        float((LOGITS[context(flat, i)].argsort(descending=True)[:, 4:] == flat[:, i, None]).sum())
        for i in range(SIDE * SIDE)
    )
    assert cut.outside.mean() == pytest.approx(forbidden / flat.numel())
    assert cut.all.p < 1e-6


def test_logits_of_other_tokens_are_refused():
    codes, _ = sample(4, 1)
    with pytest.raises(ShapeError, match="15"):
        likelihood(lambda rows: torch.zeros(4, 15, CODES), codes, PLAIN)


@pytest.mark.parametrize("shift", [0, 0.1, 0.3, 1])
def test_welch_is_that_of_scipy(shift):
    dice = np.random.default_rng(0)
    one, other = dice.normal(3, 1, 50), dice.normal(3 + shift, 2, 80)
    expected = ttest_ind(other, one, equal_var=False).pvalue
    assert welch(mean_of(one), mean_of(other)) == pytest.approx(expected)


def test_how_chosen_conditions_differ_is_no_uncertainty():
    dice = np.random.default_rng(0)
    labels = np.arange(200) % 4
    values = 100.0 * labels + dice.normal(0, 1, 200)
    assert mean_of(values).error > 50 * mean_of(values, labels).error
    assert mean_of(values, labels).error == pytest.approx(1 / np.sqrt(200), rel=0.15)
    assert mean_of(values, np.arange(200)).error == mean_of(values).error
    assert mean_of(values, np.arange(200) // 2).freedom == 100
    with pytest.raises(OptionError, match="needs two"):
        mean_of(values[:1])


def test_no_difference_is_shown_only_where_there_are_images_enough():
    dice = np.random.default_rng(0)
    for count, shown in ((50, False), (4000, True)):
        one, other = (mean_of(dice.normal(500, 50, count)) for _ in range(2))
        found = equivalence(one, other)
        assert found.shown is shown
        assert found.low < found.ratio < found.high
    far = mean_of(dice.normal(510, 50, 4000))
    assert not equivalence(one, far).shown
    assert welch(one, far) < 1e-6
    with pytest.raises(OptionError, match="ratio"):
        equivalence(one, mean_of(-dice.normal(510, 50, 40)))


def test_equal_means_are_found_equivalent_and_ones_at_the_margin_in_one_of_twenty():
    dice = np.random.default_rng(1)
    baseline = [mean_of(row) for row in dice.normal(100, 5, (400, 1000))]
    at_margin = [mean_of(row) for row in dice.normal(101, 5, (400, 1000))]
    wrong = np.mean([equivalence(a, b).shown for a, b in zip(baseline, at_margin, strict=True)])
    assert 0.02 < wrong < 0.09
    right = [equivalence(a, b).shown for a, b in zip(baseline[:200], baseline[200:], strict=True)]
    assert np.mean(right) > 0.95


def test_exact_speculation_raises_no_alarm():
    p_values = {"all": [], "first": [], "pairs": [], "codes": [], "right": [], "below": []}
    for seed in range(30):
        codes, passes = sample(100, 2 * seed, draft=DRAFT, sampling=CUT)
        plain, _ = sample(100, 2 * seed + 1, sampling=CUT)
        found = scored(codes, passes, CUT)
        p_values["all"].append(found.all.p)
        p_values["first"].append(found.first.p)
        p_values["pairs"].append(found.first.pairs_p)
        for name, p in compared(plain, codes).items():
            p_values[name].append(p)
    for name, values in p_values.items():
        assert np.mean(np.array(values) < 0.1) < 0.3, name  # 9 of 30: 1 in 2,000 by chance
        assert min(values) > 1e-4, name
    assert kstest(np.array(p_values["codes"]), "uniform", alternative="greater").pvalue > 1e-3


FAULTS = {
    "stale distribution": {"fault": "stale"},
    "stale distribution, speculated": {"fault": "stale", "draft": DRAFT},
    "old q": {"fault": "old q", "draft": DRAFT},
    "resampled from p": {"fault": "from p", "draft": DRAFT},
    "temperature": {"sampling": Sampling(temperature=0.85)},
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_in_600_images(name):
    codes, passes = sample(600, 7, **FAULTS[name])
    plain, _ = sample(600, 8)
    found = scored(codes, passes)
    assert found.all.p < 1e-4
    assert found.first.p < 1e-3
    assert min(compared(plain, codes).values()) < 0.01
    means = mean_of(scored(plain).per_image), mean_of(found.per_image)
    assert welch(*means) < 1e-6
    assert not equivalence(*means).shown


def test_an_exact_sampler_would_be_blamed_for_pairs_that_are_picked_by_their_border():
    """Why borders are tested against distributions: a pass ends where something was rejected."""
    codes, passes = sample(2000, 3, draft=DRAFT)
    plain, _ = sample(2000, 4)
    border = torch.zeros_like(passes, dtype=torch.bool)
    border[:, :, 1:] = passes[:, :, 1:] != passes[:, :, :-1]
    pairs = [
        torch.where(border[:, :, 1:], a[:, :, :-1] * CODES + a[:, :, 1:], CODES**2).numpy()
        for a in (plain, codes)
    ]
    assert two_sample(*(p.reshape(len(p), 1, -1) for p in pairs)).p < 1e-3
    found = scored(codes, passes)
    assert min(found.first.p, found.first.pairs_p) > 0.01


def test_a_fault_at_borders_alone_is_found_there():
    """Passes of four, the first token of each by a stale distribution: a quarter of all tokens."""
    codes, index = sample(150, 9, fault="stale", of_row=[2])
    found = scored(codes, (index + 2).div(SIDE, rounding_mode="floor"))
    assert found.first.p < 1e-6
    assert found.first.p < found.all.p
    assert found.first.pairs_p < 1e-4


def test_too_few_pairs_are_no_evidence():
    codes, passes = sample(3, 9, draft=DRAFT)
    assert scored(codes, passes).first.pairs_p == 1
    alone = scored(codes, torch.zeros_like(passes))
    assert alone.first is None
    assert (
        likelihood(lambda rows: LOGITS[NONE, NONE].expand(3, 16, -1), codes, PLAIN).all.pairs_p
        is None
    )


def test_images_that_hang_together_raise_no_alarm():
    """Twenty equal entries an image: a chi-square fit of the counts would be far too narrow."""
    low = []
    for seed in range(30):
        dice = np.random.default_rng(seed)
        one, other = (dice.integers(0, 8, (80, 1, 1)).repeat(20, 2) for _ in range(2))
        low.append(two_sample(one, other, permutations=199).p)
    assert np.mean(np.array(low) < 0.1) < 0.3


def test_conditions_are_exchanged_among_themselves():
    """How often each condition was chosen has three of the cells' eleven degrees of freedom."""
    dice = np.random.default_rng(1)  # 0 is that of the permutations
    labels = np.arange(400) % 4
    one, other = ((10 * labels + dice.integers(0, 3, 400)).reshape(-1, 1, 1) for _ in range(2))
    within, across = two_sample(one, other, (labels, labels)), two_sample(one, other)
    assert within.g == across.g
    assert within.expected == pytest.approx(4 * 2, rel=0.1)
    assert across.expected == pytest.approx(4 * 3 - 1, rel=0.1)
    assert within.p > 0.01


def test_p_values_of_equal_samples_are_uniform():
    dice = np.random.default_rng(1)
    sampled = dice.integers(0, 3, (300, 2, 30, 1, 4))
    p_values = np.array([two_sample(*pair, permutations=99).p for pair in sampled])
    assert kstest(p_values, "uniform", alternative="greater").pvalue > 0.01
    assert abs(np.mean(p_values < 0.1) - 0.1) < 0.05


def test_the_table_that_differs_is_named_and_rare_cells_are_pooled():
    dice = np.random.default_rng(0)
    one, other = (dice.integers(0, 5, (300, 9, 1)) for _ in range(2))
    other[:150, 6] = 2
    one[:3, 0], other[:3, 1] = 40, 41
    found = two_sample(one, other)
    assert (found.worst, found.cells) == (6, 9 * 5 + 2)
    assert found.p < 0.01
    assert found.pooled == pytest.approx(6 / (600 * 9))
    assert found.expected == pytest.approx(9 * 4 + 2, rel=0.2)
    with pytest.raises(ShapeError, match="expected the same shape"):
        two_sample(one, other[:, :8])


def test_neighbours_are_those_of_the_grid():
    codes = np.arange(6).reshape(1, 2, 3)
    groups = np.array([0, 1, 2, 0, 1, 2])
    np.testing.assert_array_equal(neighbours(codes, groups)[0], [[1, 1], [5, 5]])
    np.testing.assert_array_equal(neighbours(codes, groups, 1)[0], [[0, 4, 8]])


def test_codes_of_like_meaning_share_a_group():
    centres = torch.eye(4).repeat_interleave(10, 0)
    groups = code_groups(centres + 0.01 * torch.randn(40, 4), 4)
    assert groups.unique().tolist() == [0, 1, 2, 3]
    assert all(len(groups[10 * i : 10 * i + 10].unique()) == 1 for i in range(4))
    assert code_groups(torch.randn(5, 3)).tolist() == [0, 1, 2, 3, 4]
    assert code_groups(torch.ones(20, 3)).unique().tolist() == [0]


def test_frechet_distance_of_gaussians_is_the_closed_form():
    dice = np.random.default_rng(0)
    one, other = dice.normal(0, 1, (20000, 3)), dice.normal(1, 2, (20000, 3))
    found = frechet(one, other, resamples=20)
    assert found.value == pytest.approx(3 * (1 + 1), rel=0.05)
    assert found.low < found.value < found.high
    assert frechet(one, one, resamples=2).value == pytest.approx(0, abs=1e-6)


def test_distances_of_equal_laws_stay_at_their_floor_and_shifts_stand_out():
    dice = np.random.default_rng(0)
    one, other, shifted = (dice.normal(m, 1, (400, 8)) for m in (0, 0, 0.3))
    least = floor(dice.normal(0, 1, (800, 8)), 400)
    assert least.low < frechet(one, other, resamples=2).value < 1.5 * least.high
    assert floor(dice.normal(0, 1, (800, 8)), 100).value > 3 * least.value
    assert frechet(one, shifted).low > 2 * least.high
    with pytest.raises(OptionError, match="two parts of 401"):
        floor(dice.normal(0, 1, (800, 8)), 401)
    assert kernel_distance(one, shifted).low > 0
    near = kernel_distance(one, other)
    assert near.low < 0 < near.high


def test_kernel_distance_is_unbiased_and_its_interval_covers():
    dice = np.random.default_rng(0)
    draws = [
        kernel_distance(dice.normal(0, 1, (40, 4)), dice.normal(0, 1, (40, 4)), 100)
        for _ in range(100)
    ]
    values = np.array([d.value for d in draws])
    assert abs(values.mean()) < 3 * values.std() / 10
    assert np.mean([d.low <= 0 <= d.high for d in draws]) > 0.85


def test_kernel_distance_of_a_few_points_by_hand():
    one, other = np.arange(12) / 8, np.arange(15) / 9

    def mean(first, second, equal):
        values = [
            (a * b + 1) ** 3
            for i, a in enumerate(first)
            for j, b in enumerate(second)
            if equal or i != j
        ]
        return np.mean(values)

    expected = mean(one, one, False) + mean(other, other, False) - 2 * mean(one, other, True)
    found = kernel_distance(one[:, None], other[:, None])
    assert found.value == pytest.approx(expected, rel=1e-3)


def test_accuracy_diversity_and_mean_entropy():
    distributions = np.eye(4)[[0, 1, 2, 3]]
    found = judged(distributions, np.array([0, 1, 2, 0]))
    assert found["accuracy"]["value"] == pytest.approx(0.75)
    assert (found["diversity"], found["doubt"]) == pytest.approx((2, 0))
    assert judged(np.full((4, 4), 0.25), np.zeros(4))["doubt"] == pytest.approx(2)


def test_copies_of_training_images_are_distinguished_from_new_ones():
    dice = np.random.default_rng(0)
    training, held_out, new = (dice.normal(0, 1, (n, 12)) for n in (500, 300, 300))
    copied = training[:300] + dice.normal(0, 0.1, (300, 12))
    others = nearest(held_out, training, at_once=64)
    np.testing.assert_allclose(
        others, np.linalg.norm(held_out[:, None] - training, axis=2).min(1), rtol=1e-4
    )
    assert memory(nearest(copied, training), others)["copies"] > 0.99
    assert memory(nearest(copied, training), others)["p"] < 1e-6
    honest = memory(nearest(new, training), others)
    assert honest["copies"] < 0.04
    assert honest["p"] > 0.01
