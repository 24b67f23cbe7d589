"""Test throttled GPUs: what the report says about them, and which speed verdicts they change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.limits.throttling import CAPPED_APART, LEAST_READINGS, SLOWED, find_throttling, throttle_bounds
from analysis.records.load import load
from analysis.records.run import Attempt
from analysis.report.report_data import report_data
from analysis.report.sections import speed
from analysis.report.summary import summarise
from analysis.speed.speed_verdict import MINIMUM_STEPS, Decision, RatioBounds, bounded, speed_verdict
from analysis.speed.speedup import Speed
from analysis.sweep.cell_results import CellResult, PairResult
from analysis.sweep.judge_cells import compare_cells
from analysis.sweep.judge_sweep import judge_sweep
from analysis.sweep.ranking import rank
from launch.contract.records.clocks import Clocks
from tests.records import UNTHROTTLED, AttemptRecord, Edit, write_sweep

SECONDS = UNTHROTTLED.seconds


def change_clocks(graphed: bool | None = None, rank: int = 0, **fields: Any) -> Edit:
    """Change the clocks in the measured steps of one side, or of both. ``throttled`` is in seconds, of ``SECONDS``."""

    def change(run: AttemptRecord) -> None:
        for event in run.events[rank]:
            if event["kind"] == "phase" and event["phase"] == "measure" and graphed in (None, run.spec.graphed):
                throttled = event["clocks"]["throttled"] | fields.get("throttled", {})
                event["clocks"] |= {**fields, "throttled": throttled}

    return change


def forget_clocks(run: AttemptRecord) -> None:
    for events in run.events.values():
        for event in events:
            event.pop("clocks", None)  # Earlier records had no clocks.


def both(first: Edit, second: Edit) -> Edit:
    def change(run: AttemptRecord) -> None:
        first(run)
        second(run)

    return change


def results(root: Path, edit: Edit, **options: Any) -> tuple[CellResult, ...]:
    return compare_cells(load(write_sweep(root, device="cuda", impls=("torch",), edit=edit, **options)))


def graphed_result(root: Path, edit: Edit, **options: Any) -> CellResult:
    return results(root, edit, **options)[1]


def speedup(root: Path, edit: Edit, **options: Any) -> Speed:
    found = graphed_result(root, edit, **{"repeats": 3, **options}).speed.speedup
    assert found is not None
    return found


def reported(root: Path, edit: Edit) -> str:
    sweep = write_sweep(root, device="cuda", impls=("torch",), edit=edit)
    return "\n".join(speed.render(report_data(judge_sweep(sweep))))


def share(share: float, reason: str = "power_cap") -> dict[str, float]:
    return {reason: share * SECONDS}


# --- what slows a GPU down ------------------------------------------------------------------------------------------


def slower_by(share: float) -> Edit:
    """Return step times of graphed runs that take ``1 + share`` times as long as eager ones, where the records have a
    ratio of 1.25."""

    def change(run: AttemptRecord) -> None:
        for step in run.metrics if run.spec.graphed else ():
            step["step_time_ms"] *= 1.25 * (1 + share)

    return change


@pytest.mark.parametrize("graphed", [True, False])
@pytest.mark.parametrize("reason", ["thermal", "sync_boost"])
def test_a_side_whose_slowing_down_may_be_all_has_a_figure_and_no_word(
    tmp_path: Path, graphed: bool, reason: str
) -> None:
    timed = slower_by(0.25) if graphed else slower_by(-0.2)
    edit = both(timed, change_clocks(graphed, throttled=share(0.25, reason)))
    found = speedup(tmp_path, edit)
    assert (found.verdict, found.low) == ("INCONCLUSIVE", None)
    assert found.ratio == pytest.approx(0.8 if graphed else 1.25, rel=0.02)
    assert f"in {'graphed' if graphed else 'eager'} runs by" in found.reason
    assert "for 25% of the measured time" in found.reason


@pytest.mark.parametrize("graphed", [True, False])
def test_a_word_that_slowing_down_cannot_explain_stays_and_its_interval_is_as_much_wider(
    tmp_path: Path, graphed: bool
) -> None:
    for workloads in (1, 3):
        folder = tmp_path / str(workloads)
        plain, hot = (
            judge_sweep(
                write_sweep(folder / name, device="cuda", workloads=workloads, repeats=3, impls=("torch",), edit=edit)
            )
            .results[1]
            .speed.speedup
            for name, edit in (
                ("plain", lambda run: None),
                ("hot", change_clocks(graphed, throttled=share(0.12, "thermal"))),
            )
        )
        assert plain and hot and plain.low and plain.high and hot.low and hot.high
        assert (hot.verdict, hot.ratio) == ("FASTER", plain.ratio)
        assert hot.low == pytest.approx(plain.low * (1 if graphed else 0.88))
        assert hot.high == pytest.approx(plain.high / (0.88 if graphed else 1))


def test_ranks_may_be_slow_one_after_the_other(tmp_path: Path) -> None:
    def each(run: AttemptRecord) -> None:
        for number in range(4):
            change_clocks(False, rank=number, throttled=share(0.06, "thermal"))(run)

    assert speedup(tmp_path, each, ranks=4).verdict == "INCONCLUSIVE"


def test_neutral_does_not_survive_what_may_have_hidden_a_difference(tmp_path: Path) -> None:
    for reason, part, word in (("thermal", 0.02, "INCONCLUSIVE"), ("thermal", 0.9 * SLOWED, "NEUTRAL")):
        edit = both(evened, change_clocks(True, throttled=share(part, reason)))
        assert speedup(tmp_path / f"{part}", edit).verdict == word


def evened(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["step_time_ms"] = 20.0 + 0.001 * run.spec.repeat * run.spec.graphed


BRIEF = {"throttled": share(0.5 * SLOWED, "thermal"), "active": ["thermal"]}


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (change_clocks(throttled=share(0.3, "thermal")), "INCONCLUSIVE"),
        (change_clocks(throttled=share(0.9 * SLOWED, "thermal")), "FASTER"),
        (change_clocks(active=["power_cap"]), "FASTER"),
        (change_clocks(True, **BRIEF), "FASTER"),
        (change_clocks(True, throttled=share(0.8)), "FASTER"),
        (both(change_clocks(False, throttled=share(0.93)), change_clocks(True, throttled=share(0.9))), "FASTER"),
    ],
    ids=["both sides hot", "hardly hot", "a cap is seen", "seen and little", "graphed capped more", "capped alike"],
)
def test_a_word_goes_only_if_heat_or_a_cap_may_explain_it(tmp_path: Path, edit: Edit, word: str) -> None:
    assert speedup(tmp_path, edit).verdict == word


def test_one_rank_of_one_repeat_is_enough(tmp_path: Path) -> None:
    def once(run: AttemptRecord) -> None:
        if run.spec.repeat == 1:
            change_clocks(False, rank=3, throttled=share(0.25, "thermal"))(run)

    assert "heat for 25% of the measured time on rank 3" in speedup(tmp_path, once, ranks=4, repeats=3).reason


@pytest.mark.parametrize("reason", ["hardware_slowdown", "hardware_thermal", "power_brake", "thermal"])
def test_what_is_seen_at_the_ends_and_was_not_counted_slowed_it_down(tmp_path: Path, reason: str) -> None:
    assert "when it began or ended" in speedup(tmp_path, change_clocks(True, active=["power_cap", reason])).reason


def test_it_is_the_first_news_and_is_not_ranked(tmp_path: Path) -> None:
    sweep = write_sweep(
        tmp_path,
        device="cuda",
        impls=("torch", "full_iteration"),
        edit=change_clocks(False, throttled=share(0.3, "thermal")),
    )
    judged = judge_sweep(sweep)
    said = "heat for 30% of the measured time on rank 0"
    assert f"**1 cell ran on GPUs that were slowed down**: `{judged.results[0].cell.label}` (by {said})." in (
        summarise(judged.results).text
    )
    (ranking,) = rank(judged.results)
    assert (judged.results[0].cell.label, f"its GPUs were slowed down by {said}") in ranking.not_ranked


def test_what_was_slowed_down_is_not_held_to_be_near_its_limit(tmp_path: Path) -> None:
    for graphed in (False, True):
        edit = change_clocks(True, throttled=share(0.3, "thermal") if graphed else {})
        said = summarise(results(tmp_path / str(graphed), edit)).text
        assert ("to the upper bound:" in said) != graphed


def test_a_twin_that_was_slowed_down_accuses_no_graphed_cell(tmp_path: Path) -> None:
    """A hot GPU computes for longer than a graphed step takes on a cool one."""

    def hot(run: AttemptRecord) -> None:
        change_clocks(False, throttled=share(0.6, "thermal"))(run)
        for event in run.events[0] if not run.spec.graphed else ():
            if event["kind"] == "probe":
                event["probe"] |= {"computing_ms": computing_ms, "busy_ms": computing_ms}
        for step in run.metrics if not run.spec.graphed else ():
            step["step_time_ms"] *= 2

    for computing_ms in (30.0, 16.5):
        found = results(tmp_path / str(computing_ms), hot)
        limit = found[1].speed.bound
        assert limit is not None and not found[1].speed.timing_doubt
        assert (limit.eager, limit.attained, limit.bound) == (None, None, None)
        assert "its eager baseline were slowed down by heat" in limit.reason
        said = summarise(found).text
        assert "cannot be as fast" not in said and "the limit:" not in said


def test_the_family_of_a_sweep_does_not_give_the_word_back(tmp_path: Path) -> None:
    sweep = write_sweep(
        tmp_path, device="cuda", impls=("torch",), edit=change_clocks(False, throttled=share(0.3, "thermal"))
    )
    assert [r.speed.speedup.verdict for r in judge_sweep(sweep).results if r.speed.speedup] == ["INCONCLUSIVE"]


def test_the_interval_of_a_family_is_held_against_throttling_too(tmp_path: Path) -> None:
    """A cell that is judged alone stays FASTER despite a cap of 6%. Judged with five others, one of which is unsteady
    by a fifth, it does not."""

    def edit(run: AttemptRecord) -> None:
        unsteady = run.spec.training.learning_rate > 5.5e-3
        apart = (0.1 if unsteady else 0.01) * (run.spec.repeat - 1)
        for step in run.metrics:
            step["step_time_ms"] = 20.0 / (1.15 * (1 + apart) if run.spec.graphed else 1)
        change_clocks(False, throttled=share(0.06))(run)

    for workloads, word in ((1, "FASTER"), (6, "INCONCLUSIVE")):
        sweep = write_sweep(
            tmp_path / str(workloads), device="cuda", workloads=workloads, repeats=3, impls=("torch",), edit=edit
        )
        speed = judge_sweep(sweep).results[1].speed.speedup
        assert speed and speed.verdict == word
    assert "a power cap" in speed.reason


# --- power caps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share_of_eager", "word"), [(0.06, "FASTER"), (0.19, "FASTER"), (0.25, "INCONCLUSIVE")])
def test_a_cap_takes_a_word_away_that_it_may_explain(tmp_path: Path, share_of_eager: float, word: str) -> None:
    """The speed-up is 1.25. Without the cap, eager steps would be shorter by at most the cap's share."""
    assert speedup(tmp_path, change_clocks(False, throttled=share(share_of_eager))).verdict == word


