"""What the audit forgives, and to the token no more: limits, cuts, edges, wrappers, recording."""

import functools

import pytest
import torch
from transformers import LlamaForCausalLM

import mmdecode
from mmdecode.accept.exact import SampleMatch
from mmdecode.decoder import Decoder
from mmdecode.draft.lookup import PromptLookup
from mmdecode.errors import InputError
from mmdecode.evaluation.audit.audit import audit
from mmdecode.evaluation.audit.plain import UNCUT, Case, Plain, Tap
from mmdecode.evaluation.stats.draws import FEWEST
from mmdecode.guide.cfg import CFG
from tests.support import tiny_models

VOCAB = 300


@functools.cache
def model_of(dtype="float32"):
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64}
    model = tiny_models.llama(**sizes, eos_token_id=None, initializer_range=0.3)
    return model.to(getattr(torch, dtype))


def cases(count=1, rows=1):
    found = []
    for index in range(count):
        ids = torch.randint(VOCAB, (rows, 5), generator=torch.Generator().manual_seed(index))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found.append(Case(name=f"prompt {index}", inputs=inputs))
    return found


def judge(row, plain=None, sample=False, **options):
    (case,) = cases()
    return audit(model_of(), [case], tokens={case.name: row}, sample=sample, plain=plain, **options)


class Measured(Plain):
    """Of known noise."""

    def noise(self, case):
        return self.known


# Rows of another limit


@functools.cache
def ending():
    """What plain decoding gives, and its end-of-sequence token."""
    own = Plain(model_of(), max_new_tokens=40).own(cases()[0]).tokens
    index = next(index for index in range(12, 40) if own[index] not in own[:index])
    return own[: index + 1], {"eos_token_id": own[index]}


def test_a_row_longer_than_the_limit_of_the_call_is_judged_to_its_end():
    row, options = ending()
    report = judge(row, max_new_tokens=8, **options)
    assert report.verdict == "passes", report.words
    wrong = [*row[:-2], (row[-2] + 1) % VOCAB]
    report = judge(wrong, max_new_tokens=8, **options)
    assert report.verdict == "fails"
    assert report.judged[0].fault.position == len(row) - 2


def test_a_row_that_goes_on_after_its_end_fails():
    row, options = ending()
    report = judge([*row, 5, 6], max_new_tokens=8, **options)
    assert report.verdict == "fails"
    assert (report.judged[0].fault.position, report.judged[0].fault.plain) == (len(row), None)


def test_a_row_cut_by_a_limit_is_doubted_until_the_limit_is_given():
    row, options = ending()
    row = row[:-3]
    for limit in (5, 40):
        report = judge(row, max_new_tokens=limit, **options)
        assert report.verdict == "inconclusive", report.words
        assert f"prompt 0 after {len(row)} tokens" in report.words
        assert (report.judged[0].cut, report.judged[0].fault) == (True, None)
    report = judge(row, max_new_tokens=len(row), **options)
    assert report.verdict == "passes", report.words
    assert report.identical


def test_sampled_rows_may_be_longer_than_the_limit_of_the_call():
    torch.manual_seed(0)
    found = cases(4)
    rows = {}
    for case in found:
        ids = model_of().generate(
            **case.inputs, do_sample=True, top_k=0, max_new_tokens=60, pad_token_id=0
        )
        rows[case.name] = ids[0, 5:].tolist()
    report = audit(model_of(), found, tokens=rows, sample=True, max_new_tokens=10, top_k=0)
    assert report.tokens >= FEWEST
    assert report.verdict == "passes", report.words


# What rounding explains


def test_a_gap_of_two_roundings_is_forgiven_where_no_logits_are_at_hand():
    own = Plain(model_of(), max_new_tokens=24).own(cases()[0])
    best = own.scores.topk(2, -1)
    index = int((best.values[:, 0] - best.values[:, 1]).argmax())
    row = [*own.tokens[:index], int(best.indices[index, 1])]
    gap = float(best.values[index, 0] - best.values[index, 1])
    for share, verdict in ((0.51, "inconclusive"), (0.49, "fails")):
        plain = Measured(model_of(), max_new_tokens=len(row))
        plain.known = share * gap
        report = judge(row, plain)
        assert report.verdict == verdict, report.words
        assert report.judged[0].first.explained == (share > 0.5)


@pytest.mark.parametrize(
    "cut", [{"top_k": 5}, {"top_p": 0.6, "top_k": 0}, {"min_p": 0.2, "top_k": 0}]
)
def test_a_sampled_token_on_the_edge_of_the_cut_is_forgiven(cut):
    torch.manual_seed(1)
    (case,) = cases()
    options = {**cut, "max_new_tokens": 12}
    ids = model_of().generate(**case.inputs, do_sample=True, pad_token_id=0, **options)
    row = ids[0, 5:].tolist()
    plain = Measured(model_of(), **options)
    raw = plain.replay(case, row).logits[11]
    tap = Tap(None)
    plain.run(case, tap, sample=True)
    allowed = tap.target_logits(row[:11], raw).isfinite()
    row[11] = int(raw.masked_fill(allowed, -torch.inf).argmax())  # the first that is cut off
    gap = float(raw[allowed].min() - raw[row[11]])
    plain.known = 0.51 * gap if cut.get("top_k") else gap
    report = judge(row, plain, sample=True)
    assert report.judged[0].fault is None, report.words
    plain.known = 0.01 * gap
    report = judge(row, plain, sample=True)
    assert report.verdict == "fails"
    assert report.judged[0].fault.position == 11


