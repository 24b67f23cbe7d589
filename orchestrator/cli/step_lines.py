"""Format the steps of an attempt (metrics.jsonl) as lines: loss, gradient norm, step time and phase."""

from __future__ import annotations

from collections.abc import Iterable

from launch.common.atomic_files import number, parse_json
from launch.common.text import one_line


def describe_steps(lines: Iterable[bytes]) -> str:
    """Return a line of text for each of ``lines``."""
    return "".join(f"{_describe_step(line)}\n" for line in lines)


def _describe_step(line: bytes) -> str:
    try:
        row = parse_json(line)
        loss, norm, time = (number(row[name]) for name in ("loss", "grad_norm", "step_time_ms"))
        phase = one_line(row["phase"])
        return f"step {row['step']:6d}  loss {loss:<10.6g}  grad norm {norm:<10.6g}  {time:10.2f} ms  {phase}"
    except (KeyError, TypeError, ValueError, AttributeError):
        return "# a line of metrics.jsonl that cannot be read"
