"""Test what rounded curves prove, against the true curves that they were printed from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analysis.curves.curve import curve_of_record
from analysis.records.steps import Floats, Steps
from analysis.verdict.completeness import Curves
from analysis.verdict.curve_difference import sample_of
from analysis.verdict.judge_curves import judge_curves
from analysis.verdict.rounding import judge_rounded
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins
from launch.contract.records.step_metrics import METRICS

STEPS = 120
MARGINS = Margins()
Print = Callable[[Floats], Floats]


def by_format(spec: str) -> Print:
    return lambda values: np.array([float(format(value, spec)) for value in values.tolist()])


def cut_off(decimals: int) -> Print:
    return lambda values: np.floor(values * 10**decimals) / 10**decimals


def as_bfloat16(values: Floats) -> Floats:
    fraction, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(fraction * 256) / 256, exponent))


FORMATS: dict[str, Print] = {
    "bfloat16": as_bfloat16,
    **{spec: by_format(spec) for spec in (*(f".{n}f" for n in range(8)), *(f".{n}g" for n in range(1, 10)))},
    **{f"cut off after {decimals}": cut_off(decimals) for decimals in range(1, 6)},
}


def steps_of(loss: Floats, norm: Floats) -> Steps:
    return Steps(np.arange(len(loss)), loss, norm, loss, np.zeros(len(loss), np.int64), np.full(len(loss), "measure"))


def printed(side: Curves, loss: Print, norm: Print) -> dict[str, Steps]:
    return {name: steps_of(loss(steps.loss), norm(steps.grad_norm)) for name, steps in side.items()}


def judged(eager: Curves, graphed: Curves) -> Verdict:
    """Judge curves of which only the numbers are known."""

    def judge(eager: Curves, graphed: Curves, margins: Margins) -> Verdict:
        return judge_curves(eager, graphed, np.arange(STEPS), 0, margins, learnt=True)

    units = {name: curve_of_record(steps, METRICS).rounded for name, steps in {**eager, **graphed}.items()}
    return judge_rounded(judge, eager, graphed, units, 0, MARGINS)


def agree(eager: Curves, graphed: Curves) -> bool:
    """Return whether no difference of the true curves exceeds its margin."""
    sides = tuple(eager.values()), tuple(graphed.values())
    return all((sample_of(m, *sides, slice(None)).largest <= MARGINS.of(m)).all() for m in METRICS)


def run(random: np.random.Generator, size: float, noise: float, loss: Floats, norm: Floats) -> Steps:
    """Return a falling loss and its norm of about ``size``, with ``noise``, moved by ``loss`` (nats) and ``norm`` (a share)."""
    fall, moves = np.exp(-np.arange(STEPS) / 60), 1 + 0.05 * np.sin(np.arange(STEPS) ** 2)
    losses = size * (0.3 + fall) * moves + random.normal(0, noise, STEPS) + loss
    norms = size / 3 * (0.1 + fall) * moves * (1 + random.normal(0, 10 * noise, STEPS)) * (1 + norm)
    return steps_of(np.abs(losses), np.abs(norms))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([*FORMATS]),
    st.sampled_from([*FORMATS]),
    st.sampled_from([0.01, 0.3, 2.0, 9.0, 110.0]),
    st.sampled_from([0.0, 1e-7, 1e-5, 1e-4, 1e-3]),
    st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.05, 1.2, 3.0, 50.0]),
    st.sampled_from(METRICS),
    st.integers(0, STEPS - 1),
)
@example(0, ".7g", ".0f", 2.0, 0.0, 0.95, "grad_norm", 0)
def test_no_verdict_contradicts_the_true_curves(
    seed: int, loss: str, norm: str, size: float, noise: float, margins_off: float, metric: str, since: int
) -> None:
    random, off = np.random.default_rng(seed), np.where(np.arange(STEPS) >= since, margins_off, 0.0)
    of_loss, of_norm = (off * MARGINS.of(one) * (one == metric) for one in METRICS)
    still = np.zeros(STEPS)
    eager = {f"e{place}": run(random, size, noise, still, still) for place in range(2)}
    graphed = {f"g{place}": run(random, size, noise, of_loss, of_norm) for place in range(1 + seed % 2)}
    formats = FORMATS[loss], FORMATS[norm]
    found = judged(printed(eager, *formats), printed(graphed, *formats))
    if agree(eager, graphed):
        assert found.verdict != "DIVERGED", found
    else:
        assert not found.passes, found


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3, 4, 5]),
    st.sampled_from([2, 3, 4, 5]),
    st.integers(-120, 120),
    st.sampled_from([0.01, 0.4, 3.0, 12.0]),
    st.booleans(),
)
def test_true_curves_may_be_anywhere_that_prints_the_same_digits(
    seed: int, decimals: int, norm_decimals: int, units_off: int, size: float, towards: bool
) -> None:
    """Move the true curves of both sides as far together or apart as their digits allow."""
    random, still, formats = (
        np.random.default_rng(seed),
        np.zeros(STEPS),
        (by_format(f".{decimals}f"), by_format(f".{norm_decimals}f")),
    )
    base = printed({"": run(random, size, 0.0, still, still)}, *formats)[""]
    unit, norm_unit = 10.0**-decimals, 10.0**-norm_decimals
    off = np.where(random.random(STEPS) < 0.5, units_off, 0)
    # Runs of a side are equal, and most differences are a few units.
    shown = {"e0": base, "e1": base}
    moved = {
        "g0": steps_of(formats[0](base.loss + off * unit), formats[1](np.abs(base.grad_norm + off // 9 * norm_unit)))
    }
    found = judged(shown, moved)
    push = 0.49 * np.where(off < 0, -1, 1) * (-1 if towards else 1)

    def true(side: Curves, sign: int) -> dict[str, Steps]:
        return {
            name: steps_of(steps.loss + sign * push * unit, np.abs(steps.grad_norm + sign * push * norm_unit))
            for name, steps in side.items()
        }

    eager, graphed = true(shown, -1), true(moved, 1)
    if agree(eager, graphed):
        assert found.verdict != "DIVERGED", found
    else:
        assert not found.passes, found


@pytest.mark.parametrize(
    ("spec", "margins_off", "noise", "verdict"),
    [
        (".4f", 0.0, 1e-4, "EQUIVALENT"),
        (".6g", 0.0, 1e-4, "EQUIVALENT"),
        (".3f", 0.0, 1e-4, "INCONCLUSIVE"),
        (".3f", 0.0, 0.0, "INCONCLUSIVE"),
        (".4f", 0.9, 0.0, "INCONCLUSIVE"),
        (".4f", 1.1, 0.0, "INCONCLUSIVE"),
        (".4f", 1.4, 0.0, "DIVERGED"),
        (".3f", 20.0, 1e-4, "DIVERGED"),
        (".2f", 200.0, 1e-4, "DIVERGED"),
        ("bfloat16", 500.0, 1e-4, "DIVERGED"),
        (".7g", 0.0, 0.0, "EQUIVALENT"),
        (".9g", 0.0, 0.0, "BITWISE"),
    ],
)
def test_a_verdict_needs_enough_digits(spec: str, margins_off: float, noise: float, verdict: str) -> None:
    random, still = np.random.default_rng(7), np.zeros(STEPS)
    eager = {f"e{place}": run(random, 2.0, noise, still, still) for place in range(2)}
    graphed = {"g": run(random, 2.0, noise, still + margins_off * MARGINS.loss, still)}
    found = judged(*(printed(side, FORMATS[spec], FORMATS[".9g"]) for side in (eager, graphed)))
    assert found.verdict == verdict, found
    if found.verdict == "INCONCLUSIVE":
        assert found.reason.startswith("the loss is recorded in units of 0.00") and "nine digits" in found.fix


def test_omitted_zeros_hide_no_digits() -> None:
    """The first and the last losses are few of their magnitude, and look as if they had fewer digits."""
    fall = np.round(9.9 * np.exp(-np.arange(STEPS) / 52) + 0.01 * np.sin(np.arange(STEPS) ** 2), 4)
    fall[:3], fall[-1] = (11.01, 10.5432, 10.1234), 0.5
    curve = curve_of_record(steps_of(fall, fall), METRICS)
    assert (curve.rounded["loss"] <= 1e-4).all()
