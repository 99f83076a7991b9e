"""The audit on trained models: right decoders pass, planted mistakes are caught, doubt is said."""

import functools
import json
from dataclasses import replace

import pytest
import torch
from transformers import GenerationMixin, LogitsProcessor

from mmdecode.accept import exact, follow
from mmdecode.accept.exact import Coupled, SampleMatch
from mmdecode.adapters.audio.whisper import WhisperAdapter
from mmdecode.asr.transcriber import load
from mmdecode.cli.audit import read_tokens, speech_cases
from mmdecode.decoder import Decoder
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.engine.noise import Noise
from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.audit.audit import audit
from mmdecode.evaluation.audit.plain import Case, Plain
from mmdecode.evaluation.stats.draws import FEWEST, p_of_draws
from mmdecode.guide.cfg import CFG
from mmdecode.testing.drafts import Known
from mmdecode.zoo.speech import speech_test
from tests.support import seams, tiny_models
from tests.support.seams import edited, without_prefix

MODEL, HEADS = "zoo:whisper-synth", "zoo:whisper-synth-medusa"


@functools.cache
def trained(dtype="float32"):
    model, processor = load(MODEL, "cpu", dtype)
    clips = sorted(speech_test(), key=lambda clip: len(clip.text))
    clips = [clips[len(clips) // 2], clips[-1]]
    found = [next(speech_cases(model, processor, c.name, str(c.path))) for c in clips]
    return model, found


@functools.cache
def plain_of(dtype="float32", options=()):
    model, _ = trained(dtype)
    generate = functools.partial(GenerationMixin.generate, model)
    return Plain(model, generate, keep=True, **dict(options))


@functools.cache
def heads():
    draft = Medusa.from_pretrained(HEADS)
    draft.nodes = 12  # as on a GPU: a tree, not a chain
    return draft


def known(dtype="float32"):
    """Drafts what plain decoding gives for the first case, its end inside a block, and more."""
    own = plain_of(dtype).own(trained(dtype)[1][0]).tokens
    length = next(n for n in (4, 5) if (len(own) - 2) % (n + 1) < n)
    return Known([[*own, 5, 6, 7, 8]], length)


def judge(draft, dtype="float32", sample=False, options=(), guide=None, accept="auto", clips=1):
    model, found = trained(dtype)
    decoder = Decoder(draft, guide, accept, seed=3)
    plain = plain_of(dtype, tuple(dict(options).items()))
    return audit(model, found[:clips], decoder, sample=sample, plain=plain)


# Right decoders


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "coupled"])
def test_a_right_decoder_passes(sample, dtype):
    report = judge(heads(), dtype, sample, clips=2)
    assert report.verdict == "passes", report.words
    assert report.words.startswith("passes")
    assert report.dtype == dtype
    assert report.tokens > 20
    assert {"float32": 1e-8, "bfloat16": 1e-3}[dtype] < report.noise < report.gap_quantile
    if dtype == "float32":
        assert report.identical
        assert not any(item.first for item in report.judged)


class LastToken(LogitsProcessor):
    """Of unknown type: prefers what the last token points at."""

    def __call__(self, input_ids, scores):
        order = torch.arange(scores.shape[1])
        return scores + 6.0 * ((input_ids[:, -1:] * 7 + order) % 5 == 0)


def with_processor(kind):
    """The first case and the options that put a processor into its distribution."""
    case = trained()[1][0]
    if kind == "unknown":
        processors = [*case.inputs["logits_processor"], LastToken()]
        inputs = {**case.inputs, "logits_processor": processors, "max_length": 28}
        return replace(case, name="biased", inputs=inputs), ()
    # a token of the text ends it, but not before the place where it first stands
    own = plain_of().own(case).tokens
    position = next(p for p in range(3, 8) if own[p] not in own[:p] and own[p] < own[0])
    return case, (("eos_token_id", own[position]), ("min_new_tokens", position))


def judge_processor(kind):
    case, options = with_processor(kind)
    plain = plain_of(options=options)
    own = plain.own(case).tokens
    assert len(set(own)) > 3
    return audit(trained()[0], [case], Decoder(Known([own], length=9)), plain=plain)


