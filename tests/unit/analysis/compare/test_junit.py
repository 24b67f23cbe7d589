"""Test JUnit XML: it agrees with the exit code, and stays valid XML for any message."""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.compare.cell_changes import Change, FigureChange
from analysis.compare.golden import Golden, GoldenCell, GoldenFailure, GoldenVerdict, golden_of
from analysis.compare.junit import junit_of_comparison, junit_of_report
from analysis.compare.sweep_changes import CellComparison, Comparison, compare_sweeps
from analysis.verdict.verdict import PASSES, VERDICTS, VerdictName
from launch.contract.outcomes import Expectation, Outcome
from launch.contract.plan import Reason
from tests.records import STARTED, AttemptRecord, Extra, workload_spec, write_sweep


def suite_of(content: bytes) -> ElementTree.Element:
    root = ElementTree.fromstring(content)
    assert root.tag == "testsuites"
    (suite,) = root
    cases = suite.findall("testcase")
    for ending, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert suite.attrib[count] == root.attrib[count] == str(sum(case.find(ending) is not None for case in cases))
    assert suite.attrib["tests"] == str(len(cases))
    return suite


def endings(suite: ElementTree.Element) -> dict[str, tuple[str, str]]:
    """Return how each testcase that did not pass ended, and the type of its failure, by its name."""
    return {
        case.attrib["name"]: (case[0].tag, case[0].attrib["type"]) for case in suite.findall("testcase") if len(case)
    }


def bad_second_workload(run: AttemptRecord) -> None:
    if not run.spec.graphed:
        return
    workload = round(run.spec.training.learning_rate * 1000)
    if workload == 2:
        run.metrics[80]["loss"] = math.nan
    if workload == 3:
        run.outcome = Outcome("CUDA_OOM", "capture", "bundle002", STARTED, STARTED + 9, 0, "OOM_CAPTURE", "m", "r")
    if workload == 4:
        run.outcome = None


def test_a_report_is_a_testcase_a_cell(tmp_path: Path) -> None:
    extra = [Extra(workload_spec(9, "full_iteration", 120), (Reason("capture.warmup", "m", "r"),))]
    golden = golden_of(write_sweep(tmp_path / "s", workloads=4, extra=extra, edit=bad_second_workload))
    content = junit_of_report(golden, "mine")
    suite = suite_of(content)
    assert [case.attrib["name"] for case in suite.findall("testcase")][:2] == [
        "eager, lr 0.001",
        "torch_compile, lr 0.001",
    ]
    assert {case.attrib["classname"] for case in suite.findall("testcase")} == {"mine"}
    assert endings(suite) == {
        "torch_compile, lr 0.002": ("failure", "unsound records"),
        "torch_compile, lr 0.003": ("failure", "CUDA_OOM"),
        "torch_compile, lr 0.004": ("error", "UNFINISHED"),
        "full_iteration, lr 0.01": ("skipped", "rejected"),
    }
    values = {one.attrib["name"]: one.attrib["value"] for one in suite.iter("property")}
    assert values["versions.torch"] == "2.13.0"
    assert content == junit_of_report(golden, "mine"), "the same bytes"


def test_what_there_is_nothing_to_hold_against_is_skipped_and_fails_nobody() -> None:
    one = CellComparison("a", "a", "id", (FigureChange("speed", "not comparable", "1.2x", "1.1x"),))
    worse = CellComparison("b", "b", "id", (*one.differences, FigureChange("memory", "worse", "1", "2")))
    suite = suite_of(junit_of_comparison(Comparison("then", "now", (one, worse), (), (), 0.05)))
    assert {case.attrib["classname"] for case in suite.findall("testcase")} == {"against then"}
    assert endings(suite) == {"a": ("skipped", "speed"), "b": ("failure", "memory")}


def cell(
    word: VerdictName | None, unexpected: bool, unsound: tuple[str, ...], unfinished: bool, label: str
) -> GoldenCell:
    verdict = None if word is None else GoldenVerdict(word, "", None)
    expect = Expectation()
    return GoldenCell(label, label, "COMPLETED", expect, unexpected, unsound, unfinished, verdict, None, None, None)


CELLS = st.builds(
    cell,
    st.sampled_from([None, *VERDICTS]),
    st.booleans(),
    st.sampled_from([(), ("wrong",)]),
    st.booleans(),
    st.text(max_size=20),
)


