"""Test advice from the records of an eager run: equal records give equal bytes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.load import load
from launch.common.typed_json import from_json
from launch.contract.outcomes import Outcome
from launch.contract.plan import Reason
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.inspection import KINDS, OF_OPERATORS, OF_TRACES, Finding, FindingKind, Inspection
from launch.contract.records.kernels import BOUNDS_US, Kernels, KernelTime
from launch.contract.spec import CudaGraph, Device, EngineName
from orchestrator.advise.advice import Advice, Candidates, advice_to_json, advise, sort_points
from orchestrator.advise.render import (
    FIXES,
    NOT_INSPECTED,
    NOTHING_BREAKS,
    OF_ANY_PART,
    ON_CPU,
    UNKNOWN_KERNELS,
    UNKNOWN_OPERATORS,
    UNKNOWN_WAITS,
    render,
)
from tests.records import EAGER_PROBE, STARTED, AttemptRecord, Edit, Extra, workload_spec, write_sweep, written_cell
from tests.unit.analysis.graphs.test_replay_check import change_probe

KERNELS = Kernels((0.0, 400.0, 500.0, 200.0, 60.0, 30.0, 10.0, 0.0), 7.5, (KernelTime("gemm", 96.0, 4.25),))
WAIT = Finding("synchronisation", "launch/dispatcher.py", 11, "Dispatcher.send", "n = counts.tolist()", 4.0)
SHAPE = Finding("shape", "launch/dispatcher.py", 12, "Dispatcher.send", "out = x.new_empty(n)", 4.0, "(3,), then (5,)")
DEFAULT = Finding("default generator", "launch/model.py", 7, "Layer.forward", "drop(x)", 2.0, "aten.native_dropout")
GRAPHS = (
    CudaGraph("torch_compile"),
    CudaGraph("torch"),
    CudaGraph("torch", ("attn",)),
    CudaGraph("torch", ("attn", "moe_router")),
    CudaGraph("transformer_engine", ("attn",)),
    CudaGraph("full_iteration"),
    CudaGraph("full_iteration", optimizer=True),
)
CANDIDATES: Candidates = dict.fromkeys(GRAPHS, ())
SYNC = Reason("capture.sync", "the dispatcher reads sizes", "use allgather.")


def inspected(*inspections: Inspection) -> Edit:
    """Write inspections rank by rank, as launch.train.telemetry.event_log does."""

    def edit(run: AttemptRecord) -> None:
        for rank, inspection in enumerate(inspections):
            event = {"time": STARTED, "kind": "inspection", "phase": "probe", "step": None}
            run.events[rank].append({**event, "inspection": dataclasses.asdict(inspection)})

    return edit


def probed(**figures: float | None) -> Edit:
    def edit(run: AttemptRecord) -> None:
        for events in run.events.values():
            for event in events:
                if event["kind"] == "probe":
                    event["probe"] = dataclasses.asdict(dataclasses.replace(EAGER_PROBE, **figures))

    return edit


def advice_on(
    folder: Path,
    *edits: Edit,
    candidates: Candidates = CANDIDATES,
    device: Device = "cuda",
    ranks: int = 1,
    extra: Sequence[Extra] = (),
    engine: EngineName = "torch_native",
) -> tuple[Advice, str]:
    """Return the advice on the first eager cell, and the text of all advice. ``engine`` is that of the plan's cells."""

    def edit(run: AttemptRecord) -> None:
        for one in edits:
            one(run)

    records = load(
        write_sweep(folder, impls=(), repeats=1, steps=30, ranks=ranks, device=device, edit=edit, extra=extra)
    )
    cells = tuple(dataclasses.replace(cell, spec={**cell.spec, "engine": engine}) for cell in records.plan.cells)
    records = dataclasses.replace(records, plan=dataclasses.replace(records.plan, cells=cells))
    advice = advise(records, {cell.cell_id: candidates for cell in records.plan.cells})
    return advice[-1 if extra else 0], render(records.plan, advice)


