"""The report of a user's program on a GPU: its model and batch are unknown, and no figure is made of their defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from analysis.report.write_report import write_report
from launch.contract.spec import Command, RunSpec
from tests import records


def test_no_figure_rests_on_a_model_or_a_batch_that_nobody_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_engine = records.workload_spec

    def of_program(*arguments: Any) -> RunSpec:
        spec = of_engine(*arguments)
        unknown = dataclasses.replace(spec.training, global_batch_size=0, sequence_length=0)
        return dataclasses.replace(spec, engine="command", command=Command(run="python train.py"), training=unknown)

    monkeypatch.setattr(records, "workload_spec", of_program)
    sweep = records.write_sweep(tmp_path / "mine", impls=("transformer_engine",), device="cuda")
    write_report(sweep)
    text = (sweep.report / "report.md").read_text()
    assert "train.py" in text and "BITWISE" in text
    assert "tokens/s," not in text and "layers of" not in text and "fp32" not in text.partition("## Provenance")[0]
    assert "TFLOP/s)" not in text
