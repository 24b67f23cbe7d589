"""Test the loss rule on constructed curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.steps import Floats, Steps
from analysis.verdict.completeness import check_agreement
from analysis.verdict.family import judge_family
from analysis.verdict.judge_curves import judge_curves
from analysis.verdict.verdict import VERDICTS, Verdict, worst
from launch.contract.plan import MINIMUM_STEPS, Margins
from launch.contract.records.step_metrics import METRICS, Metric

CAPTURE = 3
STEPS = CAPTURE + 1 + MINIMUM_STEPS
MARGINS = Margins(loss=1e-3, grad_norm=1e-2)


def curve(steps: int = STEPS, *, graphed: bool = False, loss: Floats | None = None) -> Steps:
    number = np.arange(steps)
    phase = np.full(steps, "measure", dtype="U8")
    phase[:CAPTURE] = "warmup"
    if graphed:
        phase[CAPTURE : CAPTURE + 1] = "capture"
    falling = 1.5 + 4 * np.exp(-number / 40) if loss is None else loss
    return Steps(number, falling, 1 + np.exp(-number / 30), np.ones(steps), np.full(steps, 8), phase)


def moved(steps: Steps, at: int, loss: float = 0.0, grad_norm: float = 0.0) -> Steps:
    """Return ``steps`` with one step's loss moved by ``loss`` and its gradient norm multiplied by 1 + ``grad_norm``."""
    losses, norms = steps.loss.copy(), steps.grad_norm.copy()
    losses[at] += loss
    norms[at] *= 1 + grad_norm
    return replace(steps, loss=losses, grad_norm=norms)


def verdict(graphed: Steps, *eager: Steps, margins: Margins = MARGINS, steps: int = STEPS) -> Verdict:
    """Return the verdict on graphed runs, by default on one against two eager repeats that agree."""
    return of_repeats([graphed], eager or (curve(steps), curve(steps)), margins, steps)


def of_repeats(
    graphed: Sequence[Steps], eager: Sequence[Steps], margins: Margins = MARGINS, steps: int = STEPS, looks: int = 1
) -> Verdict:
    eager_runs = {f"eager repeat {repeat}": steps for repeat, steps in enumerate(eager)}
    graphed_runs = {f"graphed repeat {repeat}": steps for repeat, steps in enumerate(graphed)}
    return judge_curves(eager_runs, graphed_runs, np.arange(steps), CAPTURE + 1, margins, looks=looks)


def test_equal_curves_are_bitwise_even_when_short_and_without_a_floor() -> None:
    found = verdict(curve(10, graphed=True), curve(10), steps=10)
    assert found.verdict == "BITWISE"
    assert found.evidence is not None
    assert (found.evidence.first_step, found.evidence.last_step, found.evidence.steps) == (4, 9, 6)
    assert found.evidence.bitwise_prefix == 6


def test_a_difference_in_the_last_bit_is_not_bitwise() -> None:
    graphed = curve(graphed=True)
    losses = graphed.loss.copy()
    losses[50] = np.nextafter(losses[50], 10)
    found = verdict(replace(graphed, loss=losses))
    assert found.verdict == "EQUIVALENT"
    assert found.evidence is not None and found.evidence.bitwise_prefix == 50 - (CAPTURE + 1)
    assert found.evidence.max_loss_step == 50


def test_a_difference_before_the_capture_does_not_count_against_equivalence() -> None:
    assert verdict(moved(curve(graphed=True), 1, loss=0.5)).verdict == "BITWISE"


@pytest.mark.parametrize(("loss", "grad_norm", "metric"), [(2e-3, 0.0, "loss"), (0.0, 2e-2, "grad_norm")])
def test_one_step_beyond_the_margin_diverges_and_is_named(loss: float, grad_norm: float, metric: str) -> None:
    found = verdict(moved(curve(graphed=True), 77, loss, grad_norm))
    assert found.verdict == "DIVERGED"
    assert found.deviation is not None and (found.deviation.step, found.deviation.metric) == (77, metric)
    assert found.deviation.size == pytest.approx(loss or grad_norm)


