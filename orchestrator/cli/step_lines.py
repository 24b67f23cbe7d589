"""Format the steps of an attempt (metrics.jsonl) as lines: loss, gradient norm, step time and phase."""

from __future__ import annotations

from launch.common.atomic_files import number, parse_json
from launch.common.regular_file import open_regular
from launch.common.text import one_line
from launch.contract.paths import AttemptPaths


class StepLines:
    """Read the steps of one attempt as they are written, each once."""

    def __init__(self, attempt: AttemptPaths) -> None:
        self._path = attempt.metrics
        self._read_bytes = 0

    def read_new(self) -> str:
        """Return a line for each step since the last call. Leave an incomplete last line to the next call."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._read_bytes)
                whole, end, _torn = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return ""
        self._read_bytes += len(whole + end)
        return "".join(f"{_describe_step(line)}\n" for line in whole.splitlines())


def _describe_step(line: bytes) -> str:
    try:
        row = parse_json(line)
        loss, norm, time = (number(row[name]) for name in ("loss", "grad_norm", "step_time_ms"))
        phase = one_line(row["phase"])
        return f"step {row['step']:6d}  loss {loss:<10.6g}  grad norm {norm:<10.6g}  {time:10.2f} ms  {phase}"
    except (KeyError, TypeError, ValueError, AttributeError):
        return "# a line of metrics.jsonl that cannot be read"
