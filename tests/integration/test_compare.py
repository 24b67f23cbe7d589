"""Compare a finished sweep with itself, by the command line that continuous integration calls."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

from tests.integration.host import Finished


def test_a_real_sweep_is_kept_as_a_golden_file_and_held_against_it(finished: Finished) -> None:
    host, name = finished.host, finished.name
    golden, junit = host.folder / "golden.json", host.folder / "compare.xml"
    written = host.run("report", name, "--golden", str(golden), "--junit", str(junit))
    assert written.returncode == finished.code
    expected = ("cannot detect a speed loss of 20%", *(() if finished.code == 0 else (": INCONCLUSIVE; ",)))
    assert all(any(said in line for said in expected) for line in written.stderr.splitlines()), "of a busy host"
    assert len(golden.read_text()) < len((host.sweep(name).report / "report.json").read_text()) / 2
    suite = ElementTree.parse(junit).getroot()
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("2", "0")
    assert (suite.attrib["errors"] == "0") == (finished.code == 0)

    done = host.run("compare", str(golden), name, "--junit", str(junit), "--json")
    content = json.loads(done.stdout)
    assert [cell["matched"] for cell in content["cells"]] == ["id", "id"]
    different = [(one["aspect"], one["change"]) for cell in content["cells"] for one in cell["differences"]]
    assert different in ([], [("speed", "not comparable")]), "of two pairs on a busy host little is known"
    assert done.returncode == 0 and not done.stderr, done.stdout
    assert content["environment"] == content["recipe"] == []
    assert len(ElementTree.parse(junit).getroot().findall(".//testcase/*")) == len(different)


def test_a_compiled_run_has_no_smaller_set(finished: Finished) -> None:
    run_id = finished.host.run_ids(finished.name)[1]
    done = finished.host.run("bisect", finished.name, run_id, "--executor", "local")
    assert done.returncode == 1 and done.stdout == ""
    assert "there is no smaller set to try: cuda_graph.impl=torch_compile takes no scope" in done.stderr
    assert len(done.stderr.splitlines()) == 2, "what is wrong, and the fix"
