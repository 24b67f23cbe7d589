"""Test `compare`, and the golden files of `report`."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from launch.contract.plan import Reason
from orchestrator.cli.main import main
from tests.records import AttemptRecord, Edit, Extra, unchanged, workload_spec, write_sweep
from tests.unit.orchestrator.cli.command_line import ROOT


def later(sweep: Path, edit: Edit = unchanged) -> str:
    return str(write_sweep(sweep, steps=120, repeats=3, edit=edit).root)


def nan(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.metrics[80]["loss"] = math.nan


def lost(run: AttemptRecord) -> None:
    run.begun = not run.spec.graphed


def test_compare_with_a_golden_file(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    later(elsewhere / "sweeps" / "then")
    assert main(["report", "then", "--golden", "golden.json", "--junit", "then.xml"]) == 0
    assert ElementTree.parse(elsewhere / "then.xml").getroot().attrib["tests"] == "2"
    capsys.readouterr()
    _compares(capsys, elsewhere, unchanged, 0, "nothing is worse (2 of 2 cells as before)")
    _compares(capsys, elsewhere, nan, 3, "worse (1 worse; 1 of 2 cells as before)")
    _compares(capsys, elsewhere, lost, 2, "not known yet (1 without an outcome; 1 of 2 cells as before)")


def _compares(capsys: pytest.CaptureFixture[str], elsewhere: Path, edit: Edit, code: int, said: str) -> None:
    name = edit.__name__
    later(elsewhere / "sweeps" / name, edit)
    assert main(["compare", "golden.json", name, "--junit", "out/compare.xml"]) == code
    assert capsys.readouterr().out.startswith(f"{name} against golden.json: {said}")
    assert not (elsewhere / "sweeps" / name / "report").exists(), "nothing is written of either"
    suite = ElementTree.parse(elsewhere / "out" / "compare.xml").getroot()
    assert (suite.attrib["failures"] != "0") == (code == 3) and (suite.attrib["errors"] != "0") == (code == 2)

    assert main(["compare", "golden.json", str(elsewhere / "sweeps" / name), "--json"]) == code
    content = json.loads(capsys.readouterr().out)
    assert content["exit_code"] == code and len(content["cells"]) == 2


def test_report_names_what_a_comparison_with_a_golden_file_cannot_find(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    write_sweep(elsewhere / "sweeps" / "then", steps=30, repeats=1, edit=nan_late)
    main(["report", "then", "--golden", "golden.json"])
    verdict, *_ = capsys.readouterr().err.splitlines()
    assert (
        verdict
        == "golden.json: torch_compile, lr 0.001: unsound records; a later sweep with the same result will not count as worse"
    )

    write_sweep(elsewhere / "sweeps" / "now", steps=30, repeats=1)
    main(["report", "now", "--golden", "golden.json"])
    *_, speed = capsys.readouterr().err.splitlines()
    assert speed.startswith("golden.json: cannot detect a speed loss of 20% for torch_compile, lr 0.001, ")
    assert speed.endswith("x (1 pair); add repeats to narrow it")


def nan_late(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.metrics[20]["loss"] = math.nan


def test_compare_rejects_an_earlier_sweep_in_which_no_cell_ran(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    extra = [Extra(workload_spec(0, "full_iteration", 120), (Reason("capture.warmup", "m", "r"),))]
    write_sweep(elsewhere / "sweeps" / "then", workloads=0, extra=extra)
    assert main(["compare", "then", "then"]) == 1
    assert "no cell of it ran" in capsys.readouterr().err
    assert main(["report", "then", "--golden", "golden.json"]) == 1
    assert "--golden: golden.json: no cell of the sweep ran" in capsys.readouterr().err
    assert not (elsewhere / "golden.json").exists()


def test_compare_prints_every_difference(capsys: pytest.CaptureFixture[str]) -> None:
    results = ROOT / "docs" / "results"
    files = [str(results / name / "report.json") for name in ("launch_bound", "two_nodes")]
    assert main(["compare", *files]) == 3
    text = capsys.readouterr().out
    for line in ("worse:", "matched by label, since their ids differ", "the recipe differs in:", "    cell: COMPLETED"):
        assert f"\n{line}" in text
    assert "\n  training.sequence_length: 256 -> 2048" in text
