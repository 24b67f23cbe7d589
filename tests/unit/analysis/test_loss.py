"""Test `python -m analysis.loss` as a process, on files as other frameworks and this one write them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.curves.curve import Curve, CurveError, curve_of, read_rows
from analysis.curves.curve_files import read_curves
from analysis.curves.resolution import resolution
from analysis.loss import main
from analysis.records.steps import Floats
from launch.contract.paths import SweepPaths
from launch.contract.plan import read_plan
from tests.records import AttemptRecord, write_sweep

ROOT = Path(__file__).parents[3]
STEPS = 120
FALLING = 1.5 + 4 * np.exp(-np.arange(STEPS) / 40)
NORMS = 1 + np.exp(-np.arange(STEPS) / 30)


def read_curve(path: Path) -> Curve:
    return curve_of(path, read_rows(path))


def csv(path: Path, loss: Floats = FALLING, norm: Floats | None = NORMS, first: int = 0) -> Path:
    """Write the name of the run in every line, because no two runs write the same file."""
    columns = [np.arange(first, first + len(loss)), loss, *([norm] if norm is not None else [])]
    names = ("step", "loss", "grad_norm")[: len(columns)]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = [",".join((*names, "run")), *(",".join((*map(repr, row), path.stem)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def noisy(path: Path, seed: int, share: float = 0.1, bias: float = 0.0, steps: int = STEPS) -> Path:
    random = np.random.default_rng(seed)
    loss = FALLING[:steps] + (random.normal(0, share, steps) + bias) * 1e-3
    return csv(path, loss, NORMS[:steps] * (1 + random.normal(0, share, steps) * 1e-2))


def judged(capsys: pytest.CaptureFixture[str], eager: Sequence[Path], graphed: Sequence[Path], *more: str) -> str:
    """Return the output, after checking that its first word and the exit code agree."""
    arguments = ["--eager", *map(str, eager), "--graphed", *map(str, graphed), *more]
    code, said = main(arguments), capsys.readouterr().out
    word = said.split()[0]
    assert code == {"BITWISE": 0, "EQUIVALENT": 0, "INCOMPARABLE": 3, "DIVERGED": 3, "INCONCLUSIVE": 4}[word]
    assert "provenance unchecked, replay unproven" in said
    return said


def with_value(values: Floats, at: int, value: float) -> Floats:
    changed = values.copy()
    changed[at] = value
    return changed


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


Change = Callable[[str], str]


def without_line(number: int) -> Change:
    return lambda text: "".join(line for at, line in enumerate(text.splitlines(True), 1) if at != number)


def twice_line(number: int) -> Change:
    return lambda text: "".join(line * (2 if at == number else 1) for at, line in enumerate(text.splitlines(True), 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: "", "g.csv: no step"),
        (lambda text: "\n\n", "g.csv: no step"),
        (lambda text: "step,loss,grad_norm\n", "g.csv: no step"),
        (without_line(1), "g.csv, line 1: no column step; it names"),
        (
            lambda text: text.replace("loss", "eval loss", 1),
            "g.csv, line 1: no column loss; it names 'step', ",
        ),
        (
            lambda text: text.replace("grad_norm", "loss", 1),
            "g.csv, line 1: loss appears more than once",
        ),
        (lambda text: text.replace("grad_norm", "weight_norm", 1), "g.csv: no grad_norm, but"),
        (lambda text: text.replace("run", "iteration", 1).replace("step", "Step", 1), "may both be the step"),
        (lambda text: text.replace(",", ";"), "g.csv, line 1: no column step; it names 'step;loss;"),
        (lambda text: text.replace("\n7,", "\n7,oops", 1), "g.csv, line 9: loss is 'oops"),
        (lambda text: text.replace("\n7,", "\n7,1_", 1), "g.csv, line 9: loss is '1_"),
        (lambda text: text.replace("\n7,", "\n7,,", 1), "g.csv, line 9: 5 values, but the header names 4 columns"),
        (lambda text: text.replace("\n7,", "\n7.5,", 1), "g.csv, line 9: step is '7.5', not a whole number"),
        (lambda text: text.replace("\n7,", "\n,", 1), "g.csv, line 9: step is '', not a number"),
        (lambda text: text.replace("\n7,", "\nnan,", 1), "g.csv, line 9: step is 'nan', not a whole number"),
        (lambda text: text[: len(text) - 30], "g.csv, line 121: 2 values"),
        (lambda text: text + '"', "g.csv, line 122: "),
        (
            lambda text: " [2026-01-01 10:00:00] iteration 1/ 120 | lm loss: 5.5E+00 |\n",
            "g.csv: looks like a log; write",
        ),
        (lambda text: "[rank0]:[titan] - INFO - step: 1  loss: 5.5\n", "g.csv: looks like a log; write"),
        (lambda text: "\x1b[31m[titan] step: 1  loss: 5.5\n", "g.csv: looks like a log; write"),
        (lambda text: '[{"step": 0, "loss": 1.5},', "g.csv: a JSON array; write an object a line"),
        (lambda text: "a,b,c,d,e,f,g,h,i\n" + text, "it names 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', ...\n"),
        (without_line(50), "g.csv: step 48 missing of 120"),
        (without_line(121), "g.csv: step 119 missing of 120"),
        (lambda text: "".join(text.splitlines(True)[:61]), "g.csv: steps 60, 61, 62, 63, 64 and 55 more missing"),
        (twice_line(50), "g.csv: step 48 follows step 48"),
        (lambda text: text.replace("\n7,", "\n8,", 1), "g.csv: step 7 missing of 120; step 8 recorded more than once"),
        (lambda text: text.replace("\n7,", "\nX,").replace("\n8,", "\n7,").replace("\nX,", "\n8,"), "out of order"),
    ],
)
def test_a_file_that_is_no_whole_curve_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, said: str
) -> None:
    eager, graphed = [csv(tmp_path / "e1.csv"), csv(tmp_path / "e2.csv")], csv(tmp_path / "g.csv")
    graphed.write_text(change(graphed.read_text()))
    found = judged(capsys, eager, [graphed])
    assert found.startswith("INCOMPARABLE\n")
    assert said in found


def test_renumbered_steps_are_not_moved_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager = [csv(tmp_path / "e1.csv"), csv(tmp_path / "e2.csv")]
    said = judged(capsys, eager, [csv(tmp_path / "g.csv", first=1)])
    assert said.startswith("INCOMPARABLE") and "step 0 missing" in said
    alike = [csv(tmp_path / f"from_one_{name}.csv", first=1) for name in "abc"]
    assert judged(capsys, alike[:2], alike[2:]).startswith("BITWISE")


def test_steps_may_be_evenly_spaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def every_tenth(name: str, gap: int = 0) -> Path:
        path = tmp_path / name
        rows = (f"{10 * i + (gap if i > 50 else 0)},{float(FALLING[i])!r},{name}" for i in range(STEPS))
        path.write_text("step,loss,run\n" + "\n".join(rows))
        return path

    said = judged(capsys, [every_tenth("e.csv")], [every_tenth("g.csv")], "--capture-step", "35")
    assert said.startswith("BITWISE") and "steps 40 to 1190 (116)" in said
    assert "step 515 follows step 500" in judged(capsys, [every_tenth("e.csv", 5)], [every_tenth("g.csv", 5)])


def test_files_that_cannot_be_read_or_prove_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager, graphed = csv(tmp_path / "e.csv"), csv(tmp_path / "g.csv")
    assert "none.csv: No such file" in judged(capsys, [eager], [tmp_path / "none.csv"])
    assert f"{tmp_path}: Is a directory" in judged(capsys, [eager], [tmp_path])
    assert "given twice" in judged(capsys, [eager], [eager])
    assert "given twice" in judged(capsys, [eager, tmp_path / "." / "e.csv"], [graphed])
    (tmp_path / "link.csv").symlink_to(eager)
    assert "given twice" in judged(capsys, [eager, tmp_path / "link.csv"], [graphed])
    (tmp_path / "hard.csv").hardlink_to(eager)
    assert "given twice" in judged(capsys, [eager], [tmp_path / "hard.csv"])
    copy = tmp_path / "copy.csv"
    copy.write_bytes(eager.read_bytes())
    for before, after in (([eager], [copy]), ([eager, copy], [graphed]), ([eager], [graphed, copy])):
        said = judged(capsys, before, after)
        assert (
            said.startswith("BITWISE")
            and f"copy.csv: the same numbers as {eager}, or those numbers rounded; a copy proves nothing" in said
        )
    graphed.write_bytes("step,loss\n0,1.5\n".encode("utf-16"))
    assert "not UTF-8" in judged(capsys, [eager], [graphed])


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "".join(f"{line},x\n" for line in text.replace("grad_norm", "total_norm").splitlines()),
        lambda text: re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.9f}", text),
        lambda text: re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.6g}", text),
        lambda text: re.sub(r"\d+\.\d+", lambda number: number[0][:9], text),
        lambda text: re.sub(r"\d+\.\d+", lambda number: repr(float(np.float32(number[0]))), text),
    ],
)
def test_a_copy_is_no_second_repeat_however_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change
) -> None:
    eager, graphed, copy = noisy(tmp_path / "e1.csv", 1), noisy(tmp_path / "g.csv", 2), tmp_path / "copy.csv"
    copy.write_text(change(eager.read_text()))
    said = judged(capsys, [eager, copy], [graphed])
    assert said.startswith("INCONCLUSIVE\nthe noise floor is unknown")
    assert f"{copy}: the same numbers as {eager}, or those numbers rounded; a copy proves nothing" in said
    assert judged(capsys, [eager, copy, noisy(tmp_path / "e2.csv", 3)], [graphed]).startswith("EQUIVALENT")


def test_a_copy_neither_proves_nor_hides_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager, graphed, copy = noisy(tmp_path / "e1.csv", 1), noisy(tmp_path / "g.csv", 2), tmp_path / "copy.csv"
    second = noisy(tmp_path / "e2.csv", 3)
    copy.write_text(re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.9f}", eager.read_text()))
    said = judged(capsys, [eager, copy], [graphed])
    assert "Fix: add an eager run with other numbers, or a perturbed one (--perturbed).\n" in said
    perturbed = noisy(tmp_path / "p.csv", 4)
    assert judged(capsys, [eager, copy], [graphed], "--perturbed", str(perturbed)).startswith("EQUIVALENT")
    perturbed.write_bytes(eager.read_bytes())
    assert judged(capsys, [eager, copy], [graphed], "--perturbed", str(perturbed)).startswith("INCONCLUSIVE")
    three = judged(capsys, [eager, copy, second], [graphed])
    assert three.startswith("EQUIVALENT") and "2 eager, 1 graphed" in three
    off = noisy(tmp_path / "off.csv", 2, bias=2.0)
    assert judged(capsys, [eager, copy], [off]).startswith("DIVERGED"), "a copy hides nothing either"
    for runs in (1, 2):
        loud = [noisy(tmp_path / f"loud{run}.csv", 5 + run, 20.0) for run in range(runs)]
        said = judged(capsys, [eager, copy], loud)
        assert said.startswith("INCONCLUSIVE\n") and "the noise floor is unknown" in said and "other numbers" in said
        assert judged(capsys, [eager, copy, second], loud).startswith("DIVERGED")


def test_runs_that_differ_by_rounding_here_and_there_are_no_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has full float32 precision, so neither is the rounded form of the other."""
    single = FALLING.astype(np.float32)
    other = np.where(np.arange(STEPS) % 7 == 0, np.nextafter(single, np.float32(9)), single).astype(float)
    eager = [csv(tmp_path / "e1.csv", single.astype(float)), csv(tmp_path / "e2.csv", other)]
    said = judged(capsys, eager, [csv(tmp_path / "g.csv", other + 1e-6)])
    assert said.startswith("EQUIVALENT") and "2 eager" in said and "same numbers" not in said
    coarser = printed(tmp_path / "coarser.csv", FALLING + noise(1, 3e-5), 4)
    said = judged(
        capsys, [csv(tmp_path / "fine.csv", FALLING, None), coarser], [csv(tmp_path / "h.csv", FALLING + 1e-6, None)]
    )
    assert said.startswith("EQUIVALENT") and "same numbers" not in said


