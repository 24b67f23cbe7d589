"""Calling Slurm's programs: again and again, seldom enough, and never taking silence for an answer."""

from __future__ import annotations

import os
import secrets
import subprocess
import time

LEAST_SECONDS = 3.0
"""Between two calls of a program that answers at once."""
MOST_LOAD = 0.05
"""The share of the time that calls take at most."""
MOST_SECONDS = 60.0
"""Between two calls of a program that fails; and how long a call may take."""

FOR_PEOPLE = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
"""Variables by which a user has these programs show, ask or leave out something by default."""


class SlurmCommand:
    """A program of Slurm's that is asked again and again: when it may be next, and since when it has not answered."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = 0.0
        self._failures = 0
        self._since = ""
        self.separator = secrets.token_hex(8)
        """Between the values that it prints: no name of a job holds it."""
        self.fault = ""
        self.exists = True
        """False where it is not installed, or the site has switched off what it reads."""

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def ask(self, *arguments: str) -> str | None:
        """What it prints; None where it does not answer, and :attr:`fault` says why."""
        begun = time.monotonic()
        try:
            answer = run(self._name, *arguments)
        except Unanswered as error:
            answer = None
            self._failures += 1
            self._since = self._since or time.strftime("%H:%M:%S")
            self.fault = f"{self._name} has not answered since {self._since} ({error})"
            self.exists = not error.for_good
        else:
            self._failures, self._since, self.fault = 0, "", ""
        self._next = time.monotonic() + poll_interval(time.monotonic() - begun, self._failures)
        return answer


def poll_interval(took: float, failures: int) -> float:
    """Seconds to the next call, after one that took ``took`` seconds and was the last of ``failures`` that failed."""
    if not failures:
        return max(LEAST_SECONDS, took / MOST_LOAD)
    return max(took, min(MOST_SECONDS, LEAST_SECONDS * 2.0 ** min(failures, 10)))


class Unanswered(Exception):
    """A program of Slurm's said nothing, in words; ``for_good``: nor ever will."""

    def __init__(self, words: str, *, for_good: bool = False) -> None:
        super().__init__(words)
        self.for_good = for_good


def environment() -> dict[str, str]:
    """This process's, less what a user has set for people."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOR_PEOPLE)}


def run(program: str, *arguments: str) -> str:
    """What one of Slurm's programs prints, times in seconds since the epoch.

    Raises:
        Unanswered: it is not installed, fails, or takes too long.
    """
    variables = environment() | {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    try:
        done = subprocess.run([program, *arguments], env=variables, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, errors="replace", timeout=MOST_SECONDS)  # fmt: skip
    except FileNotFoundError:
        raise Unanswered("not on PATH here", for_good=True) from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"no answer within {MOST_SECONDS:g} s") from None
    if done.returncode != 0:
        words = done.stderr.strip().rpartition("\n")[2].removeprefix(f"{program}: ").removeprefix("error: ")
        raise Unanswered(words or f"exit code {done.returncode}", for_good="accounting storage is disabled" in words)
    return done.stdout
