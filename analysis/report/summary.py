"""The result of a sweep: counts, the headline, and notes with the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.report.headline import headline
from analysis.report.notes import DEFAULT_MARGINS, MAXIMUM_NAMES, make_notes
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import exit_code
from analysis.verdict.verdict import VERDICTS, VerdictName
from launch.common.grouped import grouped
from launch.common.text import count, first_names, one_line
from launch.contract.exit_codes import ExitCode
from launch.contract.plan import Margins


@dataclass(frozen=True)
class Summary:
    """Counts of a sweep's cells, and the result in sentences."""

    verdicts: dict[VerdictName, int]
    cells: dict[str, int]
    """The number of cells that ran, were rejected, or cannot run on this host, by launch.contract.plan.CellState."""
    unexpected: int
    unfinished_runs: int
    unvalidated: str
    """Which graphed cells have no verdict and why; empty if each ran or was rejected, and at least one ran."""
    exit_code: ExitCode
    headline: str
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join((self.headline, *self.notes))


def summarise(results: Sequence[CellResult], margins: Margins = DEFAULT_MARGINS) -> Summary:
    """Summarise a sweep that was judged with ``margins``. In mode quick it has too few steps to judge speed."""
    quick = margins.mode == "quick"
    unvalidated, decision = _describe_unvalidated(results), headline(results, quick=quick)
    lack = f"**{'Not all' if decision else 'Nothing'} was validated**: {unvalidated}." if unvalidated else ""
    lack += _tell_fix(results) if unvalidated else ""
    verdicts = Counter(result.verdict.verdict for result in results if result.verdict)
    cells = Counter(str(result.cell.state) for result in results)
    return Summary(
        verdicts={word: verdicts[word] for word in reversed(VERDICTS) if verdicts[word]},
        cells={state: cells[state] for state in ("run", "rejected", "not_runnable")},
        unexpected=sum(result.unexpected for result in results),
        unfinished_runs=sum(run.attempt is None for result in results for run in result.runs),
        unvalidated=unvalidated,
        exit_code=exit_code(results) or (ExitCode.INCONCLUSIVE if unvalidated else ExitCode.PASS),
        headline=one_line(" ".join(filter(None, (lack, decision)))),
        notes=tuple(map(one_line, filter(None, make_notes(results, decision, margins)))),
    )


def _tell_fix(results: Sequence[CellResult]) -> str:
    fixes = {reason.remedy for result in results for reason in result.cell.reasons}
    several = " The report has the fixes." if fixes else ""
    return f" Fix: {fixes.pop().rstrip('.')}." if len(fixes) == 1 else several


def _describe_unvalidated(results: Sequence[CellResult]) -> str:
    """Describe the graphed cells that could not run; return "" if there are none.

    A rejected cell could run nowhere, so it counts only if no graphed cell ran.
    """
    graphed = [result for result in results if result.cell.graphed]
    some = any(result.validated for result in graphed)
    missing = [result for result in graphed if not some or result.cell.state == "not_runnable"]
    if not missing:
        return "" if graphed else "the plan has no graphed cell"
    reasons = (", ".join(f"{why.rule}: {why.message}" for why in result.cell.reasons[:1]) for result in missing)
    labels = grouped((reason, f"`{result.cell.label}`") for reason, result in zip(reasons, missing, strict=True))
    names = [f"{first_names(each, MAXIMUM_NAMES)} ({reason})" for reason, each in labels.items()]
    lack = f"{len(missing)} of {count('graphed cell', len(graphed))}" if some else "no graphed cell"
    could = "cannot run on this host or cluster" if some else "could run"
    return f"{lack} {could}. Not validated: {first_names(names, MAXIMUM_NAMES)}"
