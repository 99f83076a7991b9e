"""Checks of the parts that are given to a decoder."""

import sys

import pytest
import torch

import mmdecode as mm
from mmdecode import registry
from mmdecode.draft.adaptive import Adaptive
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.capabilities import DrafterCapabilities, RuleCapabilities
from mmdecode.engine.contracts import Requirements
from mmdecode.errors import IncompatibleError, MMDecodeError, OptionError
from mmdecode.testing.table import Table, TableAdapter, decode
from tests.support.plugins import install


@pytest.mark.parametrize(
    ("part", "given", "message"),
    [
        ("draft", 5, "draft=5 is no draft (no begin); give a name as 'mmdecode methods draft'"),
        ("draft", 0, "draft=0 is no draft"),
        ("draft", ["lookup"], "draft=['lookup'] is no draft"),
        ("draft", PromptLookup, "it is a class; make one"),
        ("guide", 5, "guide=5 is no guide"),
        ("guide", PromptLookup(), "is no guide (no neutral, apply)"),
        ("accept", 5, "accept=5 is no accept"),
        ("accept", None, "accept=None is no accept"),
        ("seed", "a", "seed='a'; expected a whole number"),
        ("seed", 1.5, "seed=1.5; expected a whole number"),
    ],
)
def test_what_is_no_part_of_a_decoder_is_refused(part, given, message):
    with pytest.raises(OptionError) as raised:
        mm.Decoder(**{part: given})
    assert message in str(raised.value)


def test_a_capability_that_does_not_exist_is_refused_with_the_one_that_was_meant():
    with pytest.raises(OptionError, match=r"'graph_saf'; did you mean 'graph_safe'\?"):
        DrafterCapabilities(graph_saf=True)
    with pytest.raises(OptionError, match=r"'drafter_invariance'; did you mean"):
        RuleCapabilities(drafter_invariance=True)


PLUGIN = """
from mmdecode import Drafter, DraftSession
from mmdecode.engine.capabilities import DrafterCapabilities
class Hasty(Drafter):
    capabilities = DrafterCapabilities(graph_saf=True)
    def begin(self, call, prefill):
        return DraftSession(call)
"""


