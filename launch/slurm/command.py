"""Run Slurm's commands without the user's defaults for their output."""

from __future__ import annotations

import os
import subprocess

ANSWER_SECONDS = 60.0
"""How long a command may take."""
USER_DEFAULTS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
"""Prefixes of variables with a user's defaults for what these commands show, sort or leave out."""


class Unanswered(Exception):
    """A Slurm command gave no answer. ``for_good`` is whether it never will on this host."""

    def __init__(self, message: str, *, for_good: bool = False, stderr: str = "") -> None:
        super().__init__(message)
        self.for_good = for_good
        self.stderr = stderr


def run(command: str, *arguments: str, seconds: float | None = None) -> str:
    """Run a Slurm command and return its output, with times in seconds since the epoch.

    Raises:
        Unanswered: it is not installed, fails, or takes longer than ``seconds`` (ANSWER_SECONDS by default).
    """
    seconds = ANSWER_SECONDS if seconds is None else seconds
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(USER_DEFAULTS)}
    variables = inherited | {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    try:
        done = subprocess.run([command, *arguments], env=variables, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, errors="replace", timeout=seconds)  # fmt: skip
    except FileNotFoundError:
        raise Unanswered("not on PATH here", for_good=True) from None
    except OSError as error:
        raise Unanswered(f"it cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise Unanswered(f"no answer within {seconds:g} s") from None
    if done.returncode == 0:
        return done.stdout
    last = done.stderr.strip().rpartition("\n")[2].removeprefix(f"{command}: ").removeprefix("error: ")
    disabled = "accounting storage is disabled" in last
    raise Unanswered(last or f"exit code {done.returncode}", for_good=disabled, stderr=done.stderr)


def try_run(command: str, *arguments: str, seconds: float = 10.0) -> str | None:
    """Run a Slurm command and return its output, or None if it does not answer."""
    try:
        return run(command, *arguments, seconds=seconds).strip()
    except Unanswered:
        return None
