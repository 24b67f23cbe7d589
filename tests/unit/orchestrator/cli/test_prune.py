"""Test that ``prune`` deletes what nobody needs, never what somebody uses, and leaves no half of a sweep."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from analysis.report.write_report import write_report
from launch.common.atomic_files import write_json
from launch.common.file_lock import Lock
from launch.contract.bundle import BundleOrder
from launch.contract.paths import SweepPaths
from launch.contract.plan import Limits
from launch.supervise.pack_attempt import pack_if_completed
from orchestrator.cli.main import main
from tests.records import write_sweep


def prune(store: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and what ``prune --json`` prints."""
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        code = main(["prune", *arguments, "--store", str(store), "--json"])
    return code, json.loads(printed[0])["sweeps"] if printed else []


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with two sweeps of runs that ended long ago, with logs and links."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    for name in ("one", "two"):
        sweep = write_sweep(tmp_path / "store" / name, steps=120)
        for path in beside_reports(sweep):
            path.mkdir(parents=True)
            (path / "file").write_text("12345")
            (path / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "store"


def beside_reports(sweep: SweepPaths) -> list[Path]:
    attempts = sorted(sweep.root.glob("runs/*/attempts/1"))
    return [sweep.root / "submitit" / "token", sweep.tracking / "wandb", *(attempt / "logs" for attempt in attempts)]


def files(store: Path) -> set[str]:
    """Return all files except locks."""
    return {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_a_folder_of_another_program_is_kept(store: Path) -> None:
    project = store / "terraform"
    (project / "src").mkdir(parents=True)
    (project / "plan.json").write_text('{"terraform": 1}')
    (project / "src" / "precious").touch()
    for arguments in (("--older-than", "0"), (str(project),), (str(project), "--keep", "reports")):
        code, found = prune(store, *arguments)
        assert code == 2
        assert "not a plan of this version" in next(one["kept"] for one in found if one["sweep"] == "terraform")
        assert {path.name for path in project.rglob("*")} == {"plan.json", "src", "precious"}


def test_nothing_behind_a_link_is_deleted(store: Path, tmp_path: Path) -> None:
    other = write_sweep(tmp_path / "elsewhere", steps=120)
    for path in beside_reports(other):
        path.mkdir(parents=True)
        (path / "mine").touch()
    linked = set(other.root.rglob("mine"))
    run = next((other.root / "runs").iterdir())
    (store / "one" / "runs" / "evil").symlink_to(run)
    assert prune(store, "one", "--keep", "reports")[0] == 0
    assert linked == set(other.root.rglob("mine"))


def test_reports_stay_and_can_be_written_again(store: Path) -> None:
    one = SweepPaths(store / "one")
    attempt = one.run(next((one.root / "runs").iterdir()).name).attempt(1)
    attempt.log(0).write_text("printed")
    pack_if_completed(attempt, 1)
    assert attempt.logs_pack.exists()
    assert main(["report", "one", "--store", str(store)]) == 0
    before = {path.name: path.read_bytes() for path in one.report.iterdir() if path.is_file()}
    everything = files(store)
    assert prune(store, "one", "--keep", "reports", "--dry-run") == prune(store, "one", "--keep", "reports")
    gone = everything - files(store)
    assert attempt.records_pack.exists() and not attempt.logs_pack.exists()
    assert gone and all("logs" in path or "submitit" in path or "tracking" in path for path in gone)
    assert not any(path.exists() for path in beside_reports(one))
    assert (store.parent / "outside" / "file").exists()

    shutil.rmtree(one.report)
    assert main(["report", "one", "--store", str(store)]) == 0
    assert before == {path.name: path.read_bytes() for path in one.report.iterdir() if path.is_file()}
    assert main(["status", "one", "--store", str(store)]) == 0


def test_only_old_sweeps_go_and_a_dry_run_deletes_nothing(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everything = files(store)
    code, (one, two) = prune(store, "--older-than", "30", "--dry-run")
    assert code == 0 and one["files"] > 20 and one == two | {"sweep": "one"}
    code, kept = prune(store, "--older-than", "100000")
    assert code == 0 and all(each["kept"].startswith("it changed ") for each in kept)
    assert files(store) == everything
    assert prune(store, "--older-than", "30") == (0, [one, two])
    assert files(store) == set() and list(store.iterdir()) == []
    assert main(["prune", "--store", str(store)]) == 1
    assert "give their least age in days" in capsys.readouterr().err


def test_only_what_prune_took_out_of_the_store_is_a_leftover(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = [store / name for name in (".pruned-mine", ".pruned-mine-0123abcd", ".pruned-link-0123abcd")]
    for folder in users[:2]:
        folder.mkdir()
        (folder / "precious").touch()
    users[2].symlink_to(store / "two")
    calls = []

    def die_at_the_second(path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise MemoryError
        _rmtree(path)

    _rmtree = shutil.rmtree
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(shutil, "rmtree", die_at_the_second)
        prune(store, "one")
    (left,) = {path for path in store.iterdir() if path.name.startswith(".pruned-one")}
    assert len(list(left.iterdir())) > 1
    assert prune(store, "two", "--older-than", "100000")[0] == 0
    assert not left.exists() and all(path.exists() for path in users)


def test_what_runs_stays(store: Path) -> None:
    one = SweepPaths(store / "one")
    run = next(path for path in sorted((one.root / "runs").iterdir()))
    order = BundleOrder("bundle000", "workload", ((run.name, 2),), Limits(), 1, ("cpu",))
    write_json(one.bundle("bundle000").order, order)
    supervisor = Lock.try_acquire(one.bundle("bundle000").lock)
    assert supervisor is not None
    (run / "attempts" / "2").mkdir()
    everything = files(store)
    code, (kept,) = prune(store, "one")
    assert (code, kept["kept"]) == (0, "1 run running or waiting")
    assert prune(store, "one", "--keep", "reports")[1] == [kept]
    assert files(store) == everything
    supervisor.release()
    assert prune(store, "one", "--keep", "reports")[1][0]["files"] > 0
    assert (run / "attempts" / "1" / "outcome.json").exists()


def test_a_sweep_whose_report_is_being_written_stays(store: Path) -> None:
    one = SweepPaths(store / "one")
    everything = files(store)
    with Lock.acquire(one.report_lock, 0):
        for arguments in ((), ("--keep", "reports")):
            code, (kept,) = prune(store, "one", *arguments)
            assert (code, kept["kept"]) == (0, "its report is being written")
    assert files(store) == everything


def test_a_report_that_waited_for_prune_leaves_no_folder(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report began to wait for its lock while the sweep still existed."""
    one = SweepPaths(store / "one")
    wait = time.sleep

    def go(seconds: float) -> None:
        wait(seconds)
        one.root.rename(store / ".pruned-one")

    with Lock.acquire(one.report_lock, 0):
        monkeypatch.setattr(time, "sleep", go)
        with pytest.raises(FileNotFoundError):
            write_report(one)
    assert not one.root.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")
@pytest.mark.parametrize("arguments", [(), ("--keep", "reports")])
def test_a_full_disk_is_freed(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], check=True)
    try:
        sweep = write_sweep(disk / "one", steps=20)
        log = sweep.run(next((sweep.root / "runs").iterdir()).name).attempt(1).log(0)
        log.parent.mkdir()
        with open(log, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(disk).f_bavail == 0
        code, (pruned,) = prune(disk, "one", *arguments)
        assert (code, pruned["kept"]) == (0, "")
        assert not log.exists() and os.statvfs(disk).f_bavail > 1000
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_crash_leaves_no_half_of_a_sweep(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(path: Path) -> None:
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", kill)
    with pytest.raises(Killed):
        prune(store, "one")
    monkeypatch.undo()
    assert main(["status", "one", "--store", str(store)]) == 1
    code, (two,) = prune(store, "--older-than", "30", "--keep", "reports")
    assert (code, two["sweep"]) == (0, "two")
    assert [path.name for path in store.iterdir()] == ["two"]


def test_a_sweep_whose_jobs_nobody_knows_stays(store: Path) -> None:
    submissions = SweepPaths(store / "one").submissions
    submissions.mkdir()
    (submissions / "token.json").write_text("{")
    everything = files(store)
    code, (kept,) = prune(store, "one")
    assert code == 2 and "not a submission of this version" in kept["kept"]
    assert files(store) == everything
