"""The path of every file of a sweep.

A sweep is a folder. Each file in it has one writer:

    <sweep>/plan.json                       orchestrator      cells, rejections, bundles
    <sweep>/bundles/<bundle>/bundle.json    orchestrator      which attempts of which runs the bundle runs
    <sweep>/bundles/<bundle>/cancel         orchestrator      ends runs: all, or those it lists
    <sweep>/bundles/<bundle>/supervisor.log local_queue       what supervisors and fork servers on this host printed, for people only
    <sweep>/bundles/<bundle>/track.log      launch.track      what trackers printed, for people only
    <sweep>/bundles/<bundle>/lock           supervisor        who supervises the bundle (host, boot, pid)
    <sweep>/bundles/<bundle>/allocations.jsonl supervisor     a line for each supervisor that took the bundle
    <sweep>/bundles/<bundle>/begun.jsonl    supervisor        a line for each attempt, before its folder is there
    <sweep>/bundles/<bundle>/early_stop.json analysis.sweep.early_stop which runs are not needed (repeats: auto); early_stop.log has errors
    <sweep>/submissions/<token>.json        orchestrator      bundles submitted by one sbatch, and the job's id
    <sweep>/order.lock                      orchestrator      held while a command plans or cancels
    <sweep>/report.lock                     write_report      held while a report is written
    <sweep>/queue.lock                      local_queue       held while this host's queue lives
    <sweep>/queue.log, submitit/            orchestrator      for people only
    <sweep>/report/                         write_report      derived from the rest at any time: report.md, report.html,
                                                              report.json, summary.json, steps.parquet, plots/
    <sweep>/tracking/                       launch.track      what a later upload to W&B needs; id, which ends the W&B ids of
                                                              its runs; project_url, where those that are online are
    <sweep>/runs/<run>/spec.json            orchestrator      the RunSpec
    <sweep>/runs/<run>/attempts/<k>/        supervisor        a folder that exists is a started attempt: an ordered one, or
                                                              the one after it, without step checks
        events/rank<r>.jsonl                that rank         phases with memory, captures, replays, exceptions
        metrics.jsonl                       rank 0            one object per step
        environment.json                    rank 0            versions, code, hardware, digests
        exits/rank<r>.json                  slurm_rank        how that rank's process ended (under Slurm). Ranks that one
                                                              torchrun started share this file and logs/rank<r>.log: r is
                                                              the first of them
        outcome.json                        supervisor        how the attempt ended; missing until then. If Slurm ended
                                                              the supervisor, the orchestrator writes it
        logs/                               launcher and ranks, for people only
        profile/rank<r>.nsys-rep            Nsight Systems    what that rank did (profile: nsys), for people only
        output/                             what the user's program writes to {output} of its command (engine command)
        records.pack, logs.pack             supervisor        once it completed: environment.json, events/ and exits/,
                                                              and logs/, in one file each (launch/common/packed_files.py)
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from launch.common.atomic_files import RecordError
from launch.common.packed_files import name_in, unpack
from launch.common.regular_file import read_regular

OBSERVED = "LAUNCH_OBSERVED_ATTEMPT"
"""The environment variable that tells the user's program the attempt's folder (engine command)."""
UNCHECKED = "LAUNCH_MISSING_BYTES_OF_CHECKS"
"""The environment variable that tells ranks to check no step, and how many bytes checks lacked in the attempt before."""
IMAGE = "LAUNCH_CONTAINER_IMAGE"
"""The environment variable that tells ranks the image of their container, which nothing inside the container shows."""


PROJECT_URL = "project_url"
"""A file's name in <sweep>/tracking."""
_ATTEMPT = re.compile(r"[1-9][0-9]{0,8}")
"""The name of an attempt's folder: a number of at most nine digits."""


@dataclass(frozen=True, init=False)
class Folder:
    """A folder. Its path is kept as text, because joining ten thousand Paths takes as long as reading the files."""

    path: str

    def __init__(self, path: Path | str) -> None:
        object.__setattr__(self, "path", str(path))

    @property
    def root(self) -> Path:
        return Path(self.path)


