"""Test the memory of a cell: its peaks by phase, the memory that the capture added, and the kind of memory."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from analysis.memory.parts import MemoryParts, memory_parts
from analysis.memory.static_memory import state_bytes
from analysis.records.events import PhaseMemory
from analysis.records.load import load
from analysis.report.write_report import write_report
from analysis.sweep.judge_cells import compare_cells
from launch.contract.outcomes import Outcome
from launch.contract.records.memory import Memory
from launch.contract.spec import Device, Model, RunSpec
from tests.records import GIB, AttemptRecord, Edit, write_sweep
from tests.report_text import report_text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_capture_added_is_what_graphs_hold_at_the_end_of_measure(tmp_path: Path, device: Device) -> None:
    eager, graphed = compare_cells(load(write_sweep(tmp_path, device=device)))
    assert eager.memory is not None
    assert graphed.memory is not None and graphed.memory.kind == ("host" if device == "cpu" else "device")
    assert graphed.memory.added == GIB // 4
    assert eager.memory.added is None
    assert "capture" not in [peak.phase for peak in eager.memory.phases]
    assert graphed.memory.peak == max(peak.peak for peak in graphed.memory.phases)


def test_device_memory_counts_what_lies_outside_the_allocator(tmp_path: Path) -> None:
    _, graphed = compare_cells(load(write_sweep(tmp_path, device="cuda")))
    assert graphed.memory is not None
    measure = next(peak for peak in graphed.memory.phases if peak.phase == "measure")
    assert measure.peak_allocated is not None
    assert measure.peak == measure.peak_allocated + GIB // 8 + GIB // 2
    assert measure.graph_pool == GIB // 4


def test_peaks_are_the_largest_of_ranks_and_repeats(tmp_path: Path) -> None:
    def one_large_rank(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 1:
            for event in run.events[1]:
                if event["kind"] == "phase" and event["phase"] == "capture":
                    event["memory"]["host_peak_rss"] = 100 * GIB

    _, graphed = compare_cells(load(write_sweep(tmp_path, ranks=2, edit=one_large_rank)))
    assert graphed.memory is not None and graphed.memory.peak == 100 * GIB


def test_a_run_that_died_in_capture_still_shows_the_phases_before(tmp_path: Path) -> None:
    def died(run: AttemptRecord) -> None:
        if run.spec.graphed:
            kept = ("init", "build", "warmup")
            run.events[0] = [event for event in run.events[0] if event["phase"] in kept]

    _, graphed = compare_cells(load(write_sweep(tmp_path, edit=died)))
    assert graphed.memory is not None and [peak.phase for peak in graphed.memory.phases] == ["init", "build", "warmup"]
    assert graphed.memory.added is None


def test_what_the_profiler_holds_is_no_memory_of_the_run(tmp_path: Path) -> None:
    def profiled(run: AttemptRecord) -> None:
        for event in run.events[0]:
            if event["kind"] == "phase" and event["phase"] == "probe":
                event["memory"]["device_outside"] = 100 * GIB

    _, graphed = compare_cells(load(write_sweep(tmp_path, device="cuda", edit=profiled)))
    assert graphed.memory is not None and graphed.memory.peak < 10 * GIB


# --- GPUs that other processes use ------------------------------------------------------------------------------------


def occupied(held: int, *repeats: int, phases: tuple[str, ...] = ("init", "build", "warmup")) -> Edit:
    """Other processes hold ``held`` bytes on the GPU of rank 0 of eager runs, until they end."""

    def edit(run: AttemptRecord) -> None:
        for event in run.events[0] if not run.spec.graphed and run.spec.repeat in repeats else ():
            if event["kind"] == "phase" and event["phase"] in phases:
                event["memory"]["device_outside"] += held

    return edit


def test_memory_of_other_processes_is_not_the_runs(tmp_path: Path) -> None:
    quiet = compare_cells(load(write_sweep(tmp_path / "quiet", ranks=2, device="cuda")))
    sweep = write_sweep(tmp_path / "shared", ranks=2, device="cuda", edit=occupied(40 * GIB, 0))
    eager, graphed = compare_cells(load(sweep))
    assert (eager.memory, graphed.memory) == (quiet[0].memory, quiet[1].memory)
    ((run_id, held),) = eager.foreign_memory.items()
    assert run_id.endswith("-r0") and held == 40 * GIB and not graphed.foreign_memory
    assert graphed.passes, "losses do not depend on neighbours"
    speed, usual = graphed.speed.speedup, quiet[1].speed.speedup
    assert speed and usual and usual.verdict != "INCONCLUSIVE" == speed.verdict
    assert f"held 40.00 GiB on a GPU of {run_id} when it began" in speed.reason
    text = report_text(sweep)
    assert f"{run_id} does not count, because other processes held 40.00 GiB of one of its GPUs when it began." in text


@pytest.mark.parametrize(("held", "is_shared"), [(3 * GIB, True), (GIB // 2, False)])
def test_a_run_holds_about_as_much_as_others_when_it_begins(tmp_path: Path, held: int, is_shared: bool) -> None:
    eager, graphed = compare_cells(load(write_sweep(tmp_path, device="cuda", edit=occupied(held, 0, 1))))
    assert len(eager.foreign_memory) == 2 * is_shared and (eager.memory is None) == is_shared
    assert not graphed.foreign_memory and graphed.memory is not None


def test_an_engine_alone_never_holds_that_much_when_it_begins(tmp_path: Path) -> None:
    """All runs have the same neighbour."""

    def all_occupied(run: AttemptRecord) -> None:
        for event in run.events[0]:
            if "memory" in event:
                event["memory"]["device_outside"] += 20 * GIB

    eager, graphed = compare_cells(load(write_sweep(tmp_path, device="cuda", edit=all_occupied)))
    assert len(eager.foreign_memory) == len(graphed.foreign_memory) == 2
    assert all(held > 19 * GIB for held in eager.foreign_memory.values()), "as much as the run's own note says"
    assert eager.memory is None and graphed.memory is None


# --- what is left ---------------------------------------------------------------------------------------------------


def test_headroom_is_what_the_smallest_gpu_has_beyond_the_peak(tmp_path: Path) -> None:
    def smaller(run: AttemptRecord) -> None:
        if run.spec.repeat:
            run.environment["hardware"]["gpu_memory_bytes"] = [140 * GIB, 80 * GIB]

    eager, graphed = compare_cells(load(write_sweep(tmp_path, device="cuda", edit=smaller)))
    for result in (eager, graphed):
        assert result.memory is not None and result.memory.device_total == 80 * GIB
        assert result.memory.headroom == 80 * GIB - result.memory.peak


def old_record(run: AttemptRecord) -> None:
    del run.environment["hardware"]["gpu_memory_bytes"]


def odd_record(run: AttemptRecord) -> None:
    run.environment["hardware"] = None


def out_of_memory(run: AttemptRecord) -> None:
    if run.spec.repeat:
        run.outcome = Outcome("CUDA_OOM", "measure", "bundle000", 0.0, 1.0)


@pytest.mark.parametrize("edit", [old_record, odd_record, out_of_memory])
def test_headroom_is_not_told_where_records_do_not_tell_it(tmp_path: Path, edit: Edit) -> None:
    for result in compare_cells(load(write_sweep(tmp_path, device="cuda", edit=edit))):
        assert result.memory is not None and result.memory.headroom is None


def test_a_cpu_host_has_no_headroom_to_tell(tmp_path: Path) -> None:
    for result in compare_cells(load(write_sweep(tmp_path))):
        assert result.memory is not None and result.memory.headroom is None


def test_a_gpu_without_memory_has_no_headroom(tmp_path: Path) -> None:
    def none(run: AttemptRecord) -> None:
        run.environment["hardware"]["gpu_memory_bytes"] = [0]

    sweep = write_sweep(tmp_path, device="cuda", edit=none)
    _, graphed = compare_cells(load(sweep))
    assert graphed.memory is not None and graphed.memory.headroom is None
    assert write_report(sweep).exit_code == 0


def test_the_parts_of_a_gpu_make_up_the_peak_of_its_fullest_rank(tmp_path: Path) -> None:
    """Rank 1 of the second repeat is the fullest. The graph pool replaces the activations."""

    def full(run: AttemptRecord) -> None:
        for rank, events in run.events.items():
            for event in (event for event in events if event["kind"] == "phase" and event["phase"] == "measure"):
                event["memory"]["peak_reserved"] += GIB * rank * run.spec.repeat

    for result in compare_cells(load(write_sweep(tmp_path, impls=("torch",), ranks=2, device="cuda", edit=full))):
        assert result.memory is not None and result.memory.parts is not None
        parts, peaks = result.memory.parts, {peak.phase: peak.peak for peak in result.memory.phases}
        assert parts.total == peaks["measure"] and parts.outside == GIB // 2
        assert parts.state == state_bytes(result.spec) > 0
        assert parts.graph_pool == (GIB // 4 if result.cell.graphed else 0)


def test_a_state_beyond_what_the_allocator_holds_beside_its_graphs_is_cut_off() -> None:
    held = Memory(0, 0, peak_reserved=5 * GIB, graph_pool=4 * GIB, device_outside=GIB)
    attempt = Mock(memory=[PhaseMemory(0, "measure", held)])
    spec = RunSpec(model=Model(num_layers=64, hidden_size=4096))
    assert state_bytes(spec) > GIB
    assert memory_parts([attempt], spec) == MemoryParts(GIB, 0, 4 * GIB, GIB)
    assert memory_parts([Mock(memory=[PhaseMemory(0, "measure", Memory(1, 1))])], spec) is None