LOOKED = inspected(Inspection((), KERNELS))

# --- what graphs are worth ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "worth", "expected"),
    [
        ({"busy_ms": 8.0, "computing_ms": 8.0}, "much", "Graphs can help."),
        ({"busy_ms": 18.0, "computing_ms": 17.5}, "some", "Graphs may help a little."),
        ({"busy_ms": 20.0, "computing_ms": 19.5}, "little", "Graphs will not help much."),
        ({"busy_ms": 8.0, "computing_ms": 8.0, "host_ms": 3.0}, "some", "does not wait for the host"),
        (
            {"busy_ms": 8.0, "computing_ms": 8.0, "host_ms": None},
            "much",
            "the time to enqueue a step is unknown",
        ),
        ({"busy_ms": 20.4, "computing_ms": 19.9}, "little", "there is nothing to gain"),
        ({"busy_ms": 30.0, "computing_ms": 19.9}, "little", "Graphs will not help much."),
        (
            {"busy_ms": 30.0, "computing_ms": 12.0},
            "some",
            " ms no device is idle, and none computes for more than 59%",
        ),
        (
            {"busy_ms": 14.0, "computing_ms": 12.0, "host_ms": 3.0},
            "some",
            " ms the least busy device is idle for 31%",
        ),
        ({"busy_ms": 14.0, "computing_ms": 12.0}, "much", "or wait for computation on other ranks or for their hosts"),
        (
            {"busy_ms": 20.4, "computing_ms": 5.0, "host_ms": 4.0},
            "little",
            "wait for computation on other ranks. Graphs do not shorten that. The slowest host takes 4.00 ms",
        ),
        ({"busy_ms": 20.4, "computing_ms": 5.0, "host_ms": None}, "some", "or for their hosts"),
        (
            {"busy_ms": 30.0, "computing_ms": 20.4},
            "little",
            " ms: there is nothing to gain",
        ),
        ({"busy_ms": 30.0, "computing_ms": 30.0}, "unknown", "timing is doubtful"),
        ({"busy_ms": 0.0, "computing_ms": 0.0}, "unknown", "**Not measured:** times must be positive"),
    ],
)
def test_worth_depends_on_the_idle_device_and_the_host(
    tmp_path: Path, figures: dict[str, float | None], worth: str, expected: str
) -> None:
    advice, text = advice_on(tmp_path, LOOKED, probed(**figures))
    assert advice.worth == worth
    assert expected in text


def test_the_figures_are_printed(tmp_path: Path) -> None:
    advice, text = advice_on(tmp_path, LOOKED)
    step = advice.step
    assert step is not None and step.busy_ms == pytest.approx(16.0)
    assert f"idle for {step.launch_bound:.0%} of a step of {step.step_ms:.2f} ms" in text
    assert f"at most {step.step_ms / 16:.2f}x as fast. " in text
    assert "The host takes 19.00 ms" in text
    assert "1,200 kernels per step, 97% of them under 50 us; their median is 7.5 us" in text
    assert "| `gemm` | 96 | 4.250 ms |" in text
    assert "torch_compile runs other kernels" in text


EP4 = ((208.31, 117.62, 145.73), (200.42, 117.12, 151.39), (167.55, 123.28, 189.27), (174.8, 119.1, 165.0))
TP2_PP2_EP2 = ((496.3, 133.1, 375.4), (212.61, 132.2, 342.1), (498.1, 154.15, 339.4), (457.0, 152.1, 388.05))


