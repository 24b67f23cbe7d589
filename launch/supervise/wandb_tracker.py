"""Log a run's metrics to Weights & Biases, in a separate process.

    python -m launch.supervise.wandb_tracker ATTEMPT_DIR --settings '{"project": "graphs", "group": "tiny_moe"}'

A process that captures CUDA graphs must have no tracker threads, and no step may wait for a network. So this process
only reads the run's records. It may be killed at any moment, and running it again delivers the whole attempt. It ends
when the attempt has an outcome, or when its standard input closes: the supervisor holds the other end of that pipe.

Any failure of Weights & Biases is one line on standard output and exit code 0. wandb itself reads the API key, from the
environment or from netrc; we write it to no file and no command line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import netrc
import os
import secrets
import select
import shutil
import signal
import statistics
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from launch.common.atomic_files import parse_json
from launch.common.redact import Secrets, is_secret_name, redact
from launch.common.typed_json import from_json
from launch.contract.outcomes import Outcome, read_outcome
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.records.events import read_events
from launch.contract.records.step_check import StepCheck
from launch.contract.records.step_metrics import step_from_json
from launch.contract.spec import RunSpec, read_spec, spec_to_json

if TYPE_CHECKING:
    import wandb

TrackMode = Literal["auto", "online", "offline", "disabled"]

POLL_SECONDS = 1.0
REACH_SECONDS = 3.0
FINISH_SECONDS = 25.0
"""How long the final upload may take: less than launch.supervise.supervisor waits, so that the tracker itself reports what
it could not deliver."""

QUIET: Mapping[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "save_code": False,
    "symlink": False,
    "finish_timeout": FINISH_SECONDS,
    "finish_timeout_raises": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""wandb settings that restrict it to what we log: no console, code, git, packages or machine, and a limited wait."""


@dataclass(frozen=True)
class TrackSettings:
    """Where a sweep's runs are logged. ``group`` is the sweep's name; ``entity`` None is the key owner's default.

    Raises:
        ValueError: ``mode`` is not one of auto, online, offline, disabled.
    """

    project: str
    group: str
    entity: str | None = None
    mode: TrackMode = "auto"
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in get_args(TrackMode):
            raise ValueError(f"tracking mode={self.mode!r} is unknown; use one of {', '.join(get_args(TrackMode))}")


def settings_from_json(content: Mapping[str, Any]) -> TrackSettings:
    """Return the settings whose ``dataclasses.asdict`` is ``content``. Keys with a default may be missing.

    Raises:
        TypeError: a key is missing or unknown.
        ValueError: the mode is unknown.
    """
    return TrackSettings(**dict(content) | {"tags": tuple(content.get("tags", ()))})


# --- what is logged -------------------------------------------------------------------------------------------------


def run_config(spec: RunSpec, attempt: AttemptPaths) -> dict[str, Any]:
    """Return the resolved spec, and the ids to group and filter by."""
    names = {"workload_id": spec.workload_id, "task_id": spec.task_id}
    return spec_to_json(spec) | names | {"run_id": attempt.run_id, "attempt": attempt.number}


def run_summary(outcome: Outcome | None, measured_ms: Sequence[float]) -> dict[str, Any]:
    """Return how an attempt ended, and the median of its measured step times in ms, as far as both are known."""
    summary: dict[str, Any] = {}
    if outcome is not None:
        summary |= {"outcome": outcome.outcome, "phase": outcome.phase, "failure_class": outcome.failure_class}
    if measured_ms:
        # A median among NaNs is undefined: sorting depends on their positions.
        finite = all(map(math.isfinite, measured_ms))
        summary["median_step_time_ms"] = statistics.median(measured_ms) if finite else math.nan
    return summary


def check_summary(checks: Sequence[StepCheck]) -> dict[str, Any]:
    """Return how many step checks of all ranks took place, their faults, and the largest difference in units of its noise."""
    done = [check for check in checks if not check.missing]
    if not checks:
        return {}
    rows = [row for check in done for row in check.rows]
    largest = max((row.in_noise for row in rows), default=0.0)
    return {
        "step_checks": len(done),
        "step_check_faults": sum(row.is_fault for row in rows),
        "step_check_largest_difference": largest,
    }


