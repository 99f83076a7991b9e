"""Guides that look or reach inside a pass, on every family: against their formula on uncached
passes, alone and in a batch, with drafts and without."""

import functools

import pytest
import torch

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.engine.attention import layer_range
from mmdecode.guide.adaptvis import AdaptVis
from mmdecode.guide.conscious_gaze import ConsciousGaze
from mmdecode.guide.dagcd import DAGCD
from mmdecode.guide.dcla import DCLA
from mmdecode.guide.dfd import DFD
from mmdecode.guide.dola import DoLa
from mmdecode.guide.pai import PAI
from mmdecode.guide.scalingvis import ScalingVis
from mmdecode.testing import drafts
from tests.conformance.test_transforms import FAMILIES
from tests.guide import uncached
from tests.guide.uncached import Pass, alone, images_of, inputs_of, model_of
from tests.support.tiny import TEXT_CONFIGS, HiddenPath
from tests.support.tiny_vlm import IMAGE

pytestmark = pytest.mark.filterwarnings("ignore:guide DFD is inert in greedy:UserWarning")

LENGTH = 7
SEED = 4
VISION_FAMILIES = (*FAMILIES, uncached.BLIP)
TEXT_FAMILIES = [uncached.TEXT + family for family in TEXT_CONFIGS]
EARLY = (0.0, 1.0)  # of two layers, all


def cut(combined, main, share):
    """Tokens below ``share`` of the most likely are out."""
    main = main.softmax(-1)
    return combined.masked_fill(main < share * main.amax(-1, keepdim=True), -torch.inf)


def kl(p, q):
    return (p * (p.log() - q.log())).sum(-1)


def dola(family, new):
    found = Pass(family, new)
    last = found.logits.double().softmax(-1)
    model = model_of(family)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    early = found.exits[tied].double().softmax(-1)  # of two layers one is a candidate
    return cut((last / early).log(), found.logits, 0.1)


def dcla(family, new):
    before = []

    def hook(layer):
        def change(_, args, output):
            states = output[0] if isinstance(output, tuple) else output
            if layer == 0:
                before.clear()
            else:  # of two layers only one lies before
                reference = before[0]
                cosine = (states * reference).sum(-1) / states.norm(dim=-1) / reference.norm(dim=-1)
                mixed = 0.82 * states + 0.18 * reference
                states = torch.where((cosine < 0.83)[..., None], mixed, states)
            before.append(states)
            return (states, *output[1:]) if isinstance(output, tuple) else states

        return change

    return Pass(family, new, hooks=[hook]).logits


def dfd(family, new):
    found = Pass(family, new)
    distributions = [found.logits.double().softmax(-1), found.exits[1].double().softmax(-1)]
    rows = []
    for row, logits in enumerate(found.logits):
        kept = distributions[0][row] > 0.1 * distributions[0][row].max()
        p, q = (
            distribution[row][kept] / distribution[row][kept].sum()
            for distribution in distributions
        )
        rows.append(logits / (1.1 * 0.5 ** (float(kl(p, q)) / 0.5)))
    return torch.stack(rows)


def scaled(family, new, weight, rows):
    """Scores of image keys times ``weight`` for the chosen queries."""
    inputs = alone(family)
    prompt = inputs["input_ids"].shape[1]

    def change(scores, layer):
        images = images_of(inputs, scores.shape[-1])
        queries = scores[:, :, rows(prompt)]
        scores[:, :, rows(prompt)] = torch.where(images, queries * weight, queries)
        return scores

    return Pass(family, new, change=change).logits


def last_prompt(prompt):
    return slice(prompt - 1, prompt)


def scalingvis(family, new):
    return scaled(family, new, 3.0, last_prompt)


def adaptvis(family, new):
    unsure = Pass(family, []).logits[0].softmax(-1).max() < THRESHOLD
    return scaled(family, new, 0.2 if unsure else 3.0, last_prompt)


