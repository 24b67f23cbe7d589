"""Measure how fast the orchestrator is. Print the table of the speed promises, each measured as a whole process.

    python benchmarks/speed.py

Each row runs a command of the product several times, from Python's start to its end. It shows the CPU time of its processes
(median and maximum), the peak memory and the promise. CPU time is less sensitive to other work than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

RECIPE = """\
name: ten_thousand
engine: torch_native
model: {preset: tiny_dense}
training: {steps: 120}
repeats: 2
sweep:
  grid:
    training.seed: [%s]
    training.learning_rate: [1.0e-3, 2.0e-3, 3.0e-3, 4.0e-3, 5.0e-3]
    training.precision: [fp32, bf16]
    cuda_graph: [{impl: torch_compile}]
"""
"""250 seeds, 5 rates, 2 precisions, eager and compiled, 2 repeats: 10,000 runs."""

GPU_RECIPE = """\
name: ten_thousand_on_gpus
engine: torch_native
model: {preset: tiny_dense}
training: {steps: 120, precision: bf16}
resources: {device: cuda}
repeats: 2
sweep:
  grid:
    training.seed: [%s]
    training.learning_rate: [1.0e-3, 2.0e-3, 3.0e-3, 4.0e-3, 5.0e-3]
    cuda_graph: [{impl: torch}]
"""
"""500 seeds, 5 rates, eager and graphed, 2 repeats: 10,000 runs, whose GPU memory is forecast."""
PROFILE = "partition: gpu\ngpu_memory_gib: 80\n"
"""A cluster with the least that a forecast needs."""
SHELL_SETTINGS = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
"""What commands run without. With the first, each command would compile all of its modules. With the second, it would write each line on its own."""

WRITE = """\
from pathlib import Path
from launch.contract.plan import read_plan
from launch.supervise.pack_attempt import pack_if_completed
from tests.records import write_sweep
sweep = write_sweep(Path({root!r}), workloads={workloads}, repeats=2, steps={steps})
for run_id in read_plan(sweep).cell_of_run():
    pack_if_completed(sweep.run(run_id).attempt(1), ranks=1)
"""


@dataclass(frozen=True)
class Row:
    """One promise and its measurement."""

    name: str
    seconds: tuple[float, ...]
    peak_bytes: int
    promise: str

    def __str__(self) -> str:
        median, slowest = statistics.median(self.seconds), max(self.seconds)
        return f"{self.name:42} {median:8.2f} s {slowest:8.2f} s {self.peak_bytes / 2**20:7.0f} MiB   {self.promise}"


def measure(name: str, promise: str, command: Sequence[str], repeats: int) -> Row:
    """Run ``command`` once to warm the disk's cache, then ``repeats`` times.

    Raises:
        RuntimeError: the command failed.
    """
    settings = {name: value for name, value in os.environ.items() if name not in SHELL_SETTINGS}
    os.sync()  # Write the prepared files back now, not during the measurement.
    seconds, peak = [], 0
    for turn in range(repeats + 1):
        with subprocess.Popen(
            command, cwd=ROOT, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            errors = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 3, 4):
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {errors}")
        if turn:
            seconds.append(usage.ru_utime + usage.ru_stime)
            peak = max(peak, usage.ru_maxrss * 1024)
    return Row(name, tuple(seconds), peak, promise)


def orchestrator(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator", *arguments]


def write_records(root: Path, workloads: int, steps: int) -> None:
    """Write records of four runs per workload, packed as a supervisor packs them.

    Another process writes them, because Linux counts a parent's memory in its child's peak.
    """
    code = WRITE.format(root=str(root), workloads=workloads, steps=steps)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def rows(folder: Path, repeats: int) -> list[Row]:
    recipe = folder / "ten_thousand.yaml"
    recipe.write_text(RECIPE % ", ".join(map(str, range(250))))
    gpu_recipe, profile = folder / "on_gpus.yaml", folder / "cuda-graph-orchestrator" / "clusters" / "site.yaml"
    gpu_recipe.write_text(GPU_RECIPE % ", ".join(map(str, range(500))))
    profile.parent.mkdir(parents=True)
    profile.write_text(PROFILE)
    status, reports = folder / "status", folder / "reports"
    write_records(status / "many_runs", workloads=2500, steps=10)
    write_records(reports / "two_thousand", workloads=500, steps=120)
    write_records(reports / "many_steps", workloads=250, steps=1000)
    return [
        measure("--help", "0.1 s", orchestrator("--help"), repeats),
        measure("plan of 10,000 runs", "2 s", orchestrator("plan", str(recipe)), repeats),
        measure("the same, with forecasts of GPU memory", "5 s", ["env", f"XDG_CONFIG_HOME={folder}", *orchestrator("plan", str(gpu_recipe), "--executor", "slurm", "--cluster", "site")], repeats),
        measure("status of 10,000 recorded runs", "1 s", orchestrator("status", "many_runs", "--store", str(status)), repeats),
        measure("prune --dry-run of the same", "", orchestrator("prune", "many_runs", "--keep", "reports", "--dry-run", "--store", str(status)), repeats),
        measure("report of 2,000 runs of 120 steps", "15 s", orchestrator("report", "two_thousand", "--store", str(reports)), repeats),
        measure("report of 1,000 runs of 1,000 steps", "8 s, 400 MB", orchestrator("report", "many_steps", "--store", str(reports)), repeats),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure run times and compare them with the promised ones.")
    parser.add_argument("--repeats", type=int, default=5, help="number of counted runs of each command")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measured = rows(Path(name), options.repeats)
    print(f"{'':42} {'median':>10} {'slowest':>10} {'memory':>11}   promise")
    print(*measured, sep="\n")


if __name__ == "__main__":
    main()
