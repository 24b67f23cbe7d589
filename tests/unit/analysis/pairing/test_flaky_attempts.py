"""Test retried runs: a success does not hide an earlier failure."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from analysis.report.summary import Summary, summarise
from analysis.report.write_report import write_report
from analysis.sweep.judge_sweep import judge_sweep
from launch.common.atomic_files import JsonLines, write_json
from launch.common.file_lock import UNNAMED
from launch.contract.bundle import Beginning, BundleOrder, EarlyStop
from launch.contract.outcomes import Outcome, OutcomeName
from launch.contract.paths import SweepPaths
from launch.contract.plan import Limits, read_plan
from launch.contract.records.digest import digest_records
from orchestrator.bisect.failure_status import classify_failure
from tests.pairwise import covering
from tests.records import AttemptRecord, Edit, unchanged, write_attempt, write_sweep
from tests.report_text import report_text

GRAPHED, EAGER = True, False


def retried(root: Path, before: Edit, graphed: bool = GRAPHED, deterministic: bool = False) -> Summary:
    """Write a sweep in which ``before`` changes an attempt of repeat 0, graphed or eager, and a sound attempt follows."""

    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed is graphed and run.spec.repeat == 0:
            first = dataclasses.replace(run, metrics=[dict(m) for m in run.metrics], environment=dict(run.environment))
            before(first)
            write_attempt(sweep_paths, first)
            run.number = 2

    sweep_paths = SweepPaths(root)
    return summarise(judge_sweep(write_sweep(root, edit=edit, deterministic=deterministic)).results)


def ended(name: str, phase: str = "measure", **fields: object) -> Edit:
    def change(run: AttemptRecord) -> None:
        del run.metrics[90:]
        run.outcome = Outcome(name, phase, "bundle000", 0.0, 1.0, **fields)  # type: ignore[arg-type]

    return change


def without_outcome(run: AttemptRecord) -> None:
    del run.metrics[90:]
    run.outcome = None


def five_nats_off(run: AttemptRecord) -> None:
    run.metrics[89]["loss"] += 5.0


def one_bit_off(run: AttemptRecord) -> None:
    run.metrics[89]["loss"] *= 1 + 2**-52


def of_other_code(run: AttemptRecord) -> None:
    ended("NUMERIC")(run)
    run.environment["digests"] = {**run.environment["digests"], "code": "mended0000"}


@pytest.mark.parametrize("name", ["NUMERIC", "CAPTURE_FAILED", "CUDA_OOM", "HANG", "FAILED"])
def test_a_failure_that_a_success_follows_comes_and_goes(tmp_path: Path, name: str) -> None:
    found = retried(tmp_path, ended(name))
    assert (found.exit_code, found.verdicts) == (4, {"INCONCLUSIVE": 1})
    assert (
        f"repeat 0: attempt 1 ended {name} in measure, but attempt 2 ended COMPLETED: the result is not reproducible"
        in found.text
    )
    assert "Largest speed-up" not in found.text


def test_a_whole_attempt_that_disagrees_does_not_vanish(tmp_path: Path) -> None:
    found = retried(tmp_path / "far", five_nats_off)
    assert (found.exit_code, found.verdicts) == (4, {"INCONCLUSIVE": 1})
    assert "attempt 1 ended COMPLETED, but its loss at step 89 is 6.9" in found.text
    assert " eager): the result is not reproducible" in found.text
    near, exact = (retried(tmp_path / str(mode), one_bit_off, deterministic=mode) for mode in (False, True))
    assert (near.exit_code, exact.exit_code) == (0, 4), "deterministic mode asks for equality to the bit"
    assert near.verdicts == {"EQUIVALENT": 1}, "what was once other bits is not equal to the bit"
    first, then = exact.text.split("at step 89 is ")[1].split(" eager")[0].split(" (")
    assert first != then and float(first) == float(then) * (1 + 2**-52)


@pytest.mark.parametrize(
    "before",
    [
        ended("CANCELLED"),
        ended("PREEMPTED"),
        ended("NODE_FAIL"),
        ended("ENVIRONMENT", failure_class="GPU_FAULT", infrastructure=True),
        ended("CONFIG", "init"),
        ended("TIMEOUT"),
        ended("FAILED", failure_class="SUPERVISOR"),
        lambda run: None,
    ],
)
def test_what_others_ended_and_what_was_mended_since_is_harmless(tmp_path: Path, before: Edit) -> None:
    found = retried(tmp_path, before)
    assert (found.exit_code, found.verdicts) == (0, {"BITWISE": 1})
    assert "attempt" not in found.text


def half_a_nat_off(run: AttemptRecord) -> None:
    for step in run.metrics[10:90]:
        step["loss"] += 0.5


WAYS_TO_END: list[Edit] = [
    ended("CANCELLED"),
    ended("PREEMPTED"),
    ended("NODE_FAIL"),
    ended("TIMEOUT"),
    ended("HANG"),
    ended("FAILED", failure_class="SIGKILL"),
    ended("ENVIRONMENT", failure_class="GPU_FAULT", infrastructure=True),
    without_outcome,
]


@pytest.mark.parametrize(
    ("end", "graphed"),
    [*((end, GRAPHED) for end in WAYS_TO_END), (ended("CANCELLED"), EAGER), (without_outcome, EAGER)],
)
def test_an_attempt_that_diverged_is_not_forgotten_however_it_ended(tmp_path: Path, end: Edit, graphed: bool) -> None:
    def diverged(run: AttemptRecord) -> None:
        half_a_nat_off(run)
        end(run)

    found = retried(tmp_path, diverged, graphed)
    assert (found.exit_code, found.verdicts) == (4, {"INCONCLUSIVE": 1})
    side = "" if graphed else "eager repeat 0: "
    (reason,) = re.findall(r"INCONCLUSIVE\*\*: `[^`]*` \(repeat 0: (.*?)\)\.", found.text) if graphed else [found.text]
    assert f"{side}attempt 1 " in reason and "but its loss at step " in reason
    assert "eager): the result is not reproducible" in reason


def test_an_attempt_that_diverged_after_the_one_that_counts_is_not_forgotten(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 0:
            write_attempt(SweepPaths(tmp_path), run)
            run.number = 2
            half_a_nat_off(run)
            ended("CANCELLED")(run)

    found = summarise(judge_sweep(write_sweep(tmp_path, edit=edit)).results)
    assert (found.exit_code, found.verdicts) == (4, {"INCONCLUSIVE": 1})
    assert "attempt 2 ended CANCELLED in measure, but its loss at step " in found.text


@pytest.mark.parametrize(("steps", "word"), [(90, "INCONCLUSIVE"), (115, "EQUIVALENT")])
def test_a_cancelled_attempt_with_other_bits_is_judged_as_far_as_it_came(tmp_path: Path, steps: int, word: str) -> None:
    def cancelled(run: AttemptRecord) -> None:
        one_bit_off(run)
        whole = list(run.metrics)
        ended("CANCELLED")(run)
        run.metrics[:] = whole[:steps]

    retried(tmp_path, cancelled)
    (graphed,) = (result for result in judge_sweep(SweepPaths(tmp_path)).results if result.cell.graphed)
    assert graphed.verdict and graphed.verdict.verdict == word
    assert graphed.verdict.reason.startswith("equal bit for bit except graphed repeat 0, attempt 1")


@pytest.mark.parametrize(
    ("first", "second", "lost", "said"),
    [
        (ended("FAILED"), unchanged, "1", "attempt 1 has no outcome and may have failed: it did not end"),
        (unchanged, ended("FAILED"), "2", "attempt 2 has no outcome and may have failed: it did not end"),
        (
            unchanged,
            ended("FAILED"),
            "2/outcome.json",
            "attempt 2 has no outcome and may have failed: it did not end",
        ),
        (ended("FAILED"), unchanged, "1/outcome.json", "attempt 1 has no outcome and may have failed: it did not end"),
    ],
    ids=[
        "the folder of a failure",
        "the folder of a later one",
        "the outcome of a later one",
        "the outcome of a failure",
    ],
)
def test_the_report_names_an_attempt_that_was_lost(
    tmp_path: Path, first: Edit, second: Edit, lost: str, said: str
) -> None:
    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 0:
            before = dataclasses.replace(run, metrics=list(run.metrics))
            first(before)
            write_attempt(SweepPaths(tmp_path), before)
            run.number = 2
            second(run)

    sweep = write_sweep(tmp_path, edit=edit)
    (run_id,) = (cell.run_ids[0] for cell in read_plan(sweep).cells if cell.graphed)
    (bundle,) = read_plan(sweep).bundles
    with JsonLines(sweep.bundle(bundle.bundle_id).begun) as begun:
        for number in (1, 2):
            begun.write(Beginning(run_id, number, 0.0, UNNAMED))
    assert summarise(judge_sweep(sweep).results).exit_code != 0
    path = sweep.run(run_id).root / "attempts" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert said in write_report(sweep).summary


def test_an_attempt_of_other_code_is_named_and_blamed_on_nobody(tmp_path: Path) -> None:
    def other(run: AttemptRecord) -> None:
        half_a_nat_off(run)
        of_other_code(run)

    found = retried(tmp_path, other)
    assert (found.exit_code, found.verdicts) == (0, {"BITWISE": 1})
    assert "attempt 1 ended NUMERIC in measure and is not compared: it ran with other code" in found.text


@pytest.mark.parametrize(("first", "verdict"), [("CANCELLED", "UNFINISHED"), ("NUMERIC", "INCOMPARABLE")])
def test_a_cancelled_attempt_gives_way_to_a_later_one_that_has_not_ended(
    tmp_path: Path, first: OutcomeName, verdict: str
) -> None:
    """The program's own failure before the first step does not."""

    def edit(run: AttemptRecord) -> None:
        if not run.spec.graphed and run.spec.repeat == 0:
            outcome = Outcome(first, "init", "bundle000", 0.0, 1.0)
            write_attempt(SweepPaths(tmp_path), dataclasses.replace(run, metrics=[], environment={}, outcome=outcome))
            without_outcome(run)
            run.number = 2

    (result,) = (one for one in judge_sweep(write_sweep(tmp_path, edit=edit)).results if one.cell.graphed)
    assert result.verdict is not None and result.verdict.verdict == verdict, result.verdict