def test_an_eager_run_that_is_capped_more_makes_nothing_faster(tmp_path: Path) -> None:
    found = speedup(tmp_path, change_clocks(False, throttled=share(0.8)))
    assert found.verdict == "INCONCLUSIVE" and "--lock-gpu-clocks" in found.reason
    assert "80% of the time of eager runs and 0% of the time of graphed runs" in found.reason


@pytest.mark.parametrize(
    ("mhz", "repeats", "low"), [(1965, 3, 1.246), (1782, 3, 1.246 * 0.92), (1386, 3, None), (1965, 2, None)]
)
def test_a_cap_explains_no_more_than_it_lowers_clocks(
    tmp_path: Path, mhz: int, repeats: int, low: float | None
) -> None:
    """Without the cap, the interval would begin at 1.246. Two clocks do not tell how far the cap lowers clocks."""
    edit = change_clocks(False, throttled=share(0.8), active=["power_cap"], sm_mhz=mhz)
    found = speedup(tmp_path, edit, repeats=repeats)
    if low is not None:
        assert (found.verdict, found.reason, found.low) == ("FASTER", "", pytest.approx(low, rel=1e-3))
        return
    explained = 0.8 if repeats < LEAST_READINGS else 0.8 * (1 - mhz / 1980)
    assert found.verdict == "INCONCLUSIVE" and f"explains a difference of up to {explained:.1%}; lock" in found.reason


