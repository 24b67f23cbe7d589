"""Test the command line as a whole: help, options anywhere, and the end of its process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.contract.exit_codes import exit_codes_of
from orchestrator.cli.main import main
from orchestrator.cli.verbs import VERBS
from tests.integration.host import cpu_seconds_of_children
from tests.unit.orchestrator.cli.command_line import ROOT, TINY, python

HEAVY = ("torch", "pyarrow", "numpy", "omegaconf", "yaml", "submitit", "rich", "matplotlib", "wandb")


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


def test_a_plan_imports_neither_torch_nor_numpy() -> None:
    code = f"import sys; from orchestrator.cli.main import main; main(['plan', {TINY!r}]); print(sorted(sys.modules))"
    loaded = python("-c", code).stdout.splitlines()[-1]
    assert "'orchestrator.plan.planner'" in loaded
    for module in ("torch", "numpy", "pyarrow", "matplotlib", "wandb", "submitit"):
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
