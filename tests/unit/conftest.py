"""Make reports cheap: draw few charts, each of them once, and start no process for a report.

Most sweeps of tests/records.py have the same charts, and so the same bytes.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Hashable, Iterator
from contextlib import redirect_stderr
from dataclasses import is_dataclass
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from analysis.report import __main__ as report_command
from analysis.report import plots, write_report
from analysis.report.charts import Chart
from orchestrator.sweeps import report_process

DRAW, DRAWN = plots.draw, dict[Hashable, bytes]()


@pytest.fixture(scope="session", autouse=True)
def charts() -> Iterator[None]:
    """Draw no chart, apart from tests that use ``drawn``. The others read what a report says, and get the key of a
    chart's content as its file.

    A report unfreezes all objects when it ends. Each later collection would scan the imports again, for seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", undrawn)
        patch.setattr(write_report, "gc", SimpleNamespace(freeze=int, collect=int, unfreeze=int))
        yield


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the charts of this test's reports."""
    monkeypatch.setattr(plots, "draw", draw_once)


def draw_once(chart: Chart) -> bytes:
    key = content(chart)
    if key not in DRAWN:
        DRAWN[key] = DRAW(chart)
    return DRAWN[key]


def undrawn(chart: Chart) -> bytes:
    return hashlib.sha256(repr(content(chart)).encode()).digest()


@pytest.fixture(scope="session", autouse=True)
def reports_in_this_process() -> Iterator[None]:
    """Write the reports of commands in this process. A separate process needs a second to import pandas and matplotlib.

    test_report_process.py and tests/integration start that process.
    """

    def run(command: list[str], **_: object) -> CompletedProcess[str]:
        if "launch.track" in command:
            return CompletedProcess(command, 0, stdout="")
        with redirect_stderr(io.StringIO()) as said:
            code = report_command.main(command[3:])
        return CompletedProcess(command, code, stderr=said.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_process, "subprocess", SimpleNamespace(run=run, DEVNULL=None, PIPE=None))
        yield


def content(value: Any) -> Hashable:
    """Return a key of all content of ``value``, exact to the bit."""
    if is_dataclass(value):
        return type(value), tuple(content(held) for held in vars(value).values())
    if isinstance(value, tuple):
        return tuple(content(held) for held in value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return repr(value)