@pytest.mark.parametrize(
    ("first", "attempt", "stopped", "word"),
    [
        ("CANCELLED", 2, "", "UNFINISHED"),
        ("NODE_FAIL", 2, "", "UNFINISHED"),
        ("CANCELLED", 2, "cancel of another run", "UNFINISHED"),
        ("CANCELLED", 2, "cancel", "INCOMPARABLE"),
        ("CANCELLED", 2, "early stop", "INCOMPARABLE"),
        ("CANCELLED", 1, "", "INCOMPARABLE"),
        ("NUMERIC", 2, "", "INCOMPARABLE"),
    ],
)
def test_a_cancelled_attempt_gives_way_to_a_later_one_that_is_ordered(
    tmp_path: Path, first: OutcomeName, attempt: int, stopped: str, word: str
) -> None:
    """After `resume`, the order on disk says that the run goes on, long before a supervisor begins its attempt."""

    def edit(run: AttemptRecord) -> None:
        if not run.spec.graphed and run.spec.repeat == 0:
            run.metrics, run.environment = [], {}
            run.outcome = Outcome(first, "init", "bundle000", 0.0, 1.0)

    sweep = write_sweep(tmp_path, edit=edit)
    plan = read_plan(sweep)
    bundle, run_id = sweep.bundle(plan.bundles[0].bundle_id), plan.cells[0].run_ids[0]

    def digest() -> str:
        return digest_records(sweep, plan.cell_of_run())

    digests = [digest()]
    write_json(bundle.order, BundleOrder("bundle000", "", ((run_id, attempt),), Limits(), 1, ("cpu0",)))
    digests.append(digest())
    if stopped.startswith("cancel"):
        write_json(bundle.cancel, ["another"] if "another" in stopped else [run_id])
    elif stopped:
        write_json(bundle.early_stop, EarlyStop(2, 6, (run_id,)))
    (result,) = (one for one in judge_sweep(sweep).results if one.cell.graphed)
    assert result.verdict is not None and result.verdict.verdict == word, result.verdict
    assert len({*digests, digest()}) == 2 + bool(stopped), "the report is not fresh any more"
    assert ("still runs or has not begun" in report_text(sweep)) is (word == "UNFINISHED")


