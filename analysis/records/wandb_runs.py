"""Where a sweep's runs are in Weights & Biases: online, or on disk until somebody uploads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch.common.atomic_files import RecordError
from launch.common.regular_file import read_regular
from launch.contract.paths import PROJECT_URL, SweepPaths

_TOKEN = re.compile(r"[0-9a-f]{8}")
_URL = re.compile(r"https?://[\w.:/~%+-]+")


@dataclass(frozen=True)
class WandbRuns:
    """A sweep's runs in W&B.

    ``urls`` maps run ids to addresses, and "analysis" to the report's; it is empty if no run went online. ``offline`` holds the
    runs that were not uploaded.
    """

    urls: Mapping[str, str] = field(default_factory=dict)
    offline: tuple[str, ...] = ()


def wandb_runs(sweep: SweepPaths, run_ids: Sequence[str]) -> WandbRuns:
    """Return where W&B has ``run_ids``, from what the trackers left on disk."""
    token, project = _read(sweep, "id", _TOKEN), _read(sweep, PROJECT_URL, _URL)
    folders = sweep.tracking.glob(f"wandb/offline-run-*-{token}") if token else ()
    # "wandb sync" leaves a *.synced file.
    waiting = {"-".join(each.name.split("-")[3:-1]) for each in folders if not any(each.glob("*.synced"))}
    offline = tuple(run_id for run_id in run_ids if run_id in waiting)
    online = [*(run_id for run_id in run_ids if run_id not in waiting), "analysis"] if token and project else []
    return WandbRuns({run_id: f"{project}/runs/{run_id}-{token}" for run_id in online}, offline)


def _read(sweep: SweepPaths, name: str, pattern: re.Pattern[str]) -> str:
    """Return the content of a file of <sweep>/tracking, or "" if it is missing or does not match ``pattern``."""
    try:
        content = read_regular(sweep.tracking / name).decode(errors="replace").strip()
    except (OSError, RecordError):
        return ""
    return content if pattern.fullmatch(content) else ""
