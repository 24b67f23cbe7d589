"""Locks: who holds one, told truly through deaths, reboots and re-used process ids."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.common.file_lock import Lock, Owner, holder, is_alive, this_process, was_killed

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
    """Another process, which holds ``tmp_path / "lock"``."""
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
    lock = Lock.try_acquire(tmp_path / "a" / "lock")
    assert lock is not None
    lock.release()
    assert holder(tmp_path / "a" / "lock") is None
    assert not was_killed(tmp_path / "a" / "lock")
    assert Lock.try_acquire(tmp_path / "a" / "lock") is not None


@pytest.mark.parametrize(
    ("change", "alive"),
    [
        ({}, True),
        ({"started": 1}, False),
        ({"boot": "another"}, False),
        ({"boot": "another", "host": "another"}, True),
        ({"host": "another"}, True),
        ({"host": "another", "started": 1}, False),
    ],
    ids=["itself", "pid used again", "before a reboot", "another host", "host renamed", "host renamed, pid used again"],
)
def test_whether_an_owner_lives(change: dict[str, object], alive: bool) -> None:
    me = this_process()
    assert me.pid == os.getpid() and me.host == socket.gethostname()
    assert is_alive(dataclasses.replace(me, **change)) is alive  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"pid": 1}', "\0\0"])
def test_a_lock_whose_content_says_nothing_has_no_holder(tmp_path: Path, content: str) -> None:
    """It has been taken a moment ago, or its taker died before it could say so."""
    (tmp_path / "lock").write_text(content)
    assert holder(tmp_path / "lock") is None
    assert not was_killed(tmp_path / "lock")
    assert Lock.try_acquire(tmp_path / "lock") is not None


def test_a_lock_taken_over_a_longer_content_is_readable(tmp_path: Path) -> None:
    dead = dataclasses.asdict(Owner("h" * 200, "b" * 200, 1, 1))
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
