"""Test the verdicts of `python -m analysis.loss`, as a process too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.loss import main
from analysis.records.steps import Floats
from launch.contract.paths import SweepPaths
from launch.contract.plan import read_plan
from tests.records import AttemptRecord, write_sweep
from tests.unit.analysis.curve_files import FALLING, NORMS, STEPS, csv, judged, noise, noisy, with_value

ROOT = Path(__file__).parents[3]


def test_as_a_process(tmp_path: Path) -> None:
    """Other tests call ``main``, which returns the exit codes of other verdicts."""
    files = [noisy(tmp_path / f"{name}.csv", seed) for seed, name in enumerate(("e1", "e2"))]
    files += [noisy(tmp_path / "g1.csv", 2, bias=2.0), noisy(tmp_path / "g2.csv", 3, bias=2.0)]
    names = ["--eager", *map(str, files[:2]), "--graphed", *map(str, files[2:])]
    command = [sys.executable, "-m", "analysis.loss", *names, "--capture-step", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.startswith("DIVERGED\n")
    for said in (
        "steps 4 to 119 (116); 2 eager, 2 graphed", "2 noise floor", "3 mean", "4 drift", "provenance unchecked",
    ):  # fmt: skip
        assert said in done.stdout


def test_equal_files_are_bitwise_with_one_eager_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = judged(capsys, [csv(tmp_path / "e.csv")], [csv(tmp_path / "g.csv")])
    assert said.startswith("BITWISE\n")
    assert "first 120 of 120 steps" in said


def test_one_eager_file_is_inconclusive_at_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = judged(capsys, [csv(tmp_path / "e.csv")], [noisy(tmp_path / "g.csv", 1, 1e-6)])
    assert said.startswith("INCONCLUSIVE\n")
    assert "second eager run" in said
    perturbed = noisy(tmp_path / "p.csv", 2, 1e-6)
    alone = judged(capsys, [tmp_path / "e.csv"], [tmp_path / "g.csv"], "--perturbed", str(perturbed))
    assert alone.startswith("INCONCLUSIVE") and "second eager run" in alone


def test_the_window_begins_after_the_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager = [csv(tmp_path / "e1.csv"), csv(tmp_path / "e2.csv")]
    graphed = [csv(tmp_path / "g.csv", with_value(FALLING, 9, 7.0))]
    assert judged(capsys, eager, graphed).startswith("DIVERGED\nfirst at step 9")
    assert judged(capsys, eager, graphed, "--capture-step", "8").startswith("DIVERGED")
    assert judged(capsys, eager, graphed, "--capture-step", "9").startswith("BITWISE")
    behind = judged(capsys, eager, graphed, "--capture-step", "119")
    assert behind.startswith("INCOMPARABLE\n--capture-step 119: no step is after 119; the last one is 119\n")
    late = judged(capsys, eager, graphed, "--capture-step", "15")
    assert late.startswith("INCOMPARABLE\nthe graphed run differs from the eager runs before its capture")
    assert "at step 9" in late
    near = [noisy(tmp_path / "n.csv", 1, 0.01)]
    short = judged(capsys, eager, near, "--capture-step", "40")
    assert short.startswith("INCONCLUSIVE") and "over 79 steps" in short


def test_margins_can_be_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager = [csv(tmp_path / "e1.csv"), csv(tmp_path / "e2.csv", FALLING + noise(1, 1e-9))]
    graphed = [csv(tmp_path / "g.csv", FALLING + 1.5e-3)]
    assert judged(capsys, eager, graphed).startswith("DIVERGED")
    assert judged(capsys, eager, graphed, "--loss-margin", "0.002").startswith("EQUIVALENT")
    for margin in ("nan", "inf", "-1", "true", "x", ""):
        with pytest.raises(SystemExit, match="1"):
            main(["--eager", "e", "--graphed", "g", f"--loss-margin={margin}"])
        assert f"--loss-margin: a margin is a finite number, 0 or larger, not {margin}\n" in capsys.readouterr().err


def test_divergence_needs_more_than_the_perturbed_run_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager = [csv(tmp_path / "e1.csv"), csv(tmp_path / "e2.csv")]
    graphed, perturbed = [noisy(tmp_path / "g.csv", 1, bias=2.0)], noisy(tmp_path / "p.csv", 2, bias=-2.0)
    assert judged(capsys, eager, graphed).startswith("DIVERGED")
    said = judged(capsys, eager, graphed, "--perturbed", str(perturbed))
    assert said.startswith("INCONCLUSIVE\neager repeats and the perturbed run differ among themselves")
    short = csv(tmp_path / "short.csv", FALLING[:60], NORMS[:60])
    assert "a perturbed run must be as long" in judged(capsys, eager, graphed, "--perturbed", str(short))


@pytest.mark.parametrize(
    ("begins", "growth", "digits", "word"),
    [
        (1e-7, 1.5, 17, "INCONCLUSIVE"),
        (1e-7, 30.0, 17, "INCONCLUSIVE"),
        (1e-7, 1.5, 5, "INCONCLUSIVE"),
        (1e-7, 1e5, 17, "DIVERGED"),
        (1e-3, 1.5, 17, "DIVERGED"),
        (1e-3, 1.5, 5, "DIVERGED"),
        (0.5, 1.5, 17, "DIVERGED"),
    ],
)
def test_what_begins_as_rounding_and_grows_is_no_divergence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], begins: float, growth: float, digits: int, word: str
) -> None:
    """Equal eager files do not show how far training amplifies rounding. Few digits do not show how it began."""

    def rounded(name: str, factor: float) -> Path:
        off = factor * np.minimum(begins * growth ** np.minimum(np.arange(STEPS), 60), 1.0)
        return csv(tmp_path / name, np.array([float(f"{loss:.{digits}g}") for loss in FALLING + off]), None)

    eager = [rounded(name, 0.0) for name in ("e1.csv", "e2.csv")]
    said = judged(capsys, eager, [rounded("g1.csv", 1.0), rounded("g2.csv", 0.9)])
    assert said.startswith(word)
    assert ("no larger than rounding" in said) == (word == "INCONCLUSIVE")


@pytest.mark.parametrize("step", ["-5", "1.5", "", "x"])
def test_a_capture_step_is_a_whole_number(capsys: pytest.CaptureFixture[str], step: str) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["--eager", "e", "--graphed", "g", "--capture-step", step])
    assert f"--capture-step: a step is a whole number, 0 or larger, not {step}\n" in capsys.readouterr().err


VARIED = FALLING + np.random.default_rng(9).normal(0, 0.2, STEPS)
"""Losses of batches that change."""


@pytest.mark.parametrize(
    ("losses", "norms", "norms_later", "word"),
    [
        (VARIED, NORMS, 0, "INCOMPARABLE"),
        (FALLING, NORMS, 0, "INCOMPARABLE"),
        (FALLING, 1 + 0.01 * NORMS, 1, "DIVERGED"),
        (VARIED, None, 0, "INCOMPARABLE"),
        (FALLING, None, 0, "DIVERGED"),
    ],
    ids=("batches", "one batch", "a lost update", "batches, no norms", "one batch, no norms"),
)
@pytest.mark.parametrize("later", [1, -1])
def test_losses_shown_at_other_steps_are_told_from_a_lost_update(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    losses: Floats,
    norms: Floats | None,
    norms_later: int,
    word: str,
    later: int,
) -> None:
    """An update that a graph loses shifts losses and norms of one batch, the latter by less than a margin."""

    def run(name: str, seed: int, graphed: bool) -> Path:
        shown = losses * (1 + np.random.default_rng(seed).normal(0, 1e-6, STEPS))
        of_side = norms if norms is None or not graphed else np.roll(norms, -norms_later * later)
        shown[5:-5] = np.roll(shown, -later * graphed)[5:-5]
        return csv(tmp_path / name, shown[:-5], None if of_side is None else of_side[:-5])

    eager, graphed = ([run(f"{side}{n}.csv", n + 2 * (side == "g"), side == "g") for n in (0, 1)] for side in "eg")
    said = judged(capsys, eager, graphed, "--capture-step", "5")
    assert said.startswith(word), said
    which = ("eager's of step 7" if later == 1 else "eager's of step 6") if word == "INCOMPARABLE" else ""
    assert which in said and ("g0.csv: the graphed run shows other steps' losses" in said) is bool(which)


def test_loss_alone_is_judged_and_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [csv(tmp_path / f"e{seed}.csv", FALLING + noise(seed, 1e-9), None) for seed in (1, 2)]
    said = judged(capsys, files, [csv(tmp_path / "g.csv", FALLING + 1e-5, None)])
    assert said.startswith("EQUIVALENT") and "gradient norm: not in the files" in said
    with_norm = [csv(tmp_path / "n.csv")]
    assert "no grad_norm, but" in judged(capsys, files, with_norm)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", ["loss", "grad_norm"])
def test_what_is_not_finite_never_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, column: str
) -> None:
    def at_60(name: str) -> Path:
        loss, norm = (with_value(values, 60, value) for values in (FALLING, NORMS))
        return csv(tmp_path / name, loss if column == "loss" else FALLING, NORMS if column == "loss" else norm)

    sound = [csv(tmp_path / "e1.csv"), csv(tmp_path / "e2.csv")]
    assert judged(capsys, sound, [at_60("g.csv")]).startswith("DIVERGED\nfirst at step 60")
    assert judged(capsys, [*sound, at_60("e3.csv")], [csv(tmp_path / "g1.csv")]).startswith("INCOMPARABLE\n")
    assert judged(capsys, [at_60("e4.csv"), at_60("e5.csv")], [at_60("g3.csv")]).startswith("INCOMPARABLE\n")


def test_a_run_that_ended_at_its_nan_diverges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = csv(tmp_path / "g.csv", with_value(FALLING, 60, float("nan"))[:61], NORMS[:61])
    said = judged(capsys, [csv(tmp_path / "e1.csv"), csv(tmp_path / "e2.csv")], [stopped])
    assert said.startswith("DIVERGED\nfirst at step 60")


def test_where_nothing_is_trained_the_output_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    still = np.full(STEPS, 1 / 3)
    said = judged(capsys, [csv(tmp_path / "e.csv", still)], [csv(tmp_path / "g.csv", still)])
    assert said.startswith("BITWISE\nthe eager loss does not move over the window") and "shows little" in said


def test_an_output_that_cannot_be_written_is_no_verdict(tmp_path: Path) -> None:
    files = ["--eager", str(csv(tmp_path / "e.csv")), "--graphed", str(csv(tmp_path / "g.csv"))]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "analysis.loss", *files],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "the verdict could not be written: No space left on device\n")


def metrics_files(sweep: SweepPaths) -> dict[bool, list[Path]]:
    """Return the metrics.jsonl of the runs, by whether they are graphed."""
    plan = read_plan(sweep)
    return {c.graphed: [sweep.run(run_id).attempt(1).metrics for run_id in c.run_ids] for c in plan.cells}


def test_metrics_of_runs_are_read_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def late_nan(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 1:
            run.metrics[80]["loss"] = float("nan")

    files = metrics_files(write_sweep(tmp_path / "same"))
    assert judged(capsys, files[False], files[True], "--capture-step", "3").startswith("BITWISE")
    files = metrics_files(write_sweep(tmp_path / "nan", edit=late_nan))
    assert judged(capsys, files[False], files[True], "--capture-step", "3").startswith("DIVERGED\nfirst at step 80")