def test_a_token_that_a_processor_forbids_is_not_forgiven():
    own = Plain(model_of(), max_new_tokens=12).own(cases()[0])
    best = own.tokens[11]
    options = {"max_new_tokens": 12, "suppress_tokens": [best], "top_k": 5}
    plain = Measured(model_of(), **options)
    plain.known = 1.0
    report = judge(own.tokens, plain, sample=True)
    fault = report.judged[0].fault
    assert report.verdict == "fails"
    assert fault.position == own.tokens.index(best)


class Wobbly(CFG):
    """Rounds in blocks as it does not in single tokens."""

    def apply(self, constants, call, proposal, outputs):
        distribution = super().apply(constants, call, proposal, outputs)
        return distribution + 0.05 * torch.arange(VOCAB).sin() if proposal.size else distribution


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("dtype", "guide"), [("bfloat16", None), ("float32", Wobbly(1.5))], ids=["plain", "guided"]
)
def test_drafts_under_top_k_pass_where_rounding_lets_tokens_in(dtype, guide):
    decoder = Decoder(PromptLookup(6, ngram=1), guide, accept=SampleMatch(), seed=7)
    options = {"top_k": 4, "temperature": 2.0, "max_new_tokens": 40}
    report = audit(
        model_of(dtype), cases(4), decoder, sample=True, draws=6, most_guided=torch.inf, **options
    )
    forgiven = [item for item in report.judged if item.worst_gap == torch.inf]
    assert forgiven, "no token was on the edge"
    assert report.verdict == "passes", report.words


# What is really audited


class BrokenUnlessRecorded(Decoder):
    """As a captured round may be: what records is not captured."""

    def __call__(self, *args, generation_config, **inputs):
        output = super().__call__(*args, generation_config=generation_config, **inputs)
        if not generation_config.output_logits:
            output[0, -3] = (output[0, -3] + 1) % VOCAB
        return output


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "coupled"])
def test_a_fault_that_recording_hides_is_caught(sample):
    decoder = BrokenUnlessRecorded(PromptLookup(4), seed=0)
    options = {"max_new_tokens": 16, "top_k": 0} if sample else {"max_new_tokens": 16}
    report = audit(model_of(), cases(), decoder, sample=sample, **options)
    assert report.verdict == "fails", report.words
    assert report.judged[-1].fault.position == 13
    assert report.judged[0].fault is None


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_model_with_an_adapter_of_peft_is_audited():
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    base = LlamaForCausalLM(model_of().config).eval()
    base.load_state_dict(model_of().state_dict())
    model = peft.get_peft_model(base, config).eval()
    report = audit(model, cases(), Decoder(PromptLookup(4)), max_new_tokens=16)
    assert report.verdict == "passes", report.words
    assert report.identical
    without = Plain(model_of(), max_new_tokens=16).own(cases()[0]).tokens
    report = audit(model, cases(), tokens={"prompt 0": without}, max_new_tokens=16)
    assert report.verdict == "fails", "the adapter changes nothing"


def test_a_generate_that_says_no_logits_is_refused():
    plain = Plain(model_of(), generate=lambda **given: torch.zeros(1, 8))
    with pytest.raises(InputError, match=r"Tensor with 0 logits.*generate="):
        judge([1, 2], plain)


def test_a_case_of_several_rows_is_refused():
    with pytest.raises(InputError, match="a case has 2 rows; expected one"):
        audit(model_of(), cases(rows=2), Decoder(), max_new_tokens=4)
    with pytest.raises(InputError, match="a case has 2 rows; expected one"):
        audit(model_of(), cases(rows=2), tokens={"prompt 0": [1]}, max_new_tokens=4)


def test_no_sampling_option_of_a_checkpoint_truncates_the_whole_distribution():
    model = model_of()
    stock = model.generation_config
    filters = {"top_k": 3, "top_p": 0.5, "min_p": 0.5, "typical_p": 0.5}
    filters |= {"epsilon_cutoff": 0.1, "eta_cutoff": 0.1}
    model.generation_config = type(stock)(**stock.to_dict() | filters)
    try:
        for options, left in (({}, 3), (UNCUT, VOCAB)):
            tap = Tap(None)
            Plain(model, max_new_tokens=4, **options).run(cases()[0], tap, sample=True)
            distribution = tap.target_logits([], torch.arange(VOCAB) / 100.0)
            assert int(distribution.isfinite().sum()) <= left
        assert bool(distribution.isfinite().all())
    finally:
        model.generation_config = stock


def test_audit_is_called_by_the_name_of_its_package():
    assert mmdecode.evaluation.audit is audit
