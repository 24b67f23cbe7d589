"""Write a report or a comparison as JUnit XML, with one testcase per cell.

A test fails if its answer is bad. It is in error if it gave no answer: a run has no outcome, or its verdict is INCONCLUSIVE.
Cells that were rejected or cannot run are skipped. A comparison also skips a cell that is not comparable and otherwise not
worse. Times are those of the runs, so the same input gives the same bytes.

The class of a testcase is the recipe or the golden file, because a CI follows a test over time by class and name, and the
sweep of each night has another name.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.compare.cell_changes import KINDS, Ending, judge_alone
from analysis.compare.golden import Golden, GoldenCell, GoldenFailure
from analysis.compare.sweep_changes import CellComparison, Comparison

_FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Case:
    """One testcase. ``ending`` is None if it passed. ``kind`` is a word to group by; ``message`` says what is wrong."""

    name: str
    ending: Ending | None = None
    kind: str = ""
    message: str = ""
    seconds: float = 0.0


def junit_of_report(golden: Golden, recipe: str, *, allow_empty: bool = False) -> bytes:
    """Return the JUnit XML of the report on a sweep of ``recipe``. A cell passes if nothing in it makes the report's exit code other than 0.

    If graphed cells could not run, or there are none, one more testcase is in error, unless ``allow_empty`` is set.
    """
    cases = [_case_of_cell(cell, golden.failure_modes) for cell in golden.cells]
    cases += (Case(cell.label, "skipped", cell.state, cell.rules) for cell in golden.not_run)
    if golden.summary.unvalidated and not allow_empty:
        cases.append(Case("graphed cells", "error", "not validated", golden.summary.unvalidated))
    properties = {key: ", ".join(value for value, _ in values) for key, values in golden.provenance.items()}
    return _as_xml(golden.sweep, recipe, cases, properties)


def junit_of_comparison(comparison: Comparison) -> bytes:
    """Return the JUnit XML of a comparison. A cell passes if none of its changes has an ending."""
    properties = {unlike.key: f"{unlike.before} -> {unlike.after}" for unlike in comparison.environment}
    name = f"{comparison.after} against {comparison.before}"
    return _as_xml(name, f"against {comparison.before}", [*map(_case_of_comparison, comparison.cells)], properties)


def _case_of_cell(cell: GoldenCell, failures: Sequence[GoldenFailure]) -> Case:
    found = judge_alone(cell)
    own = (each for each in failures if cell.unexpected and cell.label in (*each.graphed, *each.eager))
    said = "; ".join([found.reason, *(f"{each.message} (fix: {each.fix})" for each in own)])
    return Case(cell.label, KINDS[found.change].ending, found.kind, said, cell.seconds)


def _case_of_comparison(cell: CellComparison) -> Case:
    ending = KINDS[cell.change].ending if cell.change else None
    if ending is None:
        return Case(cell.label, seconds=cell.seconds)
    found = [one for one in cell.differences if KINDS[one.change].ending in (ending, "error")]
    said = "; ".join(f"{one.aspect}: {one.before} -> {one.after}" for one in found)
    return Case(cell.label, ending, ", ".join(one.aspect for one in found), said, cell.seconds)


def _as_xml(name: str, class_name: str, cases: Sequence[Case], properties: Mapping[str, str]) -> bytes:
    """Return the XML in the form that Jenkins, GitLab and GitHub's reporters read: testsuites, testsuite, testcase."""
    endings = [case.ending for case in cases]
    counts = {
        "tests": str(len(cases)),
        "failures": str(endings.count("failure")),
        "errors": str(endings.count("error")),
        "skipped": str(endings.count("skipped")),
        "time": f"{sum(case.seconds for case in cases):.3f}",
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": _legal(name), **counts})
    if properties:
        listed = ElementTree.SubElement(suite, "properties")
        for key, value in properties.items():
            ElementTree.SubElement(listed, "property", {"name": _legal(key), "value": _legal(value)})
    for case in cases:
        identity = {"classname": _legal(class_name), "name": _legal(case.name), "time": f"{case.seconds:.3f}"}
        element = ElementTree.SubElement(suite, "testcase", identity)
        if case.ending:
            said = {"message": _legal(case.message), "type": _legal(case.kind)}
            ElementTree.SubElement(element, case.ending, said)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _legal(text: str) -> str:
    """Return ``text`` with the characters escaped that XML 1.0 forbids (section 2.2, Char). Exception messages may have any."""
    return _FORBIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)
