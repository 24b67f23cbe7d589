"""Measure the CPU time to prepare runs on the login node. Compare it with other tools that do so, in alternating turns.

    python benchmarks/peers.py --dora PYTHON --cloudai PYTHON

Each PYTHON is the interpreter of an environment in which that tool is installed (``pip install dora-search``; CloudAI from its
repository). Nothing is submitted: sbatch is a script that prints a job's number, and squeue and sacct print nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECIPE = """\
name: many
model: {preset: tiny_dense}
training: {steps: 120}
repeats: 1
sweep: {grid: {training.seed: [%s], cuda_graph: [{impl: torch_compile}]}}
"""
"""The recipe has an eager and a compiled run for each seed."""
SUBMITIT = """\
import submitit
executor = submitit.AutoExecutor("logs", cluster="slurm")
executor.update_parameters(timeout_min=10)
executor.map_array(print, range(%d))
"""
DORA_PROGRAM = """\
import argparse
from dora import argparse_main
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
@argparse_main(parser=parser, dir="out")
def main(): pass
"""
DORA_GRID = """\
from dora import Explorer
@Explorer
def explorer(launcher):
    for seed in range(%d):
        launcher({"seed": seed})
"""
CLOUDAI_TEST = 'name = "sleep"\ndescription = "sleep"\ntest_template_name = "Sleep"\n[cmd_args]\nseconds = 1\n'
CLOUDAI_SYSTEM = """\
name = "cluster"
scheduler = "slurm"
install_path = "install"
output_path = "results"
default_partition = "batch"
[[partitions]]
name = "batch"
"""
CLOUDAI_RUN = '[[Tests]]\nid = "t%d"\nnum_nodes = 1\ntime_limit = "00:10:00"\ntest_name = "sleep"\n'


class Tool(NamedTuple):
    """A command that prepares runs, and the files that it reads."""

    name: str
    command: list[str]
    files: dict[str, str]


def tools(runs: int, dora: str | None, cloudai: str | None) -> list[Tool]:
    seeds = ", ".join(map(str, range(runs // 2)))
    plan = [sys.executable, "-m", "orchestrator", "plan", "many.yaml"]
    found = [
        Tool("plan: rules, cells, bundles", plan, {"many.yaml": RECIPE % seeds}),
        Tool("submitit alone: one job array", [sys.executable, "submit.py"], {"submit.py": SUBMITIT % runs}),
    ]
    if dora:
        command = [dora, "-m", "dora", "-P", "many", "grid", "many", "--dry_run", "--no_monitoring"]
        files = {"many/__init__.py": "", "many/train.py": DORA_PROGRAM, "many/grids/__init__.py": ""}
        found.append(Tool("dora grid --dry_run", command, files | {"many/grids/many.py": DORA_GRID % runs}))
    if cloudai:
        options = "dry-run --system-config system.toml --tests-dir tests --test-scenario scenario.toml"
        command = [cloudai, "-c", "from cloudai.cli import main; main()", *options.split()]
        scenario = 'name = "many"\n' + "".join(CLOUDAI_RUN % number for number in range(runs))
        files = {"system.toml": CLOUDAI_SYSTEM, "tests/sleep.toml": CLOUDAI_TEST, "scenario.toml": scenario}
        found.append(Tool("cloudai dry-run", command, files))
    return found


def cpu_seconds(tool: Tool) -> float:
    """Run the tool in a new folder, and return the CPU time of its processes.

    Raises:
        RuntimeError: the command failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stand_ins = {"bin/sbatch": "echo Submitted batch job 1", "bin/squeue": "", "bin/sacct": ""}
        scripts = {path: f"#!/bin/sh\n{line}\n" for path, line in stand_ins.items()}
        for path, text in (tool.files | scripts).items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755)
        environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(tool.command, cwd=folder, env=environment, stdout=output, stderr=output)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{tool.name} ended with {process.returncode}: {log.read_text()[-2000:]}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dora", metavar="PYTHON", help="the interpreter with dora")
    parser.add_argument("--cloudai", metavar="PYTHON", help="the interpreter with CloudAI")
    parser.add_argument("--runs", type=int, default=200, help="number of runs to prepare (default: 200)")
    parser.add_argument("--turns", type=int, default=5, help="counted turns (default: 5)")
    options = parser.parse_args()
    compared = tools(options.runs, options.dora, options.cloudai)
    turns = [[cpu_seconds(tool) for tool in compared] for _ in range(options.turns + 1)][1:]
    print(f"| {options.runs} runs | CPU time, median | over plan |\n| --- | --- | --- |")
    for number, tool in enumerate(compared):
        seconds = statistics.median(turn[number] for turn in turns)
        ratio = statistics.median(turn[number] / turn[0] for turn in turns)
        print(f"| {tool.name} | {seconds:.2f} s | {ratio:.1f} |")


if __name__ == "__main__":
    main()
