"""Run the command line on the test cluster's login node, with its sweeps as jobs of a real Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.common.atomic_files import read_json
from tests.integration.host import Host, wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import ClusterError


class Site(Host):
    """A host whose commands submit to ``cluster``.

    Jobs inherit its environment, and all nodes are this host. So :meth:`processes` finds the jobs' processes too. Commands,
    reports and ranks are forks of the tests' server. Slurm does not see such a rank, which ends with its task. The ranks of
    bundles.py are new interpreters, which Slurm tracks.
    """

    executor = "slurm"

    def __init__(self, folder: Path, cache: Path, cluster: Cluster, fork_server: Path) -> None:
        super().__init__(folder, cache, fork_server)
        self.cluster = cluster
        self._programs = folder / "bin"
        self._programs.mkdir()
        self.environment |= {
            "PATH": os.pathsep.join([str(self._programs), cluster.environment["PATH"]]),
            "SLURM_CONF": cluster.environment["SLURM_CONF"],
        }

    def profile(self, name: str = "default", /, **fields: Any) -> None:
        """Write a cluster profile for the user."""
        path = self.folder / "home" / ".config" / "cuda-graph-orchestrator" / "clusters" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields))

    def program(self, name: str, script: str) -> None:
        """Put a shell script in front of Slurm's program of that name. In it, ``$REAL`` is the path of the program."""
        real = self.cluster.run("sh", "-c", f"command -v {name}")
        path = self._programs / name
        path.write_text(f"#!/bin/sh\nREAL={real}\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def without_program(self, name: str) -> None:
        """Undo :meth:`program`."""
        (self._programs / name).unlink()

    # --- what Slurm says ---

    def queue(self) -> dict[str, str]:
        """Return the state of each waiting or running job by its id ("123" or "123_4")."""
        lines = self.cluster.run("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)  # type: ignore[arg-type]

    def queue_if_any(self) -> dict[str, str]:
        """Return what :meth:`queue` returns, or nothing if slurmctld does not answer."""
        with contextlib.suppress(ClusterError):
            return self.queue()
        return {}

    def job_ids(self, name: str) -> list[str]:
        """Return the job ids that the sweep's command has got from sbatch and recorded so far."""
        found = []
        for path in self.sweep(name).submissions.glob("[!.]*.json"):
            with contextlib.suppress(FileNotFoundError):  # The command discards what sbatch refuses.
                found.append(read_json(path)["job_id"])
        return [job_id for job_id in found if job_id]

    def has_ended(self, name: str, *run_ids: str) -> bool:
        """Return whether the first attempt of any of the runs has an outcome. Its file is looked at, because each command
        takes a tenth of a CPU second. Without ``run_ids``, the runs are all of the sweep."""
        return any(self.sweep(name).run(run_id).attempt(1).has_ended for run_id in run_ids or self.run_ids(name))

    def accounts(self, field: str) -> dict[str, str]:
        """Return sacct's ``field`` of every job of this site's sweeps, once all are over. Times are in epoch
        seconds.
        """
        self.wait_until_over()  # A job ends after its last run.
        wait_until(self._accounted_for, 60, "slurmdbd to know", lambda: self._rows("State"))
        rows = self._rows(field).items()
        return {job: value for job, (value, command) in rows if "sbatch" in command and str(self.store) in command}

    def _accounted_for(self) -> bool:
        """Return whether slurmdbd knows the command and the end of every job that slurmctld remembers.

        Slurm sends the start of a job every five seconds only, so it may arrive last.
        """
        listed = self.cluster.run("squeue", "--noheader", "--array", "--states=all", "--format=%i %N").splitlines()
        ran = [job for job, *nodes in map(str.split, listed) if nodes]  # sbatch may have rejected the other jobs.
        rows = self._rows("State")
        return all(job in rows and rows[job][0] != "RUNNING" and rows[job][1] for job in ran)

    def _rows(self, field: str) -> dict[str, tuple[str, str]]:
        """Return sacct's ``field`` and the submitting command, by job."""
        text = self.cluster.run("env", "SLURM_TIME_FORMAT=%s", "sacct", "--allocations", "--noheader", "--parsable2",
                                "--starttime=now-1hour", f"--format=JobID,{field},SubmitLine")  # fmt: skip
        rows = (line.split("|", 2) for line in text.splitlines())
        return {job: (value, command) for job, value, command in rows}

    def wait_until_over(self, seconds: float = 120) -> None:
        """Wait until no job waits or runs."""
        wait_until(lambda: not self.queue(), seconds, "every job to end", self.queue)

    @contextlib.contextmanager
    def full(self) -> Iterator[str]:
        """Let another job hold all nodes, for at most five minutes. Yield its id."""
        options = ("--parsable", "--nodes=4", "--exclusive", "--time=5", "--output=/dev/null", "--wrap=sleep 1000")
        job = self.cluster.run("sbatch", *options)
        wait_until(lambda: self.queue().get(job) == "RUNNING", 60, "the other job", self.queue)
        yield job
        self.cluster.run("scancel", job)

    def clear(self) -> None:
        """End all jobs and processes, and wait until every node is idle."""
        self.cluster.run("scancel", "--user", str(os.getuid()))
        super().clear()
        self.cluster.run("scancel", "--user", str(os.getuid()))  # Cancel what a command has submitted in the meantime.
        self.cluster.wait_until_idle()