def _read_checks(attempt: AttemptPaths, spec: RunSpec) -> list[StepCheck]:
    ranks = range(spec.parallelism.world_size if spec.checked_steps else 0)
    events = (event for rank in ranks for event in read_events(attempt, rank) if event["kind"] == "step_check")
    return [from_json(StepCheck, event["check"]) for event in events]


def follow(attempt: AttemptPaths) -> Iterator[dict[str, Any]]:
    """Yield the attempt's steps as they are written, from the first, until the attempt or the supervisor ends."""
    tail = Tail(attempt.metrics)
    ended = False
    while not ended:
        # Check for the end first, so that the last read covers everything written before it.
        ended = attempt.has_ended or _supervisor_ended(POLL_SECONDS)
        yield from tail.read()


class Tail:
    """Read each complete line of a growing file once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                whole, newline, _torn = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        self._offset += len(whole + newline)
        for line in whole.splitlines():
            yield step_from_json(parse_json(line))


def _supervisor_ended(timeout: float) -> bool:
    """Wait at most ``timeout`` seconds for standard input to close. Return whether it did."""
    readable, _, _ = select.select([0], [], [], timeout)
    return bool(readable) and not os.read(0, 4096)


# --- where it goes --------------------------------------------------------------------------------------------------


def why_offline(base_url: str) -> str | None:
    """Return why the server at ``base_url`` cannot be used, in words; None where it can."""
    if not _has_key(urllib.parse.urlsplit(base_url).netloc):
        return "no API key is configured (WANDB_API_KEY or netrc)"
    try:
        with urllib.request.urlopen(urllib.request.Request(base_url, method="HEAD"), timeout=REACH_SECONDS):
            return None
    except urllib.error.HTTPError:
        # It answered.
        return None
    except (OSError, http.client.HTTPException) as error:
        return f"{base_url} cannot be reached ({error})"


def _has_key(host: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def choose_mode(
    attempt: AttemptPaths, settings: TrackSettings, base_url: str
) -> Literal["online", "offline", "disabled"]:
    """Return the recipe's mode. For auto: WANDB_MODE where it is offline or disabled, else online where possible."""
    if settings.mode != "auto":
        return settings.mode
    variable = os.environ.get("WANDB_MODE")
    if variable == "disabled":
        return "disabled"
    reason = "WANDB_MODE is offline" if variable == "offline" else why_offline(base_url)
    if reason is None:
        return "online"
    upload = "upload later with: wandb sync tracking/wandb/offline-run-* (in the sweep's folder)"
    say(attempt, f"offline, as {reason}; {upload}")
    return "offline"


def tracker_id(attempt: AttemptPaths, tracking: Path) -> str:
    """Return the W&B id of ``attempt``: always the same, and unique to the sweep's folder.

    Two people who run one recipe in one project have the same run_ids. A random token of the sweep's folder keeps their
    runs apart.
    """
    path, token = tracking / "id", secrets.token_hex(4)
    tracking.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        temporary = tracking / f".id.{token}"
        temporary.write_text(token)
        try:
            # Unlike a rename, a link never replaces another tracker's token.
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return f"{_name(attempt)}-{path.read_text()}"


def _name(attempt: AttemptPaths) -> str:
    return f"{attempt.run_id}-a{attempt.number}"


# --- the process ----------------------------------------------------------------------------------------------------


def track(attempt: AttemptPaths, settings: TrackSettings) -> None:
    """Log ``attempt`` from its first step until it ends.

    Raises:
        ValueError: a variable of W&B's holds a secret.
        Exception: whatever wandb raises. The attempt's records are not touched.
    """
    _check_variables(os.environ)
    tracking = SweepPaths(attempt.root.parents[3]).tracking
    cache = tracking / "cache" / _name(attempt)
    wandb = _import_wandb(cache)
    _log(wandb, attempt, settings, tracking)
    wandb.teardown()
    shutil.rmtree(cache, ignore_errors=True)


