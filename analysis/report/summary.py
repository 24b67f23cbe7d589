"""What came of a sweep in a few sentences: counts by verdict, the worst news first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.limits.speedup_bound import NEAR, Bound
from analysis.sweep.cell_results import CellResult, exit_code
from analysis.sweep.ranking import diverging_cells, rank
from analysis.verdict.verdict import WORDS, Word
from launch.common.text import count, one_line
from launch.contract.outcomes import RESULTS_INTACT

NAMED = 3
"""How many cells a sentence names before it counts the rest."""
BOUND_BY: dict[Bound, str] = {
    "device": "the device",
    "communication": "communication, or waiting for another rank,",
    "host": "the host",
    "host in part": "the host in part",
    "gaps": "what lies between kernels",
}
CPU_NOTE = "Times here are of a CPU: they say nothing of CUDA graphs."


@dataclass(frozen=True)
class Summary:
    """Counts of a sweep's cells, and the same in words."""

    verdicts: dict[Word, int]
    cells: dict[str, int]
    """How many cells ran, and how many were rejected or cannot run on this host: keys are
    launch.contract.records.CellState."""
    unexpected: int
    unfinished_runs: int
    exit_code: int
    text: str


def summarise(results: Sequence[CellResult]) -> Summary:
    verdicts = Counter(result.verdict.word for result in results if result.verdict)
    cells = Counter(str(result.cell.state) for result in results)
    return Summary(
        verdicts={word: verdicts[word] for word in reversed(WORDS) if verdicts[word]},
        cells={state: cells[state] for state in ("run", "rejected", "not_runnable")},
        unexpected=sum(result.unexpected for result in results),
        unfinished_runs=sum(run.attempt is None for result in results for run in result.runs),
        exit_code=exit_code(results),
        text=one_line(" ".join(_sentences(results))),
    )


def _sentences(results: Sequence[CellResult]) -> list[str]:
    ran = [result for result in results if result.cell.state == "run"]
    if not ran:
        return [f"Nothing was run: each of the {count('cell', len(results))} is rejected or cannot run on this host."]
    said = [
        *(_failing(ran, word) for word in ("DIVERGED", "INCOMPARABLE")),
        _outcomes(ran),
        _unsound(ran),
        _retried(ran),
        *(_failing(ran, word) for word in ("UNFINISHED", "INCONCLUSIVE")),
        _passing(ran),
        _expected_failures(ran),
        _doubtful(ran),
        _slowed(ran),
        _speed(ran),
        _other_courses(ran),
        _fastest(ran),
        _nearest(ran),
        _not_run(results),
    ]
    if not any(result.on_gpu for result in ran):
        said.append(CPU_NOTE)
    return [sentence for sentence in said if sentence]


def _named(results: Sequence[CellResult], details: Sequence[str]) -> str:
    shown = [f"`{result.cell.label}`{detail}" for result, detail in zip(results[:NAMED], details[:NAMED], strict=True)]
    rest = len(results) - NAMED
    return "; ".join(shown) + (f"; and {rest} more" if rest > 0 else "")


def _failing(ran: Sequence[CellResult], word: Word) -> str:
    found = [result for result in ran if result.verdict and result.verdict.word == word]
    if not found:
        return ""
    details = [f" ({result.verdict.reason})" if result.verdict else "" for result in found]
    return f"**{count('graphed cell', len(found))} {word}**: {_named(found, details)}."


def _unsound(ran: Sequence[CellResult]) -> str:
    found = [result for result in ran if result.integrity.unsound_records]
    details = [f" ({result.integrity.unsound_records[0]})" for result in found]
    return f"**{count('cell', len(found))} left unsound records**: {_named(found, details)}." if found else ""


def _retried(ran: Sequence[CellResult]) -> str:
    """Of cells whose verdict does not say it."""
    flaky = [(result, said) for result in ran for said in result.integrity.flaky_attempts[:1]]
    found = [result for result, said in flaky if not (result.verdict and said in result.verdict.reason)]
    details = [f" ({result.integrity.flaky_attempts[0]})" for result in found]
    said = "came to something else in an attempt before"
    return f"**{count('cell', len(found))} {said}**: {_named(found, details)}." if found else ""


def _outcomes(ran: Sequence[CellResult]) -> str:
    found = [result for result in ran if result.unexpected]
    if not found:
        return ""
    details = [f" ended {result.outcome}, expected {_expected(result)}" for result in found]
    return f"**{count('cell', len(found))} ended otherwise than expected**: {_named(found, details)}."


def _expected(result: CellResult) -> str:
    expect = result.cell.expect
    return f"{expect.outcome} in {expect.phase}" if expect.phase else expect.outcome


def _passing(ran: Sequence[CellResult]) -> str:
    graphed = [result for result in ran if result.cell.graphed]
    if not graphed:
        return "The sweep has no graphed cell that ran: there is nothing to compare."
    counts = Counter(result.verdict.word for result in graphed if result.verdict and result.verdict.passes)
    parts = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
    verb = "passes" if len(graphed) == 1 else "pass"
    return f"{sum(counts.values())} of {count('graphed cell', len(graphed))} {verb}{f' ({parts})' if parts else ''}."


