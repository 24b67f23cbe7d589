"""Weights & Biases: the process's session, and a run for each run of a sweep.

wandb itself reads the API key from the environment or from netrc. We never write the key to a file or a command line.
"""

from __future__ import annotations

import http.client
import netrc
import os
import secrets
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from launch.common.atomic_files import write_text
from launch.common.redact import Secrets, is_secret_name
from launch.contract.paths import PROJECT_URL, AttemptPaths, SweepPaths
from launch.contract.spec import read_spec
from launch.track.attempt_content import run_config
from launch.track.settings import TrackSettings
from launch.track.tags import gpu_tags, run_tags, usable_tags

if TYPE_CHECKING:
    import wandb

REACH_SECONDS = 3.0
FINISH_SECONDS = 25.0
"""How long the final upload may take. It is less than launch.supervise.supervisor waits, so that the tracker itself reports
what it could not deliver."""

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
"""wandb settings that restrict it to our own content: no console, code, git, packages or machine, and a limited wait."""


UPLOAD = "upload later with: wandb sync tracking/wandb/offline-run-* (in the sweep's folder)"


class Session:
    """wandb in this process, with its files in the sweep's folder, and its mode."""

    def __init__(self, sweep: SweepPaths, name: str, settings: TrackSettings, say: Callable[[str], None]) -> None:
        self.settings, self.folder = settings, sweep.tracking
        self._cache, self._say = sweep.tracking / "cache" / name, say
        self.mode: Literal["online", "offline", "disabled"] = "disabled"

    def __enter__(self) -> Session:
        if self.settings.mode == "disabled":
            return self
        _check_variables(os.environ)
        self._wandb = _import_wandb(self.folder / "data", self._cache)
        quiet = {key: value for key, value in QUIET.items() if key in self._wandb.Settings.model_fields}
        base_url = self._wandb.setup(self._wandb.Settings(**quiet)).settings.base_url
        self.mode, reason = choose_mode(self.settings, base_url)
        if reason:
            self._say(reason)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.settings.mode != "disabled":
            self._wandb.teardown()
            shutil.rmtree(self._cache, ignore_errors=True)

    def open(self, name: str, job_type: str, tags: Sequence[str], config: Mapping[str, Any]) -> wandb.Run:
        """Begin or continue the W&B run of ``name``."""
        run: wandb.Run = self._wandb.init(
            project=self.settings.project,
            entity=self.settings.entity,
            id=f"{name}-{sweep_token(self.folder)}",
            name=name,
            group=self.settings.group,
            job_type=job_type,
            tags=usable_tags(*self.settings.tags, *tags),
            config=dict(config),
            dir=self.folder,
            mode=self.mode,
            resume="allow",
        )
        if self.mode == "online":
            self._say(f"online at {run.url}")
            write_text(self.folder / PROJECT_URL, run.project_url or "")
        return run


def why_offline(base_url: str) -> str | None:
    """Return why the server at ``base_url`` cannot be used, in words, or None if it can."""
    if not _has_key(urllib.parse.urlsplit(base_url).netloc):
        return "no API key is configured (WANDB_API_KEY or netrc)"
    try:
        with urllib.request.urlopen(urllib.request.Request(base_url, method="HEAD"), timeout=REACH_SECONDS):
            return None
    except urllib.error.HTTPError:
        # The server answered.
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


def choose_mode(settings: TrackSettings, base_url: str) -> tuple[Literal["online", "offline", "disabled"], str]:
    """Return the mode and a message about it.

    The recipe's mode counts unless it is auto. Then WANDB_MODE counts if it is offline or disabled; otherwise the mode is
    online if possible.
    """
    if settings.mode != "auto":
        return settings.mode, f"offline; {UPLOAD}" if settings.mode == "offline" else ""
    variable = os.environ.get("WANDB_MODE")
    if variable == "disabled":
        return "disabled", "disabled; metrics stay in metrics.jsonl"
    reason = "WANDB_MODE is offline" if variable == "offline" else why_offline(base_url)
    return ("online", "") if reason is None else ("offline", f"offline, as {reason}; {UPLOAD}")


def sweep_token(tracking: Path) -> str:
    """Return the token of a sweep's folder. The W&B ids of its runs end with it.

    Two people who run the same recipe in one project have the same run_ids. A random token keeps their runs separate.
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
    return path.read_text()


def _check_variables(environment: Mapping[str, str]) -> None:
    """Check that no variable of W&B except the key contains a secret, because wandb writes and uploads their values.

    Raises:
        ValueError: a variable contains a secret.
    """
    found = Secrets(environment)
    for name, value in environment.items():
        if name.startswith("WANDB_") and not is_secret_name(name) and (what := found.find(value)):
            raise ValueError(f"{name} holds {what}; set it to another value")


def _import_wandb(data: Path, cache: Path) -> Any:
    """Import wandb with its artifacts and its cache in the sweep's folder and without its own error reports."""
    os.environ.setdefault("WANDB_DATA_DIR", str(data))
    os.environ.setdefault("WANDB_CACHE_DIR", str(cache))
    # wandb's API creates a folder for each run that it reads.
    os.environ.setdefault("WANDB_DIR", str(cache))
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb


class AttemptRun:
    """The W&B run of an attempt. A later attempt of the same run continues it."""

    def __init__(self, run: wandb.Run, attempt: AttemptPaths) -> None:
        self._run, self._attempt = run, attempt
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, Any]) -> None:
        # A killed tracker or an earlier attempt has delivered the earlier steps.
        if row["step"] >= self._run.starting_step:
            self._run.log({**row, "attempt": self._attempt.number}, step=row["step"], commit=True)

    def finish(self, summary: Mapping[str, Any], *, complete: bool) -> None:
        """Finish the run with ``summary``. W&B shows it as failed if it is not ``complete``."""
        self._run.tags = usable_tags(*(self._run.tags or ()), *gpu_tags(self._attempt))
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if complete else 1)
        if self._attempt.has_ended:
            remove_superseded(self._run)


def open_attempt(session: Session, attempt: AttemptPaths) -> AttemptRun:
    spec = read_spec(attempt.spec)
    job_type = "graphed" if spec.graphed else "eager"
    return AttemptRun(session.open(attempt.run_id, job_type, run_tags(spec), run_config(spec, attempt)), attempt)


def remove_superseded(run: wandb.Run) -> None:
    """Remove the older offline folders of ``run``, because its last one is complete, and wandb's own logs in the last one."""
    keep = Path(run.settings.sync_dir)
    for folder in keep.parent.glob(f"offline-run-*-{run.id}*"):
        # A later attempt may have begun.
        if folder != keep and folder.stat().st_mtime <= keep.stat().st_mtime:
            shutil.rmtree(folder)
    for folder in (path for path in keep.iterdir() if path.is_dir() and not (path / "media").exists()):
        shutil.rmtree(folder)
