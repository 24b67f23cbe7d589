"""Test speed verdicts, their interval, and the pairs from which a ratio is computed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from analysis.records.load import load
from analysis.report.sections.speed import _remarks_on
from analysis.report.summary import summarise
from analysis.report.write_report import write_report
from analysis.speed.confidence_interval import ALONE_ONCE, MOST_PAIRS, Family, families, interval_of
from analysis.speed.pair_speed import PairSpeed
from analysis.speed.speed_verdict import MINIMUM_STEPS, classify, repeats_to_decide, speed_verdict
from analysis.speed.speedup import Speed
from analysis.statistics.student_t import quantile
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import compare_cells
from analysis.sweep.judge_sweep import judge_sweep
from launch.contract.model_flops import model_flops
from launch.contract.plan import WRAPPED
from tests.records import AttemptRecord, Edit, write_sweep
from tests.report_text import report_text

EAGER_MS = 20.0


def compared(root: Path, edit: Edit, repeats: int = 2) -> CellResult:
    return compare_cells(load(write_sweep(root, edit=edit, repeats=repeats)))[1]


def speed_of(root: Path, edit: Edit, repeats: int = 2) -> Speed:
    found = compared(root, edit, repeats).speed.speedup
    assert found is not None
    return found


def timed(root: Path, graphed_ms: Callable[[AttemptRecord], float], repeats: int = 2) -> Speed:
    """Return the speed of a sweep whose steps take ``EAGER_MS`` eager and ``graphed_ms`` graphed."""

    def edit(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = graphed_ms(run) if run.spec.graphed else EAGER_MS

    return speed_of(root, edit, repeats)


# --- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ([1.34], "INCONCLUSIVE"),
        ([1.34, 1.31], "FASTER"),
        ([0.9, 0.91], "INCONCLUSIVE"),  # By 25% or less, two runs may both be slow by chance, and two others fast.
        ([1.2, 1.2], "INCONCLUSIVE"),
        ([1.2, 1.2, 1.2], "FASTER"),
        ([0.9, 0.91, 0.91], "SLOWER"),
        ([1.0, 1.0], "INCONCLUSIVE"),
        ([1.02, 1.08], "INCONCLUSIVE"),  # Both are above 1, but so far apart that two pairs tell little.
        ([1.02, 1.03, 1.04, 1.05], "FASTER"),
        ([1.0004, 0.9998, 1.0], "NEUTRAL"),
        ([1.004, 0.996], "INCONCLUSIVE"),
        ([1 + 2e-16] * 3, "NEUTRAL"),  # The interval excludes 1, but only by an irrelevant amount.
        ([1.005] * 3, "NEUTRAL"),
        ([1.004, 0.996, 1.004, 0.996, 1.004, 0.996], "NEUTRAL"),
    ],
)
def test_words(ratios: list[float], word: str) -> None:
    assert speed_verdict(interval_of(ratios), MINIMUM_STEPS)[0] == word


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("ratio", [1.0, 1.004, 1.1, 0.8, 2.0])
def test_so_many_repeats_of_the_same_spread_decide_and_one_fewer_do_not(ratio: float, spread: float) -> None:
    def decides(pairs: int) -> bool:
        logs = np.resize([spread, -spread], pairs) * math.sqrt(
            (pairs - 1) / pairs
        )  # Any even number of pairs has this standard deviation.
        return speed_verdict(interval_of(np.exp(logs + math.log(ratio))), MINIMUM_STEPS)[0] != "INCONCLUSIVE"

    first = np.exp(np.array([spread, -spread]) * math.sqrt(1 / 2) + math.log(ratio))
    found = repeats_to_decide(first, ALONE_ONCE)
    if found is None:
        assert not decides(MOST_PAIRS)
    else:
        assert decides(found + found % 2) and (found < 5 or not decides(found - 2 + found % 2))


def test_the_interval_is_students_on_logarithms() -> None:
    ratios = [1.2, 1.3, 1.25]
    logs = np.log(ratios)
    half = 4.302652729749464 * logs.std(ddof=1) / math.sqrt(3)  # The 97.5th percentile with two degrees of freedom.
    assert interval_of(ratios) == pytest.approx((math.exp(logs.mean() - half), math.exp(logs.mean() + half)))
    assert interval_of([1.2]) is None


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8))
def test_the_word_is_what_the_interval_says_and_turns_round_with_the_ratio(ratios: list[float]) -> None:
    interval = interval_of(ratios)
    assert interval is not None
    word, reason = speed_verdict(interval, MINIMUM_STEPS)
    low, high = interval
    neutral = low >= 0.99 and high <= 1.01
    assert (word == "NEUTRAL") == neutral
    assert (word == "FASTER") == (low > 1 and not neutral)
    assert (word == "SLOWER") == (high < 1 and not neutral)
    assert (word == "INCONCLUSIVE") == bool(reason)
    swapped = interval_of([1 / ratio for ratio in ratios])
    assert swapped == pytest.approx((1 / high, 1 / low), rel=1e-6)


def test_a_few_steps_give_no_word() -> None:
    word, reason = speed_verdict((2.0, 2.1), MINIMUM_STEPS - 1)
    assert (word, "19 steady steps" in reason) == ("INCONCLUSIVE", True)


@pytest.mark.parametrize(("true", "repeats", "spread"), [(1.0, 2, 0.02), (1.0, 5, 0.05), (1.004, 3, 0.01)])
def test_a_wrong_direction_is_as_rare_as_the_interval_promises(true: float, repeats: int, spread: float) -> None:
    """In 2,000 sweeps of known truth, a step that is not faster is called FASTER at most as often as one tail of the
    interval allows."""
    random = np.random.default_rng(7)
    drawn = true * np.exp(random.normal(0, spread, (2000, repeats)))
    words = [speed_verdict(interval_of(list(ratios)), MINIMUM_STEPS)[0] for ratios in drawn]
    assert words.count("SLOWER") <= 0.025 * 2000 * 1.5
    if true == 1.0:
        assert words.count("FASTER") <= 0.025 * 2000 * 1.5


# --- from records ---------------------------------------------------------------------------------------------------


def test_the_figure_is_the_geometric_mean_of_pairs(tmp_path: Path) -> None:
    speed = timed(tmp_path, lambda run: 16.0 if run.spec.repeat else 15.5)
    assert speed.ratio == pytest.approx(math.sqrt(20 / 16 * 20 / 15.5))
    assert speed.ratio == pytest.approx(speed.eager_ms / speed.graphed_ms)
    assert speed.summary == "1.27x (1.02 to 1.58 over 2 pairs)"
    assert speed.verdict == "FASTER"


def test_one_pair_has_a_figure_and_no_interval(tmp_path: Path) -> None:
    speed = timed(tmp_path, lambda run: 16.0, repeats=1)
    assert (speed.summary, speed.low, speed.high, speed.verdict) == ("1.25x (1 pair)", None, None, "INCONCLUSIVE")
    assert "repeats" in speed.reason


def test_throughput_is_of_the_model_a_gpu(tmp_path: Path) -> None:
    result = compared(tmp_path, lambda run: None)
    speed = result.speed.speedup
    assert speed is not None
    tokens = result.spec.training.global_batch_size * result.spec.training.sequence_length
    assert speed.graphed_tokens_per_second == pytest.approx(tokens / speed.graphed_ms * 1e3)
    assert speed.graphed_tflops == pytest.approx(model_flops(result.spec) / speed.graphed_ms * 1e3 / 1e12)
    assert speed.graphed_tflops / speed.eager_tflops == pytest.approx(speed.ratio)


def test_only_measured_steps_count(tmp_path: Path) -> None:
    def late_warmup(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = EAGER_MS if step["phase"] == "measure" else 9e9

    speed = speed_of(tmp_path, late_warmup, repeats=3)
    assert (speed.low, speed.high, speed.verdict) == (1.0, 1.0, "NEUTRAL")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0, 1e-320, 1e308])
def test_a_step_time_that_is_no_time_gives_no_ratio(tmp_path: Path, bad: float) -> None:
    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.metrics[60]["step_time_ms"] = bad

    result = compared(tmp_path, edit)
    assert result.speed.speedup is None
    assert result.pairs[0].speed.reason == "a step time is not a number of milliseconds from 1e-06 to 1e+09"


def slow_steps(every: int, side: bool, times: float = 5) -> Edit:
    """Return constant times in which every n-th step of one side takes several ``times`` as long."""

    def edit(run: AttemptRecord) -> None:
        base = 16.0 if run.spec.graphed else EAGER_MS
        for step in run.metrics:
            off = run.spec.graphed == side and step["step"] % every == every - 1
            step["step_time_ms"] = base * (times if off else 1)

    return edit


def test_a_hiccup_is_left_out_on_both_sides(tmp_path: Path) -> None:
    def hiccup(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = 16.0 if run.spec.graphed else EAGER_MS
        run.metrics[50 + run.spec.graphed]["step_time_ms"] *= 50

    speed = speed_of(tmp_path, hiccup)
    assert (speed.ratio, speed.outliers, speed.outliers_kept) == (pytest.approx(1.25), 4, "")


def test_a_second_mode_of_the_graphed_run_is_not_hidden(tmp_path: Path) -> None:
    """Every tenth graphed step takes five times as long. By its median the run is 1.25 times as fast, but in truth it
    is slower."""
    speed = speed_of(tmp_path, slow_steps(10, side=True), repeats=3)
    assert speed.verdict == "SLOWER"
    assert "steps of one graphed run are far from their median" in speed.outliers_kept


def test_rare_steps_count_where_one_side_alone_has_them(tmp_path: Path) -> None:
    """In each of three repeats, three of 112 graphed steps are slow. This is rare in each run, but together it is no
    chance."""
    speed = speed_of(tmp_path, slow_steps(40, side=True), repeats=3)
    assert speed.outliers_kept == "9 graphed steps are far from their run's median, but no eager step"
    assert speed.ratio < 1.25 * 0.95


def long_eager_steps(every: int, shift: int) -> Edit:
    """Return eager steps of which every n-th takes five times as long, ``shift`` steps later in each repeat. Graphs gain 2%."""

    def edit(run: AttemptRecord) -> None:
        for step in run.metrics:
            long = not run.spec.graphed and (step["step"] + shift * run.spec.repeat) % every == every - 1
            step["step_time_ms"] = EAGER_MS / (1.02 if run.spec.graphed else 1) * (5 if long else 1)

    return edit


def test_what_only_eager_runs_do_in_some_steps_is_no_gain_of_graphs(tmp_path: Path) -> None:
    speed = speed_of(tmp_path / "same", long_eager_steps(10, shift=0), repeats=3)
    assert speed.verdict == "INCONCLUSIVE" and speed.ratio > 1.4
    assert "only eager runs take longer in steps 9, 19, 29, 39, 49 and 7 more" in speed.reason
    assert "without these steps the ratio is 1.020" in speed.reason
    # Stalls at other steps of each run are eager's own.
    assert speed_of(tmp_path / "other", long_eager_steps(10, shift=3), repeats=3).verdict == "FASTER"


def test_a_gain_in_all_steps_counts_and_what_only_eager_runs_do_is_named(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, edit=slow_steps(10, side=False, times=1.5), repeats=3)
    text = report_text(sweep)
    assert (
        "only eager runs take longer in steps 9, 19, 29, 39, 49 and 7 more, as for an evaluation or a checkpoint"
        in text
    )
    assert "without these steps the ratio is 1.250, not 1.316" in text and "FASTER" in text


def stalls(at: Callable[[AttemptRecord], dict[int, float]]) -> Edit:
    """Return graphed steps that are 5% faster than eager ones, except for some steps that take several times as long."""

    def edit(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = (19.0 if run.spec.graphed else EAGER_MS) * at(run).get(step["step"], 1.0)

    return edit


def few_of_graphed_runs(run: AttemptRecord) -> dict[int, float]:
    """Make five graphed steps slow over three repeats, as many as chance makes."""
    steps = {0: (60, 90), 1: (60, 90), 2: (80,)}[run.spec.repeat]
    return dict.fromkeys(steps, 100.0) if run.spec.graphed else {}


def long_ones_of_graphed_runs(run: AttemptRecord) -> dict[int, float]:
    """Make equally many steps slow on both sides, but those of one side longer."""
    return dict.fromkeys(range(13 if run.spec.graphed else 7, 120, 25), 30.0 if run.spec.graphed else 1.1)


@pytest.mark.parametrize("at", [few_of_graphed_runs, long_ones_of_graphed_runs])
def test_what_is_left_out_does_not_change_the_word(
    tmp_path: Path, at: Callable[[AttemptRecord], dict[int, float]]
) -> None:
    """Over all steps, the graphed runs take more than twice as long."""
    speed = speed_of(tmp_path, stalls(at), repeats=3)
    assert speed.outliers > 0 and speed.outliers_kept == ""
    assert speed.verdict == "INCONCLUSIVE"
    assert "the excluded outliers change the verdict, since over all steps the interval is" in speed.reason


# --- when runs were made, and what they trained -----------------------------------------------------------------------


def at(place: Callable[[int, bool], float], seconds: float = 60.0) -> Edit:
    """Return runs with steps of 20 ms and 16 ms. Repeat and side decide when each begins and how long it lasts."""

    def edit(run: AttemptRecord) -> None:
        began = 1e9 + 100 * place(run.spec.repeat, run.spec.graphed)
        run.end(started=began, ended=began + seconds)
        for step in run.metrics:
            step["step_time_ms"] = (16.0 if run.spec.graphed else EAGER_MS) * (1 + 0.001 * run.spec.repeat)

    return edit


def test_runs_that_overlap_give_no_figure(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, edit=at(lambda repeat, graphed: 2 * repeat + 0.3 * graphed))
    result = compare_cells(load(sweep))[1]
    assert result.speed.speedup is None
    assert result.pairs[0].speed.reason == "the eager and the graphed run overlapped in time"
    said = "A1: no speed-up, because the eager and the graphed run overlapped in time."
    assert said in report_text(sweep)


@pytest.mark.parametrize(
    ("place", "word"),
    [
        (lambda repeat, graphed: 2 * repeat + (graphed ^ (repeat % 2)), "FASTER"),
        (lambda repeat, graphed: 2 * repeat + (graphed == repeat % 2), "FASTER"),
        (lambda repeat, graphed: 2 * repeat + graphed, "same side ran first"),
        (lambda repeat, graphed: 2 * repeat + (not graphed), "same side ran first"),
        (lambda repeat, graphed: repeat + 3 * (graphed ^ (repeat == 2)), "another repeat began between"),
        (lambda repeat, graphed: repeat + 864 * (graphed ^ (repeat == 2)), "another repeat began between"),
    ],
)
def test_repeats_have_to_alternate(tmp_path: Path, place: Callable[[int, bool], float], word: str) -> None:
    speed = speed_of(tmp_path, at(place), repeats=3)
    assert speed.verdict == ("FASTER" if word == "FASTER" else "INCONCLUSIVE")
    assert word in speed.reason or word == speed.verdict


def test_a_fixed_order_is_seen_where_every_reversed_pair_has_no_speed(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        at(lambda repeat, graphed: 2 * repeat + (graphed ^ (repeat % 2)))(run)
        if run.spec.repeat % 2:
            run.metrics[60]["step_time_ms"] = 0.0

    speed = speed_of(tmp_path, edit, repeats=5)
    assert (speed.pairs, speed.verdict) == (3, "INCONCLUSIVE")
    assert "the same side ran first in all 3 timed pairs" in speed.reason


@pytest.mark.parametrize("repeats", [3, 4])
def test_a_change_within_the_window_is_no_speed_up(tmp_path: Path, repeats: int) -> None:
    """Eager steps are 10% slower for half of the window, and then as fast as graphed ones."""

    def edit(run: AttemptRecord) -> None:
        noise = np.random.default_rng([run.spec.repeat, run.spec.graphed]).normal(0, 0.002, len(run.metrics))
        for step, off in zip(run.metrics, noise, strict=True):
            slow = not run.spec.graphed and step["step"] < 64
            step["step_time_ms"] = EAGER_MS * (1.1 if slow else 1.0) * (1 + float(off))

    speed = speed_of(tmp_path, edit, repeats)
    assert speed.low is not None and speed.low > 1.03
    assert speed.verdict == "INCONCLUSIVE" and "the speed-up changes during the measured steps" in speed.reason


# --- the host's clock, and the machine --------------------------------------------------------------------------------


def change_seconds(factor: float, graphed: bool = True) -> Edit:
    """Measured phases have steps of 20 and 16 ms. The host's clock of one side shows ``factor`` times as much."""

    def edit(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = 16.0 if run.spec.graphed else EAGER_MS
        seconds = sum(step["step_time_ms"] for step in run.metrics if step["phase"] == "measure") / 1e3
        for event in run.events[0]:
            if event["kind"] == "phase" and event["phase"] == "measure":
                event["seconds"] = seconds * (factor if run.spec.graphed == graphed else 1.0)

    return edit


@pytest.mark.parametrize("factor", [1000.0, 0.001, 0.9, 0.0])
@pytest.mark.parametrize("graphed", [True, False])
def test_step_times_of_another_unit_than_the_hosts_clock_give_no_figure(
    tmp_path: Path, factor: float, graphed: bool
) -> None:
    """Seconds were recorded as milliseconds, or the host did not wait for its device."""
    result = compared(tmp_path, change_seconds(factor, graphed))
    assert result.speed.speedup is None
    took = (1.824 if graphed else 2.3) * factor
    side = "graphed" if graphed else "eager"
    assert f"the measured steps of the {side} run add up to" in result.pairs[0].speed.reason
    assert f"but took {took:.3g} s by the host's clock" in result.pairs[0].speed.reason


@pytest.mark.parametrize(("factor", "word"), [(1.0, "FASTER"), (1.1, "FASTER"), (1.2, "INCONCLUSIVE")])
def test_a_gain_is_one_by_the_hosts_clock_too(tmp_path: Path, factor: float, word: str) -> None:
    """Graphed steps take 4 of 20 ms less, but more time passes between them."""
    speed = speed_of(tmp_path, change_seconds(factor))
    assert speed.verdict == word
    assert ("by the host's clock" in speed.reason) == (word == "INCONCLUSIVE")


@pytest.mark.parametrize(("slower", "named"), [(2.0, False), (10.0, True)])
def test_a_report_names_what_outliers_leave_of_a_gain(tmp_path: Path, slower: float, named: bool) -> None:
    """One step of each of three graphed runs takes longer: too few to be behaviour."""

    def edit(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = 16.0 if run.spec.graphed else EAGER_MS
        if run.spec.graphed:
            run.metrics[40 + 7 * run.spec.repeat]["step_time_ms"] *= slower

    result = compared(tmp_path, edit, repeats=3)
    assert result.speed.speedup is not None and result.speed.speedup.verdict == "FASTER"
    said = [remark for remark in _remarks_on(result) if "the ratio is 1.250 without outliers, but 1.159 over" in remark]
    assert bool(said) is named, [*_remarks_on(result)]


@pytest.mark.parametrize(("factor", "named"), [(1.0, False), (1.04, False), (1.1, True)])
def test_a_report_names_what_the_hosts_clock_leaves_of_a_gain(tmp_path: Path, factor: float, named: bool) -> None:
    result = compared(tmp_path, change_seconds(factor))
    assert result.speed.speedup is not None and result.speed.speedup.verdict == "FASTER"
    said = [
        remark
        for remark in _remarks_on(result)
        if "the ratio is 1.250 by step times, but 1.136 by the host's" in remark
    ]
    assert bool(said) is named


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("hardware", "gpus", ["NVIDIA H100"]), ("hardware", "driver", "590.1"), ("settings", "NCCL_ALGO", "Ring")],
)
def test_unlike_machines_or_settings_give_no_figure(tmp_path: Path, section: str, name: str, value: object) -> None:
    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.environment[section][name] = value

    result = compared(tmp_path, edit)
    assert result.speed.speedup is None
    assert f"the runs had different machines or settings: {section}.{name}: " in result.pairs[0].speed.reason


