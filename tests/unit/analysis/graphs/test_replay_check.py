"""Test the proof of replay on CUDA: the counts of the engine, and the launches that the profiler must see on every
rank."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from analysis.graphs.replay_check import Replay, check_replay
from analysis.records.load import load, load_run
from analysis.records.run import Attempt
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import compare_cells
from analysis.verdict.verdict import Verdict
from launch.contract.paths import SweepPaths
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.probe import Launches, Probe
from launch.contract.spec import CudaGraph, EngineName, GraphImpl, Model, Parallelism, Placement, RunSpec, Training
from tests import records
from tests.records import GRAPHED_PROBE, AttemptRecord, Edit, attempt_record, unchanged, write_attempt, write_sweep


def graphed_result(root: Path, edit: Edit, impl: GraphImpl = "torch", **options: Any) -> CellResult:
    def of_graphed(run: AttemptRecord) -> None:
        if run.spec.graphed:
            edit(run)

    results = compare_cells(load(write_sweep(root, device="cuda", impls=(impl,), edit=of_graphed, **options)))
    return results[1]


def verdict_of(root: Path, edit: Edit, **options: Any) -> Verdict:
    found = graphed_result(root, edit, **options).verdict
    assert found is not None
    return found


def change_event(kind: str, part: str, rank: int, **fields: Any) -> Edit:
    def change(run: AttemptRecord) -> None:
        for event in run.events[rank]:
            if event["kind"] == kind:
                event[part] |= fields

    return change


change_probe, change_proof = partial(change_event, "probe", "probe"), partial(change_event, "proof", "graphs")


def no_probe(rank: int) -> Edit:
    def drop(run: AttemptRecord) -> None:
        run.events[rank] = [event for event in run.events[rank] if event["kind"] != "probe"]

    return drop


def test_launches_that_the_probe_saw_on_every_rank_are_proof(tmp_path: Path) -> None:
    for ranks, where in ((1, ""), (2, " on each of 2 ranks")):
        result = graphed_result(tmp_path / str(ranks), unchanged, ranks=ranks)
        assert result.verdict is not None and result.verdict.verdict == "BITWISE"
        assert result.graphs.replay is not None
        assert result.graphs.replay.summary == (
            f"proven: 4 graphs, 464 of 464 replays, 8 graph launches per step seen{where}; graphs launch 1100 of 1200 kernels of a "
            "step"
        )


def test_one_graph_is_launched_once() -> None:
    stats = GraphStats("full_iteration", graphs=1, replays=28, expected_replays=28, launches_per_step=1)
    assert Replay(True, "", stats, 1, launches_seen=1.0).summary == (
        "proven: 1 graph, 28 of 28 replays, 1 graph launch per step seen"
    )


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (change_probe(0, graph_launches=0.0), "not graphed: the probe saw no graph launch"),
        (change_probe(0, graph_launches=7.0), "the probe saw 7 graph launches a step, but 8 were expected"),
        (change_probe(0, graph_launches=23 / 3), "the probe saw 7.66667 graph launches a step, but 8 were expected"),
        (change_proof(0, launches_per_step=0), "the engine does not report how many launches its 4 graphs need"),
        (no_probe(0), "ended without a probe"),
        (change_proof(0, replays=10), "10 replays, 464 expected"),
        (change_proof(0, replays=463, expected_replays=463), "463 replays in 116 steps after the capture, of 8 graph"),
    ],
)
def test_a_run_whose_launches_were_not_seen_is_not_proven(tmp_path: Path, edit: Edit, said: str) -> None:
    result = graphed_result(tmp_path, edit)
    assert result.verdict is not None and result.verdict.verdict == "INCOMPARABLE"
    assert said in result.verdict.reason
    assert result.speed.speedup is None


def test_a_run_that_nsys_profiled_was_not_probed() -> None:
    spec = RunSpec(cuda_graph=CudaGraph("torch"), placement=Placement("cuda"), profile="nsys")
    stats = GraphStats("torch", graphs=1, replays=2, expected_replays=2, launches_per_step=1)
    steps = SimpleNamespace(step=np.array([3, 4, 5]), phase=np.array(["capture", "settle", "measure"]))
    found = check_replay(cast(Attempt, SimpleNamespace(proofs={0: stats}, captures={}, probes={}, steps=steps)), spec)
    assert not found.proven and "run it with profile=none" in found.reason


@pytest.mark.parametrize(("replays", "said"), [(2, ", and 2 of 3 replays"), (3, "")])
def test_captures_of_a_program_are_told_with_its_replays(replays: int, said: str) -> None:
    spec = RunSpec("command", cuda_graph=CudaGraph("command", name="compiled"), placement=Placement("cuda"))
    stats = GraphStats("command", graphs=1, replays=replays, expected_replays=3, recompilations=1, launches_per_step=1)
    steps = SimpleNamespace(step=np.array([3, 4, 5, 6]), phase=np.array(["capture", "settle", "settle", "measure"]))
    found = check_replay(cast(Attempt, SimpleNamespace(proofs={0: stats}, captures={}, probes={}, steps=steps)), spec)
    assert not found.proven and found.reason == f"1 capture after the first ones{said}"
    assert found.fix.endswith("the same shapes and number of micro-batches")


def test_one_rank_without_launches_or_probe_is_enough(tmp_path: Path) -> None:
    for name, edit in (("unseen", change_probe(1, graph_launches=0.0)), ("lost", no_probe(1))):
        found = verdict_of(tmp_path / name, edit, ranks=2)
        assert found.verdict == "INCOMPARABLE" and "rank 1: " in found.reason


def test_more_launches_than_expected_are_no_fault(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, change_probe(0, graph_launches=12.0)).passes


def test_launches_that_were_not_traced_are_named() -> None:
    stats = GraphStats("torch", graphs=1, replays=28, expected_replays=28, launches_per_step=1)
    said = Replay(True, "", stats, 1, launches_seen=1.0, launches=Launches(0.0, 12.0, 400.0)).summary
    assert said.endswith("; graphs launch 0 of 412 kernels of a step, and the launches of 400 were not traced")


FEW = Launches(by_graphs=3.0, one_by_one=409.0, unknown=0.0)


def launched(launches: Launches) -> Edit:
    """Record how kernels were launched."""

    def change(run: AttemptRecord) -> None:
        for event in run.events[0]:
            if event["kind"] == "probe":
                event["launches"] = dataclasses.asdict(launches)

    return change


@pytest.mark.parametrize("engine", ["command", "torch_native"])
@pytest.mark.parametrize("impl", ["full_iteration", "transformer_engine"])
@pytest.mark.parametrize("launches", [FEW, Launches(300.0, 112.0, 0.0), Launches(3.0, 200.0, 209.0)])
def test_a_program_that_says_full_iteration_launches_most_kernels_from_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Launches, impl: GraphImpl, engine: EngineName
) -> None:
    of_engine = records.workload_spec
    monkeypatch.setattr(records, "workload_spec", lambda *each: dataclasses.replace(of_engine(*each), engine=engine))
    found = verdict_of(tmp_path, launched(launches), impl=impl)
    if (launches, impl, engine) == (FEW, "full_iteration", "command"):
        said = "graphs launch 3 of 412 kernels of a step, so most of the step is not captured (full_iteration)"
        assert found.verdict == "INCOMPARABLE" and said in found.reason, found
    else:
        assert found.passes, found


@pytest.mark.parametrize("value", [None, "many", "NaN", -1.0, True, [8]])
def test_a_damaged_probe_is_a_problem_of_the_run(tmp_path: Path, value: Any) -> None:
    result = graphed_result(tmp_path, change_probe(0, graph_launches=value))
    assert result.verdict is not None and result.verdict.verdict == "INCOMPARABLE"
    assert "probe of rank 0 cannot be read: " in result.verdict.reason
    assert result.integrity.unsound_records


def test_an_eager_run_that_launched_graphs_is_no_eager_run(tmp_path: Path) -> None:
    def launches(run: AttemptRecord) -> None:
        if not run.spec.graphed:
            change_probe(0, graph_launches=1.0)(run)

    verdict = compare_cells(load(write_sweep(tmp_path, device="cuda", edit=launches)))[1].verdict
    assert verdict is not None and verdict.verdict == "INCOMPARABLE"
    assert "the eager run launched CUDA graphs" in verdict.reason


def test_a_cpu_run_needs_no_probe(tmp_path: Path) -> None:
    result = compare_cells(load(write_sweep(tmp_path)))[1]
    assert result.graphs.replay is not None
    assert (result.graphs.replay.proven, result.graphs.replay.launches_seen) == (True, None)


# --- ranks that hold no layer of the scope --------------------------------------------------------------------------

NOTHING = {"graphs": 0, "replays": 0, "expected_replays": 0, "launches_per_step": 0}


def pipeline_spec(scope: tuple[str, ...], layers: int = 4, frequency: int = 2, experts: int = 8) -> RunSpec:
    """Return a spec of four stages with two ranks each. By default every other one-layer stage has experts."""
    return RunSpec(
        model=Model(num_layers=layers, num_moe_experts=experts, moe_router_topk=2, moe_layer_freq=frequency),
        training=Training(steps=120, global_batch_size=16),
        parallelism=Parallelism(dp=2, pp=4),
        placement=Placement(device="cuda", ranks_per_node=8),
        cuda_graph=CudaGraph(impl="torch", scope=scope),
    )


def proof_of(root: Path, spec: RunSpec, bare: set[int], **probe: float) -> Replay:
    """Return the proof of a run in which the ranks ``bare`` captured nothing."""
    record = attempt_record(spec)
    for rank in bare:
        change_proof(rank, **NOTHING)(record)
        change_probe(rank, **{"graph_launches": 0.0, **probe})(record)
    sweep = SweepPaths(root)
    write_attempt(sweep, record)
    attempt = load_run(sweep.run(spec.run_id), 0, spec).attempt
    assert attempt is not None and not attempt.problems
    return check_replay(attempt, spec)


def test_stages_without_a_layer_of_the_scope_capture_nothing(tmp_path: Path) -> None:
    for scope, bare in ((("moe_router",), {2, 3, 6, 7}), (("mlp",), {0, 1, 4, 5})):
        proof = proof_of(tmp_path / scope[0], pipeline_spec(scope), bare)
        assert proof.proven, proof.summary
        assert proof.stats.graphs == 4
        said = "on 4 of 8 ranks; the other 4 hold no layer of the scope; graphs launch 1100 of 1200 kernels of a step"
        assert proof.summary.endswith(said)


@pytest.mark.parametrize(
    ("spec", "bare"),
    [
        (pipeline_spec(("moe",)), {2, 3, 6}),  # Ranks of one stage hold the same layers.
        (pipeline_spec(("moe",)), {3}),
        (pipeline_spec(("moe",)), set(range(8))),  # At least one rank must have captured.
        (pipeline_spec(("attn",)), {2, 3}),
        (pipeline_spec(("attn", "moe")), {2, 3}),
        (pipeline_spec(("mlp", "moe")), {2, 3}),  # Every layer has one of the two parts.
        (pipeline_spec(()), {2, 3}),
        (pipeline_spec(("moe",), layers=8), {2, 3}),  # A stage has two layers, one of which is an expert layer.
        (pipeline_spec(("mlp",), layers=8), {2, 3}),
        (pipeline_spec(("moe",), frequency=1), {2, 3}),
        (pipeline_spec(("mlp",), experts=0), {2, 3}),
    ],
)
def test_a_rank_that_should_have_captured_is_found(tmp_path: Path, spec: RunSpec, bare: set[int]) -> None:
    proof = proof_of(tmp_path, spec, bare)
    assert not proof.proven
    assert "nothing was captured" in proof.reason


def test_a_stretch_shorter_than_the_frequency_may_be_without_experts(tmp_path: Path) -> None:
    spec = pipeline_spec(("moe",), layers=8, frequency=4)
    assert proof_of(tmp_path, spec, {2, 3, 6, 7}).proven


def test_a_bare_rank_that_launches_graphs_contradicts_itself(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, pipeline_spec(("moe",)), {2, 3}, graph_launches=3.0)
    assert proof.reason == "rank 2: the probe saw 3 graph launches a step, although nothing was captured"


def test_a_bare_rank_still_needs_its_probe(tmp_path: Path) -> None:
    spec = pipeline_spec(("moe",))
    record = attempt_record(spec)
    sweep = SweepPaths(tmp_path)
    for rank in (2, 3):
        change_proof(rank, **NOTHING)(record)
        no_probe(rank)(record)
    write_attempt(sweep, record)
    attempt = load_run(sweep.run(spec.run_id), 0, spec).attempt
    assert attempt is not None
    assert check_replay(attempt, spec).reason == "rank 2: ended without a probe"


def test_no_launch_count_passes_below_what_was_expected(tmp_path: Path) -> None:
    """This includes NaN, which no comparison orders."""
    sweep = SweepPaths(tmp_path)
    spec = dataclasses.replace(pipeline_spec(("attn",)), parallelism=Parallelism(), training=Training(steps=120))
    write_attempt(sweep, attempt_record(spec))
    attempt = load_run(sweep.run(spec.run_id), 0, spec).attempt
    assert attempt is not None
    assert check_replay(attempt, spec).proven
    unknown = dataclasses.replace(GRAPHED_PROBE, graph_launches=float("nan"))
    assert not check_replay(_seen(attempt, unknown), spec).proven


def _seen(attempt: Attempt, probe: Probe) -> Attempt:
    return dataclasses.replace(attempt, probes={0: probe})
