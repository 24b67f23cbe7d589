"""The loss rule, on curves made here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Optional

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.deviation import Spread, spread_of
from analysis.loss import MINIMUM_STEPS, WORDS, Verdict, judge, worst
from analysis.steps import Floats, Metric, Steps
from launch.record import Margins

CAPTURE = 3
STEPS = CAPTURE + 1 + MINIMUM_STEPS
MARGINS = Margins(loss=1e-3, grad_norm=1e-2)


def curve(steps: int = STEPS, *, graphed: bool = False, loss: Optional[Floats] = None) -> Steps:
    number = np.arange(steps)
    phase = np.full(steps, "measure", dtype="U8")
    phase[:CAPTURE] = "warmup"
    if graphed:
        phase[CAPTURE : CAPTURE + 1] = "capture"
    falling = 1.5 + 4 * np.exp(-number / 40) if loss is None else loss
    return Steps(number, falling, 1 + np.exp(-number / 30), np.ones(steps), np.full(steps, 8), phase)


def moved(steps: Steps, at: int, loss: float = 0.0, grad_norm: float = 0.0) -> Steps:
    """``steps`` with one step's loss moved by ``loss`` and its gradient norm by the factor 1 + ``grad_norm``."""
    losses, norms = steps.loss.copy(), steps.grad_norm.copy()
    losses[at] += loss
    norms[at] *= 1 + grad_norm
    return replace(steps, loss=losses, grad_norm=norms)


def verdict(graphed: Steps, eager: Optional[Steps] = None, spread: Optional[Spread] = None) -> Verdict:
    """Against ``eager`` repeats that agree, where nothing else is said."""
    eager = curve() if eager is None else eager
    return judge(eager, graphed, spread or spread_of([curve(), curve()]), MARGINS, STEPS)


def test_equal_curves_are_bitwise_even_when_short_and_without_a_floor() -> None:
    found = judge(curve(10), curve(10, graphed=True), None, MARGINS, 10)
    assert found.word == "BITWISE"
    assert found.evidence is not None
    assert (found.evidence.first_step, found.evidence.last_step, found.evidence.steps) == (4, 9, 6)
    assert found.evidence.bitwise_prefix == 10


def test_a_difference_in_the_last_bit_is_not_bitwise() -> None:
    graphed = curve(graphed=True)
    losses = graphed.loss.copy()
    losses[50] = np.nextafter(losses[50], 10)
    found = verdict(replace(graphed, loss=losses))
    assert found.word == "EQUIVALENT"
    assert found.evidence is not None
    assert found.evidence.bitwise_prefix == 50
    assert found.evidence.max_loss_step == 50


def test_a_difference_before_the_capture_does_not_count_against_equivalence() -> None:
    assert verdict(moved(curve(graphed=True), 1, loss=0.5)).word == "BITWISE"


@pytest.mark.parametrize(("loss", "grad_norm", "metric"), [(2e-3, 0.0, "loss"), (0.0, 2e-2, "grad_norm")])
def test_one_step_beyond_the_margin_diverges_and_is_named(loss: float, grad_norm: float, metric: str) -> None:
    found = verdict(moved(curve(graphed=True), 77, loss, grad_norm))
    assert found.word == "DIVERGED"
    assert found.deviation is not None
    assert (found.deviation.step, found.deviation.metric) == (77, metric)
    assert found.deviation.size == pytest.approx(loss or grad_norm)


