"""The exit code of a sweep's report."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.sweep.cell_results import CellResult
from analysis.verdict.verdict import PASSES
from launch.contract.exit_codes import ExitCode


def exit_code(results: Sequence[CellResult]) -> ExitCode:
    """Return 0 for a pass, 3 for a failure that more runs cannot change, 2 for runs without an outcome, 4 for inconclusive.

    Rejected cells, and cells that cannot run on this host, do not count as failures.
    """
    verdicts = {result.verdict.verdict for result in results if result.verdict}
    if verdicts & {"DIVERGED", "INCOMPARABLE"} or any(
        result.unexpected or result.integrity.unsound_records for result in results
    ):
        return ExitCode.FAILED
    if "UNFINISHED" in verdicts or any(result.unfinished for result in results):
        return ExitCode.UNFINISHED
    return ExitCode.INCONCLUSIVE if verdicts - set(PASSES) else ExitCode.PASS
