"""Test what `plan` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from launch.common.typed_json import from_json
from launch.contract.plan import Margins, Plan
from orchestrator.cli.main import main
from orchestrator.output.plan import print_plan
from orchestrator.plan.memory_check import MemoryCheck
from orchestrator.submit import executor
from orchestrator.submit.batch_script import BatchScript
from tests.planned import CPU_HOST
from tests.unit.orchestrator.cli.command_line import ROOT, SCRIPT, TINY

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_plan_shows_what_runs_and_why_the_rest_does_not(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, path: Path
) -> None:
    assert main(["plan", str(path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    hours = content.pop("gpu_hours")
    assert content.pop("batch_scripts") == []
    forecasts = content.pop("memory")
    assert content.pop("format") == 1 and content.pop("not_checked") == []
    plan = from_json(Plan, content)
    of_gpus = {
        cell.cell_id for cell in plan.cells if cell.state != "rejected" and cell.run_spec.placement.device == "cuda"
    }
    assert forecasts.keys() == {cell_id for cell_id in of_gpus if "command" not in path.read_text()}
    assert hours >= 0
    assert plan.name == path.stem

    assert main(["plan", str(path)]) == 0
    text = capsys.readouterr().out
    ran, rejected, lacking = _parts(text)
    for cell in plan.cells:
        part = {"run": ran, "rejected": rejected, "not_runnable": lacking}[cell.state]
        assert cell.label in part
        assert all(f"[{reason.rule}] {reason.message}" in part and reason.remedy in part for reason in cell.reasons)
        assert all(run_id in ran for run_id in cell.run_ids)
    assert list(elsewhere.iterdir()) == []


def test_plan_says_which_framework_was_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, torchrun = tmp_path / "titan.yaml", tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(torchrun.parent), prepend=":")
    command = (
        "command: {framework: torchtitan, run: torchrun -m torchtitan.train, graphs: {none: [], compiled: [--compile]}}"
    )
    path.write_text(f"name: titan\nengine: command\n{command}\nresources: {{device: cpu}}\nwandb: {{mode: disabled}}\n")
    assert main(["plan", str(path)]) == 0
    said = capsys.readouterr().out
    assert "--training.disable_cuda_graphs" in said
    assert "untested: framework torchtitan has not been run" in said
    recipe = str(ROOT / "recipes" / "megatron_lm_moe.yaml")
    (tmp_path / "pretrain_gpt.py").touch()
    on_cpu = ["--executor", "local", "--only", "cuda_graph.impl=none", "resources.device=cpu"]
    assert main(["plan", recipe, *on_cpu, f"command.workdir={tmp_path}"]) == 0
    assert "untested" not in capsys.readouterr().out, "it has run on an H200"


def test_plan_prints_the_first_batch_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan("x", "", "x.yaml", Margins(), (), (), scheduler="slurm")
    scripts = [BatchScript(f"#SBATCH --nodes={n}\n", ("a", "b"), n, f"srun {n}") for n in range(1, 7)]
    print_plan(plan, 0.0, MemoryCheck(CPU_HOST), scripts)
    text = capsys.readouterr().out
    assert [n for n in range(1, 7) if f"--nodes={n}\n" in text and f"srun {n}\n" in text] == [1, 2, 3]
    assert "--- batch script 2 of 6, for 2 bundles by 2 calls of sbatch ---\n#SBATCH" in text
    assert "... and 3 more batch scripts, for 6 bundles" in text


@pytest.fixture
def without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    executor._check_slurm.cache_clear()
    yield
    executor._check_slurm.cache_clear()


@pytest.mark.usefixtures("without_slurm")
def test_a_profile_alone_makes_the_plan_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    data = ["data.kind=text", "data.path=/on/the/cluster", "data.tokenizer=/on/the/cluster/tokenizer.json"]
    for words in ([], ["--executor", "slurm"]):
        assert main(["plan", TINY, "--cluster", "example", *words, *data]) == 0
        said = capsys.readouterr().out
        assert "#SBATCH --partition=batch\n" in said and "#SBATCH --gres=gpu:2\n" in said
        assert "--container-image=nvcr.io" in said and "[scope.moe_and_router]" in said
        before, _, after = said.partition("\nnot checked, since there is no sbatch on PATH (doctor --cluster NAME")
        assert "partition batch" not in before and "partition batch: whether it is there and up" in after
        assert "files that runs read" in after


@pytest.mark.usefixtures("without_slurm")
def test_a_profiled_plan_shows_the_command_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for words, shown in (((), False), (("profile=nsys",), True)):
        assert main(["plan", TINY, "--cluster", "example", "resources.device=cuda", *words]) == 0
        assert ("# and each rank by: nsys profile --trace=cuda,nvtx" in capsys.readouterr().out) is shown


@pytest.mark.usefixtures("without_slurm")
def test_a_program_that_the_nodes_may_have_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", SCRIPT, "--cluster", "example", "command.workdir=/nowhere"]) == 0
    assert "command.workdir = /nowhere: no such folder on this host; the nodes must" in capsys.readouterr().err


@pytest.mark.usefixtures("without_slurm")
def test_only_plan_does_without_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", TINY, "--cluster", "example"]) == 1
    assert "profiles are for Slurm" in capsys.readouterr().err
    assert main(["plan", TINY, "--executor", "slurm"]) == 1
    assert "slurm: there is no sbatch on PATH\n" in (said := capsys.readouterr().err)
    assert "plan --cluster NAME needs no Slurm" in said


def _parts(text: str) -> tuple[str, str, str]:
    before, _, lacking = text.partition("\nnot runnable on this host:\n")
    ran, _, rejected = before.partition("\nrejected by a rule (no host can run them):\n")
    return ran, rejected, lacking


def test_cells_with_the_same_reasons_are_listed_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY, "sweep.grid.training.seed=[1,2,3]", "--only", "cuda_graph.impl=transformer_engine"]) == 0
    text = capsys.readouterr().out
    assert text.count("[scope.moe_and_router]") == 1
    assert text.count("\n  transformer_engine.") == 6


def test_plan_lists_known_faults(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "qwen3_8l_megatron.yaml")
    for picked, deterministic, is_said in (
        ("local", "true", True),
        ("local", "false", False),
        ("full_iteration", "true", False),
    ):
        settings = [f"training.deterministic={deterministic}", "step_checks=0"]
        assert main(["plan", recipe, *settings, "--only", f"cuda_graph.impl={picked}"]) == 0
        known = capsys.readouterr().out.partition("\nknown to compute wrong results")[2]
        assert ("[megatron.local_inputs]" in known) == is_said == ("\n  local, " in known), (
            "else it is refused for that"
        )


def test_plan_lists_known_faults_of_a_users_program(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "megatron_lm_moe.yaml")
    for words, is_said in (("--position-embedding-type yarn", True), ("", False)):
        settings = [f"command.run=torchrun pretrain_gpt.py --bf16 --no-gradient-accumulation-fusion {words}"]
        main(["plan", recipe, *settings])
        known = capsys.readouterr().out.partition("\nknown to compute wrong results")[2]
        assert ("[megatron.yarn_positions]" in known) == is_said


def test_plan_says_that_no_cell_is_graphed(capsys: pytest.CaptureFixture[str]) -> None:
    for overrides, is_said in (["sweep=null"], True), ([], False), (["--only", "cuda_graph.impl=none"], True):
        assert main(["plan", TINY, "resources.device=cpu", *overrides]) == 0
        assert ("\nno cell is graphed, so nothing will be compared: " in capsys.readouterr().out) == is_said


def test_plan_says_that_steps_are_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps are warm-up, and one captures."""
    head = "103 steps are too few: "
    said = "EQUIVALENT needs 100 steps after the capture: set training.steps=104 or more, or equivalence.mode=quick"
    cases = {
        ("103",): True,
        ("104",): False,
        ("103", "training.deterministic=true"): False,
        ("20", "equivalence.mode=quick"): False,
    }
    for (steps, *rest), is_said in cases.items():
        assert main(["plan", TINY, "resources.device=cpu", f"training.steps={steps}", *rest]) == 0
        out = capsys.readouterr().out
        assert (head in out and said in out) == is_said, (steps, rest)
    with_gpu = str(ROOT / "recipes" / "gpt_oss_5l_megatron.yaml")
    assert main(["plan", with_gpu, "training.steps=103"]) == 0
    out = capsys.readouterr().out
    assert head in out and said.replace("capture", "capture, also with step checks") in out, (
        "a host with GPUs is needed"
    )
    assert main(["plan", SCRIPT, "training.steps=50"]) == 0
    said = capsys.readouterr().out
    assert "50 steps are too few" in said and "mode=quick" not in said, "its program has no step checks"


