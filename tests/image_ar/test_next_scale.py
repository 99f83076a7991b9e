"""Next-scale pictures by one model and by two, against a slow loop that keeps nothing."""

import itertools
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mmdecode.engine.noise import Noise, Role
from mmdecode.errors import IncompatibleError, InputError, OptionError, ShapeError
from mmdecode.image_ar import next_scale
from mmdecode.image_ar.loading import load_scales
from mmdecode.image_ar.next_scale import (
    CODE,
    Collaborative,
    Drawing,
    Known,
    NextScale,
    class_requests,
)
from mmdecode.image_ar.sampling import Sampling
from mmdecode.models import var
from mmdecode.models.multiscale_vq import MultiScaleVQ, MultiScaleVQConfig
from mmdecode.models.var import ScaleCache, VarConfig, VarForImageGeneration

SIDES = (1, 2, 3, 4)
SCALES = len(SIDES)
CLASSES = [3, 0, 3, 4]
SAMPLINGS = (
    Sampling(),
    Sampling(top_k=9),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=0.7, top_k=7, top_p=0.9, order=("top_k", "top_p", "temperature")),
)
SAMPLED = Drawing(guidance=1.5, sampling=SAMPLINGS)
GREEDY = Drawing(guidance=1.5, greedy=True)
SAMPLE = Noise.sample  # mutants change it for the loop alone


def filled(model, seed):
    """Random numbers everywhere: as it begins, a model's blocks change nothing."""
    dice = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3 if parameter.ndim < 4 else 0.15, generator=dice)
    return model.eval()


def tokenizer_of(seed=1, **options):
    shape = {
        "codebook_size": 16,
        "codebook_dim": 4,
        "patch_nums": SIDES,
        "channels": 8,
        "channel_multipliers": (1, 1),
        "residual_blocks": 1,
        "norm_groups": 4,
    }
    return filled(MultiScaleVQ(MultiScaleVQConfig(**shape | options)), seed)


