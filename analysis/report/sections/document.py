"""The report as markdown: the summary first, then what it rests on. Text only; nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from analysis.memory.peaks import KIND_WORDS
from analysis.records.provenance import provenance
from analysis.records.run import Run, attempts_of
from analysis.report.sections.measurements import expected_changes, failures_by_kind, measured
from analysis.report.sections.memory import memories
from analysis.report.sections.pair_evidence import evidence
from analysis.report.sections.ranking import rankings
from analysis.report.sections.speed import speeds
from analysis.report.sections.speedup_bound import captures, limits
from analysis.report.sections.tables import code_block, escape, figure, table
from analysis.report.selection import MAXIMUM_ROWS, MAXIMUM_WORKLOADS, Selection, workload_label
from analysis.report.summary import Summary
from analysis.sweep.cell_results import CellResult
from analysis.sweep.host_contention import neighbours_of
from analysis.sweep.ranking import rank
from analysis.sweep.task_agreement import Trained
from analysis.verdict.rungs import MINIMUM_STEPS
from launch.common.text import count, size
from launch.contract.outcomes import Outcome
from launch.contract.plan import Plan

LONGEST_MESSAGE = 600
"""Characters of a failure's message that are shown; report.json holds it whole."""
PLOT_TITLES = {
    "loss": "Loss and its difference",
    "grad_norm": "Gradient norm and its difference",
    "step_time": "Step times",
    "memory": "Memory by phase",
}


def render(
    plan: Plan,
    results: Sequence[CellResult],
    summary: Summary,
    selection: Selection,
    trained: Sequence[Sequence[Trained]],
    files: Mapping[str, Sequence[str]],
) -> str:
    """The whole document. ``files`` are the plots drawn, by workload, relative to the report."""
    ran, shown = [result for result in results if result.cell.state == "run"], selection.shown
    parts = [
        [f"# Validation report: {escape(plan.name)}", escape(summary.text), f"Exit code {summary.exit_code}."],
        _cells(shown, len(ran), plan),
        _plots(selection, files),
        rankings(rank(results)),
        speeds(shown, neighbours_of(results)),
        limits(shown),
        captures(shown),
        memories(results, shown),
        measured(results, shown),
        expected_changes(results),
        _tasks(trained),
        _not_run("Cells that this host cannot run", [r for r in results if r.cell.state == "not_runnable"]),
        _not_run("Rejected cells", [r for r in results if r.cell.state == "rejected"]),
        failures_by_kind(results),
        _failures(shown),
        evidence(shown),
        _provenance(plan, ran),
    ]
    return "\n\n".join(block for part in parts for block in part) + "\n"


# --- cells ----------------------------------------------------------------------------------------------------------


def _cells(shown: Sequence[CellResult], cells: int, plan: Plan) -> list[str]:
    """The cells ``shown``, of so many ``cells`` of the ``plan`` that ran or were to run."""
    if not shown:
        return []
    header = ("cell", "implementation (effective scope)", "outcome", "loss verdict", "max loss difference",
              "memory peak (added)", "step time, eager / graphed", "proof of replay")  # fmt: skip
    how = (
        f"A graphed cell passes where all its runs equal all eager ones to the bit after the capture (BITWISE), or where over "
        f"{MINIMUM_STEPS} steps or more every step and eager's own noise are within the margins, the mean is shown to "
        f"be, and nothing drifts (EQUIVALENT): loss within {plan.margins.loss:g} nats, gradient norm within "
        f"{plan.margins.grad_norm:.2%} of eager's. Anything that is missing, not finite or not proven does not pass. An eager "
        "cell shows how far its own repeats are apart."
    )
    kinds = sorted({KIND_WORDS[result.memory.kind] for result in shown if result.memory})
    memory = f"Memory is {' or '.join(kinds)}; what capture added is graphed minus eager at the end of phase measure."
    left_out = f"Here and below {len(shown):,} of {cells:,} cells are shown, worst news first; report.json holds all."
    return [
        "## Cells",
        *([_picked(plan)] if plan.only else []),
        *([left_out] if len(shown) < cells else []),
        table(header, map(_cell_row, shown)),
        how,
        *([memory] if kinds else []),
    ]


def _picked(plan: Plan) -> str:
    return f"Of the recipe's cells those with {escape(' and '.join(plan.only))} were picked (--only), with their eager twins."


