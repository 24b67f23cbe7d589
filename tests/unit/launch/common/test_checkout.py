"""Test the description of the code, and that git leaves the checkout unchanged."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launch.common import checkout


def test_git_is_asked_without_a_lock_that_a_killed_rank_would_leave_behind(tmp_path: Path) -> None:
    """`git status` rewrites an outdated index, under a lock."""

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True
        )

    git("init", "--quiet")
    (tmp_path / "file").write_text("content")
    git("add", "file")
    git("commit", "--quiet", "--message=first")
    os.utime(tmp_path / "file", (1e9, 1e9))
    index = tmp_path / ".git" / "index"
    before = index.read_bytes()
    assert checkout.run_git(tmp_path, "status", "--porcelain") == ""
    assert index.read_bytes() == before
    git("status", "--porcelain")
    assert index.read_bytes() != before, "nothing was out of date"


def test_a_digest_changes_with_the_program_alone(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in ("train.py", "package/model.py", ".venv/library.py"):
        (tmp_path / name).write_text("a = 1")
    before = checkout.describe_code(tmp_path)
    (tmp_path / ".venv/library.py").write_text("a = 2")
    assert checkout.describe_code(tmp_path) == before == {**before, "commit": None, "dirty": False}
    (tmp_path / "package/model.py").write_text("a = 2")
    assert checkout.describe_code(tmp_path)["digest"] != before["digest"]


@pytest.mark.parametrize(
    "named", ["../elsewhere/train.py", "--config=../elsewhere/train.yaml", "bash -c 'run.sh train.txt'"]
)
def test_a_digest_covers_what_the_command_names(tmp_path: Path, named: str) -> None:
    """The script may be in another folder than the one in which the command starts, and its settings are no Python files."""
    (tmp_path / "start").mkdir()
    (tmp_path / "elsewhere").mkdir()
    words = ["torchrun", named, "--lr=3e-4", "a" * 5000 + ".py", "{output}/settings.yaml"]
    files = [tmp_path / "start" / word for word in named.replace("=", " ").replace("'", " ").split()]
    for path in [path for path in files if path.suffix]:
        path.write_text("a = 1")
    changing = next(path for path in files if path.suffix in (".py", ".yaml", ".sh"))
    before = checkout.describe_code(tmp_path / "start", words)
    assert checkout.describe_code(tmp_path / "start", words) == before
    changing.write_text("a = 2")
    assert checkout.describe_code(tmp_path / "start", words)["digest"] != before["digest"]


def test_a_digest_covers_the_modules_beside_a_script_elsewhere(tmp_path: Path) -> None:
    for name in ("start", "elsewhere/unrelated"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("train.py", "model.py", "unrelated/other.py"):
        (tmp_path / "elsewhere" / name).write_text("a = 1")
    words = ["python", str(tmp_path / "elsewhere" / "train.py")]
    before = checkout.describe_code(tmp_path / "start", words)
    (tmp_path / "elsewhere/unrelated/other.py").write_text("a = 2")
    assert checkout.describe_code(tmp_path / "start", words) == before
    (tmp_path / "elsewhere/model.py").write_text("a = 2")
    assert checkout.describe_code(tmp_path / "start", words)["digest"] != before["digest"]
