"""Test the files that `python -m analysis.loss` reads, as other frameworks and this one write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from analysis.curves.curve import Curve, CurveError, curve_of, read_rows
from analysis.curves.curve_files import read_curves
from tests.unit.analysis.curve_files import FALLING, NORMS, STEPS, Change, csv, judged, with_value


def read_curve(path: Path) -> Curve:
    return curve_of(path, read_rows(path))


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


def test_a_norm_of_minus_one_on_both_sides_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [csv(tmp_path / f"{name}.csv", FALLING, with_value(NORMS, 60, -1.0)) for name in ("e1", "e2", "g")]
    said = judged(capsys, files[:2], files[2:])
    assert said.startswith("INCOMPARABLE") and f"{files[0]}, line 62: grad_norm is '-1.0'" in said


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