@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_processors_are_part_of_the_distribution(kind):
    report = judge_processor(kind)
    assert report.verdict == "passes", report.words
    assert report.identical


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_guided_decoder_is_held_to_our_own_loop(dtype):
    report = judge(heads(), dtype, guide=CFG(1.5))
    assert report.verdict == "passes", report.words
    assert (report.guide, report.reference) == ("CFG", "our loop without a draft")
    assert all(item.same_as_generate is None for item in report.judged)


def test_the_audited_decoder_is_left_as_it_was():
    decoder = Decoder(heads(), seed=None)
    model, found = trained()
    audit(model, found[:1], decoder, sample=True, plain=plain_of())
    assert decoder.seed is None
    assert decoder.stats.tokens == 0


# Mistakes, planted one at a time


def positions(change):
    """Positions after the prompt are changed; what was learned for them is looked up elsewhere."""

    def mutate(patch):
        sound = WhisperAdapter.forward

        def forward(self, tokens, mask, positions, past):
            late = positions[:, :1] > 3
            return sound(self, tokens, mask, torch.where(late, change(positions), positions), past)

        patch.setattr(WhisperAdapter, "forward", forward)

    return mutate


def siblings(patch):
    seams.BLOCK_MASK.plant(patch, seams.siblings_see_each_other)


def commit(change):
    def changed(sound):
        return lambda self, count, path=None: sound(self, *change(count, path))

    def mutate(patch):
        seams.COMMIT_TO_CACHE.plant(patch, changed)

    return mutate


def rule(old, new):
    def mutate(patch):
        patch.setattr(exact, "follow", edited(follow.follow, old, new))

    return mutate


def one_too_many(patch):
    """Where a drafted node hangs below the accepted path, it is accepted too."""
    sound = exact.follow

    def generous(proposal, target, call, choose):
        outcome = sound(proposal, target, call, choose)
        if not proposal.size:
            return outcome
        parents, _, _ = proposal.structure()
        count = outcome.num_accepted
        path = torch.nn.functional.pad(outcome.path, (0, 1), value=-1)
        end = torch.where(count > 0, path.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0], -1)
        below = (parents == end[:, None]) & (proposal.tokens >= 0)
        node = below.long().argmax(1)
        more = below.any(1)
        path = path.scatter(1, count[:, None], torch.where(more, node, -1)[:, None])
        row = torch.where(more, node + 1, end + 1)
        token = target.at(row).argmax(-1)
        return replace(outcome, path=path, num_accepted=count + more, next_token=token)

    patch.setattr(exact, "follow", generous)


def ends_in_the_last_token_only(patch):
    seams.CUT.plant(patch, seams.ends_in_the_last_token_only)


def ends_early(patch):
    def early(sound):
        def cut(self, call, block, count):
            count, ended = sound(self, call, block, count)
            return count, ended | (call.rows.length > 8)

        return cut

    seams.CUT.plant(patch, early)


def at_the_roots_length(patch):
    seams.NODES.plant(patch, seams.nodes_have_the_roots_length)


CERTAIN = {
    "draft_is_trusted": rule("proposal.tokens == wanted", "proposal.tokens >= 0"),
    "one_token_too_many": one_too_many,
    "bonus_of_the_root": rule("end[:, None]", "(end * 0)[:, None]"),
    "bonus_of_the_row_before": rule("end[:, None]", "(end - 1).clamp_min(0)[:, None]"),
    "end_inside_a_block_is_missed": ends_in_the_last_token_only,
    "ends_early": ends_early,
}
SUBTLE = {
    "positions_off_by_one": positions(lambda position_ids: position_ids + 1),
    "positions_by_slot": positions(
        lambda position_ids: (
            position_ids[:, :1] + torch.arange(position_ids.shape[1])
        )  # not by depth
    ),
    "siblings_see_each_other": siblings,
    "nodes_are_not_moved": commit(lambda count, path: (count, None)),
    "last_node_is_not_kept": commit(lambda count, path: (count - (count > 1).long(), path)),
    "root_is_not_kept": commit(lambda count, path: ((count - 1).clamp_min(0), path)),
}
"""What a well-trained model may shrug off: then no token changes, but the logits do."""