def _cell_row(result: CellResult) -> list[str]:
    return [
        f"`{result.cell.label}`",
        _implementation(result),
        _outcome(result),
        _verdict_word(result),
        _difference(result),
        _memory(result),
        _speed(result),
        result.graphs.replay.summary if result.graphs.replay else "-",
    ]


def _implementation(result: CellResult) -> str:
    """What was captured is known where a run has ended."""
    impl = result.spec.cuda_graph.impl
    if not result.cell.graphed:
        return "eager"
    return impl if result.unfinished and not result.graphs.replay else f"{impl} ({_scope(result)}){_mechanism(result)}"


def _scope(result: CellResult) -> str:
    replay = result.graphs.replay
    scope = replay.stats.effective_scope if replay and replay.stats.graphs else None
    if scope is None:
        return "nothing captured"
    return ", ".join(scope) or "whole"


def _tasks(trained: Sequence[Sequence[Trained]]) -> list[str]:
    """Eager cells that should train the same, beside each other."""
    if not trained:
        return []
    header = (
        "eager cell",
        "first loss",
        "last loss",
        "largest loss difference",
        "largest gradient norm difference, relative",
    )
    how = (
        "Cells of one task compute the same in another layout, engine or way. Differences are from the first cell of "
        "each table, over all steps that both have; they are no verdict, since sums in another order round otherwise."
    )
    return ["## The same task in several ways", how, *(table(header, map(_trained_row, task)) for task in trained)]


def _trained_row(cell: Trained) -> list[str]:
    return [
        f"`{cell.label}`",
        f"{cell.first_loss:.6f}",
        f"{cell.last_loss:.6f}",
        f"{figure(cell.loss_difference)} at step {cell.loss_step}, of {cell.steps} steps",
        f"{cell.grad_norm_difference:.2g}" if math.isfinite(cell.grad_norm_difference) else "not finite",
    ]


def _mechanism(result: CellResult) -> str:
    replay = result.graphs.replay
    return f": {replay.stats.mechanism}" if replay and replay.stats.mechanism else ""


def _outcome(result: CellResult) -> str:
    flaky = result.integrity.flaky_attempts
    before = f" ({'; '.join(flaky)})" if flaky else ""
    return _ending(result) + before


def _ending(result: CellResult) -> str:
    if result.integrity.unsound_records:
        return f"**{result.outcome}** (records unsound: {result.integrity.unsound_records[0]})"
    if result.unexpected:
        expect = result.cell.expect
        return f"**{result.outcome}** (unexpected; expected {expect.outcome}{_in_phase(expect.phase)})"
    return result.outcome if result.cell.expect.outcome == "COMPLETED" else f"{result.outcome} (as expected)"


def _in_phase(phase: str | None) -> str:
    return f" in {phase}" if phase else ""


def _verdict_word(result: CellResult) -> str:
    if result.verdict is not None:
        return f"{result.verdict.word}{_short(result)}" if result.verdict.passes else f"**{result.verdict.word}**"
    return "-" if result.cell.graphed else "reference"


def _short(result: CellResult) -> str:
    """Equality is said of however few steps: of how many, where they are fewer than anything else needs."""
    steps = min((pair.verdict.evidence.steps for pair in result.pairs if pair.verdict.evidence), default=0)
    return f" over {count('step', steps)} only" if steps < MINIMUM_STEPS else ""


def _difference(result: CellResult) -> str:
    floor = result.loss.noise_floor
    if floor is not None:
        repeats, runs = floor.repeats, len(result.runs)
        return f"{figure(floor.loss)} over {repeats}{f' of {runs}' if repeats < runs else ''} repeats"
    return "-" if result.max_loss_difference is None else figure(result.max_loss_difference)


def _memory(result: CellResult) -> str:
    if result.memory is None:
        return "-"
    added = result.memory.added
    sign = "+" if added is not None and added >= 0 else ""
    return size(result.memory.peak) + (f" ({sign}{size(added)})" if added is not None else "")


def _speed(result: CellResult) -> str:
    """The word is for cells that pass: what computes something else is neither faster nor slower."""
    speedup = result.speed.speedup
    if speedup is None:
        return "-"
    passes = result.verdict is not None and result.verdict.passes
    return f"{speedup.summary} {speedup.word}" if passes else speedup.summary