def test_a_capability_misspelt_in_a_plugin_is_refused_with_the_plugin_and_what_was_meant(
    tmp_path, monkeypatch
):
    install(tmp_path, "hurry", {"mmdecode.draft": "hasty = hurry_mod:Hasty"}, hurry_mod=PLUGIN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    meant = (
        r"draft 'hasty' of hurry \(hurry_mod:Hasty\) .*no capability of DrafterCapabilities named "
        r"'graph_saf'; did you mean 'graph_safe'\?"
    )
    with pytest.raises(MMDecodeError, match=meant):
        mm.Decoder("hasty")
    with pytest.warns(RuntimeWarning, match=meant):
        registry.describe("draft")


def test_a_capability_that_is_not_declared_as_one_is_refused():
    with pytest.raises(OptionError, match=r"write capabilities = Draf\w+\(graph_safe=\.\.\.\)"):

        class Bare(mm.Drafter):
            graph_safe = True

    with pytest.raises(OptionError, match=r"Another.capabilities .* as DrafterCapabilities\("):

        class Another(mm.Drafter):
            capabilities = RuleCapabilities()

    with pytest.raises(OptionError, match=r"Method.capabilities is <function"):

        class Method(mm.Drafter):
            def capabilities(self):
                return DrafterCapabilities()

    class Late(mm.Drafter):
        def __init__(self):
            self.capabilities = {"graph_safe": True}

        def begin(self, call, prefill):
            """Nothing."""

    with pytest.raises(OptionError, match=r"Late.capabilities is \{'graph_safe': True\}"):
        mm.Decoder(Late())


def test_a_value_instead_of_a_method_is_refused():
    with pytest.raises(OptionError, match=r"Deep.needs is .*; write def needs\(self, adapter\)"):

        class Deep(mm.Drafter):
            needs = Requirements()


@pytest.mark.parametrize("session", [None, PromptLookup()])
def test_what_a_drafter_begins_that_is_no_session_is_refused(session):
    class Odd(mm.Drafter):
        def begin(self, call, prefill):
            return session

    with pytest.raises(OptionError, match=r"Odd.begin returned .* inherits from mmdecode.DraftSes"):
        decode(Table(8, seed=1), torch.ones(1, 2).long(), mm.Decoder(Odd()))


def test_a_method_of_a_session_that_is_nearly_one_of_its_base_is_refused():
    with pytest.raises(OptionError, match=r"Odd.observed is nothing .* DraftSession .*'observe'"):

        class Odd(mm.DraftSession):
            def observed(self, proposal, output, block):
                """Misspelt."""


@pytest.mark.parametrize(
    "second",
    [LayerSkip(exit_layer=1), Adaptive(LayerSkip(exit_layer=1))],
    ids=["itself", "inside of another"],
)
def test_a_drafter_that_cannot_be_composed_is_refused_with_both_sides(second):
    name = type(second).__name__
    with pytest.raises(
        IncompatibleError, match=rf"draft {name} does not fit FirstOf: .*; use lookup, source"
    ):
        FirstOf(PromptLookup(), second)


@pytest.mark.parametrize("make", [Adaptive, lambda given: FirstOf("lookup", given)])
def test_a_part_of_a_composite_that_is_no_drafter_is_refused(make):
    with pytest.raises(OptionError, match=r"draft=5 is no draft \(no begin\)"):
        make(5)
    with pytest.raises(mm.errors.UnknownNameError, match="did you mean 'lookup'"):
        make("lookupp")


def test_a_name_that_is_nearly_one_of_a_parts_base_is_refused():
    with pytest.raises(OptionError, match=r"Hasty.begins is nothing .*'begin'"):

        class Hasty(mm.Drafter):
            def begins(self, call, prefill):
                """Misspelt."""

    class Late(mm.Drafter):
        def __init__(self):
            self.capability = DrafterCapabilities(graph_safe=True)

        def begin(self, call, prefill):
            """Nothing."""

    with pytest.raises(OptionError, match=r"Late.capability is nothing .*'capabilities'"):
        mm.Decoder(Late())


def test_a_part_without_its_base_is_refused():
    class Alone:
        def begin(self, call, prefill):
            """Nothing."""

    with pytest.raises(OptionError, match=r"class Alone is no subclass of mmdecode\.Drafter"):
        mm.Decoder(Alone())


class Foreign:
    """Has what an adapter needs, and is none."""

    def __init__(self, model):
        self.model, self.vocab, self.num_layers = model, model.vocab, 2

    def prompt(self, call, spec):
        """Nothing."""

    def forward(self, tokens, mask, positions, past):
        """Nothing."""

    head = None


class Headless(mm.Adapter):
    """Says nothing of logits, nor how many layers it has."""

    def __init__(self, model):
        self.model, self.vocab = model, model.vocab

    prompt = Foreign.prompt
    forward = Foreign.forward


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: object(), r"\(no model, vocab, num_layers, forward, head\)"),
        (Foreign, r"its class Foreign is no subclass of mmdecode\.Adapter"),
        (Headless, r"\(no num_layers, head\).* inherits from mmdecode\.Adapter"),
        (lambda model: TableAdapter, "it is a class; make one"),
    ],
)
def test_an_adapter_without_its_base_or_its_members_is_refused(make, message):
    model = Table(8, seed=1)
    with pytest.raises(OptionError, match=message):
        decode(model, torch.ones(1, 2).long(), mm.Decoder(), inputs={"mm_adapter": make(model)})


def test_a_name_that_is_nearly_one_of_an_adapters_base_is_refused():
    with pytest.raises(OptionError, match=r"Odd.window is nothing .* Adapter .*'windows'"):

        class Odd(TableAdapter):
            window = 3

    class Quiet(TableAdapter):
        def __init__(self, model):
            super().__init__(model)
            self.max_position = 4

    model = Table(8, seed=1)
    with pytest.raises(OptionError, match=r"Quiet.max_position is nothing .*'max_positions'"):
        decode(model, torch.ones(1, 2).long(), mm.Decoder(), inputs={"mm_adapter": Quiet(model)})


def test_a_runner_of_branches_without_its_base_is_refused():
    class Running:
        stage = 1

        def prefill(self, call, earlier):
            """Nothing."""

        score = commit = prefill

    class Both(mm.Guide):
        branches = (BranchSpec(name="own", build=lambda call: Running()),)
        neutral = False

        def apply(self, constants, call, proposal, outputs):
            """Nothing."""

    with pytest.raises(OptionError, match=r"Running is no subclass of mmdecode\.BranchRunner"):
        decode(Table(8, seed=1), torch.ones(1, 2).long(), mm.Decoder(guide=Both()))


