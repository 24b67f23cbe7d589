"""Decide from an eager run whether graphs can help, what would break a capture, and what to sweep. Pure.

The bounds are those of CUDA Graphs for PyTorch, workflow 1: above 95% device utilisation there is little to gain. Below 80%,
with many short kernels, there is much to gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from analysis.limits.speedup_bound import HOST_PART, NEAR, EagerStep, eager_step
from analysis.records.load import Records
from analysis.records.run import Attempt, Run
from launch.common.atomic_files import members
from launch.common.grouped import grouped
from launch.contract.graph_impls import GRAPH_IMPLS, SCOPE_PARTS
from launch.contract.plan import Cell, Reason
from launch.contract.records.inspection import KINDS, Finding, FindingKind, Inspection
from launch.contract.records.kernels import Kernels
from launch.contract.spec import CudaGraph

Worth = Literal["much", "some", "little", "unknown"]
IDLE_ENOUGH = 0.2
"""The idle share of a step from which graphs are worth much. Below NEAR they are worth little."""
SHORT_US = 50.0
"""In microseconds. Shorter kernels have probably waited for their launch."""
_PART_SIZES: Mapping[str, int] = {"attention": 4, "mlp": 2}
"""Rough sizes of a layer's parts, by which scopes are ordered. Other parts count 1."""


Candidates = Mapping[CudaGraph, tuple[Reason, ...]]
"""Graph configurations, each with the reasons why it cannot work with a workload."""


@dataclass(frozen=True)
class Advice:
    """The advice on one workload.

    Args:
        unmeasured: why there is no ``step``. Empty if there is one, and on a CPU.
        findings: those of all ranks, each line once. None if a rank was not inspected.
        rejected: the labels of the graph configurations that each reason rejects.
        sought: the kinds of findings that every rank looked for. Nothing is known of the others.
        unplaced_waits: how often per step the host waits for the device at a line that PyTorch does not report.
        own_graphs: how many graphs the eager command of a user's program captured itself.
    """

    cell: Cell
    step: EagerStep | None
    unmeasured: str
    kernels: Kernels | None
    findings: tuple[Finding, ...] | None
    sought: tuple[FindingKind, ...]
    unplaced_waits: float
    recompilations: int
    own_graphs: int
    points: tuple[CudaGraph, ...]
    rejected: Mapping[Reason, tuple[str, ...]]

    @property
    def on_cpu(self) -> bool:
        return bool(self.cell.spec["placement"]["device"] == "cpu")

    @property
    def of_program(self) -> bool:
        """Whether the steps are those of a user's program."""
        return bool(self.cell.spec["engine"] == "command")

    @property
    def worth(self) -> Worth:
        """Whether graphs can help, by the idle share of the least busy device and by whether the host causes it."""
        if self.step is None:
            return "unknown"
        if self.step.launch_bound >= IDLE_ENOUGH and self.host_is_slow:
            return "much"
        idle = self.step.not_computing if self.waits_for_hosts else self.step.launch_bound
        return "little" if idle < NEAR else "some"

    @property
    def waits_for_hosts(self) -> bool:
        """Whether a device may be busy only because it waits for another rank's late host."""
        return self.step is not None and self.step.communicates and self.host_is_slow

    @property
    def host_is_slow(self) -> bool:
        """Whether the host needs a large part of a step to enqueue it.

        A host that waits for the device within a step counts as slow, since it cannot run ahead.
        """
        if self.step is None or self.step.host_ms is None:
            return self.step is not None
        return self.step.host_ms >= HOST_PART * self.step.step_ms

    @property
    def capture_blockers(self) -> tuple[Finding, ...]:
        """The lines at which a capture fails or that give a frozen result. Every capture registers the default generator."""
        return tuple(found for found in self.findings or () if found.kind != "default generator")

    @property
    def is_breaking(self) -> bool:
        return bool(self.capture_blockers) or self.unplaced_waits > 0

    @property
    def has_waits(self) -> bool:
        return self.unplaced_waits > 0 or any(found.kind == "synchronisation" for found in self.findings or ())


def advise(records: Records, candidates: Mapping[str, Candidates]) -> tuple[Advice, ...]:
    """Advise on each eager cell of ``records``, in the plan's order. The keys of ``candidates`` are cell ids."""
    return tuple(
        _advise_cell(cell, records.runs.get(cell.cell_id, ()), candidates[cell.cell_id])
        for cell in records.plan.cells
        if not cell.graphed
    )


def _advise_cell(cell: Cell, runs: Sequence[Run], candidates: Candidates) -> Advice:
    attempt = runs[0].attempt if runs else None
    step = _explain_unmeasured(cell, runs, attempt) or _read_step(cell, attempt)
    inspections = attempt.inspections if attempt else {}
    advice = Advice(
        cell,
        step if isinstance(step, EagerStep) else None,
        step if isinstance(step, str) else "",
        max((one.kernels for one in inspections.values() if one.kernels), key=lambda found: found.number, default=None),
        _merge_findings(inspections, cell.run_spec.parallelism.world_size),
        tuple(kind for kind in KINDS if inspections and all(kind in one.sought for one in inspections.values())),
        max(map(_unplaced_waits, inspections.values()), default=0.0),
        max((one.recompilations for one in inspections.values()), default=0),
        _count_own_graphs(cell, attempt),
        (),
        _group_rejections(candidates),
    )
    return replace(advice, points=sort_points(candidates, cell, advice.is_breaking))


# --- what was measured ----------------------------------------------------------------------------------------------


