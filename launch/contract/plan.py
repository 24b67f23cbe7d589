"""The plan of a sweep: plan.json, which the orchestrator writes before it submits anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from launch.common.atomic_files import RecordError
from launch.common.text import count, first_names
from launch.common.typed_json import Amount, read_record
from launch.contract.outcomes import Expectation
from launch.contract.paths import SweepPaths, is_folder_name
from launch.contract.records.step_metrics import Metric
from launch.contract.spec import RunSpec, spec_from_json

WRAPPED = "wrap"
"""The ``recipe_file`` of a plan whose recipe `wrap` made."""
AdvisedSetting = Literal["training.deterministic=true", "step_checks=5"]
"""A setting that verdicts advise against noise."""
CellState = Literal["run", "rejected", "not_runnable"]


@dataclass(frozen=True)
class Reason:
    """Why a cell does not run, or computes wrong results: the rule's id, a message with values, the fix and the rule's source."""

    rule: str
    message: str
    remedy: str
    source: str = ""

    @property
    def text(self) -> str:
        return f"{self.message}. {self.remedy}"


MINIMUM_STEPS = 100
"""The least steps after the capture for EQUIVALENT."""


@dataclass(frozen=True)
class Margins:
    """The largest differences that count as equal: loss in nats, gradient norm relative to the eager value.

    In ``mode`` quick, runs are short and step checks decide.
    """

    loss: Amount = 1e-3
    grad_norm: Amount = 1e-2
    mode: Literal["full", "quick"] = "full"
    allow_differences: tuple[str, ...] = ()
    """Names of the provenance, or of its sections, in which a program's runs may differ besides graph settings."""

    def of(self, metric: Metric) -> float:
        return self.loss if metric == "loss" else self.grad_norm


@dataclass(frozen=True)
class Limits:
    """When the supervisor ends a run: after ``run_seconds``, or if its records do not grow for ``hang_seconds``.

    No digest contains these limits, because they do not change what a run computes.
    """

    run_seconds: float = 1800.0
    hang_seconds: float = 600.0


@dataclass(frozen=True)
class Cell:
    """One resolved configuration. ``label`` names the settings that distinguish it within its sweep."""

    cell_id: str
    label: str
    workload_id: str
    task_id: str
    spec: Mapping[str, Any]
    state: CellState
    reasons: tuple[Reason, ...]
    expect: Expectation
    run_ids: tuple[str, ...]
    limits: Limits = Limits()
    perturbed: bool = False
    """Whether the last of ``run_ids`` is an eager cell's perturbed run instead of a repeat (RunSpec.perturbed)."""
    same_command: str = ""
    """The first cell of engine command whose command is the same but for numbers; empty if it is this one."""
    known_faults: tuple[Reason, ...] = ()
    """Why its results are known to be wrong, although no rule rejects it."""
    refused_settings: tuple[AdvisedSetting, ...] = ()
    """Settings that its verdict does not advise, because they would change nothing or a rule would reject them."""

    @property
    def repeat_ids(self) -> tuple[str, ...]:
        """The runs that repeat the cell."""
        return self.run_ids[: len(self.run_ids) - self.perturbed]

    def spec_of(self, number: int) -> Mapping[str, Any]:
        """Return the spec of run ``number`` as JSON."""
        return {**self.spec, "repeat": number, "perturbed": number >= len(self.repeat_ids)}

    @cached_property
    def run_spec(self) -> RunSpec:
        """The cell's spec with repeat 0.

        Raises:
            RecordError: it is damaged, or of another version.
        """
        try:
            return spec_from_json(self.spec)
        except (TypeError, ValueError, AttributeError) as error:
            raise RecordError(
                f"plan.json: the spec of cell {self.cell_id} is not a spec of this version ({error}); run the sweep again to "
                "write a new plan"
            ) from error

    @property
    def graphed(self) -> bool:
        return bool(self.spec["cuda_graph"]["impl"] != "none")

    @property
    def should_complete(self) -> bool:
        return self.state == "run" and self.expect.outcome == "COMPLETED"


@dataclass(frozen=True)
class Precedents:
    """The other cells whose failures spare a cell its runs (launch.contract.bundle.why_skipped), by their ids."""

    eager: str = ""
    """The eager baseline of a graphed cell."""
    same_command: tuple[str, ...] = ()
    """The first cells whose commands are those of this cell and of its eager baseline, but for numbers."""


