"""Log an attempt, or the report of a sweep, in a separate process.

    python -m launch.track ATTEMPT_DIR --settings '{"project": "graphs", "group": "tiny_moe"}'
    python -m launch.track SWEEP_DIR --settings '{"project": "graphs", "group": "tiny_moe"}'

A process that captures CUDA graphs must have no tracker threads, and no step may wait for a network. So this process only reads
records. It may be killed at any moment. Running it again delivers the whole attempt. It ends when the attempt has an outcome,
or when its standard input closes, because the supervisor holds the other end of that pipe.

A failure of a tracker prints one line on standard output and ends with exit code 0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from launch.common.redact import redact
from launch.common.typed_json import from_json
from launch.contract.model_flops import model_flops
from launch.contract.outcomes import read_outcome
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.spec import read_spec
from launch.track.attempt_content import run_summary, step_row
from launch.track.follow import follow
from launch.track.published_report import publish_report
from launch.track.settings import TrackSettings
from launch.track.tensorboard import EventFiles
from launch.track.weights_and_biases import Session, open_attempt

Say = Callable[[str], None]


class Sink(Protocol):
    """A tracker that receives an attempt."""

    def log(self, row: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any], *, complete: bool) -> None: ...


def track_attempt(attempt: AttemptPaths, settings: TrackSettings, say: Say) -> None:
    """Log ``attempt`` from its first step until it ends.

    Raises:
        ValueError: a variable of W&B contains a secret.
        Exception: any error of a tracker. The attempt's records do not change.
    """
    sweep = SweepPaths(attempt.root.parents[3])
    sinks: list[Sink] = []
    if settings.tensorboard and find_spec("tensorboard") is None:
        say("tensorboard is not installed, so there are no event files (pip install tensorboard)")
    elif settings.tensorboard:
        sinks.append(EventFiles(sweep.tracking / "tensorboard" / attempt.run_id / str(attempt.number)))
    with Session(sweep, name_of(attempt), settings, say) as session:
        if session.mode != "disabled":
            sinks.append(open_attempt(session, attempt))
        deliver(attempt, sinks)


def deliver(attempt: AttemptPaths, sinks: list[Sink]) -> None:
    spec, measured_ms = read_spec(attempt.spec), []
    # The operations of a CPU say nothing about a GPU.
    flops = model_flops(spec) if spec.placement.device == "cuda" else 0.0
    for step in follow(attempt):
        if step["phase"] == "measure":
            measured_ms.append(step["step_time_ms"])
        row = step_row(step, spec.parallelism.world_size, flops)
        for sink in sinks:
            sink.log(row)
    outcome, summary = read_outcome(attempt), run_summary(attempt, spec, measured_ms)
    for sink in sinks:
        sink.finish(summary, complete=outcome is not None and outcome.results_intact)


def name_of(attempt: AttemptPaths) -> str:
    return f"{attempt.run_id}-a{attempt.number}"


def explain(error: Exception) -> str:
    """Return why a tracker ended early, and the fix, in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name == "wandb":
        return "wandb is not installed; metrics stay in metrics.jsonl (pip install wandb)"
    reason = next(iter(str(error).splitlines()), "")
    return f"ended early, {type(error).__name__}: {reason}; metrics stay in metrics.jsonl, run this again to upload"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.track", description="Log an attempt, or a sweep's report.")
    parser.add_argument("folder", type=Path, help="<sweep>, or <sweep>/runs/<run>/attempts/<k>")
    parser.add_argument("--settings", type=json.loads, required=True, help="TrackSettings, as a JSON object")
    options = parser.parse_args()
    # The supervisor handles an interrupt from the keyboard or from the stop button of the W&B page.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = options.folder.resolve()
    is_sweep = (folder / "plan.json").is_file()
    if not is_sweep:
        # Give runs priority. A report is not slowed down, because somebody waits for it.
        os.nice(10)
    name = folder.name if is_sweep else name_of(AttemptPaths(folder))

    def say(message: str) -> None:
        sys.stdout.write(f"tracking {name}: {redact(message)}\n")
        sys.stdout.flush()

    try:
        settings = from_json(TrackSettings, options.settings)
        if is_sweep:
            publish_report(SweepPaths(folder), settings, say)
        else:
            track_attempt(AttemptPaths(folder), settings, say)
    except Exception as error:
        # A failed tracker must never fail a run. Skip wandb's exit handlers, which would wait for the failed operation.
        say(explain(error))
        os._exit(0)


if __name__ == "__main__":
    main()
