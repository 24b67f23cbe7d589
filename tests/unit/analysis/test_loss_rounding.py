"""Test curves in files whose numbers are rounded, clipped or huge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.curves.resolution import resolution
from analysis.records.steps import Floats
from tests.unit.analysis.curve_files import FALLING, NORMS, STEPS, csv, judged, noise, noisy, printed, with_value


@pytest.mark.parametrize(("value", "steps"), [(1.0, STEPS), (0.0, STEPS), (1.0, STEPS // 2 + 1)])
def test_a_norm_that_hardly_varies_is_no_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, steps: int
) -> None:
    """Such a norm was clipped, or never computed."""
    norms = np.concatenate([np.full(steps, value), NORMS[steps:]])
    files = [csv(tmp_path / f"{name}.csv", FALLING + noise(i), norms) for i, name in enumerate(("e1", "e2", "g"))]
    for graphed in (files[2:], [csv(tmp_path / "equal.csv", FALLING + noise(0), norms)]):
        said = judged(capsys, files[:1], graphed)
        assert said.startswith(f"INCOMPARABLE\n{files[0]}: grad_norm is {value:g} at {steps} of 120 steps")
        assert "leave the column out of all files" in said
    varied = csv(tmp_path / "varied.csv", FALLING + noise(3), (value or 1) * (1 + np.linspace(0, 1e-3, STEPS)))
    assert f"{files[2]}: grad_norm is" in judged(capsys, [varied], files[2:])
    assert judged(capsys, files[:2], [csv(tmp_path / "off.csv", FALLING, 1 + NORMS)]).startswith("DIVERGED")


def test_a_norm_that_varies_by_rounding_alone_is_no_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [FALLING + noise(seed, 1e-5) for seed in range(3)]
    files = [csv(tmp_path / f"{i}.csv", loss, 1 + noise(i, 3e-7)) for i, loss in enumerate(losses)]
    said = judged(capsys, files[:2], files[2:])
    assert said.startswith(f"INCOMPARABLE\n{files[0]}: grad_norm is 1 at 120 of 120 steps")
    files = [csv(tmp_path / f"{i}.csv", loss, 1 + noise(9, 1e-3) + noise(i)) for i, loss in enumerate(losses)]
    assert judged(capsys, files[:2], files[2:]).startswith("EQUIVALENT")


SLOPE = 2 + 0.5 * np.exp(-np.arange(STEPS) / 400)


@pytest.mark.parametrize("decimals", [1, 2, 3])
@pytest.mark.parametrize("curve", [np.full(STEPS, 2.0213), SLOPE])
@pytest.mark.parametrize("bias", [0.0, 2e-3])
def test_what_is_printed_too_coarsely_shows_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], decimals: int, curve: Floats, bias: float
) -> None:
    for seed in range(0, 12, 3):
        losses = [curve + noise(seed), curve + noise(seed + 1), curve + noise(seed + 2) + bias]
        files = [printed(tmp_path / name, loss, decimals) for name, loss in zip(("e1", "e2", "g"), losses, strict=True)]
        said = judged(capsys, files[:2], files[2:])
        assert said.startswith("INCONCLUSIVE\n")
        assert (
            f"in units of {10**-decimals:g} (" in said
            and "beyond its margin of 0.001" in said
            and "print nine digits" in said
        )


def as_bfloat16(values: Floats) -> Floats:
    fraction, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(fraction * 256) / 256, exponent))


COARSE: dict[str, Callable[[Floats], Floats]] = {
    "bfloat16": as_bfloat16,
    "the mean of four in bfloat16": lambda values: as_bfloat16(4 * values) / 4 + np.resize([0, 1 / 512], len(values)),
    "two decimals": lambda values: np.round(values, 2),
    "three decimals": lambda values: np.round(values, 3),
}


@pytest.mark.parametrize("form", ["{:.6f}", "{:.8f}", "{!r}"])
@pytest.mark.parametrize("curve", [FALLING, SLOPE, np.full(STEPS, 2.0213)], ids=["falling", "slope", "still"])
@pytest.mark.parametrize("values", COARSE)
def test_coarse_numbers_are_coarse_however_many_digits_they_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: str, curve: Floats, form: str
) -> None:
    files = []
    for seed, name in enumerate(("e1", "e2", "g")):
        losses = COARSE[values](curve + noise(seed, 5e-3)).tolist()
        rows = [f"{i},{form.format(loss)}" for i, loss in enumerate(losses)]
        files.append(tmp_path / name)
        files[-1].write_text("\n".join(["step,loss", *rows]))
    said = judged(capsys, files[:2], files[2:])
    assert said.startswith("INCONCLUSIVE\nthe loss is recorded in units of 0.0"), said


OTHER_UNITS: dict[str, Callable[[Floats], Floats]] = {
    "bits": lambda values: as_bfloat16(values) / np.log(2),
    "bits a byte": lambda values: as_bfloat16(values) * 0.3712345,
    "perplexity": lambda values: np.exp(as_bfloat16(values)),
    **{
        f"the mean of {runs}": lambda values, runs=runs: np.mean(
            [as_bfloat16(values + 0.3 * run) for run in range(runs)], axis=0
        )
        for runs in (3, 5, 6, 7, 24)
    },
}


@pytest.mark.parametrize("form", ["{:.6f}", "{!r}"])
@pytest.mark.parametrize("units", OTHER_UNITS)
def test_numbers_of_a_coarse_format_stay_coarse_in_other_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], units: str, form: str
) -> None:
    """Noise far below the format's unit hardly shows. When it does, it shows as a whole unit."""
    for seed in range(0, 8, 4):
        files = []
        for run in range(4):
            losses = np.float32(OTHER_UNITS[units](FALLING + noise(99, 0.05) + noise(seed + run, 2e-5)))
            rows = [f"{i},{form.format(float(loss))},{run}" for i, loss in enumerate(losses)]
            files.append(tmp_path / f"{run}.csv")
            files[-1].write_text("\n".join(["step,loss,run", *rows]))
        assert judged(capsys, files[:2], files[2:]).startswith("INCONCLUSIVE\nthe loss is recorded in units of ")


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(["{!r}", "{:.6f}", "{:.5f}", "{:.9g}", "{:.4f}"]), st.booleans())
def test_full_precision_is_never_called_coarse(seed: int, form: str, still: bool) -> None:
    random = np.random.default_rng(seed)
    curve = random.uniform(0.5, 12) * (1 if still else np.exp(-np.arange(STEPS) / random.uniform(20, 400)))
    texts = [form.format(float(value)) for value in np.float32(curve + random.normal(0, 1e-3, STEPS))]
    values, units = np.array(texts, float), np.array([10.0 ** -len(text.partition(".")[2]) for text in texts])
    assert np.quantile(resolution(values, units), 0.8) <= (1e-4 if form == "{:.4f}" else 1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "sizes", [[1.7e308, 1e300, 1e308, 3.0], [5e-324, 1e-323, 3e-310, 1e-300], [0.0, -3.0, np.nan, np.inf]]
)
def test_numbers_of_any_size_have_a_resolution(sizes: list[float]) -> None:
    values = np.array(sizes)
    for unit in (0.0, 5e-324, 1e-16, 1e300):
        assert (resolution(values, np.full(4, unit)) >= unit).all()