def with_value(steps: Steps, at: int, metric: Metric, value: float) -> Steps:
    values = steps.of(metric).copy()
    values[at] = value
    return replace(steps, loss=values) if metric == "loss" else replace(steps, grad_norm=values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_not_finite_in_a_graphed_run_alone_diverges_at_that_step(bad: float, metric: Metric) -> None:
    eager = curve()
    found = verdict(with_value(curve(graphed=True), 60, metric, bad), eager, eager)
    assert found.verdict == "DIVERGED"
    assert found.deviation is not None and (found.deviation.step, found.deviation.metric) == (60, metric)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_not_finite_in_eager_is_blamed_on_no_graph(bad: float, metric: Metric) -> None:
    finite, broken = curve(), with_value(curve(), 60, metric, bad)
    for graphed in (curve(graphed=True), with_value(curve(graphed=True), 60, metric, bad)):
        for eager in ((broken,), (finite, broken)):
            assert verdict(graphed, *eager).verdict == "INCOMPARABLE"


def test_a_graphed_nan_diverges_whatever_the_floor_is() -> None:
    wide = curve(), moved(curve(), 60, loss=1e3)
    assert verdict(moved(curve(graphed=True), 60, loss=float("nan")), *wide).verdict == "DIVERGED"


def test_a_nan_in_one_of_several_eager_repeats_tells_of_no_graph() -> None:
    found = verdict(curve(graphed=True), curve(), moved(curve(), 60, loss=float("nan")))
    assert found.verdict == "INCOMPARABLE"
    assert "step 60 (eager repeat 1)" in found.reason


@pytest.mark.parametrize("bad", [1.7e308, -1.7e308])
def test_a_loss_near_overflow_diverges_without_a_warning(bad: float) -> None:
    graphed = with_value(curve(graphed=True), 50, "loss", bad)
    assert of_repeats([graphed, moved(graphed, 90, loss=1e-6)], [curve(), curve()]).verdict == "DIVERGED"


def test_nan_everywhere_on_both_sides_is_incomparable() -> None:
    nothing = np.full(STEPS, np.nan)
    found = verdict(curve(graphed=True, loss=nothing), curve(loss=nothing))
    assert found.verdict == "INCOMPARABLE"
    assert "not finite" in found.reason


def test_nan_before_the_capture_never_passes() -> None:
    found = verdict(moved(curve(graphed=True), 1, float("nan")), moved(curve(), 1, float("nan")))
    assert found.verdict == "INCOMPARABLE"
    assert "before the capture" in found.reason


def test_runs_that_stop_at_their_first_nan_are_judged_up_to_it() -> None:
    stopped = moved(curve(graphed=True), 60, float("nan")).take(slice(61))
    assert verdict(stopped).verdict == "DIVERGED"
    both = verdict(stopped, moved(curve(), 60, float("nan")).take(slice(61)))
    assert both.verdict == "INCOMPARABLE"
    assert "not finite" in both.reason


def without(steps: Steps, missing: int) -> Steps:
    return steps.take(steps.step != missing)


def test_noisy_curves_that_are_too_short_are_to_be_longer_first() -> None:
    random = np.random.default_rng(0)
    sides = ([noisy(curve(50, graphed=side), random, 3.0) for _ in range(2)] for side in (True, False))
    found = of_repeats(*sides, steps=50)
    assert (found.verdict, found.noisy) == ("INCONCLUSIVE", False), "clean step checks do not excuse it"
    assert found.advice.startswith(f"set training.steps to {STEPS} or more; besides, use deterministic mode")


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
    assert found.verdict == "INCOMPARABLE"
    assert f"{side} repeat 0" in found.reason
    assert said in found.reason


def test_the_same_wrong_steps_on_both_sides_are_incomparable() -> None:
    assert verdict(renumbered(curve(graphed=True)), renumbered(curve())).verdict == "INCOMPARABLE"
    assert verdict(curve(graphed=True), curve(), steps=STEPS - 1).verdict == "INCOMPARABLE"


def test_a_run_with_nothing_after_the_capture_is_incomparable() -> None:
    last = verdict(curve(CAPTURE + 1, graphed=True), curve(CAPTURE + 1), steps=CAPTURE + 1)
    assert last.verdict == "INCOMPARABLE"
    assert "more steps" in last.advice


def test_within_the_margin_is_inconclusive_where_evidence_is_thin() -> None:
    near = moved(curve(graphed=True), 50, loss=5e-4)
    assert verdict(near, curve()).verdict == "INCONCLUSIVE"
    short = verdict(moved(curve(60, graphed=True), 50, 5e-4), steps=60)
    assert short.verdict == "INCONCLUSIVE"
    assert str(STEPS) in short.advice
    assert verdict(near, curve(), moved(curve(), 50, loss=2e-3)).verdict == "INCONCLUSIVE"


def test_beyond_the_margin_is_inconclusive_where_eager_is_as_far_from_itself_in_that_metric() -> None:
    far = moved(curve(graphed=True), 50, loss=3e-3)
    wide = verdict(far, curve(), moved(curve(), 80, loss=2e-3))
    assert wide.verdict == "INCONCLUSIVE"
    assert "eager repeats differ among themselves: their loss by up to 0.002" in wide.reason
    assert "deterministic" in wide.advice
    assert verdict(far, curve(), moved(curve(), 80, grad_norm=0.5)).verdict == "DIVERGED"
    alone = verdict(far, curve())
    assert alone.verdict == "INCONCLUSIVE"
    assert "0.003 at step 50" in alone.reason


def test_where_the_floor_is_beyond_the_margin_a_spike_proves_nothing_and_many_steps_in_every_run_do() -> None:
    wide = curve(), moved(curve(), 80, loss=2e-3)
    spike = moved(curve(graphed=True), 50, loss=0.1)
    off = shifted(curve(graphed=True), np.where(np.arange(STEPS) >= 60, 10.0, 0.0))
    assert verdict(spike, *wide).verdict == "INCONCLUSIVE"
    assert of_repeats([off, spike], wide).verdict == "INCONCLUSIVE"
    found = of_repeats([off, moved(off, 90, loss=1e-6)], wide)
    assert found.verdict == "DIVERGED"
    assert found.deviation is not None and found.deviation.step == 60


def test_a_step_beyond_the_margin_that_the_floor_may_explain_is_inconclusive() -> None:
    noisy = curve(), moved(curve(), 80, loss=5e-4)
    near, far, farther = (moved(curve(graphed=True), 50, loss=loss) for loss in (1.2e-3, 3e-3, 7e-3))
    assert "0.001, but may be noise" in of_repeats([near, near], noisy).reason
    assert of_repeats([far, curve(graphed=True)], noisy).verdict == "INCONCLUSIVE", "what one run has may be a spike"
    assert of_repeats([far, moved(far, 90, loss=1e-6)], noisy).verdict == "DIVERGED"
    equal = of_repeats([far, far], noisy)
    assert equal.verdict == "INCONCLUSIVE", "equal runs have the same spikes"
    assert "step_checks" in equal.advice
    same = of_repeats([farther, farther], noisy)
    assert (
        same.verdict == "INCONCLUSIVE" and "repeats are equal bit for bit, so they have the same noise" in same.reason
    )
    assert "there is only one graphed run" in of_repeats([farther], noisy).reason
    spike = of_repeats([farther, curve(graphed=True)], noisy)
    assert spike.verdict == "INCONCLUSIVE" and "may be a rare spike of noise" in spike.reason
    assert "add repeats" in spike.advice
    lasting = shifted(curve(graphed=True), np.where(np.arange(STEPS) >= STEPS - 20, 7.0, 0.0))
    for graphed in ([lasting, curve(graphed=True)], [lasting]):
        assert of_repeats(graphed, noisy).verdict == "DIVERGED", "no spike lasts for 20 steps"


def test_deterministic_runs_that_are_not_are_said_to_be_so() -> None:
    nothing = Margins(loss=0.0, grad_norm=0.0)
    eager = curve(), moved(curve(), 80, loss=1e-6)
    found = verdict(moved(curve(graphed=True), 50, loss=1e-6), *eager, margins=nothing)
    assert found.verdict == "INCONCLUSIVE"
    assert "nondeterministic operation" in found.advice


TO_THE_BIT = Margins(loss=0.0, grad_norm=0.0)
_LOSSES = [6.9, 6.8, 6.7, 6.6, 7.60333729, 6.05122614, 6.17499018, 5.98097754, 6.26958513, 3.65224671]
_FORKED = [*_LOSSES[:6], 6.17465448, 5.98016882, 6.26985550, 3.65295172]
CURVES = {
    name: curve(len(losses), loss=np.array(losses))
    for name, losses in (("usual", _LOSSES), ("forked", _FORKED), ("forked twice", [*_FORKED[:-1], 3.65281510]))
}
"""GPT-OSS on an H200, whose deterministic eager runs have a kernel that adds in a varying order: its first compared steps and its
last. Eager and graphed runs alike take one of these curves."""
USUAL, FORKED, FORKED_TWICE = CURVES.values()
ANY_CURVE = st.sampled_from(sorted(CURVES))


def to_the_bit(graphed: Sequence[Steps], eager: Sequence[Steps] = (USUAL,) * 3, unrepeatable: str = "") -> Verdict:
    before, after = (
        {f"{side} {repeat}": steps for repeat, steps in enumerate(curves)}
        for side, curves in (("eager", eager), ("graphed", graphed))
    )
    steps = np.arange(len(USUAL))
    return judge_curves(before, after, steps, CAPTURE + 1, TO_THE_BIT, unrepeatable=unrepeatable)


@given(
    graphed=st.lists(ANY_CURVE, min_size=2, max_size=6).filter(lambda names: "usual" in names and len({*names}) > 1),
    eager=st.integers(2, 4),
)
def test_graphed_repeats_that_disagree_prove_nothing_where_one_equals_eager(graphed: list[str], eager: int) -> None:
    found = to_the_bit([CURVES[name] for name in graphed], (USUAL,) * eager)
    assert (found.verdict, found.noisy) == ("INCONCLUSIVE", False), "clean step checks do not excuse it either"
    assert f"graphed {graphed.index('usual')}" in found.reason.split(" bit for bit, unlike ")[0]
    assert "first at step 6" in found.reason and "step_checks: 5" in found.advice


@given(
    graphed=st.lists(ANY_CURVE, min_size=2, max_size=4),
    eager=st.lists(ANY_CURVE, min_size=2, max_size=4),
    fault=st.sampled_from([(CAPTURE + 1, 2e-3), (CAPTURE + 1, -0.5), (CAPTURE + 2, 2e-3)]),
)
def test_a_fault_in_every_repeat_diverges_whatever_kernels_do(
    graphed: list[str], eager: list[str], fault: tuple[int, float]
) -> None:
    """Where eager runs differ, the noise floor of so few steps does not prove it."""
    at, size = fault
    wrong = [moved(CURVES[name], at, loss=size) for name in graphed]
    found = to_the_bit(wrong, [CURVES[name] for name in eager])
    assert found.verdict == ("DIVERGED" if len({*eager}) == 1 else "INCONCLUSIVE")


@pytest.mark.parametrize(
    ("graphed", "unrepeatable", "word", "seen"),
    [
        ([FORKED, FORKED], "", "DIVERGED", "first at step 6"),
        ([FORKED, FORKED], "ends differ", "INCONCLUSIVE", "in the same way (first at step 6"),
        ([FORKED, FORKED_TWICE], "", "INCONCLUSIVE", "and from each other (first at step 6"),
        ([FORKED], "", "INCONCLUSIVE", "the only graphed run differs"),
        ([moved(USUAL, 4, loss=1e-6), moved(FORKED, 4, loss=1e-6)], "ends differ", "DIVERGED", "first at step 4"),
        ([moved(USUAL, 4, loss=1e-6)], "", "INCONCLUSIVE", "the only graphed run differs"),
        ([moved(USUAL, 9, grad_norm=0.02)], "", "DIVERGED", "first at step 9"),
        ([moved(USUAL, 8, loss=1e-6), moved(USUAL, 9, grad_norm=0.02)], "", "INCONCLUSIVE", "first at step 8"),
    ],
)
def test_what_all_graphed_repeats_have_is_proof_if_it_is_at_once_large_or_repeatable(
    graphed: list[Steps], unrepeatable: str, word: str, seen: str
) -> None:
    found = to_the_bit(graphed, unrepeatable=unrepeatable)
    assert found.verdict == word and seen in found.reason
    assert word == "DIVERGED" or (unrepeatable or "either a kernel is not deterministic, or the graph") in found.reason


def test_the_last_digits_of_large_losses_ask_for_another_margin() -> None:
    """A lower learning rate would not help. Such losses are sums over a batch."""
    large = 1e6 * curve().loss
    near = [curve(loss=large + off * (np.arange(STEPS) == 50)) for off in (0.0, 0.5, 1.0)]
    found = of_repeats([near[2]], near[:2])
    assert (
        found.verdict == "INCONCLUSIVE" and "losses of 5.12e+06" in found.advice and "learning rate" not in found.advice
    )
    far = of_repeats([near[2]], [near[0], curve(loss=large + 9.0 * (np.arange(STEPS) == 50))])
    assert "losses of" not in far.advice and "learning rate" in far.advice


def test_eager_runs_that_agree_for_long_do_not_prove_a_graph_wrong_that_leaves_them_sooner() -> None:
    """Their small distance is luck. A large difference at the first replay is not."""
    late = curve(), moved(curve(), STEPS - 1, loss=1e-7)
    early = shifted(curve(graphed=True), np.where(np.arange(STEPS) < 60, 0.0, 0.5))
    found = of_repeats([early, early], late, TO_THE_BIT)
    assert found.verdict == "INCONCLUSIVE" and "eager repeats differ among themselves" in found.reason
    at_once = shifted(curve(graphed=True), np.where(np.arange(STEPS) <= CAPTURE, 0.0, 0.5))
    assert of_repeats([at_once, at_once], late, TO_THE_BIT).verdict == "DIVERGED"


def test_a_gradient_norm_of_zero_admits_no_difference() -> None:
    zero, graphed = with_value(curve(), 50, "grad_norm", 0.0), curve(graphed=True)
    assert verdict(graphed, zero, zero).verdict == "DIVERGED"
    assert verdict(with_value(graphed, 50, "grad_norm", 0.0), zero, zero).verdict == "BITWISE"


def test_where_eager_does_not_train_nothing_is_equivalent() -> None:
    """A margin is absolute, so a loss of 1e-4 is within it of twice that loss."""
    tiny = 1e-4 * curve().loss
    eager = [replace(curve(), loss=tiny), replace(curve(), loss=tiny)]
    found = of_repeats([replace(curve(graphed=True), loss=2 * tiny)], eager)
    assert (
        found.verdict == "INCONCLUSIVE"
        and "the eager loss moves by no more than 0.00033" in found.reason
        and found.advice
    )
    zero = np.zeros(STEPS)
    without = [replace(curve(), grad_norm=zero)] * 2
    near = replace(moved(curve(graphed=True), 50, loss=1e-5), grad_norm=zero)
    found = of_repeats([near], without)
    assert found.verdict == "INCONCLUSIVE" and "gradient norm is 0 at every step" in found.reason
    assert of_repeats([near], without, Margins(loss=10.0)).verdict == "INCONCLUSIVE"
    same = of_repeats([without[0]], without)
    assert same.verdict == "BITWISE" and "equality shows little" in same.reason
    assert not verdict(curve(graphed=True)).reason


@pytest.mark.parametrize(("learns", "word"), [(0.0, "INCONCLUSIVE"), (5e-4, "INCONCLUSIVE"), (0.3, "EQUIVALENT")])
def test_variation_between_batches_is_not_learning(learns: float, word: str) -> None:
    """All runs share their batches, whose losses vary. A run whose optimizer never steps would differ by at most
    ``learns``."""
    random = np.random.default_rng(5)
    batches = 3 + random.normal(0, 0.05, STEPS) - np.linspace(0, learns, STEPS)
    eager, graphed = repeats(batches, random)
    found = of_repeats(graphed, eager)
    assert found.verdict == word, found.reason
    assert word == "EQUIVALENT" or "the variation between batches hides" in found.reason
    sides = (
        {f"{side} {place}": run for place, run in enumerate(runs)} for side, runs in (("e", eager), ("g", graphed))
    )
    assert judge_curves(*sides, np.arange(STEPS), CAPTURE + 1, MARGINS, learnt=True).verdict == "EQUIVALENT"


SHAPES_OF_BATCHES = {"correlation 0.5": 0.5, "correlation 0.98": 0.98, "a random walk": 1.0}


@pytest.mark.parametrize("shape", SHAPES_OF_BATCHES)
def test_batches_that_depend_on_each_other_feign_no_learning(shape: str) -> None:
    """Nothing is learnt. In 5% of random walks, the loss falls by more than chance explains."""
    random, passes = np.random.default_rng(6), 0
    for _ in range(60):
        batches = correlated(random, SHAPES_OF_BATCHES[shape])
        eager, graphed = repeats(3 + 0.05 * batches, random)
        passes += of_repeats(graphed, eager).verdict == "EQUIVALENT"
    assert passes <= 6, "3 are right"


@pytest.mark.parametrize(
    "fall", [8 * np.linspace(1, 0, STEPS), 12 * np.exp(-np.arange(STEPS) / 40)], ids=["line", "exponential"]
)
def test_a_fall_of_some_batch_noises_is_learning(fall: Floats) -> None:
    random = np.random.default_rng(7)
    sides = [repeats(3 + 0.05 * (fall + correlated(random, 0.0)), random) for _ in range(40)]
    assert [of_repeats(graphed, eager).verdict for eager, graphed in sides].count("EQUIVALENT") >= 38


def correlated(random: np.random.Generator, correlation: float) -> Floats:
    """Return an autoregressive process of shape (steps,). Each step has variance 1."""
    values = random.normal(size=STEPS)
    for step in range(1, STEPS):
        values[step] += correlation * values[step - 1]
    return values


def repeats(losses: Floats, random: np.random.Generator) -> tuple[list[Steps], list[Steps]]:
    """Return two eager and two graphed runs of these ``losses``, with little noise of their own."""
    eager, graphed = (
        [noisy(replace(curve(graphed=side), loss=losses), random, 0.05) for _ in range(2)] for side in (False, True)
    )
    return eager, graphed


@pytest.mark.parametrize("margin", [float("nan"), 0.0, -1.0])
def test_no_margin_lets_a_difference_pass_by_being_absurd(margin: float) -> None:
    near = moved(curve(graphed=True), 50, loss=1e-9)
    assert not verdict(near, margins=Margins(loss=margin)).passes


def test_the_worst_verdict_wins() -> None:
    assert worst([Verdict(word) for word in VERDICTS]).verdict == "DIVERGED"
    assert worst([Verdict("BITWISE"), Verdict("EQUIVALENT")]).verdict == "EQUIVALENT"
    sure, unsure = (
        verdict(shifted(noisy(curve(graphed=True), np.random.default_rng(1), 0.1), by)) for by in (0.0, 0.5)
    )
    assert sure.p < unsure.p < 0.05
    assert worst([sure, unsure]) is worst([unsure, sure]) is unsure, "a family of tests takes the least certain group"


def noisy(steps: Steps, noise: np.random.Generator, share: float) -> Steps:
    """Add white noise of this ``share`` of each margin."""
    loss = steps.loss + noise.normal(0, share, len(steps)) * MARGINS.loss
    norm = steps.grad_norm * (1 + noise.normal(0, share, len(steps)) * MARGINS.grad_norm)
    return replace(steps, loss=loss, grad_norm=norm)


@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 10))
def test_noise_that_both_sides_have_is_never_divergence(seed: int, share: float) -> None:
    noise = np.random.default_rng(seed)
    eager = [noisy(curve(), noise, share) for _ in range(2)]
    found = of_repeats([noisy(curve(graphed=True), noise, share) for _ in range(2)], eager)
    assert found.verdict in ("BITWISE", "EQUIVALENT", "INCONCLUSIVE")
    assert share > 0.1 or found.passes, found.reason


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
    assert found.verdict == "DIVERGED"
    assert found.deviation is not None and (found.deviation.step, found.deviation.metric) == (at, metric)


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
    assert not verdict(sides["graphed"], sides["eager"], sides["eager"]).passes


