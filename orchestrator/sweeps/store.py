"""Read and write the folder of a sweep: its plan, and the orders of its bundles' supervisors.

A sweep is found by its name in the store (``--store``, else $ORCHESTRATOR_STORE, else ./sweeps). A new plan with other cells
keeps every run on disk. The report covers the cells of the newest plan.
"""

from __future__ import annotations

import contextlib
import glob
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.common.atomic_files import (
    FULL,
    MISPLACED,
    RecordError,
    explain,
    iter_json_object,
    members,
    sync_file_system,
    write_json,
    write_text,
)
from launch.common.file_lock import Lock
from launch.common.typed_json import read_record
from launch.contract.bundle import BundleOrder, runs_not_needed
from launch.contract.cancellation import read_cancellation
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import Plan
from launch.contract.plan import read_plan as read_plan_record
from orchestrator import PROGRAM
from orchestrator.errors import SystemFault, input_error
from orchestrator.suggestion import suggestion

VARIABLE = "ORCHESTRATOR_STORE"
ORDER_SECONDS = 120.0


def default_store() -> Path:
    return Path(os.environ.get(VARIABLE) or "sweeps")


class Store:
    """The folder of all sweeps."""

    def __init__(self, root: Path | None = None) -> None:
        """Use the folder ``root``, or the default.

        Raises:
            InputError: the path exists and is not a folder.
        """
        self.root = root or default_store()
        if self.root.exists() and not self.root.is_dir():
            place = "--store" if root else f"${VARIABLE}"
            raise input_error(place, f"{self.root} is not a folder", "name the folder of all sweeps, or a new one")

    def sweep(self, name: str) -> SweepPaths:
        return SweepPaths(self.root / name)

    def names(self) -> list[str]:
        """Return the names of all sweeps, sorted."""
        return sorted(path.parent.name for path in self.root.glob("[!.]*/plan.json"))

    def find(self, name: str) -> SweepPaths:
        """Return the sweep with the name or the folder ``name``.

        Raises:
            InputError: there is no such sweep.
        """
        for sweep in (self.sweep(name), SweepPaths(Path(name))):
            if sweep.plan.exists():
                return sweep
        for run in self.root.glob(f"[!.]*/runs/{glob.escape(Path(name).name)}*" if name else "nothing"):
            sweep_name = run.parent.parent.name
            fix = f"name its sweep, {sweep_name}; {PROGRAM} logs {name} prints the log of a run"
            raise input_error("", f"{name!r} is a run of sweep {sweep_name}, not a sweep", fix)
        otherwise = f"{PROGRAM} status lists the sweeps" if self.names() else f"{PROGRAM} sweep RECIPE makes one"
        if Path(name).is_file():
            otherwise = "a recipe names its sweep: write the name in it"
        fix = suggestion(Path(name).stem, self.names(), otherwise)
        raise input_error("", f"no sweep {name!r} in folder {self.root.absolute()}", fix)


def file_sizes(path: Path) -> Iterator[int]:
    """Yield the size in bytes of each file in ``path``, or of the file ``path``. Links are not followed."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            yield path.lstat().st_size
        for folder, _, files in os.walk(path):
            yield from (os.lstat(os.path.join(folder, file)).st_size for file in files)  # noqa: PTH118


def other_writers(folder: Path) -> list[str]:
    """Return who may write to ``folder`` besides this user and root. The user's own group does not count."""
    status = folder.stat()
    user = _name_of(pwd.getpwuid, os.getuid())
    writers = []
    if status.st_uid not in (os.getuid(), 0):
        writers.append(f"its owner ({_name_of(pwd.getpwuid, status.st_uid)})")
    group = _name_of(grp.getgrgid, status.st_gid)
    if status.st_mode & stat.S_IWGRP and status.st_gid != 0 and group != user:
        writers.append(f"its group ({group})")
    if status.st_mode & stat.S_IWOTH:
        writers.append("everybody")
    return writers


