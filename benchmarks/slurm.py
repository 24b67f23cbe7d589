"""Run a large sweep through Slurm by the command line. Check that every run is made once, and measure the cost of watching it.

    python -m benchmarks.slurm real --bundles 500                    the test cluster (tests/slurm/cluster.py), real runs
    python -m benchmarks.slurm simulated --runs 10000 --nodes 1000   benchmarks/simulated_slurm.py in the place of Slurm

The exit code is 1 if a run is lost, or was made more often than failures of nodes require.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulated_slurm import install
from launch.contract.outcomes import Outcome, read_outcome
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.plan import Plan, read_plan
from tests.integration.host import recipe, wait_until
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parent.parent
CALLED = ("sbatch", "squeue", "sacct")
SUBMISSION_PROMISE = 1.0
"""Milliseconds of the orchestrator's own time per run."""
MEMORY_PROMISE = 300
"""MB of memory of the command."""

_COUNTED = """\
#!/bin/bash
test -n "$SLURM_JOB_ID" && exec {real} "$@"
begun=$EPOCHREALTIME
{real} "$@"
code=$?
echo {name} $begun $EPOCHREALTIME >> {calls}
exit $code
"""
"""Bash reads the clock itself, because another process would count as the orchestrator's own time."""


@dataclass(frozen=True)
class Call:
    """A call of one of Slurm's programs, with times in seconds since the epoch."""

    program: str
    begun: float
    ended: float


@dataclass(frozen=True)
class Command:
    """The command of a sweep, after its end."""

    sweep: SweepPaths
    begun: float
    seconds: float
    code: int
    own_bytes: int
    """The command's peak memory."""
    largest_bytes: int
    """The largest peak memory of the command and of the processes that it started, such as the report's."""
    calls: tuple[Call, ...]
    out: str

    def of(self, program: str) -> list[Call]:
        return [call for call in self.calls if call.program == program]

    @property
    def submitting(self) -> list[Call]:
        """The calls of sbatch, except those of a retry."""
        watched = [call.begun for call in self.of("squeue")]
        return [call for call in self.of("sbatch") if not watched or call.begun < watched[0]]

    @property
    def planned(self) -> float:
        """When the plan was on disk, in seconds since the epoch."""
        return self.sweep.plan.stat().st_mtime

    @property
    def submission_seconds(self) -> float:
        """The seconds from then to the last sbatch's end, without the time of sbatch itself."""
        calls = self.submitting
        return calls[-1].ended - self.planned - sum(call.ended - call.begun for call in calls)


# --- the command ----------------------------------------------------------------------------------------------------