def test_what_is_far_beyond_diverges_however_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager = [printed(tmp_path / name, SLOPE, 2) for name in ("e1", "e2")]
    off = np.where(np.arange(STEPS) < 60, 0.01, 0.5)
    said = judged(capsys, eager, [printed(tmp_path / "g", SLOPE + off, 2)])
    assert said.startswith("DIVERGED\nfirst at step 60")
    last = printed(tmp_path / "nan", with_value(SLOPE, 80, float("nan")), 2)
    assert judged(capsys, eager, [last]).startswith("DIVERGED\nfirst at step 80")


def test_gradient_norms_are_printed_finely_enough_for_their_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(size: float, decimals: int, factor: float = 1.0) -> str:
        norms = [size * SLOPE / 2.3 * (1 + noise(seed, 1e-3)) * (factor if seed == 2 else 1) for seed in range(3)]
        files = [printed(tmp_path / f"{i}", FALLING + noise(i), 6, norm, decimals) for i, norm in enumerate(norms)]
        return judged(capsys, files[:2], files[2:])

    coarse = said(0.0396, 3, 1.02)
    assert coarse.startswith("INCONCLUSIVE\nthe gradient norm is recorded in units of 0.001 (")
    assert said(2.0, 3).startswith("EQUIVALENT")
    assert said(0.0396, 6).startswith("EQUIVALENT")
    assert said(0.0396, 6, 1.03).startswith("DIVERGED")
    assert said(0.0396, 3, 5.0).startswith("DIVERGED")
    assert "grad_norm is 0 at 120 of 120 steps" in said(3e-4, 3), "of 0.000 and 0.001 none is off"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("{!r}", ("BITWISE", "BITWISE")),
        ("{:.9g}", ("BITWISE", "BITWISE")),
        ("{:.8e}", ("BITWISE", "BITWISE")),
        ("{:.7g}", ("EQUIVALENT", "INCONCLUSIVE")),
        ("{:.5f}", ("EQUIVALENT", "INCONCLUSIVE")),
    ],
)
def test_bits_need_nine_digits_though_trailing_zeros_may_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, words: tuple[str, str]
) -> None:
    def written(name: str) -> Path:
        losses = (FALLING * 10).astype(np.float32).tolist()
        losses[20] = 2.5 if "g" in form or "r" in form else losses[20]
        rows = [f'{{"run": "{name}", "step": {i}, "loss": {form.format(loss)}}}' for i, loss in enumerate(losses)]
        (tmp_path / name).write_text("\n".join(rows))
        return tmp_path / name

    files = [written("e"), written("g")]
    assert judged(capsys, files[:1], files[1:]).startswith(f"{words[0]}\n")
    assert judged(capsys, files[:1], files[1:], "--loss-margin", "0").startswith(f"{words[1]}\n")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e200, 1e300])
