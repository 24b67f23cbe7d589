"""Test charts and their pictures: what they show, and that nothing is cut off."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from analysis.report.charts import EAGER, Box, MemoryChart, TimeChart, charts_of
from analysis.report.plots import draw
from analysis.sweep.judge_sweep import judge_workload
from launch.contract.plan import read_plan
from tests.records import write_sweep


@pytest.mark.parametrize("label", ["A0", "AB12"])
def test_a_name_has_room_beside_its_box(label: str) -> None:
    chart = TimeChart("ms", (Box("A0", EAGER, (1, 2, 3, 4, 5), 9), Box(label, 0, (1, 2, 3, 4, 5), 9)))
    left = imread(io.BytesIO(draw(chart)), format="png")[:, :2, :3]
    assert (left == 1).all(), "letters reach the edge of the picture"


def test_a_gpu_has_its_memory_as_a_waterfall(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, device="cuda")
    plan = read_plan(sweep)
    memory = charts_of(judge_workload(sweep, plan, plan.cells[0].workload_id), plan.margins)["memory"]
    assert isinstance(memory, MemoryChart)
    for bars in memory.bars:
        *parts, whole = [height or 0.0 for height in bars.heights]
        assert bars.floors == (0.0, *(pytest.approx(sum(parts[: place + 1])) for place in range(3)), 0.0)
        assert whole == pytest.approx(sum(parts))
    assert [bars.heights[2] for bars in memory.bars] == [0.0, 0.25], "only graphs have a pool"


def test_the_unknown_state_of_a_users_program_has_no_bar(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, device="cuda")
    plan = read_plan(sweep)
    results = []
    for result in judge_workload(sweep, plan, plan.cells[0].workload_id):
        assert result.memory and result.memory.parts
        parts = replace(result.memory.parts, state=0)
        results.append(replace(result, memory=replace(result.memory, parts=parts)))
    memory = charts_of(results, plan.margins)["memory"]
    assert isinstance(memory, MemoryChart) and memory.columns == (
        "state and activations",
        "graph pool",
        "outside",
        "in all",
    )
    assert all(len(bars.heights) == len(bars.floors) == 4 for bars in memory.bars)
