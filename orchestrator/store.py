"""The folder of a sweep: created from a plan, found by name, listed. The folder is the database.

A sweep is known by its name, wherever the store is (``--store``, else $ORCHESTRATOR_STORE, else ./sweeps). Planning it
again with other cells keeps every run that is on disk; the report speaks of the cells of the newest plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Optional

from launch.files import RecordError, read_json, write_json
from launch.record import BundleOrder, Plan, SweepPaths, order_to_json, plan_from_json, plan_to_json
from orchestrator.errors import SystemFault, wrong
from orchestrator.schema import suggestion

VARIABLE = "ORCHESTRATOR_STORE"


class Store:
    """The folder that holds sweeps."""

    def __init__(self, root: Optional[Path] = None) -> None:
        self.root = root or Path(os.environ.get(VARIABLE, "sweeps"))

    def sweep(self, name: str) -> SweepPaths:
        return SweepPaths(self.root / name)

    def names(self) -> list[str]:
        """Sweeps in the store, by name."""
        return sorted(path.parent.name for path in self.root.glob("*/plan.json"))

    def find(self, name: str) -> SweepPaths:
        """The sweep called ``name`` (or whose folder ``name`` is).

        Raises:
            InputError: there is none.
        """
        for sweep in (self.sweep(name), SweepPaths(Path(name))):
            if sweep.plan.is_file():
                return sweep
        names = self.names()
        raise wrong(
            "",
            f"no sweep {name!r} in {self.root}",
            suggestion(name, names, "python -m orchestrator sweep RECIPE makes one"),
        )

    def write(self, plan: Plan) -> SweepPaths:
        """Put ``plan`` on disk, with the spec of each of its runs.

        Raises:
            SystemFault: the store cannot be written to.
        """
        sweep = self.sweep(plan.name)
        try:
            _write_specs(sweep, plan)
            content = plan_to_json(plan)
            if not sweep.plan.exists() or read_json(sweep.plan) != content:
                write_json(sweep.plan, content)
        except OSError as error:
            raise SystemFault(
                f"{sweep.root}: cannot be written ({error.strerror}); choose another place with --store"
            ) from error
        return sweep


def read_plan(sweep: SweepPaths) -> Plan:
    """The plan of a sweep on disk.

    Raises:
        SystemFault: it is damaged, or written by another version.
    """
    try:
        return plan_from_json(read_json(sweep.plan))
    except (RecordError, KeyError, TypeError) as error:
        raise SystemFault(
            f"{sweep.plan}: not a plan of this version ({error}); run the sweep again to write it anew"
        ) from error


def write_orders(sweep: SweepPaths, orders: Iterable[BundleOrder]) -> None:
    """Tell each bundle's supervisor what to make; a cancellation from before is lifted."""
    for order in orders:
        bundle = sweep.bundle(order.bundle_id)
        write_json(bundle.order, order_to_json(order))
        bundle.cancel.unlink(missing_ok=True)


def _write_specs(sweep: SweepPaths, plan: Plan) -> None:
    for cell in plan.cells:
        for repeat, run_id in enumerate(cell.run_ids):
            path = sweep.run(run_id).spec
            if not path.exists():
                write_json(path, {**cell.spec, "repeat": repeat})
