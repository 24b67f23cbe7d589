"""Compare the figures of a cell in two sweeps: outcome, verdict, speed and memory.

A cell is worse if
- its verdict is further down in analysis.verdict.verdict.VERDICTS, or still DIVERGED, by more than twice as much;
- a larger share of its runs does not end well or as expected, or its records are unsound now;
- its speed-up's whole interval lies below the earlier interval;
- its memory peak exceeds the earlier peak by more than the tolerance.
NaN counts as worse. Two speed-ups may be too uncertain to show a loss of ``SPEED_LOSS``. If another measurement with the earlier
precision would have shown that loss, the change is inconclusive. Otherwise it is not comparable. A speed-up that was above 1 and
is now certainly below 1 is inconclusive, too, however uncertain the earlier one was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from analysis.compare.golden import GoldenCell, GoldenMemory, GoldenSpeed, GoldenVerdict
from analysis.verdict.verdict import VERDICTS
from launch.common.text import count
from launch.contract.exit_codes import ExitCode
from launch.contract.outcomes import RESULTS_INTACT

MEMORY_TOLERANCE = 0.05
"""The relative growth of a peak that is not worse. Megatron-LM's functional tests allow as much
(tests/functional_tests/python_test_utils)."""

SPEED_LOSS = 0.2
"""The relative loss that two comparable speed-ups must be able to show. It is our own choice: intervals of two pairs on a
quiet GPU can show it."""

DEVIATION_GROWTH = 2.0
"""A cell that stays DIVERGED is worse if its difference exceeds the earlier one by more than this factor. Repeats differ by
less."""

Aspect = Literal["cell", "outcome", "verdict", "speed", "memory"]
Change = Literal["worse", "unfinished", "inconclusive", "not comparable", "changed", "better"]
"""What a difference means.