def test_clocks_that_no_cap_held_say_nothing_about_it(tmp_path: Path) -> None:
    for active, mhz in (([], 1965), (["power_cap"], 1980)):
        edit = change_clocks(False, throttled=share(0.8), active=active, sm_mhz=mhz)
        assert speedup(tmp_path / str(mhz), edit).verdict == "INCONCLUSIVE"


def test_a_limit_that_changed_leaves_no_word(tmp_path: Path) -> None:
    found = speedup(tmp_path, change_clocks(True, power_limits=[500.0]))
    assert found.verdict == "INCONCLUSIVE" and "from 500 to 700 W" in found.reason


def test_gpus_of_ranks_may_have_limits_of_their_own(tmp_path: Path) -> None:
    assert speedup(tmp_path, change_clocks(rank=1, power_limits=[500.0]), ranks=2).verdict == "FASTER"


# --- any pair of sides ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairResult:
    return graphed_result(tmp_path_factory.mktemp("pair"), lambda run: None).pairs[0]


def with_clocks(pair: PairResult, eager: Clocks, graphed: Clocks) -> PairResult:
    def change(attempt: Attempt | None, clocks: Clocks) -> Attempt:
        assert attempt
        return replace(attempt, clocks={0: clocks})

    assert pair.eager
    runs = (
        replace(pair.eager, attempt=change(pair.eager.attempt, eager)),
        replace(pair.graphed, attempt=change(pair.graphed.attempt, graphed)),
    )
    return replace(pair, eager=runs[0], graphed=runs[1])


