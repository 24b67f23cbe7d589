"""Test the command line: help, exit codes and error messages."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from analysis import loss
from analysis.report.__main__ import main as write_report
from launch.common.atomic_files import read_json, write_json
from launch.common.file_lock import Lock
from launch.common.typed_json import from_json
from launch.contract.bundle import BundleOrder
from launch.contract.exit_codes import exit_codes_of
from launch.contract.plan import Limits, Margins, Plan, Reason, read_plan
from orchestrator.cli.main import main
from orchestrator.cli.verbs import VERBS
from orchestrator.output import states
from orchestrator.output.plan import print_plan
from orchestrator.plan.memory_check import MemoryCheck
from orchestrator.submit import executor
from orchestrator.submit.batch_script import BatchScript
from tests.integration.host import cpu_seconds_of_children
from tests.planned import CPU_HOST
from tests.records import AttemptRecord, Edit, Extra, unchanged, workload_spec, write_sweep

ROOT = Path(__file__).parents[4]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TINY = str(ROOT / "recipes" / "tiny_moe.yaml")
SCRIPT = str(ROOT / "recipes" / "user_script.yaml")
HEAVY = ("torch", "pyarrow", "numpy", "omegaconf", "yaml", "submitit", "rich", "matplotlib", "wandb")


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ORCHESTRATOR_STORE", raising=False)
    return tmp_path


# --- help -----------------------------------------------------------------------------------------------------------


def test_help_answers_at_once_and_imports_nothing_heavy() -> None:
    """The promise is 0.2 s on a free machine. CPU seconds hardly depend on other processes."""
    seconds = []
    for _ in range(3):
        before = cpu_seconds_of_children()
        done = python("-m", "orchestrator", "--help")
        seconds.append(cpu_seconds_of_children() - before)
        assert done.returncode == 0
    assert min(seconds) < 0.5
    loaded = python("-X", "importtime", "-m", "orchestrator", "--help").stderr
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in loaded.splitlines()}
    assert "orchestrator" in modules
    assert modules.isdisjoint(HEAVY)


def test_a_plan_imports_neither_torch_nor_pyarrow() -> None:
    code = f"import sys; from orchestrator.cli.main import main; main(['plan', {TINY!r}]); print(sorted(sys.modules))"
    loaded = python("-c", code).stdout.splitlines()[-1]
    assert "'orchestrator.plan.planner'" in loaded
    for module in ("torch", "pyarrow", "matplotlib", "wandb", "submitit"):
        assert f"'{module}'" not in loaded


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_shows_an_example_and_the_exit_codes(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"] if verb else ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    example = re.search(r"example:\n  python -m orchestrator (\w+)", text)
    assert example is not None and example[1] in ((verb,) if verb else VERBS)
    codes = re.findall(r"^  (\d+)  ", text.partition("exit codes:\n")[2], re.MULTILINE)
    assert codes == [str(code.value) for code in exit_codes_of(verb or "sweep")]


def test_the_example_of_plan_works(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    example = re.search(r"example:\n  python -m orchestrator (plan .*)", capsys.readouterr().out)
    assert example is not None and main(example[1].split()) == 0


# --- plan -----------------------------------------------------------------------------------------------------------


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


# --- wrong input ----------------------------------------------------------------------------------------------------

WRONG = {
    "plan nowhere.yaml": "nowhere.yaml: no such file",
    "plan {tiny} repeats=0 training.step=5": "command line: repeats = 0: must be at least 1\n"
    "    write such a number, or leave it out for the default\n"
    "error: command line: training.step = 5: no such field\n    did you mean 'steps'?\n",
    "plan {tiny} training.steps=-5": "error: command line: training.steps = -5: must be at least 1\n"
    "    write such a number, or leave it out for the default\n",
    "plan {script} training.steps=-5": "command line: training.steps = -5: must be at least 1",
    "plan {script} command.workdir=/nowhere": "error: command.workdir = /nowhere: no such folder on this host\n",
    "plan {script} command.run=trainn": "error: command.run: no program trainn on this host\n    correct the first word of command.run",
    "plan {script} command.run=./none": "/recipes: no file ./none in it on this host\n    correct the path of the script in command.run",
    "plan {tiny} sweep.grid.training.adam_beta1=[0.9,1]": "adam_beta1[1] = 1: must be at least 0 and below 1",
    "plan {tiny} --only cuda_graph.imp=none": "did you mean 'cuda_graph.impl'?",
    "plan {tiny} --only impl=none": "did you mean 'cuda_graph.impl'?",
    "plan {tiny} --only training.seed=7": "no cell has training.seed=7",
    "sweep {tiny} training=": "not a mapping of fields",
    "plan {tiny} --executor local --cluster x": "--cluster: x: profiles are for Slurm",
    "advise {tiny} --only training.seed=7": "no cell has training.seed=7",
    "advise nowhere.yaml": "nowhere.yaml: no such file",
    "status nowhere": "no sweep 'nowhere'",
    "report nowhere": "no sweep 'nowhere'",
    "cancel nowhere": "no sweep 'nowhere'",
    "resume nowhere": "no sweep 'nowhere'",
    "logs nowhere": "begins with 'nowhere'",
    "logs nowhere/eager": "no sweep 'nowhere' in folder /",
    "compare nowhere.json {tiny}": "nowhere.json: no such file\n    report SWEEP --golden FILE writes a golden file",
    "compare nowhere {tiny}": "no sweep 'nowhere'",
    "compare {tiny} {tiny}": "tiny_moe.yaml: not JSON",
    "bisect nowhere torch": "no sweep 'nowhere'",
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_input_is_exit_code_1_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, command: str
) -> None:
    assert main(command.format(tiny=TINY, script=SCRIPT).split()) == 1
    caught = capsys.readouterr()
    assert WRONG[command] in caught.err
    assert caught.err.startswith("error: ")
    assert caught.out == ""
    assert list(elsewhere.iterdir()) == []


def test_a_module_that_this_interpreter_lacks_is_refused_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trainn").mkdir()
    for folder, code in ((str(ROOT), 1), (str(tmp_path), 0)):
        words = [f"command.workdir={folder}", "command.run='{python} -m trainn.x --steps {steps}'"]
        assert main(["plan", SCRIPT, *words]) == code
        said = "command.run: no module trainn for {python} -m trainn.x on this host"
        assert (said in capsys.readouterr().err) == bool(code)


def test_a_program_is_looked_for_where_it_starts(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "train"
    program.parent.mkdir()
    program.touch(mode=0o755)
    for folder, code in ((str(tmp_path), 0), (str(ROOT), 1)):
        words = [f"command.workdir={folder}", "command.run=train", "environment.PATH=bin:/usr/bin"]
        assert main(["plan", SCRIPT, *words]) == code


def test_another_python_beside_this_one_may_have_other_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("python3.11", "python3.12"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3.12"))
    for name, code in (("python3.11", 0), ("python3.12", 1)):
        assert main(["plan", SCRIPT, f"command.run={name} -m trainn.x", f"environment.PATH={tmp_path}"]) == code


def test_a_pasted_number_of_steps_is_warned_of_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    recipe, pasted = ROOT / "recipes" / "megatron_lm_moe.yaml", "command.run=torchrun t.py --train-iters 500000"
    assert main(["plan", str(recipe), pasted, "--cluster", "example"]) == 0
    assert "command.run: --train-iters 500000, but a run has " in capsys.readouterr().err


def test_commands_that_run_two_scripts_are_told_apart(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    for graphed, said in (("b.sh", True), ("a.sh --graphs", False)):
        assert main(["wrap", "--eager", "sh a.sh", "--graphed", f"sh {graphed}"]) == 1
        assert ("--eager runs a.sh and --graphed b.sh, so " in (caught := capsys.readouterr().err)) is said
        assert f"{elsewhere}: no file a.sh in it on this host" in caught


def test_wrap_speaks_of_its_own_options_and_of_the_recipe_that_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    assert main(["wrap", "--eager", "sh a.sh {step}", "--graphed", "sh a.sh {step} --graphs"]) == 1
    assert "error: wrap:4: command.run = " in capsys.readouterr().err
    monkeypatch.setattr("orchestrator.cli.verbs.sweep.run_sweep", lambda *_, **__: 0)
    (elsewhere / "a.sh").touch()
    assert main(["wrap", "--eager", "sh a.sh", "--graphed", "sh a.sh --graphs", "--steps", "20"]) == 0
    assert "set --steps 104 or more\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["sweep", TINY], ["wrap", "--eager", "sh a.sh", "--graphed", "sh a.sh --graphs"]], ids=lambda c: c[0]
)
def test_more_repeats_are_the_same_command_with_the_option_of_its_plan(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path, command: list[str]
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr("orchestrator.cli.verbs.sweep.run_sweep", lambda _, plan, *__, **___: plans.append(plan) or 0)
    (elsewhere / "a.sh").touch()
    assert main(command) == 0
    assert main([*command, *f"{plans[0].repeats_option}7".split()]) == 0
    assert plans[0].name == plans[1].name
    assert {len(cell.repeat_ids) for cell in plans[1].cells if cell.run_ids} == {7}


def test_commands_are_another_sweep_after_a_file_that_they_name_has_changed(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Otherwise the verdict of the runs on disk would be shown for what the program is now."""
    settings, names = tmp_path_factory.mktemp("settings") / "train.yaml", []
    for text in ("lr: 1", "lr: 1", "lr: 2"):
        settings.write_text(text)
        eager = f"sh a.sh --config={settings}"
        assert main(["wrap", "--eager", eager, "--graphed", f"{eager} --graphs"]) == 1
        caught = capsys.readouterr()
        names.append(re.findall(r"name: (wrap_\w+)", caught.out + caught.err))
    assert names[0] == names[1] != names[2] and names[2]


