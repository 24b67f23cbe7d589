"""Which cells cannot work, and why: tables of rules, judged before a GPU is spent.

Every violated rule is reported, not the first alone. Judging is pure and never raises.
"""

from __future__ import annotations

from collections.abc import Mapping

from launch.contract.plan import Reason
from launch.contract.spec import RunSpec
from orchestrator.rules import fault_injection, graph_capture, graph_scope, model, overlap, parallelism, training
from orchestrator.rules.rule import Rule

TABLES: Mapping[str, tuple[Rule, ...]] = {
    "Implementation and scope": graph_scope.RULES,
    "What a capture asks for": graph_capture.RULES,
    "Model": model.RULES,
    "Layout": parallelism.RULES,
    "Overlap": overlap.RULES,
    "Training and data": training.RULES,
    "Failures on purpose": fault_injection.RULES,
}
RULES: tuple[Rule, ...] = tuple(rule for table in TABLES.values() for rule in table)

PREAMBLE = """\
# Rules of legality

A cell that violates a rule is rejected before it is submitted; all rules it violates are listed. A row says what must
hold, for which engines and library versions, the way out, and where the rule comes from. Files and lines are those of
the released megatron-core 0.16.1 wheel, below `megatron/core`. This page is printed by
`python -m orchestrator.rules`.

## Measured steps

A run's steps are its warm-up (`cuda_graph.warmup_steps`), one step for the capture, two to settle, and the rest, which
are measured. The eager twin is measured over the same steps. CUDA graphs with packed sequences and `full_iteration` on
megatron are let through: Megatron Bridge's guide names that combination as a way out, and a run will tell.
"""


def violations(spec: RunSpec) -> tuple[Reason, ...]:
    """Why ``spec`` cannot work: a reason for each rule it violates, in the order of the tables; empty where it can."""
    return tuple(reason for rule in RULES if (reason := rule.judge(spec)) is not None)


def as_markdown() -> str:
    """docs/rules.md: the tables, one section each."""
    sections = [f"## {title}\n\n{_table(rules)}" for title, rules in TABLES.items()]
    return "\n".join((PREAMBLE, *sections))


def _table(rules: tuple[Rule, ...]) -> str:
    rows = ["| rule | what must hold | engines | versions | the way out | source |", "|" + " --- |" * 6]
    rows += [_row(rule) for rule in rules]
    return "\n".join(rows) + "\n"


def _row(rule: Rule) -> str:
    cells = (f"`{rule.id}`", rule.statement, ", ".join(rule.engines), rule.versions, rule.remedy, rule.source)
    return f"| {' | '.join(cells)} |"
