"""On a GPU, cause every failure of the gallery. Test that each is named correctly, and ends no other run.

There are some thirty runs of ten seconds each, spread over all GPUs of the host.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from analysis.records.load import load
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import compare_cells
from launch.contract.paths import SweepPaths
from tests.gallery import CLASS_OF

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "recipes" / "failure_gallery.yaml"
FP8_SCALES = ROOT / "recipes" / "exhibits" / "fp8_scales.yaml"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gallery")


def swept(store: Path, name: str, arguments: Sequence[str] = (), recipe: Path = GALLERY) -> tuple[CellResult, ...]:
    """Return the results of the cells of ``recipe``."""
    command = ["-m", "orchestrator", "sweep", str(recipe), f"name={name}", *arguments, "--executor", "local"]
    done = subprocess.run(
        [sys.executable, *command, "--store", str(store)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 3, 4), done.stdout + done.stderr
    return compare_cells(load(SweepPaths(store / name)))


def test_every_failure_is_told_for_what_it_is(store: Path) -> None:
    results = swept(store, "failure_gallery")
    assert {result.cell.state for result in results} == {"run"}, [result.cell.reasons for result in results]
    graphed = {result.cell.workload_id for result in results if result.cell.graphed}
    wrong = []
    for result in results:
        (run,) = result.runs
        assert run.attempt is not None, result.cell.label
        outcome, twin = run.attempt.outcome, not result.cell.graphed and result.cell.workload_id in graphed
        kind = result.spec.fault.kind
        expected = "" if twin else CLASS_OF[kind] if kind != "none" else "ATTENTION_BACKEND"
        if not outcome.matches(result.cell.expect) or outcome.failure_class != expected:
            wrong.append(f"{result.cell.label}: expected {expected or 'no failure'}, found {outcome}")
        assert bool(outcome.remedy) == bool(outcome.failure_class)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["frozen_scalar", "frozen_draw"])
def test_what_a_graph_froze_fails_nothing_and_is_found_by_its_numbers(kind: str, store: Path) -> None:
    eager, graphed = swept(store, kind, ["repeats=2", "--only", f"fault.kind={kind}"])
    assert (eager.outcome, graphed.outcome) == ("COMPLETED", "COMPLETED")
    assert eager.loss.noise_floor is not None and eager.loss.noise_floor.loss < 1e-3, "eager runs agree with each other"
    assert graphed.graphs.replay is not None and graphed.graphs.replay.proven, graphed.graphs
    assert graphed.verdict is not None and graphed.verdict.verdict == "DIVERGED", graphed.verdict
    assert graphed.verdict.deviation is not None and 4 <= graphed.verdict.deviation.step < 8, graphed.verdict


def test_scales_that_a_graph_froze_are_found_by_the_numbers_and_scales_of_replays_are_right(store: Path) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    eager, within, outside = swept(store, "fp8_scales", recipe=FP8_SCALES)
    assert eager.outcome == within.outcome == outside.outcome == "COMPLETED"
    for graphed, passes in ((within, True), (outside, False)):
        assert graphed.graphs.replay is not None and graphed.graphs.replay.proven, graphed.graphs
        assert graphed.verdict is not None and graphed.verdict.passes == passes, graphed.verdict
    assert outside.verdict is not None and outside.verdict.verdict == "DIVERGED", outside.verdict