def _log(wandb: Any, attempt: AttemptPaths, settings: TrackSettings, tracking: Path) -> None:
    quiet = {key: value for key, value in QUIET.items() if key in wandb.Settings.model_fields}
    mode = choose_mode(attempt, settings, wandb.setup(wandb.Settings(**quiet)).settings.base_url)
    if mode == "disabled":
        return say(attempt, "disabled; metrics stay in metrics.jsonl")
    spec = read_spec(attempt.spec)
    run = wandb.init(
        project=settings.project,
        entity=settings.entity,
        id=tracker_id(attempt, tracking),
        name=_name(attempt),
        group=settings.group,
        job_type="graphed" if spec.graphed else "eager",
        tags=settings.tags,
        config=run_config(spec, attempt),
        dir=tracking,
        mode=mode,
        resume="allow",
    )
    if mode == "online":
        say(attempt, f"online at {run.url}")
    deliver(attempt, run)


def _check_variables(environment: Mapping[str, str]) -> None:
    """Check that no variable of W&B's but the key holds a secret: wandb writes their values to its files, and uploads them.

    Raises:
        ValueError: one does.
    """
    found = Secrets(environment)
    for name, value in environment.items():
        if name.startswith("WANDB_") and not is_secret_name(name) and (what := found.find(value)):
            raise ValueError(f"{name} holds {what}; set it to another value")


def _import_wandb(cache: Path) -> Any:
    """Import wandb with its cache in the sweep's folder and without its own error reports."""
    os.environ.setdefault("WANDB_CACHE_DIR", str(cache))
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb


def deliver(attempt: AttemptPaths, run: wandb.Run) -> None:
    """Log every step, then the summary, and finish ``run``. W&B shows it as failed if its results are not intact."""
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    measured_ms = []
    for step in follow(attempt):
        if step["phase"] == "measure":
            measured_ms.append(step["step_time_ms"])
        # A tracker that was killed has delivered the earlier ones.
        if step["step"] >= run.starting_step:
            run.log(step, step=step["step"], commit=True)
    outcome = read_outcome(attempt)
    run.summary.update(
        run_summary(outcome, measured_ms) | check_summary(_read_checks(attempt, read_spec(attempt.spec)))
    )
    run.finish(exit_code=0 if outcome is not None and outcome.results_intact else 1)
    if outcome is not None:
        _remove_superseded(run.id, keep=Path(run.settings.sync_dir))


def _remove_superseded(run_id: str, keep: Path) -> None:
    """Remove this attempt's older offline folders, since ``keep`` holds all of it, and wandb's own logs in ``keep``."""
    older = (folder for folder in keep.parent.glob(f"offline-run-*-{run_id}*") if folder != keep)
    for folder in (*older, *(path for path in keep.iterdir() if path.is_dir())):
        shutil.rmtree(folder)


def explain(error: Exception) -> str:
    """Return why a tracker ended early, and the fix, in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name == "wandb":
        return "wandb is not installed; metrics stay in metrics.jsonl (pip install wandb)"
    reason = next(iter(str(error).splitlines()), "")
    return f"ended early, {type(error).__name__}: {reason}; metrics stay in metrics.jsonl, run this again to upload"


def say(attempt: AttemptPaths, message: str) -> None:
    sys.stdout.write(f"tracking {_name(attempt)}: {redact(message)}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.supervise.wandb_tracker", description="Log an attempt to W&B while it runs."
    )
    parser.add_argument("attempt", type=Path, help="<sweep>/runs/<run>/attempts/<k>")
    parser.add_argument("--settings", type=json.loads, required=True, help="TrackSettings, as a JSON object")
    options = parser.parse_args()
    # The supervisor handles an interrupt from the keyboard or from the stop button of the W&B page.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    attempt = AttemptPaths(options.attempt.resolve())
    try:
        track(attempt, settings_from_json(options.settings))
    except Exception as error:
        # A tracker that fails must never fail a run, and wandb's exit handlers would wait for what has just failed.
        say(attempt, explain(error))
        os._exit(0)


if __name__ == "__main__":
    main()
