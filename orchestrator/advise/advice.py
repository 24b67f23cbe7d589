"""Whether graphs can help a workload, what would keep it from being captured, and what to sweep: from its eager run.

Where the bounds come from: CUDA Graphs for PyTorch, workflow 1 (profile and decide whether graphs help). A device that works
for more than 95% of a step has little to gain, one that works for less than 80% of it, in many short kernels, has much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from analysis.limits.speedup_bound import HOST_PART, NEAR, EagerStep, eager_step
from analysis.records.load import Records
from analysis.records.run import Attempt, Run
from launch.contract.graph_impls import GRAPH_IMPLS, SCOPE_PARTS
from launch.contract.plan import Cell, Reason
from launch.contract.records.inspection import KINDS, Finding, Inspection, Kernels
from launch.contract.spec import CudaGraph

Worth = Literal["much", "some", "little", "unknown"]
IDLE_ENOUGH = 0.2
"""The share of a step in which the device is idle, from which on graphs are worth much; up to NEAR they are worth little."""
SHORT_US = 50.0
"""A kernel that is shorter is likely to have waited for its launch."""
_PART_SIZES: Mapping[str, int] = {"attention": 4, "mlp": 2}
"""How much of a layer a part is, in an order that is good enough to begin with; 1 where nothing is said."""


@dataclass(frozen=True)
class Candidate:
    """A graph configuration, and why it cannot work with this workload; no reason where it can."""

    graph: CudaGraph
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Rejected:
    """A reason, and the labels of the graph configurations that it holds for."""

    reason: Reason
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """What is said of one workload. ``unmeasured`` says why there is no ``step``; it is empty where there is one.

    ``findings`` are those of all ranks, each line once; None where nobody looked. ``unplaced_waits`` is how often a step the
    host waits for the device on no line that PyTorch told of.
    """

    cell: Cell
    step: EagerStep | None
    unmeasured: str
    kernels: Kernels | None
    findings: tuple[Finding, ...] | None
    unplaced_waits: float
    recompilations: int
    points: tuple[CudaGraph, ...]
    rejected: tuple[Rejected, ...]

    @property
    def on_cpu(self) -> bool:
        return bool(self.cell.spec["placement"]["device"] == "cpu")

    @property
    def worth(self) -> Worth:
        """What graphs are worth here, by how idle the device is, of several the one busy for least, and whether the host is
        the reason."""
        if self.step is None:
            return "unknown"
        if self.step.launch_bound >= IDLE_ENOUGH and self.host_is_slow:
            return "much"
        idle = self.step.not_computing if self.waits_for_hosts else self.step.launch_bound
        return "little" if idle < NEAR else "some"

    @property
    def waits_for_hosts(self) -> bool:
        """Whether a device may be busy with waiting for another rank whose host is late."""
        return self.step is not None and self.step.communicates and self.host_is_slow

    @property
    def host_is_slow(self) -> bool:
        """Whether the host takes a good part of a step to enqueue it. One that waits for the device inside does not run
        ahead of it: the device then waits for the host."""
        if self.step is None or self.step.host_ms is None:
            return self.step is not None
        return self.step.host_ms >= HOST_PART * self.step.step_ms

    @property
    def breaking(self) -> tuple[Finding, ...]:
        """What a capture fails at, or freezes. The default generator is registered by every capture."""
        return tuple(found for found in self.findings or () if found.kind != "default generator")

    @property
    def has_waits(self) -> bool:
        return self.unplaced_waits > 0 or any(found.kind == "synchronisation" for found in self.findings or ())


def advise(records: Records, candidates: Mapping[str, Sequence[Candidate]]) -> tuple[Advice, ...]:
    """What to say of each eager cell of ``records``, in the plan's order; ``candidates`` are by cell id."""
    return tuple(
        _advice(cell, records.runs.get(cell.cell_id, ()), candidates[cell.cell_id])
        for cell in records.plan.cells
        if not cell.graphed
    )


def _advice(cell: Cell, runs: Sequence[Run], candidates: Sequence[Candidate]) -> Advice:
    attempt = runs[0].attempt if runs else None
    step = _unrun(cell, runs, attempt) or _step(cell, attempt)
    inspections = attempt.inspections if attempt else {}
    advice = Advice(
        cell,
        step if isinstance(step, EagerStep) else None,
        step if isinstance(step, str) else "",
        _kernels(inspections.values()),
        _findings(inspections, cell.run_spec.parallelism.world_size),
        max(map(_unplaced_waits, inspections.values()), default=0.0),
        max((one.recompilations for one in inspections.values()), default=0),
        (),
        _rejected(candidates),
    )
    return replace(advice, points=points_of(candidates, cell, bool(advice.breaking or advice.unplaced_waits)))


# --- what was measured ----------------------------------------------------------------------------------------------


