"""The headline of a report: whether to turn graphs on, with which figures, and what does not pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from analysis.speed.speed_verdict import BAND
from analysis.speed.speedup import Speed
from analysis.sweep.cell_results import CellResult, eager_results
from analysis.sweep.labels import layout_words
from analysis.sweep.ranking import Order, rank
from analysis.verdict.verdict import STEP_CHECKED, VerdictName
from launch.common.text import count, listed
from launch.contract.outcomes import OutcomeName
from launch.contract.plan import MINIMUM_STEPS

AGREEMENT: Mapping[VerdictName, str] = {
    "BITWISE": "bit-identical",
    "EQUIVALENT": "equivalent in its losses",
    STEP_CHECKED: "equivalent in its checked steps (noise hides the curves)",
}
ORDERS: Mapping[Order, str] = {
    "equal": f"it is within {BAND:.0%} of {{}}",
    "undecided": "{} may be as fast",
}
"""What the headline says of cells that are not certainly slower than the fastest."""
DECIDED = ("DIVERGED", "out of memory", "ended CAPTURE_FAILED", "failed as expected")
"""States that more runs cannot change."""
OUT_OF_MEMORY: OutcomeName = "CUDA_OOM"


def headline(results: Sequence[CellResult], *, quick: bool = False) -> str:
    """Return the headline of a sweep, which claims no more than the verdicts do; "" if no graphed cell was to run.

    A ``quick`` sweep has too few steps to judge speed.
    If the sweep has cells on GPUs, the headline covers only these, because a CPU shows nothing about CUDA graphs.
    """
    ran = [result for result in results if result.cell.state == "run"]
    ran = [result for result in ran if result.on_gpu] or ran
    graphed = [result for result in ran if result.cell.graphed]
    if not graphed:
        return ""
    eager = eager_results(ran)
    states = [_state(result, eager.get(result.cell.workload_id)) for result in graphed]
    sound = [result for result, state in zip(graphed, states, strict=True) if not state]
    decided = all(state in ("", *DECIDED) for state in states)
    lead, claim = "Leave graphs off" if decided else "No decision yet", ""
    if sound:
        lead, claim = _faster(graphed, sound, eager, ran) or _none_is_faster(sound, decided, ran, quick)
    lead = lead if graphed[0].on_gpu else "A CPU shows nothing about CUDA graphs"
    kinds = [f"{number} {state}" for state, number in Counter(filter(None, states)).items()]
    passing = f"{len(sound)} of {count('configuration', len(graphed))} {'passes' if len(graphed) == 1 else 'pass'}"
    listed = ("; " if any("," in kind for kind in kinds) else ", ").join(kinds)
    logs = " Read from logs: replay is unproven." if graphed[0].spec.made_elsewhere else ""
    return f"{lead}: {f'{claim}. ' if claim else ''}{'; '.join(filter(None, (passing, listed)))}.{logs}"


def _state(result: CellResult, eager: CellResult | None) -> str:
    """Return what keeps a graphed cell from passing, or "" if it passes."""
    if result.verdict is None:
        return "failed as expected"
    if result.verdict.verdict == "DIVERGED":
        return "DIVERGED"
    if result.unexpected:
        ending = (
            "out of memory" if result.outcome == OUT_OF_MEMORY else f"ended {result.outcome.replace(', ', ' and ')}"
        )
        return f"{ending}, like eager" if eager and eager.outcome == result.outcome else ending
    if result.integrity.unsound_records:
        return "with unsound records"
    return "" if result.passes else result.verdict.verdict


# --- decisions ------------------------------------------------------------------------------------------------------


def _faster(
    graphed: Sequence[CellResult],
    sound: Sequence[CellResult],
    eager: Mapping[str, CellResult],
    ran: Sequence[CellResult],
) -> tuple[str, str] | None:
    """Return the decision if a passing cell is FASTER, else None. All cells' intervals hold at once, so pick the best."""
    faster = [(result, speed) for result, speed in _timed(sound) if speed.verdict == "FASTER"]
    if not faster:
        return None
    result, speed = max(faster, key=lambda item: item[1].ratio)
    workloads = {each.cell.workload_id for each in graphed}
    won, where, gain = {each.cell.workload_id for each, _ in faster}, "", ""
    if len(workloads) > 1:
        layouts = {layout_words(each.spec.parallelism) for each in graphed}
        noun = "layout" if len(layouts) == len(workloads) else "workload"
        where, gain = f" in {len(won)} of {len(workloads)} {noun}s", ", the largest gain,"
    claim = f"{_name(result, ran)} is {speed.ratio:.2f}x faster ({interval(speed)}){gain} and {_agreement(result)}"
    rivals, memory = _not_slower(result, ran), _memory(eager.get(result.cell.workload_id), result)
    as_released = _best_as_released(faster) if result.spec.cuda_graph.mend else ""
    return f"Turn graphs on{where}", "; ".join(filter(None, (claim, as_released, rivals, memory)))


def _best_as_released(faster: Sequence[tuple[CellResult, Speed]]) -> str:
    """Name the fastest cell that needs no repair, or return ""."""
    released = [item for item in faster if not item[0].spec.cuda_graph.mend]
    if not released:
        return ""
    result, speed = max(released, key=lambda item: item[1].ratio)
    return f"{called(result)} needs no repair and is {speed.ratio:.2f}x faster ({interval(speed)})"