# --- over several runs ----------------------------------------------------------------------------------------------


def shifted(steps: Steps, by: Floats | float, metric: Metric = "loss") -> Steps:
    """Add ``by`` margins to every step. ``by`` is a number or has shape (steps,)."""
    if metric == "loss":
        return replace(steps, loss=steps.loss + by * MARGINS.loss)
    return replace(steps, grad_norm=steps.grad_norm * (1 + by * MARGINS.grad_norm))


@pytest.mark.parametrize("metric", METRICS)
def test_a_mean_near_the_margin_is_not_shown_to_be_within_it(metric: Metric) -> None:
    eager = [shifted(curve(), offset, metric) for offset in (-0.2, 0.2)]
    found = of_repeats([shifted(curve(graphed=True), offset, metric) for offset in (0.3, 0.7)], eager)
    assert found.verdict == "INCONCLUSIVE"
    assert "the mean difference" in found.reason and "not shown" in found.reason
    assert "repeats" in found.advice


def test_a_mean_beyond_the_margin_is_shown_though_no_step_stands_out() -> None:
    noise = np.random.default_rng(8)
    eager = [noisy(curve(), noise, 0.25) for _ in range(2)]
    found = of_repeats([shifted(noisy(curve(graphed=True), noise, 0.25), 1.5) for _ in range(2)], eager)
    assert found.verdict == "DIVERGED"
    assert found.deviation is not None and found.deviation.size < 3e-3


