"""Test the exhibit of stale fp8 scales with imitated modules of Transformer Engine: who updates scales, and what a verdict says."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # Optimizers import it. A process can do so only once, and the imitation forgets what is imported in it.

from analysis.loss import main
from tests.numerics.transformer_engine_on_cpu import FP8GlobalStateManager, Linear, transformer_engine_on_cpu

SCRIPT = Path(__file__).parents[2] / "recipes" / "exhibits" / "fp8_scales.py"
STEPS, CAPTURE_STEP, LAYERS = 60, 20, 4


def run(flags: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the program prints."""
    FP8GlobalStateManager.reset()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--steps", str(STEPS), *flags])
    with transformer_engine_on_cpu():
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return capsys.readouterr().out


def perturb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the outputs of all products by one unit in the last place, from the first step after the capture on."""
    calls, forward = count(), Linear.forward

    def moved(self: Linear, *given: Any, **named: Any) -> torch.Tensor:
        output: torch.Tensor = forward(self, *given, **named)
        up = torch.full_like(output, torch.inf)
        return output + (torch.nextafter(output, up) - output).detach() * (next(calls) > LAYERS * CAPTURE_STEP)

    monkeypatch.setattr(Linear, "forward", moved)


def test_replays_outside_of_the_context_keep_the_scales_of_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"eager": (), "within": ("--graph",), "outside": ("--graph", "--outside")}
    printed = {name: run(given, monkeypatch, capsys) for name, given in flags.items()}
    perturb(monkeypatch)
    printed["perturbed"] = run((), monkeypatch, capsys)
    eager, within, outside, _ = ([json.loads(line) for line in lines.splitlines()] for lines in printed.values())
    assert within == eager and outside[: CAPTURE_STEP + 1] == eager[: CAPTURE_STEP + 1]
    for name, lines in printed.items():
        for repeat in (1, 2):
            (tmp_path / f"{name}{repeat}.jsonl").write_text(lines)
    for name, verdict in (("within", "BITWISE"), ("outside", "DIVERGED")):
        repeats = {side: [str(tmp_path / f"{side}{repeat}.jsonl") for repeat in (1, 2)] for side in ("eager", name)}
        others = ["--perturbed", str(tmp_path / "perturbed1.jsonl"), "--capture-step", str(CAPTURE_STEP)]
        main(["--eager", *repeats["eager"], "--graphed", *repeats[name], *others])
        assert capsys.readouterr().out.split()[0] == verdict
