"""Test that wrong input is one message with exit code 1, and changes nothing."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from analysis import loss
from launch.contract.plan import Plan
from orchestrator.cli.main import main
from tests.unit.orchestrator.cli.command_line import ROOT, SCRIPT, TINY

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


def test_a_script_that_is_mistyped_or_not_executable_is_named(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    (elsewhere / "train.py").touch()
    here = f"command.workdir={elsewhere}"
    for run, said in (
        ("python trian.py", "no file trian.py in it on this host\n    did you mean 'train.py'?"),
        ("./train.py", "command.run: ./train.py is not executable\n    make it executable, or write its interpreter"),
    ):
        assert main(["plan", SCRIPT, here, f"command.run={run}"]) == 1
        assert said in capsys.readouterr().err


def test_wrap_speaks_of_its_own_options_and_of_the_recipe_that_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    assert main(["wrap", "--eager", "sh a.sh {step}", "--graphed", "sh a.sh {step} --graphs"]) == 1
    assert "error: wrap:4: command.run = " in capsys.readouterr().err
    monkeypatch.setattr("orchestrator.cli.verbs.sweep.run_sweep", lambda *_, **__: 0)
    (elsewhere / "a.sh").touch()
    assert main(["wrap", "--eager", "sh a.sh", "--graphed", "sh a.sh --graphs", "--steps", "20"]) == 0
    assert "set --steps 104 or more\n" in capsys.readouterr().out
    assert main(["wrap", "--eager", "sh a.sh", "--graphed", "sh a.sh --graphs", "--steps", "6"]) == 1
    assert "--steps: 6, but the first 6 steps are a warm-up, a capture and 2 to settle" in capsys.readouterr().err


def test_wrap_starts_as_many_ranks_as_the_command(monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr("orchestrator.cli.verbs.sweep.run_sweep", lambda _, plan, *__, **___: plans.append(plan) or 0)
    (elsewhere / "a.sh").touch()
    for number in ("--nproc-per-node 2", "--nproc_per_node=3", "--nproc-per-node gpu", "--standalone"):
        eager = f"sh a.sh {number}"
        assert main(["wrap", "--eager", eager, "--graphed", f"{eager} --graphs"]) == 0
    assert [plan.cells[0].spec["placement"]["ranks_per_node"] for plan in plans] == [2, 3, 1, 1]


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
    "wrap --eager a --graphed b --repeats 0": "argument --repeats: '0' is not a whole number, 1 or more\n",
    "wrap --eager a --graphed b --ranks x": "argument --ranks: 'x' is not a whole number, 1 or more\n",
    "status --store=": "argument --store: the name of the folder is empty\n",
    "plan {tiny} --onyl x": "unrecognized arguments: --onyl x (see python -m orchestrator plan --help)",
    "status one two": "unrecognized arguments: two",
    "--store x status": "--store comes before the verb; write the verb first: python -m orchestrator VERB --store ...",
    "wrap --eager python a.py --x 1 --graphed python a.py": "arguments: --x 1; put each command in quotes (see ",
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
