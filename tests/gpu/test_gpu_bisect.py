"""On a GPU, test that a failing set of captured parts is bisected to the smallest set that fails, and to the first
layer that differs. The recipe injects the fault.

Sweeps have a handful of runs, of ten seconds each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, read_plan
from orchestrator.bisect.scope_candidates import list_candidates

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
RECIPE = """\
name: scopes
model: {{preset: {preset}}}
training: {{steps: 16, sequence_length: 64, micro_batch_size: 2, global_batch_size: 4, precision: {precision}, learning_rate: 1.0e-3}}
cuda_graph: {{impl: {impl}, scope: [{scope}]}}
fault: {{kind: {fault}, step: 8}}
repeats: 2
resources: {{gpus_per_node: 1, device: cuda, minutes_per_run: 3, hang_minutes: 2}}
wandb: {{mode: disabled}}
"""


def orchestrator(store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", *arguments, "--executor", "local", "--store", str(store)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def failing(folder: Path, preset: str, scope: str, fault: str, impl: str = "torch", precision: str = "bf16") -> Cell:
    """Return the only graphed cell of a sweep that fails by ``fault``."""
    recipe = RECIPE.format(preset=preset, impl=impl, scope=scope, fault=fault, precision=precision)
    (folder / "scopes.yaml").write_text(recipe)
    swept = orchestrator(folder / "store", "sweep", str(folder / "scopes.yaml"))
    assert swept.returncode == 3, swept.stdout + swept.stderr
    (cell,) = (cell for cell in read_plan(SweepPaths(folder / "store" / "scopes")).cells if cell.graphed)
    return cell


def bisected(folder: Path, preset: str, scope: str, fault: str) -> tuple[dict[str, Any], SweepPaths]:
    """Return the answer for the only graphed cell of a sweep that fails by ``fault``, and the sweep that found it."""
    cell = failing(folder, preset, scope, fault)
    done = orchestrator(folder / "store", "bisect", "scopes", cell.run_ids[0], "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [one["label"] for one in found["sets"]] == [one.cuda_graph.label for one in list_candidates(cell.run_spec)]
    (own,) = (path for path in (folder / "store").iterdir() if path.name.startswith("scopes-bisect-"))
    again = orchestrator(folder / "store", "bisect", "scopes", cell.cell_id, "--json")
    assert json.loads(again.stdout) == found and "to start" not in again.stderr, "all of it is on disk"
    return found, SweepPaths(own)


def test_numbers_that_part_are_pinned_on_the_smallest_set(tmp_path: Path) -> None:
    """A capture freezes a scalar. Every captured part has this fault."""
    found, own = bisected(tmp_path, "tiny_dense", "attn, mlp", "frozen_scalar")
    assert (found["smallest"]["label"], [one["label"] for one in found["also"]]) == ("torch.attn", ["torch.mlp"])
    assert found["failure"].startswith("DIVERGED")
    assert [one["status"] for one in found["sets"]] == ["fails", "fails", None]
    assert (own.report / "report.md").is_file() and (own.report / "bisect.md").is_file()


def test_a_capture_that_fails_is_pinned_on_the_smallest_set(tmp_path: Path) -> None:
    found, _ = bisected(tmp_path, "tiny_moe", "attn, moe_router, moe_preprocess", "item_in_capture")
    assert found["failure"].startswith("CAPTURE_FAILED in capture")
    assert (found["smallest"]["label"], [one["label"] for one in found["also"]]) == ("torch.attn", ["torch.moe_router"])
    assert [one["status"] for one in found["sets"]] == ["fails", "fails", None, None, None]


@pytest.mark.parametrize(
    ("impl", "scope", "layer"),
    [
        ("torch", "attn", "decoder layer 0"),
        ("transformer_engine", "mlp", "decoder layer 0"),
        ("full_iteration", "", "embedding"),
    ],
)
def test_numbers_that_part_are_pinned_on_the_first_layer_captured(
    tmp_path: Path, impl: str, scope: str, layer: str
) -> None:
    """The frozen scalar is the same in the capture's own step, and 1% smaller in the next. In bf16 this may pass as
    rounding. Only a whole step captures the embedding."""
    cell = failing(tmp_path, "tiny_dense", scope, "frozen_scalar", impl, "fp32")
    done = orchestrator(tmp_path / "store", "bisect", "scopes", cell.run_ids[0], "--layers", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    step = cell.run_spec.cuda_graph.warmup_steps + 1
    assert (found["first"]["step"], found["first"]["ranks"]) == (step, [0])
    first = found["first"]["result"]
    assert (first["layer"], first["micro_batch"], first["is_gradient"]) == (layer, 0, False)
    again = orchestrator(tmp_path / "store", "bisect", "scopes", cell.cell_id, "--layers", "--json")
    assert json.loads(again.stdout) == found and "to start" not in again.stderr, "all of it is on disk"
