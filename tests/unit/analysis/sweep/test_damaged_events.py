"""Test that damaged outcomes and events are problems of their attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.records.load import load
from analysis.sweep.judge_cells import compare_cells, exit_code
from tests.records import Edit, write_sweep
from tests.unit.analysis.sweep.judged_cell import for_graphed, graphed_result, judged, shorten


def changed_outcome(**fields: Any) -> Edit:
    """Return an edit that gives the outcome values of other types than a record has."""
    return lambda run: run.end(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in ("outcome", "phase", "infrastructure") for value in ("NaN", [], {}, 1.5, None)),
        *(
            (field, value)
            for field in ("allocation", "message", "remedy", "failure_class", "node")
            for value in ([], 1, None)
        ),
        *((field, value) for field in ("started", "ended") for value in ("NaN", [], -1, 1e308, True, None)),
        *((field, value) for field in ("rank", "exit_code") for value in ("NaN", [], 1.5, True)),
    ],
)
def test_an_outcome_of_another_shape_cannot_be_read(tmp_path: Path, field: str, value: Any) -> None:
    sweep = write_sweep(tmp_path, steps=20, edit=for_graphed(changed_outcome(**{field: value})))
    result = graphed_result(sweep)
    assert (result.outcome, result.verdict and result.verdict.verdict) == ("NOT ENDED", "INCOMPARABLE")
    assert f"{result.runs[0].run_id}/attempts/1/outcome.json cannot be read: " in result.integrity.unsound_records[0]


def change_events(kind: str, change: Callable[[dict[str, Any]], object]) -> Edit:
    return lambda run: [None for event in run.events[0] if event["kind"] == kind and change(event)] and None


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("proof", lambda e: e["graphs"].update(capture_seconds="NaN"), "capture_seconds is 'NaN'"),
        ("capture", lambda e: e["graphs"].update(capture_seconds="Infinity"), "capture_seconds is 'Infinity'"),
        ("capture", lambda e: e["graphs"].update(capture_seconds=1e308), "capture_seconds is 1e+308"),
        ("capture", lambda e: e["graphs"].update(mechanism=[1]), "mechanism is [1], not text"),
        ("phase", lambda e: e.update(phase=[]), "[] is not a phase"),
        ("phase", lambda e: e.update(phase={}), "{} is not a phase"),
        ("phase", lambda e: e["memory"].update(host_rss=-1), "host_rss is -1, not a number of bytes"),
        ("phase", lambda e: e["memory"].update(host_rss=10**30), "not a number of bytes"),
    ],
)
def test_a_damaged_event_is_a_problem_of_its_attempt(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    found = judged(tmp_path, for_graphed(change_events(kind, change)))
    assert found.verdict is not None and found.verdict.verdict == "INCOMPARABLE"
    assert said in found.verdict.reason and found.integrity.unsound_records


def test_an_eager_cell_alone_is_not_believed_without_its_steps(tmp_path: Path) -> None:
    for name, change in (("short", shorten), ("nan", lambda run: run.metrics[7].update(loss=float("nan")))):
        sweep = write_sweep(tmp_path / name, impls=(), edit=change)
        assert exit_code(compare_cells(load(sweep))) == 3
    assert exit_code(compare_cells(load(write_sweep(tmp_path / "sound", impls=())))) == 0
