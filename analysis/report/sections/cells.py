"""How to read the first screen, and a table of its short names: the settings of each cell and how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.memory.peaks import KIND_WORDS
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import escape, figure, how_to_read, table
from analysis.sweep.cell_results import CellResult
from analysis.sweep.labels import layout_words
from launch.common.grouped import grouped
from launch.contract.plan import MINIMUM_STEPS, Margins

HEADER = (
    "name",
    "cell",
    "layout",
    "implementation (effective scope)",
    "outcome",
    "largest loss difference, nats",
    "replay check",
)
SPEED = (
    "Speed-up: the eager step time divided by the graphed one, with its interval over the pairs. Its verdict also depends on "
    "the checks in section Speed. Step times are means over the steady steps."
)


def render(report: ReportData) -> list[str]:
    if not report.shown:
        return []
    shown, ran, only = len(report.shown), len(report.ran), report.sweep.plan.only
    kinds = sorted({KIND_WORDS[result.memory.kind] for result in report.shown if result.memory})
    selected = f"The sweep ran only cells with {escape(_selection(only))} (--only), and their eager baselines."
    left_out = f"The tables show {shown:,} of {ran:,} cells, worst news first. report.json has all cells."
    memory = f"Memory: the largest peak of any phase (on GPUs up to measure), rank and repeat, in {' or '.join(kinds)}."
    return [
        *how_to_read(*_rules(report.sweep.plan.margins), SPEED, *([memory] if kinds else [])),
        "## Cells",
        *([selected] if only else []),
        *([left_out] if shown < ran else []),
        table(HEADER, map(_row, report.shown)),
    ]


def _selection(only: Sequence[str]) -> str:
    """Describe the cells that ``--only`` keeps: those with one of the values of each key."""
    values = grouped((key, value) for key, _, value in (text.partition("=") for text in only))
    return " and ".join(f"{key}={' or '.join(given)}" for key, given in values.items())


def _rules(margins: Margins) -> tuple[str, ...]:
    return (
        "A graphed cell passes as BITWISE or as EQUIVALENT. The margins are "
        f"{margins.loss:g} nats for the loss and {margins.grad_norm:.2%} of eager's gradient norm (docs/verdicts.md).",
        "BITWISE: after the capture, all its runs equal all eager runs of the same code, libraries and data bit for bit.",
        f"EQUIVALENT: over {MINIMUM_STEPS} steps or more, each step's difference and eager's own noise are within the margins. A "
        "test shows that the mean difference is too, and no difference grows.",
        "EQUIVALENT (step-checked): noise hides whether the curves agree, or they are too short (quick mode), but single steps "
        "agree between replay and uncaptured code.",
        "A cell with missing, non-finite or unproven data does not pass. Logs of runs made elsewhere may pass. Their replay "
        "then stays unproven.",
        "For an eager cell, the loss difference is the difference between its own repeats.",
    )


def _row(result: CellResult) -> list[str]:
    replay = result.graphs.replay
    return [
        result.name,
        f"`{result.cell.label}`",
        layout_words(result.spec.parallelism),
        _implementation(result),
        _outcome(result),
        _difference(result),
        replay.summary if replay else "-",
    ]


def _implementation(result: CellResult) -> str:
    impl, replay = result.spec.cuda_graph.impl, result.graphs.replay
    if not result.cell.graphed:
        return "eager"
    # Only a run that has ended shows what it captured.
    if result.spec.made_elsewhere or (result.unfinished and not replay):
        return impl
    scope = replay.stats.effective_scope if replay and replay.stats.graphs else None
    captured = "nothing captured" if scope is None else ", ".join(scope) or "whole"
    mechanism = f": {replay.stats.mechanism}" if replay and replay.stats.mechanism else ""
    return f"{impl} ({captured}){mechanism}"


def _outcome(result: CellResult) -> str:
    flaky = result.integrity.flaky_attempts
    return _ending(result) + (f" ({'; '.join(flaky)})" if flaky else "")


def _ending(result: CellResult) -> str:
    expect, unsound = result.cell.expect, result.integrity.unsound_records
    if unsound:
        return f"**{result.outcome}** (records unsound: {unsound[0]})"
    if result.unexpected:
        return f"**{result.outcome}** (unexpected; expected {expect.text})"
    return result.outcome if expect.outcome == "COMPLETED" else f"{result.outcome} (as expected)"


def _difference(result: CellResult) -> str:
    floor, runs = result.loss.noise_floor, len(result.cell.repeat_ids)
    if floor is not None:
        of_all = f" of {runs}" if floor.repeats < runs else ""
        return f"{figure(floor.loss)} over {floor.repeats}{of_all} repeats{' and a perturbed run' * floor.perturbed}"
    return "-" if result.max_loss_difference is None else figure(result.max_loss_difference)
