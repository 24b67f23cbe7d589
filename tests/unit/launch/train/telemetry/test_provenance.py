"""What a rank records of its surroundings leaves them as they were."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from launch.train.telemetry import provenance


def test_git_is_asked_without_a_lock_that_a_killed_rank_would_leave_behind(tmp_path: Path) -> None:
    """`git status` writes an index that is out of date anew, under a lock."""

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
    assert provenance.run_git(tmp_path, "status", "--porcelain") == ""
    assert index.read_bytes() == before
    git("status", "--porcelain")
    assert index.read_bytes() != before, "nothing was out of date"
