"""Test that a copied file proves nothing."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.unit.analysis.curve_files import FALLING, STEPS, Change, csv, judged, noise, noisy, printed


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
    assert "Fix: add an eager run with other numbers, or a perturbed one (--perturbed of analysis.loss).\n" in said
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
