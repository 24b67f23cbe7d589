"""Judge every cell, once the evidence of all cells is collected, and sum the cells up in an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.pairing.step_checks import judge_with_checks
from analysis.records.load import Records
from analysis.speed.confidence_interval import ALONE_ONCE, Correction, EvenSplit, families
from analysis.speed.ratios import ratios_of
from analysis.speed.speedup import Speed, cell_speed
from analysis.sweep.cell_evidence import CellEvidence, collect_evidence
from analysis.sweep.cell_results import CellResult
from analysis.verdict.family import judge_family
from analysis.verdict.verdict import OF_SETTINGS, PASSES, Verdict
from launch.contract.exit_codes import ExitCode

_SEVERAL_VERSIONS = "its repeats ran different code, libraries or data; run all of them again with one version"


def judge_cells(evidence: Sequence[CellEvidence], elsewhere: int = 0) -> tuple[CellResult, ...]:
    """Judge the cells of a sweep, with a correction for multiple tests.

    The verdicts form one family of tests, and the speed-ups of passing cells form another. In a larger family, each test needs
    stronger evidence. With graphed cells ``elsewhere`` in the sweep, a verdict holds whatever those show.
    """
    alone = [cell.result.verdict for cell in evidence]
    decided = iter(judge_family([verdict for verdict in alone if verdict], elsewhere))
    corrected = [verdict and next(decided) for verdict in alone]
    verdicts = [
        verdict and judge_with_checks(verdict, cell.result.graphs.step_checks)
        for verdict, cell in zip(corrected, evidence, strict=True)
    ]
    speedups = _speedups(evidence, verdicts, elsewhere)
    return tuple(map(_result, evidence, verdicts, speedups))


def compare_cells(records: Records) -> tuple[CellResult, ...]:
    """Judge each cell of the plan on its own, in the plan's order, without correction for multiple tests."""
    return tuple(judge_cells([cell])[0] for cell in collect_evidence(records))


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


def _speedups(
    evidence: Sequence[CellEvidence], verdicts: Sequence[Verdict | None], elsewhere: int
) -> list[Speed | None]:
    """Return the speed-up of each cell. The speed-ups of passing cells are corrected as one family of tests."""
    if looks := max((len(cell.result.looks) for cell in evidence), default=0):
        split = EvenSplit(elsewhere + sum(cell.result.validated for cell in evidence), looks)
        return [_speedup(cell, split) for cell in evidence]
    own = [_speedup(cell) for cell in evidence]
    timed = [
        place
        for place, (speed, verdict) in enumerate(zip(own, verdicts, strict=True))
        if speed and speed.has_enough_data and verdict and verdict.passes
    ]
    cells = [evidence[place].result for place in timed]
    corrections = families([(cell.cell.workload_id, ratios_of([pair.speed for pair in cell.pairs])) for cell in cells])
    of_family = {place: _speedup(evidence[place], family) for place, family in zip(timed, corrections, strict=True)}
    return [of_family.get(place, speed) for place, speed in enumerate(own)]


def _speedup(cell: CellEvidence, family: Correction = ALONE_ONCE) -> Speed | None:
    pairs = cell.result.pairs
    if not pairs:
        return None
    speeds = [pair.speed for pair in pairs]
    versions = {pair.attempts[1].digests for pair in pairs if pair.speed.ratio is not None}
    doubt = cell.speed_doubt or (_SEVERAL_VERSIONS if len(versions) > 1 else "")
    return cell_speed(speeds, cell.result.spec, family, cell.throttle_bounds, doubt, cell.repeats_option)


def _result(cell: CellEvidence, verdict: Verdict | None, speedup: Speed | None) -> CellResult:
    result = cell.result
    refused = [OF_SETTINGS[setting] for setting in result.cell.refused_settings]
    judged = [_pair_verdict(pair.verdict, result.verdict, verdict).without(refused) for pair in result.pairs]
    pairs = tuple(replace(pair, verdict=own) for pair, own in zip(result.pairs, judged, strict=True))
    return replace(
        result, pairs=pairs, verdict=verdict and verdict.without(refused), speed=replace(result.speed, speedup=speedup)
    )


def _pair_verdict(own: Verdict, alone: Verdict | None, final: Verdict | None) -> Verdict:
    """Return a pair's ``own`` verdict, or the cell's ``final`` one if the family correction or step checks changed it.

    ``alone`` is the cell's verdict before that change. A pair that decides by itself keeps its verdict, unless a step check
    found a fault.
    """
    if final is None or final is alone:
        return own
    decides = own.verdict not in ("EQUIVALENT", alone.verdict if alone else "")
    return own if decides and final.verdict != "DIVERGED" else replace(final, evidence=own.evidence)