@pytest.mark.parametrize(
    ("step_ms", "ranks", "worth", "expected"),
    [
        (189.99, EP4, "some", "at most 1.54x as fast; only a graphed run"),
        (401.63, TP2_PP2_EP2, "much", "at most 2.61x as fast; only a graphed run"),
    ],
)
def test_ranks_that_wait_for_each_others_hosts_do_not_count_as_busy(
    tmp_path: Path, step_ms: float, ranks: Sequence[tuple[float, float, float]], worth: str, expected: str
) -> None:
    """The busy, computing and host times are those of four GPUs (docs/results/qwen3_8l_parallel), whose graphed steps
    were 1.35 and 2.24 times as fast. Most of a rank's busy time was waiting for another rank's host. In the trace it
    was longer than the step."""

    def of_ranks(run: AttemptRecord) -> None:
        for rank, (busy, computing, host) in enumerate(ranks):
            change_probe(rank, busy_ms=busy, computing_ms=computing, host_ms=host)(run)
        for step in run.metrics:
            step["step_time_ms"] = step_ms

    advice, text = advice_on(tmp_path, LOOKED, of_ranks, ranks=4)
    assert advice.worth == worth
    assert expected in text and "nothing to gain" not in text


def test_on_a_cpu_one_line_says_that_it_has_no_graphs(tmp_path: Path) -> None:
    advice, text = advice_on(tmp_path, inspected(Inspection(())), device="cpu")
    assert advice.worth == "unknown" and advice.unmeasured == ""
    assert text.splitlines()[4] == ON_CPU
    assert "Nothing was found: shapes" in text


def failed(run: AttemptRecord) -> None:
    run.outcome = Outcome(
        "CUDA_OOM", "warmup", "bundle000.1", STARTED, STARTED + 9, 0, "OOM", "no memory.", "a smaller batch."
    )


def unfinished(run: AttemptRecord) -> None:
    run.outcome = None


