"""Test locks: their holder is reported correctly after deaths, reboots and reused process ids."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.common.file_lock import UNNAMED, Lock, Owner, holder, this_process, was_killed

HOLD = """
import sys, time
from pathlib import Path
from launch.common.file_lock import Lock
assert Lock.try_acquire(Path(sys.argv[1])) is not None
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process, which holds ``tmp_path / "lock"``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[4],
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_lock_is_held_by_one_process_until_it_is_killed(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    path = tmp_path / "lock"
    owner = holder(path)
    assert owner is not None and owner.pid == other.pid
    assert Lock.try_acquire(path) is None
    assert not was_killed(path)
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert holder(path) is None
    assert was_killed(path)
    assert Lock.try_acquire(path) is not None
    assert holder(path) == this_process()


def test_a_process_that_is_stopped_still_holds_its_lock(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGSTOP)
    assert holder(tmp_path / "lock") is not None
    assert Lock.try_acquire(tmp_path / "lock") is None


def test_a_process_that_ended_and_was_not_waited_for_is_dead(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while holder(tmp_path / "lock") is not None:
        assert time.monotonic() < deadline, "a zombie counts as alive"


def test_a_released_lock_is_free_and_nobody_was_killed(tmp_path: Path) -> None:
    lock = Lock.try_acquire(tmp_path / "lock")
    assert lock is not None
    lock.release()
    assert holder(tmp_path / "lock") is None
    assert not was_killed(tmp_path / "lock")
    assert Lock.try_acquire(tmp_path / "lock") is not None


@pytest.mark.parametrize(
    ("change", "alive"),
    [
        ({}, False),
        ({"token": "another"}, False),
        ({"boot": "another"}, False),
        ({"boot": "another", "host": "another"}, True),
        ({"host": "another"}, False),
    ],
    ids=["killed", "pid used again", "before a reboot", "another host", "host renamed, or another container"],
)
def test_whether_the_owner_of_a_lock_that_nobody_is_seen_to_hold_lives(
    tmp_path: Path, change: dict[str, str], alive: bool
) -> None:
    owner = dataclasses.replace(this_process(), **change)  # type: ignore[arg-type]
    (tmp_path / "lock").write_text(json.dumps(dataclasses.asdict(owner)))
    assert holder(tmp_path / "lock") == (owner if alive else None)
    assert was_killed(tmp_path / "lock") is not alive


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_lock_that_is_held_has_a_holder_whatever_its_content_says(
    tmp_path: Path, other: subprocess.Popen[str], content: str | None
) -> None:
    """A process of another container has a pid that here belongs to nobody or to another process."""
    name = dataclasses.replace(this_process(), pid=2**22 + 1, token="another")
    (tmp_path / "lock").write_text(json.dumps(dataclasses.asdict(name)) if content is None else content)
    assert holder(tmp_path / "lock") == (name if content is None else UNNAMED)
    assert not was_killed(tmp_path / "lock")
    assert Lock.try_acquire(tmp_path / "lock") is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another PID namespace")
def test_a_holder_in_another_pid_namespace_lives_on_both_sides(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    look = (
        "import sys; from pathlib import Path; from launch.common.file_lock import *; print(holder(Path(sys.argv[1])))"
    )
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c"]
    path, root = str(tmp_path / "lock"), Path(__file__).resolve().parents[4]
    seen = subprocess.run([*command, look, path], stdout=subprocess.PIPE, text=True, cwd=root, check=True)
    assert f"pid={other.pid}" in seen.stdout
    other.kill()
    other.wait()
    with subprocess.Popen([*command, HOLD, path], stdout=subprocess.PIPE, text=True, cwd=root) as inside:
        assert inside.stdout is not None and inside.stdout.readline() == "held\n"
        assert (owner := holder(tmp_path / "lock")) is not None and owner.pid < 10
        inside.kill()


def test_a_lock_whose_folder_went_while_it_was_waited_for_is_not_held(tmp_path: Path) -> None:
    """The process holds no lock in the deleted folder, and none in a folder that nobody created."""
    path = tmp_path / "sweep" / "lock"
    path.parent.mkdir()
    before = Lock.try_acquire(path)
    assert before is not None

    def go(_: float) -> None:
        path.parent.rename(tmp_path / "away")
        before.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", go)
        with pytest.raises(FileNotFoundError):
            Lock.acquire(path, 60)
    assert not path.parent.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"pid": 1}', "\0\0"])
def test_a_lock_whose_content_says_nothing_has_no_holder(tmp_path: Path, content: str) -> None:
    """A process has just taken the lock, or died before it wrote its name."""
    (tmp_path / "lock").write_text(content)
    assert holder(tmp_path / "lock") is None
    assert not was_killed(tmp_path / "lock")
    assert Lock.try_acquire(tmp_path / "lock") is not None


def test_a_lock_taken_over_a_longer_content_is_readable(tmp_path: Path) -> None:
    dead = dataclasses.asdict(Owner("h" * 200, "b" * 200, 1, "t"))
    (tmp_path / "lock").write_text(json.dumps(dead, indent=4))
    assert Lock.try_acquire(tmp_path / "lock") is not None
    assert holder(tmp_path / "lock") == this_process()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_sees_that_a_lock_is_held_and_cannot_hold_it() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lock"
        Path(folder).chmod(0o755)
        path.touch(mode=0o644)
        lock = Lock.try_acquire(path)
        assert lock is not None
        os.seteuid(65534)
        try:
            assert holder(path) is not None and not was_killed(path)
            with pytest.raises(PermissionError):
                path.open()
            lock.release()
            assert holder(path) is None
        finally:
            os.seteuid(0)


def test_a_lock_whose_file_goes_between_opening_and_locking_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sweep" / "lock"
    path.parent.mkdir()
    monkeypatch.setattr(os, "fchmod", lambda *_: path.parent.rename(tmp_path / "away"))
    assert Lock.try_acquire(path) is None
