"""The result of a sweep in a few sentences: counts by verdict, the worst news first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from analysis.limits.speedup_bound import NEAR, Bound
from analysis.sweep.cell_results import CellResult, exit_code
from analysis.sweep.ranking import diverging_cells, rank
from analysis.verdict.verdict import VERDICTS, VerdictName
from launch.common.text import count, first_names, one_line
from launch.contract.outcomes import RESULTS_INTACT

MAXIMUM_NAMES = 3
"""How many cells a sentence names before it counts the rest."""
BOTTLENECKS: dict[Bound, str] = {
    "device": "the GPU",
    "communication": "communication, or a wait for another rank,",
    "host": "the host",
    "host in part": "in part the host",
    "gaps": "the time between kernels",
}
CPU_NOTE = "These are CPU times, which show nothing about CUDA graphs."


@dataclass(frozen=True)
class Summary:
    """Counts of a sweep's cells, and the same in sentences."""

    verdicts: dict[VerdictName, int]
    cells: dict[str, int]
    """How many cells ran, were rejected, or cannot run on this host: keys are launch.contract.plan.CellState."""
    unexpected: int
    unfinished_runs: int
    exit_code: int
    text: str


def summarise(results: Sequence[CellResult]) -> Summary:
    verdicts = Counter(result.verdict.verdict for result in results if result.verdict)
    cells = Counter(str(result.cell.state) for result in results)
    return Summary(
        verdicts={word: verdicts[word] for word in reversed(VERDICTS) if verdicts[word]},
        cells={state: cells[state] for state in ("run", "rejected", "not_runnable")},
        unexpected=sum(result.unexpected for result in results),
        unfinished_runs=sum(run.attempt is None for result in results for run in result.runs),
        exit_code=exit_code(results),
        text=one_line(" ".join(filter(None, _sentences(results)))),
    )


def _sentences(results: Sequence[CellResult]) -> Iterator[str]:
    ran = [result for result in results if result.cell.state == "run"]
    if not ran:
        yield f"No cell ran: {count('cell', len(results))} rejected or not runnable on this host."
        return
    yield from (_failing(ran, word) for word in ("DIVERGED", "INCOMPARABLE"))
    yield _unexpected(ran)
    yield _unsound(ran)
    yield _flaky(ran)
    yield from (_failing(ran, word) for word in ("UNFINISHED", "INCONCLUSIVE"))
    yield _passing(ran)
    yield _expected_failures(ran)
    yield from (_doubtful(ran, graphed) for graphed in (False, True))
    yield _slowed(ran)
    yield _speed(ran)
    yield _not_ranked(ran)
    yield _fastest(ran)
    yield _nearest(ran)
    yield _not_run(results)
    if not any(result.on_gpu for result in ran):
        yield CPU_NOTE


def _bad_news(noun: str, predicate: str, cells: Iterable[tuple[CellResult, str]]) -> str:
    """Return "**2 cells PREDICATE**: `a` detail; `b` detail.", or nothing without cells."""
    names = [f"`{result.cell.label}` {detail}" for result, detail in cells]
    return f"**{count(noun, len(names))} {predicate}**: {first_names(names, MAXIMUM_NAMES)}." if names else ""


def _failing(ran: Sequence[CellResult], word: VerdictName) -> str:
    verdicts = [(result, result.verdict) for result in ran if result.verdict and result.verdict.verdict == word]
    return _bad_news("graphed cell", word, [(result, f"({verdict.reason})") for result, verdict in verdicts])


def _unexpected(ran: Sequence[CellResult]) -> str:
    cells = [(result, f"ended {result.outcome}, expected {_expected(result)}") for result in ran if result.unexpected]
    return _bad_news("cell", "did not end as expected", cells)


def _expected(result: CellResult) -> str:
    expect = result.cell.expect
    return f"{expect.outcome} in {expect.phase}" if expect.phase else expect.outcome


def _unsound(ran: Sequence[CellResult]) -> str:
    unsound = [(result, result.integrity.unsound_records) for result in ran]
    return _bad_news("cell", "left unsound records", [(result, f"({why[0]})") for result, why in unsound if why])


def _flaky(ran: Sequence[CellResult]) -> str:
    flaky = [(result, why) for result in ran for why in result.integrity.flaky_attempts[:1]]
    cells = [(r, f"({why})") for r, why in flaky if not (r.verdict and why in r.verdict.reason)]
    return _bad_news("cell", "ended differently in an earlier attempt", cells)


def _passing(ran: Sequence[CellResult]) -> str:
    graphed = [result for result in ran if result.cell.graphed]
    if not graphed:
        return "No graphed cell ran, so there is nothing to compare."
    counts = Counter(result.verdict.verdict for result in graphed if result.verdict and result.verdict.passes)
    parts = ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word])
    verb = "passes" if len(graphed) == 1 else "pass"
    return f"{sum(counts.values())} of {count('graphed cell', len(graphed))} {verb}{f' ({parts})' if parts else ''}."


