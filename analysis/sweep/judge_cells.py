"""Judge every cell, once the evidence of all cells is collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.records.load import Records
from analysis.speed.speedup import Speed, cell_speed, ratios_of
from analysis.statistics.confidence_interval import Family, families
from analysis.sweep.cell_evidence import CellEvidence, collect_evidence
from analysis.sweep.cell_results import CellResult, PairResult
from analysis.verdict.verdict import Verdict, judge_family


def judge_cells(evidence: Sequence[CellEvidence]) -> tuple[CellResult, ...]:
    """Judge the cells of a sweep, with a correction for multiple tests.

    The verdicts form one family of tests, the speed-ups of passing cells another. With more tests, each needs stronger
    evidence.
    """
    decided = iter(judge_family([cell.verdict for cell in evidence if cell.verdict]))
    verdicts = [next(decided) if cell.verdict else None for cell in evidence]
    speedups = _speedups(evidence, verdicts)
    return tuple(map(_result, evidence, verdicts, speedups))


def compare_cells(records: Records) -> tuple[CellResult, ...]:
    """Judge each cell of the plan on its own, in the plan's order, without correction for multiple tests."""
    return tuple(judge_cells([cell])[0] for cell in collect_evidence(records))


def _speedups(evidence: Sequence[CellEvidence], verdicts: Sequence[Verdict | None]) -> list[Speed | None]:
    """Return the speed-up of each cell. Those of passing cells are corrected as one family of tests."""
    own = [_speedup(cell) for cell in evidence]
    timed = [
        place
        for place, (speed, verdict) in enumerate(zip(own, verdicts, strict=True))
        if speed and speed.tells and verdict and verdict.passes
    ]
    ratios = [ratios_of([pair.speed for pair in evidence[place].pairs]) for place in timed]
    corrections = families(
        [(evidence[place].cell.workload_id, each) for place, each in zip(timed, ratios, strict=True)]
    )
    of_family = {place: _speedup(evidence[place], family) for place, family in zip(timed, corrections, strict=True)}
    return [of_family.get(place, speed) for place, speed in enumerate(own)]


def _speedup(cell: CellEvidence, family: Family | None = None) -> Speed | None:
    if not cell.pairs:
        return None
    speeds = [pair.speed for pair in cell.pairs]
    return cell_speed(speeds, cell.cell.run_spec, family, cell.throttle_bounds, cell.speed_doubt)


def _result(cell: CellEvidence, verdict: Verdict | None, speedup: Speed | None) -> CellResult:
    pairs = (
        PairResult(**vars(pair), verdict=_pair_verdict(own, cell.verdict, verdict))
        for pair, own in zip(cell.pairs, cell.pair_verdicts, strict=True)
    )
    return CellResult(
        cell.cell,
        cell.runs,
        tuple(pairs),
        verdict,
        replace(cell.speed, speedup=speedup),
        cell.memory,
        cell.graphs,
        cell.loss,
        cell.integrity,
    )


def _pair_verdict(own: Verdict, alone: Verdict | None, final: Verdict | None) -> Verdict:
    """Return a pair's ``own`` verdict; for an EQUIVALENT, return the cell's ``final`` one if the family changed it.

    ``alone`` is the cell's verdict before the correction for multiple tests.
    """
    if final is None or final is alone or own.verdict != "EQUIVALENT":
        return own
    return replace(final, evidence=own.evidence)
