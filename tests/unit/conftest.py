"""Draw each chart once: most sweeps of tests/records.py have the same charts, and so the same bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest

from analysis.report import plots
from analysis.report.charts import Chart


@pytest.fixture(scope="session", autouse=True)
def drawn_once() -> Iterator[None]:
    """Cache what ``analysis.report.plots`` draws in this process, by the chart's content."""
    draw, drawn = plots.draw, dict[Hashable, bytes]()

    def draw_once(chart: Chart) -> bytes:
        key = content(chart)
        if key not in drawn:
            drawn[key] = draw(chart)
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", draw_once)
        yield


def content(value: Any) -> Hashable:
    """Return all that ``value`` holds, to the bit, as a key."""
    if is_dataclass(value):
        return type(value), tuple(content(held) for held in vars(value).values())
    if isinstance(value, tuple):
        return tuple(content(held) for held in value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return repr(value)