def _none_is_faster(
    sound: Sequence[CellResult], decided: bool, ran: Sequence[CellResult], quick: bool
) -> tuple[str, str]:
    timed = _timed(sound)
    if len(timed) == len(sound) and decided and all(speed.verdict != "INCONCLUSIVE" for _, speed in timed):
        result, speed = max(timed, key=lambda item: item[1].ratio)
        best = f"the best is {_name(result, ran)}, {speed.ratio:.2f}x ({interval(speed)}) and {_agreement(result)}"
        return "Leave graphs off", f"no configuration that passes is faster than eager; {best}"
    lead = "No speed-up confirmed yet"
    if quick or (not timed and sound[0].spec.made_elsewhere):
        return "No speed was judged", f"{_name(sound[0], ran)} is {_agreement(sound[0])}"
    if not timed:
        return lead, f"{_name(sound[0], ran)} is {_agreement(sound[0])}, but its speed is not known"
    result, speed = max(timed, key=lambda item: item[1].ratio)
    claim = f"{_name(result, ran)} measured {speed.ratio:.2f}x ({interval(speed)}) and is {_agreement(result)}"
    includes_1 = speed.low is not None and speed.high is not None and speed.low <= 1 <= speed.high
    doubt = (
        _not_slower(result, ran) if includes_1 or speed.verdict != "INCONCLUSIVE" else re.split("[:;]", speed.reason)[0]
    )
    return lead, "; ".join(filter(None, (claim, doubt, _largest_bound(timed))))


def _largest_bound(timed: Sequence[tuple[CellResult, Speed]]) -> str:
    """Return the largest upper bound of all cells, or "" if a cell has none."""
    bounds = [result.speed.bound.upper_bound if result.speed.bound else None for result, _ in timed]
    known = [bound for bound in bounds if bound is not None]
    return f"graphs can gain at most {max(known):.2f}x" if len(known) == len(timed) else ""


def _timed(sound: Sequence[CellResult]) -> list[tuple[CellResult, Speed]]:
    """Return the cells with a speed-up and no timing doubt."""
    return [(r, r.speed.speedup) for r in sound if r.speed.speedup and not r.speed.timing_doubt]


# --- words ----------------------------------------------------------------------------------------------------------


def called(result: CellResult) -> str:
    """Return the short name of a cell, which the report's first table explains, or its label if it has none."""
    return result.name or f"`{result.cell.label}`"


def _name(result: CellResult, ran: Sequence[CellResult]) -> str:
    """Return the label and the short name. In a sweep of one workload, leave out the settings that all cells share."""
    if not result.name:
        return called(result)
    eager = [each for each in ran if not each.cell.graphed]
    shared = eager[0].cell.label.partition(", ")[2] if len(eager) == 1 else ""
    return f"`{result.cell.label.removesuffix(f', {shared}')}` ({result.name})"


def interval(speed: Speed) -> str:
    """Return the interval of the verdict and the number of pairs: "1.11 to 1.58, 3 pairs"."""
    return ", ".join(filter(None, (speed.interval, count("pair", speed.pairs))))


def gib(value: int) -> str:
    """Return bytes in GiB, in three digits."""
    return f"{value / 2**30:.3g}"


def over_steps(result: CellResult) -> str:
    """Return the number of compared steps in words if it is below the minimum of EQUIVALENT, which BITWISE does not need."""
    steps = result.compared_steps
    return f" over {count('step', steps)} only" if steps < MINIMUM_STEPS else ""


def _agreement(result: CellResult) -> str:
    assert result.verdict is not None
    verdict, steps = result.verdict.verdict, result.compared_steps
    repairs = result.spec.cuda_graph.mend
    repaired = f", with a repair that your own job lacks ({listed(repairs)})" if repairs else ""
    if verdict == STEP_CHECKED and steps < MINIMUM_STEPS:
        return f"equivalent in its checked steps ({count('step', steps)} are too few to compare curves){repaired}"
    return AGREEMENT[verdict] + over_steps(result) + repaired


def _memory(eager: CellResult | None, graphed: CellResult) -> str:
    if not (eager and eager.memory and graphed.memory and graphed.on_gpu):
        return ""
    before, after = gib(eager.memory.peak), gib(graphed.memory.peak)
    if before == after:
        return f"peak memory stays at {after} GiB"
    verb = "falls" if graphed.memory.peak < eager.memory.peak else "rises"
    return f"peak memory {verb} from {before} to {after} GiB"


def _not_slower(result: CellResult, ran: Sequence[CellResult]) -> str:
    """Describe the cells that may be as fast as ``result`` if it is the fastest of its task; return "" if there are none.

    Name eager alone if its own eager cell is one of them: then the choice among graphs does not matter yet.
    """
    rankings = [ranking for ranking in rank(ran) if ranking.best.label == result.cell.label]
    workload = result.cell.workload_id
    eager = {each.cell.label for each in ran if not each.cell.graphed and each.cell.workload_id == workload}
    cells = {order: {cell.label for each in rankings for cell in each.against_best(order)} for order in ORDERS}
    if order := next((order for order, labels in cells.items() if labels & eager), None):
        return ORDERS[order].format("eager")
    counts = {order: count("other cell", len(labels)) for order, labels in cells.items() if labels}
    return ", and ".join(ORDERS[order].format(words) for order, words in counts.items())
