"""Test the upper bound of a speed-up: its figures, the bottleneck, and when it is unknown."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.limits.speedup_bound import NEAR, EagerStep, GraphedStep, SpeedupBound, classify_bound
from analysis.records.load import load
from analysis.report.write_report import write_report
from analysis.sweep.judge_cells import compare_cells
from analysis.sweep.judge_sweep import judge_sweep
from analysis.sweep.ranking import rank
from launch.common.atomic_files import read_json
from tests.records import EAGER_PROBE, GRAPHED_PROBE, AttemptRecord, write_sweep
from tests.report_text import report_text
from tests.unit.analysis.graphs.test_replay_check import change_probe, no_probe

TIMES = st.floats(1e-3, 1e6)
KERNELS = 1000.0
EAGER_MS, GRAPHED_MS = 20.0, 17.0


@st.composite
def eager_steps(draw: st.DrawFn, communicates: bool = False) -> EagerStep:
    """Return eager steps in which the device computes at most as long as it is busy."""
    busy = draw(TIMES)
    return EagerStep(draw(TIMES), busy, busy * draw(st.floats(1e-2, 1)), draw(TIMES), KERNELS, communicates)


graphed_steps = st.builds(GraphedStep, TIMES, TIMES, TIMES, st.none() | TIMES, st.just(KERNELS), st.floats(0, 1e4))


@given(eager_steps())
def test_a_device_that_is_always_busy_has_nothing_to_win(eager: EagerStep) -> None:
    assert eager.launch_bound == pytest.approx(1 - 1 / eager.largest_speedup, rel=1e-9, abs=1e-9)
    assert (eager.launch_bound > 0) == (eager.busy_ms < eager.step_ms)


@given(eager_steps(communicates=True), graphed_steps)
def test_a_busy_device_that_waits_for_other_ranks_is_no_limit(eager: EagerStep, graphed: GraphedStep) -> None:
    limit = SpeedupBound(eager, graphed)
    assert eager.largest_speedup == eager.step_ms / eager.computing_ms
    assert limit.times_bound == graphed.step_ms / eager.computing_ms
    assert limit.bound == classify_bound(dataclasses.replace(eager, busy_ms=eager.busy_ms * 2), graphed)


@given(eager_steps(), graphed_steps)
def test_attained_is_one_at_the_limit_none_where_nothing_is_to_win(eager: EagerStep, graphed: GraphedStep) -> None:
    limit = SpeedupBound(eager, graphed)
    assert limit.times_bound == graphed.step_ms / eager.busy_ms
    assert (limit.attained is None) == (eager.busy_ms >= eager.step_ms * 0.99)
    if limit.attained is not None:
        assert math.isfinite(limit.attained)
        assert limit.attained >= 1 if graphed.step_ms <= eager.busy_ms else limit.attained <= 1
        assert (limit.attained > 0) == (graphed.step_ms < eager.step_ms)


@given(eager_steps(), graphed_steps)
def test_a_bound_is_what_the_step_is_as_long_as(eager: EagerStep, graphed: GraphedStep) -> None:
    bound = classify_bound(eager, graphed)
    assert bound != "communication"
    near_the_device = graphed.step_ms <= eager.busy_ms * (1 + NEAR)
    assert (bound == "device") == near_the_device
    if bound == "host":
        assert graphed.host_ms is not None and graphed.host_ms >= 0.9 * graphed.step_ms
    if bound == "gaps":
        assert graphed.host_ms is None or graphed.host_ms <= 0.5 * graphed.step_ms


@pytest.mark.parametrize(
    ("computing", "graphed_ms", "graphed_host", "bound"),
    [
        (16.0, 16.3, 16.0, "device"),
        (16.0, 9.0, 1.0, "device"),
        (15.5, 16.7, 1.0, "device"),
        (16.0, 19.0, 18.5, "host"),
        (16.0, 19.0, 12.0, "host in part"),
        (16.0, 19.0, 2.0, "gaps"),
        (16.0, 19.0, None, "gaps"),
        (16.0, 16.3, None, "device"),
    ],
)
def test_bounds(computing: float, graphed_ms: float, graphed_host: float | None, bound: str) -> None:
    eager = EagerStep(20.0, 16.0, computing, 19.0, KERNELS)
    graphed = GraphedStep(graphed_ms, 1.0, computing, graphed_host, KERNELS, 1.0)
    assert classify_bound(eager, graphed) == bound
    assert classify_bound(eager, dataclasses.replace(graphed, kernels=1.02 * KERNELS)) == bound
    assert classify_bound(eager, dataclasses.replace(graphed, kernels=2 * KERNELS)) == bound, (
        "counted otherwise, as long"
    )
    others = dataclasses.replace(graphed, kernels=KERNELS / 2, computing_ms=computing / 2)
    assert classify_bound(eager, others) == "other kernels"


@pytest.mark.parametrize(
    ("graphed_ms", "own_busy", "graphed_host", "bound"),
    [
        (12.3, 1.0, 1.0, "device"),
        (14.0, 13.4, 1.0, "communication"),
        (14.0, 13.4, None, "communication"),
        (14.0, 15.0, 9.0, "communication"),
        (14.0, 13.4, 13.0, "host"),
        (14.0, 13.2, 9.0, "host in part"),
        (14.0, 13.2, None, "gaps"),
        (14.0, 13.2, 1.0, "communication"),
        (14.0, 12.9, 1.0, "gaps"),
    ],
)
def test_bounds_of_ranks_that_communicate(
    graphed_ms: float, own_busy: float, graphed_host: float | None, bound: str
) -> None:
    """If no device is ever idle, ranks wait for data or for the slowest rank. The same holds if hosts are fast and
    devices wait longer than they are idle."""
    graphed = GraphedStep(graphed_ms, own_busy, 12.0, graphed_host, KERNELS, 1.0)
    for eagers in (12.0, 14.0):
        assert classify_bound(EagerStep(20.0, 16.0, eagers, 19.0, KERNELS, communicates=True), graphed) == bound


# --- from records ---------------------------------------------------------------------------------------------------


def timed(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["step_time_ms"] = GRAPHED_MS if run.spec.graphed else EAGER_MS


def limit_of(root: Path, edit: Any = timed, **options: Any) -> SpeedupBound:
    results = compare_cells(load(write_sweep(root, device="cuda", impls=("torch",), edit=edit, **options)))
    assert results[1].speed.bound is not None
    return results[1].speed.bound


def eager_limit_of(root: Path, edit: Any, **options: Any) -> EagerStep:
    found = limit_of(root, edit, **options).eager
    assert found is not None
    return found


def of_eager(change: Any) -> Any:
    def edit(run: AttemptRecord) -> None:
        timed(run)
        if not run.spec.graphed:
            change(run)

    return edit


def test_the_figures_are_of_the_eager_twin_and_of_timed_steps(tmp_path: Path) -> None:
    limit = limit_of(tmp_path)
    eager = EagerStep(EAGER_MS, EAGER_PROBE.busy_ms, EAGER_PROBE.computing_ms, EAGER_PROBE.host_ms, 1200)
    assert limit.eager is not None and vars(limit.eager) == pytest.approx(vars(eager))
    graphed = GraphedStep(GRAPHED_MS, GRAPHED_PROBE.busy_ms, GRAPHED_PROBE.computing_ms, GRAPHED_PROBE.host_ms, 1200, 8)
    assert vars(limit.graphed) == pytest.approx(vars(graphed))
    assert (limit.eager.launch_bound, limit.eager.not_computing) == pytest.approx((0.2, 0.225))
    assert limit.eager.largest_speedup == pytest.approx(1.25)
    assert (limit.times_bound, limit.attained) == pytest.approx((17 / 16, 0.75))
    assert (limit.bound, limit.reason) == ("gaps", "")


def test_the_slowest_rank_counts_the_least_busy_and_the_geometric_mean_of_repeats(tmp_path: Path) -> None:
    def slow(run: AttemptRecord) -> None:
        computing = (16.0, 17.0, 18.0)[run.spec.repeat]
        change_probe(1, busy_ms=computing + 0.8, computing_ms=computing)(run)
        change_probe(0, host_ms=21.0, busy_ms=computing + 0.4, computing_ms=computing)(run)

    eager = eager_limit_of(tmp_path, of_eager(slow), ranks=2, repeats=3)
    mean = (16.4 * 17.4 * 18.4) ** (1 / 3)
    assert (eager.busy_ms, eager.host_ms, eager.communicates) == (pytest.approx(mean), 21.0, False)


def test_a_rank_that_waits_without_a_kernel_is_as_busy_as_the_others_compute(tmp_path: Path) -> None:
    eager = eager_limit_of(tmp_path, of_eager(change_probe(1, busy_ms=9.0, computing_ms=9.0)), ranks=2)
    assert eager.busy_ms == pytest.approx(EAGER_PROBE.computing_ms)


@pytest.mark.parametrize(("busy", "communicates"), [(16.0, False), (16.5, True)])
def test_ranks_communicate_where_one_of_one_repeat_does(tmp_path: Path, busy: float, communicates: bool) -> None:
    def one(run: AttemptRecord) -> None:
        if run.spec.repeat == 1:
            change_probe(1, busy_ms=busy)(run)

    assert eager_limit_of(tmp_path, of_eager(one), ranks=2).communicates == communicates


@pytest.mark.parametrize("slower", [(1, 1, 2), (1, 2, 2)])
def test_a_machine_that_is_slower_in_all_changes_nothing_of_a_ratio(tmp_path: Path, slower: tuple[int, ...]) -> None:
    """Repeats run in several allocations. A repeat that takes half as long as the others must not count as wrongly
    timed."""

    def edit(run: AttemptRecord) -> None:
        factor = slower[run.spec.repeat]
        timed(run)
        for step in run.metrics:
            step["step_time_ms"] *= factor
        for number in (0, 1):
            change_probe(number, busy_ms=16.0 * factor, computing_ms=16.0 * factor)(run)

    limit = limit_of(tmp_path, edit, ranks=2, repeats=3)
    assert (limit.reason, limit.times_bound) == ("", pytest.approx(GRAPHED_MS / 16))


def test_a_host_that_waits_for_the_device_in_a_step_has_no_time_of_its_own(tmp_path: Path) -> None:
    """This is one rank and one repeat, so the slowest rank is unknown."""

    def waits(run: AttemptRecord) -> None:
        timed(run)
        if run.spec.repeat == 1:
            change_probe(1, host_ms=None)(run)

    sweep = write_sweep(tmp_path, device="cuda", impls=("torch",), edit=waits, ranks=2)
    limit = compare_cells(load(sweep))[1].speed.bound
    assert limit is not None and limit.eager is not None and limit.graphed is not None
    assert (limit.eager.host_ms, limit.graphed.host_ms, limit.bound) == (None, None, "gaps")
    text = report_text(sweep)
    assert "| - | 1.25x" in text and "the host waits for the GPU within a step, so its own time is unknown" in text


def unmeasured(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["phase"] = "settle" if step["phase"] == "measure" else step["phase"]


def endless(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["step_time_ms"] = 1e308


def one_bad_time(run: AttemptRecord) -> None:
    if run.spec.repeat:
        run.metrics[60]["step_time_ms"] = float("nan")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_probe(0), "rank 0 of the eager run ended without a probe"),
        (change_probe(0, busy_ms=0.0), "the eager run has busy 0 ms"),
        (
            change_probe(0, computing_ms=30.0, busy_ms=31.0),
            "the eager step was timed at 20.00 ms, but its own probe saw 30.00 ms of computing in it",
        ),
        (change_probe(0, busy_ms="NaN"), "no eager run ended with complete records"),
        (unmeasured, "the eager run has no step time"),
        (endless, "the eager run has no step time"),
    ],
)
def test_what_cannot_be_told_is_indeterminate(tmp_path: Path, change: Any, said: str) -> None:
    sweep = write_sweep(tmp_path, device="cuda", impls=("torch",), edit=of_eager(change))
    limit = compare_cells(load(sweep))[1].speed.bound
    assert limit is not None and said in limit.reason
    assert (limit.eager, limit.graphed, limit.times_bound, limit.attained, limit.bound) == (None,) * 5
    assert f"INDETERMINATE: {limit.reason}" in report_text(sweep)


def test_a_pair_without_a_speed_still_shows_the_eager_limit(tmp_path: Path) -> None:
    def unproven(run: AttemptRecord) -> None:
        timed(run)
        if run.spec.graphed:
            change_probe(0, graph_launches=0.0)(run)

    limit = limit_of(tmp_path, unproven)
    assert limit.eager and (limit.graphed, limit.reason) == (None, "the pair is incomparable")


def test_a_graphed_run_whose_trace_is_lost_is_held_against_nothing(tmp_path: Path) -> None:
    """The trace has launches but no kernels. This does not mean that the device was idle."""

    def lost(run: AttemptRecord) -> None:
        timed(run)
        if run.spec.graphed:
            change_probe(1, busy_ms=0.0, computing_ms=0.0, kernels=0.0)(run)

    limit = limit_of(tmp_path, lost, ranks=2)
    assert limit.eager is not None
    assert (limit.graphed, limit.reason) == (None, "a rank of the graphed run saw no kernel in its probe")


def test_repeats_without_a_time_are_left_out_with_their_pair(tmp_path: Path) -> None:
    assert eager_limit_of(tmp_path, of_eager(one_bad_time)).step_ms == pytest.approx(EAGER_MS)


# --- the report -----------------------------------------------------------------------------------------------------


def test_the_report_says_how_far_and_what_captures_cost(tmp_path: Path) -> None:
    report = write_report(write_sweep(tmp_path, device="cuda", impls=("torch",), edit=timed))
    text = report.markdown.read_text()
    row = next(
        line for line in text.split("## Distance from the upper bound")[1].splitlines() if line.startswith("| A1 |")
    )
    assert row.split(" | ")[1:] == [
        "20.00 ms", "16.00 ms (15.50 ms)", "20% (22%)", "19.00 ms", "1.25x", "1200 / 1200", "8", "17.00 ms",
        "1.06x", "75%",
        "gaps between kernels: the GPU is idle for 1.00 ms, although the host takes 2.00 of 17.00 ms |",
    ]  # fmt: skip
    assert " | 4 graphs per rank in 2.50 s | " in text and " | 256 MiB | " in text
    assert (
        "Nearest to the upper bound: A1. Its step takes 17.00 ms, and the GPU computes for 15.50 ms of an eager step. The time "
        "between kernels limits it."
    ) in report.summary
    cell = json.loads(report.json.read_text())["cells"][1]
    assert cell["capture_cost"] == {"graphs": 4, "seconds": 2.5}
    assert (cell["speedup_bound"]["attained"], cell["speedup_bound"]["bound"]) == (pytest.approx(0.75), "gaps")
    assert cell["replay"]["launches_seen"] == 8


def test_a_host_that_the_trace_slows_down_takes_no_share_of_the_timed_step(tmp_path: Path) -> None:
    def slowed(run: AttemptRecord) -> None:
        timed(run)
        if run.spec.graphed:
            change_probe(0, host_ms=18.0)(run)

    text = write_report(write_sweep(tmp_path, device="cuda", impls=("torch",), edit=slowed)).markdown.read_text()
    assert "the host takes 18.00 ms in a traced step (a timed step takes 17.00 ms)" in text


@pytest.mark.parametrize(
    ("busy", "computing", "said"),
    [
        (
            66.5,
            12.0,
            "17.00 ms, and the GPU computes for 12.00 ms of an eager step. Communication, or a wait for another rank,",
        ),
        (16.8, 16.8, "At the upper bound: A1. Its step time equals the baseline's GPU-busy time"),
    ],
)
def test_nearness_is_to_what_is_computed_however_long_kernels_wait(
    tmp_path: Path, busy: float, computing: float, said: str
) -> None:
    """In the trace, a waiting rank is busy for longer than its step. Graphs could not save that time."""

    def waiting(run: AttemptRecord) -> None:
        timed(run)
        change_probe(0, busy_ms=busy, computing_ms=computing)(run)

    assert said in write_report(write_sweep(tmp_path, device="cuda", impls=("torch",), edit=waiting)).summary


EP4_EAGER = ((460.92, 112.39), (361.7, 111.63), (253.07, 110.67), (422.89, 112.09))
EP4_LAYERS = ((140.11, 109.86), (140.19, 109.77), (141.04, 110.2), (139.55, 109.71))
EP4_WHOLE = ((137.26, 110.16), (141.9, 110.03), (133.32, 110.27), (140.64, 109.89))


@pytest.mark.parametrize(
    ("graphed_ms", "graphed", "near", "attained", "bound"),
    [
        (147.24, EP4_LAYERS, "1.31x", "86%", "gaps between kernels: a GPU is idle for 7.69 ms, and the host waits"),
        (139.3, EP4_WHOLE, "1.24x", "89%", "communication: in the trace of a step, each GPU is busy for at least 133.32 ms "
         "and computes for at most 110.27 ms"),
    ],
)  # fmt: skip
def test_ranks_that_communicate_have_figures_of_what_they_compute_alone(
    tmp_path: Path, graphed_ms: float, graphed: Any, near: str, attained: str, bound: str
) -> None:
    """The busy and computing times are those of four H200s (docs/results/qwen3_8l_megatron_parallel)."""

    def of_ranks(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = graphed_ms if run.spec.graphed else 359.9
        for number, (busy, computing) in enumerate(graphed if run.spec.graphed else EP4_EAGER):
            change_probe(number, busy_ms=busy, computing_ms=computing, host_ms=None)(run)

    report = report_text(write_sweep(tmp_path, device="cuda", impls=("torch",), repeats=1, ranks=4, edit=of_ranks))
    text = report.split("## Distance from the upper bound")[1]
    row = next(line for line in text.splitlines() if line.startswith("| A1 |"))
    told = row.split(" | ")[1:]
    assert told[:-1] == [
        "359.90 ms", "253.07 ms (112.39 ms)", "30% (69%)", "-", "3.20x", "1200 / 1200", "8", f"{graphed_ms:.2f} ms",
        near, attained,
    ]  # fmt: skip
    assert told[-1].startswith(bound)


def test_ranks_are_at_the_limit_where_they_compute_all_the_step_in_the_graphed_run_too(tmp_path: Path) -> None:
    """The figures are those of a pipeline on four H200s (docs/results/qwen3_8l_megatron_parallel), whose eager kernels
    took longer."""

    def pipeline(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = 222.59 if run.spec.graphed else 903.91
        own = (
            {"busy_ms": 214.60, "computing_ms": 191.10}
            if run.spec.graphed
            else {"busy_ms": 637.2, "computing_ms": 213.01}
        )
        change_probe(0, **own)(run)

    report = write_report(write_sweep(tmp_path, device="cuda", impls=("torch",), edit=pipeline))
    assert (
        "222.59 ms, and the GPU computes for 213.01 ms of an eager step. Communication, or a wait for another rank"
        in report.summary
    )
    assert "busy for at least 214.60 ms and computes for at most 191.10 ms" in report.markdown.read_text()


def test_a_cell_that_does_not_pass_says_so_beside_its_figures(tmp_path: Path) -> None:
    def diverging(run: AttemptRecord) -> None:
        timed(run)
        run.metrics[90]["loss"] += run.spec.graphed

    report = write_report(write_sweep(tmp_path, device="cuda", edit=diverging))
    assert "(**DIVERGED**) | 20.00 ms" in report.markdown.read_text()
    assert "Nearest to the upper" not in report.summary


def test_the_limit_of_a_twin_is_none_for_other_kernels(tmp_path: Path) -> None:
    def compiled(run: AttemptRecord) -> None:
        timed(run)
        if run.spec.graphed:
            change_probe(0, kernels=500.0, computing_ms=12.0)(run)

    sweep = write_sweep(tmp_path, device="cuda", edit=compiled)
    report = write_report(sweep)
    (row,) = (line for line in report.markdown.read_text().splitlines() if "the cell runs 500 kernels" in line)
    assert "unknown: the cell runs 500 kernels and the eager baseline 1200" in row
    assert row.count("| - ") == 3, "neither an upper bound, nor a least time, nor a share of it"
    found = read_json(sweep.report / "report.json")["cells"][1]["speedup_bound"]
    assert (found["bound"], found["upper_bound"], found["times_bound"], found["attained"]) == (
        "other kernels", None, None, None
    )  # fmt: skip
    assert "Nearest to the upper" not in report.summary


def takes(graphed_ms: float, change: Any = lambda run: None) -> Any:
    def edit(run: AttemptRecord) -> None:
        timed(run)
        for step in run.metrics if run.spec.graphed else ():
            step["step_time_ms"] = graphed_ms
        change(run)

    return edit


def test_a_step_shorter_than_its_kernels_has_no_speed_and_is_at_no_limit(tmp_path: Path) -> None:
    """A host records such times if it does not wait for the device."""
    sweep = write_sweep(tmp_path, device="cuda", impls=("torch", "full_iteration"), edit=takes(4.0))
    report = write_report(sweep)
    (_, torch, _) = judge_sweep(sweep).results
    assert torch.speed.speedup is not None and torch.speed.bound is not None
    assert (torch.speed.speedup.verdict, torch.speed.speedup.low, torch.speed.speedup.high) == (
        "INCONCLUSIVE",
        None,
        None,
    )
    assert (
        torch.speed.speedup.reason
        == torch.speed.bound.reason
        == ("timing is doubtful: the step was timed at 4.00 ms, but its own probe saw 15.50 ms of computing in it")
    )
    assert (torch.speed.bound.graphed, torch.speed.bound.attained) == (None, None)
    assert "No speed-up confirmed yet: `torch` (A1) is bit-identical, but its speed is not known." in report.summary
    assert "**2 graphed cells cannot be as fast as timed**: A1, A2 (timing is doubtful" in report.summary
    assert not any(word in report.summary for word in ("At the upper", "Nearest to the upper", "Fastest"))


@pytest.mark.parametrize(
    ("graphed_ms", "eager", "graphed", "doubtful"),
    [
        (15.0, {}, {}, False),  # The step is within 5% of the computing time of its own probe.
        # Kernels are busy because they wait.
        (15.0, {"busy_ms": 66.0, "computing_ms": 9.0}, {"busy_ms": 66.0, "computing_ms": 9.0}, False),
        # The graphed run has other kernels, which are faster.
        (9.0, {}, {"kernels": 500.0, "computing_ms": 8.0}, False),
        (9.0, {}, {"kernels": 500.0}, True),
        # The kernels are those of the baseline, but the graphed run's own probe disagrees.
        (9.0, {}, {"computing_ms": 8.0}, True),
        (13.7, {}, {"computing_ms": 13.7}, False),  # Kernels may be faster in a graph.
        (9.0, {"kernels": 500.0}, {}, True),
    ],
)
def test_what_a_step_is_held_against(
    tmp_path: Path, graphed_ms: float, eager: dict[str, float], graphed: dict[str, float], doubtful: bool
) -> None:
    def probed(run: AttemptRecord) -> None:
        change_probe(0, **(graphed if run.spec.graphed else eager))(run)

    sweep = write_sweep(tmp_path, device="cuda", impls=("torch",), edit=takes(graphed_ms, probed))
    result = compare_cells(load(sweep))[1]
    assert result.speed.speedup is not None and result.speed.bound is not None
    assert bool(result.speed.bound.doubt) == doubtful
    assert (result.speed.speedup.verdict == "INCONCLUSIVE") == doubtful


def test_an_eager_step_shorter_than_its_kernels_makes_graphs_neither_faster_nor_slower(tmp_path: Path) -> None:
    """The timer of the eager run did not wait for the device, and the timer of the graphed run did. So graphs seem to
    cost time."""

    def unsynchronised(run: AttemptRecord) -> None:
        timed(run)
        for step in run.metrics if not run.spec.graphed else ():
            step["step_time_ms"] = 14.0

    sweep = write_sweep(tmp_path, device="cuda", impls=("torch", "full_iteration"), edit=unsynchronised)
    report = write_report(sweep)
    (eager, torch, _) = judge_sweep(sweep).results
    assert torch.speed.speedup is not None and torch.speed.bound is not None and eager.speed.step_time is not None
    why = "timing is doubtful: the eager step was timed at 14.00 ms, but its own probe saw 15.50 ms of computing in it"
    assert (torch.speed.speedup.verdict, torch.speed.speedup.low, torch.speed.speedup.high) == (
        "INCONCLUSIVE",
        None,
        None,
    )
    assert (
        torch.speed.speedup.reason
        == torch.speed.bound.reason
        == torch.speed.bound.eager_doubt
        == eager.speed.timing_doubt
        == why
    )
    assert (torch.speed.timing_doubt, torch.speed.bound.eager) == ("", None), "the graphed step itself is not in doubt"
    assert f"**1 eager cell cannot be as fast as timed**: A0 ({why})." in report.summary
    (ranking,) = rank(judge_sweep(sweep).results)
    assert [cell.label for cell in ranking.cells] == ["torch, lr 0.001", "full_iteration, lr 0.001"]
    assert ranking.not_ranked == (("eager, lr 0.001", why),)


@pytest.mark.parametrize(("eager_ms", "doubtful"), [(14.8, False), (14.7, True)])
def test_an_eager_step_may_be_shorter_than_its_probe_says_by_as_little_as_a_graphed_one(
    tmp_path: Path, eager_ms: float, doubtful: bool
) -> None:
    def edit(run: AttemptRecord) -> None:
        timed(run)
        for step in run.metrics:
            step["step_time_ms"] = eager_ms if not run.spec.graphed else 15.0

    sweep = write_sweep(tmp_path, device="cuda", repeats=3, impls=("torch",), edit=edit)
    result = compare_cells(load(sweep))[1]
    assert result.speed.speedup is not None and result.speed.bound is not None
    assert (bool(result.speed.bound.eager_doubt), result.speed.speedup.verdict == "SLOWER") == (doubtful, not doubtful)


@pytest.mark.parametrize("slower", [(1, 1, 2), (1, 2, 2)])
def test_an_eager_step_as_long_as_its_kernels_is_sound_on_machines_that_differ(
    tmp_path: Path, slower: tuple[int, ...]
) -> None:
    """One of three machines takes twice as long. The median step comes from one machine, but busy times come from all."""

    def edit(run: AttemptRecord) -> None:
        timed(run)
        factor = slower[run.spec.repeat]
        change_probe(0, busy_ms=15.5 * factor, computing_ms=15.5 * factor)(run)
        for step in run.metrics:
            step["step_time_ms"] = 16.0 * factor

    sweep = write_sweep(tmp_path, device="cuda", impls=("torch",), repeats=3, edit=edit)
    eager, graphed = judge_sweep(sweep).results
    assert (eager.speed.timing_doubt, graphed.speed.timing_doubt) == ("", "")
    (ranking,) = rank([eager, graphed])
    assert ranking.not_ranked == ()


def test_without_a_speed_the_eager_step_is_of_the_same_runs_as_its_kernels(tmp_path: Path) -> None:
    """If no graphed run was timed, only the eager baseline has a bound. Its step and busy times must be means of the
    same runs."""

    def edit(run: AttemptRecord) -> None:
        timed(run)
        factor = (1, 1, 2)[run.spec.repeat]
        change_probe(0, busy_ms=15.5 * factor, computing_ms=15.5 * factor)(run)
        for step in run.metrics:
            step["step_time_ms"] = math.nan if run.spec.graphed else 16.0 * factor

    limit = limit_of(tmp_path, edit, repeats=3)
    assert limit is not None and limit.eager is not None and limit.graphed is None
    assert limit.eager.largest_speedup == pytest.approx(16 / 15.5)


def test_a_cpu_sweep_has_no_word_of_it(tmp_path: Path) -> None:
    report = write_report(write_sweep(tmp_path))
    text, content = report.markdown.read_text(), report.json.read_text()
    assert "upper bound" not in text
    for name in ("speedup_bound", "capture_cost", "launches"):
        assert f'"{name}' not in content