CLOCKS = st.builds(
    Clocks,
    seconds=st.floats(0.5, 1e4),
    throttled=st.dictionaries(st.sampled_from(["power_cap", "thermal", "sync_boost"]), st.floats(0, 2e4)),
    active=st.none() | st.lists(st.sampled_from(["power_cap", "thermal", "power_brake"]), unique=True).map(tuple),
    power_limits=st.sampled_from([(), (500.0,), (700.0,), (500.0, 700.0)]),
    sm_mhz=st.none() | st.integers(0, 3000),
    max_sm_mhz=st.none() | st.just(1980),
)


@given(eager=CLOCKS, graphed=CLOCKS)
def test_no_side_is_favoured(pair: PairResult, eager: Clocks, graphed: Clocks) -> None:
    one, other = (throttle_bounds([with_clocks(pair, *sides)], 1) for sides in ((eager, graphed), (graphed, eager)))
    assert 0 <= one.least <= 1 <= one.most
    assert bool(one.reason) == bool(other.reason) == ((one.least, one.most) != (1, 1))
    assert one.least == pytest.approx(1 / other.most)


@given(clocks=CLOCKS)
def test_shares_are_shares_and_silence_is_said(pair: PairResult, clocks: Clocks) -> None:
    _, attempt = (run.attempt for run in (pair.eager, with_clocks(pair, clocks, clocks).graphed) if run)
    assert attempt
    found = find_throttling([attempt], [0])
    assert all(0 <= share <= 1 for share, _ in found.most.values())
    assert ("heat" in found.unknown) == ("thermal" not in clocks.throttled)
    assert ("hardware slowdown" in found.unknown) == (clocks.active is None)
    assert "heat" in found.slowed or "thermal" not in (clocks.active or ()) or clocks.throttled.get("thermal")