def test_a_clock_that_was_set_back_gives_no_figure(tmp_path: Path) -> None:
    result = compared(tmp_path, at(lambda repeat, graphed: 2 * repeat + graphed, seconds=-60.0))
    assert result.speed.speedup is None
    assert "the clock of the host was set back during a run" in result.pairs[0].speed.reason


def test_repeats_in_allocations_of_their_own_need_not_alternate(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        at(lambda repeat, graphed: 0.1 * repeat + (graphed ^ (repeat % 2)))(run)
        run.end(allocation=f"bundle000.{run.spec.repeat}")

    assert speed_of(tmp_path, edit, repeats=3).verdict == "FASTER"


def test_other_numbers_of_tokens_are_not_compared(tmp_path: Path) -> None:
    def half(run: AttemptRecord) -> None:
        for step in run.metrics[90:] if run.spec.graphed else ():
            step["tokens"] //= 2

    result = compared(tmp_path, half)
    assert result.speed.speedup is None
    assert result.verdict is not None and result.verdict.verdict == "INCOMPARABLE"
    assert "different numbers of tokens: 1024 eager and 512 graphed in step 90" in result.verdict.reason


# --- all cells of a report --------------------------------------------------------------------------------------------


CELLS = [
    ("one", [1.03, 1.06, 1.09, 1.06]),
    ("one", [1.0, 1.04, 1.08, 1.04]),
    ("two", [1.5, 1.52, 1.54, 1.52]),
    ("two", [1.2, 1.2001, 1.2002, 1.2001]),
    ("three", [1.3, 1.3001, 1.3002, 1.3001]),
    ("three", [1.3, 1.3002, 1.3004, 1.3002]),
]
"""Pairs of cells share their eager runs. The second cell is the least steady one. The last one has the median deviation."""


def test_a_cell_alone_is_a_family_of_one() -> None:
    for cell in CELLS:
        (family,) = families([cell])
        assert interval_of(cell[1], family) == pytest.approx(interval_of(cell[1]))


def test_an_interval_is_as_wide_as_the_noise_of_all_cells_asks_or_bonferronis_by_its_own() -> None:
    one, apart, two, still, stiller, typical = (float(np.log(ratios).std(ddof=1)) for _, ratios in CELLS)
    assert stiller < still < typical < one
    own, of_all = quantile(1 - 0.04 / 2, 3), quantile(1 - 0.05 / 2 / 6, 18) * apart
    alone = quantile(1 - 0.01 / 2 / 6, 3) * typical
    beside = own * math.hypot(one, apart) / math.sqrt(2)
    assert alone < own * math.hypot(two, still) < of_all < beside
    found = [interval_of(ratios, family) for (_, ratios), family in zip(CELLS, families(CELLS), strict=True)]
    halves = [math.log(high / low) / 2 * math.sqrt(4) for low, high in filter(None, found)]
    assert halves == pytest.approx([beside, own * apart, of_all, alone, alone, alone])


def test_pairs_that_may_agree_by_chance_are_held_against_what_other_cells_show() -> None:
    """Runs of the second cell have two speeds, 5% apart. So the pairs of the first one may agree by chance."""
    for repeats, word in ((3, "INCONCLUSIVE"), (4, "FASTER")):
        cells = [("one", [1.05, 1.051, 1.05, 1.051][:repeats]), ("two", [1.05, 1.0, 1.05, 1.0][:repeats])]
        assert classify(pairs_of(cells[0][1]), families(cells)[0])[0] == word
        assert classify(pairs_of(cells[0][1]))[0] == "FASTER"


def test_the_reason_names_repeats_as_wrap_takes_them(tmp_path: Path) -> None:
    def run_slightly_faster(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = 18.0 if run.spec.graphed else EAGER_MS

    sweep = write_sweep(tmp_path, edit=run_slightly_faster)
    sweep.plan.write_text(json.dumps(json.loads(sweep.plan.read_text()) | {"recipe_file": WRAPPED}))
    speed = compare_cells(load(sweep))[1].speed.speedup
    assert speed and speed.reason.endswith("if later pairs vary as much (--repeats 3)")


def test_the_reason_says_when_pairs_may_agree_by_chance(tmp_path: Path) -> None:
    speed = timed(tmp_path, lambda run: 18.0)
    assert (speed.verdict, speed.repeats_to_decide) == ("INCONCLUSIVE", 3)
    assert speed.reason == (
        "the interval 0.892 to 1.385 includes 1 and reaches outside 0.99 to 1.01, since 2 pairs may agree by chance if runs "
        "are either fast or slow: about 3 repeats should decide, if later pairs vary as much (repeats=3)"
    )


def test_what_is_sure_by_itself_stays_so_beside_an_unsteady_cell() -> None:
    """The ratios are as in a sweep of the demonstration on a CPU: the pairs of one cell differ by 0.3%, those of the
    other by three fourths."""
    cells = [("one", [1.468, 1.472]), ("two", [0.95, 1.67])]
    intervals = [interval_of(ratios, family) for (_, ratios), family in zip(cells, families(cells), strict=True)]
    assert [speed_verdict(interval, MINIMUM_STEPS)[0] for interval in intervals] == ["FASTER", "INCONCLUSIVE"]


@given(st.lists(st.lists(st.floats(0.5, 2), min_size=2, max_size=4), min_size=1, max_size=6))
def test_an_interval_of_a_family_holds_the_cells_own(cells: list[list[float]]) -> None:
    found = families([(str(place % 2), ratios) for place, ratios in enumerate(cells)])
    for ratios, family in zip(cells, found, strict=True):
        own, wide = interval_of(ratios, family.alone), interval_of(ratios, family)
        assert own and wide and wide[0] <= own[0] * (1 + 1e-9) and wide[1] >= own[1] * (1 - 1e-9)


def pairs_of(ratios: list[float], slower: float = 0.0, moved: float = 1.0) -> list[PairSpeed]:
    """Return consecutive pairs of a machine that slows eager steps down by ``slower``, a logarithm, from repeat to
    repeat."""
    times = [EAGER_MS * math.exp(slower * place) for place in range(len(ratios))]
    return [
        PairSpeed(
            ratio=ratio,
            steps=100,
            moved=moved,
            eager_ms=eager,
            graphed_ms=eager / ratio,
            eager_began=100.0 * place,
            graphed_began=100.0 * place + 50 * (-1) ** place,
        )
        for place, (ratio, eager) in enumerate(zip(ratios, times, strict=True))
    ]


WIDE = Family(cells=20, degrees=60, sharing=1, workload=0.01, typical=0.0, widest=0.01)


@example(ratios=[1.0070, 1.0079, 1.0073, 1.0078], slower=0.0, moved=1.0, family=WIDE)  # By itself this is NEUTRAL.
@example(ratios=[1.0086, 1.0089, 1.0096, 1.0105], slower=-0.001, moved=1.0, family=WIDE)  # These ratios drift.
@given(
    ratios=st.lists(st.floats(0.98, 1.02), min_size=2, max_size=5),
    slower=st.floats(-0.01, 0.01),
    moved=st.floats(0.99, 1.01),
    family=st.builds(Family, *[st.integers(2, 40), st.integers(1, 80), st.integers(1, 40)], *[st.floats(0, 0.1)] * 3),
)
def test_other_cells_take_a_word_away_and_give_none(
    ratios: list[float], slower: float, moved: float, family: Family
) -> None:
    pairs = pairs_of(ratios, slower, moved)
    own, (word, reason) = classify(pairs, family.alone)[0], classify(pairs, family)
    assert word in (own, "INCONCLUSIVE")
    assert bool(reason) == (word == "INCONCLUSIVE")
    taken = own != "INCONCLUSIVE" and word == "INCONCLUSIVE"
    by_a_check = speed_verdict(interval_of(ratios, family), 100)[0] == own
    assert reason.startswith(f"{own} on its own") == taken
    assert ("timed cells: " in reason) == (taken and by_a_check)


def test_a_wider_interval_of_a_neutral_cell_makes_it_no_faster() -> None:
    pairs = pairs_of([1.0070, 1.0079, 1.0073, 1.0078])
    interval = interval_of([1.0070, 1.0079, 1.0073, 1.0078], WIDE)
    assert interval and speed_verdict(interval, 100)[0] == "FASTER"
    assert classify(pairs)[0] == "NEUTRAL"
    assert classify(pairs, WIDE)[1].startswith("NEUTRAL on its own (1.007 to 1.008), but not certain enough among 20")


def apart(run: AttemptRecord) -> None:
    """Let pairs have ratios from 1.23 to 1.25, and those of the third workload, if there is one, from 0.85 to 1.2."""
    unsteady = run.spec.training.learning_rate == 3e-3
    ratios = (1.2, 0.85, 1.0) if unsteady else (1.25, 1.23, 1.24)
    for step in run.metrics:
        step["step_time_ms"] = EAGER_MS / ratios[run.spec.repeat] if run.spec.graphed else EAGER_MS


def test_what_one_pair_shows_is_said_and_not_claimed(tmp_path: Path) -> None:
    text = summarise(judge_sweep(write_sweep(tmp_path, repeats=1)).results).text
    assert (
        "`torch_compile, lr 0.001` measured 1.25x (1 pair) and is bit-identical" in text
        and "Speed undecided: `torch_compile, lr 0.001` (one pair cannot separate a speed-up" in text
    )
    assert "faster (" not in text


def test_words_of_a_sweep_are_said_of_all_cells_at_once(tmp_path: Path) -> None:
    """By itself, the interval excludes 1. Next to a cell whose pairs differ by a third, this is no longer certain."""
    alone, beside = (judge_sweep(write_sweep(tmp_path / str(n), edit=apart, workloads=n, repeats=3)) for n in (2, 3))
    said = [summarise(judged.results).text for judged in (alone, beside)]
    first = [judged.results[1].speed.speedup for judged in (alone, beside)]
    assert first[0] is not None and first[1] is not None
    assert (first[0].verdict, first[1].verdict) == ("FASTER", "INCONCLUSIVE")
    assert first[1].low is not None and first[1].low < 1, "the printed interval is the one that the word follows from"
    reason = (
        "FASTER on its own (1.215 to 1.265), but not certain enough among 3 timed cells, since 3 pairs may agree by chance if "
        "runs are either fast or slow: about 4 repeats should decide, if later pairs vary as much (repeats=4)"
    )
    assert (first[0].repeats_to_decide, first[1].repeats_to_decide, first[1].reason) == (None, 4, reason)
    assert "`torch_compile, lr 0.001` is 1.24x faster (1.21 to 1.27, 3 pairs)" in said[0]
    low, high = first[1].low, first[1].high
    assert f"`torch_compile, lr 0.001` measured {first[1].ratio:.2f}x ({low:.2f} to {high:.2f}, 3 pairs)" in said[1]
    assert reason in said[1] and "faster (" not in said[1]


# --- what the capture cost ------------------------------------------------------------------------------------------


def test_the_capture_pays_off_after_its_cost_over_the_gain(tmp_path: Path) -> None:
    def capturing(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = 16.0 if run.spec.graphed else EAGER_MS
            if step["phase"] == "capture":
                step["step_time_ms"] = 20_020.0
            if run.spec.graphed and step["phase"] == "settle":
                step["step_time_ms"] = 21.0

    assert speed_of(tmp_path, capturing).break_even_step == math.ceil((20_000 + 1 + 1) / 4)


def test_what_the_engine_says_of_the_capture_counts_where_it_is_more(tmp_path: Path) -> None:
    speed = timed(tmp_path, lambda run: 16.0)
    assert speed.break_even_step == 2500 / 4  # The records state a capture of 2.5 seconds.


def test_settling_that_the_window_drops_is_paid_for(tmp_path: Path) -> None:
    def settling(run: AttemptRecord) -> None:
        for step in run.metrics:
            slow = run.spec.graphed and step["phase"] == "measure" and step["step"] < 6 + 27
            step["step_time_ms"] = (10.0 if run.spec.graphed else EAGER_MS) * (50 if slow else 1)

    sweep = write_sweep(tmp_path, edit=settling)
    speed = compare_cells(load(sweep))[1].speed.speedup
    assert speed is not None
    lost = speed.settling
    assert 20 < lost <= 27
    assert speed.break_even_step == (2500 + lost * 480) / 10
    report = write_report(sweep)
    assert f"({lost} settling)" in report.markdown.read_text()
    assert json.loads(report.json.read_text())["cells"][1]["speed"]["settling"] == lost


def test_what_gains_nothing_never_pays_off(tmp_path: Path) -> None:
    assert timed(tmp_path, lambda run: EAGER_MS + run.spec.repeat).break_even_step is None
