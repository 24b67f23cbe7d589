"""Test the shipped script, and the bug that it has on request."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "recipes" / "user_script.py"


def losses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> list[float]:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--steps", "6", *flags])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return [json.loads(line)["loss"] for line in capsys.readouterr().out.splitlines()]


def test_stale_inputs_are_wrong_after_the_capture_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, stale = losses(monkeypatch, capsys), losses(monkeypatch, capsys, "--stale-inputs")
    assert stale[:4] == right[:4]
    assert all(abs(one - other) > 1e-4 for one, other in zip(stale[4:], right[4:], strict=True))
