"""Decide which cells cannot work, and why, by tables of rules, before a GPU is used. Pure, and never raises."""

from __future__ import annotations

from collections.abc import Mapping

from launch.contract.plan import Reason
from launch.contract.spec import RunSpec
from launch.support import data_fields, layout, unsupported
from launch.support.rule import Rule, judge
from orchestrator.rules import (
    fault_injection,
    graph_capture,
    graph_scope,
    model,
    overlap,
    parallelism,
    training,
)

TABLES: Mapping[str, tuple[Rule, ...]] = {
    "Implementation and scope": graph_scope.RULES,
    "What a capture requires": graph_capture.RULES,
    "Model": model.RULES,
    "Parallelism": parallelism.RULES,
    "What must divide": layout.RULES,
    "Overlap": overlap.RULES,
    "Training": training.RULES,
    "Data": data_fields.RULES,
    "Injected faults": fault_injection.RULES,
}
RULES: tuple[Rule, ...] = tuple(rule for table in TABLES.values() for rule in table)


def violations(spec: RunSpec) -> tuple[Reason, ...]:
    """Return a reason for each rule that ``spec`` violates, in the order of the tables."""
    return judge(RULES, spec)


def refusals(spec: RunSpec) -> tuple[Reason, ...]:
    """Return why no host can run ``spec``: the rules that it violates, and what its engine does not support."""
    return (*violations(spec), *unsupported(spec))
