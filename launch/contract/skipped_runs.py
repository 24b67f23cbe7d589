"""Decide which runs are not worth their GPU minutes, by how others ended. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from launch.contract.outcomes import Outcome
from launch.contract.plan import Precedents

OutcomeOf = Callable[[str], Outcome | None]
"""Return how a run ended last, by its id; None if it has not ended, or may still end otherwise."""


def why_skipped(run_id: str, outcome_of: OutcomeOf, precedents: Mapping[str, Precedents]) -> str:
    """Return why a run that never began is not worth its GPU minutes; "" if it is.

    It would probably repeat a failure of its cell, or of a cell with the same command, or its eager baseline has failed for
    good, so that nothing could be compared. ``precedents`` has those of each cell.
    """
    cell, _, repeat = run_id.rpartition("-r")
    if not repeat.isdecimal():
        return ""
    others, own = precedents.get(cell, Precedents()), _first_outcomes(cell, outcome_of)
    if repeat != "0" and (known := _lasting_failure(*own)):
        return f"not tried: {known}"
    if others.eager and (known := _failure_of_eager(others.eager, repeat, outcome_of)):
        return f"not tried: no eager run to compare with, since {known}"
    for first in others.same_command:
        outcome, _ = _first_outcomes(first, outcome_of)
        if outcome is not None and outcome.is_command_failure:
            return f"not tried: {first}-r0 has the same command but for numbers, and ended as {_ending(outcome)}"
    return ""


def _lasting_failure(first: Outcome | None, second: Outcome | None, of: str = "") -> str:
    """Describe the outcomes of repeats 0 and 1 if others would probably end like them; return "" if not.

    One failure by settings or installed software suffices. Any other failure counts once repeat 1 has confirmed it.
    """
    if first is None:
        return ""
    if first.repeats_alike:
        return f"repeat 0{of} ended as {_ending(first)}"
    return f"repeats 0 and 1{of} ended as {_ending(first)}" if second is not None and second.confirms(first) else ""


def _failure_of_eager(cell: str, repeat: str, outcome_of: OutcomeOf) -> str:
    """Describe the outcomes of the eager ``cell`` if a graphed ``repeat`` could not be compared; return "" if it could."""
    first, second = _first_outcomes(cell, outcome_of)
    if first is None or first.outcome == "NUMERIC":
        return ""  # curves up to the first NaN can be compared
    if known := _lasting_failure(first, second, f" of {cell}"):
        return known
    fits = any(other and other.results_intact for other in (second, outcome_of(f"{cell}-r{repeat}")))
    # Repeat 0 shows whether graphs fit. Others wait for another eager run.
    waits = first.lacked_gpu_memory and not fits and repeat != "0"
    return f"repeat 0 of {cell} ended as {_ending(first)}" if waits else ""


def _first_outcomes(cell: str, outcome_of: OutcomeOf) -> tuple[Outcome | None, Outcome | None]:
    """Return how repeats 0 and 1 of ``cell`` ended last, None where one has not."""
    return outcome_of(f"{cell}-r0"), outcome_of(f"{cell}-r1")


def _ending(failure: Outcome) -> str:
    named = f" ({failure.failure_class})" * (failure.failure_class not in ("", failure.outcome))
    return f"{failure.outcome}{named} in {failure.phase}"
