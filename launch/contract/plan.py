"""The plan of a sweep: plan.json, which the orchestrator writes before it submits anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from launch.common.atomic_files import read_json
from launch.contract.outcomes import Expectation
from launch.contract.paths import SweepPaths
from launch.contract.spec import RunSpec, spec_from_json

CellState = Literal["run", "rejected", "not_runnable"]


@dataclass(frozen=True)
class Reason:
    """Why a cell does not run: the rule's id, a message with values, the fix and the rule's source."""

    rule: str
    message: str
    remedy: str
    source: str = ""

    @property
    def text(self) -> str:
        return f"{self.message}. {self.remedy}"


@dataclass(frozen=True)
class Margins:
    """The largest differences that count as equal: loss in nats, gradient norm relative to the eager value."""

    loss: float = 1e-3
    grad_norm: float = 1e-2

    def of(self, metric: Literal["loss", "grad_norm"]) -> float:
        return self.loss if metric == "loss" else self.grad_norm


@dataclass(frozen=True)
class Limits:
    """When the supervisor ends a run: after ``run_seconds``, or if its records do not grow for ``hang_seconds``.

    No digest contains them, because they change nothing that a run computes.
    """

    run_seconds: float = 1800.0
    hang_seconds: float = 600.0


@dataclass(frozen=True)
class Cell:
    """One resolved configuration. ``label`` names what distinguishes it within its sweep."""

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

    @property
    def run_spec(self) -> RunSpec:
        """The cell's spec with repeat 0."""
        return spec_from_json(self.spec)

    @property
    def graphed(self) -> bool:
        return bool(self.spec["cuda_graph"]["impl"] != "none")


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
    """The name of the recipe's file, without its folder."""
    margins: Margins
    cells: tuple[Cell, ...]
    bundles: tuple[PlannedBundle, ...]
    tracking: Mapping[str, Any] | None = None
    """Settings for launch.supervise.wandb_tracker; None means no tracking."""
    scheduler: Literal["host", "slurm"] = "host"
    """Where the cells were planned to run: this host or a Slurm cluster."""
    cluster: str = ""
    """The name of the cluster's profile. Its content stays out of records."""
    only: tuple[str, ...] = ()
    """The filters of `--only` as "key=value"; empty if the plan holds all cells of the recipe."""

    def cell_of_run(self) -> Mapping[str, Cell]:
        return self._cell_of_run

    @cached_property
    def _cell_of_run(self) -> dict[str, Cell]:
        return {run_id: cell for cell in self.cells for run_id in cell.run_ids}


def plan_to_json(plan: Plan) -> dict[str, Any]:
    content = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    content["margins"] = dataclasses.asdict(plan.margins)
    content["cells"] = [_shallow(cell) | {
        "reasons": [dataclasses.asdict(reason) for reason in cell.reasons],
        "expect": dataclasses.asdict(cell.expect),
        "limits": dataclasses.asdict(cell.limits),
    } for cell in plan.cells]  # fmt: skip
    content["bundles"] = [_shallow(bundle) for bundle in plan.bundles]
    return content


def plan_from_json(content: Mapping[str, Any]) -> Plan:
    cells = tuple(
        Cell(**cell | {
            "reasons": tuple(Reason(**reason) for reason in cell["reasons"]),
            "expect": Expectation(**cell["expect"]),
            "run_ids": tuple(cell["run_ids"]),
            "limits": Limits(**cell["limits"]),
        })
        for cell in content["cells"]
    )  # fmt: skip
    bundles = tuple(PlannedBundle(**bundle | {"run_ids": tuple(bundle["run_ids"])}) for bundle in content["bundles"])
    margins, only = Margins(**content["margins"]), tuple(content.get("only", ()))
    return Plan(**dict(content) | {"margins": margins, "cells": cells, "bundles": bundles, "only": only})


def _shallow(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def read_plan(sweep: SweepPaths) -> Plan:
    return plan_from_json(read_json(sweep.plan))
