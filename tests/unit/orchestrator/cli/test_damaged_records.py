"""Test that damaged records are named with their fixes, and steer no terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.report.__main__ import main as write_report
from launch.common.atomic_files import read_json, write_json
from launch.common.file_lock import Lock
from launch.contract.bundle import BundleOrder
from launch.contract.plan import Limits, read_plan
from orchestrator.cli.main import main
from orchestrator.output import states
from tests.records import AttemptRecord, write_sweep
from tests.unit.orchestrator.cli.command_line import python


@pytest.mark.parametrize(
    ("place", "run_ids", "why"),
    [
        ("bundles", ["a-r0", "b-r0"], "run 'a-r0' is in 0 cells and 1 bundle; run 'b-r0' is in 0 cells and 1 bundle"),
        ("bundles", [], "is in 1 cell and 0 bundles"),
        ("cells", ["a-r0", "a-r0"], "run 'a-r0' is in 2 cells and 0 bundles"),
        (None, ["../../elsewhere"], "'../../elsewhere' is not the name of a folder"),
    ],
)
def test_a_plan_whose_runs_contradict_each_other_is_refused_in_one_message(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, place: str | None, run_ids: list[str], why: str
) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "mixed", repeats=1)
    content = read_json(sweep.plan)
    for key in [place] if place else ["cells", "bundles"]:
        content[key][0]["run_ids"] = run_ids if place else run_ids + content[key][0]["run_ids"][1:]
    write_json(sweep.plan, content)
    assert main(["status", "mixed"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and why in error and "run the sweep again to write a new one" in error
    assert error.count("\n") == 1


def test_a_damaged_outcome_is_named_once_with_its_fix(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "torn")
    assert main(["report", "torn"]) == 0
    run_id = next(iter(read_plan(sweep).cell_of_run()))
    for content, why in {
        '{"outcome": "COMPL': "not JSON (Unterminated string",
        "[]": "not an outcome of this version (",
        '{"outcome": "COMPLETED"}': "not an outcome of this version (",
    }.items():
        sweep.run(run_id).attempt(1).outcome.write_text(content)
        capsys.readouterr()
        _names_the_outcome(capsys, run_id, why)


def _names_the_outcome(capsys: pytest.CaptureFixture[str], run_id: str, why: str) -> None:
    assert main(["status", "torn"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "outcome.json" in line)
    assert line.startswith(f"sweeps/torn/runs/{run_id}/attempts/1/outcome.json: {why}")
    assert line.endswith("Fix: move its folder away, then resume the sweep to run it again")
    main(["status", "torn", "--json"])
    row = next(row for row in json.loads(capsys.readouterr().out)["runs"] if row["run_id"] == run_id)
    assert row["state"] == "INTERRUPTED" and row["message"].startswith(f"outcome.json: {why}")

    assert main(["report", "torn"]) == 3
    told = capsys.readouterr().out
    assert told.count(f"runs/{run_id}/attempts/1/outcome.json cannot be read: {why}") == told.count("outcome.json") == 1
    assert "fix: move its folder away, then resume the sweep to run it again" in told


def test_a_message_without_a_class_is_the_whole_note(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    def cancelled_late(run: AttemptRecord) -> None:
        run.end(message="cancelled in its teardown")

    write_sweep(elsewhere / "sweeps" / "late", edit=cancelled_late)
    assert main(["status", "late"]) == 0
    assert "  cancelled in its teardown\n" in capsys.readouterr().out


def test_a_run_that_lost_steps_is_named_with_its_fix(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "torn")
    attempt = sweep.run(next(iter(read_plan(sweep).cell_of_run()))).attempt(1)
    lines = attempt.metrics.read_text().splitlines(keepends=True)
    attempt.metrics.write_text("".join(lines[:-3]))
    assert main(["report", "torn"]) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "left unsound records" in told
    assert "fix: move its folder away, then resume the sweep to run it again" in told
    attempt.metrics.parent.rename(elsewhere / "away")
    assert main(["status", "torn"]) == 0
    assert "1 PLANNED" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["bundle_id", "workload_id", "name"])
def test_no_id_of_a_plan_leads_out_of_the_store(capsys: pytest.CaptureFixture[str], elsewhere: Path, key: str) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "evil")
    plan = sweep.plan.read_text()
    sweep.plan.write_text(re.sub(rf'("{key}": ")[^"]*"', r'\1../../../outside"', plan))
    assert "../outside" in sweep.plan.read_text()
    for command in (
        ["status", "evil"],
        ["report", "evil"],
        ["cancel", "evil"],
        ["resume", "evil", "--executor", "local"],
    ):
        assert main(command) == 2
        assert "'../../../outside' is not the name of a folder" in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["sweeps"]


def test_an_order_of_a_name_that_no_folder_has_is_one_message(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "evil")
    half = BundleOrder("b", "w", (("half-\ud800", 1),), Limits(), 1, ("cpu0",))
    sweep.bundle("b").order.parent.mkdir(parents=True)
    sweep.bundle("b").order.write_text(json.dumps(dataclasses.asdict(half)))
    for command in (["cancel", "evil"], ["prune", "evil"]):
        assert main(command) == 2
        assert capsys.readouterr().err.endswith("is not the name of a folder in runs\n")


def test_no_device_is_replaced_by_a_report(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    write_sweep(elsewhere / "sweeps" / "then")
    os.mkfifo("fifo")
    for option in ("--junit", "--golden"):
        assert main(["report", "then", option, "fifo"]) == 2
        assert "not a regular file: 'fifo'" in capsys.readouterr().err and Path("fifo").is_fifo()


def test_an_order_cannot_lead_out_of_the_store(elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "evil")
    order = sweep.bundle("b").order
    order.parent.mkdir(parents=True)
    outside = BundleOrder("b", "w", (("../../../outside", 1),), Limits(), 1, ("cpu0",))
    write_json(order, dataclasses.asdict(outside))
    supervised = python("-m", "launch.supervise.supervisor", str(order.parent), cwd=elsewhere)
    assert supervised.returncode != 0 and "'../../../outside' is not the name of a folder" in supervised.stderr
    assert [path.name for path in elsewhere.iterdir()] == ["sweeps"]


@pytest.mark.parametrize("name", ["plan.json", "outcome.json", "metrics.jsonl", "environment.json", "rank0.jsonl"])
def test_brackets_without_end_are_a_damaged_record(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, name: str
) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "deep")
    next(sweep.root.rglob(name)).write_text("[" * 200_000 + "\n1\n")
    for command in (["status", "deep"], ["report", "deep"]):
        assert main(command) in (0, 2, 3, 4)
    captured = capsys.readouterr()
    assert "nested too deeply" in captured.out + captured.err


@pytest.mark.parametrize(
    ("name", "commands"),
    [("queue.lock", ("status", "resume")), ("order.lock", ("resume",)), ("report.lock", ("report",)), ("plan.json", ("status",)),
     ("bundles/bundle000/lock", ("status", "cancel")), ("bundles/bundle000/bundle.json", ("resume", "cancel"))],
)  # fmt: skip
def test_a_folder_or_a_link_in_place_of_a_file_is_named_with_its_fix(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, name: str, commands: tuple[str, ...]
) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "mine", repeats=1, steps=20)
    order = BundleOrder("bundle000", "w", (("run-r0", 1),), Limits(), 1, ("cpu0",))
    write_json(sweep.bundle("bundle000").order, order)
    path = sweep.root / name
    for verb in commands:
        path.unlink(missing_ok=True)
        path.mkdir()
        assert main([verb, "mine"]) == 2
        assert f"{name}: Is a directory; it must be a file: move the folder away" in capsys.readouterr().err
        path.rmdir()
        if name.endswith("lock"):
            path.symlink_to(elsewhere / "another.lock")
            assert main([verb, "mine"]) == 2
            assert "it must not be a link: delete the link" in capsys.readouterr().err


def test_a_store_is_a_folder(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = elsewhere / "store"
    store.touch()
    for command in (["status"], ["status", "mine"], ["prune", "--older-than", "1"], ["logs", "eager"]):
        assert main([*command, "--store", str(store)]) == 1
        assert f"--store: {store} is not a folder" in capsys.readouterr().err
    monkeypatch.setenv("ORCHESTRATOR_STORE", str(store))
    assert main(["status"]) == 1
    assert f"$ORCHESTRATOR_STORE: {store} is not a folder" in capsys.readouterr().err


def test_a_plan_of_another_version_is_one_message(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "old", repeats=1, steps=20)
    plan = sweep.plan.read_text()
    for damaged in (plan.replace('"margins"', '"margin"'), plan.replace('"inspect"', '"inspected"')):
        sweep.plan.write_text(damaged)
        assert write_report(["sweeps/old"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "of this version" in line and "run the sweep again to write a new" in line
        assert main(["resume", "old"]) == 2
        assert line in capsys.readouterr().err


def test_no_record_steers_the_terminal(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "evil")
    plan = json.loads(sweep.plan.read_text())
    run_id = plan["cells"][0]["run_ids"][0]
    plan["cells"][0]["label"] = "eager\x1b]0;owned\x07"
    sweep.plan.write_text(json.dumps(plan))
    outcome = json.loads(sweep.run(run_id).attempt(1).outcome.read_text())
    outcome |= {"outcome": "FAILED", "message": "\x1b[2J\x9b31mgone\nrun_x COMPLETED", "failure_class": "\x1b[1A"}
    sweep.run(run_id).attempt(1).outcome.write_text(json.dumps(outcome))
    damaged = sweep.run(plan["cells"][1]["run_ids"][0]).attempt(1).outcome
    damaged.write_text(json.dumps(outcome | {"outcome": "\x1b[31m"}))
    for command in (
        ["status", "evil"],
        ["status", "evil", "--watch"],
        ["status"],
        ["report", "evil"],
        ["status", "\x1b[1m"],
    ):
        main(command)
        captured = capsys.readouterr()
        shown = captured.out + captured.err
        assert not set(shown) & set("\x1b\x07\x9b"), command
        assert "\nrun_x" not in shown, command


def test_a_log_keeps_its_bytes(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "logged")
    run_id = next(iter(read_plan(sweep).cell_of_run()))
    log = sweep.run(run_id).attempt(1).log(0)
    log.parent.mkdir(exist_ok=True)
    log.write_text("\x1b[31m50%\n")
    assert main(["logs", run_id]) == 0
    assert capsys.readouterr().out.endswith("\x1b[31m50%\n")


@pytest.mark.parametrize(("free", "said"), [(0, 1), (4096, 0)])
def test_status_warns_of_a_full_disk_while_a_run_is_running(
    capsys: pytest.CaptureFixture[str], elsewhere: Path, monkeypatch: pytest.MonkeyPatch, free: int, said: int
) -> None:
    def unended(run: AttemptRecord) -> None:
        run.outcome = None

    monkeypatch.setattr(states.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    sweep = write_sweep(elsewhere / "sweeps" / "full", steps=20, edit=unended)
    words = "sweeps/full: the disk is full. A run that cannot write is stopped. It stays RUNNING until"
    assert main(["status", "full"]) == 0
    assert words not in capsys.readouterr().out, "nothing of it runs"

    bundle = sweep.bundle(read_plan(sweep).bundles[0].bundle_id)
    bundle.root.mkdir(parents=True)
    lock = Lock.try_acquire(bundle.lock)
    assert lock is not None
    os.utime(bundle.lock, (0, 0))  # The lock is older than the runs.
    assert main(["status", "full"]) == 0
    assert capsys.readouterr().out.count(words) == said

    def last_look(_: Path) -> SimpleNamespace:
        lock.release()
        return SimpleNamespace(free=free)

    monkeypatch.setattr(states.shutil, "disk_usage", last_look)
    assert main(["status", "full", "--watch"]) == 0
    assert capsys.readouterr().out.count(words) == said