def noticed(report):
    """Caught, or no token has changed and the report remarks upon the logits."""
    if report.identical:
        assert "points to a fault" in report.words, report.words
    else:
        caught(report)


def caught(report):
    """A token changed, and the audit says so."""
    assert report.verdict == "fails", report.words
    assert any(item.fault for item in report.judged)
    assert not report.identical


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mutant", "dtype"),
    [
        *((mutant, "float32") for mutant in CERTAIN),
        ("draft_is_trusted", "bfloat16"),
        ("one_token_too_many", "bfloat16"),
        ("ends_early", "bfloat16"),
    ],
)
def test_a_mistake_in_greedy_decoding_is_caught(mutant, dtype, monkeypatch):
    draft = heads() if "end_inside" not in mutant else known(dtype)
    CERTAIN[mutant](monkeypatch)
    caught(judge(draft, dtype))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mutant", SUBTLE)
def test_a_mistake_in_positions_masks_or_slots_is_noticed(mutant, monkeypatch):
    SUBTLE[mutant](monkeypatch)
    noticed(judge(heads(), sample=mutant in ("siblings_see_each_other", "nodes_are_not_moved")))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mutant", "kind"), [(without_prefix, "unknown"), (at_the_roots_length, "known")]
)
def test_processors_with_the_wrong_prefix_are_caught(mutant, kind, monkeypatch):
    mutant(monkeypatch)
    caught(judge_processor(kind))


def noise_by_round(patch):
    """Another draft, other tokens."""
    old, new = "Role.TARGET, ", "Role.TARGET, trial=call.rows.rounds, "
    patch.setattr(Coupled, "__call__", edited(Coupled.__call__, old, new))


def unkeyed_noise(patch):
    def sample(self, scores, positions, role, trial=None, index=None):
        return (scores - (-torch.rand(scores.shape).log()).log()).argmax(-1)

    patch.setattr(Noise, "sample", sample)


def noise_of_the_root(patch):
    sound = exact.keyed

    def keyed(*args, **kwargs):
        choose = sound(*args, **kwargs)
        return lambda scores, depths: choose(scores, depths * 0)

    patch.setattr(exact, "keyed", keyed)


