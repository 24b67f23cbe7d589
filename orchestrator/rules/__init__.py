"""Decide which cells cannot work, and why, by tables of rules, before a GPU is used. Pure, and never raises."""

from __future__ import annotations

from collections.abc import Mapping

from launch.contract.plan import Reason
from launch.contract.spec import RunSpec
from launch.support import SUPPORT, data_fields, layout, unsupported
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

PREAMBLE = """\
# Rules

`plan` rejects a cell that violates a rule, before anything is submitted, and lists every rule that the cell violates. Each
row says what must hold, for which engines and library versions, how to fix a cell, and where the rule comes from. Files and
lines are those of the released megatron-core 0.16.1 wheel, below `megatron/core`; where a row names 0.19, the code of 0.19.2
does the same. `python -m orchestrator.rules` prints this
page.

## Measured steps

A run's steps are its warm-up (`cuda_graph.warmup_steps`), one step for the capture, two to settle, and the measured rest.
The eager baseline is measured over the same steps.

## Packed sequences

A packed sequence holds several documents, each of which ends with `data.eod_token`. Positions and attention begin again with
each document.

| captured | megatron | torch_native |
| --- | --- | --- |
| nothing | runs | runs |
| parts without attention: routers, dense MLPs, padded experts | runs | runs |
| parts with attention, or whole layers | rejected: `transformer_engine` takes only tensors, and `local` fixes the lengths of documents | rejected: a layer's graph would keep the attention mask of its capture |
| the whole step | 0.19: runs, with `cu_seqlens` padded to `data.max_documents`, except with YaRN. 0.16: rejected, because on an H200 it ended in an illegal memory access | runs on one GPU, unless model and loss are compiled as one |
| model and loss, by `torch_compile` | this engine has none | rejected: untested |

Engine megatron always pads `cu_seqlens`, so eager and graphed runs compute alike. No release of Megatron-Core up to 0.19.2
captures packed attention by `transformer_engine`. Megatron Bridge 0.6.2 pads `cu_seqlens` for it (`pad_cu_seqlens`), but
0.19.2 refuses to replay it. Packed sequences with attention sinks need Transformer Engine 2.12. Release 0.16 requires an older
one, so a rule rejects them there. With 0.19 and an older Transformer Engine, runs end with class `ATTENTION_BACKEND`, eager ones
too.
"""
SUPPORT_PREAMBLE = """\
## What each engine supports

`plan` also rejects a cell that its engine does not support on any host. The job checks these rules again, and those of the
section "What must divide".
"""


def violations(spec: RunSpec) -> tuple[Reason, ...]:
    """Return a reason for each rule that ``spec`` violates, in the order of the tables."""
    return judge(RULES, spec)


def refusals(spec: RunSpec) -> tuple[Reason, ...]:
    """Return why no host can run ``spec``: the rules that it violates, and what its engine does not support."""
    return (*violations(spec), *unsupported(spec))


def as_markdown() -> str:
    """Return docs/rules.md, which has a section for each table."""
    rules = [f"## {title}\n\n{_table(table)}" for title, table in TABLES.items()]
    support = [f"### {engine}\n\n{_table(table)}" for engine, table in SUPPORT.items()]
    return "\n".join((PREAMBLE, *rules, SUPPORT_PREAMBLE, *support))


def _table(rules: tuple[Rule, ...]) -> str:
    rows = ["| rule | what must hold | engines | versions | fix | source |", "|" + " --- |" * 6]
    rows += [_row(rule) for rule in rules]
    return "\n".join(rows) + "\n"


def _row(rule: Rule) -> str:
    cells = (f"`{rule.id}`", rule.statement, ", ".join(rule.engines), rule.versions, rule.fix, rule.source)
    return f"| {' | '.join(cells)} |"