def test_a_single_graphed_run_passes_and_the_reason_says_that_there_was_one() -> None:
    noise = np.random.default_rng(8)
    eager, graphed = ([noisy(curve(graphed=side), noise, 0.1) for _ in range(2)] for side in (False, True))
    assert of_repeats(graphed, eager).reason == ""
    single = of_repeats(graphed[:1], eager)
    assert single.verdict == "EQUIVALENT" and "a single graphed run" in single.reason


def test_a_step_within_the_margin_does_not_pass_where_noise_may_hide_a_larger_difference() -> None:
    noise = np.random.default_rng(8)
    eager, graphed = ([noisy(curve(graphed=side), noise, 0.25 / 2**0.5) for _ in range(2)] for side in (False, True))
    assert of_repeats(graphed, eager).verdict == "EQUIVALENT"
    mean = (eager[0].loss[60] + eager[1].loss[60]) / 2
    near = with_value(graphed[0], 60, "loss", mean + 0.96 * MARGINS.loss)
    found = of_repeats([near, graphed[1]], eager)
    assert found.verdict == "INCONCLUSIVE"
    assert "(eager repeats) may hide a larger one" in found.reason and "deterministic" in found.advice


def test_an_eager_spike_beyond_the_margin_is_inconclusive_and_the_tail_of_passing_noise_is_none() -> None:
    noise = np.random.default_rng(2)
    spike = moved(noisy(curve(), noise, 0.01), 60, loss=1.1 * MARGINS.loss)
    found = of_repeats([noisy(curve(graphed=True), noise, 0.01)] * 2, [noisy(curve(), noise, 0.01), spike])
    assert (
        found.verdict == "INCONCLUSIVE" and "eager repeats differ" in found.reason and "deterministic" in found.advice
    )


