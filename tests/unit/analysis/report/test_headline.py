"""Test that the headline claims no more than the verdicts do, for any combination of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import pytest

from analysis.limits.speedup_bound import EagerStep, SpeedupBound
from analysis.memory.peaks import CellMemory, PhasePeak
from analysis.pairing.step_checks import StepChecks
from analysis.records.run import EndedAttempt, Run
from analysis.report.charts import FAILING, SPEED_COLOURS, UNDECIDED, speed_chart
from analysis.report.headline import headline
from analysis.report.plots import draw
from analysis.report.summary import summarise
from analysis.speed.speed_verdict import SpeedVerdict
from analysis.speed.speedup import Speed
from analysis.sweep.cell_results import CellIntegrity, CellResult, CellSpeed
from analysis.verdict.verdict import STEP_CHECKED, VERDICTS, Verdict, VerdictName
from launch.contract.outcomes import Expectation, Outcome, OutcomeName
from launch.contract.plan import Margins
from launch.contract.spec import Device, GraphImpl, Parallelism
from tests.records import GIB, workload_spec, written_cell

INTERVALS = {"FASTER": (1.11, 1.58), "NEUTRAL": (0.995, 1.004), "SLOWER": (0.8, 0.9), "INCONCLUSIVE": (0.54, 2.82)}


def speed(verdict: SpeedVerdict, ratio: float = 1.33, pairs: int = 3) -> Speed:
    low, high = INTERVALS[verdict] if pairs > 1 else (None, None)
    return Speed(
        verdict,
        ratio,
        low,
        high,
        low,
        high,
        pairs,
        100,
        0,
        0,
        "",
        None,
        "",
        None,
        187.0,
        187.0 / ratio,
        1.0,
        1.0,
        1.0,
        1.0,
    )


def cell(
    impl: GraphImpl = "none",
    verdict: VerdictName | None = None,
    sped: Speed | None = None,
    *,
    peak: float = 97.5,
    outcome: OutcomeName = "COMPLETED",
    expect: OutcomeName = "COMPLETED",
    workload: int = 0,
    device: Device = "cuda",
) -> CellResult:
    written = written_cell(workload_spec(workload, impl, 120, device=device), 1, Expectation(expect))
    attempt = EndedAttempt(1, Outcome(outcome, "measure", "b", 0.0, 1.0), {}, (), ())
    memory = CellMemory("device", (PhasePeak("measure", int(peak * GIB), None, None, None),), None, whole=True)
    return CellResult(
        written,
        (Run("r", 0, 1, attempt),),
        verdict=verdict and Verdict(verdict),
        speed=CellSpeed(speedup=sped),
        memory=memory,
    )


EAGER = cell()


def test_a_gain_is_told_with_its_interval_its_agreement_and_its_memory() -> None:
    best = cell("full_iteration", "BITWISE", speed("FASTER"), peak=95.5)
    assert headline([EAGER, best]) == (
        "Turn graphs on: `full_iteration, lr 0.001` is 1.33x faster (1.11 to 1.58, 3 pairs) and bit-identical over 0 steps only; "
        "peak memory falls from 97.5 to 95.5 GiB. 1 of 1 configuration passes."
    )
    checked = cell("torch", STEP_CHECKED, speed("FASTER", 1.2))
    both = headline([EAGER, checked, best])
    assert "`full_iteration" in both.split("faster")[0] and both.endswith("2 of 2 configurations pass.")
    alone = headline([EAGER, checked])
    assert "equivalent in its checked steps (0 steps are too few to compare curves)" in alone and "noise" not in alone


def test_a_repair_that_the_own_job_lacks_is_named_beside_the_gain() -> None:
    best = cell("transformer_engine", "BITWISE", speed("FASTER"))
    graph = {**best.cell.spec["cuda_graph"], "mend": ["yarn_positions"]}
    repaired = replace(best, cell=replace(best.cell, spec={**best.cell.spec, "cuda_graph": graph}))
    words = "with a repair that your own job lacks (yarn_positions)"
    assert words in headline([EAGER, repaired]) and "repair" not in headline([EAGER, best])
    both = headline([EAGER, repaired, cell("torch", "BITWISE", speed("FASTER", 1.2))])
    assert (
        both.startswith("Turn graphs on: `transformer_engine")
        and "`torch, lr 0.001` needs no repair and is 1.20x" in both
    )
    undecided = replace(repaired, speed=CellSpeed(speedup=speed("INCONCLUSIVE")))
    assert words in headline([EAGER, undecided])
    faster = cell("torch", "BITWISE", speed("FASTER", 1.5))
    beside = summarise([EAGER, undecided, faster])
    assert "repair" not in beside.headline
    assert f"With a repair that your own job lacks: `{undecided.cell.label}` (yarn_positions)." in beside.notes
    assert "With a repair" not in summarise([EAGER, repaired]).text


def test_a_quick_sweep_judges_no_speed() -> None:
    cells = [EAGER, cell("torch", STEP_CHECKED, speed("INCONCLUSIVE"))]
    assert headline(cells, quick=True).startswith("No speed was judged: `torch, lr 0.001` is equivalent in its checked")
    assert (
        "Speed undecided" in summarise(cells).text
        and "Speed undecided" not in summarise(cells, Margins(mode="quick")).text
    )


def test_the_settings_of_a_whole_sweep_are_left_out_where_a_legend_has_them() -> None:
    eager, graphed = replace(EAGER, name="A0"), replace(cell("torch", "BITWISE", speed("FASTER")), name="A1")
    assert headline([eager, graphed]).startswith("Turn graphs on: `torch` (A1) is 1.33x faster")
    other = replace(cell(workload=1), name="B0")
    assert headline([eager, graphed, other]).startswith("Turn graphs on: `torch, lr 0.001` (A1) is 1.33x faster")


def test_what_diverged_or_ran_out_of_memory_stands_beside_a_gain() -> None:
    said = headline([
        EAGER,
        cell("torch", "EQUIVALENT", speed("FASTER")),
        cell("local", "DIVERGED", speed("FASTER", 3.0)),
        cell("full_iteration", "INCOMPARABLE", outcome="CUDA_OOM"),
    ])  # fmt: skip
    assert said.startswith("Turn graphs on: `torch, lr 0.001` is 1.33x faster") and "3.00x" not in said
    assert said.endswith("1 of 3 configurations pass; 1 DIVERGED, 1 out of memory.")


def test_several_layouts_are_counted_and_the_largest_gain_is_named() -> None:
    layouts = [cell(workload=number) for number in range(3)]
    graphed = [cell("torch", "BITWISE", speed(*each), workload=number) for number, each in enumerate(
        [("FASTER", 1.2), ("FASTER", 1.4), ("NEUTRAL", 1.0)])]  # fmt: skip
    said = headline([*layouts, *graphed])
    assert said.startswith(
        "Turn graphs on in 2 of 3 workloads: `torch, lr 0.002` is 1.40x faster (1.11 to 1.58, 3 pairs), the largest"
    )


def test_a_workload_without_a_gain_keeps_its_undecided_speed() -> None:
    eager = [cell(workload=number) for number in range(2)]
    faster = cell("torch", "BITWISE", speed("FASTER"))
    unsure = [cell("torch_compile", "BITWISE", speed("INCONCLUSIVE"), workload=number) for number in range(2)]
    text = summarise([*eager, faster, *unsure]).text
    assert "Speed undecided: `torch_compile, lr 0.002` ()." in text
    assert "Speed undecided" not in summarise([eager[0], faster, unsure[0]]).text
    checked = replace(speed("INCONCLUSIVE", 3.66), low=2.56, high=5.24, reason="outliers decide")
    beside = summarise([eager[0], faster, cell("torch_compile", "BITWISE", checked)]).text
    assert "Speed undecided: `torch_compile, lr 0.001` (outliers decide)." in beside, "1 is not in its interval"


def test_a_doubt_about_an_interval_without_1_is_named_instead_of_the_order() -> None:
    unsteady = replace(
        speed("INCONCLUSIVE", 3.66), low=2.56, high=5.24, reason="the speed-up changes; measure more steps"
    )
    said = headline([EAGER, cell("torch", "BITWISE", unsteady)])
    assert (
        "(2.56 to 5.24, 3 pairs)" in said and "; the speed-up changes. 1 of 1" in said and "may be as fast" not in said
    )


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([cell("torch", "BITWISE", speed("NEUTRAL", 1.0))], "Leave graphs off: no configuration that passes is faster"),
        ([cell("torch", "BITWISE", speed("INCONCLUSIVE"))], "No speed-up confirmed yet: `torch, lr 0.001` measured 1.33x (0.54 to"),
        ([cell("torch", "BITWISE", speed("INCONCLUSIVE", pairs=1))], "No speed-up confirmed yet: `torch, lr 0.001` measured 1.33x (1 pair)"),
        ([cell("torch", "BITWISE")], "No speed-up confirmed yet: `torch, lr 0.001` is bit-identical over 0 steps only, but its speed"),
        ([cell("torch", "BITWISE", speed("SLOWER", 0.85)), cell("local", "INCONCLUSIVE")], "No speed-up confirmed yet: "),
        ([cell("torch", "DIVERGED", speed("FASTER"))], "Leave graphs off: 0 of 1 configuration passes; 1 DIVERGED."),
        ([cell("torch", "DIVERGED"), cell("local", "UNFINISHED")], "No decision yet: 0 of 2 configurations pass; 1 DIVERGED, 1 UNFINISHED."),
        ([cell("torch", "INCOMPARABLE", outcome="NODE_FAIL")], "No decision yet: 0 of 1 configuration passes; 1 ended NODE_FAIL."),
        ([cell("torch", None, outcome="CUDA_OOM", expect="CUDA_OOM")], "Leave graphs off: 0 of 1 configuration passes; 1 failed as expected"),
    ],
)  # fmt: skip
def test_without_a_gain_nobody_is_told_to_turn_graphs_on(cells: list[CellResult], said: str) -> None:
    assert headline([EAGER, *cells]).startswith(said)


def test_an_undecided_speed_is_told_with_the_most_that_graphs_can_gain() -> None:
    def bounded(impl: GraphImpl, busy: float) -> CellResult:
        result = cell(impl, "BITWISE", speed("INCONCLUSIVE", 1.01))
        return replace(
            result, speed=replace(result.speed, bound=SpeedupBound(EagerStep(20.0, busy, busy, None, 1000.0)))
        )

    cells = [EAGER, bounded("torch", 19.5), bounded("local", 19.2)]
    assert "; graphs can gain at most 1.04x. 2 of 2" in headline(cells)
    assert "at most" not in headline([*cells, cell("full_iteration", "BITWISE", speed("INCONCLUSIVE"))])


def test_memory_that_eager_lacks_too_says_nothing_against_graphs() -> None:
    said = headline([cell(outcome="CUDA_OOM"), cell("torch", "INCOMPARABLE", outcome="CUDA_OOM")])
    assert said == "No decision yet: 0 of 1 configuration passes; 1 out of memory, like eager."
    lost = cell("local", "INCOMPARABLE", outcome="NODE_FAIL")
    said = headline([cell(outcome="CUDA_OOM"), cell("torch", "INCOMPARABLE", outcome="CUDA_OOM"), lost])
    assert said.endswith("pass; 1 out of memory, like eager; 1 ended NODE_FAIL.")


def test_a_cpu_decides_nothing_and_gpus_speak_for_themselves() -> None:
    on_cpu = [cell(device="cpu"), cell("torch_compile", "EQUIVALENT", speed("FASTER", 9.0), device="cpu")]
    assert headline(on_cpu).startswith(
        "A CPU shows nothing about CUDA graphs: `torch_compile, lr 0.001` is 9.00x faster"
    )
    both = headline([*on_cpu, EAGER, cell("torch", "BITWISE", speed("NEUTRAL", 1.0))])
    assert both.startswith("Leave graphs off") and "torch_compile" not in both


def test_no_combination_of_verdicts_claims_more_than_they_do() -> None:
    kinds = [(verdict, sped) for verdict in VERDICTS for sped in (*get_args(SpeedVerdict), None)]
    for (left, left_speed), (right, right_speed) in itertools.product(kinds, kinds):
        cells = [
            cell("torch", left, left_speed and speed(left_speed)),
            cell("local", right, right_speed and speed(right_speed)),
        ]
        said = headline([EAGER, *cells])
        gains = [
            each for each in cells if each.passes and each.speed.speedup and each.speed.speedup.verdict == "FASTER"
        ]
        assert said.startswith("Turn graphs on") == ("x faster (" in said) == bool(gains)
        assert ("bit-identical" in said) <= ("BITWISE" in (left, right))
        assert all(verdict in said for verdict in (left, right) if not Verdict(verdict).passes)
        if said.startswith("Leave graphs off"):
            assert not {"INCONCLUSIVE", "UNFINISHED", "INCOMPARABLE"} & {left, right}
            assert not any(each.passes and each.speed.speedup is None for each in cells)


def test_what_decides_an_inconclusive_verdict_is_told_beside_its_reason() -> None:
    unsure = replace(
        cell("torch", "INCONCLUSIVE"), verdict=Verdict("INCONCLUSIVE", "eager repeats differ", "repeats=4")
    )
    assert "(eager repeats differ; fix: repeats=4)" in summarise([EAGER, unsure]).text
    unexplained = replace(unsure, verdict=Verdict("INCONCLUSIVE", "eager repeats differ"))
    assert "(eager repeats differ)" in summarise([EAGER, unexplained]).text


def test_a_cell_in_doubt_is_not_recommended() -> None:
    gain = cell("torch", "BITWISE", speed("FASTER"))
    doubtful = replace(gain, speed=replace(gain.speed, timing_doubt="timing is doubtful"))
    unsound = replace(gain, integrity=CellIntegrity(("events of rank 0 cannot be read",)))
    expected_to_fail = replace(gain, cell=replace(gain.cell, expect=Expectation("CUDA_OOM")))
    for result in (doubtful, unsound, expected_to_fail):
        assert not headline([EAGER, result]).startswith("Turn graphs on")
    assert headline([EAGER]) == ""


def test_workloads_that_differ_in_layout_are_called_layouts() -> None:
    def over(workload: int, layout: Parallelism, result: CellResult) -> CellResult:
        spec = workload_spec(workload, result.spec.cuda_graph.impl, 120, layout.world_size, "cuda")
        return replace(result, cell=written_cell(replace(spec, parallelism=layout), 1))

    def said(*layouts: Parallelism) -> str:
        pair = EAGER, cell("torch", "BITWISE", speed("FASTER"))
        return headline([over(number, layout, each) for number, layout in enumerate(layouts) for each in pair])

    assert said(Parallelism(), Parallelism(dp=2)).startswith("Turn graphs on in 2 of 2 layouts: ")
    other_dispatcher = Parallelism(dispatcher="allgather"), Parallelism(dispatcher="alltoall")
    assert said(*other_dispatcher).startswith("Turn graphs on in 2 of 2 workloads: ")


def test_cells_with_one_reason_are_named_together_with_what_their_step_checks_found() -> None:
    undecided = Verdict("INCONCLUSIVE", "too noisy", fix="train longer")
    cells = [replace(cell("torch", "INCONCLUSIVE"), name=name, verdict=undecided) for name in ("A1", "A2")]
    assert (
        "**2 graphed cells INCONCLUSIVE**: A1, A2 (too noisy; fix: train longer)." in summarise([EAGER, *cells]).notes
    )
    checks = StepChecks((4,), 3, 40, 1, 0.5, 0, 1.0)
    clean, missing = (
        replace(cells[0], graphs=replace(cells[0].graphs, step_checks=each))
        for each in (checks, replace(checks, undecided="not step-checked"))
    )
    said = "too noisy; its step checks found no difference beyond noise; fix: train longer"
    assert said in summarise([EAGER, clean]).text and "step checks" not in summarise([EAGER, missing]).text


def test_the_picture_of_speed_ups_has_the_verdict_as_colour_and_the_upper_bound() -> None:
    step = EagerStep(20.0, 16.0, 15.5, 19.0, 1000.0)
    bounded = cell("torch", "BITWISE", speed("FASTER"))
    bounded = replace(bounded, name="A1", speed=replace(bounded.speed, bound=SpeedupBound(step)))
    waits = replace(bounded, speed=replace(bounded.speed, bound=SpeedupBound(replace(step, communicates=True))))
    diverged = cell("local", "DIVERGED", speed("FASTER", 3.0, pairs=1))
    unsure = cell("torch", "INCONCLUSIVE", speed("FASTER"))
    chart = speed_chart([bounded, waits, diverged, cell("full_iteration", "BITWISE"), unsure])
    assert chart is not None and chart.left == 0 and chart.right >= 3.3
    small = speed_chart([bounded, unsure])
    assert small is not None and 1.0 < small.bars[0].low < small.right < 2 and 0.9 < small.left < 1  # type: ignore[operator]
    assert [(bar.label, bar.colour, bar.bound) for bar in chart.bars] == [
        ("FASTER", SPEED_COLOURS["FASTER"], 1.25), ("FASTER", SPEED_COLOURS["FASTER"], 20 / 15.5),
        ("loss DIVERGED", FAILING, None), ("loss INCONCLUSIVE", UNDECIDED, None),
    ]  # fmt: skip
    assert (chart.bars[0].name, chart.bars[0].low, chart.bars[2].low) == ("A1", 1.11, None)
    assert draw(chart).startswith(b"\x89PNG")
    assert speed_chart([EAGER]) is None


@pytest.mark.parametrize(
    ("margins", "said"),
    [
        (Margins(), ""),
        (Margins(loss=1e-4, grad_norm=0.0), ""),
        (Margins(loss=1.0, grad_norm=0.0), "**Wider margins than usual**: 1 nats in the loss."),
        (Margins(grad_norm=0.5), "**Wider margins than usual**: 0.5 of the gradient norm."),
        (Margins(allow_differences=("lr", "packages")), "**Allowed to differ besides graphs**: `lr`, `packages`."),
    ],
)
def test_a_pass_by_wider_margins_is_told_as_one(margins: Margins, said: str) -> None:
    notes = summarise([EAGER, cell("torch", "EQUIVALENT")], margins).notes
    assert [note for note in notes if "margins" in note or "to differ" in note] == ([said] if said else [])
