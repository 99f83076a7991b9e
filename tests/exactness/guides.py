"""One guide for each kind of input of a guide, with the distribution that it gives a table model.

These are the classes of guidance: a node's own scores, the ids of its path, another branch, hidden
states, an edit inside the model. Two more look where a round shows nothing, and say so.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.nn.functional import one_hot

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.contracts import BranchRunner, Guide, Requirements
from mmdecode.guide.bias import Bias
from mmdecode.guide.ctc import CTCScore
from mmdecode.guide.whisper_cd import Vocabulary, WhisperCD
from mmdecode.models.ctc_head import CTCHead
from mmdecode.testing.table import Table


class Probe(Guide):
    """A guide that is its formula; ``target_logits(model)`` is the same on lists of tokens."""

    branches = ()
    neutral = False

    def begin(self, call, prefill):
        return None


class Folded(Probe):
    """The node's own logits, those above one folded back."""

    def apply(self, constants, call, proposal, outputs):
        return self.fold(outputs["main"].logits)

    @staticmethod
    def fold(scores):
        return torch.where(scores > 1, 2 - scores, scores)

    @classmethod
    def target_logits(cls, model):
        return lambda prompt, new: cls.fold(model.target_logits([*prompt, *new]))


class Penalty(Probe):
    """Half a unit less for each time that the row has generated the token."""

    def apply(self, constants, call, proposal, outputs):
        main = outputs["main"].logits
        vocab = main.shape[-1]
        new = call.rows.ids[:, call.prompt_length :]
        used = torch.arange(new.shape[1]) < call.rows.length[:, None]
        committed = (one_hot(new.clamp_max(vocab - 1), vocab) * used[..., None]).sum(1)
        drafted = one_hot(proposal.tokens.clamp_min(0), vocab).float()
        return main - 0.5 * (committed[:, None] + self.above(proposal).float() @ drafted)

    def above(self, proposal):
        """Nodes on the path to each score row, ``(1 or B, N + 1, N)``."""
        return proposal.structure()[2][:, :, 1:]

    @staticmethod
    def target_logits(model):
        def scores(prompt, new):
            counts = torch.bincount(torch.tensor(new, dtype=torch.long), minlength=model.vocab)
            return model.target_logits([*prompt, *new]) - 0.5 * counts

        return scores


class Against(Probe):
    """Twice the main branch less a branch with another input and one token of the prompt."""

    branches = (
        BranchSpec(
            name="other", prompt="last_token", transform="salt", transform_options={"by": 9}
        ),
    )

    def apply(self, constants, call, proposal, outputs):
        return 2.0 * outputs["main"].logits - outputs["other"].logits

    @staticmethod
    def target_logits(model):
        def scores(prompt, new):
            return 2.0 * model.target_logits([*prompt, *new]) - model.target_logits(
                [prompt[-1], *new], salt=9
            )

        return scores


class Layers(Probe):
    """The last layer against the first, through the model's own head."""

    def needs(self, adapter):
        return Requirements(hidden=frozenset({1}))  # the input of layer 1 is the output of layer 0

    def apply(self, constants, call, proposal, outputs):
        main = outputs["main"]
        return main.logits - 0.5 * call.plan.adapter.head(main.hidden[1])

    @staticmethod
    def target_logits(model):
        def scores(prompt, new):
            prefix = [*prompt, *new]
            return model.target_logits(prefix) - 0.5 * model.target_logits(prefix, layers=1)

        return scores