class Entry:
    """A file or folder of a fixed name in a :class:`Folder`. The attribute returns its path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Folder, owner: type[Folder]) -> Path:
        return Path(f"{folder.path}/{self._name}")


class AttemptPaths(Folder):
    metrics = Entry("metrics.jsonl")
    outcome = Entry("outcome.json")
    environment = Entry("environment.json")
    rank_exits = Entry("exits")
    logs = Entry("logs")
    launcher_log = Entry("logs/launcher.log")
    output = Entry("output")
    records_pack = Entry("records.pack")
    logs_pack = Entry("logs.pack")

    @property
    def outcome_text(self) -> str:
        """The path of the outcome as text: `status` reads ten thousand of them."""
        return f"{self.path}/outcome.json"

    @property
    def has_ended(self) -> bool:
        return os.path.exists(self.outcome_text)  # noqa: PTH110 (three times as fast)

    @property
    def spec(self) -> Path:
        return self.root.parent.parent / "spec.json"

    @property
    def number(self) -> int:
        return int(self.path.rpartition("/")[2])

    @property
    def run_id(self) -> str:
        return self.path.rsplit("/", 3)[1]

    def events(self, rank: int) -> Path:
        return self.root / "events" / f"rank{rank}.jsonl"

    def all_events(self) -> list[Path]:
        """Return the path of each rank's events, including packed ones."""
        packed = {self.root / name for name in self._packed if name.startswith("events/")}
        return sorted(packed.union(self.root.glob("events/rank*.jsonl")))

    def read(self, record: Path) -> bytes:
        """Return the content of the environment, or of a rank's events or exit: from its own file, or from the pack.

        Raises:
            OSError: it cannot be read.
            RecordError: the pack is damaged.
        """
        try:
            return read_regular(record)
        except FileNotFoundError:
            if (content := self._packed.get(name_in(self.records_pack, record))) is None:
                raise
            return content

    @cached_property
    def _packed(self) -> Mapping[str, bytes]:
        return unpack(self.records_pack)

    def profile(self, rank: int | str) -> Path:
        return self.root / "profile" / f"rank{rank}.nsys-rep"

    def rank_exit(self, rank: int) -> Path:
        return self.rank_exits / f"rank{rank}.json"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"


class RunPaths(Folder):
    spec = Entry("spec.json")

    @property
    def run_id(self) -> str:
        return self.path.rpartition("/")[2]

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(f"{self.path}/attempts/{number}")

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of all attempts that were started, in order."""
        try:
            names = os.listdir(f"{self.path}/attempts")
            return sorted(int(name) for name in names if _ATTEMPT.fullmatch(name))
        except FileNotFoundError:
            return []

    def attempts(self) -> list[AttemptPaths]:
        """Return all attempts that were started, in order."""
        return [self.attempt(number) for number in self.attempt_numbers()]


class BundlePaths(Folder):
    order = Entry("bundle.json")
    log = Entry("supervisor.log")
    track_log = Entry("track.log")
    cancel = Entry("cancel")
    lock = Entry("lock")
    allocations = Entry("allocations.jsonl")
    begun = Entry("begun.jsonl")
    early_stop = Entry("early_stop.json")
    early_stop_log = Entry("early_stop.log")

    @property
    def sweep(self) -> SweepPaths:
        return SweepPaths(self.path.rsplit("/", 2)[0])


class SweepPaths(Folder):
    plan = Entry("plan.json")
    queue_lock = Entry("queue.lock")
    order_lock = Entry("order.lock")
    report_lock = Entry("report.lock")
    submissions = Entry("submissions")
    report = Entry("report")
    tracking = Entry("tracking")
    bundles = Entry("bundles")

    def run(self, run_id: str) -> RunPaths:
        return RunPaths(f"{self.path}/runs/{_checked(run_id, 'runs')}")

    def bundle(self, bundle_id: str) -> BundlePaths:
        return BundlePaths(f"{self.path}/bundles/{_checked(bundle_id, 'bundles')}")


def is_folder_name(name: str) -> bool:
    """Return whether ``name`` is printable and names a folder directly within another one."""
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()


def _checked(name: str, folder: str) -> str:
    """Return ``name`` after a check: it comes from records, which may be damaged or forged.

    Raises:
        RecordError: the path would not be in ``folder``.
    """
    if not is_folder_name(name):
        raise RecordError(f"{name!r} is not the name of a folder in {folder}")
    return name
