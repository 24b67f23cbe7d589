"""Start a module of this package as a child that ends with the supervisor."""

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
    """Start ``python -m module`` in its own session. Its standard input is a pipe that closes when this process ends."""
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
    """The process of launch.track for one attempt."""

    def __init__(
        self, attempt: AttemptPaths, settings: Mapping[str, Any], environment: Mapping[str, str], log: Path
    ) -> None:
        arguments = (attempt.path, "--settings", json.dumps(dict(settings)))
        self._process = start("launch.track", arguments, environment, log)

    def finish(self, seconds: float) -> None:
        """Let it deliver the rest within ``seconds``. What remains stays on disk for a later upload."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