def test_what_drifts_towards_the_margin_does_not_pass() -> None:
    drifting = np.linspace(0, 0.9, STEPS)
    found = verdict(shifted(curve(graphed=True), drifting))
    assert found.verdict == "INCONCLUSIVE"
    assert (
        "the loss drifts: the difference changed by 0.00086" in found.reason
        and "will soon leave the margin" in found.reason
    )
    across = verdict(shifted(curve(graphed=True), np.linspace(-0.9, 0.9, STEPS)))
    assert "the loss drifts: the difference changed by 0.0017" in across.reason
    assert "over the window, more than the margin of 0.001" in across.reason
    assert "twice as many steps" in found.advice
    assert verdict(shifted(curve(graphed=True), drifting / 2)).verdict == "EQUIVALENT"
    assert verdict(shifted(curve(graphed=True), drifting[::-1])).verdict == "EQUIVALENT", (
        "what goes back does not leave"
    )


def test_what_blows_up_within_the_margin_does_not_pass() -> None:
    growing = np.where(np.arange(STEPS) < STEPS - 5, 0, 0.9)
    found = verdict(shifted(curve(graphed=True), growing, "grad_norm"))
    assert found.verdict == "INCONCLUSIVE"
    assert "the gradient norm difference grows at the end of the window" in found.reason
    assert "(graphed repeat 0)" in found.reason
    assert verdict(shifted(curve(graphed=True), np.roll(growing, -20), "grad_norm")).verdict == "EQUIVALENT"


