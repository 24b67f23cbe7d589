"""Read and write the folder of a sweep: its plan, and what each bundle's supervisor has to do.

A sweep is found by its name in the store (``--store``, else $ORCHESTRATOR_STORE, else ./sweeps). A new plan with other
cells keeps every run on disk; the report covers the cells of the newest plan.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.common.atomic_files import (
    RecordError,
    iter_json_object,
    read_json,
    sync_file_system,
    write_json,
    write_text,
)
from launch.common.file_lock import Lock
from launch.contract.bundle import BundleOrder, order_from_json, order_to_json
from launch.contract.cancellation import read_cancellation
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import Plan, plan_from_json, plan_to_json
from orchestrator.errors import SystemFault, input_error, suggestion

VARIABLE = "ORCHESTRATOR_STORE"
ORDER_SECONDS = 120.0


class Store:
    """The folder that holds all sweeps."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(os.environ.get(VARIABLE, "sweeps"))

    def sweep(self, name: str) -> SweepPaths:
        return SweepPaths(self.root / name)

    def names(self) -> list[str]:
        """Return the names of all sweeps, sorted."""
        return sorted(path.parent.name for path in self.root.glob("*/plan.json"))

    def find(self, name: str) -> SweepPaths:
        """Return the sweep that has the name, or the folder, ``name``.

        Raises:
            InputError: there is no such sweep.
        """
        for sweep in (self.sweep(name), SweepPaths(Path(name))):
            if sweep.plan.is_file():
                return sweep
        raise input_error(
            "",
            f"no sweep {name!r} in {self.root}",
            suggestion(name, self.names(), "python -m orchestrator sweep RECIPE makes one"),
        )


def write_plan(sweep: SweepPaths, plan: Plan) -> None:
    """Write ``plan`` and the spec of each of its runs. An equal plan on disk is left untouched.

    Raises:
        SystemFault: the store cannot be written to.
    """
    with report_disk_errors(sweep):
        _write_specs(sweep, plan)
        if not is_planned(sweep, plan):
            sync_file_system(sweep.root)  # once for all specs, before the plan that names them
            write_text(sweep.plan, "".join(iter_json_object(plan_to_json(plan))))


def is_planned(sweep: SweepPaths, plan: Plan) -> bool:
    """Whether the plan on disk equals ``plan``."""
    try:
        with open(sweep.plan, errors="replace", newline="\n") as file:
            # Piece by piece: a plan of ten thousand runs is never in memory a second time.
            same = all(file.read(len(piece)) == piece for piece in iter_json_object(plan_to_json(plan)))
            return same and not file.read(1)
    except FileNotFoundError:
        return False


def runs_of_other_plans(sweep: SweepPaths, plan: Plan) -> int:
    """Return how many runs on disk belong to earlier plans of this name only."""
    try:
        return len(set(os.listdir(sweep.root / "runs")) - plan.cell_of_run().keys())
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def order_lock(sweep: SweepPaths) -> Iterator[None]:
    """Hold the lock under which one command at a time orders, or cancels, runs of a sweep.

    Raises:
        SystemFault: another command holds it for too long, or the store cannot be written to.
    """
    deadline = time.monotonic() + ORDER_SECONDS
    with report_disk_errors(sweep):
        while (lock := Lock.try_acquire(sweep.order_lock)) is None:
            if time.monotonic() > deadline:
                raise SystemFault(f"another command has been planning {sweep.root} for {ORDER_SECONDS:g} s; try again")
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def report_disk_errors(sweep: SweepPaths) -> Iterator[None]:
    """Turn an OSError of whatever writes to ``sweep`` into a SystemFault.

    Raises:
        SystemFault: the disk is full, or this user may not write to it.
    """
    try:
        yield
    except OSError as error:
        raise SystemFault(
            f"{sweep.root}: cannot be written ({error.strerror}); free space there, or choose another place with --store"
        ) from error


def read_plan(sweep: SweepPaths) -> Plan:
    """Return the plan of a sweep.

    Raises:
        SystemFault: it is damaged, or written by another version.
    """
    try:
        return plan_from_json(read_json(sweep.plan))
    except (RecordError, KeyError, TypeError, AttributeError) as error:
        raise SystemFault(
            f"{sweep.plan}: not a plan of this version ({_reason(error)}); run the sweep again to write a new one"
        ) from error


def bundles(sweep: SweepPaths) -> list[BundlePaths]:
    """Return every bundle on disk, of this plan or of an earlier one."""
    return [BundlePaths(path.parent) for path in sorted(sweep.root.glob("bundles/*/bundle.json"))]


def read_order(bundle: BundlePaths) -> BundleOrder | None:
    """Return what the bundle's supervisor has to do, None where nothing is ordered.

    Raises:
        SystemFault: it is damaged, or written by another version.
    """
    try:
        return order_from_json(read_json(bundle.order))
    except FileNotFoundError:
        return None
    except (RecordError, KeyError, TypeError, ValueError) as error:
        raise SystemFault(
            f"{bundle.order}: not an order of this version ({_reason(error)}); delete it, then resume the sweep"
        ) from error


def write_orders(sweep: SweepPaths, orders: Sequence[BundleOrder]) -> None:
    """Write what each bundle's supervisor has to do, and lift earlier cancellations of those runs.

    A power failure may still undo it: the caller syncs the file system.

    Raises:
        SystemFault: the store cannot be written to.
    """
    with report_disk_errors(sweep):
        for order in orders:
            bundle = sweep.bundle(order.bundle_id)
            kept = _cancelled_before(bundle) - dict(order.schedule).keys()
            write_json(bundle.order, order_to_json(order), sync=False)
            if kept:
                write_json(bundle.cancel, sorted(kept), sync=False)
            else:
                bundle.cancel.unlink(missing_ok=True)


def _cancelled_before(bundle: BundlePaths) -> set[str]:
    """Return the runs that an earlier ``cancel`` covers."""
    cancellation = read_cancellation(bundle)
    if cancellation is None or cancellation.run_ids:
        return set(cancellation.run_ids) if cancellation else set()
    order = read_order(bundle)
    return {run_id for run_id, _ in order.schedule} if order else set()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RecordError) else f"{type(error).__name__}: {error}"


def _write_specs(sweep: SweepPaths, plan: Plan) -> None:
    for cell in plan.cells:
        for repeat, run_id in enumerate(cell.run_ids):
            path = sweep.run(run_id).spec
            if not path.exists():
                write_json(path, {**cell.spec, "repeat": repeat}, sync=False)