@given(eager=st.floats(0, 1), graphed=st.floats(0, 1))
def test_what_was_capped_more_may_be_as_much_shorter(pair: PairResult, eager: float, graphed: float) -> None:
    shares = [{"power_cap": part, "thermal": 0.0} for part in (eager, graphed)]
    capped = with_clocks(pair, *(replace(UNTHROTTLED, throttled=each, seconds=1.0) for each in shares))
    found, more = throttle_bounds([capped], 1), eager - graphed
    if abs(more) <= CAPPED_APART:
        assert found == RatioBounds()
    else:
        assert found.least == pytest.approx(1 - max(more, 0)) and 1 / found.most == pytest.approx(1 + min(more, 0))


@given(
    least=st.floats(0, 1),
    most=st.floats(1, 10) | st.just(float("inf")),
    low=st.floats(0.5, 1.5),
    width=st.floats(0, 0.3),
)
def test_throttling_takes_words_away_and_gives_none(least: float, most: float, low: float, width: float) -> None:
    high = low + width
    word, reason = speed_verdict((low, high), MINIMUM_STEPS)
    decision = Decision(word, reason, (low, high), (low, high))
    found = bounded(decision, RatioBounds(least, most, "a reason"), MINIMUM_STEPS)
    assert found.verdict in (word, "INCONCLUSIVE")
    if found.interval is not None:
        assert found.interval[0] <= low <= high <= found.interval[1]
    if found.verdict != "INCONCLUSIVE":
        assert speed_verdict((low * least, high * most), MINIMUM_STEPS)[0] == word
    assert bool(found.reason) == (found.verdict == "INCONCLUSIVE") or word == "INCONCLUSIVE"
    assert bounded(decision, RatioBounds(), MINIMUM_STEPS) == decision


# --- two graphed cells ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slower", "clocks", "order"),
    [
        (1.02, {}, "slower"),
        (1.02, {"throttled": share(1.0)}, "undecided"),
        (1.02, {"power_limits": [500.0]}, "undecided"),
        (1.02, {"throttled": share(0.9 * CAPPED_APART)}, "slower"),
        (1.002, {}, "equal"),
        (1.002, {"power_limits": [500.0]}, "undecided"),
    ],
)
def test_graphed_cells_are_not_told_apart_by_what_throttling_may_explain(
    tmp_path: Path, slower: float, clocks: dict[str, Any], order: str
) -> None:
    def edit(run: AttemptRecord) -> None:
        slow = run.spec.cuda_graph.impl == "full_iteration"
        for step in run.metrics if slow else ():
            step["step_time_ms"] *= slower
        if slow:
            change_clocks(True, **clocks)(run)

    sweep = write_sweep(tmp_path, device="cuda", impls=("torch", "full_iteration"), repeats=4, edit=edit)
    (ranking,) = rank(judge_sweep(sweep).results)
    first, second = ranking.cells[:2]
    assert (first.label, second.label) == ("torch, lr 0.001", "full_iteration, lr 0.001")
    assert second.against_best == order


# --- what is not known ----------------------------------------------------------------------------------------------