def _explain_unmeasured(cell: Cell, runs: Sequence[Run], attempt: Attempt | None) -> str:
    """Return why nothing was measured, or an empty text if the run left complete results."""
    if cell.state != "run":
        return "; ".join(f"{reason.message}{_format_fix(reason.remedy)}" for reason in cell.reasons)
    if damaged := [text for run in runs for text in run.damaged]:
        return f"an outcome of its run is damaged: {'; '.join(damaged)}"
    if attempt is None:
        return "its run has no outcome: it was interrupted, or it is still running"
    outcome = attempt.outcome
    if outcome.results_intact:
        return ""
    message = " ".join(outcome.message.split()).rstrip(".")
    ended = f"its run ended {outcome.outcome} in {outcome.phase}"
    return (f"{ended}: {message}" if message else ended) + _format_fix(outcome.remedy)


def _format_fix(fix: str) -> str:
    return f" (fix: {fix.rstrip('.')})" if fix else ""


def _read_step(cell: Cell, attempt: Attempt | None) -> EagerStep | str:
    """Return the eager step, or why it is unknown. The text is empty on a CPU, which has no device besides the host."""
    if attempt is None or cell.spec["placement"]["device"] == "cpu":
        return ""
    return eager_step([attempt], cell.run_spec.parallelism.world_size)


def _merge_findings(inspections: Mapping[int, Inspection], ranks: int) -> tuple[Finding, ...] | None:
    """Return the findings of all ranks by kind, each line once with its largest count.

    Return None if a rank was not inspected.
    """
    if set(inspections) != set(range(ranks)):
        return None
    merged: dict[tuple[str, str, int], Finding] = {}
    for rank in range(ranks):
        for found in inspections[rank].findings:
            before = merged.setdefault((found.kind, found.file, found.line), found)
            merged[found.kind, found.file, found.line] = replace(before, count=max(before.count, found.count))
    return tuple(sorted(merged.values(), key=lambda found: KINDS.index(found.kind)))


def _count_own_graphs(cell: Cell, attempt: Attempt | None) -> int:
    # On a CPU, and in an engine of this project, an eager run may be compiled on purpose.
    if attempt is None or cell.spec["engine"] != "command" or cell.spec["placement"]["device"] == "cpu":
        return 0
    return max((proof.graphs for proof in attempt.proofs.values()), default=0)


def _unplaced_waits(inspection: Inspection) -> float:
    """Return how many of the driver's waits PyTorch did not report."""
    placed = sum(found.count for found in inspection.findings if found.kind == "synchronisation")
    return max(0.0, inspection.waits - placed)


# --- what to sweep --------------------------------------------------------------------------------------------------


def sort_points(candidates: Candidates, cell: Cell, breaks: bool) -> tuple[CudaGraph, ...]:
    """Return the graph configurations that can work. Those that capture most come first.

    If something ``breaks`` a capture that the rules accept, whole steps come last.
    """
    pipelined = cell.spec["parallelism"]["pp"] > 1

    def sort_key(graph: CudaGraph) -> tuple[Any, ...]:
        whole = graph.implementation.takes_whole_model
        parts = frozenset().union(*(SCOPE_PARTS[name] for name in graph.scope))
        covered = sum(_PART_SIZES.get(part, 1) for part in parts)
        # Transformer Engine shares memory between micro-batches in flight; only a pipeline has several.
        first_impl = "transformer_engine" if pipelined else "torch"
        return (
            whole if breaks else not whole,
            graph.implementation.extent == "model",
            graph.scope != (),
            -covered,
            not graph.optimizer,
            graph.impl != first_impl,
            list(GRAPH_IMPLS).index(graph.impl),
            graph.scope,
        )

    return tuple(sorted((graph for graph, reasons in candidates.items() if not reasons), key=sort_key))


def _group_rejections(candidates: Candidates) -> Mapping[Reason, tuple[str, ...]]:
    """Group rejections by rule and fix, with the first message of each."""
    found = ((reason, graph.label) for graph, reasons in candidates.items() for reason in reasons)
    groups = grouped(((reason.rule, reason.remedy), (reason, label)) for reason, label in found)
    return {group[0][0]: tuple(label for _, label in group) for group in groups.values()}


# --- for programs ---------------------------------------------------------------------------------------------------


def advice_to_json(name: str, advice: Sequence[Advice]) -> dict[str, Any]:
    """Return the content of advice.json, with an object for each workload. Times are milliseconds, shares are of a step."""
    return {"format": 1, "sweep": name, "workloads": [_to_json(one) for one in advice]}


def _to_json(advice: Advice) -> dict[str, Any]:
    step, kernels = advice.step, advice.kernels
    return {
        **members(advice.cell, "cell_id", "label"),
        "device": advice.cell.spec["placement"]["device"],
        **members(advice, "worth", "unmeasured"),
        "step": step and {
            **members(step),
            **members(step, "launch_bound", "not_computing", "largest_speedup"),
        },
        "kernels": kernels and {**members(kernels), "share_below_50_us": kernels.share_below(SHORT_US)},
        **members(advice, "findings", "sought", "unplaced_waits", "recompilations", "own_graphs"),
        "points": [recipe_point(graph) for graph in advice.points],
        "rejected": [{**members(reason), "labels": labels} for reason, labels in advice.rejected.items()],
    }  # fmt: skip


def recipe_point(graph: CudaGraph) -> dict[str, Any]:
    """Return ``graph`` as a point of a recipe's sweep, or as the field that names it if it is the recipe's own."""
    if graph.name:
        return {f"command.graphs.{graph.name}": list(graph.arguments)}
    fields: dict[str, Any] = {"cuda_graph.impl": graph.impl}
    if graph.implementation.takes_scope:
        fields["cuda_graph.scope"] = list(graph.scope)
    return fields | ({"cuda_graph.optimizer": True} if graph.optimizer else {})