def with_value(steps: Steps, at: int, metric: Metric, value: float) -> Steps:
    values = steps.of(metric).copy()
    values[at] = value
    return replace(steps, loss=values) if metric == "loss" else replace(steps, grad_norm=values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
@pytest.mark.parametrize("side", ["eager", "graphed"])
def test_not_finite_on_one_side_diverges_at_that_step(bad: float, metric: Metric, side: str) -> None:
    eager, graphed = curve(), curve(graphed=True)
    if side == "eager":
        found = verdict(graphed, with_value(eager, 60, metric, bad))
    else:
        found = verdict(with_value(graphed, 60, metric, bad), eager)
    assert found.word == "DIVERGED"
    assert found.deviation is not None
    assert (found.deviation.step, found.deviation.metric) == (60, metric)


def test_a_graphed_nan_diverges_whatever_the_floor_is() -> None:
    wide = spread_of([curve(), moved(curve(), 60, loss=float("nan"))])
    assert verdict(moved(curve(graphed=True), 60, loss=float("nan")), spread=wide).word == "DIVERGED"


def test_nan_everywhere_on_both_sides_is_inconclusive() -> None:
    nothing = np.full(STEPS, np.nan)
    found = verdict(curve(graphed=True, loss=nothing), curve(loss=nothing))
    assert found.word == "INCONCLUSIVE"
    assert "not finite" in found.reason


def test_nan_before_the_capture_never_passes() -> None:
    found = verdict(moved(curve(graphed=True), 1, float("nan")), moved(curve(), 1, float("nan")))
    assert found.word == "INCONCLUSIVE"
    assert "before the capture" in found.reason


def test_runs_that_stop_at_their_first_nan_are_judged_up_to_it() -> None:
    stopped = moved(curve(graphed=True), 60, float("nan")).take(slice(61))
    assert verdict(stopped).word == "DIVERGED"
    both = judge(moved(curve(), 60, float("nan")).take(slice(61)), stopped, None, MARGINS, STEPS)
    assert both.word == "INCONCLUSIVE"


def without(steps: Steps, missing: int) -> Steps:
    return steps.take(steps.step != missing)


def renumbered(steps: Steps) -> Steps:
    return replace(steps, step=steps.step + 1)


def doubled(steps: Steps) -> Steps:
    return steps.take(np.arange(len(steps)).repeat(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda steps: without(steps, 70), "step 70 missing"),
        (lambda steps: without(steps, STEPS - 1), f"step {STEPS - 1} missing"),
        (lambda steps: steps.take(slice(50)), "missing"),
        (renumbered, f"step {STEPS} not expected"),
        (doubled, "more than once"),
        (lambda steps: steps.take(slice(None, None, -1)), "out of order"),
        (lambda steps: steps.take(slice(0)), "missing"),
    ],
)
@pytest.mark.parametrize("side", ["eager", "graphed"])
def test_steps_that_are_not_all_there_once_in_order_are_incomparable(
    change: Callable[[Steps], Steps], said: str, side: str
) -> None:
    eager, graphed = curve(), curve(graphed=True)
    found = verdict(graphed, change(eager)) if side == "eager" else verdict(change(graphed), eager)
    assert found.word == "INCOMPARABLE"
    no_capture = "the graphed run recorded no capture step"
    assert found.reason == no_capture or (side in found.reason and said in found.reason)


def test_the_same_wrong_steps_on_both_sides_are_incomparable() -> None:
    assert verdict(renumbered(curve(graphed=True)), renumbered(curve())).word == "INCOMPARABLE"
    longer = judge(curve(), curve(graphed=True), None, MARGINS, STEPS - 1)
    assert longer.word == "INCOMPARABLE"


def test_a_run_without_a_capture_or_with_nothing_after_it_is_incomparable() -> None:
    assert verdict(curve()).word == "INCOMPARABLE"
    last = judge(curve(CAPTURE + 1), curve(CAPTURE + 1, graphed=True), None, MARGINS, CAPTURE + 1)
    assert last.word == "INCOMPARABLE"
    assert "training.steps" in last.remedy


def test_within_the_margin_is_inconclusive_where_evidence_is_thin() -> None:
    near = moved(curve(graphed=True), 50, loss=5e-4)
    assert judge(curve(), near, None, MARGINS, STEPS).word == "INCONCLUSIVE"
    short = judge(curve(60), moved(curve(60, graphed=True), 50, 5e-4), spread_of([curve(60), curve(60)]), MARGINS, 60)
    assert short.word == "INCONCLUSIVE"
    assert str(STEPS) in short.remedy
    wide = spread_of([curve(), moved(curve(), 50, loss=2e-3)])
    assert verdict(near, spread=wide).word == "INCONCLUSIVE"


