"""Test report.html in a real browser: its charts draw and respond, it requests nothing, and text of a record stays
text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.report.write_report import write_report
from launch.contract.outcomes import Outcome
from tests.browser.chromium import Chromium
from tests.records import AttemptRecord, write_sweep

pytestmark = pytest.mark.browser

HOSTILE = (
    "</script><script>window.evil = 1</script> <img src=x onerror='window.evil = 1'> ![a](http://127.0.0.1:9/a.png) "
    "[b](javascript:window.evil=1) <!-- <style>* { display: none }</style>"
)


def hostile(run: AttemptRecord) -> None:
    run.environment["settings"]["NCCL_NOTE"] = HOSTILE
    run.events[0].append({"time": 0.0, "kind": "note", "phase": "measure", "step": 1, "message": HOSTILE})
    if run.spec.graphed and run.spec.training.learning_rate == 2e-3:
        run.metrics[90]["loss"] += 0.5
        run.metrics[100]["grad_norm"] = float("nan")
    if run.spec.graphed and run.spec.training.learning_rate == 3e-3:
        run.outcome = Outcome("CUDA_OOM", "capture", "bundle002", 0.0, 1.0, rank=0, message=HOSTILE, remedy=HOSTILE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sweep = write_sweep(
        tmp_path_factory.mktemp("sweep"), workloads=3, impls=("torch_compile", "torch"), device="cuda", edit=hostile
    )
    plan = json.loads(sweep.plan.read_text())
    plan["recipe"] += f"note: {HOSTILE}\n"
    for cell in plan["cells"]:
        cell["label"] += " <script>window.evil = 1</script>"
    sweep.plan.write_text(json.dumps(plan))
    write_report(sweep)
    return sweep.report


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser: Chromium, folder: Path) -> Chromium:
    browser.events.clear()
    browser.screen(1280, 900)
    browser.open(folder / "report.html")
    return browser


def of_kind(page: Chromium, method: str) -> list[dict[str, Any]]:
    return [event["params"] for event in page.events if event.get("method") == method]


def middle_of(page: Chromium, selector: str, share: float = 0.5) -> tuple[float, float]:
    x, y = page.evaluate(
        f"""(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView({{block: "center"}});
        const box = node.getBoundingClientRect(); return [box.x + box.width * {share}, box.y + box.height / 2]; }})()"""
    )
    return float(x), float(y)


def drawn(page: Chromium, figure: int = 1) -> list[str]:
    curves = page.evaluate(
        f"[...document.querySelectorAll('figure')[{figure}].querySelectorAll('.curve')].map(c => c.dataset.label)"
    )
    return [str(label) for label in curves]


def test_every_picture_is_drawn_and_nobody_is_asked_for_anything(page: Chromium, folder: Path) -> None:
    assert not of_kind(page, "Runtime.exceptionThrown") and not of_kind(page, "Log.entryAdded")
    asked = [event["request"]["url"] for event in of_kind(page, "Network.requestWillBeSent")]
    assert asked == [(folder / "report.html").as_uri()]
    pictures = re.findall(r"^!\[(.*)\]\(", (folder / "report.md").read_text(), flags=re.MULTILINE)
    assert len(pictures) == 11
    assert page.evaluate("[...document.querySelectorAll('figure figcaption')].map(c => c.textContent)") == pictures
    empty = "[...document.querySelectorAll('figure')].filter(f => !f.querySelector('svg path[d], svg rect')).length"
    assert page.evaluate(empty) == 0
    assert page.evaluate("document.querySelectorAll('.bad').length") == 8, (
        "of each of four pairs its curve and its difference, which are NaN at a step"
    )


def test_what_records_hold_is_text(page: Chromium) -> None:
    assert page.evaluate("typeof window.evil") == "undefined"
    assert page.evaluate("document.querySelectorAll('img, iframe, object, link, a[href^=javascript]').length") == 0
    assert page.evaluate("document.body.innerText.split('window.evil = 1').length") > 20
    assert page.evaluate("document.querySelector('td code').textContent").endswith("<script>window.evil = 1</script>")
    assert page.evaluate("document.styleSheets.length") == 1


def test_it_says_what_the_markdown_says(page: Chromium, folder: Path) -> None:
    markdown = (folder / "report.md").read_text()
    headings = [line.lstrip("# ").replace("`", "") for line in markdown.splitlines() if line.startswith("#")]
    assert page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => h.textContent)") == headings
    rows = sum(line.startswith("| ") and not line.startswith("| ---") for line in markdown.splitlines())
    assert page.evaluate("document.querySelectorAll('tr').length") == rows


def test_a_long_name_leaves_room_for_the_first_table(page: Chromium, tmp_path: Path) -> None:
    """Neither the label of a three-part scope nor the call that captures it has a place to break."""

    def mechanism(run: AttemptRecord) -> None:
        for event in run.events[0]:
            if "graphs" in event:
                event["graphs"]["mechanism"] = "transformer_engine.pytorch.make_graphed_callables"

    sweep = write_sweep(tmp_path, device="cuda", edit=mechanism)
    plan = json.loads(sweep.plan.read_text())
    plan["cells"][1]["label"] = "transformer_engine.attn.moe_router.moe_preprocess,compile=elementwise"
    sweep.plan.write_text(json.dumps(plan))
    write_report(sweep)
    page.screen(1280, 900)
    page.open(sweep.report / "report.html")
    for table in (0, 1):
        widths = page.evaluate(f"(t => [t.scrollWidth, t.clientWidth])(document.querySelectorAll('.table')[{table}])")
        assert widths[0] <= widths[1]


@pytest.mark.parametrize("width", [390, 900])
def test_verdict_and_speed_up_are_seen_without_scrolling_sideways(page: Chromium, width: int) -> None:
    page.screen(width, 900)
    assert page.evaluate("document.querySelectorAll('th')[2].textContent") == "speed-up"
    edges = "[...document.querySelectorAll('tr > :nth-child(3)')].slice(0, 7).map(cell => cell.getBoundingClientRect().right)"
    assert max(page.evaluate(edges)) <= width
    assert page.evaluate("document.querySelectorAll('details[open]').length") == 0
    page.evaluate("document.querySelector('summary').click()")
    assert page.evaluate("document.querySelector('details').innerText.includes('A graphed cell passes as BITWISE')")


def test_an_interval_that_goes_on_beyond_the_chart_ends_in_an_arrow(page: Chromium, tmp_path: Path) -> None:
    content = Path(page.evaluate("location.pathname")).read_text()
    highs = sorted(float(high) for high in re.findall(r'"high": ?([\d.]+)', content))
    narrow, edits = re.subn(r'("right": ?)[\d.]+', rf"\g<1>{highs[-1] - 1e-3}", content)
    assert edits == 1
    (tmp_path / "narrow.html").write_text(narrow)
    page.open(tmp_path / "narrow.html")
    assert page.evaluate("document.querySelectorAll('.beyond').length") == sum(
        high > highs[-1] - 1e-3 for high in highs
    )


def test_the_pointer_brings_up_the_values_of_a_step(page: Chromium) -> None:
    x, y = middle_of(page, "figure:has(.curve) svg")
    page.mouse("mouseMoved", x, y)
    said = page.evaluate("document.querySelector('figure:has(.curve) .values').innerText")
    step = int(re.search(r"step (\d+)", said)[1])  # type: ignore[index]
    data = page.evaluate("JSON.parse(document.querySelector('figure:has(.curve) script').textContent)")
    assert 50 < step < 70
    for line in data["curves"]:
        assert f"{line['y'][step]:.7g}" in said
    page.mouse("mouseMoved", 1, 1)
    assert page.evaluate("document.querySelector('figure:has(.curve) .values').hidden")


def test_cells_are_switched_off_and_on(page: Chromium) -> None:
    before = drawn(page)
    label = page.evaluate("document.querySelectorAll('figure:has(.curve) .legend button')[1].textContent")
    x, y = middle_of(page, "figure:has(.curve) .legend button:nth-child(2)")
    for state in ("false", "true"):
        page.mouse("mousePressed", x, y, button="left", clickCount=1)
        page.mouse("mouseReleased", x, y, button="left", clickCount=1)
        assert (
            page.evaluate(
                "document.querySelectorAll('figure:has(.curve) .legend button')[1].getAttribute('aria-pressed')"
            )
            == state
        )
        assert drawn(page) == [found for found in before if state == "true" or found != label]


def test_a_stretch_of_steps_is_zoomed_into_and_left(page: Chromium) -> None:
    whole = page.evaluate("document.querySelector('figure .curve').getAttribute('d')")
    left, y = middle_of(page, "figure:has(.curve) svg", 0.5)
    right, _ = middle_of(page, "figure:has(.curve) svg", 0.75)
    page.mouse("mouseMoved", left, y)
    page.mouse("mousePressed", left, y, button="left", clickCount=1)
    page.mouse("mouseMoved", right, y, button="left", buttons=1)
    page.mouse("mouseReleased", right, y, button="left", clickCount=1)
    said = page.evaluate("document.querySelector('figure:has(.curve) div > p:last-child').textContent")
    first, last = map(int, re.findall(r"\d+", said))
    assert 50 < first < last < 95 and "double-click" in said
    assert page.evaluate("document.querySelector('figure .curve').getAttribute('d')") != whole
    page.mouse("mousePressed", left, y, button="left", clickCount=2)
    page.mouse("mouseReleased", left, y, button="left", clickCount=2)
    assert page.evaluate("document.querySelector('figure .curve').getAttribute('d')") == whole


def test_tables_sort_by_a_column(page: Chromium) -> None:
    column = "[...document.querySelector('tbody').rows].map(row => row.cells[1].innerText)"
    before = page.evaluate(column)
    for order in ("ascending", "descending"):
        page.evaluate("document.querySelectorAll('th')[1].click()")
        assert page.evaluate("document.querySelectorAll('th')[1].getAttribute('aria-sort')") == order
        assert page.evaluate(column) == sorted(before, reverse=order == "descending")


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_by_day_and_by_night(page: Chromium, dark: bool) -> None:
    page.screen(390, 844, dark=dark)
    page.evaluate("document.querySelector('.table + p code').textContent = 'transformer_engine.attn'.repeat(4)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = (
        "[...document.querySelectorAll('figure svg')].filter(s => s.getBoundingClientRect().right > innerWidth).length"
    )
    assert page.evaluate(wide) == 0
    head = "(() => { const box = document.querySelector('.table'); return box.scrollWidth - box.clientWidth; })()"
    assert page.evaluate(head) <= 0, "the first table, replay included, needs no scrolling"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") != dark