def test_byte_order_marks_line_ends_blank_lines_and_other_columns_are_no_matter(tmp_path: Path) -> None:
    plain = read_curve(csv(tmp_path / "plain.csv")).steps
    text = (tmp_path / "plain.csv").read_text()
    lines = [f"2026-01-01,{line}" for line in text.replace("step,", "step ,").splitlines()]
    other = tmp_path / "other.csv"
    other.write_bytes("\ufeff".encode() + ("\r\n".join(lines) + "\r\n\r\n").encode())
    found = read_curve(other).steps
    for name in ("step", "loss", "grad_norm"):
        assert np.array_equal(getattr(found, name), getattr(plain, name))


def test_json_lines_with_nan_as_text_and_as_constants(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    rows = ['{"step": 0, "loss": "NaN", "grad_norm": 1}', "", '{"step": 1.0, "loss": NaN, "grad_norm": "-Infinity"}\r']
    path.write_text("\n".join(rows))
    steps = read_curve(path).steps
    assert steps.step.tolist() == [0, 1]
    assert np.isnan(steps.loss).all()
    assert steps.grad_norm.tolist() == [1.0, -np.inf]


@pytest.mark.parametrize(
    ("text", "unit"),
    [("2.50", 0.01), ("2", 1), ("1.234E-05", 1e-8), ("nan", 0), ("1e999", 0), ("-1e-9999999999999999999999", 0)],
)
@pytest.mark.parametrize("form", ["step,loss\n0,{}\n", '{{"step": 0, "loss": "{}"}}'])
def test_the_unit_of_a_number_is_that_of_its_last_digit(tmp_path: Path, text: str, unit: float, form: str) -> None:
    (tmp_path / "curve").write_text(form.format(text))
    assert read_curve(tmp_path / "curve").units["loss"].tolist() == [unit]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": 1, "loss": 2', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"step": 1}', "no loss"),
        ('{"loss": 1}', "no step"),
        ('{"step": true, "loss": 1}', "step is True"),
        ('{"step": 1, "loss": null}', "loss is None, not a number"),
        ('{"step": 1, "loss": "much"}', "loss is 'much', not a number"),
        ('{"step": 1, "loss": [1]}', "loss is [1]"),
        ('{"step": 1e300, "loss": 1}', "step is 1e300, not a whole number"),
        ('{"step": 1, "loss": 1' + "0" * 400 + "}", "loss is 1000"),
        ('{"step": 1, "loss": 1.5, "loss": 2.5}', "loss appears more than once"),
    ],
)
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "curve.jsonl"
    path.write_text('{"step": 0, "loss": 1.5}\n' + line + "\n")
    with pytest.raises(CurveError) as error:
        read_curve(path)
    assert str(error.value).startswith(f"{path}, line 2: {said}")


