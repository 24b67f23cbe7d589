"""What ``bisect --layers`` says in the end: which layer first computes something else, or why that cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.graphs.layer_divergence import DigestDifference, DivergenceLocation
from launch.contract.parallel_dims import AXES, ParallelDims
from launch.contract.plan import Cell, Plan
from launch.contract.spec import RunSpec
from orchestrator.bisect.failure_status import FailureStatus
from orchestrator.bisect.side_sweep import side_sweep_name

MOST_NAMED = 4
"""Layers, or ranks, that are named one by one."""


@dataclass(frozen=True)
class LayerSearch:
    """What is looked for: where ``cell`` of ``plan``, which computes something else as ``failure`` says, first does so.
    ``trials`` are its specs with digests, in the order in which they are tried."""

    plan: Plan
    cell: Cell
    failure: str
    trials: tuple[RunSpec, ...]

    @property
    def name(self) -> str:
        """Of the sweep that holds the runs."""
        return side_sweep_name(self.plan, self.cell, "layers")


@dataclass(frozen=True)
class Finding:
    """What came of one trial: how it stands, and where its runs part; ``problem`` is why that is not known."""

    spec: RunSpec
    stand: FailureStatus
    located: DivergenceLocation | None = None
    problem: str = ""

    @property
    def came_back(self) -> bool:
        return self.stand.status == "fails"

    @property
    def named(self) -> DigestDifference | None:
        """The first difference, where the failure came back and it can be laid to graphs."""
        return self.located.first if self.came_back and self.located and self.located.attributable else None

    @property
    def mode(self) -> str:
        return "in deterministic mode" if self.spec.training.deterministic else "without deterministic mode"

    @property
    def words(self) -> str:
        return f"{self.mode[0].upper()}{self.mode[1:]} {_came_back(self)} {' '.join(_where(self))}"


@dataclass(frozen=True)
class LayerAnswer:
    search: LayerSearch
    findings: tuple[Finding, ...]
    lost: bool = False
    """Whether runs were lost before the answer was known."""

    @property
    def named(self) -> DigestDifference | None:
        return self.findings[-1].named if self.findings and not self.lost else None

    @property
    def exit_code(self) -> int:
        """0 a layer is named; 2 runs were lost; 4 it cannot be told."""
        return 2 if self.lost else 0 if self.named else 4

    @property
    def text(self) -> str:
        """What fails, what came of each trial, and the answer. Markdown that a terminal can show."""
        head = f"{self.search.cell.label} of {self.search.plan.name} fails: {self.search.failure}"
        return "\n\n".join((head, *(finding.words for finding in self.findings), self.words)) + "\n"

    @property
    def words(self) -> str:
        """The answer in a sentence."""
        if self.lost:
            return "Runs were lost before the answer was known: the same command takes them up."
        if self.named:
            return f"First to differ: {_place(self.named)}{_ranks(self.named, self.findings[-1].spec)}."
        return f"No layer can be named. {self._why()}"

    def _why(self) -> str:
        for finding in self.findings:
            if finding.came_back and finding.problem:
                return (
                    f"Digests are not whole: {finding.problem}. Delete the folders of the runs named, and the same command "
                    "makes them again."
                )
        hidden = [finding for finding in self.findings if finding.located and finding.located.hidden]
        if any(finding.spec.training.deterministic for finding in hidden):
            return "Eager runs differ by themselves as early, in deterministic mode too."
        if hidden:
            gone = any(f.spec.training.deterministic and f.stand.status == "passes" for f in self.findings)
            where = ", and in deterministic mode, where they do not, the failure does not come back" if gone else ""
            return f"Eager runs differ by themselves as early{where}."
        if any(finding.came_back for finding in self.findings):
            return "What differs is not of what was captured, or was not digested."
        return "What digesting adds to a step may hide what depends on its timing or its memory."


def _came_back(finding: Finding) -> str:
    if finding.came_back:
        return f"the failure came back ({finding.stand.words})."
    if finding.stand.status == "passes":
        return f"the failure did not come back ({finding.stand.words})."
    return f"it is not known whether the failure came back ({finding.stand.words})."


def _where(finding: Finding) -> list[str]:
    """Where runs part, and what follows from that."""
    located = finding.located
    if located is None:
        return [f"Where it begins is not known: {finding.problem}."]
    first, eager = located.first, located.eager
    among_eager = (
        f"The {located.repeats} eager repeats agree bit for bit in the first {located.steps} steps."
        if eager is None
        else f"Two eager repeats part from each other, first in {_place(eager)}."
    )
    if first is None:
        later = ": what fails begins later" if finding.came_back else ""
        return [f"Graphed and eager runs agree bit for bit in the first {located.steps} steps{later}.", among_eager]
    begins = f"Graphed runs part from eager ones first in {_place(first)}{_ranks(first, finding.spec)}."
    if located.attributable:
        return [begins, *_meaning(first, located.names), among_eager, *_in_repeats(located)]
    if located.hidden:
        return [begins, among_eager, "What differs there or behind it cannot be laid to graphs."]
    nothing = f"Nothing is captured before step {located.capture_step}: it is no matter of graphs."
    return [begins, nothing, among_eager]


def _place(found: DigestDifference) -> str:
    step = f"step {found.step}"
    if found.what == "outputs":
        return f"{step}, the output of {_layers(found)} in the forward pass of micro-batch {found.micro_batch}"
    if found.what == "gradients":
        return f"{step}, the gradient by the output of {_layers(found)} in the backward pass of micro-batch {found.micro_batch}"  # fmt: skip
    if found.what == "parameter_gradients":
        return f"{step}, the gradients of the parameters of {_layers(found)}"
    return f"{step}, the parameters of {_layers(found)} after the update"


def _layers(found: DigestDifference) -> str:
    return _named([_the(layer) for layer in found.layers], "layers")


def _the(layer: str) -> str:
    return layer if layer.startswith("decoder layer") else f"the {layer}"


def _named(names: Sequence[str], noun: str) -> str:
    if len(names) > MOST_NAMED:
        return f"{len(names)} {noun} (the first is {names[0]})"
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _ranks(found: DigestDifference, spec: RunSpec) -> str:
    world = spec.parallelism.world_size
    if world == 1:
        return ""
    if len(found.ranks) == world:
        return f", on all {world} ranks"
    dims = ParallelDims.of(spec.parallelism)
    axes = [axis for axis in AXES if axis != "expert_dp" and dims.size(axis) > 1]
    said = [f"rank {rank} ({', '.join(f'{axis} {dims.rank_in(axis, rank)}' for axis in axes)})" for rank in found.ranks]
    return f", on {_named(said, 'ranks')}"


def _meaning(found: DigestDifference, names: Sequence[str]) -> list[str]:
    """What is at fault where all that comes before agrees."""
    if found.what == "outputs":
        return [
            f"All that comes before agrees, its parameters too: {_layers(found)} computes something else from the same."
        ]
    if found.what == "gradients":
        behind = names[names.index(found.layers[0]) + 1 :]
        culprit = f"the backward pass of {_the(behind[0])}" if behind else "what the backward pass begins from"
        return [f"All outputs of the step agree, and so do the gradients behind it: {culprit} computes something else."]
    if found.what == "parameter_gradients":
        return ["All outputs of the step and the gradients between layers agree: their sum over micro-batches or ranks, or what a layer adds to it, is something else."]  # fmt: skip
    return ["All gradients of the step agree: the update computes something else."]


def _in_repeats(located: DivergenceLocation) -> list[str]:
    """Of several graphed repeats, whether all have it."""
    if set(located.graphed.values()) == {located.first}:
        return [f"Each of the {len(located.graphed)} graphed repeats has it."]
    said = [
        f"graphed repeat {repeat} {f'parts in {_place(found)}' if found else 'agrees'}"
        for repeat, found in sorted(located.graphed.items())
    ]
    return [f"It comes and goes: {'; '.join(said)}."]


def answer_to_json(answer: LayerAnswer) -> dict[str, Any]:
    """The content of layers.json."""
    search = answer.search
    return {
        "format": 1,
        "sweep": search.plan.name,
        "cell_id": search.cell.cell_id,
        "label": search.cell.label,
        "failure": search.failure,
        "exit_code": answer.exit_code,
        "text": answer.words,
        "first": answer.named and _difference(answer.named),
        "trials": [_finding(finding) for finding in answer.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    located = finding.located
    return {
        "deterministic": finding.spec.training.deterministic,
        "status": finding.stand.status,
        "words": finding.words,
        "problem": finding.problem,
        "steps": located and located.steps,
        "eager": located and located.eager and _difference(located.eager),
        "graphed": located
        and {str(repeat): found and _difference(found) for repeat, found in sorted(located.graphed.items())},
    }


def _difference(found: DigestDifference) -> dict[str, Any]:
    return {**vars(found), "layers": list(found.layers), "ranks": list(found.ranks)}
