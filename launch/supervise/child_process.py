"""Start a module as a child that ends with the supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch.common.parent_death import PARENT
from launch.contract.paths import AttemptPaths, BundlePaths

JUDGE_SECONDS = 300.0
"""The most seconds that judging the verdicts so far may take. Then the bundle goes on."""
POLL_SECONDS = 0.1


def start(
    module: str, arguments: tuple[str, ...], environment: Mapping[str, str], log: Path, stdin: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in its own session. Its standard input by default is a pipe that closes when this process
    ends.
    """
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", module, *arguments],
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, PARENT: str(os.getpid())},
            start_new_session=True,
        )


class Tracker:
    """The process of launch.track for one attempt."""

    def __init__(
        self, attempt: AttemptPaths, settings: Mapping[str, Any], environment: Mapping[str, str], log: Path
    ) -> None:
        arguments = (attempt.path, "--settings", json.dumps(dict(settings)))
        self._process = start("launch.track", arguments, environment, log)

    def finish(self, seconds: float) -> None:
        """Let the tracker deliver the rest within ``seconds``. Undelivered data stays on disk for a later upload."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def judge_verdicts(bundle: BundlePaths, give_up: Callable[[], object]) -> None:
    """Have the analysis judge whether the bundle's verdicts are settled, which it records (EarlyStop).

    Whatever goes wrong, the bundle goes on, and a line in the supervisor's log says so.
    """
    deadline = time.monotonic() + JUDGE_SECONDS
    with start("analysis.sweep.early_stop", (bundle.path,), os.environ, bundle.early_stop_log) as judge:
        while judge.poll() is None and time.monotonic() < deadline and not give_up():
            time.sleep(POLL_SECONDS)
        code = judge.poll()
        judge.kill()
    if code != 0 and not give_up():
        why = (
            f"no answer in {JUDGE_SECONDS:g} s"
            if code is None
            else f"exit code {code}; {bundle.early_stop_log} shows why"
        )
        sys.stderr.write(f"it is unknown whether verdicts are settled ({why}), so the bundle goes on\n")
