"""The runners of a call: one for each model and stage of its branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmdecode.engine.adapter import MAIN, Adapter, BranchSpec
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import Call
from mmdecode.engine.checks import refuse_no_part
from mmdecode.engine.contracts import BranchOutput, BranchRunner, Guide, Requirements
from mmdecode.errors import OptionError


def runners_of(
    adapter: Adapter,
    guide: Guide | None,
    needs: Requirements,
    call: Call,
    adapter_for: Callable[[Any], Adapter],
) -> list[BranchRunner]:
    """Runners of all branches of a call, by stage.

    Within a stage the called model's runner comes first, then those of other models, then those
    that the guide builds.

    Args:
        adapter: Adapter of the called model.
        guide: The guide, which names the branches other than the main one.
        needs: Internals that the parts need from the called model's passes.
        call: The call.
        adapter_for: Finds the adapter of another model.

    Raises:
        OptionError: Another model has another vocabulary.
    """
    groups: dict[tuple[int, int], list[BranchSpec]] = {(1, 0): [MAIN]}
    built: list[BranchRunner] = []
    for spec in guide.branches if guide else ():
        if spec.build is not None:
            built.append(spec.build(call))
            refuse_no_part("runner", built[-1])
        else:
            groups.setdefault((spec.stage, id(spec.model) if spec.model else 0), []).append(spec)
    edits = guide.edits if guide else ()
    runners: list[BranchRunner] = []
    for (_, other), members in groups.items():
        part = adapter_for(members[0].model) if other else adapter
        if other and part.vocab != adapter.vocab:
            raise OptionError(
                f"branch {members[0].name!r} has a vocabulary of {part.vocab}, the main model one "
                f"of {adapter.vocab}; expected the same tokenizer"
            )
        runners.append(ModelRunner(part, members, Requirements() if other else needs, edits))
    return sorted(runners + built, key=lambda runner: runner.stage)


def main_output(outputs: Mapping[str, BranchOutput]) -> BranchOutput:
    """The main branch's output, with those of other branches in `BranchOutput.other_branches`."""
    others = {name: output for name, output in outputs.items() if name != MAIN.name}
    return replace(outputs[MAIN.name], other_branches=others) if others else outputs[MAIN.name]


def main_runner(runners: Sequence[BranchRunner]) -> ModelRunner | None:
    """The runner of the main branch; ``None``: a runner that the guide built has it."""
    ours = [runner for runner in runners if isinstance(runner, ModelRunner)]
    return next((r for r in ours if MAIN.name in [spec.name for spec in r.specs]), None)


def without_replaced(
    runners: list[BranchRunner], guide: Guide, scores: dict[str, BranchOutput]
) -> list[BranchRunner]:
    """The runners for all rounds after prefill: see `BranchSpec.replaces_after_prefill`.

    Args:
        runners: Runners of the prefill.
        guide: The guide, which says which branch replaces which.
        scores: Outputs at the prompt by branch; renamed in place in the same way.
    """
    for spec in guide.branches:
        if spec.replaces_after_prefill is None:
            continue
        scores[spec.replaces_after_prefill] = scores.pop(spec.name)
        kept: list[BranchRunner] = []
        for runner in runners:
            if isinstance(runner, ModelRunner):
                if [other.name for other in runner.specs] == [spec.replaces_after_prefill]:
                    continue
                runner.rename(spec.name, spec.replaces_after_prefill)
            kept.append(runner)
        runners = kept
    return runners