def test_one_bad_run_of_several_does_not_hide_in_their_mean() -> None:
    bad = moved(curve(graphed=True), 60, loss=2 * MARGINS.loss)
    found = of_repeats([curve(graphed=True), bad, curve(graphed=True), curve(graphed=True)], [curve()] * 2)
    assert found.verdict == "DIVERGED"
    assert "(graphed repeat 1)" in found.reason


def test_alternating_signs_do_not_hide_in_the_mean() -> None:
    found = verdict(shifted(curve(graphed=True), np.where(np.arange(STEPS) % 2, 2.0, -2.0)))
    assert found.verdict == "DIVERGED"


@pytest.mark.parametrize("which", [(0, 0), (0, 1), (1, 1)])
def test_equal_to_one_of_two_eager_runs_that_differ_is_not_bitwise(which: tuple[int, int]) -> None:
    """Atomic additions may make eager runs end in one of two orders. Graphed runs that all got the first order are no
    evidence."""
    eager = [curve(), moved(curve(), 50, loss=0.5)]
    graphed = [replace(eager[place], phase=curve(graphed=True).phase) for place in which]
    found = of_repeats(graphed, eager)
    assert found.verdict == "INCONCLUSIVE"
    assert found.evidence is not None
    assert (found.evidence.bitwise_prefix, found.evidence.eager_prefix) == (MINIMUM_STEPS, 50 - (CAPTURE + 1))
    assert found.reason == (
        "eager repeats differ among themselves: their loss by up to 0.5, and the margin is 0.001 (graphed repeat 0 equals eager "
        f"repeat {which[0]} bit for bit, graphed repeat 1 equals eager repeat {which[1]} bit for bit, but eager repeats differ)"
    )


