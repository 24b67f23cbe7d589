"""benchmarks/cost.py compares what two versions of a sweep cost."""

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
    assert set(whole.step_times) == set(whole.verdicts)
    next((tmp_path / "one/runs").glob("*/attempts/1/outcome.json")).unlink()
    with pytest.raises(SystemExit, match="1 runs have not ended"):
        read_cost(SweepPaths(tmp_path / "one"))


def test_a_verdict_that_differs_is_named() -> None:
    before = Cost(100.0, {"a": 2.0}, {"a": "BITWISE", "b": "DIVERGED"})
    now = Cost(50.0, {"a": 1.0}, {"a": "BITWISE", "b": "EQUIVALENT"})
    text, equal = compare([before], [now])
    assert "ratio: 0.50" in text and "median step: 0.500" in text and "b: DIVERGED to EQUIVALENT" in text
    assert not equal and compare([before], [before])[1]