def run(folder: Path, path: str, content: dict[str, Any], profile: dict[str, Any], **environment: str) -> Command:
    """Run the sweep that ``content`` describes, with Slurm's programs found on ``path``."""
    programs, calls, out = folder / "counted", folder / "calls", folder / "out"
    _count(programs, calls, path)
    clusters = folder / "home" / ".config" / "cuda-graph-orchestrator" / "clusters"
    clusters.mkdir(parents=True)
    (clusters / "default.yaml").write_text(json.dumps(profile))
    written = folder / "recipe.yaml"
    written.write_text(json.dumps(content))
    command = [sys.executable, "-m", "orchestrator", "sweep", str(written), "--executor", "slurm"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    own = {"PATH": f"{programs}:{path}", "PYTHONPATH": str(ROOT), "HOME": str(folder / "home")}
    begun = time.time()
    with open(out, "wb") as file:
        process = subprocess.Popen(
            [*command, "--store", str(folder / "store")], cwd=folder, env=kept | own | environment,
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
        own_bytes = _peak(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    rows = (line.split() for line in calls.read_text().splitlines())
    called = tuple(Call(name, float(start), float(end)) for name, start, end in rows)
    sweep = SweepPaths(folder / "store" / content["name"])
    seconds, largest_bytes = time.time() - begun, usage.ru_maxrss * 1024
    return Command(
        sweep, begun, seconds, process.returncode, own_bytes, largest_bytes, called, out.read_text(errors="replace")
    )


def _peak(pid: int) -> int:
    """Return the peak memory of process ``pid`` once it has ended. Changes within 0.2 s may be missed."""
    peak, folder = 0, Path("/proc", str(pid))
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        found = re.search(r"VmHWM:\s*(\d+) kB", (folder / "status").read_text())
        if found is not None:
            peak = int(found[1]) * 1024
        time.sleep(0.2)
    return peak


def _count(programs: Path, calls: Path, path: str) -> None:
    """Put programs before Slurm's own that record each call from outside a job."""
    programs.mkdir()
    calls.touch()
    for name in CALLED:
        real = subprocess.run(
            ["sh", "-c", f"command -v {name}"], env={"PATH": path}, capture_output=True, text=True, check=True
        ).stdout.strip()
        (programs / name).write_text(_COUNTED.format(real=real, name=name, calls=calls))
        (programs / name).chmod(0o755)


# --- real -----------------------------------------------------------------------------------------------------------


def real(folder: Path, bundles: int, at_once: int) -> Command:
    """Run ``bundles`` short eager runs, each in its own workload, with ``at_once`` jobs at a time."""
    cluster = Cluster(folder / "cluster")
    cluster.up(with_this_process=True)
    content = recipe("real", steps=20, sweep={"grid": {"training.seed": list(range(bundles))}})
    own = cluster.environment
    try:
        return run(folder, own["PATH"], content, {"max_jobs": at_once}, SLURM_CONF=own["SLURM_CONF"])
    finally:
        cluster.down()


# --- simulated ------------------------------------------------------------------------------------------------------


def simulated(
    folder: Path, runs: int, nodes: int, seconds: float, node_failures: float
) -> tuple[Command, dict[str, Any]]:
    """Run pairs of an eager and a graphed run. Return the command, and the simulator's journal."""
    seeds = {"grid": {"training.seed": list(range(runs // 2))}}
    content = recipe("simulated", steps=40, graphed=True, sweep=seeds)
    programs = install(folder)
    with _simulator(folder, nodes, seconds, node_failures):
        command = run(folder, f"{programs}:{os.environ['PATH']}", content, {})
        journal = json.loads(subprocess.run([programs / "journal"], capture_output=True, text=True, check=True).stdout)
    return command, journal


@contextlib.contextmanager
def _simulator(folder: Path, nodes: int, seconds: float, node_failures: float) -> Iterator[None]:
    """Run the simulator in a separate process, because Linux counts a parent's memory in its child's peak."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.simulated_slurm", str(folder), "--nodes", str(nodes), "--seconds",
         str(seconds), "--node-failures", str(node_failures)], cwd=ROOT,
    )  # fmt: skip
    try:
        wait_until((folder / "socket").is_socket, 20, "the simulator")
        yield
    finally:
        process.terminate()
        process.wait()


# --- judging --------------------------------------------------------------------------------------------------------


def flaws(plan: Plan, attempts: dict[str, list[AttemptPaths]], outcomes: dict[Path, Outcome | None]) -> Iterator[str]:
    """Return all errors. The latest attempt of each run must have completed. Each node failure allows one more attempt
    of its run, together with the eager baseline of a graphed run."""
    for run_id, made in attempts.items():
        last = outcomes[made[-1].root] if made else None
        if last is None or last.outcome != "COMPLETED":
            yield f"{run_id}: {last.outcome if last else 'without an outcome'} after {len(made)} attempts"
        if [attempt.number for attempt in made] != list(range(1, len(made) + 1)):
            yield f"{run_id}: attempts {[attempt.number for attempt in made]}"
    for bundle in plan.bundles:
        eager, *graphed = (run_id for run_id in bundle.run_ids)
        lost = {run_id: _lost(attempts[run_id], outcomes) for run_id in bundle.run_ids}
        wanted = {eager: 1 + sum(lost.values()), **{run_id: 1 + lost[run_id] for run_id in graphed}}
        for run_id, count in wanted.items():
            if len(attempts[run_id]) != count:
                yield f"{run_id}: {len(attempts[run_id])} attempts instead of {count}"


def _lost(attempts: Sequence[AttemptPaths], outcomes: dict[Path, Outcome | None]) -> int:
    """Return the attempts that ended with their node."""
    ended = (outcomes[attempt.root] for attempt in attempts)
    return sum(outcome is not None and outcome.outcome == "NODE_FAIL" for outcome in ended)


def flaws_of_journal(journal: dict[str, Any], outcomes: dict[Path, Outcome | None], sweep: SweepPaths) -> Iterator[str]:
    """Compare the simulator's journal with what the orchestrator reports."""
    yield from journal["faults"]
    begun = journal["begun"]
    failed_on: dict[str, set[str]] = {}
    for line in begun:  # Lines are in the order in which runs ended.
        run_id, place = line["run_id"], f"{line['run_id']}, attempt {line['attempt']}"
        outcome = outcomes.get(sweep.run(run_id).attempt(line["attempt"]).root)
        word, node = (outcome.outcome, outcome.node) if outcome else ("nothing", "")
        if word != (line["outcome"] or "NODE_FAIL"):
            yield f"{place}: {word} is recorded, it was {line['outcome'] or 'NODE_FAIL'}"
        if line["node"] in failed_on.get(run_id, ()):
            yield f"{place}: again on {line['node']}, which had failed"
        if not line["outcome"]:
            failed_on.setdefault(run_id, set()).add(line["node"])
            if node != line["node"]:
                yield f"{place}: node {node!r} is recorded, it was {line['node']}"
    if len(begun) != len(outcomes):
        yield f"{len(outcomes)} attempts on disk, {len(begun)} were begun"


def show(command: Command, plan: Plan, outcomes: dict[Path, Outcome | None]) -> None:
    runs = sum(len(bundle.run_ids) for bundle in plan.bundles)
    report = command.sweep.report / "report.md"
    ended = max((outcome.ended for outcome in outcomes.values() if outcome), default=0.0)
    counts = Counter(outcome.outcome if outcome else "none" for outcome in outcomes.values())
    rows = {
        "runs, bundles, attempts": f"{runs:,}, {len(plan.bundles):,}, {len(outcomes):,}",
        "outcomes of attempts": ", ".join(f"{count:,} {word}" for word, count in sorted(counts.items())),
        "the command": f"{command.seconds:.1f} s, exit code {command.code}",
        "  until the plan is on disk": f"{command.planned - command.begun:.1f} s",
        "  submission": _submission(command, runs),
        "  the last run's end to the report": f"{report.stat().st_mtime - ended:.1f} s" if report.exists() else "none",
        "memory of the command": f"{command.own_bytes / 1e6:.0f} MB; {MEMORY_PROMISE} MB",
        "  or of the report's process": f"{command.largest_bytes / 1e6:.0f} MB",
        **{f"{name} calls": _calls(command.of(name)) for name in CALLED},
    }
    print("\n".join(f"{name:36}{value}" for name, value in rows.items()))


def _submission(command: Command, runs: int) -> str:
    milliseconds = command.submission_seconds * 1000 / runs
    return f"{milliseconds:.2f} ms a run beside sbatch ({len(command.submitting)} calls); {SUBMISSION_PROMISE:g} ms"


def _calls(calls: Sequence[Call]) -> str:
    text = str(len(calls))
    if calls:
        text += f", {statistics.median(call.ended - call.begun for call in calls) * 1000:.0f} ms each"
    if len(calls) > 1:
        pauses = [later.begun - earlier.ended for earlier, later in itertools.pairwise(calls)]
        text += f", {min(pauses):.1f} s at least and {statistics.median(pauses):.1f} s by median in between"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a large sweep through Slurm and print what it cost.")
    modes = parser.add_subparsers(dest="mode", required=True)
    on_cluster = modes.add_parser("real", help="real runs on the test cluster")
    on_cluster.add_argument("--bundles", type=int, default=500)
    on_cluster.add_argument(
        "--at-once", type=int, default=os.cpu_count() or 1, help="number of jobs that run at the same time"
    )
    stub = modes.add_parser("simulated", help="simulated jobs, under a simulated Slurm")
    stub.add_argument("--runs", type=int, default=10_000)
    stub.add_argument("--nodes", type=int, default=1_000)
    stub.add_argument("--seconds", type=float, default=5.0, help="how long a run takes, on average")
    stub.add_argument("--node-failures", type=float, default=0.01, help="share of jobs whose node fails")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in; it is not deleted at the end")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        journal = None
        if options.mode == "real":
            command = real(folder, options.bundles, options.at_once)
        else:
            command, journal = simulated(folder, options.runs, options.nodes, options.seconds, options.node_failures)
        if not command.of("squeue"):
            sys.exit(f"nothing was submitted and watched:\n{command.out}")
        plan = read_plan(command.sweep)
        run_ids = (run_id for bundle in plan.bundles for run_id in bundle.run_ids)
        attempts = {run_id: command.sweep.run(run_id).attempts() for run_id in run_ids}
        outcomes = {attempt.root: read_outcome(attempt) for made in attempts.values() for attempt in made}
        show(command, plan, outcomes)
        wrong = list(flaws(plan, attempts, outcomes))
        if journal is not None:
            wrong += flaws_of_journal(journal, outcomes, command.sweep)
    print(*wrong[:20], f"{len(wrong)} flaws" if wrong else "every run completed, none was made without need", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
