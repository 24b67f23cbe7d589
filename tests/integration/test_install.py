"""Test that the installed package works without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from launch.common.checkout import PARTS
from launch.contract.paths import AttemptPaths
from orchestrator import __version__

ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path) -> tuple[Path, str]:
    """Install a copy of the checkout beside the packages of this Python. Return the command, and the copy's commit."""
    source, home = folder / "source", folder / "venv"
    for name in PARTS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=x"]):
        subprocess.run([*git, *words], check=True)
    venv.create(home)
    (site,) = home.glob("lib/*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(home / "bin/python")]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", str(source)], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    shutil.rmtree(source)
    return home / "bin" / "cuda-graph-orchestrator", commit


def test_an_installed_copy_needs_no_checkout_and_knows_its_commit(tmp_path: Path) -> None:
    command, commit = install(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # A repository around an environment belongs to another project.
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*words: str, code: int = 0) -> str:
        done = subprocess.run([command, *words], cwd=elsewhere, env=environ, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert call("--version") == f"cuda-graph-orchestrator {__version__}, commit {commit}\n"
    assert "looked in recipes and " in (said := call("plan", "tiny_mo", code=1)) and "did you mean 'tiny_moe'?" in said
    assert f"in folder {elsewhere}/sweeps; start one with: cuda-graph-orchestrator sweep tiny_moe" in call("status")
    assert f"looked in {command.parents[1]}/lib" in call("plan", "tiny_dense", "model.preset=nope", code=1)
    eager = ["tiny_dense", "sweep=null", "training.steps=10", "repeats=1", "wandb.mode=disabled", "--executor=debug"]
    call("sweep", *eager, "--allow-empty")
    (root,) = elsewhere.glob("sweeps/tiny_dense/runs/*/attempts/1")
    attempt = AttemptPaths(root)
    assert json.loads(attempt.read(attempt.environment))["code"]["commit"] == commit
