"""The path of every file of a sweep.

A sweep is a folder. Each file in it has one writer:

    <sweep>/plan.json                       orchestrator      cells, rejections, bundles
    <sweep>/bundles/<bundle>/bundle.json    orchestrator      which attempts of which runs the bundle runs
    <sweep>/bundles/<bundle>/cancel         orchestrator      ends runs: all, or those it lists
    <sweep>/bundles/<bundle>/supervisor.log local_queue       what supervisors on this host printed, for people only
    <sweep>/bundles/<bundle>/lock           supervisor        who supervises the bundle (pid, start time, boot)
    <sweep>/bundles/<bundle>/allocations.jsonl supervisor        a line for each supervisor that took the bundle
    <sweep>/submissions/<token>.json        orchestrator      bundles submitted by one sbatch, and the job's id
    <sweep>/order.lock                      orchestrator      held while a command plans or cancels
    <sweep>/queue.lock                      local_queue       held while this host's queue lives
    <sweep>/queue.log, submitit/            orchestrator      for people only
    <sweep>/report/                         write_report      derived from the rest at any time: report.md, report.html,
                                                              report.json, summary.json, steps.parquet, plots/
    <sweep>/tracking/                       wandb_tracker     what a later upload to W&B needs
    <sweep>/runs/<run>/spec.json            orchestrator      the RunSpec
    <sweep>/runs/<run>/attempts/<k>/        supervisor        a folder that exists is a started attempt
        events/rank<r>.jsonl                that rank         phases with memory, captures, replays, exceptions
        metrics.jsonl                       rank 0            one object per step
        digests/rank<r>.jsonl               that rank         digests of its layers' outputs, one object per step, if the
                                                              spec asks for them (launch/contract/records/layer_digests.py)
        environment.json                    rank 0            versions, code, hardware, digests
        exits/rank<r>.json                  slurm_rank        how that rank's process ended (under Slurm)
        ranks.json                          torchrun_agent    exit codes of failed ranks, the first one first
        outcome.json                        supervisor        how it ended; without one it has not ended. Where Slurm
                                                              ended the supervisor, the orchestrator writes it
        logs/                               launcher and ranks, for people only
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AttemptPaths:
    root: Path

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def outcome(self) -> Path:
        return self.root / "outcome.json"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def exits(self) -> Path:
        return self.root / "ranks.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def spec(self) -> Path:
        return self.root.parent.parent / "spec.json"

    @property
    def number(self) -> int:
        return int(self.root.name)

    @property
    def rank_exits(self) -> Path:
        return self.root / "exits"

    def events(self, rank: int) -> Path:
        return self.root / "events" / f"rank{rank}.jsonl"

    def digests(self, rank: int) -> Path:
        return self.root / "digests" / f"rank{rank}.jsonl"

    def rank_exit(self, rank: int) -> Path:
        return self.rank_exits / f"rank{rank}.json"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"


@dataclass(frozen=True)
class RunPaths:
    root: Path

    @property
    def spec(self) -> Path:
        return self.root / "spec.json"

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(self.root.joinpath("attempts", str(number)))

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of all attempts that were started, in order."""
        try:
            return sorted(int(name) for name in os.listdir(self.root / "attempts") if name.isdigit())
        except FileNotFoundError:
            return []

    def attempts(self) -> list[AttemptPaths]:
        """Return all attempts that were started, in order."""
        return [self.attempt(number) for number in self.attempt_numbers()]


@dataclass(frozen=True)
class BundlePaths:
    root: Path

    @property
    def order(self) -> Path:
        return self.root / "bundle.json"

    @property
    def log(self) -> Path:
        return self.root / "supervisor.log"

    @property
    def cancel(self) -> Path:
        return self.root / "cancel"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def allocations(self) -> Path:
        return self.root / "allocations.jsonl"

    @property
    def sweep(self) -> SweepPaths:
        return SweepPaths(self.root.parent.parent)


@dataclass(frozen=True)
class SweepPaths:
    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def queue_lock(self) -> Path:
        return self.root / "queue.lock"

    @property
    def order_lock(self) -> Path:
        return self.root / "order.lock"

    @property
    def submissions(self) -> Path:
        return self.root / "submissions"

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def tracking(self) -> Path:
        return self.root / "tracking"

    def run(self, run_id: str) -> RunPaths:
        return RunPaths(self.root.joinpath("runs", run_id))

    def bundle(self, bundle_id: str) -> BundlePaths:
        return BundlePaths(self.root.joinpath("bundles", bundle_id))