class Edited(BranchRunner):
    """Scores the prompt with one added to what every layer hands on, in every pass."""

    stage = 1

    def __init__(self, call):
        self.branches = ModelRunner(call.plan.adapter, [BranchSpec(name="edited")])

    @contextmanager
    def edits(self):
        layers = self.branches.adapter.layers()
        hooks = [layer.register_forward_hook(lambda *call: call[-1] + 1) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def prefill(self, call, earlier):
        with self.edits():
            return self.branches.prefill(call, earlier)

    def score(self, call, proposal, earlier):
        with self.edits():
            return self.branches.score(call, proposal, earlier)

    def commit(self, path, count, chain):
        self.branches.commit(path, count, chain)

    def select_rows(self, rows):
        self.branches.select_rows(rows)


class EditedTable(Table):
    """What an edited model computes, on a plain list of tokens."""

    def output(self, total):
        return super().output(total) + 1


class Edit(Probe):
    """The distribution of the edited model."""

    branches = (BranchSpec(name="edited", build=Edited),)

    def apply(self, constants, call, proposal, outputs):
        return outputs["edited"].logits

    @staticmethod
    def target_logits(model):
        edited = EditedTable(model.vocab, model.seed, model.sharpness)
        edited.offsets.copy_(model.offsets)
        return lambda prompt, new: edited.target_logits([*prompt, *new])


class LookBack(Probe):
    """A little of the distribution at the last root, which the round before has seen."""

    lookback = True

    def begin(self, call, prefill):
        self.before = torch.zeros(1)

    def apply(self, constants, call, proposal, outputs):
        main = outputs["main"].logits
        before, self.before = self.before, main[:, :1]
        return main - 0.001 * before


class LookAhead(Probe):
    """A little of what the model says after a token, where that token happens to be drafted."""

    lookahead = True

    def apply(self, constants, call, proposal, outputs):
        main = outputs["main"].logits
        parents, _, _ = proposal.structure()
        rows = (parents + 1).expand_as(proposal.tokens)
        where = torch.arange(call.batch)[:, None], rows, proposal.tokens.clamp_min(0)
        return main.index_put(where, 0.001 * main[:, 1:].amax(-1), accumulate=True)


class Unheard(WhisperCD):
    """Its branches read other tables; the last two of four tokens are an end and a time."""

    requires_inputs = ()

    def __init__(self):
        super().__init__(alpha=1.0, beta=0.2, gate=0.3, snr=None)
        self.branches = [
            BranchSpec(name=spec.name, transform="salt", transform_options={"by": 5 + number})
            for number, spec in enumerate(self.branches)
        ]

    def begin(self, call, prefill):
        text = torch.arange(call.plan.adapter.vocab) < 2
        ended = torch.where(text, -torch.inf, torch.tensor(0.0))
        return Vocabulary(2, text, ended, call.request.prompt_ids[:, -1:] == 0)


class HeardFrames(CTCScore):
    """A head that finds the same frames in every row.

    Of four tokens two are labels, one is spelled with both, and the last has no spelling.
    """

    def __init__(self):
        sizes = {"source_size": 4, "hidden_size": 4, "inner_size": 4, "kernel": 3}
        head = CTCHead({**sizes, "strides": [1], "subwords": 2, "vocab_size": 4, "spelled": 2})
        head.ids.copy_(torch.tensor([2, 0]))
        head.spellings.copy_(torch.tensor([[2, 0], [2, 1], [1, 0], [0, 0]]))
        super().__init__(head, weight=0.4, candidates=2)

    def needs(self, adapter):
        return Requirements()

    def frames(self, call):
        generator = torch.Generator().manual_seed(3)
        return torch.randn(1, 9, 3, generator=generator).log_softmax(-1).repeat(call.batch, 1, 1)


class Characters:
    """Tokenizer of single characters."""

    all_special_ids = ()

    def __init__(self, characters):
        self.characters = characters

    def __len__(self):
        return len(self.characters)

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[self.characters.index(letter) for letter in text])

    def batch_decode(self, rows, clean_up_tokenization_spaces):
        return ["".join(self.characters[token] for token in row) for row in rows]


def bias(pay="spread", guide=None):
    """Favours two words of three letters, of which two are tokens; the last token ends."""
    return Bias(["aba", "bb a"], 2.0, pay, Characters("ab "), guide)


EXACT_GUIDES = {
    "scores": Folded,
    "path": Penalty,
    "branch": Against,
    "states": Layers,
    "edit": Edit,
}
REFUSED = {"back": LookBack, "ahead": LookAhead}