@given(cells=st.lists(CELLS, max_size=4), name=st.text(max_size=20), words=st.text(max_size=20))
def test_any_report_is_xml_and_passes_where_it_does(cells: list[GoldenCell], name: str, words: str) -> None:
    golden = Golden(name, tuple(cells), (), {"a": ((words, 1),)}, "")
    suite = suite_of(junit_of_report(golden, "mine"))
    for one, case in zip(cells, suite.findall("testcase"), strict=True):
        bad = one.verdict is not None and one.verdict.verdict not in PASSES
        passes = not (bad or one.unexpected or one.unsound_records or one.unfinished)
        assert (len(case) == 0) == passes


DIFFERENCES = st.builds(
    FigureChange, st.sampled_from(["outcome", "verdict", "speed", "memory"]),
    st.sampled_from(["worse", "unfinished", "inconclusive", "not comparable", "changed", "better"]), st.text(max_size=9), st.text(max_size=9),
)  # fmt: skip


@given(lists=st.lists(st.lists(DIFFERENCES, max_size=3), max_size=3))
def test_a_comparison_passes_as_its_exit_code_does(lists: list[list[FigureChange]]) -> None:
    cells = tuple(CellComparison(f"{n}", f"{n}", "id", tuple(found)) for n, found in enumerate(lists))
    comparison = Comparison("a", "b", cells, (), (), 0.05)
    suite = suite_of(junit_of_comparison(comparison))
    failed = suite.attrib["failures"] != "0" or suite.attrib["errors"] != "0"
    assert failed == (comparison.exit_code != 0)
    assert (suite.attrib["failures"] != "0") == (comparison.exit_code == 3)


@pytest.mark.parametrize(
    ("change", "ending"), [("worse", "failure"), ("unfinished", "error"), ("inconclusive", "error")]
)
def test_what_is_worse_is_said(change: Change, ending: str) -> None:
    found = (FigureChange("speed", change, "2.0x", "1.0x"), FigureChange("memory", "better", "2 GiB", "1 GiB"))
    suite = suite_of(junit_of_comparison(Comparison("a", "b", (CellComparison("c", "c", "id", found),), (), (), 0.05)))
    (case,) = suite.findall("testcase")
    assert (case[0].tag, case[0].attrib["type"], case[0].attrib["message"]) == (ending, "speed", "speed: 2.0x -> 1.0x")


def test_a_failed_cell_says_why_and_what_to_do() -> None:
    failure = GoldenFailure("rank 0: boom", "mend it", ("graphed",), ())
    cells = tuple(cell(None, True, (), False, label) for label in ("graphed", "other"))
    suite = suite_of(junit_of_report(Golden("s", cells, (), {}, "", failure_modes=(failure,)), "mine"))
    failed, other = (case[0].attrib["message"] for case in suite.findall("testcase")[:2])
    assert failed == "ended COMPLETED, expected COMPLETED; rank 0: boom (fix: mend it)"
    assert other == "ended COMPLETED, expected COMPLETED"


def test_what_xml_cannot_hold_is_shown_and_nothing_ends_an_attribute() -> None:
    words = 'a\x00b\x1b[31m ]]> \ud800 \ufffe <b> " & \n'
    bad = dataclasses.replace(cell("DIVERGED", False, (), False, words), verdict=GoldenVerdict("DIVERGED", words, None))
    suite = suite_of(junit_of_report(Golden(words, (bad,), (), {words: ((words, 1),)}, ""), words))
    (case,) = suite.findall("testcase")
    assert case[0].attrib["message"] == 'a\\x00b\\x1b[31m ]]> \\ud800 \\ufffe <b> " & \n'
    assert case.attrib["name"] == suite.attrib["name"] == case[0].attrib["message"]


def test_the_environment_stands_beside(tmp_path: Path) -> None:
    golden = golden_of(write_sweep(tmp_path / "s", steps=20))
    after = dataclasses.replace(golden, provenance={**golden.provenance, "versions.torch": (("9.9", 4),)})
    suite = suite_of(junit_of_comparison(compare_sweeps(golden, after)))
    assert {one.attrib["name"]: one.attrib["value"] for one in suite.iter("property")} == {
        "versions.torch": "2.13.0 -> 9.9"
    }
