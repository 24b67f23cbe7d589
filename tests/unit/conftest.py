"""A picture is drawn once: the same chart gives the same bytes, and most sweeps of tests/records.py have the same charts."""

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
    """For whoever draws through ``analysis.report.plots`` in this process; a chart that no test had before is drawn as
    ever."""
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
    """All that ``value`` holds, to the bit."""
    if is_dataclass(value):
        return type(value), tuple(content(held) for held in vars(value).values())
    if isinstance(value, tuple):
        return tuple(content(held) for held in value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return repr(value)
