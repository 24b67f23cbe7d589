"""Test that benchmarks/cost.py compares the cost of two versions of a sweep."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cost import Cost, compare, read_cost
from launch.contract.paths import SweepPaths
from orchestrator.cli.main import main
from tests.records import write_sweep


def test_a_sweep_costs_the_seconds_of_all_its_attempts(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "one")
    with pytest.raises(FileNotFoundError):
        read_cost(sweep)
    main(["report", "one", "--store", str(tmp_path)])
    whole = read_cost(sweep)
    assert set(whole.verdicts.values()) == {"reference", "BITWISE"} and whole.seconds > 0
    assert set(whole.step_times) == set(whole.verdicts) == set(whole.settings)
    next((tmp_path / "one/runs").glob("*/attempts/1/outcome.json")).unlink()
    with pytest.raises(SystemExit, match="1 runs have not ended"):
        read_cost(SweepPaths(tmp_path / "one"))


def cost(seconds: float, step: float, verdict: str, word: str, **fields: str) -> Cost:
    """Return the cost of a sweep of two cells, whose labels spell a boolean as ``word``."""
    settings = {f"a, fused={value}": {"training.fused": flag, **fields} for value, flag in ((word, "true"), ("x", "1"))}
    return Cost(
        seconds, dict.fromkeys(settings, step), dict(zip(settings, (verdict, "BITWISE"), strict=True)), settings
    )


def test_a_verdict_that_differs_is_named_however_labels_are_spelled() -> None:
    before = cost(100.0, 2.0, "DIVERGED", "True")
    same, other = (cost(50.0, 1.0, verdict, "true", added="1") for verdict in ("DIVERGED", "EQUIVALENT"))
    text, equal = compare([before], [other])
    assert "ratio: 0.50" in text and "median step: 0.500" in text
    assert "verdicts: a, fused=True: DIVERGED to EQUIVALENT" in text and not equal
    assert compare([before], [same])[1] and compare([before], [before])[1]


def test_a_cell_that_is_gone_is_a_difference() -> None:
    before = cost(100.0, 2.0, "BITWISE", "true")
    gone = replace(before, settings={"a, fused=x": before.settings["a, fused=x"]})
    text, equal = compare([before], [gone])
    assert "a, fused=true: BITWISE to not there" in text and not equal