def without_images(inputs):
    kept = inputs["input_ids"][0] != IMAGE
    return {
        name: value[:, kept]
        for name, value in inputs.items()
        if name in ("input_ids", "attention_mask", "token_type_ids")
    }


def pai(family, new):
    inputs = alone(family)
    prompt = inputs["input_ids"].shape[1]

    def change(scores, layer):
        images = images_of(inputs, scores.shape[-1])
        distribution = scores[:, :, prompt - 1 :]
        scores[:, :, prompt - 1 :] = distribution + 2.0 * distribution.abs() * images
        return scores

    main = Pass(family, new, change=change).logits
    other = Pass(family, new, inputs=without_images(inputs)).logits.log_softmax(-1)
    return cut(1.5 * main.log_softmax(-1) - 0.5 * other, main, 0.1)


def flipped(values, draw):
    """Instead of noise, what an oracle can repeat."""
    return -values


def flipped_pixels(inputs):
    return {k: -v if k == "pixel_values" else v for k, v in inputs.items()}


def only_images(inputs):
    kept = inputs["input_ids"][0] == IMAGE
    kept[-1] = True
    by_token = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    return {k: v[:, kept] if k in by_token else v for k, v in inputs.items()}


def conscious_gaze(family, new):
    inputs = alone(family)
    prompt = inputs["input_ids"].shape[1]
    both = Pass(family, new).logits
    words = Pass(family, new, inputs=flipped_pixels(inputs)).logits
    image = Pass(family, new, inputs=only_images(inputs)).logits
    neither = Pass(family, new, inputs=flipped_pixels(only_images(inputs))).logits
    interaction = both - image - words + neither
    variance = [i[b.topk(6).indices].var() for i, b in zip(interaction, both, strict=True)]
    gate = torch.stack(variance) > SENSED
    GATES[family] = gate.tolist()

    def change(scores, layer):
        if layer not in layer_range((5 / 31, 18 / 31), 2):
            return scores
        images = images_of(inputs, scores.shape[-1])
        distribution = scores[:, :, prompt - 1 :]
        boost = 2.0 * distribution.abs().mean(1, keepdim=True) * images * gate[:, None]
        scores[:, :, prompt - 1 :] = distribution + boost
        return scores

    distribution = Pass(family, new, change=change).logits
    strong = interaction.var(-1, keepdim=True) >= SENSED
    return cut(distribution + interaction * strong, distribution, 0.1)


def dagcd(family, new):
    inputs = alone(family)
    prompt = inputs["input_ids"].shape[1]
    found = Pass(family, new, change=lambda scores, layer: scores)
    images = images_of(inputs, prompt).nonzero()[:, 0].tolist()
    head = uncached.adapter_for(model_of(family)).head
    words = [int(head(found.last[column]).argmax()) for column in images]
    rows = []
    for row, logits in enumerate(found.logits):
        distribution = logits.softmax(-1)
        most_likely = set(distribution.topk(10).indices.tolist())
        usage = torch.zeros_like(distribution)
        for weights in found.weights.values():
            for head_weights in weights[:, prompt - 1 + row]:
                ratio = {}
                for word in set(words):
                    own = [head_weights[c] for c, w in zip(images, words, strict=True) if w == word]
                    ratio[word] = sum(own) / len(own)
                looked = sum(ratio.values())  # none, where a window ends after the images
                for word, value in ratio.items():
                    usage[word] += value / looked if looked and word in most_likely else 0
        entropy = -(distribution * distribution.log()).sum() / torch.tensor(len(distribution)).log()
        if usage.sum() > 0:
            distribution = distribution + 4.0 * entropy * usage / usage.sum()
        rows.append(distribution.log())
    return torch.stack(rows)


