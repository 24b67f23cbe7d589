"""Test slots: there are never more holders than slots, whoever they are and however they end."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from launch.contract.errors import EnvironmentFault
from launch.supervise import host_slots

ROOT = Path(__file__).resolve().parents[4]
TAKE = """
import sys, time
from launch.supervise import host_slots as slots
held = slots.acquire(sys.argv[1].split(","), int(sys.argv[2]), lambda: False)
print(time.monotonic(), *held.names, flush=True)
time.sleep(float(sys.argv[3]))
print(time.monotonic(), flush=True)
"""


@pytest.fixture(autouse=True)
def own_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return slots that no sweep on this machine takes."""
    monkeypatch.setenv(host_slots.VARIABLE, str(tmp_path))


def take(names: str, count: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TAKE, names, str(count), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_holders_of_one_slot_take_turns() -> None:
    processes = [take("cpu", 1, 0.2) for _ in range(4)]
    texts = [process.communicate(timeout=120)[0].split() for process in processes]
    spans = sorted((float(begun), float(ended)) for begun, _cpu, ended in texts)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_those_who_need_several_do_not_wait_for_each_other_for_ever() -> None:
    processes = [take("0,1,2,3", 3, 0.1) for _ in range(4)]
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert len(set(out.split()[1:4])) == 3


def test_slots_of_a_killed_holder_are_free() -> None:
    with take("0,1", 2, 60) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        assert host_slots.acquire(["0", "1"], 1, give_up=After(0.5)) is None
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    held = host_slots.acquire(["0", "1"], 2, give_up=After(60))
    assert held is not None and held.names == ("0", "1")
    held.release()
    assert host_slots.acquire(["0", "1"], 2, give_up=After(60)) is not None


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the runtime folder of a login, which exists during the test, and a temporary folder."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    monkeypatch.delenv(host_slots.VARIABLE)
    monkeypatch.setattr(host_slots, "TEMPORARY", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def test_slots_stay_held_when_the_login_s_folder_goes_or_comes(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = host_slots.acquire(["cpu"], 1, give_up=After(60))
    assert held is not None
    shutil.rmtree(runtime)
    assert host_slots.acquire(["cpu"], 1, give_up=After(0.5)) is None
    runtime.mkdir()
    assert host_slots.acquire(["cpu"], 1, give_up=After(0.5)) is None
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert host_slots.acquire(["cpu"], 1, give_up=After(0.5)) is None


def test_slots_do_not_depend_on_what_a_shell_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    """TMPDIR differs between shells. With slots in it, two shells would each take every GPU."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    held = host_slots.acquire(["cpu"], 1, give_up=After(60))
    assert held is not None
    monkeypatch.setenv("TMPDIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert host_slots.acquire(["cpu"], 1, give_up=After(0.5)) is None
    monkeypatch.setattr(host_slots, "TEMPORARY", str(tmp_path / "missing"))
    with pytest.raises(
        EnvironmentFault, match=r"missing is not a folder: create it, or set ORCHESTRATOR_SLOTS in every shell"
    ):
        host_slots.acquire(["cpu"], 1, give_up=After(60))


def test_slots_are_in_a_folder_that_only_this_user_can_open(tmp_path: Path) -> None:
    folder = tmp_path / f"orchestrator-slots-{os.getuid()}"
    folder.mkdir(mode=0o755)
    assert host_slots.acquire(["cpu"], 1, give_up=After(60)) is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_no_link_of_another_user_is_followed(tmp_path: Path, runtime: Path) -> None:
    """A link may replace neither the folder nor a slot. The login's own folder suffices."""
    (tmp_path / "victim").write_text("content")
    folder = tmp_path / f"orchestrator-slots-{os.getuid()}"
    folder.symlink_to(tmp_path)
    assert host_slots.slot_folders() == [runtime / folder.name]
    runtime.chmod(0o755)
    (runtime / folder.name).rmdir()
    (runtime / folder.name).symlink_to(tmp_path)
    with pytest.raises(EnvironmentFault, match="is a link, or belongs to another user"):
        host_slots.acquire(["cpu"], 1, give_up=After(60))
    folder.unlink()
    folder.mkdir()
    (folder / "cpu").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        host_slots.acquire(["cpu"], 1, give_up=After(60))
    assert (tmp_path / "victim").read_text() == "content"


def test_more_slots_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs 3 slots, but this host has 2: 0, 1"):
        host_slots.acquire(["0", "1"], 3, give_up=lambda: False)


class After:
    """Become true after this number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() > self._deadline
