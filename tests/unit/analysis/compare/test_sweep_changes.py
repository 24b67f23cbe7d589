"""Test what became worse from one sweep to the next, on written records: find every kind of regression, and invent
none."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.compare.cell_changes import MEMORY_TOLERANCE, unsure_speeds
from analysis.compare.golden import (
    Golden,
    GoldenCell,
    GoldenDeviation,
    GoldenVerdict,
    golden_of,
    golden_to_json,
    read_golden,
)
from analysis.compare.render import format_comparison
from analysis.compare.sweep_changes import Comparison, compare_sweeps, comparison_to_json
from analysis.report.write_report import write_report
from analysis.verdict.verdict import VERDICTS
from launch.common.atomic_files import RecordError, dumps, read_json
from launch.contract.outcomes import Expectation, Outcome, OutcomeName
from launch.contract.paths import SweepPaths
from launch.contract.plan import Reason
from launch.contract.spec import CudaGraph
from tests import records
from tests.records import STARTED, AttemptRecord, Edit, Extra, workload_spec

write_sweep = functools.partial(records.write_sweep, repeats=3)
EAGER, GRAPHED = "eager, lr 0.001", "torch_compile, lr 0.001"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> SweepPaths:
    return write_sweep(tmp_path_factory.mktemp("golden") / "written")


@pytest.fixture(scope="module")
def golden(sweep: SweepPaths) -> Golden:
    return golden_of(sweep)


def found(comparison: Comparison) -> dict[tuple[str, str], str]:
    return {(cell.label, one.aspect): one.change for cell in comparison.cells for one in cell.differences}


# --- the golden file ------------------------------------------------------------------------------------------------


def test_a_report_its_golden_file_and_its_records_say_the_same(sweep: SweepPaths, golden: Golden) -> None:
    write_report(sweep)
    report = read_json(sweep.report / "report.json")
    assert read_golden(report) == golden
    small = dumps(golden_to_json(golden))
    assert read_golden(json.loads(small)) == golden
    assert len(small) < len(dumps(report)) / 2
    assert small == dumps(golden_to_json(golden_of(sweep))), "the same records, the same bytes"


def broken(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *outer, last = path.split(".")
        inner: Any = content
        for part in outer:
            inner = inner[int(part)] if part.isdigit() else inner[part]
        inner[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        broken("format", 0),
        broken("cells", None),
        broken("cells.1.verdict.verdict", "FINE"),
        broken("cells.1.unexpected", "no"),
        broken("cells.1.speed.ratio", "fast"),
        broken("provenance", [1]),
        broken("cells.1.expect.phases", None),
        broken("verdicts", {}),
    ],
)
def test_a_damaged_golden_file_is_refused(golden: Golden, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(dumps(golden_to_json(golden)))
    change(content)
    with pytest.raises(RecordError):
        read_golden(content)


def test_an_older_format_is_refused_by_its_number(golden: Golden) -> None:
    content = json.loads(dumps(golden_to_json(golden))) | {"format": 1}
    with pytest.raises(RecordError, match="format is 1; this version reads format 2 only"):
        read_golden(content)


def test_what_no_report_says_is_refused_all_at_once(golden: Golden) -> None:
    content = json.loads(dumps(golden_to_json(golden)))
    twin = copy.deepcopy(content["cells"][1])
    content["cells"][0]["memory"]["peak"] = "Infinity"
    content["cells"][1] |= {
        "verdict": None,
        "speed": content["cells"][1]["speed"] | {"ratio": "NaN", "own_low": 9.0, "own_high": 0.1},
    }
    content["cells"].insert(0, twin)
    with pytest.raises(RecordError) as refused:
        read_golden(content)
    eager, graphed = (cell.cell_id for cell in golden.cells)
    assert str(refused.value).removesuffix(": no report can contain this").split("; ") == [
        f"{graphed}: the cell appears 2 times",
        f"{eager}: memory.peak is inf, not a number of bytes",
        f"{graphed}: verdict is null for a graphed cell that ended COMPLETED, expected COMPLETED",
        f"{graphed}: speed.ratio is nan, not a positive finite number",
        f"{graphed}: speed.ratio nan is not from speed.own_low 9.0 to speed.own_high 0.1",
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pairs": 1}, "of one pair, which has no interval"),
        ({"pairs": -3}, "speed.pairs is -3, not a number of pairs"),
        ({"own_low": None}, "an interval has both"),
        ({"own_high": None}, "an interval has both"),
    ],
)
def test_bounds_that_would_be_taken_for_none_are_refused(golden: Golden, changed: dict[str, Any], said: str) -> None:
    content = json.loads(dumps(golden_to_json(golden)))
    content["cells"][1]["speed"] |= changed
    with pytest.raises(RecordError, match=said):
        read_golden(content)


def test_why_there_is_no_interval_goes_with_it(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "hot", device="cuda", edit=hot)
    golden = golden_of(sweep)
    speed = golden.cells[1].speed
    assert speed and speed.interval is None and "GPUs were slowed down" in speed.reason
    assert read_golden(json.loads(dumps(golden_to_json(golden)))) == golden
    (said,) = unsure_speeds(golden.cells)
    assert "slowed down" in said and "more repeats" not in said


def test_a_cell_that_does_not_pass_has_no_word_of_speed_in_the_report(tmp_path: Path) -> None:
    content = read_json(write_report(write_sweep(tmp_path / "bad", edit=far_off)).json)
    assert content["cells"][1]["verdict"]["verdict"] == "DIVERGED"
    assert content["cells"][1]["speed"]["verdict"] is None and content["cells"][1]["speed"]["ratio"]


def hot(run: AttemptRecord) -> None:
    for event in run.events[0]:
        if event.get("clocks"):
            event["clocks"]["throttled"]["thermal"] = event["clocks"]["seconds"]


def test_a_failure_that_was_expected_has_no_verdict(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "failing", expect=Expectation("CUDA_OOM", "capture"), edit=out_of_memory)
    golden = golden_of(sweep)
    assert golden.cells[1].verdict is None
    assert read_golden(json.loads(dumps(golden_to_json(golden)))) == golden


@pytest.mark.parametrize("content", [None, 1, [], "x", {}])
def test_what_is_no_report_is_refused(content: Any) -> None:
    with pytest.raises(RecordError, match="neither a report"):
        read_golden(content)


# --- records to regressions -----------------------------------------------------------------------------------------


def test_a_sweep_is_not_worse_than_itself(golden: Golden) -> None:
    comparison = compare_sweeps(golden, golden)
    assert comparison.exit_code == 0 and found(comparison) == {}
    assert {cell.matched for cell in comparison.cells} == {"id"}
    assert comparison.environment == comparison.recipe == ()


def nan(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.metrics[80]["loss"] = math.nan


def far_off(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.metrics[80]["loss"] += 0.5


def out_of_memory(run: AttemptRecord) -> None:
    if run.spec.graphed:
        del run.metrics[3:]
        run.outcome = Outcome("CUDA_OOM", "capture", "bundle000", STARTED, STARTED + 9, 0, "OOM_CAPTURE", "m", "r")


def interrupted(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.outcome = None


def never_begun(run: AttemptRecord) -> None:
    run.begun = not run.spec.graphed


def slower(run: AttemptRecord) -> None:
    if run.spec.graphed:
        for step in run.metrics:
            step["step_time_ms"] *= 1.5


def larger(run: AttemptRecord) -> None:
    if run.spec.graphed:
        for event in run.events[0]:
            if "memory" in event:
                event["memory"]["host_peak_rss"] *= 2


def another_allocation(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.end(allocation="elsewhere")


def damaged_eager(run: AttemptRecord) -> None:
    if not run.spec.graphed:
        run.metrics[50]["grad_norm"] = math.inf


@pytest.mark.parametrize(
    ("edit", "exit_code", "aspects"),
    [
        (nan, 3, {"verdict": "worse", "outcome": "worse"}),
        (far_off, 3, {"verdict": "worse"}),
        (out_of_memory, 3, {"verdict": "worse", "outcome": "worse", "speed": "inconclusive"}),
        (interrupted, 2, {"verdict": "unfinished", "outcome": "unfinished", "speed": "inconclusive",
                          "memory": "inconclusive"}),
        (never_begun, 2, {"verdict": "unfinished", "outcome": "unfinished", "speed": "inconclusive",
                          "memory": "inconclusive"}),
        (slower, 3, {"speed": "worse"}),
        (larger, 3, {"memory": "worse"}),
        (another_allocation, 4, {"speed": "inconclusive"}),
    ],
)  # fmt: skip
def test_every_regression_is_found_and_undone_is_good_news(
    tmp_path: Path, golden: Golden, edit: Edit, exit_code: int, aspects: dict[str, str]
) -> None:
    after = golden_of(write_sweep(tmp_path / "after", edit=edit))
    comparison = compare_sweeps(golden, after)
    assert comparison.exit_code == exit_code
    assert found(comparison) == {(GRAPHED, aspect): change for aspect, change in aspects.items()}
    back = compare_sweeps(after, golden)
    assert back.exit_code == 0 and set(found(back).values()) <= {"better", "changed", "not comparable"}


def test_an_eager_cell_counts_as_much(tmp_path: Path, golden: Golden) -> None:
    comparison = compare_sweeps(golden, golden_of(write_sweep(tmp_path / "after", edit=damaged_eager)))
    assert comparison.exit_code == 3
    assert found(comparison)[EAGER, "outcome"] == "worse", "unsound records"


def test_memory_is_worse_beyond_the_tolerance_alone(golden: Golden) -> None:
    def grown(share: float) -> Golden:
        def cell(one: GoldenCell) -> GoldenCell:
            assert one.memory is not None
            return dataclasses.replace(one, memory=dataclasses.replace(one.memory, peak=one.memory.peak * share))

        return dataclasses.replace(golden, cells=tuple(map(cell, golden.cells)))

    assert compare_sweeps(golden, grown(1 + MEMORY_TOLERANCE * 0.99)).exit_code == 0
    assert compare_sweeps(golden, grown(1 + MEMORY_TOLERANCE * 1.01)).exit_code == 3
    assert compare_sweeps(golden, grown(1.2), memory_tolerance=0.25).exit_code == 0
    assert compare_sweeps(golden, grown(math.nan)).exit_code == 3
    assert set(found(compare_sweeps(golden, grown(0.5))).values()) == {"better"}


def with_speed(
    golden: Golden, ratio: float, low: float | None, high: float | None, pairs: int = 2, reason: str = ""
) -> Golden:
    eager, graphed = golden.cells
    assert graphed.speed is not None
    speed = dataclasses.replace(graphed.speed, ratio=ratio, own_low=low, own_high=high, pairs=pairs, reason=reason)
    return dataclasses.replace(golden, cells=(eager, dataclasses.replace(graphed, speed=speed)))


@pytest.mark.parametrize(
    ("before", "after", "exit_code"),
    [
        ((1.5, 1.4, 1.6), (1.2, 1.1, 1.39), 3),
        ((1.5, 1.4, 1.6), (1.2, 0.9, 1.4), 0),
        ((1.5, 1.4, 1.6), (1.2, 0.9, 1.5), 4),
        ((1.5, 1.4, 1.6), (1.7, 1.65, 1.75), 0),
        ((1.5, 1.4, 1.6), (math.nan, math.nan, math.nan), 3),
        ((1.5, 1.4, 1.6), (0.5, None, None, 1), 4),
        ((1.5, None, None, 1), (0.5, 0.4, 0.6), 4),
        ((1.5, 1.5, 1.5, 1), (0.5, 0.4, 0.6), 4),
        ((1.5, 1.0, 2.25), (0.9, 0.85, 0.95), 3),
        ((1.5, 0.8, 2.8), (0.9, 0.85, 0.95), 4),
        ((1.5, None, None, 1), (1.2, 0.9, 1.5), 0),
        ((0.9, None, None, 1), (0.5, 0.4, 0.6), 0),
    ],
)
def test_speed_is_worse_where_the_intervals_lie_apart(
    golden: Golden, before: tuple[Any, ...], after: tuple[Any, ...], exit_code: int
) -> None:
    assert compare_sweeps(with_speed(golden, *before), with_speed(golden, *after)).exit_code == exit_code


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ((1.5, 0.01, 200.0), (1.5, 1.5, 1.5), "not comparable"),
        ((1.5, 1.5, 1.5), (1.5, 0.01, 200.0), "inconclusive"),
        ((1.5, 1.21, 1.86), (1.5, 1.5, 1.5), None),
        ((1.5, 1.19, 1.89), (1.5, 1.5, 1.5), "not comparable"),
        ((1.5, 1.3, 1.73), (1.5, 1.3, 1.73), "not comparable"),  # Each would be possible alone, but not both together.
        ((1.5, 1.36, 1.65), (1.5, 1.36, 1.65), None),
        ((1.5, 1.36, 1.65), (1.5, 1.19, 1.89), "inconclusive"),
    ],
)
def test_intervals_too_wide_to_tell_a_loss_of_a_fifth_tell_nothing(
    golden: Golden, before: tuple[float, float, float], after: tuple[float, float, float], change: str | None
) -> None:
    comparison = compare_sweeps(with_speed(golden, *before), with_speed(golden, *after))
    assert found(comparison) == ({(GRAPHED, "speed"): change} if change else {})
    assert comparison.exit_code == (4 if change == "inconclusive" else 0)
    lost = compare_sweeps(with_speed(golden, *before), with_speed(golden, *(0.8 * figure for figure in after)))
    assert (found(lost).get((GRAPHED, "speed")) == "worse") == (change is None)


@given(ratio=st.floats(0.1, 10), below=st.floats(0, 5), above=st.floats(0, 5), pairs=st.integers(1, 5))
def test_no_speed_is_worse_or_less_sure_than_itself(
    golden: Golden, ratio: float, below: float, above: float, pairs: int
) -> None:
    """A speed that was never certain must not fail every later comparison."""
    one = with_speed(golden, ratio, ratio * math.exp(-below), ratio * math.exp(above), pairs)
    comparison = compare_sweeps(one, one)
    assert comparison.exit_code == 0
    assert found(comparison) == ({(GRAPHED, "speed"): "not comparable"} if unsure_speeds(one.cells) else {})


def test_a_speed_that_was_never_told_is_listed_and_one_without_it_now(tmp_path: Path, golden: Golden) -> None:
    untimed = golden_of(write_sweep(tmp_path / "untimed", edit=another_allocation))
    assert found(compare_sweeps(untimed, golden)) == {(GRAPHED, "speed"): "not comparable"}
    assert found(compare_sweeps(untimed, untimed)) == {}


def test_speeds_are_compared_by_intervals_that_no_other_cell_widens(tmp_path: Path) -> None:
    def apart(run: AttemptRecord) -> None:
        for step in run.metrics if run.spec.graphed else ():
            unsteady = run.spec.training.learning_rate == 2e-3
            step["step_time_ms"] *= 1 + (0.5 if unsteady else 0.01) * run.spec.repeat

    one, two = (golden_of(write_sweep(tmp_path / str(n), workloads=n, edit=apart)).cells[1] for n in (1, 2))
    assert one.speed is not None and one.speed.interval is not None
    assert two.speed and one.speed == dataclasses.replace(two.speed, reason="")
    report = read_json(write_report(SweepPaths(tmp_path / "2")).json)
    said = report["cells"][1]["speed"]
    assert (said["own_low"], said["own_high"]) == one.speed.interval
    assert said["low"] < said["own_low"] and said["own_high"] < said["high"]


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        ((1.5, 1.36, 1.65), ()),
        ((1.5, 1.3, 1.73), ("torch_compile, lr 0.001, 1.500x (1.300-1.730 over 2 pairs); add repeats to narrow it",)),
        ((1.5, None, None, 1), ("torch_compile, lr 0.001, 1.500x (1 pair); add repeats to narrow it",)),
        ((1.5, None, None, 2, "it was hot"), ("torch_compile, lr 0.001, 1.500x (2 pairs); it was hot",)),
    ],
)
def test_a_golden_file_names_the_speeds_that_nothing_can_be_held_against(
    golden: Golden, speed: tuple[Any, ...], said: tuple[str, ...]
) -> None:
    assert unsure_speeds(with_speed(golden, *speed).cells) == said


@given(before=st.sampled_from(VERDICTS), after=st.sampled_from(VERDICTS))
def test_a_verdict_further_down_is_never_let_pass(golden: Golden, before: Any, after: Any) -> None:
    def of(word: Any) -> Golden:
        eager, graphed = golden.cells
        assert graphed.verdict is not None
        verdict = dataclasses.replace(graphed.verdict, verdict=word)
        return dataclasses.replace(golden, cells=(eager, dataclasses.replace(graphed, verdict=verdict)))

    code = compare_sweeps(of(before), of(after)).exit_code
    if after == "UNFINISHED":
        assert code == 2
    elif VERDICTS.index(after) <= VERDICTS.index(before):
        assert code == 0
    else:
        assert code == (4 if after == "INCONCLUSIVE" else 3)


def with_graphed(golden: Golden, **fields: Any) -> Golden:
    eager, graphed = golden.cells
    return dataclasses.replace(golden, cells=(eager, dataclasses.replace(graphed, **fields)))


@pytest.mark.parametrize(
    ("before", "after", "expected", "change"),
    [
        ("COMPLETED x1, CUDA_OOM x1", "CUDA_OOM", "COMPLETED", "worse"),
        ("COMPLETED x2, CUDA_OOM x1", "COMPLETED x1, CUDA_OOM x2", "COMPLETED", "worse"),
        ("CUDA_OOM", "COMPLETED x1, CUDA_OOM x1", "COMPLETED", "better"),
        ("COMPLETED x1, TEARDOWN_HANG x1", "TEARDOWN_HANG", "COMPLETED", "worse"),
        ("COMPLETED x1, CUDA_OOM x1", "COMPLETED x2, CUDA_OOM x2", "COMPLETED", "changed"),
        ("CUDA_OOM", "FAILED", "COMPLETED", "changed"),
        ("COMPLETED x1, CUDA_OOM x1", "COMPLETED", "CUDA_OOM", "worse"),
    ],
)
def test_a_larger_share_of_bad_runs_is_worse(
    golden: Golden, before: str, after: str, expected: OutcomeName, change: str
) -> None:
    was, now = (
        with_graphed(golden, outcome=outcome, expect=Expectation(expected), unexpected=True)
        for outcome in (before, after)
    )
    assert found(compare_sweeps(was, now)) == {(GRAPHED, "outcome"): change}


@pytest.mark.parametrize(
    ("metric", "before", "after", "change"),
    [
        ("loss", (0.002, 0.002), (3.0, 3.0), "worse"),
        ("loss", (0.002, 0.002), (0.002, 3.0), "worse"),
        ("loss", (0.002, 0.002), (math.inf, None), "worse"),
        ("loss", (math.nan, None), (3.0, 3.0), "changed"),
        ("loss", (0.002, 0.003), (0.003, 0.003), "changed"),
        ("grad_norm", (0.02, 1e-6), (0.5, 1e-6), "worse"),
        ("grad_norm", (0.02, 1e-6), (0.02, 1e-5), None),
    ],
)
def test_who_stays_diverged_may_still_be_worse(
    golden: Golden, metric: str, before: tuple[float, Any], after: tuple[float, Any], change: str | None
) -> None:
    was, now = (
        with_graphed(
            golden,
            verdict=GoldenVerdict("DIVERGED", f"by {size}", GoldenDeviation(metric, size)),
            max_loss_difference=largest,
        )
        for size, largest in (before, after)
    )
    assert found(compare_sweeps(was, now)).get((GRAPHED, "verdict")) == change
    back = json.loads(dumps(golden_to_json(was)))
    assert found(compare_sweeps(read_golden(back), now)) == found(compare_sweeps(was, now))


# --- which cell is which --------------------------------------------------------------------------------------------


def test_a_cell_that_has_gone_is_worse_and_one_that_came_is_judged_by_itself(tmp_path: Path, golden: Golden) -> None:
    two = write_sweep(tmp_path / "two", workloads=2)
    both = golden_of(two)
    gone = compare_sweeps(both, golden)
    assert gone.exit_code == 3
    assert found(gone) == {("eager, lr 0.002", "cell"): "worse", ("torch_compile, lr 0.002", "cell"): "worse"}
    came = compare_sweeps(golden, both)
    assert came.exit_code == 0
    assert found(came) == {("eager, lr 0.002", "cell"): "changed", ("torch_compile, lr 0.002", "cell"): "changed"}

    def second_nan(run: AttemptRecord) -> None:
        if run.spec.training.learning_rate > 1e-3:
            nan(run)

    bad = compare_sweeps(golden, golden_of(write_sweep(tmp_path / "bad", workloads=2, edit=second_nan)))
    assert bad.exit_code == 3 and found(bad)["torch_compile, lr 0.002", "cell"] == "worse"


def test_a_cell_that_is_rejected_now_says_by_which_rule(tmp_path: Path, golden: Golden) -> None:
    spec = workload_spec(0, "torch_compile", 120)
    extra = [Extra(spec, (Reason("capture.warmup", "m", "r"),))]
    after = golden_of(write_sweep(tmp_path / "after", impls=(), extra=extra))
    comparison = compare_sweeps(golden, after)
    (gone,) = (cell for cell in comparison.cells if cell.label == GRAPHED)
    assert (gone.differences[0].change, gone.differences[0].after) == ("worse", "rejected (capture.warmup)")
    assert compare_sweeps(after, after).exit_code == 0


def test_cells_whose_ids_changed_are_matched_by_label(golden: Golden) -> None:
    def renamed(cell: GoldenCell) -> GoldenCell:
        return dataclasses.replace(cell, cell_id=f"{cell.cell_id}x")

    after = dataclasses.replace(golden, cells=tuple(map(renamed, reversed(golden.cells))))
    comparison = compare_sweeps(golden, after)
    assert comparison.exit_code == 0
    assert [(cell.label, cell.matched) for cell in comparison.cells] == [(EAGER, "label"), (GRAPHED, "label")]
    twice = dataclasses.replace(after, cells=(*after.cells, dataclasses.replace(after.cells[0], cell_id="other")))
    comparison = compare_sweeps(golden, twice)
    assert comparison.exit_code == 3, "a label that two cells have tells neither"
    assert [cell.matched for cell in comparison.cells if cell.label == GRAPHED] == ["no", "no", "no"]


def test_an_expected_failure_that_comes_about_no_more_is_worse(tmp_path: Path) -> None:
    expect = Expectation("CUDA_OOM", "capture")
    failing = golden_of(write_sweep(tmp_path / "failing", expect=expect, edit=out_of_memory))
    assert compare_sweeps(failing, failing).exit_code == 0
    mended = golden_of(write_sweep(tmp_path / "mended", expect=expect))
    comparison = compare_sweeps(failing, mended)
    assert comparison.exit_code == 3
    (outcome,) = (one for one in comparison.cells[1].differences if one.aspect == "outcome")
    assert outcome.after == "COMPLETED (expected CUDA_OOM in capture)"


# --- what differs around --------------------------------------------------------------------------------------------


def test_the_environment_and_the_recipe_are_held_against_each_other(tmp_path: Path, golden: Golden) -> None:
    def elsewhere(run: AttemptRecord) -> None:
        run.environment = copy.deepcopy(run.environment)
        run.environment["versions"]["torch"] = "2.14.0"
        run.environment["hardware"]["gpus"] = ["NVIDIA H200"] * 8
        run.environment["hardware"]["driver"] = "590.1"
        run.environment["digests"]["code"] = "c0de000002"
        del run.environment["settings"]["OMP_NUM_THREADS"]

    after = golden_of(write_sweep(tmp_path / "after", edit=elsewhere))
    comparison = compare_sweeps(golden, dataclasses.replace(after, recipe="name: written\ntraining: {steps: 50}\n"))
    assert comparison.exit_code == 0, "what differs around them is told, and is no regression"
    assert [(one.key, one.before, one.after) for one in comparison.environment] == [
        ("versions.torch", "2.13.0", "2.14.0"),
        ("hardware.gpus", "", "8 x NVIDIA H200"),
        ("hardware.driver", "unset", "590.1"),
        ("digests.code", "c0de000001", "c0de000002"),
        ("settings.OMP_NUM_THREADS", "1", "unset"),
    ]
    recipe = [(one.key, one.before, one.after) for one in comparison.recipe]
    assert recipe == [("engine", "torch_native", "unset"), ("training.steps", "unset", "50")]
    assert compare_sweeps(golden, dataclasses.replace(golden, recipe="a: [")).recipe


def test_packages_without_kernels_are_counted(golden: Golden) -> None:
    """A program's environment holds hundreds of packages. An engine of this project records none of them."""
    names = ("torch", "nvidia-nccl-cu13", "transformer_engine", "triton", "torchvision", "wheel", "yarl")
    provenance = {**golden.provenance, **{f"packages.{name}": (("1", 4),) for name in names}}
    comparison = compare_sweeps(golden, dataclasses.replace(golden, provenance=provenance))
    said = format_comparison(comparison, "a", "b").partition("the environment differs in:\n")[2].splitlines()
    kept = [f"  packages.{name}: unset -> 1" for name in ("nvidia-nccl-cu13", "torch", "transformer_engine", "triton")]
    assert said == [*kept, "  3 other packages differ (--json lists each)"]
    assert len(comparison_to_json(comparison)["environment"]) == len(names)


def test_two_spellings_of_a_number_are_no_difference(golden: Golden) -> None:
    spelled = [
        dataclasses.replace(golden, recipe=f"training: {{adam_epsilon: {text}}}")
        for text in ("1e-5", "1.0e-05", "1e-6")
    ]
    assert not compare_sweeps(spelled[0], spelled[1]).recipe
    (found,) = compare_sweeps(spelled[0], spelled[2]).recipe
    assert (found.before, found.after) == ("1e-05", "1e-06")


def test_what_programs_read_is_json(golden: Golden) -> None:
    content = json.loads(dumps(comparison_to_json(compare_sweeps(golden, with_speed(golden, 0.5, 0.4, 0.6)))))
    assert content["exit_code"] == 3 and content["change"] == "worse"
    (eager, graphed) = content["cells"]
    assert eager["change"] is None and eager["differences"] == []
    assert graphed["label"] == GRAPHED and graphed["cell_id"].startswith(CudaGraph("torch_compile").label)
    assert [one["aspect"] for one in graphed["differences"]] == ["speed"]
