"""Test the suggestions for mistyped and misplaced names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.common.atomic_files import write_json
from launch.contract.bundle import BundleOrder
from launch.contract.outcomes import Outcome
from launch.contract.plan import Limits, read_plan
from orchestrator.cli.main import main
from orchestrator.errors import InputError
from orchestrator.recipe.recipe import load
from orchestrator.targets.profile import load_profile
from tests.records import AttemptRecord, write_sweep

ROOT = Path(__file__).parents[4]
MEANT = {
    "satus": "did you mean 'status'?",
    "plan tiny_moe --executor slrum": "did you mean 'slurm'?",
    "status miin": "did you mean 'mine'?",
    "plan tiny_mo": "did you mean 'tiny_moe'?",
    "plan mine": "mine: is a sweep, not a recipe\n    name a recipe; python -m orchestrator status mine shows the sweep",
    "export mine --to bridge": "mine: is a sweep, not a recipe",
    "logs mine": "'mine' is a sweep, not a run\n    python -m orchestrator status mine lists its runs",
    "status mine.yaml": "did you mean 'mine'?",
    "status eager": "is a run of sweep mine, not a sweep\n    name its sweep, mine; python -m orchestrator logs eager",
    "logs mine/egaer": "begins with 'egaer'\n    did you mean 'eager'?",
    "plan tiny_moe --training.steps=200": "for a field of the recipe write training.steps=200",
    "plan tiny_moe --dry-run": "(see python -m orchestrator plan --help)",
    "sweep plan tiny_moe": "sweep and plan are two verbs\n    write one of them: python -m orchestrator sweep RECIPE",
}


@pytest.mark.parametrize("command", MEANT)
def test_a_wrong_name_is_answered_with_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "sweeps" / "mine", steps=2)
    try:
        code = main(command.split())
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 1
    assert MEANT[command] in capsys.readouterr().err


def test_an_error_in_a_recipe_is_told_although_a_sweep_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "sweeps" / "tiny_moe", steps=2)
    assert main(["plan", "tiny_moe", "trainng.steps=3"]) == 1
    assert "did you mean 'training.steps'?" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "fix"), [("modules: [cuda]", "setup: [module load"), ("gres: gpu:8", "gpus: gres")])
def test_a_field_of_another_tool_is_answered_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, fix: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "cuda-graph-orchestrator" / "clusters"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text(line)
    with pytest.raises(InputError) as caught:
        load_profile("site")
    assert fix in str(caught.value)


def test_a_new_recipe_does_not_claim_the_sweep_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "recipe"]) == 0
    Path("mine.yaml").write_text(capsys.readouterr().out)
    assert load(Path("mine.yaml")).name == "mine"


def test_sweeps_are_listed_with_their_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "sweeps" / "mine", steps=2)
    (tmp_path / "sweeps" / "mine" / "large").write_bytes(bytes(3 << 20))
    assert main(["status"]) == 0
    heads, row = capsys.readouterr().out.splitlines()
    assert heads.split() == ["sweep", "runs", "on", "disk", "states"]
    assert row.split()[:4] == ["mine", "4", "3", "MiB"] and heads.index("states") == row.index("4 COMPLETED")
    assert main(["status", "mine"]) == 0
    heads, *rows, counts = capsys.readouterr().out.split("next:")[0].splitlines()
    assert heads.split() == ["run", "state", "steps", "cell"]
    assert {row.index("COMPLETED") for row in rows} == {heads.index("state")} and counts == "written: 4 COMPLETED"


@pytest.mark.parametrize(
    ("kind", "message", "note"),
    [("EXIT", "exit code 3", "EXIT: exit code 3"), ("KeyError", "KeyError: 'x'", "KeyError: 'x'")],
)
def test_a_note_on_a_run_has_a_head(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    message: str,
    note: str,
) -> None:
    def fail(run: AttemptRecord) -> None:
        run.outcome = Outcome("FAILED", "measure", "a", 1.0, 2.0, None, kind, message)

    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "sweeps" / "mine", steps=2, edit=fail)
    assert main(["status", "mine"]) == 0
    heads, row, *_ = capsys.readouterr().out.splitlines()
    assert heads.index("note") == row.index(note) and row.count(kind) == 1


def test_a_note_on_a_run_says_that_nobody_begins_what_was_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `cancel` and `resume`, the host has gone down."""

    def cancelled(run: AttemptRecord) -> None:
        run.outcome = Outcome("CANCELLED", "measure", "a", 1.0, 2.0, None, "CANCELLED", "cancelled while it ran")

    monkeypatch.chdir(tmp_path)
    sweep = write_sweep(tmp_path / "sweeps" / "mine", steps=2, edit=cancelled)
    (bundle,) = read_plan(sweep).bundles
    schedule = tuple((run_id, 2) for run_id in bundle.run_ids[:1])
    write_json(sweep.bundle(bundle.bundle_id).order, BundleOrder("bundle000", "", schedule, Limits(), 1, ("cpu0",)))
    assert main(["status", "mine"]) == 0
    _, first, second, *_ = capsys.readouterr().out.splitlines()
    said = "CANCELLED: cancelled while it ran"
    assert first.endswith(f"  attempt 2 is ordered and has not begun; before it: {said}") and "ordered" not in second


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sta", ["status "]),
        ("status mi", ["mine "]),
        ("plan tiny_mo", ["tiny_moe "]),
        ("sweep tiny_moe --exec", ["--executor "]),
        ("sweep tiny_moe --executor sl", ["slurm "]),
    ],
)
def test_a_shell_completes_verbs_options_sweeps_and_recipes(tmp_path: Path, line: str, offered: list[str]) -> None:
    write_sweep(tmp_path / "sweeps" / "mine", steps=2)
    line, answer = f"cuda-graph-orchestrator {line}", tmp_path / "answer"
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([sys.executable, "-m", "orchestrator"], cwd=tmp_path, env={**os.environ, **variables}, check=True)
    assert answer.read_text().splitlines() == offered


@pytest.mark.parametrize("kind", ["recipe", "profile"])
def test_a_skeleton_works_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["init", kind]) == 0
    file = tmp_path / "cuda-graph-orchestrator" / "clusters" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(capsys.readouterr().out)
    if kind == "recipe":
        assert main(["plan", str(file)]) == 0
    else:
        assert load_profile("mine").partition
    assert main(["init"]) == 1
