"""Versions, hardware, digests and settings of the runs, and the resolved recipe."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.records.provenance import provenance
from analysis.records.run import attempts_of
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import code_block, escape, table
from launch.common.redact import redact
from launch.common.text import count


def render(report: ReportData) -> list[str]:
    attempts, plan = [a for result in report.ran for a in attempts_of(result.runs)], report.sweep.plan
    described = [attempt.environment for attempt in attempts if attempt.environment]
    blocks = ["## Provenance", f"The sweep ends with exit code {report.summary.exit_code} (docs/commands.md)."]
    if described:
        rows = [
            (key, _value(found, len(described))) for key, found in provenance(described).items() if _is_told(key, found)
        ]
        blocks += [f"The table covers {count('run', len(described))}.", table(("key", "value"), rows)]
    if undescribed := len(attempts) - len(described):
        blocks.append(f"{count('run', undescribed).capitalize()} ended before describing the environment.")
    return [*blocks, f"Resolved recipe, from {escape(plan.recipe_file)}:", code_block(redact(plan.recipe), "yaml")]


def _is_told(key: str, values: Sequence[tuple[str, int]]) -> bool:
    """Return whether to show a row. A user's program has hundreds of packages, of which only differing ones are shown."""
    return not key.startswith("packages.") or len(values) > 1


def _value(values: Sequence[tuple[str, int]], runs: int) -> str:
    if len(values) == 1 and values[0][1] == runs:
        return values[0][0]
    return "; ".join(f"{value} ({count('run', number)})" for value, number in values)