COUPLED = {
    "noise_by_round": noise_by_round,
    "noise_without_a_key": unkeyed_noise,
    "noise_of_the_root": noise_of_the_root,
    "draft_is_trusted": CERTAIN["draft_is_trusted"],
    "bonus_of_the_root": CERTAIN["bonus_of_the_root"],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mutant", COUPLED)
def test_a_mistake_in_coupled_sampling_is_caught(mutant, monkeypatch):
    torch.manual_seed(0)
    COUPLED[mutant](monkeypatch)
    # warm, or a well-trained model does not listen to noise that is a little different
    options = {"temperature": 1.5, "top_k": 0} if mutant == "noise_without_a_key" else {}
    caught(judge(heads(), sample=True, options=options))


class RootGuide(CFG):
    """Evaluates the other branch at the root alone."""

    def apply(self, constants, call, proposal, outputs):
        other = outputs["unconditional"]
        outputs = {**outputs, "unconditional": replace(other, logits=other.logits[:, :1])}
        return super().apply(constants, call, proposal, outputs)


def test_a_guide_that_reads_the_root_prefix_is_caught():
    caught(judge(heads(), guide=RootGuide(3.0)))


def test_a_heuristic_rule_is_not_called_lossless():
    own = plain_of().own(trained()[1][0]).tokens
    draft = Known([own], length=4, wrong_at=[3])
    caught(judge(draft, accept="typical:epsilon=0.0,delta=0.0"))


# Tokens from elsewhere


def rows():
    return {case.name: list(plain_of().own(case).tokens) for case in trained()[1]}


def judge_rows(found, dtype="float32", **options):
    model, found_cases = trained(dtype)
    return audit(model, found_cases, tokens=found, plain=plain_of(dtype), **options)


def test_tokens_of_the_model_pass_with_and_without_their_end():
    assert judge_rows(rows()).verdict == "passes"
    assert judge_rows(rows()).identical
    report = judge_rows({name: row[:-1] for name, row in rows().items()})
    assert report.verdict == "passes", report.words


def test_float32_tokens_pass_on_the_same_model_in_bfloat16():
    report = judge_rows(rows(), "bfloat16")
    assert report.verdict == "passes", report.words
    assert not any(item.fault for item in report.judged)


@pytest.mark.parametrize(("position", "dtype"), [(1, "float32"), (-3, "float32"), (6, "bfloat16")])
def test_one_edited_token_fails_at_its_position(position, dtype):
    found = trained(dtype)[1]
    own = {case.name: list(plain_of(dtype).own(case).tokens) for case in found}
    name = found[1].name
    position %= len(own[name])
    distribution = plain_of(dtype).own(found[1]).scores[position]
    other = int(distribution.argsort(descending=True)[20])  # likely enough to look innocent
    own[name][position] = other
    report = judge_rows(own, dtype)
    caught(report)
    fault = next(item.fault for item in report.judged if item.case == name)
    assert (fault.position, fault.token) == (position, other)
    assert f"{name} at position {position} has token {other}" in report.words


def test_a_row_that_is_cut_short_is_doubted_and_one_that_goes_on_fails():
    name = trained()[1][0].name
    own = rows()
    report = judge_rows({name: own[name][:-4]})
    assert report.verdict == "inconclusive"
    assert report.judged[0].cut
    report = judge_rows({name: own[name] + [5]})
    caught(report)
    assert report.judged[0].fault.plain is None


def test_files_of_tokens_are_read_in_every_form(tmp_path):
    names, lists = ["a/x.wav", "y.wav"], [[1, 2], [3]]
    objects = [{"source": "x.wav", "tokens": [1, 2]}, {"name": "y.wav", "tokens": [3]}]
    forms = [
        json.dumps(lists),
        json.dumps(dict(zip(names, lists, strict=True))),
        "\n".join(map(json.dumps, lists)),
        "\n".join(map(json.dumps, objects[::-1])),
    ]
    for text in forms:
        (tmp_path / "t").write_text(text)
        assert read_tokens(tmp_path / "t", names) == dict(zip(names, lists, strict=True)), text


def test_a_base_name_stands_for_its_path_only_where_it_is_the_only_one(tmp_path):
    names = ["a/x.wav", "b/x.wav", "c/y.wav"]
    for row, message in (("x.wav", "may mean a/x.wav or b/x.wav"), ("z.wav", "no input")):
        (tmp_path / "t").write_text(json.dumps({row: [1]}))
        with pytest.raises(InputError, match=message):
            read_tokens(tmp_path / "t", names)
    (tmp_path / "t").write_text(json.dumps({"b/x.wav": [1], "y.wav": [2]}))
    assert read_tokens(tmp_path / "t", names) == {"b/x.wav": [1], "c/y.wav": [2]}
    (tmp_path / "t").write_text(json.dumps({"x.wav": [1]}))
    assert read_tokens(tmp_path / "t", ["x.wav", "b/x.wav"]) == {"x.wav": [1]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ('[{"name": "z", "tokens": [1]}]', "z is no input"),
        ('[{"name": "x", "tokens": [1]}, {"name": "x", "tokens": [1]}]', "x is given twice"),
        ('[{"name": "x", "tokens": "hello"}]', "not a list of token ids"),
        ("[[1], [2], [3]]", "row 3 is no input"),
    ],
)
def test_a_file_that_cannot_be_judged_is_refused(text, message, tmp_path):
    (tmp_path / "t").write_text(text)
    with pytest.raises(InputError, match=message):
        read_tokens(tmp_path / "t", ["x", "y"])


def test_tokens_that_are_no_ids_of_the_model_are_refused():
    name = trained()[1][0].name
    for row in ([], [-1], [10**6]):
        with pytest.raises(InputError, match="expected one or more ids"):
            judge_rows({name: row})


def test_calls_that_make_no_sense_are_refused():
    model, found = trained()
    with pytest.raises(OptionError, match="one of the two"):
        audit(model, found)
    with pytest.raises(OptionError, match="next to plain"):
        audit(model, found, Decoder(), plain=plain_of(), max_new_tokens=3)
    with pytest.raises(InputError, match="unique names"):
        audit(model, [*found, *found], Decoder())
    with pytest.raises(InputError, match="nobody, but there is no such case"):
        audit(model, found, tokens={"nobody": [1]}, plain=plain_of())


