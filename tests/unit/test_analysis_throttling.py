"""Throttled GPUs: what is said of them, and which words they leave standing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.compare import CellResult, compare
from analysis.judged import judge
from analysis.load import load
from analysis.markdown.speed import speeds
from analysis.pair import PairResult
from analysis.ranking import rank
from analysis.run import Attempt
from analysis.speedup import SpeedWord
from analysis.summary import summarise
from analysis.throttling import CAPPED_APART, SLOWED, doubt_of, throttled
from launch.record import Clocks
from tests.records import UNTHROTTLED, AttemptRecord, write_sweep

Edit = Callable[[AttemptRecord], None]
SECONDS = UNTHROTTLED.seconds


def change_clocks(graphed: Optional[bool] = None, rank: int = 0, **fields: Any) -> Edit:
    """Of the measured steps of one side, or of both; ``throttled`` is seconds of ``SECONDS``."""

    def change(run: AttemptRecord) -> None:
        for event in run.events[rank]:
            if event["kind"] == "phase" and event["phase"] == "measure" and graphed in (None, run.spec.graphed):
                throttled = event["clocks"]["throttled"] | fields.get("throttled", {})
                event["clocks"] |= {**fields, "throttled": throttled}

    return change


def forget_clocks(run: AttemptRecord) -> None:
    for events in run.events.values():
        for event in events:
            event.pop("clocks", None)  # as records were before there were any


def both(first: Edit, second: Edit) -> Edit:
    def change(run: AttemptRecord) -> None:
        first(run)
        second(run)

    return change


def results(root: Path, edit: Edit, **options: Any) -> tuple[CellResult, ...]:
    return compare(load(write_sweep(root, device="cuda", impls=("torch",), edit=edit, **options)))


def graphed_result(root: Path, edit: Edit, **options: Any) -> CellResult:
    return results(root, edit, **options)[1]


def reported(root: Path, edit: Edit) -> str:
    return "\n".join(speeds(results(root, edit)))


def share(share: float, reason: str = "power_cap") -> dict[str, float]:
    return {reason: share * SECONDS}


# --- what slows a GPU down ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphed", [True, False])
@pytest.mark.parametrize("reason", ["thermal", "sync_boost"])
def test_a_side_that_was_slowed_down_has_a_figure_and_no_word(tmp_path: Path, graphed: bool, reason: str) -> None:
    result = graphed_result(tmp_path, change_clocks(graphed, throttled=share(0.12, reason)))
    assert result.speed and result.speed.word == "INCONCLUSIVE"
    assert result.speed.ratio == pytest.approx(1.25, rel=0.02)
    assert result.speed.low is None
    assert f"in {'graphed' if graphed else 'eager'} runs by" in result.speed.reason
    assert "for 12% of the measured time" in result.speed.reason


def test_nor_has_one_both_of_whose_sides_were(tmp_path: Path) -> None:
    result = graphed_result(tmp_path, change_clocks(throttled=share(0.3, "thermal")))
    assert result.speed and result.speed.word == "INCONCLUSIVE"


def test_less_than_a_word_allows_is_no_matter(tmp_path: Path) -> None:
    result = graphed_result(tmp_path, change_clocks(throttled=share(0.9 * SLOWED, "thermal")))
    assert result.speed and result.speed.word == "FASTER"


def test_one_rank_of_one_repeat_is_enough(tmp_path: Path) -> None:
    def once(run: AttemptRecord) -> None:
        if run.spec.repeat == 1:
            change_clocks(False, rank=3, throttled=share(0.12, "thermal"))(run)

    result = graphed_result(tmp_path, once, ranks=4, repeats=3)
    assert result.speed and "heat for 12% of the measured time on rank 3" in result.speed.reason


@pytest.mark.parametrize("reason", ["hardware_slowdown", "hardware_thermal", "power_brake", "thermal"])
def test_what_is_seen_at_the_ends_and_was_not_counted_slowed_it_down(tmp_path: Path, reason: str) -> None:
    result = graphed_result(tmp_path, change_clocks(True, active=["power_cap", reason]))
    assert result.speed and "when it began or ended" in result.speed.reason


def test_a_power_cap_may_be_seen(tmp_path: Path) -> None:
    result = graphed_result(tmp_path, change_clocks(active=["power_cap"]))
    assert result.speed and result.speed.word == "FASTER"


def test_what_was_counted_and_was_little_may_be_seen(tmp_path: Path) -> None:
    brief = {"throttled": share(0.5 * SLOWED, "thermal"), "active": ["thermal"]}
    result = graphed_result(tmp_path, change_clocks(True, **brief))
    assert result.speed and result.speed.word == "FASTER"


def test_it_is_the_first_news_and_is_not_ranked(tmp_path: Path) -> None:
    sweep = write_sweep(
        tmp_path,
        device="cuda",
        impls=("torch", "full_iteration"),
        edit=change_clocks(False, throttled=share(0.3, "thermal")),
    )
    judged = judge(sweep)
    said = "heat for 30% of the measured time on rank 0"
    assert f"**1 cell ran on GPUs that were slowed down**: `{judged.results[0].cell.label}` (by {said})." in (
        summarise(judged.results).text
    )
    (ranking,) = rank(judged.results)
    assert (judged.results[0].cell.label, f"its GPUs were slowed down by {said}") in ranking.left_out


def test_what_was_slowed_down_is_not_held_to_be_near_its_limit(tmp_path: Path) -> None:
    for graphed in (False, True):
        edit = change_clocks(True, throttled=share(0.3, "thermal") if graphed else {})
        said = summarise(results(tmp_path / str(graphed), edit)).text
        assert ("to the limit:" in said) != graphed


def test_the_family_of_a_sweep_does_not_give_the_word_back(tmp_path: Path) -> None:
    sweep = write_sweep(
        tmp_path, device="cuda", impls=("torch",), edit=change_clocks(False, throttled=share(0.3, "thermal"))
    )
    assert [r.speed.word for r in judge(sweep).results if r.speed] == ["INCONCLUSIVE"]


# --- power caps -----------------------------------------------------------------------------------------------------


def test_a_graphed_run_that_is_capped_more_is_faster_all_the_same(tmp_path: Path) -> None:
    result = graphed_result(tmp_path, change_clocks(True, throttled=share(0.8)))
    assert result.speed and result.speed.word == "FASTER"


def test_an_eager_run_that_is_capped_more_makes_nothing_faster(tmp_path: Path) -> None:
    result = graphed_result(tmp_path, change_clocks(False, throttled=share(0.8)))
    assert result.speed and result.speed.word == "INCONCLUSIVE"
    assert "80% of the time of eager runs and 0% of that of graphed ones" in result.speed.reason
    assert "--lock-gpu-clocks" in result.speed.reason


def test_sides_that_are_capped_alike_are_compared(tmp_path: Path) -> None:
    edit = both(change_clocks(False, throttled=share(0.93)), change_clocks(True, throttled=share(0.9)))
    result = graphed_result(tmp_path, edit)
    assert result.speed and result.speed.word == "FASTER"


def test_a_limit_that_changed_leaves_no_word(tmp_path: Path) -> None:
    result = graphed_result(tmp_path, change_clocks(True, power_limits=[500.0]))
    assert result.speed and result.speed.word == "INCONCLUSIVE"
    assert "from 500 to 700 W" in result.speed.reason


def test_gpus_of_ranks_may_have_limits_of_their_own(tmp_path: Path) -> None:
    result = graphed_result(tmp_path, change_clocks(rank=1, power_limits=[500.0]), ranks=2)
    assert result.speed and result.speed.word == "FASTER"


# --- any pair of sides ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairResult:
    return graphed_result(tmp_path_factory.mktemp("pair"), lambda run: None).pairs[0]


def with_clocks(pair: PairResult, eager: Clocks, graphed: Clocks) -> PairResult:
    def change(attempt: Optional[Attempt], clocks: Clocks) -> Attempt:
        assert attempt and attempt.recorded
        return replace(attempt, recorded=replace(attempt.recorded, clocks={0: clocks}))

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
OTHER_WAY = {"FASTER": "SLOWER", "SLOWER": "FASTER", "NEUTRAL": "NEUTRAL", "INCONCLUSIVE": "INCONCLUSIVE"}


@given(eager=CLOCKS, graphed=CLOCKS, word=st.sampled_from(get_args(SpeedWord)))
def test_no_side_is_favoured(pair: PairResult, eager: Clocks, graphed: Clocks, word: SpeedWord) -> None:
    one, other = with_clocks(pair, eager, graphed), with_clocks(pair, graphed, eager)
    assert bool(doubt_of([one], 1, word)) == bool(doubt_of([other], 1, OTHER_WAY[word]))  # type: ignore[arg-type]


@given(clocks=CLOCKS)
def test_shares_are_shares_and_silence_is_said(pair: PairResult, clocks: Clocks) -> None:
    _, attempt = (run.attempt for run in (pair.eager, with_clocks(pair, clocks, clocks).graphed) if run)
    assert attempt
    found = throttled([attempt], [0])
    assert all(0 <= share <= 1 for share, _ in found.most.values())
    assert ("heat" in found.unknown) == ("thermal" not in clocks.throttled)
    assert ("hardware slowdown" in found.unknown) == (clocks.active is None)
    assert "heat" in found.slowed or "thermal" not in (clocks.active or ()) or clocks.throttled.get("thermal")


@given(eager=st.floats(0, 1), graphed=st.floats(0, 1))
def test_a_word_is_doubted_where_the_side_that_looks_slower_was_capped_more(
    pair: PairResult, eager: float, graphed: float
) -> None:
    shares = [{"power_cap": part, "thermal": 0.0} for part in (eager, graphed)]
    capped = with_clocks(pair, *(replace(UNTHROTTLED, throttled=each, seconds=1.0) for each in shares))
    more = eager - graphed
    words: dict[SpeedWord, bool] = {"FASTER": more > CAPPED_APART, "SLOWER": -more > CAPPED_APART}
    words |= {"NEUTRAL": abs(more) > CAPPED_APART, "INCONCLUSIVE": False}
    assert {word: bool(doubt_of([capped], 1, word)) for word in words} == words


# --- what is not known ----------------------------------------------------------------------------------------------


def test_what_is_not_known_doubts_nothing_and_is_not_called_unthrottled(tmp_path: Path) -> None:
    result = graphed_result(tmp_path / "cells", forget_clocks)
    assert result.speed and result.speed.word == "FASTER"
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


def test_what_is_known_of_one_rank_is_not_known_of_all(tmp_path: Path) -> None:
    def one_silent(run: AttemptRecord) -> None:
        run.events[1] = [event | {"clocks": None} if "clocks" in event else event for event in run.events[1]]

    result = graphed_result(tmp_path, one_silent, ranks=2)
    assert result.throttling and result.throttling.own.unknown == ("power cap", "heat", "hardware slowdown")


def test_a_run_that_never_measured_says_nothing_of_the_others(tmp_path: Path) -> None:
    def crashed(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 1:
            forget_clocks(run)
            assert run.outcome
            run.outcome = replace(run.outcome, outcome="FAILED", phase="warmup")

    result = graphed_result(tmp_path, crashed)
    assert result.throttling and result.throttling.own.unknown == ()


def test_the_report_shows_both_sides(tmp_path: Path) -> None:
    text = reported(tmp_path, change_clocks(True, throttled=share(0.62)))
    assert "| no / power cap 62% |" in text


def test_clocks_below_their_maximum_are_shown_and_doubt_nothing(tmp_path: Path) -> None:
    edit = change_clocks(sm_mhz=1200)
    assert "| 1200 of 1980 MHz at the end / 1200 of 1980 MHz at the end |" in reported(tmp_path / "report", edit)
    result = graphed_result(tmp_path / "cells", edit)
    assert result.speed and result.speed.word == "FASTER"


def test_a_report_of_a_cpu_does_not_speak_of_it(tmp_path: Path) -> None:
    assert "throttled" not in "\n".join(speeds(compare(load(write_sweep(tmp_path)))))


def test_damaged_clocks_keep_a_pair_from_being_compared(tmp_path: Path) -> None:
    def damage(run: AttemptRecord) -> None:
        change_clocks(True, seconds="much")(run)

    verdict = graphed_result(tmp_path, damage).verdict
    assert verdict and verdict.word == "INCOMPARABLE"
    assert "clocks of rank 0 cannot be read" in verdict.reason