def test_plan_names_the_cells_that_will_be_inconclusive_and_not_those_that_bits_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, both = tmp_path / "r.yaml", {"training.deterministic": [True, False]}
    path.write_text(
        yaml.safe_dump(
            {"name": "x", "model": "tiny_moe", "training": {"steps": 50, "compile": "whole"}, "sweep": {"grid": both}}
        )
    )
    assert main(["plan", str(path), "cuda_graph.impl=torch_compile", "resources.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "50 steps are too few: torch_compile, deterministic=false will be INCONCLUSIVE unless" in out, out


def test_plan_says_how_many_steps_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for checks in (0, 3):
        settings = ["resources.device=cpu", f"step_checks={checks}"]
        assert main(["plan", str(ROOT / "recipes" / "tiny_moe.yaml"), *settings]) == 0
        assert ("step checks: 3 steps of each graphed run" in capsys.readouterr().out) == (checks > 0)


def test_overrides_are_accepted_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    before = ["plan", TINY, "training.steps=50", "sweep=null", "--json", "--only", "cuda_graph.impl=none"]
    after = ["plan", "--json", TINY, "training.steps=50", "--only", "cuda_graph.impl=none", "sweep=null"]
    plans = []
    for arguments in (before, after):
        assert main(arguments) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1]
    assert [cell["spec"]["training"]["steps"] for cell in plans[0]["cells"]] == [50]


def test_a_plan_within_the_budget_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY, "resources.device=cpu", "--max-gpu-hours", "0"]) == 0
    capsys.readouterr()