def test_a_cancelled_attempt_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    def damaged(run: AttemptRecord) -> None:
        ended("CANCELLED")(run)
        run.metrics[50] = {"step": 50}

    found = retried(tmp_path, damaged)
    assert (found.exit_code, found.verdicts) == (0, {"BITWISE": 1})
    assert "attempt 1 ended CANCELLED in measure and is not compared: metrics.jsonl cannot be read" in found.text


def test_an_eager_failure_is_said_and_blamed_on_no_graph(tmp_path: Path) -> None:
    for name, before, code, word, said in (
        ("nan", ended("NUMERIC"), 0, "BITWISE", "attempt 1 ended NUMERIC in measure, but attempt 2 ended COMPLETED"),
        ("far", five_nats_off, 4, "INCONCLUSIVE", "attempt 1 ended COMPLETED, but its loss at step 89"),
    ):
        found = retried(tmp_path / name, before, EAGER)
        assert (found.exit_code, found.verdicts) == (code, {word: 1})
        assert "1 cell ended differently in another attempt**: `eager, lr 0.001` (repeat 0: " + said in found.text


@pytest.mark.parametrize(("deterministic", "word"), [(False, "EQUIVALENT"), (True, "INCONCLUSIVE")])
def test_where_eager_came_to_other_bits_once_nothing_is_equal_to_them(
    tmp_path: Path, deterministic: bool, word: str
) -> None:
    found = retried(tmp_path, one_bit_off, EAGER, deterministic)
    assert found.verdicts == {word: 1}
    (graphed,) = (result for result in judge_sweep(SweepPaths(tmp_path)).results if result.cell.graphed)
    exact = "eager repeat 0: attempt 1 ended COMPLETED, but its loss at step 89"
    said = exact if deterministic else "equal bit for bit except eager repeat 0, attempt 1"
    assert graphed.verdict and graphed.verdict.reason.startswith(said)