# --- plots ----------------------------------------------------------------------------------------------------------


def _plots(selection: Selection, files: Mapping[str, Sequence[str]]) -> list[str]:
    if not selection.drawn:
        return []
    blocks = ["## Plots"]
    for workload, results in selection.drawn.items():
        blocks.append(f"### `{workload_label(results)}` (workload {workload})")
        blocks += [f"![{PLOT_TITLES[_kind(file)]}]({file})" for file in files[workload]]
    if selection.left_out_workloads:
        names = ", ".join(f"`{label}`" for label in selection.left_out_workloads)
        blocks.append(f"At most {MAXIMUM_WORKLOADS} workloads are drawn, worst news first. Left out: {names}.")
    if selection.left_out_cells:
        names = ", ".join(f"`{label}`" for label in selection.left_out_cells)
        blocks.append(f"Cells left out of their workload's plots: {names}.")
    return blocks


def _kind(file: str) -> str:
    return file.rpartition("-")[2].removesuffix(".png")


# --- what did not run, what failed ----------------------------------------------------------------------------------


def _not_run(title: str, results: Sequence[CellResult]) -> list[str]:
    if not results:
        return []
    rows = [
        (f"`{result.cell.label}`", reason.rule, reason.message, reason.remedy, reason.source)
        for result in results
        for reason in result.cell.reasons
    ]
    left_out = f"The first {MAXIMUM_ROWS} of {len(rows):,} reasons; report.json holds all."
    return [
        f"## {title}",
        *([left_out] if len(rows) > MAXIMUM_ROWS else []),
        table(("cell", "rule", "why", "remedy", "source"), rows[:MAXIMUM_ROWS]),
    ]


def _failures(ran: Sequence[CellResult]) -> list[str]:
    lines = []
    for result in ran:
        for run in result.runs:
            lines += [_ended(result, run, failed.number, failed.outcome) for failed in run.failed]
            lines += [_failure(result, run)] if run.status != "COMPLETED" else []
    return ["## Failures", "\n".join(lines)] if lines else []


def _failure(result: CellResult, run: Run) -> str:
    if run.attempt is not None:
        return _ended(result, run, run.attempt.number, run.attempt.outcome)
    said = "no attempt has an outcome: interrupted, or still running" if run.begun else "never begun"
    who = f"`{result.cell.label}`, repeat {run.repeat}"
    if run.damaged:
        return escape(f"- **{run.status}** {who}: {'; '.join(run.damaged)}.")
    return f"- **{run.status}** {who}: {said}. Remedy: `python -m orchestrator resume --unfinished`."


def _ended(result: CellResult, run: Run, attempt: int, outcome: Outcome) -> str:
    rank = "" if outcome.rank is None else f", rank {outcome.rank}"
    expected = " (as expected)" if outcome.matches(result.cell.expect) else ""
    message = escape(outcome.message.replace("`", "'"))
    message = message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + "... (whole in report.json)"
    failure_class = f", class {outcome.failure_class}" if outcome.failure_class else ""
    said = ". ".join(text.rstrip(".") for text in (message, f"Remedy: {outcome.remedy}" * bool(outcome.remedy)) if text)
    where = f"in phase {outcome.phase}{rank}{failure_class}"
    who = f"`{result.cell.label}`, repeat {run.repeat}, attempt {attempt}"
    return escape(f"- **{outcome.outcome}**{expected} {where}; {who}: {said}.")


# --- provenance -----------------------------------------------------------------------------------------------------


def _provenance(plan: Plan, ran: Sequence[CellResult]) -> list[str]:
    attempts = [attempt for result in ran for attempt in attempts_of(result.runs)]
    blocks = ["## Provenance"]
    if attempts:
        values = provenance([attempt.environment for attempt in attempts])
        rows = [(key, _value(found, len(attempts))) for key, found in values.items()]
        blocks += [f"Over {len(attempts)} runs that have an outcome.", table(("what", "value"), rows)]
    return [*blocks, f"Resolved recipe, from {escape(plan.recipe_file)}:", code_block(plan.recipe, "yaml")]


def _value(found: Sequence[tuple[str, int]], runs: int) -> str:
    if len(found) == 1 and found[0][1] == runs:
        return found[0][0]
    return "; ".join(f"{value} ({count('run', times)})" for value, times in found)
