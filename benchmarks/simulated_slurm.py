"""Simulate a Slurm of any size for one user, as far as the orchestrator's login node sees it. A process keeps jobs in memory, and
sbatch, squeue, sacct, scontrol, sinfo and scancel ask this process. benchmarks/slurm.py starts it.

    python -m benchmarks.simulated_slurm FOLDER --nodes 1000 --seconds 4 --node-failures 0.01

A job takes one node. Nothing is computed in it. The process writes the records of launch.supervise.supervisor and of a
rank at the usual times, and nothing more once the job's node has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import random
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from launch.common.atomic_files import JsonLines, read_json, write_json
from launch.common.file_lock import Owner
from launch.common.typed_json import from_json
from launch.contract.bundle import Beginning, BundleOrder
from launch.contract.outcomes import outcome_to_json
from launch.contract.paths import AttemptPaths, BundlePaths, SweepPaths
from launch.contract.records.identity import identity_of
from launch.contract.spec import read_spec
from tests.records import STARTED, attempt_record

PROGRAMS = ("sbatch", "squeue", "sacct", "scontrol", "sinfo", "scancel", "srun")
MAX_ARRAY_SIZE = 1001
"""The default of slurm.conf."""
MIN_JOB_AGE = 20.0
"""Seconds for which squeue lists a job after its end. This is less than the default of 300, so that sacct has work."""
CPUS, MEGABYTES = 64, 256_000

_CLIENT = """\
#!{python} -IS
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect({socket!r})
asked.sendall(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode() + b"\\n")
code, out, err = json.load(asked.makefile())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class Refusal(Exception):
    """The error message of a program that ends with exit code 1."""


@dataclass
class Job:
    """A job, or an element of an array."""

    base: int
    job_id: str
    name: str
    submitted: float
    bundle: BundlePaths
    exclude: frozenset[str]
    state: str = "PENDING"
    node: str = ""
    ended: float = 0.0


@dataclass(frozen=True)
class Begun:
    """An attempt that a job began. If ``outcome`` is "", the node failed before the attempt ended."""

    job_id: str
    node: str
    run_id: str
    attempt: int
    outcome: str


