"""What ``plan`` says of GPU memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.contract.outcomes import Expectation
from launch.contract.plan import Cell, Margins, Plan
from launch.contract.spec import spec_to_json
from orchestrator.cli.main import main
from orchestrator.cli.verbs import sweep
from orchestrator.output.memory import forecast_cells
from orchestrator.output.plan import print_plan
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load
from tests.planned import cluster

RECIPES = Path(__file__).parents[4] / "recipes"


def test_cells_that_may_run_out_of_memory_are_named_and_not_withheld(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell that was measured came near the memory of its GPU."""
    cells = expand(load(RECIPES / "gpt_oss_120b.yaml", []), "cuda")
    expected = Expectation("CUDA_OOM", "warmup")
    planned = [Cell(c.spec.cell_id, c.label, "", "", spec_to_json(c.spec), "run", (), c.expect, ()) for c in cells]
    plan = Plan("x", "", "x.yaml", Margins(), (replace(planned[0], expect=expected), *planned[1:]), ())
    monkeypatch.setattr(sweep, "run_sweep", lambda *words, **options: 0)
    warnings = {}
    for gib in (None, 80, 141):
        target = cluster(gpu_memory_gib=gib)
        print_plan(plan, 0.0, target, forecast_cells(plan))
        monkeypatch.setattr(sweep, "plan_recipe", lambda arguments, target=target: (plan, target, "slurm"))
        assert main(["sweep", "gpt_oss_120b"]) == 0
        found = capsys.readouterr()
        assert found.out.count(" GiB  ") == len(cells)
        reason = "may run out of memory: it needs at least"
        warnings[gib] = found.out.count(reason), found.err.count(reason)
    unexpected = len(cells) - 1
    assert warnings == {None: (0, 0), 80: (unexpected, unexpected), 141: (0, 0)}


def explain(capsys: pytest.CaptureFixture[str], cell: str, recipe: str = "qwen3_8l_parallel", *words: str) -> str:
    code = main(["plan", recipe, *words, "--explain", "memory", cell])
    found = capsys.readouterr()
    return found.err if code else found.out


def test_plan_explains_the_memory_of_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "torch.attn, ep=4")
    assert text.startswith("torch.attn, ep=4: ") and "\n  optimizer state " in text
    terms = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(terms) > 12 and all(line.endswith("]") for line in terms)
    assert explain(capsys, "torch.attn", "qwen3_8l_parallel", "--only", "parallelism.ep=4") == text


def test_what_cannot_be_explained_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'nothing' is 0 cells of the recipe" in explain(capsys, "nothing")
    several = explain(capsys, "torch.attn")
    assert "'torch.attn' is 2 cells" in several and "label or id: torch.attn, ep=4; torch.attn, tp=2" in several
    assert "its ranks are on CPUs" in explain(capsys, "eager, dp=1", "tiny_moe", "resources.device=cpu")
    assert "cannot work: " in explain(capsys, "transformer_engine", "tiny_moe", "--only", "parallelism.dp=1")
    assert main(["plan", "tiny_moe", "--explain", "time", "eager"]) == 1
    assert "write --explain memory CELL" in capsys.readouterr().err
