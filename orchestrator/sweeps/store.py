"""The folder of a sweep: created from a plan, found by name, listed. The folder is the database.

A sweep is known by its name, wherever the store is (``--store``, else $ORCHESTRATOR_STORE, else ./sweeps). Planning it
again with other cells keeps every run that is on disk; the report speaks of the cells of the newest plan.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from launch.common.atomic_files import RecordError, dumps, read_json, sync_file_system, write_json, write_text
from launch.common.file_lock import Lock
from launch.contract.bundle import BundleOrder, order_from_json, order_to_json
from launch.contract.cancellation import read_cancellation
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import Plan, plan_from_json, plan_to_json
from orchestrator.errors import SystemFault, input_error, suggestion

VARIABLE = "ORCHESTRATOR_STORE"
ORDER_SECONDS = 120.0


class Store:
    """The folder that holds sweeps."""

    def __init__(self, root: Path | None = None) -> None:
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
        raise input_error(
            "",
            f"no sweep {name!r} in {self.root}",
            suggestion(name, self.names(), "python -m orchestrator sweep RECIPE makes one"),
        )


def write_plan(sweep: SweepPaths, plan: Plan) -> None:
    """Put ``plan`` on disk, with the spec of each of its runs. A plan that is there already is left untouched.

    Raises:
        SystemFault: the store cannot be written to.
    """
    with report_disk_errors(sweep):
        _write_specs(sweep, plan)
        if not is_planned(sweep, plan):
            sync_file_system(sweep.root)  # once for all specs, before the plan that names them
            write_text(sweep.plan, "".join(_lines(plan)))


def is_planned(sweep: SweepPaths, plan: Plan) -> bool:
    """Whether ``plan`` is the one on disk."""
    try:
        with open(sweep.plan, errors="replace", newline="\n") as file:
            return all(there == line for there, line in zip_longest(file, _lines(plan)))
    except FileNotFoundError:
        return False


def runs_of_other_plans(sweep: SweepPaths, plan: Plan) -> int:
    """How many runs on disk an earlier plan of this name made, that ``plan`` does not hold."""
    try:
        return len(set(os.listdir(sweep.root / "runs")) - plan.cell_of_run().keys())
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def order_lock(sweep: SweepPaths) -> Iterator[None]:
    """One command at a time decides what becomes of a sweep: else two would order, or cancel, past each other.

    Raises:
        SystemFault: another command has not come to an end of it, or the store cannot be written to.
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
    """Around whatever writes to ``sweep``.

    Raises:
        SystemFault: the disk is full, or may not be written to.
    """
    try:
        yield
    except OSError as error:
        raise SystemFault(
            f"{sweep.root}: cannot be written ({error.strerror}); make room there, or choose another place with --store"
        ) from error


def read_plan(sweep: SweepPaths) -> Plan:
    """The plan of a sweep on disk.

    Raises:
        SystemFault: it is damaged, or written by another version.
    """
    try:
        return plan_from_json(read_json(sweep.plan))
    except (RecordError, KeyError, TypeError, AttributeError) as error:
        raise SystemFault(
            f"{sweep.plan}: not a plan of this version ({_reason(error)}); run the sweep again to write it anew"
        ) from error


def bundles(sweep: SweepPaths) -> list[BundlePaths]:
    """Every bundle on disk, of this plan or of an earlier one."""
    return [BundlePaths(path.parent) for path in sorted(sweep.root.glob("bundles/*/bundle.json"))]


def read_order(bundle: BundlePaths) -> BundleOrder | None:
    """What the bundle's supervisor has been told, None where it has been told nothing.

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
    """Tell each bundle's supervisor what to make; a cancellation of those runs from before is lifted. A power failure may
    still undo it: the caller syncs the file system.

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
    """Runs that ``cancel`` ended before."""
    cancellation = read_cancellation(bundle)
    if cancellation is None or cancellation.run_ids:
        return set(cancellation.run_ids) if cancellation else set()
    order = read_order(bundle)
    return {run_id for run_id, _ in order.schedule} if order else set()


def _lines(plan: Plan) -> Iterator[str]:
    """plan.json, each cell and each bundle on a line: one of ten thousand runs is never in memory a second time."""
    content = plan_to_json(plan)
    cells, bundles = content.pop("cells"), content.pop("bundles")
    yield "{\n"
    for name, value in content.items():
        yield f"{dumps(name)}: {dumps(value)},\n"
    yield from _list("cells", cells, ",\n")
    yield from _list("bundles", bundles, "\n")
    yield "}\n"


def _list(name: str, values: Sequence[Any], end: str) -> Iterator[str]:
    yield f"{dumps(name)}: [\n"
    for place, value in enumerate(values, start=1):
        yield dumps(value) + (",\n" if place < len(values) else "\n")
    yield f"]{end}"


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RecordError) else f"{type(error).__name__}: {error}"


def _write_specs(sweep: SweepPaths, plan: Plan) -> None:
    for cell in plan.cells:
        for repeat, run_id in enumerate(cell.run_ids):
            path = sweep.run(run_id).spec
            if not path.exists():
                write_json(path, {**cell.spec, "repeat": repeat}, sync=False)