def damaged(run: AttemptRecord) -> None:
    run.end(rank="first")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (failed, "its run ended CUDA_OOM in warmup: no memory (fix: a smaller batch)."),
        (unfinished, "its run has no outcome: it was interrupted, or it is still running."),
        (damaged, "an outcome of its run is damaged: runs/eager-"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_without_results_is_unmeasured_with_the_reason(
    tmp_path: Path, device: Device, edit: Edit, expected: str
) -> None:
    advice, text = advice_on(tmp_path, edit, device=device)
    assert (advice.worth, advice.findings) == ("unknown", None)
    assert expected in text
    assert "What breaks a capture" not in text and "cuda_graph.impl: torch_compile" in text


def test_a_cell_that_cannot_run_here_is_advised_by_the_rules_alone(tmp_path: Path) -> None:
    spec = dataclasses.replace(workload_spec(7, "none", 30, device="cuda"))
    extra = Extra(spec, (Reason("host.gpus", "8 GPUs are needed", "Go elsewhere."),), "not_runnable")
    advice, text = advice_on(tmp_path, LOOKED, extra=[extra])
    assert advice.unmeasured == "8 GPUs are needed (fix: Go elsewhere)"
    assert len(advice.points) == len(GRAPHS)
    assert "**Not measured:** 8 GPUs are needed" in text


# --- what breaks a capture ------------------------------------------------------------------------------------------


def test_each_kind_is_printed_with_its_line_and_its_fix(tmp_path: Path) -> None:
    found = [dataclasses.replace(WAIT, kind=kind, line=place) for place, kind in enumerate(KINDS, 1)]
    advice, text = advice_on(tmp_path, inspected(Inspection(tuple(found), KERNELS, waits=4.0)))
    assert {one.kind for one in advice.capture_blockers} == set(KINDS) - {"default generator"}
    rows = [line for line in text.splitlines() if line.startswith("| `launch/dispatcher.py:")]
    assert len(rows) == len(KINDS) - 1
    for row, one in zip(rows, advice.capture_blockers, strict=True):
        assert f"`launch/dispatcher.py:{one.line}` in `Dispatcher.send`: `n = counts.tolist()`" in row
        assert row.endswith(f"| 4 | {FIXES[one.kind]} |")


def test_a_clean_step_says_so(tmp_path: Path) -> None:
    advice, text = advice_on(tmp_path, inspected(Inspection((DEFAULT,), KERNELS)))
    assert advice.capture_blockers == () and not advice.has_waits
    assert NOTHING_BREAKS in text
    assert "which a capture registers: `launch/model.py:7`." in text


def test_waits_that_no_line_explains_are_not_clean(tmp_path: Path) -> None:
    advice, text = advice_on(tmp_path, inspected(Inspection((WAIT,), KERNELS, waits=6.0)))
    assert advice.unplaced_waits == 2.0
    assert "waited another 2 times per step" in text and NOTHING_BREAKS not in text
    assert "this time says little about launches" in text


def test_lines_of_several_ranks_are_printed_once(tmp_path: Path) -> None:
    more = dataclasses.replace(SHAPE, count=6.0, detail="(4,), then (2,)")
    found = inspected(Inspection((SHAPE, WAIT), waits=4.0), Inspection((more,), KERNELS))
    advice, _ = advice_on(tmp_path, found, ranks=2)
    assert advice.findings == (WAIT, dataclasses.replace(SHAPE, count=6.0))
    assert advice.kernels == KERNELS


@pytest.mark.parametrize("edits", [[], [inspected(Inspection((), KERNELS))]])
def test_a_rank_without_inspection_leaves_findings_unknown(tmp_path: Path, edits: list[Callable[..., None]]) -> None:
    advice, text = advice_on(tmp_path, *edits, ranks=2)
    assert advice.findings is None
    assert NOT_INSPECTED in text and NOTHING_BREAKS not in text


DAMAGES: dict[str, Any] = {
    "waits": -1, "kernels": {"counts": [1.0], "median_us": 2.0, "longest": []}, "findings": [{"kind": "odd"}],
    "recompilations": "NaN",
}  # fmt: skip


@pytest.mark.parametrize("field", DAMAGES)
def test_a_damaged_inspection_is_none(tmp_path: Path, field: str) -> None:
    def damage(run: AttemptRecord) -> None:
        run.events[0][-1]["inspection"][field] = DAMAGES[field]

    advice, text = advice_on(tmp_path, LOOKED, damage)
    assert advice.findings is None and advice.kernels is None
    assert advice.unmeasured == "no eager run ended with complete records"
    assert "What breaks a capture" not in text


# --- a user's program ---------------------------------------------------------------------------------------------


OWN: Candidates = {CudaGraph("command", name="whole", arguments=("--graph", "on")): ()}
READS = Finding("synchronisation", "train.py", 12, "<module>", "print(loss.item())", 1.0)
CHANGES = Finding("kernels", "", 0, "", "", 1.0, "120 kernels in one step, 124 in another")


OF_PROGRAMS = (*OF_TRACES, *OF_OPERATORS)


def test_a_program_without_findings_says_what_was_not_seen(tmp_path: Path) -> None:
    found = inspected(Inspection((), KERNELS, sought=OF_PROGRAMS))
    advice, text = advice_on(tmp_path, found, candidates=OWN, engine="command")
    assert advice.worth == "much" and "at most 1." in text
    assert "Nothing was found: no line made the host wait, shapes and operators stayed the same, no generator" in text
    assert "the kernels stayed the same" in text and OF_ANY_PART in text and NOTHING_BREAKS not in text
    assert not any(unknown in text for unknown in (UNKNOWN_KERNELS, UNKNOWN_OPERATORS, UNKNOWN_WAITS))
    assert "command:\n  graphs:\n    none: []\n    whole: [--graph, 'on']\n```" in text
    (content,) = advice_to_json("name", [advice])["workloads"]
    assert content["points"] == [{"command.graphs.whole": ["--graph", "on"]}] and set(content["sought"]) == set(
        OF_PROGRAMS
    )


def test_findings_in_a_program_have_its_lines_where_they_are_known(tmp_path: Path) -> None:
    found = inspected(Inspection((READS, CHANGES), KERNELS, waits=2.0, sought=OF_PROGRAMS))
    _, text = advice_on(tmp_path, found, engine="command")
    assert "| `train.py:12` in `<module>`: `print(loss.item())` | the host waits for the device | 1 |" in text
    assert (
        "| line unknown | the kernels change from step to step: 120 kernels in one step, 124 in another | 1 |" in text
    )
    assert "waited another 1 times per step" in text and "If the eager command compiles too, it runs the same" in text


def test_what_one_rank_could_not_see_is_unknown(tmp_path: Path) -> None:
    blind = Inspection((), KERNELS, sought=("synchronisation", "allocation"))
    found = inspected(Inspection((), KERNELS, sought=OF_PROGRAMS), blind)
    advice, text = advice_on(tmp_path, found, ranks=2, engine="command")
    assert advice.sought == ("synchronisation", "allocation")
    assert UNKNOWN_KERNELS in text and UNKNOWN_OPERATORS in text and "stayed the same" not in text


def test_an_eager_program_that_captures_is_not_eager(tmp_path: Path) -> None:
    def captures(run: AttemptRecord) -> None:
        event = {"time": STARTED, "kind": "proof", "phase": "probe", "step": None}
        run.events[0].append({**event, "graphs": dataclasses.asdict(GraphStats("command", graphs=3))})

    found = inspected(Inspection((), KERNELS, sought=OF_PROGRAMS))
    _, text = advice_on(tmp_path, found, captures, engine="command")
    assert "The eager command captured 3 graphs itself" in text


@pytest.mark.parametrize("sought", [OF_OPERATORS, ()], ids=["operators", "nothing"])
def test_on_a_cpu_the_operators_of_a_program_are_seen(tmp_path: Path, sought: tuple[FindingKind, ...]) -> None:
    found = inspected(Inspection((), sought=sought))
    advice, text = advice_on(tmp_path, found, candidates=OWN, device="cpu", engine="command")
    assert (advice.worth, advice.findings, advice.sought) == ("unknown", (), sought)
    assert text.splitlines()[4] == ON_CPU and UNKNOWN_WAITS in text and "whole: [--graph" in text
    assert ("Nothing was found: shapes" in text) == bool(sought) != (UNKNOWN_OPERATORS in text)


# --- what to sweep --------------------------------------------------------------------------------------------------


def test_the_widest_capture_comes_first(tmp_path: Path) -> None:
    advice, text = advice_on(tmp_path, LOOKED)
    assert [graph.label for graph in advice.points] == [
        "full_iteration.optimizer", "full_iteration", "torch_compile", "torch", "torch.attn.moe_router", "torch.attn",
        "transformer_engine.attn",
    ]  # fmt: skip
    assert "    - {cuda_graph.impl: full_iteration, cuda_graph.optimizer: true}\n" in text
    assert "    - {cuda_graph.impl: torch, cuda_graph.scope: []}\n" in text
    assert "    - {cuda_graph.impl: torch, cuda_graph.scope: [attn, moe_router]}\n" in text


@pytest.mark.parametrize(
    "inspection", [Inspection((WAIT,), waits=4.0), Inspection((SHAPE,)), Inspection((), waits=1.0)]
)
def test_whole_steps_come_last_where_a_line_breaks_a_capture(tmp_path: Path, inspection: Inspection) -> None:
    advice, text = advice_on(tmp_path, inspected(inspection))
    assert [graph.implementation.takes_whole_model for graph in advice.points] == [False] * 4 + [True] * 3
    assert "whole steps come last" in text


def test_rejected_configurations_are_printed_with_their_reason(tmp_path: Path) -> None:
    wrong = Reason("megatron.local_inputs", "its gradient is wrong", "use another release.")
    why = {"torch": (SYNC,), "torch_compile": (wrong,)}
    advice, text = advice_on(tmp_path, LOOKED, candidates={graph: why.get(graph.impl, ()) for graph in GRAPHS})
    assert {graph.impl for graph in advice.points} == {"transformer_engine", "full_iteration"}
    line = "- `torch`, `torch.attn`, `torch.attn.moe_router`: the dispatcher reads sizes. Fix: use allgather [capture.sync]."
    before, heading, after = text.partition("\n\nLeft out, because they run but are known to compute wrong results:\n")
    assert (
        heading and line in before.splitlines() and "[megatron.local_inputs]" in after and "[capture.sync]" not in after
    )


def test_if_nothing_can_work_there_is_nothing_to_sweep(tmp_path: Path) -> None:
    _, text = advice_on(tmp_path, LOOKED, candidates=dict.fromkeys(GRAPHS, (SYNC,)))
    assert "sweep:" not in text and "No implementation and scope can work" in text
    assert "`torch_compile`, `torch`, `torch.attn`, `torch.attn.moe_router` and 3 more: the dispatcher" in text


@given(st.permutations(GRAPHS), st.sets(st.sampled_from(GRAPHS)))
def test_points_are_what_works_in_an_order_of_its_own(order: list[CudaGraph], rejected: set[CudaGraph]) -> None:
    cell = written_cell(workload_spec(0, "none", 30, device="cuda"), 1)
    given_order = {graph: (SYNC,) if graph in rejected else () for graph in order}
    for breaks in (False, True):
        points = sort_points(given_order, cell, breaks)
        assert set(points) == set(GRAPHS) - rejected
        by_label = dict(sorted(given_order.items(), key=lambda item: item[0].label))
        assert points == sort_points(by_label, cell, breaks)


# --- records --------------------------------------------------------------------------------------------------------


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    found = inspected(Inspection((WAIT, SHAPE), KERNELS, waits=4.0, recompilations=3))
    texts = {advice_on(tmp_path / name, found)[1] for name in ("one", "other")}
    assert len(texts) == 1
    assert "3 functions were recompiled" in texts.pop()


def test_the_json_holds_what_the_text_says(tmp_path: Path) -> None:
    advice, _ = advice_on(tmp_path, inspected(Inspection((WAIT,), KERNELS, waits=4.0)))
    (content,) = advice_to_json("name", [advice])["workloads"]
    assert advice.step is not None
    assert (content["worth"], content["step"]["busy_ms"]) == ("much", pytest.approx(16.0))
    assert (content["step"]["not_computing"], content["step"]["communicates"]) == (advice.step.not_computing, False)
    assert content["findings"] == (WAIT,)
    assert content["kernels"]["share_below_50_us"] == pytest.approx(1160 / 1200)
    assert content["points"][0] == {"cuda_graph.impl": "torch", "cuda_graph.scope": []}


COUNTS = st.floats(0, 1e9)
INSPECTIONS = st.builds(
    Inspection,
    st.lists(
        st.builds(Finding, st.sampled_from(KINDS), st.text(), st.integers(0, 9999), st.text(), st.text(), COUNTS, st.text()),
        max_size=4,
    ).map(tuple),
    st.none() | st.builds(
        Kernels,
        st.lists(COUNTS, min_size=len(BOUNDS_US) + 1, max_size=len(BOUNDS_US) + 1).map(tuple),
        COUNTS,
        st.lists(st.builds(KernelTime, st.text(), COUNTS, COUNTS), max_size=3).map(tuple),
    ),
    COUNTS,
    st.integers(0, 99),
    st.lists(st.sampled_from(KINDS), unique=True).map(tuple),
)  # fmt: skip


@given(INSPECTIONS)
def test_an_inspection_goes_through_json(inspection: Inspection) -> None:
    content = json.loads(json.dumps(dataclasses.asdict(inspection)))
    assert from_json(Inspection, content) == inspection


@given(INSPECTIONS)
def test_shares_of_kernels_grow_up_to_all(inspection: Inspection) -> None:
    kernels = inspection.kernels
    if kernels is not None:
        shares = [kernels.share_below(bound) for bound in BOUNDS_US]
        assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1 + 1e-9