THRESHOLD = 0.4
SENSED = 3.0
GATES = {}
TEXT = {
    "dola": (lambda: DoLa(EARLY), dola),
    "dcla": (lambda: DCLA(tau=0.83), dcla),
    "dfd": (lambda: DFD(sigma=0.5), dfd),
}
VISION = {
    **TEXT,
    "scalingvis": (lambda: ScalingVis(3.0), scalingvis),
    "adaptvis": (lambda: AdaptVis(0.2, 3.0, THRESHOLD), adaptvis),
    "pai": (lambda: PAI(2.0, 1.5), pai),
    "dagcd": (lambda: DAGCD(layers=EARLY), dagcd),
}


def gaze():
    guide = ConsciousGaze(2.0, SENSED, candidates=6, update=True, update_from=SENSED)
    for spec in guide.branches:
        if "change" in spec.transform_options:
            spec.transform_options["change"] = flipped
    return guide


VISION["conscious_gaze"] = (gaze, conscious_gaze)
CASES = [
    *[(family, method) for family in VISION_FAMILIES for method in VISION],
    *[(family, method) for family in TEXT_FAMILIES for method in TEXT],
]


def decoded(family, decoder, inputs=None, **options):
    options = {"max_new_tokens": LENGTH, "do_sample": False, **options}
    return mmdecode.generate(
        model_of(family), decoder=decoder, **options, **(inputs or inputs_of(family))
    )


@functools.cache
def undrafted(family, method, do_sample):
    """Tokens of all rows and the distributions they were chosen by."""
    make, _ = VISION[method]
    found = decoded(
        family,
        Decoder(guide=make(), seed=SEED),
        do_sample=do_sample,
        output_logits=False,
        output_scores=not do_sample,
        return_dict_in_generate=True,
    )
    return found.sequences[:, -LENGTH:], found.scores


def close(found, expected):
    excluded = torch.isneginf(expected)
    assert torch.equal(torch.isneginf(found), excluded)
    distributions = [
        distribution.float().masked_fill(excluded, 0.0) for distribution in (found, expected)
    ]
    torch.testing.assert_close(*distributions, atol=2e-3, rtol=1e-4)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("family", "method"), CASES)
def test_distributions_are_those_of_uncached_passes(family, method):
    make, formula = VISION[method]
    tokens, distributions = undrafted(family, method, do_sample=False)
    distributions = torch.stack(distributions, 1)
    row = tokens[0].tolist()
    known = row.index(IMAGE) if IMAGE in row else LENGTH - 1  # a pass would look for its image
    assert known >= 1
    expected = formula(family, row[:known])
    if method == "dagcd":  # distributions are unnormalised
        expected, distributions = expected.log_softmax(-1), distributions.log_softmax(-1)
    close(distributions[0, : known + 1], expected)
    single = decoded(family, Decoder(guide=make(), seed=SEED), alone(family))
    assert single[0, -LENGTH:].tolist() == row


def chain(rows):
    return drafts.Known(rows, length=4, wrong_at=[2, 6])


DRAFTED = [
    *[(*case, HiddenPath, False) for case in CASES],
    *[(*case, chain, True) for case in CASES],
    *[("llava", method, chain, False) for method in VISION],
    *[("llava", method, HiddenPath, True) for method in VISION],
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("family", "method", "draft", "do_sample"), DRAFTED)
def test_drafts_change_no_token(family, method, draft, do_sample):
    make, _ = VISION[method]
    tokens, _ = undrafted(family, method, do_sample)
    decoder = Decoder(draft(tokens.tolist()), make(), seed=SEED)
    found = decoded(family, decoder, do_sample=do_sample)
    assert found[:, -LENGTH:].tolist() == tokens.tolist()
    assert decoder.stats.accepted > 0


def test_the_gate_opens_and_closes_on_most_families():
    for family in FAMILIES:
        if family not in GATES:
            test_distributions_are_those_of_uncached_passes(family, "conscious_gaze")
    mixed = [family for family, gate in GATES.items() if len(set(gate)) == 2]
    assert len(mixed) >= len(FAMILIES) - 2, GATES
