"""Test when `report` writes a report again, and the exit codes of sweeps that validate nothing."""

from __future__ import annotations

import os
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from launch.common.atomic_files import read_json, write_json
from launch.contract.plan import Reason, read_plan
from orchestrator.cli.main import main
from tests.records import AttemptRecord, Extra, workload_spec, write_sweep
from tests.unit.orchestrator.cli.command_line import TINY


def set_times(folder: Path, hours: float) -> None:
    moment = time.time() + hours * 3600
    for path in folder.rglob("*"):
        os.utime(path, (moment, moment))


def test_a_report_is_written_again_when_a_run_changed_whatever_clocks_say(elsewhere: Path) -> None:
    sweep = write_sweep(elsewhere / "sweeps" / "clocks", steps=20)
    resume = ["resume", "clocks", "--executor", "debug"]
    assert main(resume) == 0
    run_id = next(iter(read_plan(sweep).cell_of_run()))
    outcome = sweep.run(run_id).attempt(1).outcome
    write_json(outcome, read_json(outcome) | {"outcome": "FAILED", "phase": "measure"})
    set_times(sweep.report, hours=2)
    assert main(resume) == 3

    written = (sweep.report / "report.md").read_text() + "as it was"
    (sweep.report / "report.md").write_text(written)
    set_times(sweep.root / "runs", hours=4)
    assert main(resume) == 3
    assert (sweep.report / "report.md").read_text() == written, "nothing changed"
    (sweep.report / "report.md").unlink()
    assert main(resume) == 3
    assert (sweep.report / "report.md").exists()


def test_a_sweep_that_validates_nothing_is_not_green(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    """To a nightly job, a host without its driver and rules that reject everything look alike."""
    sweep = ["sweep", TINY, "training.steps=8", "--only", "cuda_graph.impl=torch_compile", "--executor", "debug"]
    assert main(sweep) == main([*sweep[:-2], "--executor", "local"]) == 4
    text = capsys.readouterr().out
    assert text.partition("nothing to run\n\n")[2].startswith("Nothing was validated: no graphed cell could run. ")
    assert main([*sweep, "--allow-empty"]) == main(["resume", "tiny_moe", "--allow-empty", "--executor", "debug"]) == 0
    for options, errors, code in (([], "1", 4), (["--allow-empty"], "0", 0)):
        assert main(["report", "tiny_moe", "--junit", "out.xml", *options]) == code
        assert ElementTree.parse(elsewhere / "out.xml").getroot().attrib["errors"] == errors


def without_last_step(run: AttemptRecord) -> None:
    run.metrics.pop()


def test_a_sweep_of_eager_cells_validates_nothing(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    write_sweep(elsewhere / "sweeps" / "eager", impls=(), steps=20)
    assert main(["report", "eager"]) == 4
    assert capsys.readouterr().out.startswith("\nNothing was validated: the plan has no graphed cell.")
    assert main(["report", "eager", "--allow-empty"]) == 0
    write_sweep(elsewhere / "sweeps" / "failing", impls=(), steps=20, edit=without_last_step)
    assert main(["report", "failing", "--allow-empty"]) == 3, "a failure is a failure"


def test_a_graphed_cell_that_cannot_run_here_is_missing(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    """A host that lost its GPU still compares compiled code on its CPU."""
    reason = Reason("host.gpus", "the run needs 1 GPU on a node, and this host has 0", "go elsewhere")
    extra = [Extra(workload_spec(0, "torch", 20), (reason,), "not_runnable")]
    write_sweep(elsewhere / "sweeps" / "lost", steps=20, extra=extra)
    assert main(["report", "lost", "--junit", "out.xml"]) == 4
    first = capsys.readouterr().out.strip().partition("\n")[0]
    assert first.startswith(
        "Not all was validated: 1 of 2 graphed cells cannot run on this host or cluster. Not validated: "
    )
    assert (
        f"torch, lr 0.001 (host.gpus: {reason.message}). Fix: go elsewhere. A CPU shows nothing about CUDA graphs: "
        in first
    )
    assert ElementTree.parse(elsewhere / "out.xml").getroot().attrib["errors"] == "1"
    assert main(["report", "lost", "--allow-empty"]) == 0
    write_sweep(elsewhere / "sweeps" / "undecided", steps=20, repeats=1, edit=noisy, extra=extra)
    assert main(["report", "undecided", "--allow-empty"]) == 4, "an undecided verdict is none"


def noisy(run: AttemptRecord) -> None:
    if run.spec.graphed:
        for row in run.metrics:
            row["loss"] += 1e-6


def test_junit_has_the_times_of_the_runs(elsewhere: Path) -> None:
    write_sweep(elsewhere / "sweeps" / "timed", repeats=2, steps=20)
    main(["report", "timed", "--junit", "out.xml"])
    suite = ElementTree.parse(elsewhere / "out.xml").getroot()[0]
    assert [case.attrib["time"] for case in suite.iter("testcase")] == ["120.000", "120.000"]
    assert suite.attrib["time"] == "240.000"