def _expected_failures(ran: Sequence[CellResult]) -> str:
    met = [r for r in ran if r.cell.expect.outcome not in RESULTS_INTACT and not r.unexpected and not r.unfinished]
    return f"{count('cell', len(met))} failed as expected." if met else ""


def _doubtful(ran: Sequence[CellResult], graphed: bool) -> str:
    doubtful = [(r, r.speed.timing_doubt) for r in ran if r.speed.timing_doubt and r.cell.graphed == graphed]
    # A graphed cell that does not pass has no speed to doubt.
    cells = [(r, f"({doubt})") for r, doubt in doubtful if (r.verdict.passes if r.verdict else not graphed)]
    return _bad_news("graphed cell" if graphed else "eager cell", "cannot be as fast as timed", cells)


def _slowed(ran: Sequence[CellResult]) -> str:
    # Eager cells count too: a slow one makes its graphed cells look fast.
    throttled = [(r, r.speed.throttling.own.slowed) for r in ran if r.speed.throttling]
    return _bad_news("cell", "ran on GPUs that were slowed down", [(r, f"(by {by})") for r, by in throttled if by])


def _speed(ran: Sequence[CellResult]) -> str:
    """Return the largest speed-up of the cells that pass. Their verdicts hold all at once, so one may be picked."""
    passing = [result for result in ran if result.verdict and result.verdict.passes]
    certain = [result for result in passing if not result.speed.timing_doubt]
    timed = [(result.speed.speedup, result.cell.label) for result in certain if result.speed.speedup]
    faster = [(speed, label) for speed, label in timed if speed.verdict == "FASTER"]
    if faster:
        speed, label = max(faster, key=lambda item: item[0].ratio)
        return f"Largest confirmed speed-up: {speed.summary}, `{label}`."
    unsure = [(speed, label) for speed, label in timed if speed.verdict == "INCONCLUSIVE" and speed.ratio > 1]
    if not unsure:
        return "No cell that passes is faster than eager." if passing else ""
    speed, label = max(unsure, key=lambda item: item[0].ratio)
    return f"No speed-up confirmed yet. Best measured: {speed.summary}, `{label}` ({speed.reason})."


def _not_ranked(ran: Sequence[CellResult]) -> str:
    # A graphed cell that passes trains what its eager baseline does.
    cells = [(result, f"({why})") for result, why in diverging_cells(ran) if not result.cell.graphed]
    return _bad_news("eager cell", "left out of the ranking", cells)


def _fastest(ran: Sequence[CellResult]) -> str:
    """Name the fastest cell of each task with more cells than one and its eager baseline."""
    rankings = [ranking for ranking in rank(ran) if len(ranking.cells) > 2]
    names = []
    for ranking in rankings:
        tied = sum(not cell.told_apart for cell in ranking.cells[1:])
        ties = f", statistically tied with {count('other', tied)}" if tied else ""
        names.append(f"`{ranking.best.label}` of {len(ranking.cells)} cells{ties}")
    of = "its task" if len(rankings) == 1 else "their tasks"
    return f"Fastest of {of}: {first_names(names, MAXIMUM_NAMES)}." if names else ""


def _nearest(ran: Sequence[CellResult]) -> str:
    """Compare the best passing cell with its baseline's computing time, which no graph of the same kernels can beat. Kernels
    that communicate also wait, so their time is no bound."""
    bounds = [(r.speed.bound, r.cell.label) for r in ran if r.verdict and r.verdict.passes and not _either_slowed(r)]
    cells = [
        (bound.times_computing, label, bound.bound)
        for bound, label in bounds
        if bound and bound.times_computing is not None and bound.bound != "other kernels"
    ]
    if not cells:
        return ""
    times, label, bottleneck = min(cells)
    if times <= 1 + NEAR and bottleneck == "device":
        return f"At the upper bound: `{label}`. Its step time equals the baseline's GPU-busy time, so graphs can save nothing more."
    limit = BOTTLENECKS[bottleneck] if bottleneck else "something unknown"
    return (
        f"Nearest to the upper bound: `{label}`. Its step takes {times:.2f} times the GPU computing time of its eager "
        f"baseline, and {limit} limits it."
    )


def _either_slowed(result: CellResult) -> bool:
    sides = (result.speed.throttling.own, result.speed.throttling.eager) if result.speed.throttling else ()
    return any(side and side.slowed for side in sides)


def _not_run(results: Sequence[CellResult]) -> str:
    counts = Counter(result.cell.state for result in results)
    parts = [f"{count('cell', counts['rejected'])} rejected by a rule"] if counts["rejected"] else []
    parts += [f"{count('cell', counts['not_runnable'])} not runnable on this host"] if counts["not_runnable"] else []
    return f"Not run: {' and '.join(parts)}." if parts else ""