def _name_of(look_up: Callable[[int], Sequence[Any]], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def write_plan(sweep: SweepPaths, plan: Plan) -> None:
    """Write ``plan`` and the spec of each of its runs. An equal plan on disk is left untouched.

    Raises:
        SystemFault: the store cannot be written to.
    """
    with report_disk_errors(sweep):
        _write_specs(sweep, plan)
        if not is_planned(sweep, plan):
            sync_file_system(sweep.root)  # once for all specs, before the plan that names them
            write_text(sweep.plan, "".join(iter_json_object(members(plan))))


def is_planned(sweep: SweepPaths, plan: Plan) -> bool:
    """Return whether the plan on disk equals ``plan``."""
    try:
        with open(sweep.plan, errors="replace", newline="\n") as file:
            # Compare piece by piece, so that a plan of ten thousand runs is not in memory twice.
            same = all(file.read(len(piece)) == piece for piece in iter_json_object(members(plan)))
            return same and not file.read(1)
    except FileNotFoundError:
        return False


def runs_of_other_plans(sweep: SweepPaths, plan: Plan) -> int:
    """Return the number of runs that belong only to earlier plans of this name, and of which an attempt began."""
    runs = sweep.root / "runs"
    try:
        names = set(os.listdir(runs)) - plan.cell_of_run().keys()
    except FileNotFoundError:
        return 0
    return sum((runs / name / "attempts").is_dir() for name in names)


@contextlib.contextmanager
def order_lock(sweep: SweepPaths) -> Iterator[None]:
    """Hold the lock that lets only one command at a time order or cancel runs of a sweep.

    Raises:
        SystemFault: another command has held it for too long, or the store cannot be written to.
    """
    with report_disk_errors(sweep):
        try:
            lock = Lock.acquire(sweep.order_lock, ORDER_SECONDS)
        except TimeoutError:
            message = f"another command has been planning {sweep.root} for {ORDER_SECONDS:g} s; try again"
            raise SystemFault(message) from None
    with lock:
        yield


@contextlib.contextmanager
def report_disk_errors(sweep: SweepPaths) -> Iterator[None]:
    """Convert an OSError from writing to ``sweep`` into a SystemFault.

    Raises:
        SystemFault: the disk is full, or this user may not write to it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in MISPLACED:
            raise SystemFault(explain(error)) from error
        fix = "free space there, or choose" if error.errno in FULL else "make it writable, or choose"
        raise SystemFault(f"{sweep.root}: cannot be written ({error.strerror}); {fix} another --store") from error


def read_plan(sweep: SweepPaths) -> Plan:
    """Return the plan of a sweep.

    Raises:
        SystemFault: it is damaged, or written by another version.
    """
    try:
        return read_plan_record(sweep)
    except (RecordError, IsADirectoryError) as error:
        raise SystemFault(explain(error)) from error


def bundles(sweep: SweepPaths) -> list[BundlePaths]:
    """Return every bundle on disk, including bundles of earlier plans."""
    return [BundlePaths(path.parent) for path in sorted(sweep.root.glob("bundles/*/bundle.json"))]


def read_order(bundle: BundlePaths) -> BundleOrder | None:
    """Return the order of the bundle's supervisor, or None if nothing is ordered.

    Raises:
        SystemFault: it is damaged, or written by another version.
    """
    try:
        return read_record(BundleOrder, bundle.order)
    except FileNotFoundError:
        return None
    except RecordError as error:
        raise SystemFault(
            f"{bundle.order}: not a bundle of this version ({error}); delete it, then resume the sweep"
        ) from error


def write_orders(sweep: SweepPaths, orders: Sequence[BundleOrder]) -> None:
    """Write the order of each bundle's supervisor, and lift what keeps the ordered attempts from beginning: a cancellation, or an
    early stop.

    The caller must sync the file system, because a power failure may still undo the writes.

    Raises:
        SystemFault: the store cannot be written to.
    """
    with report_disk_errors(sweep):
        for order in orders:
            bundle = sweep.bundle(order.bundle_id)
            # An attempt that runs stays cancelled.
            lifted = {run_id for run_id, k in order.schedule if not sweep.run(run_id).attempt(k).root.exists()}
            kept = _cancelled_before(bundle) - lifted
            if not runs_not_needed(bundle).isdisjoint(run_id for run_id, _ in order.schedule):
                bundle.early_stop.unlink()
            write_json(bundle.order, order, sync=False)
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


def _write_specs(sweep: SweepPaths, plan: Plan) -> None:
    for cell in plan.cells:
        for number, run_id in enumerate(cell.run_ids):
            path = sweep.run(run_id).spec
            if not path.exists():
                write_json(path, cell.spec_of(number), sync=False)