def test_an_adapter_without_what_a_guide_requires_is_refused_with_both_sides():
    class Deep(mm.Guide):
        requires_inputs = ("depth", "audio")
        neutral = False

        def apply(self, constants, call, proposal, outputs):
            """Nothing."""

    class Hears(TableAdapter):
        inputs = frozenset({"audio"})

    model = Table(8, seed=1)
    with pytest.raises(
        IncompatibleError,
        match=r"guide Deep does not fit Table: .* kind depth, and this model reads audio itself; "
        "use a model that reads depth",
    ):
        given = {"mm_adapter": Hears(model)}
        decode(model, torch.ones(1, 2).long(), mm.Decoder(guide=Deep()), inputs=given)


@pytest.mark.parametrize(
    "wanted", [{"attention": frozenset({0})}, {"early_exit_logits": frozenset({0})}]
)
def test_an_adapter_that_does_not_show_the_inside_that_a_guide_needs_is_refused(wanted):
    class Looks(mm.Guide):
        neutral = False

        def needs(self, adapter):
            return Requirements(**wanted)

        def apply(self, constants, call, proposal, outputs):
            """Nothing."""

    class Closed(TableAdapter):
        shows_inside = False

    model = Table(8, seed=1)
    with pytest.raises(IncompatibleError, match=r"guide Looks .* Closed gives no access to"):
        given = {"mm_adapter": Closed(model)}
        decode(model, torch.ones(1, 2).long(), mm.Decoder(guide=Looks()), inputs=given)


@pytest.mark.parametrize(
    ("base", "name", "value", "message"),
    [
        (mm.Drafter, "kinds", "deterministic", r"write a tuple, \('deterministic',\)"),
        (mm.Drafter, "kinds", ("deterministc",), "did you mean 'deterministic'"),
        (mm.AcceptanceRule, "kinds", ("coupld",), "did you mean 'coupled'"),
        (mm.AcceptanceRule, "modes", frozenset({"sampled"}), "did you mean 'sample'"),
        (mm.AcceptanceRule, "guarantee", "lossless", "expected 'exact', 'lossy', or 'exact for"),
        (mm.Guide, "branches", BranchSpec(name="blind"), "write a tuple"),
        (mm.Adapter, "windows", 4, "write a mapping, as {'full_attention': None}"),
    ],
)
def test_a_value_that_a_part_may_not_declare_is_refused(base, name, value, message):
    with pytest.raises(OptionError, match=message):
        type("Own", (base,), {name: value})
    part = type("Own", (base,), {name: property(lambda self: value)})
    assert getattr(part(), name) is value  # it is looked at where a decoder is made


def test_an_object_that_declares_what_it_may_not_is_refused():
    draft = PromptLookup()
    draft.kinds = ("greedy",)
    with pytest.raises(OptionError, match=r"no value for PromptLookup\.kinds named 'greedy'"):
        mm.Decoder(draft)


def test_a_prompt_of_a_branch_that_there_is_not_is_refused():
    with pytest.raises(OptionError, match="'last_tokens'; did you mean 'last_token'"):
        BranchSpec(name="blind", prompt="last_tokens")


class Callless(mm.DraftSession):
    def __init__(self, call):
        """Forgets its base."""


class Nameless(mm.Drafter):
    def begin(self, call, prefill):
        return Callless(call)


def test_a_session_without_its_call_is_refused():
    with pytest.raises(OptionError, match=r"Callless without its call; .* super\(\).__init__"):
        decode(Table(8, seed=1), torch.tensor([[1, 2]]), mm.Decoder(Nameless()), max_new_tokens=4)


class Speechless(mm.AcceptanceRule):
    guarantee, kinds, modes = "lossy", ("deterministic",), frozenset({"greedy"})

    def __call__(self, proposal, target, call):
        return None


def test_what_a_rule_returns_that_is_no_outcome_is_refused():
    rule = Speechless()
    with pytest.raises(OptionError, match=r"Speechless returned None; expected a .*Outcome"):
        decode(Table(8, seed=1), torch.tensor([[1, 2]]), mm.Decoder(accept=rule), max_new_tokens=4)


def test_drafters_that_remember_calls_or_measure_times_say_that_passes_differ():
    steady = ["lookup", "recycling", "clasp", "first_of:second=recycling"]
    others = ["recycling:keep=True", "adaptive:draft=lookup", "swift"]
    others += ["first_of:second=recycling:keep=True"]
    found = {spec: registry.create("draft", spec) for spec in steady + others}
    assert [spec for spec, one in found.items() if one.capabilities.repeatable] == steady
