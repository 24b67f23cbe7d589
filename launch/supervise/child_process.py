"""How a supervisor starts a process of its own: a module of this package, in a session of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.common.parent_death import PARENT
from launch.contract.paths import AttemptPaths


def start(
    module: str, arguments: tuple[str, ...], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start ``python -m module``. Its standard input is a pipe that this process holds: it ends when this one does."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, PARENT: str(os.getpid())},
            start_new_session=True,
        )


class Tracker:
    """launch.supervise.wandb_tracker beside one attempt."""

    def __init__(self, attempt: AttemptPaths, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        arguments = (str(attempt.root), "--settings", json.dumps(dict(settings)))
        self._process = start("launch.supervise.wandb_tracker", arguments, environment, attempt.logs / "track.log")

    def finish(self, seconds: float) -> None:
        """Let it deliver the rest, for so long; what it could not deliver stays on disk for a later upload."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