- worse: a regression.
- unfinished: a run has no outcome.
- inconclusive: known before, unknown now.
- not comparable: never known.
- changed: neither better nor worse.
- better: an improvement.
"""
Ending = Literal["failure", "error", "skipped"]
"""How a testcase of JUnit ends if it does not pass."""
NOTHING_WORSE = "nothing is worse"


class ChangeKind(NamedTuple):
    """What a change implies: the command's exit code and answer if no other is worse, its heading, its testcase's ending."""

    exit_code: ExitCode
    heading: str
    answer: str = NOTHING_WORSE
    ending: Ending | None = None


KINDS: Mapping[Change, ChangeKind] = {
    "worse": ChangeKind(ExitCode.FAILED, "worse", "worse", "failure"),
    "unfinished": ChangeKind(ExitCode.UNFINISHED, "without an outcome", "not known yet", "error"),
    "inconclusive": ChangeKind(ExitCode.INCONCLUSIVE, "unknown now", "unknown", "error"),
    "not comparable": ChangeKind(ExitCode.PASS, "not comparable", ending="skipped"),
    "changed": ChangeKind(ExitCode.PASS, "different"),
    "better": ChangeKind(ExitCode.PASS, "better"),
}
"""The changes, most important first. The first one that occurs decides the exit code and the answer of the command."""


@dataclass(frozen=True)
class FigureChange:
    """One figure of a cell, before and now, as text."""

    aspect: Aspect
    change: Change
    before: str
    after: str


@dataclass(frozen=True)
class Judgement:
    """What is wrong with a cell, if anything. ``kind`` is a word to group by; ``reason`` says what is wrong."""

    change: Change
    kind: str = ""
    reason: str = ""


def worst(changes: Sequence[Change]) -> Change | None:
    return next((change for change in KINDS if change in changes), None)


def differences(before: GoldenCell, after: GoldenCell, memory_tolerance: float) -> tuple[FigureChange, ...]:
    """Return the figures in which one cell differs."""
    found = (
        _outcome(before, after),
        _verdict(before, after),
        _speed(before.speed, after.speed),
        _memory(before.memory, after.memory, memory_tolerance),
    )
    return tuple(one for one in found if one)


def judge_alone(cell: GoldenCell) -> Judgement:
    """Judge a cell that has no counterpart, as its own report does."""
    word, reason = (cell.verdict.verdict, cell.verdict.reason) if cell.verdict else ("", "")
    if cell.unexpected:
        return Judgement("worse", cell.outcome, f"ended {cell.outcome}, expected {cell.expect.text}")
    if cell.unsound_records:
        return Judgement("worse", "unsound records", "; ".join(cell.unsound_records))
    if word in ("DIVERGED", "INCOMPARABLE"):
        return Judgement("worse", word, reason)
    if cell.unfinished or word == "UNFINISHED":
        return Judgement("unfinished", "UNFINISHED", reason or f"a run has no outcome: {cell.outcome}")
    return Judgement("inconclusive", word, reason) if word == "INCONCLUSIVE" else Judgement("changed")


def _outcome(before: GoldenCell, after: GoldenCell) -> FigureChange | None:
    change = _outcome_change(before, after)
    return FigureChange("outcome", change, _ended(before), _ended(after)) if change else None


def _outcome_change(before: GoldenCell, after: GoldenCell) -> Change | None:
    was, now = _badness(before), _badness(after)
    if any(flag > flag_before for flag, flag_before in zip(now, was, strict=True)):
        return "worse"
    if after.unfinished:
        return "unfinished"
    if now != was:
        return "better"
    return "changed" if before.outcome != after.outcome else None


def _badness(cell: GoldenCell) -> tuple[float, float, float, bool, bool]:
    """Return three shares of the runs and two flags; larger is worse.

    The shares are of runs that did not end as expected, ended without results, and ended otherwise than COMPLETED.
    """
    runs = _runs(cell.outcome)
    ended = {name: count for name, count in runs.items() if name not in ("NOT RUN", "NOT ENDED")}

    def share(*well: str) -> float:
        return sum(count for name, count in ended.items() if name not in well) / sum(runs.values())

    return (
        share(cell.expect.outcome),
        share(*RESULTS_INTACT),
        share("COMPLETED"),
        cell.unexpected,
        bool(cell.unsound_records),
    )


def _runs(outcome: str) -> dict[str, int]:
    """Count runs by outcome, from the text of CellResult.outcome; a single outcome counts 1."""
    parts = (part.partition(" x") for part in outcome.split(", "))
    return {name: int(count) if count.isdecimal() and int(count) else 1 for name, _, count in parts}


def _ended(cell: GoldenCell) -> str:
    notes = [f"expected {cell.expect.text}"] if cell.unexpected else []
    notes += [f"unsound records: {cell.unsound_records[0]}"] if cell.unsound_records else []
    return f"{cell.outcome} ({'; '.join(notes)})" if notes else cell.outcome


def _verdict(before: GoldenCell, after: GoldenCell) -> FigureChange | None:
    """Compare the verdicts. Return None, too, if there is no verdict any more, since the cell failed as expected."""
    if after.verdict is None:
        return None
    text = _verdict_text(after.verdict)
    if before.verdict is None:
        return FigureChange("verdict", judge_alone(after).change, "no verdict", text)
    rank, rank_before = VERDICTS.index(after.verdict.verdict), VERDICTS.index(before.verdict.verdict)
    if after.verdict.verdict == "UNFINISHED":
        return FigureChange("verdict", "unfinished", before.verdict.verdict, text)
    if rank == rank_before:
        return _same_verdict(before, after)
    worse: Change = "inconclusive" if after.verdict.verdict == "INCONCLUSIVE" else "worse"
    return FigureChange("verdict", worse if rank > rank_before else "better", before.verdict.verdict, text)


def _same_verdict(before: GoldenCell, after: GoldenCell) -> FigureChange | None:
    """Compare two equal verdicts that more runs would not change: DIVERGED and INCOMPARABLE."""
    assert before.verdict and after.verdict  # The caller has checked this.
    if after.verdict.verdict not in ("DIVERGED", "INCOMPARABLE"):
        return None
    was, now = _off_by(before), _off_by(after)
    further = was and now and was[0] == now[0] and now[1] > was[1] * DEVIATION_GROWTH
    if not further and before.verdict == after.verdict:
        return None
    sizes = f" (off by {was[1]:.3g} before, {now[1]:.3g} now)" if further and was and now else ""
    change: Change = "worse" if further else "changed"
    return FigureChange("verdict", change, _verdict_text(before.verdict), _verdict_text(after.verdict) + sizes)


def _off_by(cell: GoldenCell) -> tuple[str, float] | None:
    """Return the metric by which a cell DIVERGED, and its largest known difference."""
    found = cell.verdict.deviation if cell.verdict else None
    if found is None:
        return None
    of_loss = cell.max_loss_difference if found.metric == "loss" else None
    sizes = [found.size] if of_loss is None else [found.size, of_loss]
    return found.metric, max(sizes) if all(map(math.isfinite, sizes)) else math.inf


def _verdict_text(verdict: GoldenVerdict) -> str:
    return f"{verdict.verdict}: {verdict.reason}" if verdict.reason else verdict.verdict


def _speed(before: GoldenSpeed | None, after: GoldenSpeed | None) -> FigureChange | None:
    if before is None or before.interval is None or after is None or after.interval is None:
        return _without_interval(before, after)
    (low, high), (low_before, high_before) = after.interval, before.interval
    if not high >= low_before:
        return FigureChange("speed", "worse", _ratio(before), _ratio(after))
    if low > high_before:
        return FigureChange("speed", "better", _ratio(before), _ratio(after))
    if not high * before.ratio * (1 - SPEED_LOSS) < low_before * after.ratio:
        now = f"{_ratio(after)}: the intervals are too wide to show a loss of {SPEED_LOSS:.0%}"
        return _uncomparable(before, after, now)
    return None


def _without_interval(before: GoldenSpeed | None, after: GoldenSpeed | None) -> FigureChange | None:
    now = ": ".join(filter(None, (_ratio(after), after.reason))) if after else "no figure"
    return _uncomparable(before, after, now) if before or after else None


def _uncomparable(before: GoldenSpeed | None, after: GoldenSpeed | None, now: str) -> FigureChange:
    """Classify two speed-ups that cannot be compared."""
    if before is None:
        return FigureChange("speed", "not comparable", "no figure", now)
    slower = before.ratio > 1 and after is not None and after.interval is not None and after.interval[1] < 1
    change: Change = "inconclusive" if _is_precise(before) or slower else "not comparable"
    return FigureChange("speed", change, _ratio(before), now + (", slower than eager" if slower else ""))


def unsure_speeds(cells: Sequence[GoldenCell]) -> tuple[str, ...]:
    """Describe each cell whose speed-up is too uncertain to compare with, and the fix.

    After a loss of ``SPEED_LOSS``, an equally precise measurement would still overlap such a cell's interval.
    """
    found = ((cell.label, cell.speed) for cell in cells if cell.speed)
    return tuple(f"{label}, {_ratio(speed)}; {_speed_fix(speed)}" for label, speed in found if not _is_precise(speed))


def _is_precise(speed: GoldenSpeed) -> bool:
    return speed.interval is not None and speed.interval[1] * (1 - SPEED_LOSS) < speed.interval[0]


def _speed_fix(speed: GoldenSpeed) -> str:
    no_interval = speed.interval is None and speed.pairs > 1
    return speed.reason if no_interval and speed.reason else "add repeats to narrow it"


def _ratio(speed: GoldenSpeed) -> str:
    over = count("pair", speed.pairs)
    if speed.interval is None:
        return f"{speed.ratio:.3f}x ({over})"
    return f"{speed.ratio:.3f}x ({speed.interval[0]:.3f}-{speed.interval[1]:.3f} over {over})"


def _memory(before: GoldenMemory | None, after: GoldenMemory | None, tolerance: float) -> FigureChange | None:
    if before is None:
        return None
    if after is None or after.kind != before.kind:
        return FigureChange("memory", "inconclusive", _bytes(before), _bytes(after) if after else "no figure")
    if not after.peak <= before.peak * (1 + tolerance):
        return FigureChange("memory", "worse", _bytes(before), f"{_bytes(after)}, {_more(before, after)}")
    if after.peak < before.peak * (1 - tolerance):
        return FigureChange("memory", "better", _bytes(before), f"{_bytes(after)}, {_more(before, after)}")
    return None


def _bytes(memory: GoldenMemory) -> str:
    return f"{memory.peak / 2**30:.2f} GiB ({memory.kind})"


def _more(before: GoldenMemory, after: GoldenMemory) -> str:
    return f"{after.peak / before.peak - 1:+.1%}" if before.peak else "from nothing"