def test_gradient_norms_in_some_lines_only_are_missing_in_the_others(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    path.write_text('{"step": 0, "loss": 1.5, "grad_norm": 1}\n{"step": 1, "loss": 1.5}\n')
    with pytest.raises(CurveError, match=r"line 2: no grad_norm"):
        read_curves([path], [csv(tmp_path / "g.csv")])


def test_gradient_norms_that_begin_late_are_not_left_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def late(name: str, factor: float = 1.0, first: int = 1) -> Path:
        rows = [f'{{"run": "{name}", "step": {i}, "loss": {FALLING[i]:.9g}' for i in range(STEPS)]
        norms = [f', "grad_norm": {norm * factor:.9g}}}' if i >= first else "}" for i, norm in enumerate(NORMS)]
        (tmp_path / name).write_text("\n".join(map("".join, zip(rows, norms, strict=True))))
        return tmp_path / name

    said = judged(capsys, [late("e1"), late("e2")], [late("g", 5.0)])
    assert said.startswith("INCOMPARABLE") and f"{tmp_path / 'e1'}, line 1: no grad_norm, but line 2 has it" in said
    assert judged(capsys, [late("e1", first=0), late("e2", first=0)], [late("g")]).startswith("INCOMPARABLE")
    assert judged(capsys, [late("e1", first=0), late("e2", first=0)], [late("g", 5.0, 0)]).startswith("DIVERGED")


def renamed(paths: Sequence[Path], name: str) -> None:
    for path in paths:
        path.write_text(path.read_text().replace("grad_norm", name, 1))


@pytest.mark.parametrize(
    "name",
    ["Grad_Norm", "gradient_norm", "grad norm", "gradNorm", "train/grad-norm", "gnorm", "total_norm", "norm", "Norm"],
)
def test_a_usual_name_of_the_gradient_norm_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    files = [csv(tmp_path / "e1.csv"), csv(tmp_path / "e2.csv"), csv(tmp_path / "g.csv", norm=5 * NORMS)]
    renamed(files, name)
    said = judged(capsys, files[:2], files[2:])
    assert said.startswith("DIVERGED\nfirst at step 0: the gradient norm")
    assert f"\ncolumns        step, loss, {name}\n" in said
    row = tmp_path / "row.jsonl"
    row.write_text(f'{{"iteration": 0, "lm loss": 1.5, "{name}": 1.0}}\n')
    assert read_curve(row).columns == ("iteration", "lm loss", name)


@pytest.mark.parametrize("name", ["clipped_grad_norm", "grad_norm_2", "layer0/gnorm"])
def test_a_column_like_grad_norm_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    files = [csv(tmp_path / "e1.csv"), csv(tmp_path / "e2.csv"), csv(tmp_path / "g.csv", norm=5 * NORMS)]
    renamed(files, name)
    said = judged(capsys, files[:2], files[2:])
    assert said.startswith("INCOMPARABLE") and f"{name!r} looks like grad_norm" in said


def test_each_file_may_name_its_columns_in_its_own_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [csv(tmp_path / "e1.csv"), csv(tmp_path / "g.csv")]
    renamed(files[1:], "total_norm")
    said = judged(capsys, files[:1], files[1:])
    assert said.startswith("BITWISE")
    assert (
        f"columns        step, loss, grad_norm ({files[0]})\ncolumns        step, loss, total_norm ({files[1]})" in said
    )


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


def printed(path: Path, loss: Floats, decimals: int, norm: Floats | None = None, norm_decimals: int = 9) -> Path:
    """Print with this number of decimals."""
    norms = [""] * len(loss) if norm is None else [f",{value:.{norm_decimals}f}" for value in norm]
    rows = [f"{i},{value:.{decimals}f}{norms[i]},{path.stem}" for i, value in enumerate(loss)]
    path.write_text("\n".join([f"step,loss{'' if norm is None else ',grad_norm'},run", *rows]) + "\n")
    return path


def noise(seed: int, share: float = 1e-4) -> Floats:
    return np.random.default_rng(seed).normal(0, share, STEPS)


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


def test_a_norm_of_minus_one_on_both_sides_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [csv(tmp_path / f"{name}.csv", FALLING, with_value(NORMS, 60, -1.0)) for name in ("e1", "e2", "g")]
    said = judged(capsys, files[:2], files[2:])
    assert said.startswith("INCOMPARABLE") and f"{files[0]}, line 62: grad_norm is '-1.0'" in said


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


def megatron_log(path: Path, skipped: int, named: int | None = None) -> Path:
    """Write a log whose step ``skipped`` has no loss, and where the line of step ``named`` says that loss scaling skipped it."""
    said = (
        " iteration {:8d}/ 120 | learning rate: 3.0E-04 |{} loss scale: 2048.0 | number of skipped iterations: {:3d} |"
    )
    lines = [
        said.format(step, "" if step == skipped else f" lm loss: {loss + 1e-6 * len(path.stem):.6E} |", step == named)
        for step, loss in enumerate(FALLING.tolist(), 1)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("of_graphed", "named", "said"),
    [
        (7, 7, "EQUIVALENT"),
        (8, 8, "e.log: step 7 missing of 120"),
        (7, None, "step 8 follows step 6; steps must be evenly spaced"),
    ],
    ids=["the same step", "another step", "nothing says why"],
)
def test_a_step_that_loss_scaling_skips_in_every_run_is_no_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of_graphed: int, named: int | None, said: str
) -> None:
    eager = [megatron_log(tmp_path / f"{name}.log", 7, named and 7) for name in ("e", "ee")]
    graphed = [megatron_log(tmp_path / f"{name}.log", of_graphed, named) for name in ("ggg", "gggg")]
    assert said in judged(capsys, eager, graphed, "--capture-step", "4")
