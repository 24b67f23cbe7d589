"""Follow the steps of an attempt while it runs."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import Any

from launch.common.atomic_files import parse_json
from launch.common.regular_file import AppendedLines
from launch.contract.paths import AttemptPaths
from launch.contract.records.step_metrics import step_from_json

POLL_SECONDS = 1.0


def follow(attempt: AttemptPaths) -> Iterator[dict[str, Any]]:
    """Yield the attempt's steps, from the first on, as they are written, until the attempt or the supervisor ends."""
    lines = AppendedLines(attempt.metrics)
    ended = False
    while not ended:
        # Check for the end first, so that the last read covers everything written before it.
        ended = attempt.has_ended or _supervisor_ended(POLL_SECONDS)
        yield from (step_from_json(parse_json(line)) for line in lines.read())


def _supervisor_ended(timeout: float) -> bool:
    """Wait at most ``timeout`` seconds for standard input to close. Return whether it did."""
    readable, _, _ = select.select([0], [], [], timeout)
    return bool(readable) and not os.read(0, 4096)