def _unrun(cell: Cell, runs: Sequence[Run], attempt: Attempt | None) -> str:
    """Why nothing was measured; empty where the run left all that it was to leave."""
    if cell.state != "run":
        return "; ".join(f"{reason.message} (way out: {reason.remedy.rstrip('.')})" for reason in cell.reasons)
    if damaged := [said for run in runs for said in run.damaged]:
        return f"an outcome of its run is damaged: {'; '.join(damaged)}"
    if attempt is None:
        return "its run has no outcome: it was interrupted, or goes on"
    outcome = attempt.outcome
    if outcome.results_intact:
        return ""
    message = " ".join(outcome.message.split()).rstrip(".")
    said = (f"its run ended {outcome.outcome} in {outcome.phase}", message)
    way_out = f" (way out: {outcome.remedy.rstrip('.')})" if outcome.remedy else ""
    return ": ".join(text for text in said if text) + way_out


def _step(cell: Cell, attempt: Attempt | None) -> EagerStep | str:
    """Empty on a CPU, where there is no device beside the host."""
    if attempt is None or cell.spec["placement"]["device"] == "cpu":
        return ""
    return eager_step([attempt], cell.run_spec.parallelism.world_size)


def _kernels(inspections: Iterable[Inspection]) -> Kernels | None:
    """Of the rank that runs most of them."""
    found = [one.kernels for one in inspections if one.kernels is not None]
    return max(found, key=lambda kernels: kernels.number, default=None)


def _findings(inspections: Mapping[int, Inspection], ranks: int) -> tuple[Finding, ...] | None:
    """Those of all ranks, by kind: each line once, with the most that a rank counted. None where a rank did not look."""
    if set(inspections) != set(range(ranks)):
        return None
    merged: dict[tuple[str, str, int], Finding] = {}
    for rank in range(ranks):
        for found in inspections[rank].findings:
            before = merged.setdefault((found.kind, found.file, found.line), found)
            merged[found.kind, found.file, found.line] = replace(before, count=max(before.count, found.count))
    return tuple(sorted(merged.values(), key=lambda found: KINDS.index(found.kind)))


def _unplaced_waits(inspection: Inspection) -> float:
    """What the driver was asked for beyond what PyTorch told of; never less than nothing."""
    placed = sum(found.count for found in inspection.findings if found.kind == "synchronisation")
    return max(0.0, inspection.waits - placed)


# --- what to sweep --------------------------------------------------------------------------------------------------


def points_of(candidates: Sequence[Candidate], cell: Cell, breaks: bool) -> tuple[CudaGraph, ...]:
    """What can work, the most promising first: what captures most of a step, unless something in it ``breaks`` a capture
    that the rules do not know of; then what captures parts comes first."""
    pipelined = cell.spec["parallelism"]["pp"] > 1

    def promise(graph: CudaGraph) -> tuple[Any, ...]:
        whole = graph.implementation.takes_whole_model
        parts = frozenset().union(*(SCOPE_PARTS[name] for name in graph.scope))
        covered = sum(_PART_SIZES.get(part, 1) for part in parts)
        # Transformer Engine shares memory between micro-batches in flight, of which only a pipeline has several.
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

    return tuple(sorted((one.graph for one in candidates if not one.reasons), key=promise))


def _rejected(candidates: Sequence[Candidate]) -> tuple[Rejected, ...]:
    """By rule and way out, with the first message of each."""
    reasons: dict[tuple[str, str], Reason] = {}
    labels: dict[tuple[str, str], list[str]] = {}
    for candidate in candidates:
        for reason in candidate.reasons:
            key = (reason.rule, reason.remedy)
            reasons.setdefault(key, reason)
            labels.setdefault(key, []).append(candidate.graph.label)
    return tuple(Rejected(reason, tuple(labels[key])) for key, reason in reasons.items())


# --- for programs ---------------------------------------------------------------------------------------------------


def advice_to_json(name: str, advice: Sequence[Advice]) -> dict[str, Any]:
    """{"sweep": name, "workloads": [one object a workload]}; times are milliseconds a step, shares are of a step."""
    return {"sweep": name, "workloads": [_to_json(one) for one in advice]}


def _to_json(advice: Advice) -> dict[str, Any]:
    step, kernels = advice.step, advice.kernels
    return {
        "cell_id": advice.cell.cell_id,
        "label": advice.cell.label,
        "device": advice.cell.spec["placement"]["device"],
        "worth": advice.worth,
        "unmeasured": advice.unmeasured,
        "step": step and {
            **asdict(step),
            "launch_bound": step.launch_bound,
            "not_computing": step.not_computing,
            "largest_speedup": step.largest_speedup,
            "largest_speedup_computing": step.largest_speedup_computing,
        },
        "kernels": kernels and {**asdict(kernels), "share_below_50_us": kernels.share_below(SHORT_US)},
        "findings": None if advice.findings is None else [asdict(found) for found in advice.findings],
        "unplaced_waits": advice.unplaced_waits,
        "recompilations": advice.recompilations,
        "points": [point(graph) for graph in advice.points],
        "rejected": [{**asdict(one.reason), "labels": list(one.labels)} for one in advice.rejected],
    }  # fmt: skip


def point(graph: CudaGraph) -> dict[str, Any]:
    """``graph`` as a point of a recipe's sweep."""
    written: dict[str, Any] = {"cuda_graph.impl": graph.impl}
    if graph.implementation.takes_scope:
        written["cuda_graph.scope"] = list(graph.scope)
    return written | ({"cuda_graph.optimizer": True} if graph.optimizer else {})