# Where nothing can be said, and where only statistics can


@functools.cache
def untrained(dtype="bfloat16", layers=6, vocab=2000):
    model = tiny_models.llama(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        eos_token_id=None,
        initializer_range=0.3,
    ).to(getattr(torch, dtype))
    found = []
    for index in range(4):
        ids = torch.randint(vocab, (1, 5), generator=torch.Generator().manual_seed(index))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found.append(Case(name=f"prompt {index}", inputs=inputs))
    return model, found


def test_an_untrained_model_in_half_precision_is_inconclusive():
    model, found = untrained()
    report = audit(model, found[:2], Decoder(PromptLookup(4)), max_new_tokens=24)
    assert report.verdict == "inconclusive", report.words
    assert report.noise > report.gap_quantile
    model, found = untrained("float32")
    report = audit(model, found[:1], Decoder(PromptLookup(4)), max_new_tokens=24)
    assert report.verdict == "passes", report.words


def test_a_near_tie_is_rounding_and_a_larger_gap_is_not():
    model, found = untrained()
    own = Plain(model, max_new_tokens=24).own(found[0])
    best = own.scores.topk(2, -1)
    lead = (best.values[:, 0] - best.values[:, 1])[8:]

    class Measured(Plain):
        def noise(self, case):
            return float(lead.median())

    near = lead.masked_fill(lead == 0, torch.inf)
    for position, explained in ((int(near.argmin()) + 8, True), (int(lead.argmax()) + 8, False)):
        row = [*own.tokens[:position], int(best.indices[position, 1])]
        plain = Measured(model, max_new_tokens=position + 1)
        report = audit(model, found[:1], tokens={found[0].name: row}, plain=plain)
        (item,) = report.judged
        assert (item.first.position, item.first.explained) == (position, explained)
        assert (report.verdict == "fails") == (not explained)
        assert item.flips == explained


SAMPLED = {"max_new_tokens": 20, "temperature": 1.0, "top_k": 0}


def judge_samples(rule, draws=3):
    model, found = untrained("float32", 1, 300)
    decoder = Decoder(PromptLookup(4, ngram=1), accept=rule, seed=1)
    return audit(model, found, decoder, sample=True, draws=draws, **SAMPLED)


@pytest.mark.slow
def test_a_sampling_rule_without_a_certificate_is_judged_by_statistics():
    report = judge_samples(SampleMatch())
    assert report.verdict == "passes", report.words
    assert report.p_value > 0.001
    assert report.tokens >= FEWEST
    assert "no proof" in report.words
    few = judge_samples(SampleMatch(), draws=1)
    assert few.verdict == "inconclusive", few.words


class Colder(SampleMatch):
    """Samples from a distribution of its own."""

    def __call__(self, proposal, target, call):
        sound = call.request.noise.sample

        class Quieter:
            def sample(self, scores, *args, **kwargs):
                return sound(scores / 0.6, *args, **kwargs)

        request = replace(call.request, noise=Quieter())
        return super().__call__(proposal, target, replace(call, request=request))


def test_a_sampling_rule_with_another_distribution_is_rejected():
    report = judge_samples(Colder())
    assert report.verdict == "fails", report.words
    assert report.p_value < 1e-4


def test_greedy_tokens_are_not_taken_for_samples():
    model, found = untrained("float32", 1, 300)
    plain = Plain(model, keep=True, **{**SAMPLED, "max_new_tokens": 80})
    greedy = {case.name: plain.own(case).tokens for case in found}
    report = audit(model, found, tokens=greedy, sample=True, plain=plain)
    assert report.verdict == "fails", report.words
    assert report.judged[0].same_as_generate is None


def test_the_p_value_of_draws_is_uniform_under_the_distribution_and_small_under_others():
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(2000, generator=generator).double()
    assert p_of_draws([(ranks, 3.0, 4.0)]) > 0.05
    assert p_of_draws([(ranks**1.5, 3.0, 4.0)]) < 1e-4
    assert p_of_draws([(ranks, 30.0, 4.0)]) < 1e-4
