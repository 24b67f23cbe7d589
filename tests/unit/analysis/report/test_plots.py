"""Pictures of charts: that nothing of them is cut off."""

from __future__ import annotations

import io

import pytest
from matplotlib.image import imread

from analysis.report.charts import EAGER, Box, TimeChart
from analysis.report.plots import draw

LABELS = (
    "eager",
    "transformer_engine.attn.moe_router.moe_preprocess, compile=elementwise",
    "full_iteration.optimizer, moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True",
)


@pytest.mark.parametrize("label", LABELS)
def test_a_label_has_room_beside_its_box(label: str) -> None:
    chart = TimeChart("ms", (Box("eager", EAGER, (1, 2, 3, 4, 5), 9), Box(label, 0, (1, 2, 3, 4, 5), 9)))
    left = imread(io.BytesIO(draw(chart)), format="png")[:, :2, :3]
    assert (left == 1).all(), "letters reach the edge of the picture"