def _expected_failures(ran: Sequence[CellResult]) -> str:
    met = [r for r in ran if r.cell.expect.outcome not in RESULTS_INTACT and not r.unexpected and not r.unfinished]
    return f"{count('cell', len(met))} failed as expected." if met else ""


def _speed(ran: Sequence[CellResult]) -> str:
    """The largest speed-up counts among cells that pass only: a wrong computation has no speed worth a word. Words hold for
    all of them at once, so that one may be picked."""
    passing = [result for result in ran if result.verdict and result.verdict.passes]
    certain = [result for result in passing if not result.speed.timing_doubt]
    timed = [(result.speed.speedup, result.cell.label) for result in certain if result.speed.speedup]
    faster = [(speed, label) for speed, label in timed if speed.word == "FASTER"]
    if faster:
        speed, label = max(faster, key=lambda item: item[0].ratio)
        return f"Largest speed-up of a cell that passes: {speed.summary}, `{label}`."
    unsure = [(speed, label) for speed, label in timed if speed.word == "INCONCLUSIVE" and speed.ratio > 1]
    none = "No cell that passes is shown to be faster than eager" if passing else ""
    if not unsure:
        return f"{none}." if none else ""
    speed, label = max(unsure, key=lambda item: item[0].ratio)
    return f"{none}; not sure enough is {speed.summary}, `{label}` ({speed.reason})."


def _doubtful(ran: Sequence[CellResult]) -> str:
    """Of graphed cells those that pass: others have no speed to doubt."""
    doubted = [r for r in ran if r.speed.timing_doubt and (r.verdict.passes if r.verdict else not r.cell.graphed)]
    kinds = (
        ("eager cell", [r for r in doubted if not r.cell.graphed]),
        ("graphed cell", [r for r in doubted if r.cell.graphed]),
    )
    return " ".join(
        f"**{count(kind, len(found))} cannot be as fast as timed**: {_named(found, [f' ({r.speed.timing_doubt})' for r in found])}."
        for kind, found in kinds
        if found
    )


def _slowed(ran: Sequence[CellResult]) -> str:
    """Eager cells, too: a slow one makes its graphed twin look fast."""
    found = [(r, r.speed.throttling.own.slowed) for r in ran if r.speed.throttling and r.speed.throttling.own.slowed]
    named = _named([result for result, _ in found], [f" (by {slowed})" for _, slowed in found])
    return f"**{count('cell', len(found))} ran on GPUs that were slowed down**: {named}." if found else ""


def _other_courses(ran: Sequence[CellResult]) -> str:
    """Eager cells: a graphed one that passes trains what its twin does."""
    found = [(result, why) for result, why in diverging_cells(ran) if not result.cell.graphed]
    named = _named([result for result, _ in found], [f" ({why})" for _, why in found])
    return f"**{count('eager cell', len(found))} left out of the ranking**: {named}." if found else ""


def _fastest(results: Sequence[CellResult]) -> str:
    """The first of each task that has more to choose from than a cell and its eager twin."""
    found = [ranking for ranking in rank(results) if len(ranking.cells) > 2]
    said = []
    for ranking in found[:NAMED]:
        unsure = sum(not cell.told_apart for cell in ranking.cells[1:])
        others = f", not told apart from {count('other', unsure)}" if unsure else ""
        said.append(f"`{ranking.best.label}`, of {len(ranking.cells)} cells{others}")
    rest = f"; and of {count('more task', len(found) - NAMED)}" if len(found) > NAMED else ""
    return f"Fastest of {'its task' if len(found) == 1 else 'their tasks'}: {'; '.join(said)}{rest}." if found else ""


def _nearest(ran: Sequence[CellResult]) -> str:
    """How near the best cell on GPUs is to what its eager twin's GPUs compute, of those that pass and run its kernels. No
    graph of these kernels can be faster than that; kernels that communicate wait, too, and are no measure."""
    fit = [r for r in ran if r.verdict and r.verdict.passes and not _either_slowed(r)]
    limits = [(r.speed.bound, r.cell.label) for r in fit if r.speed.bound]
    found = [
        (limit.times_computing, name, limit.bound)
        for limit, name in limits
        if limit.times_computing is not None and limit.bound != "other kernels"
    ]
    if not found:
        return ""
    times, label, bound = min(found)
    if times <= 1 + NEAR and bound == "device":
        return f"At the limit: `{label}`, whose step is as long as its eager twin's GPU computes."
    by = BOUND_BY[bound] if bound else "what is not told"
    return f"Nearest to the limit: `{label}`, whose step takes {times:.2f} times as long as its eager twin's GPUs compute; {by} bounds it."


def _either_slowed(result: CellResult) -> bool:
    sides = (result.speed.throttling.own, result.speed.throttling.eager) if result.speed.throttling else ()
    return any(side and side.slowed for side in sides)


def _not_run(results: Sequence[CellResult]) -> str:
    counts = Counter(result.cell.state for result in results)
    parts = [f"{count('cell', counts['rejected'])} rejected by a rule"] if counts["rejected"] else []
    parts += [f"{count('cell', counts['not_runnable'])} not runnable on this host"] if counts["not_runnable"] else []
    return f"Not run: {' and '.join(parts)}." if parts else ""