def test_where_eager_runs_agree_none_is_said_to_be_the_one_that_was_equalled() -> None:
    found = of_repeats(
        [curve(10, graphed=True), moved(curve(10, graphed=True), 7, loss=1e-5)], [curve(10)] * 2, steps=10
    )
    assert (found.verdict, "bit for bit" in found.reason) == ("INCONCLUSIVE", False)


def test_eager_runs_that_differ_within_the_margin_are_judged_by_it() -> None:
    eager = [curve(), moved(curve(), 50, loss=1e-5)]
    assert of_repeats([curve(graphed=True)] * 2, eager).verdict == "EQUIVALENT"
    short = [replace(curve(20), loss=curve(20).loss + offset) for offset in (0, 1e-5)]
    assert of_repeats([curve(20, graphed=True)], short, steps=20).verdict == "INCONCLUSIVE", "16 steps do not show it"


def test_of_many_cells_each_has_to_be_surer() -> None:
    def found(mean: float, spread: float, looks: int = 1) -> Verdict:
        eager = [shifted(curve(), offset) for offset in (-spread, spread)]
        graphed = [shifted(curve(graphed=True), mean + offset) for offset in (-spread, spread)]
        return of_repeats(graphed, eager, looks=looks)

    sure, unsure = [found(0.01, 0.01) for _ in range(4)], found(0.45, 0.1)
    assert 0.025 < unsure.p < 0.04
    assert [found(0.45, 0.1, looks).verdict for looks in (1, 2)] == ["EQUIVALENT", "INCONCLUSIVE"], "looks share alpha"
    assert [v.verdict for v in judge_family([unsure])] == ["EQUIVALENT"]
    assert {v.verdict for v in judge_family([*sure, unsure])} == {"EQUIVALENT"}, "the last of Holm's steps is at alpha"
    twice = judge_family([unsure, *sure, unsure])
    assert [v.verdict for v in twice] == ["INCONCLUSIVE", *["EQUIVALENT"] * 4, "INCONCLUSIVE"]
    assert "among 6 tested cells" in twice[0].reason and twice[0].advice
    failed = judge_family([verdict(moved(curve(graphed=True), 77, 2e-3)), unsure])
    assert [v.verdict for v in failed] == ["DIVERGED", "INCONCLUSIVE"]
    assert judge_family([unsure], elsewhere=1)[0].verdict == "INCONCLUSIVE", "another cell may fail"
    assert judge_family([sure[0]], elsewhere=9)[0].verdict == "EQUIVALENT"