def forked(run: AttemptRecord) -> None:
    for step in run.metrics[60:]:
        step["loss"] += 1e-6


@pytest.mark.parametrize("graphed", [GRAPHED, EAGER])
def test_an_attempt_with_the_other_sides_bits_shows_that_deterministic_runs_do_not_repeat(
    tmp_path: Path, graphed: bool
) -> None:
    """All graphed runs that count take another path than all eager ones, but a cancelled attempt took the other side's."""

    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed is graphed and run.spec.repeat == 0:
            first = dataclasses.replace(run, metrics=[dict(m) for m in run.metrics])
            if not graphed:
                forked(first)
            ended("CANCELLED")(first)
            write_attempt(SweepPaths(tmp_path), first)
            run.number = 2
        if run.spec.graphed:
            forked(run)

    write_sweep(tmp_path, edit=edit, device="cuda", repeats=3, deterministic=True)
    (cell,) = (result for result in judge_sweep(SweepPaths(tmp_path)).results if result.cell.graphed)
    assert cell.verdict and cell.verdict.verdict == "INCONCLUSIVE"
    side = "graphed" if graphed else "eager"
    assert f"attempt 1 of {side} repeat 0 differs from the attempt that counts" in cell.verdict.reason


def between_margins(run: AttemptRecord) -> None:
    # This is beyond the margin of the eager runs, and within two margins of the other attempt.
    run.metrics[89]["loss"] += 1.5e-3


def test_a_graphed_attempt_beyond_the_margin_of_eager_comes_and_goes(tmp_path: Path) -> None:
    found = retried(tmp_path, between_margins)
    assert (found.exit_code, found.verdicts) == (4, {"INCONCLUSIVE": 1})
    assert "attempt 1 ended COMPLETED, but its loss at step 89" in found.text