def model_of(seed=2, **options):
    shape = {
        "vocab_size": 16,
        "codebook_dim": 4,
        "patch_nums": SIDES,
        "num_classes": 5,
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    return filled(VarForImageGeneration(VarConfig(**shape | options)), seed)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of()


@pytest.fixture(scope="module")
def large():
    return model_of(2)


@pytest.fixture(scope="module")
def small():
    return model_of(3, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@torch.no_grad()
def slow_codes(models, tokenizer, label, request, drawing, seed=0):
    """One picture: every scale from a whole pass over all before it, twice; ``models`` by scale."""
    noise = Noise.of(seed, [request])
    codes = torch.zeros(1, 0, dtype=torch.long)
    for scale, model in enumerate(models):
        inputs = tokenizer.inputs_of(codes) if scale else None
        count = SIDES[scale] ** 2
        scores = model(torch.tensor([label]), inputs)[:, -count:]
        if drawing.guidance:
            t = drawing.guidance * scale / (SCALES - 1)
            null = model(torch.tensor([model.null_class]), inputs)[:, -count:]
            scores = (1 + t) * scores - t * null
        if not drawing.greedy:
            indices = torch.arange(codes.shape[1], codes.shape[1] + count)[None]
            sampling = (
                drawing.sampling if isinstance(drawing.sampling, Sampling) else SAMPLINGS[scale]
            )
            found = SAMPLE(noise, sampling.warp(scores), indices, Role.TARGET)
        else:
            found = scores.argmax(-1)
        codes = torch.cat([codes, found], 1)
    return codes


def check_against_the_slow_loop(drafter, refiner, tokenizer, drafted, drawing):
    found = Collaborative(drafter, refiner, tokenizer, drafted).generate(CLASSES, drawing=drawing)
    models = [drafter] * drafted + [refiner] * (SCALES - drafted)
    for row, (label, request) in enumerate(zip(CLASSES, class_requests(CLASSES), strict=True)):
        expected = slow_codes(models, tokenizer, label, request, drawing)
        assert torch.equal(found.codes[row], expected[0])
    return found


@pytest.mark.parametrize("drawing", [SAMPLED, GREEDY, Drawing()], ids=["drawn", "greedy", "plain"])
@pytest.mark.parametrize("drafted", range(SCALES + 1))
def test_images_are_those_of_a_loop_without_a_cache(large, small, tokenizer, drafted, drawing):
    found = check_against_the_slow_loop(large, small, tokenizer, drafted, drawing)
    assert len(found.codes.unique()) > 8
    assert not torch.equal(found.codes[1], found.codes[3])


@pytest.mark.parametrize("drawing", [SAMPLED, GREEDY], ids=["drawn", "greedy"])
@pytest.mark.parametrize("drafted", range(SCALES + 1))
def test_one_model_in_both_roles_draws_what_it_draws_alone(large, tokenizer, drafted, drawing):
    alone = NextScale(large, tokenizer).generate(CLASSES, drawing=drawing)
    both = Collaborative(large, large, tokenizer, drafted).generate(CLASSES, drawing=drawing)
    assert torch.equal(both.codes, alone.codes)
    assert torch.equal(both.f_hat, alone.f_hat)
    assert torch.equal(both.images, alone.images)


@pytest.mark.parametrize(("drafted", "idle"), [(0, "drafter"), (SCALES, "refiner")])
def test_a_model_without_scales_is_not_run(large, small, tokenizer, drafted, idle, monkeypatch):
    def forbidden(*given, **more):
        raise AssertionError("this model was run")

    monkeypatch.setattr(large if idle == "drafter" else small, "forward", forbidden)
    found = Collaborative(large, small, tokenizer, drafted).generate([1], drawing=SAMPLED)
    other = NextScale(small if idle == "drafter" else large, tokenizer)
    assert torch.equal(found.codes, other.generate([1], drawing=SAMPLED).codes)


def check_prefill(model, tokenizer):
    """All scales in one masked pass against one after the other with a cache."""
    dice = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (2, tokenizer.starts[-1]), generator=dice)
    inputs, labels = tokenizer.inputs_of(codes), torch.tensor([1, 4])
    whole = model(labels, inputs)
    cache = ScaleCache(model.config, 2, tokenizer.starts[-1])
    pieces = [model(labels, None, cache)]
    for begin, end in itertools.pairwise(tokenizer.starts[1:]):
        pieces.append(model(labels, inputs[:, begin - 1 : end - 1], cache))
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-5, rtol=1e-5)
    assert cache.length == tokenizer.starts[-1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sharp", [False, True])
@torch.no_grad()
def test_one_masked_pass_gives_the_logits_of_scale_after_scale(tokenizer, shared, sharp):
    check_prefill(model_of(4, shared_adaln=shared, attn_l2_norm=sharp), tokenizer)


def test_a_refiner_reads_all_that_was_drafted_in_one_pass(large, small, tokenizer):
    for drafted in range(1, SCALES):
        found = Collaborative(large, small, tokenizer, drafted).generate([0, 1], drawing=SAMPLED)
        draft, refined = found.stages
        assert draft.fed == tuple(side * side for side in SIDES[:drafted])
        assert refined.fed[0] == tokenizer.starts[drafted + 1]
        assert refined.fed[1:] == tuple(side * side for side in SIDES[drafted + 1 :])
        assert sum(draft.fed) == tokenizer.starts[drafted]
        assert sum(refined.fed) == tokenizer.starts[-1]
        assert found.passes == SCALES


def test_prefix_of_the_published_scales():
    assert VarConfig().starts[1:] == (1, 5, 14, 30, 55, 91, 155, 255, 424, 680)
    assert CODE.sampling_of(6).temperature == 1.1
    assert CODE.sampling_of(7).temperature == 1.0


def test_latents_on_the_way_are_those_of_the_codes_so_far(large, small, tokenizer):
    seen = {}
    found = Collaborative(large, small, tokenizer, 2).generate(
        CLASSES, drawing=SAMPLED, on_scale=lambda scale, f_hat: seen.update({scale: f_hat})
    )
    for scale, f_hat in seen.items():
        so_far = tokenizer.f_hat_of(found.codes[:, : tokenizer.starts[scale + 1]])
        torch.testing.assert_close(f_hat, so_far)
    assert list(seen) == [0, 1, 2, 3]
    torch.testing.assert_close(found.images, tokenizer.image(tokenizer.f_hat_of(found.codes)))


def test_an_image_does_not_depend_on_its_batch(large, small, tokenizer):
    maker = Collaborative(large, small, tokenizer, 2)
    together = maker.generate(CLASSES, drawing=SAMPLED)
    for row, request in enumerate(class_requests(CLASSES)):
        alone = maker.generate([CLASSES[row]], drawing=SAMPLED, requests=[request])
        assert torch.equal(alone.codes[0], together.codes[row])
    assert not torch.equal(together.codes[0], together.codes[2])
    other = maker.generate(CLASSES, drawing=SAMPLED, seed=1)
    assert not torch.equal(other.codes, together.codes)


def test_without_guidance_nothing_unconditional_is_read(tokenizer):
    model = model_of(2)
    plain = NextScale(model, tokenizer).generate(CLASSES, drawing=Drawing())
    assert plain.stages[0].cache_bytes == 2 * 2 * len(CLASSES) * 24 * tokenizer.starts[-1] * 4
    model.class_emb.weight.data[model.null_class] = torch.nan
    again = NextScale(model, tokenizer).generate(CLASSES, drawing=Drawing())
    assert torch.equal(again.codes, plain.codes)
    guided = NextScale(model, tokenizer).generate(CLASSES, drawing=Drawing(guidance=1e-9))
    assert guided.stages[0].cache_bytes == 2 * plain.stages[0].cache_bytes


def test_the_first_scale_is_not_guided_and_the_last_one_most():
    drawing = Drawing(guidance=1.5)
    assert [drawing.strength(scale, 4) for scale in range(4)] == [1.0, 1.5, 2.0, 2.5]
    assert Drawing(guidance=2.0).strength(0, 1) == 1.0


@pytest.mark.parametrize("drafted", [0, 2, SCALES])
def test_codes_are_sampled_from_the_scores(large, small, tokenizer, drafted):
    maker = Collaborative(large, small, tokenizer, drafted)
    found = maker.generate(CLASSES, drawing=GREEDY)
    scores = maker.score(CLASSES, found.codes, drawing=GREEDY)
    assert torch.equal(scores.argmax(-1), found.codes)


def test_codes_follow_the_distribution():
    sides, rows = (1, 2), 20_000
    tokenizer = tokenizer_of(codebook_size=3, patch_nums=sides)
    model = model_of(8, vocab_size=3, patch_nums=sides)
    drawing = Drawing(guidance=0.7, sampling=Sampling(temperature=1.2))
    maker = NextScale(model, tokenizer)
    found = maker.generate([1] * rows, drawing=drawing)
    outcomes = torch.tensor(list(itertools.product(range(3), repeat=5)))
    scores = maker.score([1] * len(outcomes), outcomes, drawing=drawing)
    logs = drawing.sampling.warp(scores).log_softmax(-1).gather(2, outcomes[..., None]).sum((1, 2))
    expected = rows * logs.exp()
    assert expected.sum() == pytest.approx(rows, rel=1e-4)
    outcome = (found.codes * 3 ** torch.arange(4, -1, -1)).sum(1)
    counts = torch.bincount(outcome, minlength=len(outcomes))
    common = expected > 5
    chi2 = ((counts - expected)[common].square() / expected[common]).sum()
    freedom = int(common.sum())
    assert freedom > 60
    assert abs(chi2 - freedom) < 4 * (2 * freedom) ** 0.5


# mutants


def test_mutants_are_found(large, small, tokenizer, monkeypatch):
    check_against_the_slow_loop(large, small, tokenizer, 2, SAMPLED)
    extend = ScaleCache.extend

    def restarts_with_every_scale(self, scores, positions, role):
        return SAMPLE(self, scores, positions - positions[:, :1], role)

    def one_further(self, scores, positions, role):
        return SAMPLE(self, scores, positions + 1, role)

    def stale(self, layer, key, value):
        """What was read first is seen, what came later is not."""
        return extend(self, layer, key * (self.length == 0), value * (self.length == 0))

    for where, name, mutant in (
        (Drawing, "strength", lambda self, scale, scales: 1 + self.guidance),
        (Drawing, "strength", lambda self, scale, scales: self.guidance * scale / (scales - 1)),
        (Drawing, "sampling_of", lambda self, scale: self.sampling[0]),
        (Noise, "sample", restarts_with_every_scale),
        (Noise, "sample", one_further),
        (ScaleCache, "extend", stale),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, mutant)
            with pytest.raises(AssertionError):
                check_against_the_slow_loop(large, small, tokenizer, 2, SAMPLED)


@torch.no_grad()
def test_a_mask_by_tokens_is_found(large, tokenizer, monkeypatch):
    def by_tokens(levels, begin):
        indices = torch.arange(len(levels))
        return indices[begin:, None] >= indices

    monkeypatch.setattr(var, "visible", by_tokens)
    with pytest.raises(AssertionError):
        check_prefill(large, tokenizer)


# memory


def test_the_drafters_cache_is_gone_before_the_refiner_has_one(
    large, small, tokenizer, monkeypatch
):
    born = []

    class Watched(ScaleCache):
        def __init__(self, *given):
            assert all(cache() is None for cache in born)
            super().__init__(*given)
            born.append(weakref.ref(self))

    monkeypatch.setattr(next_scale, "ScaleCache", Watched)
    found = Collaborative(large, small, tokenizer, 2).generate([0, 1], drawing=SAMPLED)
    assert len(born) == 2
    # rows and their null rows, layers, keys and values, width, tokens, four bytes
    assert found.stages[0].cache_bytes == 4 * 2 * 2 * 24 * tokenizer.starts[2] * 4
    assert found.stages[1].cache_bytes == 4 * 1 * 2 * 16 * tokenizer.starts[4] * 4
    assert found.stages[0].device_bytes is None


# in-painting


@pytest.fixture(scope="module")
def image(tokenizer):
    pixels = (1, 3, tokenizer.config.side, tokenizer.config.side)
    return torch.rand(pixels, generator=torch.Generator().manual_seed(5))


def test_known_regions_stay_and_the_rest_is_generated(large, tokenizer, image):
    keep = torch.zeros(1, 4, 4, dtype=torch.bool)
    keep[:, :, :2] = True
    known = Known.of(tokenizer, image, keep)
    maker = NextScale(large, tokenizer)
    found = maker.generate(CLASSES, drawing=SAMPLED, known=known)
    given = tokenizer.quantize(tokenizer.encode(image * 2 - 1)).running[:, -1]
    for row in found.f_hat:
        assert torch.equal(row[:, :, :2], given[0, :, :, :2])
    plain = maker.generate(CLASSES, drawing=SAMPLED)
    assert not torch.equal(found.f_hat[:, :, :, 2:], plain.f_hat[:, :, :, 2:])
    assert not torch.equal(found.f_hat[0, :, :, 2:], found.f_hat[1, :, :, 2:])


def test_images_are_plain_if_nothing_is_known_and_the_given_ones_if_all_is(large, tokenizer, image):
    maker, none = NextScale(large, tokenizer), torch.zeros(1, 4, 4, dtype=torch.bool)
    plain = maker.generate([1], drawing=SAMPLED)
    known = Known.of(tokenizer, image, none)
    assert torch.equal(maker.generate([1], drawing=SAMPLED, known=known).images, plain.images)
    known = Known.of(tokenizer, image, ~none)
    for every in (maker, Collaborative(large, large, tokenizer, 2)):
        found = every.generate([1], drawing=SAMPLED, known=known)
        torch.testing.assert_close(found.images, tokenizer.image(known.running[:, -1]))


def test_a_mask_in_pixels_keeps_latents_that_are_kept_whole(tokenizer, image):
    keep = torch.zeros(1, 8, 8, dtype=torch.bool)
    keep[:, :4, :5] = True
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[:2, :2] = True
    assert torch.equal(Known.of(tokenizer, image, keep).keep[0, 0], expected)


def test_wrong_masks_are_refused(large, tokenizer, image):
    for shape in ((4, 4), (1, 5, 4), (1, 1, 4, 4)):
        with pytest.raises(ShapeError, match=r"8, 8\) in pixels or \(batch, 4, 4\) in latents"):
            Known.of(tokenizer, image, torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ShapeError, match="2 images and 3 masks"):
        Known.of(tokenizer, image.expand(2, 3, 8, 8), torch.ones(3, 4, 4, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"expected \(batch, 3, 8, 8\)"):
        Known.of(tokenizer, image[..., :6], torch.ones(1, 4, 4, dtype=torch.bool))
    two = Known.of(tokenizer, image, torch.ones(2, 4, 4, dtype=torch.bool))
    with pytest.raises(ShapeError, match="known has 2 images for 4 classes"):
        NextScale(large, tokenizer).generate(CLASSES, known=two)


# half precision


@pytest.mark.parametrize("both", [False, True])
def test_models_in_half_precision_have_nearly_the_same_distributions(both):
    exact, tokenizer = NextScale(model_of(2), tokenizer_of()), tokenizer_of()
    half = NextScale(
        model_of(2).to(torch.bfloat16), tokenizer.to(torch.bfloat16) if both else tokenizer
    )
    found = half.generate(CLASSES, drawing=SAMPLED)
    assert found.images.dtype == torch.float32
    assert found.images.isfinite().all()
    scores = half.score(CLASSES, found.codes, drawing=SAMPLED)
    expected = exact.score(CLASSES, found.codes, drawing=SAMPLED)
    assert scores.dtype == torch.float32
    assert (scores - expected).abs().mean() < 0.1 * expected.std()


# refusals


def test_misfits_are_refused_with_both_sides_named(large, tokenizer):
    with pytest.raises(IncompatibleError, match=r"model.*tokenizer.*codes: 16 and 32"):
        NextScale(large, tokenizer_of(codebook_size=32))
    with pytest.raises(IncompatibleError, match="sides of the scales"):
        NextScale(large, tokenizer_of(patch_nums=(1, 2, 4)))
    with pytest.raises(IncompatibleError, match=r"refiner.*tokenizer.*numbers in a code"):
        Collaborative(large, model_of(codebook_dim=5), tokenizer, 2)
    with pytest.raises(IncompatibleError, match="5 and 7 classes"):
        Collaborative(large, model_of(num_classes=7), tokenizer, 2)


@pytest.mark.parametrize("drafted", [-1, SCALES + 1])
def test_a_number_of_drafted_scales_out_of_range_is_refused(large, small, tokenizer, drafted):
    with pytest.raises(OptionError, match=r"0 \(refiner alone\) to 4 \(drafter alone\)"):
        Collaborative(large, small, tokenizer, drafted)


def test_wrong_requests_are_refused(large, tokenizer):
    maker = NextScale(large, tokenizer)
    for label in (-1, 5):
        with pytest.raises(OptionError, match=f"class {label} does not exist; expected 0 to 4"):
            maker.generate([0, label])
    with pytest.raises(ShapeError, match="expected a list"):
        maker.generate([])
    with pytest.raises(ShapeError, match="1 requests for 2 classes"):
        maker.generate([0, 1], requests=[3])
    with pytest.raises(OptionError, match="10 sampling settings for 4 scales"):
        maker.generate([0], drawing=CODE)
    with pytest.raises(OptionError, match="guidance must be 0"):
        Drawing(guidance=-0.5)
    with pytest.raises(ShapeError, match="tokens of whole scales"):
        tokenizer.f_hat_of(torch.zeros(1, 7, dtype=torch.long))
    with pytest.raises(ShapeError, match="feed whole scales"):
        large(torch.tensor([0]), torch.zeros(1, 3, 4))


def test_guidance_needs_an_unconditional_input(tokenizer):
    maker = NextScale(model_of(unconditional=False), tokenizer)
    with pytest.raises(OptionError, match="no null class: give guidance=0"):
        maker.generate([0], drawing=Drawing(guidance=1.5))
    assert maker.generate([4], drawing=Drawing()).passes == SCALES


# files


def save_pair(folder, model, tokenizer, tokenizer_name="../tokenizer"):
    model.config.tokenizer = tokenizer_name
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "model"


def test_models_are_loaded_with_the_tokenizer_they_name(tmp_path, tokenizer):
    folder = save_pair(tmp_path, model_of(2), tokenizer)
    maker = NextScale.from_pretrained(folder, "cpu")
    found = maker.generate(CLASSES, drawing=SAMPLED)
    expected = NextScale(model_of(2), tokenizer).generate(CLASSES, drawing=SAMPLED)
    assert torch.equal(found.images, expected.images)
    pair = Collaborative.from_names(folder, folder, 2, "cpu")
    assert torch.equal(pair.generate(CLASSES, drawing=SAMPLED).images, expected.images)


def test_pairs_of_two_tokenizers_are_refused(tmp_path, tokenizer):
    one = save_pair(tmp_path / "one", model_of(2), tokenizer)
    two = save_pair(tmp_path / "two", model_of(3), tokenizer_of(seed=9))
    with pytest.raises(IncompatibleError, match="their tokenizers differ"):
        Collaborative.from_names(one, two, 2, "cpu")


def test_a_model_that_names_no_tokenizer_is_refused(tmp_path, tokenizer):
    folder = save_pair(tmp_path, model_of(2), tokenizer, "")
    with pytest.raises(InputError, match="does not name its tokenizer"):
        load_scales(folder, "cpu")
    folder = save_pair(tmp_path, model_of(2), tokenizer, "../nowhere/at/all")
    with pytest.raises(InputError, match="does not exist"):
        load_scales(folder, "cpu")


def test_a_folder_without_all_weights_is_refused(tmp_path, tokenizer):
    folder = save_pair(tmp_path, model_of(2), tokenizer)
    weights = load_file(folder / "model.safetensors")
    del weights["head.bias"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"without head\.bias"):
        load_scales(folder, "cpu")


def test_half_precision_is_for_the_transformer_alone(tmp_path, tokenizer):
    folder = save_pair(tmp_path, model_of(2), tokenizer)
    maker = NextScale.from_pretrained(folder, "cpu", "bfloat16")
    assert maker.stages[0].model.dtype == torch.bfloat16
    assert maker.tokenizer.dtype == torch.float32
    assert maker.generate(CLASSES, drawing=SAMPLED).f_hat.dtype == torch.float32


def test_an_untrained_model_begins_even(tokenizer):
    config = model_of().config
    model = VarForImageGeneration(config)
    with torch.no_grad():
        logits = model(torch.tensor([0, 1]))
    assert logits.std() < 1
    assert all(p.isfinite().all() for p in model.parameters())