@dataclass(frozen=True)
class PlannedBundle:
    """The runs of one workload that share an allocation, in the order in which they run."""

    bundle_id: str
    workload_id: str
    run_ids: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A sweep: its recipe, cells and bundles."""

    name: str
    recipe: str
    """The resolved recipe, as YAML."""
    recipe_file: str
    """The name of the recipe's file, without its folder. It is "wrap" if the verb of this name made the recipe."""
    margins: Margins
    cells: tuple[Cell, ...]
    bundles: tuple[PlannedBundle, ...]
    tracking: Mapping[str, Any] | None = None
    """Settings for launch.track; None means no tracking."""
    scheduler: Literal["host", "slurm"] = "host"
    """Where the cells were planned to run: this host or a Slurm cluster."""
    cluster: str = ""
    """The name of the cluster's profile. Records do not contain the profile itself."""
    only: tuple[str, ...] = ()
    """The filters of `--only` as "key=value"; empty if the plan holds all cells of the recipe."""
    bundles_if_needed: tuple[PlannedBundle, ...] = ()
    """Bundles that begin only if a verdict needs their runs (analysis.verdict.verdict.Verdict.needed_run)."""
    looks: tuple[int, ...] = ()
    """With ``repeats: auto``, the numbers of repeats after which verdicts are judged. The last number is that of all repeats.
    Empty for fixed repeats."""
    published: Mapping[str, str] = field(default_factory=dict)
    """Figures that others published, as the recipe quotes them, by their names. The report shows them."""

    @property
    def repeats_option(self) -> str:
        """What the command that made this sweep takes before a number of repeats."""
        return "--repeats " if self.recipe_file == WRAPPED else "repeats="

    @property
    def steps_option(self) -> str:
        """What that command takes before a number of steps."""
        return "--steps " if self.recipe_file == WRAPPED else "training.steps="

    def cell_of_run(self) -> Mapping[str, Cell]:
        return self._cell_of_run

    @cached_property
    def precedents(self) -> Mapping[str, Precedents]:
        """The precedents of each cell. Cells that should fail have none, and are none."""
        cells = [cell for cell in self.cells if cell.should_complete]
        eager = {cell.workload_id: cell for cell in cells if not cell.graphed}
        return {cell.cell_id: _precedents(cell, eager.get(cell.workload_id)) for cell in cells}

    @cached_property
    def runs_if_needed(self) -> frozenset[str]:
        """The runs of ``bundles_if_needed``."""
        return frozenset(run_id for bundle in self.bundles_if_needed for run_id in bundle.run_ids)

    @cached_property
    def judged_cells(self) -> int:
        """The number of graphed cells that run."""
        return sum(cell.graphed and cell.state == "run" for cell in self.cells)

    @property
    def all_bundles(self) -> tuple[PlannedBundle, ...]:
        return (*self.bundles, *self.bundles_if_needed)

    @cached_property
    def _cell_of_run(self) -> dict[str, Cell]:
        return {run_id: cell for cell in self.cells for run_id in cell.run_ids}


def _precedents(cell: Cell, eager: Cell | None) -> Precedents:
    alike = (cell.same_command, eager.same_command if eager else "")
    return Precedents(eager.cell_id if eager and cell.graphed else "", tuple(filter(None, dict.fromkeys(alike))))


def _id_faults(plan: Plan) -> Iterator[str]:
    names = {name for cell in plan.cells for name in (cell.cell_id, cell.workload_id, cell.task_id)}
    names |= {name for bundle in plan.all_bundles for name in (bundle.bundle_id, *bundle.run_ids)}
    for name in sorted({plan.name, *names}):
        if not is_folder_name(name):
            yield f"{name!r} is not the name of a folder"


def _run_faults(cells: Iterable[Cell], bundles: Iterable[PlannedBundle]) -> Iterator[str]:
    in_cells = Counter(run_id for cell in cells for run_id in cell.run_ids)
    in_bundles = Counter(run_id for bundle in bundles for run_id in bundle.run_ids)
    for run_id in sorted(in_cells.keys() | in_bundles.keys()):
        counts = (in_cells[run_id], in_bundles[run_id])
        if counts != (1, 1):
            yield f"run {run_id!r} is in {count('cell', counts[0])} and {count('bundle', counts[1])}"


def read_plan(sweep: SweepPaths) -> Plan:
    """Return the plan of a sweep.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is damaged or of another version, an id leads out of the store, or a run is not in exactly one cell and
            one bundle.
    """
    try:
        plan = read_record(Plan, sweep.plan)
        if faults := [*_id_faults(plan), *_run_faults(plan.cells, plan.all_bundles)]:
            raise RecordError(first_names(faults))
    except RecordError as error:
        raise RecordError(
            f"{sweep.plan}: not a plan of this version ({error}); run the sweep again to write a new one"
        ) from error
    return plan