def test_beyond_the_margin_is_inconclusive_where_eager_is_as_far_from_itself_in_that_metric() -> None:
    far = moved(curve(graphed=True), 50, loss=3e-3)
    wide = spread_of([curve(), moved(curve(), 80, loss=2e-3)])
    assert verdict(far, spread=wide).word == "INCONCLUSIVE"
    other_metric = spread_of([curve(), moved(curve(), 80, grad_norm=0.5)])
    assert verdict(far, spread=other_metric).word == "DIVERGED"
    assert judge(curve(), far, None, MARGINS, STEPS).word == "INCONCLUSIVE"


def test_a_gradient_norm_of_zero_admits_no_difference() -> None:
    eager, graphed = curve(), curve(graphed=True)
    norms = eager.grad_norm.copy()
    norms[50] = 0.0
    zero = replace(eager, grad_norm=norms)
    assert verdict(graphed, zero, spread_of([zero, zero])).word == "DIVERGED"
    assert verdict(replace(graphed, grad_norm=norms), zero, spread_of([zero, zero])).word == "BITWISE"


@pytest.mark.parametrize("margin", [float("nan"), 0.0, -1.0])
def test_no_margin_lets_a_difference_pass_by_being_absurd(margin: float) -> None:
    near = moved(curve(graphed=True), 50, loss=1e-9)
    found = judge(curve(), near, spread_of([curve(), curve()]), Margins(loss=margin), STEPS)
    assert not found.passes


def test_the_worst_verdict_wins() -> None:
    assert worst([Verdict(word) for word in WORDS]).word == "DIVERGED"
    assert worst([Verdict("BITWISE"), Verdict("EQUIVALENT")]).word == "EQUIVALENT"


@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 0.49))
def test_noise_within_the_margin_is_never_divergence(seed: int, share: float) -> None:
    noise = np.random.default_rng(seed)

    def noisy(steps: Steps) -> Steps:
        loss = steps.loss + noise.uniform(-share, share, STEPS) * MARGINS.loss
        norm = steps.grad_norm * (1 + noise.uniform(-share, share, STEPS) * MARGINS.grad_norm * 0.9)
        return replace(steps, loss=loss, grad_norm=norm)

    eager = noisy(curve())
    found = verdict(noisy(curve(graphed=True)), eager, spread_of([eager, noisy(curve())]))
    assert found.word in ("BITWISE", "EQUIVALENT")


@given(
    at=st.integers(CAPTURE + 1, STEPS - 1),
    sign=st.sampled_from([-1, 1]),
    metric=st.sampled_from(["loss", "grad_norm"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_deviation_of_twice_the_margin_is_found_wherever_it_is(at: int, sign: int, metric: str, seed: int) -> None:
    noise = np.random.default_rng(seed).uniform(-0.1, 0.1, STEPS) * MARGINS.loss
    graphed = curve(graphed=True)
    graphed = replace(graphed, loss=graphed.loss + noise)
    if metric == "loss":
        graphed = moved(graphed, at, loss=sign * 2 * MARGINS.loss)
    else:
        graphed = moved(graphed, at, grad_norm=sign * 2 * MARGINS.grad_norm)
    found = verdict(graphed)
    assert found.word == "DIVERGED"
    assert found.deviation is not None
    assert (found.deviation.step, found.deviation.metric) == (at, metric)


@given(
    st.lists(st.tuples(st.sampled_from(["eager", "graphed"]), st.integers(CAPTURE + 1, STEPS - 1)), min_size=1),
    st.sampled_from([float("nan"), float("inf")]),
)
def test_nothing_that_is_not_finite_after_the_capture_ever_passes(places: list[tuple[str, int]], bad: float) -> None:
    sides = {"eager": curve(), "graphed": curve(graphed=True)}
    for side, at in places:
        losses = sides[side].loss.copy()
        losses[at] = bad
        sides[side] = replace(sides[side], loss=losses)
    found = judge(sides["eager"], sides["graphed"], spread_of([sides["eager"]] * 2), MARGINS, STEPS)
    assert not found.passes