def test_other_bits_before_the_capture_say_nothing_of_graphs(tmp_path: Path) -> None:
    def warming_up(run: AttemptRecord) -> None:
        run.metrics[0]["loss"] *= 1 + 2**-52

    assert retried(tmp_path, warming_up, EAGER).verdicts == {"BITWISE": 1}


def test_the_row_of_the_cell_names_the_attempt_before(tmp_path: Path) -> None:
    retried(tmp_path, ended("NUMERIC", message="NumericError: loss is nan at step 89"), EAGER)
    report = report_text(SweepPaths(tmp_path))
    row = next(line for line in report.splitlines() if line.startswith("| A0 | `eager, lr 0.001` | - | eager |"))
    assert "COMPLETED (repeat 0: attempt 1 ended NUMERIC in measure, but attempt 2 ended COMPLETED)" in row
    assert "; A0, repeat 0, attempt 1: NumericError: loss is nan at step 89." in report


def test_who_looks_for_a_failure_does_not_take_one_that_comes_and_goes_for_a_pass(tmp_path: Path) -> None:
    retried(tmp_path, ended("CAPTURE_FAILED", "capture"))
    graphed = next(result for result in judge_sweep(SweepPaths(tmp_path)).results if result.cell.graphed)
    stand = classify_failure(graphed, "CAPTURE_FAILED in capture")
    assert stand is not None and stand.status == "unclear"


# --- outcomes that cannot be read -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "attempt", "graphed"),
    covering(
        pytest.mark.exhaustive, ['{"outcome": "NUM', "[]", '{"outcome": "COMPLETED"}', ""], [1, 2], [GRAPHED, EAGER]
    ),
)
def test_beside_an_outcome_that_cannot_be_read_no_attempt_counts(
    tmp_path: Path, graphed: bool, attempt: int, content: str
) -> None:
    """The unreadable outcome may have been a NaN, before or after a success."""

    def edit(run: AttemptRecord) -> None:
        write_attempt(paths, run)
        run.number = 2

    paths = SweepPaths(tmp_path)
    write_sweep(tmp_path, edit=edit)
    assert summarise(judge_sweep(paths).results).exit_code == 0
    cell = next(result.cell for result in judge_sweep(paths).results if result.cell.graphed is graphed)
    damaged = paths.run(cell.run_ids[0]).attempt(attempt)
    damaged.outcome.write_text(content)

    found = summarise(judge_sweep(paths).results)
    assert (found.exit_code, found.verdicts) == (3, {"INCOMPARABLE": 1})
    assert f"an outcome of the {'graphed' if graphed else 'eager'} run is damaged" in found.text
    named = f"runs/{cell.run_ids[0]}/attempts/{attempt}/outcome.json cannot be read"
    assert (
        found.text.count(named) == 1
        and "fix: move its folder away, then resume the sweep to run it again" in found.text
    )
    assert named in write_report(paths).markdown.read_text()

    damaged.root.rename(tmp_path / "away")
    assert summarise(judge_sweep(paths).results).exit_code == 0


def test_a_failure_after_an_outcome_that_cannot_be_read_is_still_one(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 0:
            write_attempt(paths, run)
            paths.run(run.spec.run_id).attempt(1).outcome.write_text("{")
            run.number = 2
            ended("NUMERIC")(run)

    paths = SweepPaths(tmp_path)
    write_sweep(tmp_path, edit=edit)
    found = summarise(judge_sweep(paths).results)
    assert (found.exit_code, found.unexpected) == (3, 1)


def test_a_cancelled_attempt_gives_way_to_none_before_an_outcome_that_cannot_be_read(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 0:
            for number in (1, 2):
                run.number = number
                write_attempt(paths, run)
            paths.run(run.spec.run_id).attempt(2).outcome.write_text("{")
            run.number = 3
            ended("CANCELLED")(run)

    paths = SweepPaths(tmp_path)
    write_sweep(tmp_path, edit=edit)
    graphed = next(result for result in judge_sweep(paths).results if result.cell.graphed)
    assert graphed.runs[0].attempt is None and graphed.verdict and graphed.verdict.verdict == "INCOMPARABLE"