@dataclass
class Simulation:
    """The cluster. ``seconds`` is the average length of a run. ``node_failures`` is the share of jobs whose node fails."""

    nodes: int
    seconds: float
    node_failures: float
    jobs: dict[str, Job] = field(default_factory=dict)
    begun: list[Begun] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Faults that a real supervisor would meet and that no orchestrator may cause: an order on which another job works.
    """
    _next_id: int = 1
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _waiting: deque[Job] = field(default_factory=deque)
    _free: deque[str] = field(default_factory=deque)
    _due: list[tuple[float, int, Iterator[float]]] = field(default_factory=list)
    """Running jobs: when each continues, and how."""
    _turn: int = 0

    def __post_init__(self) -> None:
        self._free.extend(f"node{number:05d}" for number in range(1, self.nodes + 1))

    async def live(self) -> None:
        """Start jobs and continue them, forever."""
        while True:
            self._start_jobs()
            while self._due and self._due[0][0] <= time.time():
                _, _, job = heapq.heappop(self._due)
                self._continue(job)
                await asyncio.sleep(0)  # Let other tasks answer requests in between.
            await asyncio.sleep(0.02)

    def answer(self, program: str, arguments: Sequence[str]) -> str:
        """Return the output of ``program``."""
        programs: dict[str, Callable[[Sequence[str]], str]] = {
            "sbatch": self._sbatch, "squeue": self._squeue, "sacct": self._sacct, "scontrol": self._scontrol,
            "sinfo": self._sinfo, "scancel": self._scancel, "journal": self._journal,
        }  # fmt: skip
        if program not in programs:
            raise Refusal(f"{program}: not simulated")
        return programs[program](arguments)

    # --- programs ---

    def _sbatch(self, arguments: Sequence[str]) -> str:
        """Accept a submission. Its record, which is already on disk, lists the bundles."""
        options = _options(re.findall(r"^#SBATCH (--\S+)", Path(arguments[-1]).read_text(), re.MULTILINE))
        folder = Path(arguments[-1]).parent
        if options["nodes"] != "1" or "dependency" in options:
            raise Refusal("sbatch: error: several nodes, and dependencies, are not simulated")
        sweep = SweepPaths(folder.parent.parent)
        bundles = [sweep.bundle(name) for name in read_json(sweep.submissions / f"{folder.name}.json")["bundles"]]
        first, last = (int(place) for place in options.get("array", "0-0").partition("%")[0].split("-"))
        if (first, last) != (0, len(bundles) - 1) or last >= MAX_ARRAY_SIZE:
            raise Refusal("sbatch: error: Batch job submission failed: Invalid job array specification")
        base, self._next_id = self._next_id, self._next_id + 1
        exclude = frozenset(filter(None, options.get("exclude", "").split(",")))
        for place, bundle in enumerate(bundles):
            job_id = f"{base}_{place}" if "array" in options else str(base)
            job = Job(base, job_id, options["job-name"], time.time(), bundle, exclude)
            self.jobs[job_id] = job
            self._waiting.append(job)
        return f"Submitted batch job {base}\n"

    def _squeue(self, arguments: Sequence[str]) -> str:
        pattern = _options(arguments)["format"]
        oldest = time.time() - MIN_JOB_AGE
        listed = (job for job in self.jobs.values() if not job.ended or job.ended > oldest)
        return "".join(
            _filled(pattern, {
                "i": job.job_id, "T": job.state, "r": "Resources" if job.state == "PENDING" else "None", "S": "N/A",
                "N": job.node, "j": job.name,
            }) + "\n"
            for job in listed
        )  # fmt: skip

    def _sacct(self, arguments: Sequence[str]) -> str:
        options = _options(arguments)
        if options["format"] != "Submit,JobID,State,NodeList,JobName":
            raise Refusal(f"sacct: --format={options['format']} is not simulated")
        if "jobs" in options:
            named = set(options["jobs"].split(","))
            found = [job for job in self.jobs.values() if job.job_id in named or str(job.base) in named]
        else:
            found = [job for job in self.jobs.values() if job.name == options["name"]]
        rows = ((f"{job.submitted:.0f}", job.job_id, job.state, job.node or "None assigned", job.name) for job in found)
        return "".join(options["delimiter"].join(row) + "\n" for row in rows)

    def _scontrol(self, arguments: Sequence[str]) -> str:
        if arguments[-1] == "config":
            return f"ClusterName             = simulated\nMaxArraySize            = {MAX_ARRAY_SIZE}\n"
        if arguments[-1] == "partition":
            return "PartitionName=all Default=YES State=UP MaxTime=1-00:00:00 MinNodes=0 MaxNodes=UNLIMITED\n"
        raise Refusal(f"scontrol: {' '.join(arguments)} is not simulated")

    def _sinfo(self, _arguments: Sequence[str]) -> str:
        return f"all|{self.nodes}|{CPUS}|{MEGABYTES}|(null)|(null)\n"

    def _scancel(self, arguments: Sequence[str]) -> str:
        for job_id in (argument for argument in arguments if argument[0] != "-"):
            job = self.jobs[job_id]
            if job.state == "PENDING":
                self._end(job, "CANCELLED")
        return ""

    def _journal(self, _arguments: Sequence[str]) -> str:
        return json.dumps({"begun": [asdict(begun) for begun in self.begun], "faults": self.faults})

    # --- jobs ---

    def _start_jobs(self) -> None:
        while self._waiting and self._free:
            job = self._waiting.popleft()
            if job.ended:
                continue
            node = next((node for node in self._free if node not in job.exclude), None)
            if node is None:
                self._waiting.appendleft(job)
                return
            self._free.remove(node)
            job.state, job.node = "RUNNING", node
            self._continue(self._run(job))

    def _continue(self, job: Iterator[float]) -> None:
        seconds = next(job, None)
        if seconds is not None:
            self._turn += 1
            heapq.heappush(self._due, (time.time() + seconds, self._turn, job))

    def _end(self, job: Job, state: str) -> None:
        """End a job. A failed node stays down."""
        job.state, job.ended = state, time.time()
        if job.node and state != "NODE_FAIL":
            self._free.append(job.node)

    def _run(self, job: Job) -> Iterator[float]:
        """Act as launch.supervise.supervisor does, from the start of the job to its end. Yield the seconds between two
        actions."""
        # The time of the prolog and of the start of a supervisor.
        yield self._random.uniform(0.5, 1.5) * self.seconds / 4
        bundle, sweep = job.bundle, job.bundle.sweep
        order = from_json(BundleOrder, read_json(bundle.order))
        allocation = self._take(job)
        schedule = [(run_id, k) for run_id, k in order.schedule if not sweep.run(run_id).attempt(k).root.exists()]
        if len(schedule) < len(order.schedule):
            self.faults.append(f"job {job.job_id}: attempts of {order.bundle_id} have been begun already")
        fails = self._random.random() < self.node_failures
        fatal = self._random.randrange(len(schedule)) if fails and schedule else None
        for place, (run_id, number) in enumerate(schedule):
            attempt = sweep.run(run_id).attempt(number)
            with JsonLines(bundle.begun) as lines:
                lines.write(Beginning(run_id, number, time.time(), _owner(job)))
            started = _begin(attempt)
            seconds = self._random.uniform(0.5, 1.5) * self.seconds
            if place == fatal:
                yield seconds / 2
                self.begun.append(Begun(job.job_id, job.node, run_id, number, ""))
                self._end(job, "NODE_FAIL")  # The node's locks stay, as on a file system of which it was a client.
                return
            yield seconds
            _complete(attempt, f"{order.bundle_id}.{allocation}", started)
            self.begun.append(Begun(job.job_id, job.node, run_id, number, "COMPLETED"))
        os.truncate(bundle.lock, 0)
        self._end(job, "COMPLETED")

    def _take(self, job: Job) -> int:
        """Take the bundle as a supervisor with the lock does. Return the number of its allocation."""
        owner = asdict(_owner(job))
        write_json(job.bundle.lock, owner, sync=False)
        try:
            number = 1 + job.bundle.allocations.read_bytes().count(b"\n")
        except FileNotFoundError:
            number = 1
        with JsonLines(job.bundle.allocations) as lines:
            lines.write({"allocation": number, "time": time.time(), "job": job.job_id, "nodes": [job.node], **owner})
        return number


def _owner(job: Job) -> Owner:
    return Owner(job.node, f"boot of {job.node}", 1, job.job_id)


def _begin(attempt: AttemptPaths) -> float:
    """Claim the attempt, and write the first record of its rank."""
    now = time.time()
    attempt.logs.mkdir(parents=True)
    with JsonLines(attempt.events(0)) as lines:
        entered = {"time": now, "kind": "enter", "phase": "init", "step": None, "pid": 1}
        lines.write(entered | identity_of(attempt))
    return now


def _complete(attempt: AttemptPaths, allocation: str, started: float) -> None:
    record = attempt_record(read_spec(attempt.spec), allocation)
    with JsonLines(attempt.events(0)) as lines:
        for event in record.events[0][1:]:
            lines.write(event | {"time": event["time"] - STARTED + started})
    with JsonLines(attempt.metrics) as lines:
        for step in record.metrics:
            lines.write(step)
    write_json(attempt.environment, identity_of(attempt) | record.environment, sync=False)
    assert record.outcome is not None
    outcome = replace(record.outcome, started=started, ended=time.time())
    write_json(attempt.outcome, outcome_to_json(attempt, outcome), sync=False)


def _options(words: Sequence[str]) -> dict[str, str]:
    """Return the values of words "--name=value" and "--name", by name."""
    pairs = (word.removeprefix("--").partition("=") for word in words if word.startswith("--"))
    return {name: value for name, _, value in pairs}


def _filled(pattern: str, values: dict[str, str]) -> str:
    return re.sub("%([a-zA-Z])", lambda match: values[match[1]], pattern)


# --- the process ----------------------------------------------------------------------------------------------------


def install(folder: Path) -> Path:
    """Write the programs that ask the process of ``folder``. Return the folder to put first on PATH."""
    programs = folder / "programs"
    programs.mkdir(parents=True)
    for name in (*PROGRAMS, "journal"):
        path = programs / name
        path.write_text(_CLIENT.format(python=sys.executable, socket=str(folder / "socket")))
        path.chmod(0o755)
    return programs


async def serve(folder: Path, simulation: Simulation) -> None:
    """Answer the programs of ``folder``, and run the simulation."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        program, *arguments = json.loads(await reader.readline())
        try:
            reply: tuple[int, str, str] = (0, simulation.answer(program, arguments), "")
        except Refusal as refusal:
            reply = (1, "", f"{refusal}\n")
        writer.write(json.dumps(reply).encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(answer, folder / "socket", limit=2**22):
        await simulation.live()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="how long a run takes, on average")
    parser.add_argument("--node-failures", type=float, required=True, help="share of jobs whose node fails")
    options = parser.parse_args()
    asyncio.run(serve(options.folder, Simulation(options.nodes, options.seconds, options.node_failures)))


if __name__ == "__main__":
    main()