def test_a_secret_in_a_command_is_not_shown(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    token = "HF_TOKEN=hidden333 sh a.sh"
    for eager, said in ((token, "looks like a secret"), ("sh a.sh", "HF_TOKEN <HF_TOKEN> only graphed; ")):
        assert main(["wrap", "--eager", eager, "--graphed", f"{token} --graphs"]) == 1
        caught = capsys.readouterr()
        assert said in caught.err and "hidden" not in caught.out + caught.err


def special_file(kind: str) -> str:
    """Make a file of a ``kind`` that no command reads."""
    path = Path(kind)
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(kind)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    return kind


@pytest.mark.parametrize("kind", ["/dev/null", "socket", "sparse", "fifo", "folder"])
@pytest.mark.parametrize("command", ["plan {}", "compare {} {}", "analysis.loss --eager {} --graphed {}"])
def test_files_without_an_end_are_one_message(capsys: pytest.CaptureFixture[str], kind: str, command: str) -> None:
    verb, *words = command.format(*[special_file(kind)] * 2).split()
    code = loss.main(words) if verb == "analysis.loss" else main([verb, *words])
    said = "".join(capsys.readouterr())
    assert code == (3 if verb == "analysis.loss" else 1)
    assert kind in said and "Traceback" not in said
    if verb != "compare" or kind != "folder":
        reason = {"sparse": "larger than ", "folder": "s a directory"}.get(kind, "not a regular file")
        assert reason in said


def test_a_secret_cannot_name_a_recipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PWD", "hidden-from-all")
    Path("hidden-from-all.yaml").write_bytes(Path(TINY).read_bytes())
    assert main(["plan", "hidden-from-all.yaml"]) == 1
    said = "".join(capsys.readouterr())
    assert said.startswith("error: <DB_PWD>.yaml: its name looks like a secret (the value of $DB_PWD)")


def test_a_message_spells_no_secret_in_another_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "a\\b'c\"hidden"
    monkeypatch.setenv("QUOTED_PW", secret)
    for words in (["plan", TINY, "--only", secret], ["plan", TINY, "--cluster", secret], ["compare", secret, "x"]):
        assert main(words) == 1
        said = "".join(capsys.readouterr())
        assert "<QUOTED_PW>" in said and "hidden" not in said


BYTES = "a\udcff"
"""Python turns an argument with the byte 0xff, which is not UTF-8, into this text."""


@pytest.mark.parametrize(
    "command",
    [f"plan {{tiny}} name={BYTES}", f"plan {BYTES}", f"status {BYTES}", f"status --store={BYTES}", f"{BYTES} x"],
)
def test_bytes_that_are_no_text_are_one_message(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.format(tiny=TINY).split())
    assert ended.value.code == 1
    assert "\\udcff' is not UTF-8 text" in capsys.readouterr().err


MISUSED = {
    "": "the following arguments are required: VERB; --help lists the verbs",
    "cancel": "the following arguments are required: sweep\n",
    "plann": "'export'); did you mean 'plan'?\n",
    "run": "'export')\n",
    "init recpie": "argument {recipe,profile}: invalid choice: 'recpie' (choose from 'recipe', 'profile'); did you mean 'recipe'?",
    "plan": "the following arguments are required: recipe\n",
    "plan {tiny} --onyl x": "unrecognized arguments: --onyl x (see python -m orchestrator plan --help)",
    "status one two": "unrecognized arguments: two",
    "plan {tiny} --max-gpu-hours -1": "'-1' is not a number of hours, 0 or more",
    "plan {tiny} --max-gpu-hours nan": "'nan' is not a number of hours",
    "plan {tiny} --max-gpu-hours inf": "'inf' is not a number of hours",
    "plan {tiny} --max-gpu-hours many": "'many' is not a number of hours",
    "advise": "the following arguments are required: recipe\n",
    "advise {tiny} --no-wait": "unrecognized arguments: --no-wait (see python -m orchestrator advise --help)",
    "sweep {tiny} --executor slrum": "invalid choice: 'slrum'",
    "compare one": "the following arguments are required: B\n",
    "compare one two --memory-tolerance -1": "'-1' is not a share, 0 or more",
    "bisect one": "the following arguments are required: run\n",
    "bisect one two --no-wait": "unrecognized arguments: --no-wait (see python -m orchestrator bisect --help)",
}


@pytest.mark.parametrize("command", MISUSED)
def test_misuse_is_exit_code_1_with_the_usage(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.format(tiny=TINY).split())
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("usage: ")
    assert MISUSED[command] in error


# --- fresh reports --------------------------------------------------------------------------------------------------


def set_times(folder: Path, hours: float) -> None:
    moment = time.time() + hours * 3600
    for path in folder.rglob("*"):
        os.utime(path, (moment, moment))


def test_a_report_is_written_again_when_a_run_changed_whatever_clocks_say(elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "clocks", steps=20)
    resume = ["resume", "clocks", "--executor", "debug"]
    assert main(resume) == 0
    run_id = next(iter(read_plan(sweep).cell_of_run()))
    outcome = sweep.run(run_id).attempt(1).outcome
    write_json(outcome, read_json(outcome) | {"outcome": "FAILED", "phase": "measure"})
    set_times(sweep.report, hours=2)
    assert main(resume) == 3

    written = (sweep.report / "report.md").read_text() + "as it was"
    (sweep.report / "report.md").write_text(written)
    set_times(sweep.root / "runs", hours=4)
    assert main(resume) == 3
    assert (sweep.report / "report.md").read_text() == written, "nothing changed"
    (sweep.report / "report.md").unlink()
    assert main(resume) == 3
    assert (sweep.report / "report.md").exists()


# --- nothing validated ----------------------------------------------------------------------------------------------


def test_a_sweep_that_validates_nothing_is_not_green(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    """To a nightly job, a host without its driver and rules that reject everything look alike."""
    sweep = ["sweep", TINY, "training.steps=8", "--only", "cuda_graph.impl=torch_compile", "--executor", "debug"]
    assert main(sweep) == main([*sweep[:-2], "--executor", "local"]) == 4
    text = capsys.readouterr().out
    assert text.partition("nothing to run\n\n")[2].startswith("**Nothing was validated**: no graphed cell could run. ")
    assert main([*sweep, "--allow-empty"]) == main(["resume", "tiny_moe", "--allow-empty", "--executor", "debug"]) == 0
    for options, errors, code in (([], "1", 4), (["--allow-empty"], "0", 0)):
        assert main(["report", "tiny_moe", "--junit", "out.xml", *options]) == code
        assert ElementTree.parse(elsewhere / "out.xml").getroot().attrib["errors"] == errors


def without_last_step(run: AttemptRecord) -> None:
    run.metrics.pop()


def test_a_sweep_of_eager_cells_validates_nothing(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    write_sweep(elsewhere / "sweeps" / "eager", impls=(), steps=20)
    assert main(["report", "eager"]) == 4
    assert capsys.readouterr().out.startswith("\n**Nothing was validated**: the plan has no graphed cell.")
    assert main(["report", "eager", "--allow-empty"]) == 0
    write_sweep(elsewhere / "sweeps" / "failing", impls=(), steps=20, edit=without_last_step)
    assert main(["report", "failing", "--allow-empty"]) == 3, "a failure is a failure"


def test_a_graphed_cell_that_cannot_run_here_is_missing(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    """A host that lost its GPU still compares compiled code on its CPU."""
    reason = Reason("host.gpus", "the run needs 1 GPU on a node, and this host has 0", "go elsewhere")
    extra = [Extra(workload_spec(0, "torch", 20), (reason,), "not_runnable")]
    write_sweep(elsewhere / "sweeps" / "lost", steps=20, extra=extra)
    assert main(["report", "lost", "--junit", "out.xml"]) == 4
    first = capsys.readouterr().out.strip().partition("\n")[0]
    assert first.startswith(
        "**Not all was validated**: 1 of 2 graphed cells cannot run on this host or cluster. Not validated: "
    )
    assert (
        f"torch, lr 0.001 (host.gpus: {reason.message}). The report has the fixes. A CPU shows nothing about CUDA graphs: "
        in first
    )
    assert ElementTree.parse(elsewhere / "out.xml").getroot().attrib["errors"] == "1"
    assert main(["report", "lost", "--allow-empty"]) == 0
    write_sweep(elsewhere / "sweeps" / "undecided", steps=20, repeats=1, edit=noisy, extra=extra)
    assert main(["report", "undecided", "--allow-empty"]) == 4, "an undecided verdict is none"


def noisy(run: AttemptRecord) -> None:
    if run.spec.graphed:
        for row in run.metrics:
            row["loss"] += 1e-6


def test_junit_has_the_times_of_the_runs(elsewhere: Path) -> None:
    write_sweep(elsewhere / "sweeps" / "timed", repeats=2, steps=20)
    main(["report", "timed", "--junit", "out.xml"])
    suite = ElementTree.parse(elsewhere / "out.xml").getroot()[0]
    assert [case.attrib["time"] for case in suite.iter("testcase")] == ["120.000", "120.000"]
    assert suite.attrib["time"] == "240.000"


# --- records on disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "run_ids", "why"),
    [
        ("bundles", ["a-r0", "b-r0"], "run 'a-r0' is in 0 cells and 1 bundle; run 'b-r0' is in 0 cells and 1 bundle"),
        ("bundles", [], "is in 1 cell and 0 bundles"),
        ("cells", ["a-r0", "a-r0"], "run 'a-r0' is in 2 cells and 0 bundles"),
        (None, ["../../elsewhere"], "'../../elsewhere' is not the name of a folder"),
    ],
)
def test_a_plan_whose_runs_contradict_each_other_is_refused_in_one_message(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, place: str | None, run_ids: list[str], why: str
) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "mixed", repeats=1)
    content = read_json(sweep.plan)
    for key in [place] if place else ["cells", "bundles"]:
        content[key][0]["run_ids"] = run_ids if place else run_ids + content[key][0]["run_ids"][1:]
    write_json(sweep.plan, content)
    assert main(["status", "mixed"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and why in error and "run the sweep again to write a new one" in error
    assert error.count("\n") == 1


def test_a_damaged_outcome_is_named_once_with_its_fix(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "torn")
    assert main(["report", "torn"]) == 0
    run_id = next(iter(read_plan(sweep).cell_of_run()))
    for content, why in {
        '{"outcome": "COMPL': "not JSON (Unterminated string",
        "[]": "not an outcome of this version (",
        '{"outcome": "COMPLETED"}': "not an outcome of this version (",
    }.items():
        sweep.run(run_id).attempt(1).outcome.write_text(content)
        capsys.readouterr()
        _names_the_outcome(capsys, run_id, why)


def _names_the_outcome(capsys: pytest.CaptureFixture[str], run_id: str, why: str) -> None:
    assert main(["status", "torn"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "outcome.json" in line)
    assert line.startswith(f"sweeps/torn/runs/{run_id}/attempts/1/outcome.json: {why}")
    assert line.endswith("Fix: move its folder away, then resume the sweep to run it again")
    main(["status", "torn", "--json"])
    row = next(row for row in json.loads(capsys.readouterr().out)["runs"] if row["run_id"] == run_id)
    assert row["state"] == "INTERRUPTED" and row["message"].startswith(f"outcome.json: {why}")

    assert main(["report", "torn"]) == 3
    told = capsys.readouterr().out
    assert told.count(f"runs/{run_id}/attempts/1/outcome.json cannot be read: {why}") == told.count("outcome.json") == 1
    assert "fix: move its folder away, then resume the sweep to run it again" in told


def test_a_message_without_a_class_is_the_whole_note(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    def cancelled_late(run: AttemptRecord) -> None:
        run.end(message="cancelled in its teardown")

    write_sweep(elsewhere / "sweeps" / "late", edit=cancelled_late)
    assert main(["status", "late"]) == 0
    assert "  cancelled in its teardown\n" in capsys.readouterr().out


def test_a_run_that_lost_steps_is_named_with_its_fix(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "torn")
    attempt = sweep.run(next(iter(read_plan(sweep).cell_of_run()))).attempt(1)
    lines = attempt.metrics.read_text().splitlines(keepends=True)
    attempt.metrics.write_text("".join(lines[:-3]))
    assert main(["report", "torn"]) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "left unsound records" in told
    assert "fix: move its folder away, then resume the sweep to run it again" in told
    attempt.metrics.parent.rename(elsewhere / "away")
    assert main(["status", "torn"]) == 0
    assert "1 PLANNED" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["bundle_id", "workload_id", "name"])
def test_no_id_of_a_plan_leads_out_of_the_store(capsys: pytest.CaptureFixture[str], elsewhere: Path, key: str) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "evil")
    plan = sweep.plan.read_text()
    sweep.plan.write_text(re.sub(rf'("{key}": ")[^"]*"', r'\1../../../outside"', plan))
    assert "../outside" in sweep.plan.read_text()
    for command in (
        ["status", "evil"],
        ["report", "evil"],
        ["cancel", "evil"],
        ["resume", "evil", "--executor", "local"],
    ):
        assert main(command) == 2
        assert "'../../../outside' is not the name of a folder" in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["sweeps"]


def test_an_order_of_a_name_that_no_folder_has_is_one_message(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "evil")
    half = BundleOrder("b", "w", (("half-\ud800", 1),), Limits(), 1, ("cpu0",))
    sweep.bundle("b").order.parent.mkdir(parents=True)
    sweep.bundle("b").order.write_text(json.dumps(dataclasses.asdict(half)))
    for command in (["cancel", "evil"], ["prune", "evil"]):
        assert main(command) == 2
        assert capsys.readouterr().err.endswith("is not the name of a folder in runs\n")


def test_no_device_is_replaced_by_a_report(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    write_sweep(elsewhere / "sweeps" / "then")
    os.mkfifo("fifo")
    for option in ("--junit", "--golden"):
        assert main(["report", "then", option, "fifo"]) == 2
        assert "not a regular file: 'fifo'" in capsys.readouterr().err and Path("fifo").is_fifo()


def test_an_order_cannot_lead_out_of_the_store(elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "evil")
    order = sweep.bundle("b").order
    order.parent.mkdir(parents=True)
    outside = BundleOrder("b", "w", (("../../../outside", 1),), Limits(), 1, ("cpu0",))
    write_json(order, dataclasses.asdict(outside))
    supervised = python("-m", "launch.supervise.supervisor", str(order.parent), cwd=elsewhere)
    assert supervised.returncode != 0 and "'../../../outside' is not the name of a folder" in supervised.stderr
    assert [path.name for path in elsewhere.iterdir()] == ["sweeps"]


@pytest.mark.parametrize("name", ["plan.json", "outcome.json", "metrics.jsonl", "environment.json", "rank0.jsonl"])
def test_brackets_without_end_are_a_damaged_record(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, name: str
) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "deep")
    next(sweep.root.rglob(name)).write_text("[" * 200_000 + "\n1\n")
    for command in (["status", "deep"], ["report", "deep"]):
        assert main(command) in (0, 2, 3, 4)
    captured = capsys.readouterr()
    assert "nested too deeply" in captured.out + captured.err


@pytest.mark.parametrize(
    ("name", "commands"),
    [("queue.lock", ("status", "resume")), ("order.lock", ("resume",)), ("report.lock", ("report",)), ("plan.json", ("status",)),
     ("bundles/bundle000/lock", ("status", "cancel")), ("bundles/bundle000/bundle.json", ("resume", "cancel"))],
)  # fmt: skip
def test_a_folder_or_a_link_in_place_of_a_file_is_named_with_its_fix(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, name: str, commands: tuple[str, ...]
) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "mine", repeats=1, steps=20)
    order = BundleOrder("bundle000", "w", (("run-r0", 1),), Limits(), 1, ("cpu0",))
    write_json(sweep.bundle("bundle000").order, order)
    path = sweep.root / name
    for verb in commands:
        path.unlink(missing_ok=True)
        path.mkdir()
        assert main([verb, "mine"]) == 2
        assert f"{name}: Is a directory; it must be a file: move the folder away" in capsys.readouterr().err
        path.rmdir()
        if name.endswith("lock"):
            path.symlink_to(elsewhere / "another.lock")
            assert main([verb, "mine"]) == 2
            assert "it must not be a link: delete the link" in capsys.readouterr().err


def test_a_store_is_a_folder(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = elsewhere / "store"
    store.touch()
    for command in (["status"], ["status", "mine"], ["prune", "--older-than", "1"], ["logs", "eager"]):
        assert main([*command, "--store", str(store)]) == 1
        assert f"--store: {store} is not a folder" in capsys.readouterr().err
    monkeypatch.setenv("ORCHESTRATOR_STORE", str(store))
    assert main(["status"]) == 1
    assert f"$ORCHESTRATOR_STORE: {store} is not a folder" in capsys.readouterr().err


def test_a_plan_of_another_version_is_one_message(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "old", repeats=1, steps=20)
    plan = sweep.plan.read_text()
    for damaged in (plan.replace('"margins"', '"margin"'), plan.replace('"inspect"', '"inspected"')):
        sweep.plan.write_text(damaged)
        assert write_report(["sweeps/old"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "of this version" in line and "run the sweep again to write a new" in line
        assert main(["resume", "old"]) == 2
        assert line in capsys.readouterr().err


def test_no_record_steers_the_terminal(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "evil")
    plan = json.loads(sweep.plan.read_text())
    run_id = plan["cells"][0]["run_ids"][0]
    plan["cells"][0]["label"] = "eager\x1b]0;owned\x07"
    sweep.plan.write_text(json.dumps(plan))
    outcome = json.loads(sweep.run(run_id).attempt(1).outcome.read_text())
    outcome |= {"outcome": "FAILED", "message": "\x1b[2J\x9b31mgone\nrun_x COMPLETED", "failure_class": "\x1b[1A"}
    sweep.run(run_id).attempt(1).outcome.write_text(json.dumps(outcome))
    damaged = sweep.run(plan["cells"][1]["run_ids"][0]).attempt(1).outcome
    damaged.write_text(json.dumps(outcome | {"outcome": "\x1b[31m"}))
    for command in (
        ["status", "evil"],
        ["status", "evil", "--watch"],
        ["status"],
        ["report", "evil"],
        ["status", "\x1b[1m"],
    ):
        main(command)
        captured = capsys.readouterr()
        shown = captured.out + captured.err
        assert not set(shown) & set("\x1b\x07\x9b"), command
        assert "\nrun_x" not in shown, command


def test_a_log_keeps_its_bytes(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "logged")
    run_id = next(iter(read_plan(sweep).cell_of_run()))
    log = sweep.run(run_id).attempt(1).log(0)
    log.parent.mkdir(exist_ok=True)
    log.write_text("\x1b[31m50%\n")
    assert main(["logs", run_id]) == 0
    assert capsys.readouterr().out.endswith("\x1b[31m50%\n")


@pytest.mark.parametrize(("free", "said"), [(0, 1), (4096, 0)])
def test_status_warns_of_a_full_disk_while_a_run_is_running(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, monkeypatch: pytest.MonkeyPatch, free: int, said: int
) -> None:
    def unended(run: AttemptRecord) -> None:
        run.outcome = None

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free)

    monkeypatch.setattr(states.shutil, "disk_usage", usage)
    sweep = write_sweep(elsewhere / "sweeps" / "full", steps=20, edit=unended)
    words = "sweeps/full: the disk is full. A run that cannot write is stopped. It stays RUNNING until"
    assert main(["status", "full"]) == 0
    assert words not in capsys.readouterr().out, "nothing of it runs"

    bundle = sweep.bundle(read_plan(sweep).bundles[0].bundle_id)
    bundle.root.mkdir(parents=True)
    lock = Lock.try_acquire(bundle.lock)
    assert lock is not None
    os.utime(bundle.lock, (0, 0))  # The lock is older than the runs.
    assert main(["status", "full"]) == 0
    assert capsys.readouterr().out.count(words) == said
    lock.release()


# --- comparing ------------------------------------------------------------------------------------------------------


def later(sweep: Path, edit: Edit = unchanged) -> str:
    return str(write_sweep(sweep, steps=120, repeats=3, edit=edit).root)


def nan(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.metrics[80]["loss"] = math.nan


def lost(run: AttemptRecord) -> None:
    run.begun = not run.spec.graphed


def test_compare_with_a_golden_file(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    later(elsewhere / "sweeps" / "then")
    assert main(["report", "then", "--golden", "golden.json", "--junit", "then.xml"]) == 0
    assert ElementTree.parse(elsewhere / "then.xml").getroot().attrib["tests"] == "2"
    capsys.readouterr()
    _compares(capsys, elsewhere, unchanged, 0, "nothing is worse (2 of 2 cells as before)")
    _compares(capsys, elsewhere, nan, 3, "worse (1 worse; 1 of 2 cells as before)")
    _compares(capsys, elsewhere, lost, 2, "not known yet (1 without an outcome; 1 of 2 cells as before)")


def _compares(capsys: pytest.CaptureFixture[str], elsewhere: Path, edit: Edit, code: int, said: str) -> None:
    name = edit.__name__
    later(elsewhere / "sweeps" / name, edit)
    assert main(["compare", "golden.json", name, "--junit", "out/compare.xml"]) == code
    assert capsys.readouterr().out.startswith(f"{name} against golden.json: {said}")
    assert not (elsewhere / "sweeps" / name / "report").exists(), "nothing is written of either"
    suite = ElementTree.parse(elsewhere / "out" / "compare.xml").getroot()
    assert (suite.attrib["failures"] != "0") == (code == 3) and (suite.attrib["errors"] != "0") == (code == 2)

    assert main(["compare", "golden.json", str(elsewhere / "sweeps" / name), "--json"]) == code
    content = json.loads(capsys.readouterr().out)
    assert content["exit_code"] == code and len(content["cells"]) == 2


def test_report_names_what_a_comparison_with_a_golden_file_cannot_find(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    write_sweep(elsewhere / "sweeps" / "then", steps=30, repeats=1, edit=nan_late)
    main(["report", "then", "--golden", "golden.json"])
    verdict, *_ = capsys.readouterr().err.splitlines()
    assert (
        verdict
        == "golden.json: torch_compile, lr 0.001: unsound records; a later sweep with the same result will not count as worse"
    )

    write_sweep(elsewhere / "sweeps" / "now", steps=30, repeats=1)
    main(["report", "now", "--golden", "golden.json"])
    *_, speed = capsys.readouterr().err.splitlines()
    assert speed.startswith("golden.json: cannot detect a speed loss of 20% for torch_compile, lr 0.001, ")
    assert speed.endswith("x (1 pair); add repeats to narrow it")


def nan_late(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.metrics[20]["loss"] = math.nan


def test_compare_rejects_an_earlier_sweep_in_which_no_cell_ran(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    extra = [Extra(workload_spec(0, "full_iteration", 120), (Reason("capture.warmup", "m", "r"),))]
    write_sweep(elsewhere / "sweeps" / "then", workloads=0, extra=extra)
    assert main(["compare", "then", "then"]) == 1
    assert "no cell of it ran" in capsys.readouterr().err
    assert main(["report", "then", "--golden", "golden.json"]) == 1
    assert "--golden: golden.json: no cell of the sweep ran" in capsys.readouterr().err
    assert not (elsewhere / "golden.json").exists()


def test_compare_prints_every_difference(capsys: pytest.CaptureFixture[str]) -> None:
    results = ROOT / "docs" / "results"
    files = [str(results / name / "report.json") for name in ("launch_bound", "two_nodes")]
    assert main(["compare", *files]) == 3
    text = capsys.readouterr().out
    for line in ("worse:", "matched by label, since their ids differ", "the recipe differs in:", "    cell: COMPLETED"):
        assert f"\n{line}" in text
    assert "\n  training.sequence_length: 256 -> 2048" in text


# --- the process ----------------------------------------------------------------------------------------------------


def test_a_closed_pipe_is_exit_code_141_without_a_message(tmp_path: Path) -> None:
    seeds = ",".join(map(str, range(100)))  # The pipe holds 64 KiB, and the plan has 100 KB.
    command = f"{sys.executable} -m orchestrator plan {TINY} 'sweep.grid.training.seed=[{seeds}]'"
    script = f"set -o pipefail; {command} | head -1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (141, "")
    assert done.stdout.startswith("tiny_moe: ")


def test_an_uncaught_exception_is_exit_code_2(tmp_path: Path) -> None:
    """Python's exit code for an uncaught exception is 1, which here means wrong input."""
    code = "import orchestrator.cli.main as c; c.main = lambda: 1 / 0; c.run()"
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr


def test_a_plan_records_the_only_options(capsys: pytest.CaptureFixture[str]) -> None:
    for picked in ([], ["--only", "parallelism.dp=1", "--only", "cuda_graph.impl=torch_compile"]):
        assert main(["plan", TINY, "--json", *picked]) == 0
        assert json.loads(capsys.readouterr().out)["only"] == picked[1::2]