def test_the_square_of_a_huge_number_may_overflow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: float
) -> None:
    eager = [noisy(tmp_path / f"e{seed}.csv", seed) for seed in range(2)]
    graphed = [csv(tmp_path / f"g{i}.csv", with_value(FALLING, 80, size), (1 + i) * size * NORMS) for i in range(2)]
    assert judged(capsys, eager, graphed).startswith("DIVERGED\nfirst at step 0: the gradient norm is ")


def test_huge_gradient_norms_do_not_hide_behind_an_overflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager = [csv(tmp_path / f"e{i}.csv", FALLING, np.full(STEPS, 1.5e308)) for i in range(2)]
    said = judged(capsys, eager, [csv(tmp_path / "g.csv", FALLING, np.full(STEPS, 1 / 3))])
    assert said.startswith("DIVERGED") and "0.333333333 graphed and 1.5e+308 eager" in said


@pytest.mark.parametrize("form", ["{:.3f}", "{!r}"], ids=["all zeros", "no trailing zeros"])
def test_omitted_zeros_hide_no_difference_of_many_margins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    curves = [np.round(FALLING + noise(seed, 1e-4), 3) for seed in range(3)]
    for curve in curves:
        curve[[10, 30]] = np.round(FALLING[[10, 30]], 1)
    losses = [curves[0], curves[1], curves[2] + 0.05]
    files = []
    for name, loss in zip(("e1", "e2", "g"), losses, strict=True):
        files.append(tmp_path / name)
        rows = [f"{step},{form.format(round(value, 3))}" for step, value in enumerate(loss.tolist())]
        files[-1].write_text("\n".join(["step,loss", *rows]))
    assert judged(capsys, files[:2], files[2:]).startswith("DIVERGED\n")