def noisy_curve(generator: np.random.Generator, size: float, *, graphed: bool = False, drift: float = 0.0) -> Steps:
    """Return a curve with noise of ``size`` in the loss of each step but the first, and ten times as much in the norm."""
    steps = curve(graphed=graphed)
    noise, rise = generator.normal(0.0, size, (2, STEPS)), drift * np.arange(STEPS) / STEPS
    noise[:, 0] = 0.0
    return replace(steps, loss=steps.loss + noise[0] + rise, grad_norm=steps.grad_norm * (1 + 10 * noise[1]))


@pytest.mark.parametrize("repeats", [2, 3])
def test_equal_code_does_not_differ_before_the_capture_by_more_than_its_noise(repeats: int) -> None:
    """Two eager runs are often close in three steps by chance, and a third run is then many times as far from them."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        eager = [noisy_curve(generator, 0.005) for _ in range(repeats)]
        assert (
            check_agreement(eager, [noisy_curve(generator, 0.005, graphed=True)], CAPTURE, MARGINS, equal=False) is None
        )


@pytest.mark.parametrize(("step", "size"), [(0, 0.002), (1, 0.2)])
def test_another_start_is_found_despite_noise(step: int, size: float) -> None:
    """In the first step eager runs are equal, so the margin alone counts there."""
    generator = np.random.default_rng(0)
    eager = [noisy_curve(generator, 0.005) for _ in range(3)]
    other = moved(noisy_curve(generator, 0.005, graphed=True), step, loss=size)
    found = check_agreement(eager, [other], CAPTURE, MARGINS, equal=False)
    assert found and f"at step {step}," in found.reason


def test_noise_that_grows_until_the_end_does_not_hide_another_start() -> None:
    generator = np.random.default_rng(0)
    growth = 1e-5 * np.minimum(10.0 ** (np.arange(STEPS) / 20), 1e4)
    eager = [replace(curve(), loss=curve().loss + growth * generator.normal(size=STEPS)) for _ in range(2)]
    other = moved(curve(graphed=True), 0, loss=0.02)
    found = check_agreement(eager, [other], CAPTURE, MARGINS, equal=False)
    assert found and "at step 0," in found.reason


@pytest.mark.parametrize(("drift", "least", "most"), [(0.0, 29, 30), (0.04, 0, 0)])
def test_noise_beyond_the_margin_explains_a_slight_drift_and_no_large_one(drift: float, least: int, most: int) -> None:
    generator = np.random.default_rng(0)
    explained = 0
    for _ in range(30):
        eager = [noisy_curve(generator, 0.01) for _ in range(3)]
        graphed = [noisy_curve(generator, 0.01, graphed=True, drift=drift) for _ in range(3)]
        explained += of_repeats(graphed, eager).noisy
    assert least <= explained <= most


def test_noise_within_the_margin_explains_no_significant_drift() -> None:
    """The rise of the loss is 1.7 half widths."""
    generator = np.random.default_rng(0)

    def slow(drift: float = 0.0, *, graphed: bool = False) -> Steps:
        noise = generator.normal(size=STEPS)
        for step in range(1, STEPS):
            noise[step] = 0.9 * noise[step - 1] + 0.44 * noise[step]
        steps = curve(graphed=graphed)
        return replace(steps, loss=steps.loss + 2e-4 * noise + drift * np.arange(STEPS) / STEPS)

    eager, graphed = [slow() for _ in range(3)], [slow(0.001, graphed=True) for _ in range(3)]
    found = of_repeats(graphed, eager)
    assert found.evidence and found.evidence.noise_floor and found.evidence.noise_floor.loss < MARGINS.loss
    assert (found.verdict, found.noisy) == ("INCONCLUSIVE", False), found.reason
    assert "the loss drifts" in found.reason