def test_what_is_not_known_doubts_nothing_and_is_not_called_unthrottled(tmp_path: Path) -> None:
    assert speedup(tmp_path / "cells", forget_clocks).verdict == "FASTER"
    text = reported(tmp_path / "report", forget_clocks)
    assert "| not known / not known |" in text
    assert "| no / no |" not in text


def test_a_driver_that_counts_no_heat_is_not_said_to_have_seen_none(tmp_path: Path) -> None:
    def uncounted(run: AttemptRecord) -> None:
        for event in run.events[0]:
            if event.get("clocks"):
                del event["clocks"]["throttled"]["thermal"]

    edit = both(uncounted, change_clocks(True, throttled=share(0.62)))
    assert "| heat not known / power cap 62%, heat not known |" in reported(tmp_path, edit)


def one_silent(run: AttemptRecord) -> None:
    run.events[1] = [event | {"clocks": None} if "clocks" in event else event for event in run.events[1]]


def test_what_is_known_of_one_rank_is_not_known_of_all(tmp_path: Path) -> None:
    result = graphed_result(tmp_path, one_silent, ranks=2)
    assert result.speed.throttling and result.speed.throttling.own.unknown == ("power cap", "heat", "hardware slowdown")


def test_what_is_known_is_said_beside_what_is_not(tmp_path: Path) -> None:
    result = graphed_result(tmp_path, both(one_silent, change_clocks(throttled=share(0.3, "thermal"))), ranks=2)
    assert result.speed.throttling and result.speed.throttling.own.summary == "heat 30%, the rest not known"


def test_a_window_of_no_time_says_nothing_of_shares(tmp_path: Path) -> None:
    result = graphed_result(tmp_path, change_clocks(seconds=0.0))
    assert result.speed.throttling and result.speed.throttling.own.summary == "power cap and heat not known"


def test_a_run_that_never_measured_says_nothing_of_the_others(tmp_path: Path) -> None:
    def crashed(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 1:
            forget_clocks(run)
            run.end(outcome="FAILED", phase="warmup")

    result = graphed_result(tmp_path, crashed)
    assert result.speed.throttling and result.speed.throttling.own.unknown == ()


def test_the_report_shows_both_sides(tmp_path: Path) -> None:
    text = reported(tmp_path, change_clocks(True, throttled=share(0.62), sm_mhz=1965))
    assert "| no / power cap 62%, 1965 of 1980 MHz at the end |" in text


def test_clocks_below_their_maximum_are_shown_and_doubt_nothing(tmp_path: Path) -> None:
    edit = change_clocks(sm_mhz=1200)
    assert "| 1200 of 1980 MHz at the end / 1200 of 1980 MHz at the end |" in reported(tmp_path / "report", edit)
    assert speedup(tmp_path / "cells", edit).verdict == "FASTER"


@pytest.mark.parametrize(("mhz", "word"), [(1900, "FASTER"), (1750, "FASTER"), (1500, "INCONCLUSIVE")])
def test_lower_clocks_of_eager_runs_are_no_speed_up(tmp_path: Path, mhz: int, word: str) -> None:
    """Graphed steps are 1.25 times as fast, and run at 1980 MHz."""
    found = speedup(tmp_path, change_clocks(False, sm_mhz=mhz))
    assert found.verdict == word
    assert (f"{mhz} MHz in an eager run and at 1980 MHz in a graphed one" in found.reason) == (word == "INCONCLUSIVE")


def test_a_report_of_a_cpu_does_not_speak_of_it(tmp_path: Path) -> None:
    assert "throttled" not in "\n".join(speed.render(report_data(judge_sweep(write_sweep(tmp_path)))))


def test_damaged_clocks_keep_a_pair_from_being_compared(tmp_path: Path) -> None:
    verdict = graphed_result(tmp_path, change_clocks(True, seconds="much")).verdict
    assert verdict and verdict.verdict == "INCOMPARABLE" and "clocks of rank 0 cannot be read" in verdict.reason
