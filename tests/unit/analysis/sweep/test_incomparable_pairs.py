"""Test the records with which a pair cannot be compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from analysis.records.load import load
from analysis.sweep.judge_cells import compare_cells, exit_code
from launch.common.atomic_files import write_text
from launch.contract.outcomes import Outcome
from launch.contract.plan import read_plan
from tests.records import AttemptRecord, Edit, write_sweep
from tests.unit.analysis.sweep.judged_cell import (
    for_graphed,
    graphed_result,
    judged,
    other_code,
    shorten,
    verdict_in,
    verdict_of,
)


def renumber(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["step"] += 1


def other_libraries(run: AttemptRecord) -> None:
    run.environment["digests"]["libraries"] = "other00000"
    run.environment["versions"]["torch"] = "2.12.1"


def other_data(run: AttemptRecord) -> None:
    run.environment["data_digest"] = "other00000"


def no_digests(run: AttemptRecord) -> None:
    run.environment["digests"] = {}


def change_proof(**fields: Any) -> Edit:
    def change(run: AttemptRecord) -> None:
        for event in run.events[0]:
            if event["kind"] == "proof":
                event["graphs"] |= fields

    return change


def no_proof(run: AttemptRecord) -> None:
    run.events[0] = [event for event in run.events[0] if event["kind"] != "proof"]


def of_another_shape(run: AttemptRecord) -> None:
    run.metrics[50] = {"step": 50}


def not_a_number(run: AttemptRecord) -> None:
    run.metrics[50]["loss"] = None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shorten, "step"),
        (renumber, "not expected"),
        (other_code, "differ in code"),
        (other_libraries, "versions.torch: 2.13.0 (eager), 2.12.1 (graphed)"),
        (other_data, "differ in data"),
        (no_digests, "no digest of code, libraries"),
        (no_proof, "ended without a proof of replay"),
        (change_proof(replays=10), "10 replays, 464 expected"),
        (change_proof(graphs=0, replays=0, expected_replays=0), "nothing was captured"),
        (change_proof(replays=0, expected_replays=0), "0 replays, 0"),
        (change_proof(recompilations=2), "2 recompilations"),
        (change_proof(impl="none"), "captured with none"),
        (of_another_shape, "metrics.jsonl cannot be read"),
        (not_a_number, "metrics.jsonl cannot be read"),
    ],
)
def test_pairs_that_cannot_be_compared(tmp_path: Path, change: Edit, said: str) -> None:
    sweep = write_sweep(tmp_path, edit=for_graphed(change))
    result = graphed_result(sweep)
    assert result.verdict is not None and result.verdict.verdict == "INCOMPARABLE"
    assert said in result.verdict.reason
    assert result.verdict.fix and ("same shapes" in result.verdict.fix) == ("recompilations" in said)
    assert result.speed.speedup is None
    assert exit_code(compare_cells(load(sweep))) == 3


def test_every_rank_must_prove_its_replays(tmp_path: Path) -> None:
    def silent_rank(run: AttemptRecord) -> None:
        run.events[1] = [event for event in run.events[1] if event["kind"] != "proof"]

    assert verdict_in(write_sweep(tmp_path / "all", ranks=2)).verdict == "BITWISE"
    found = verdict_of(tmp_path / "one", for_graphed(silent_rank), ranks=2)
    assert found.verdict == "INCOMPARABLE" and "rank 1" in found.reason


def test_a_torn_last_line_is_a_missing_step(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    run_id = graphed_result(sweep).runs[0].run_id
    metrics = sweep.run(run_id).attempt(1).metrics
    metrics.write_bytes(metrics.read_bytes()[:-20])
    found = verdict_in(sweep)
    assert found.verdict == "INCOMPARABLE" and "step 119 missing" in found.reason


@pytest.mark.parametrize("name", ["metrics.jsonl", "environment.json", "events/rank0.jsonl"])
def test_a_damaged_or_lost_record_is_incomparable(tmp_path: Path, name: str) -> None:
    for content in (b'{"half": \n{"kind": "phase"}\n', None):
        sweep = write_sweep(tmp_path / str(content is None))
        path = sweep.run(graphed_result(sweep).runs[0].run_id).attempt(1).root / name
        path.unlink() if content is None else path.write_bytes(content)
        assert verdict_in(sweep).verdict == "INCOMPARABLE"


@pytest.mark.parametrize("value", ["12.5", True, None])
@pytest.mark.parametrize("name", ["loss", "step_time_ms"])
def test_what_is_no_number_is_read_as_none(tmp_path: Path, name: str, value: object) -> None:
    def edit(run: AttemptRecord) -> None:
        run.metrics[70][name] = value

    verdict = verdict_of(tmp_path, edit, steps=80, repeats=1)
    assert verdict.verdict == "INCOMPARABLE" and f"{value!r} is not a number" in verdict.reason


def test_a_norm_that_nobody_computed_is_incomparable(tmp_path: Path) -> None:
    """Programs then write -1. It is equal on both sides, whatever graphs compute."""

    def edit(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["grad_norm"] = -1.0

    verdict = verdict_of(tmp_path, edit)
    assert verdict.verdict == "INCOMPARABLE" and "grad_norm is -1.0, but no norm is negative" in verdict.reason


def test_a_spec_of_another_run_is_incomparable(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    first, second = graphed_result(sweep).runs
    write_text(sweep.run(first.run_id).spec, sweep.run(second.run_id).spec.read_text())
    assert f"spec.json is of run {second.run_id}" in verdict_in(sweep).reason


def test_a_graphed_repeat_without_its_eager_repeat_is_incomparable(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    plan = read_plan(sweep)
    records = load(sweep)
    lone = dataclasses.replace(plan, cells=tuple(cell for cell in plan.cells if cell.graphed))
    results = compare_cells(dataclasses.replace(records, plan=lone))
    assert results[0].verdict is not None and results[0].verdict.verdict == "INCOMPARABLE"
    assert "no eager run" in results[0].verdict.reason
    assert exit_code(results) == 3


def mislabelled(run: AttemptRecord) -> None:
    run.metrics[3]["phase"], run.metrics[118]["phase"] = "measure", "capture"


def captured_late(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["phase"] = "warmup" if step["step"] < 118 else "capture" if step["step"] == 118 else "measure"
        step["loss"] += 3.0 if 3 < step["step"] < 118 else 0.0
    change_proof(replays=4, expected_replays=4)(run)


def captured_in_the_first_step(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["phase"] = ("capture", "settle", "settle", "measure")[min(step["step"], 3)]


def test_local_graphs_are_captured_in_the_first_step(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, for_graphed(captured_in_the_first_step), impls=("local",)).verdict == "BITWISE"


def apart_from_the_start(run: AttemptRecord) -> None:
    run.metrics[1]["loss"] += 1.0


def captured_eager(run: AttemptRecord) -> None:
    run.metrics[3]["phase"] = "capture"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (for_graphed(mislabelled), "out of order"),
        (for_graphed(captured_late), "captured in step 118, but its spec asks for step 3"),
        (
            for_graphed(apart_from_the_start),
            "differs from the eager runs before its capture: the loss differs by 1 at step 1",
        ),
        (for_graphed(change_proof(replays=1, expected_replays=1)), "1 replays in"),
        (for_graphed(change_proof(graphs=0.5)), "not a whole number"),
        (lambda run: None if run.spec.graphed else captured_eager(run), "the eager run captured"),
    ],
)
def test_records_that_contradict_themselves_are_incomparable(tmp_path: Path, change: Edit, said: str) -> None:
    found = verdict_of(tmp_path, change)
    assert found.verdict == "INCOMPARABLE" and said in found.reason


def test_noise_of_eager_before_the_capture_is_not_held_against_a_graphed_run(tmp_path: Path) -> None:
    def noise(run: AttemptRecord) -> None:
        run.metrics[1]["loss"] += 0.1 * run.spec.repeat + (0.1 if run.spec.graphed else 0.0)

    assert verdict_of(tmp_path, noise).verdict == "BITWISE"


@pytest.mark.parametrize("ends", [False, True])
def test_a_nan_of_eager_is_blamed_on_no_graph(tmp_path: Path, ends: bool) -> None:
    """The NaN is in one of several eager repeats. The graphed run of that repeat is finite, or has its own NaN earlier."""

    def nan(run: AttemptRecord) -> None:
        if run.spec.repeat == 0 and (ends or not run.spec.graphed):
            at = 50 if run.spec.graphed else 60
            run.metrics[at]["loss"] = float("nan")
            if ends:
                del run.metrics[at + 1 :]
                run.outcome = Outcome("NUMERIC", "measure", "bundle000", 0.0, 1.0)

    result = judged(tmp_path, nan)
    assert result.pairs[0].verdict.verdict == "INCOMPARABLE"
    assert result.verdict is not None and result.verdict.verdict == "INCOMPARABLE"
    assert "not finite at step 60" in result.verdict.reason


def test_a_nan_is_no_graphs_where_an_eager_run_of_another_repeat_has_one(tmp_path: Path) -> None:
    def nan(run: AttemptRecord) -> None:
        if run.spec.graphed is (run.spec.repeat == 0):
            run.metrics[60]["loss"] = float("nan")

    assert verdict_of(tmp_path, nan).verdict == "INCOMPARABLE"


def test_one_bit_is_told_apart_in_words(tmp_path: Path) -> None:
    def one_bit(run: AttemptRecord) -> None:
        run.metrics[60]["loss"] *= 1 + 2**-52

    verdict = verdict_of(tmp_path, for_graphed(one_bit), deterministic=True)
    assert verdict.verdict == "DIVERGED"
    graphed, eager = verdict.reason.split("the loss is ")[1].split(" eager")[0].split(" graphed and ")
    assert graphed != eager and float(graphed) == float(eager) * (1 + 2**-52)
