"""Write bundles as the orchestrator orders them, and run the supervisor on them in jobs of a real Slurm."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.common.atomic_files import read_json_lines, write_json
from launch.contract.bundle import BundleOrder, Step
from launch.contract.outcomes import Outcome, read_outcome
from launch.contract.paths import AttemptPaths, BundlePaths, SweepPaths
from launch.contract.plan import Limits
from launch.contract.records.events import read_events
from launch.contract.spec import Data, Model, Parallelism, Placement, RunSpec, Training, spec_to_json
from tests.integration.host import MODEL, SLOW_RANKS, wait_until
from tests.slurm.cluster import ROOT, Cluster

ENDLESS = 10**6
"""The steps of a run that a test ends early."""
AMPLE = Limits(run_seconds=300, hang_seconds=120)


def run_spec(*, steps: int, nodes: int = 2, ranks: int = 2, repeat: int = 0) -> RunSpec:
    """Return a run of a very small model on gloo, data-parallel over all its ranks."""
    world = nodes * ranks
    return RunSpec(
        model=Model(**MODEL),
        parallelism=Parallelism(dp=world),
        training=Training(steps=steps, sequence_length=16, global_batch_size=world),
        data=Data("synthetic"),
        placement=Placement("cpu", nodes, ranks),
        repeat=repeat,
    )


class Bundle:
    """A sweep under ``folder`` whose runs have the given numbers of steps, and its job."""

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        steps: Sequence[int],
        *,
        nodes: int = 2,
        ranks: int = 2,
        limits: Limits = AMPLE,
        arguments: Sequence[str] = (),
        **order: Any,
    ) -> None:
        specs = [run_spec(steps=n, nodes=nodes, ranks=ranks, repeat=k) for k, n in enumerate(steps)]
        self.folder, self.cluster = folder, cluster
        self.run_ids = [spec.run_id for spec in specs]
        self.sweep = SweepPaths(folder / "sweep")
        self.paths: BundlePaths = self.sweep.bundle("bundle")
        for spec in specs:
            write_json(self.sweep.run(spec.run_id).spec, spec_to_json(spec))
        step = Step(nodes, ranks, 1, sys.executable, tuple(arguments))
        schedule = tuple((run_id, 1) for run_id in self.run_ids)
        made = BundleOrder("bundle", specs[0].workload_id, schedule, limits, 0, (), step=step, **order)
        write_json(self.paths.order, made)
        self._size = (nodes, ranks)
        self.job = ""

    def submit(self, *options: str, lines: str = "", element: int | None = None) -> None:
        """Submit a job that supervises the bundle. ``lines`` go into the batch script before its srun."""
        nodes, ranks = self._size
        script = self.folder / "job.sh"
        script.write_text(
            f"#!/bin/bash\ncd {ROOT}\nexport TMPDIR={self.folder} PYTHONPATH={SLOW_RANKS}\n{lines}\n"
            f"srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --mpi=none --unbuffered "
            f"{sys.executable} -m launch.supervise.supervisor {self.paths.root}\n"
        )
        if element is not None:
            options = (*options, f"--array={element}")
        job = self.cluster.run(
            "sbatch", "--parsable", f"--nodes={nodes}", f"--ntasks-per-node={ranks}", "--time=10", "--mem=8000",
            f"--output={self.folder}/job.out", *options, str(script),
        )  # fmt: skip
        self.job = job if element is None else f"{job}_{element}"

    def cancel(self, *runs: int) -> None:
        write_json(self.paths.cancel, [self.run_ids[run] for run in runs])

    # --- what became of it ---

    def attempt(self, run: int) -> AttemptPaths:
        return self.sweep.run(self.run_ids[run]).attempt(1)

    def outcome(self, run: int) -> Outcome:
        outcome = read_outcome(self.attempt(run))
        assert outcome is not None, self.output()
        return outcome

    def outcomes(self) -> list[str | None]:
        """Return the outcome of each run, or None."""
        found = [read_outcome(self.attempt(run)) for run in range(len(self.run_ids))]
        return [outcome and outcome.outcome for outcome in found]

    def output(self) -> str:
        attempts = self.sweep.root.glob("runs/*/attempts/*")
        parts = ("logs/*.log", "events/*", "exits/*", "outcome.json")
        files = [
            self.folder / "job.out",
            *(file for one in attempts for part in parts for file in sorted(one.glob(part))),
        ]
        return "\n".join(f"--- {file}\n{file.read_text()[-2000:]}" for file in files if file.exists())

    def allocations(self) -> list[dict[str, Any]]:
        return list(read_json_lines(self.paths.allocations))

    def nodes_of_ranks(self, run: int) -> list[str]:
        """Return the node that each rank's process recorded."""
        attempt = self.attempt(run)
        ends = (attempt.read(attempt.rank_exit(rank)) for rank in range(self._size[0] * self._size[1]))
        return [json.loads(end)["node"] for end in ends]

    # --- what is going on ---

    def wait_for_step(self, run: int) -> None:
        """Wait until all ranks of that run train."""
        attempt = self.attempt(run)
        ranks = range(self._size[0] * self._size[1])

        def trains() -> bool:
            assert not attempt.outcome.exists(), self.output()
            begun = all(attempt.events(rank).exists() for rank in ranks) and attempt.metrics.exists()
            return begun and attempt.metrics.read_bytes().count(b"\n") > 5

        wait_until(trains, 120, "a step", self.output)

    def rank_pid(self, run: int, rank: int) -> int:
        return int(next(read_events(self.attempt(run), rank))["pid"])

    def srun_pid(self, run: int) -> int:
        """Return the id of the srun process that started that run. Its child is called srun too."""
        attempt = str(self.attempt(run).root)
        return min(
            pid for pid, command in self.processes().items() if command.startswith("srun") and attempt in command
        )

    def rank_variables(self, run: int, rank: int) -> dict[str, str]:
        """Return the environment of a running rank."""
        content = Path(f"/proc/{self.rank_pid(run, rank)}/environ").read_bytes().decode()
        return dict(line.split("=", 1) for line in content.split("\0") if "=" in line)

    def wait_until_over(self, seconds: float = 150) -> None:
        """Wait until the job has ended. Check that no process of the bundle is left."""
        # Look twice, because squeue may briefly not list a requeued job while it changes its state.
        wait_until(lambda: not self.state() and not self._soon(), seconds, "the job to end", self.output)
        wait_until(lambda: not self.processes(), 60, "every process to end", self.processes)

    def _soon(self) -> str:
        time.sleep(1)
        return self.state()

    def state(self) -> str:
        """Return the job's state from squeue, or "" if it neither waits nor runs."""
        lines = self.cluster.run("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return next((state for job, state in map(str.split, lines) if job == self.job), "")

    def processes(self) -> dict[int, str]:
        """Return all processes of the bundle on any node. All nodes are this host."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if os.fsencode(self.sweep.root) in command:
                found[int(process.name)] = command.replace(b"\0", b" ").decode()
        return found

    def account(self, field: str, seconds: float = 60) -> str:
        """Return the job's state from sacct, once sacct knows it."""
        until = time.monotonic() + seconds
        while True:
            said = self.cluster.run("sacct", "-nPX", f"--jobs={self.job}", f"--format={field}").split(" by ")[0]
            if said not in ("", "PENDING", "RUNNING") or time.monotonic() > until:
                return said
            time.sleep(0.5)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
