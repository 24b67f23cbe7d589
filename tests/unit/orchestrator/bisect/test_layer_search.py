"""Test bisect --layers on written records: its run, which place comes first, and its answer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.common.atomic_files import write_json
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from launch.contract.records.step_check import LayerResult, StepCheck, TensorDifference, layer_names
from launch.contract.spec import CudaGraph, Model, Parallelism, Placement, RunSpec, Training
from orchestrator.bisect.layer_search import MOST_CHECKS, read_answer, start_search
from orchestrator.bisect.search import Answer
from orchestrator.bisect.side_sweep import plan_side_sweep, run_search
from orchestrator.cli.main import main
from orchestrator.errors import InputError
from orchestrator.sweeps.store import write_plan
from orchestrator.targets.host import Host
from orchestrator.workflow import run_sweep
from tests.records import AttemptRecord, Edit, unchanged
from tests.schemas import validated
from tests.unit.orchestrator.bisect.origin import ORIGIN, ended, make_runs, written

GPUS = Host(("0", "1", "2", "3"), frozenset(), True)
DIVERGES_AT = 10
SPEC = RunSpec(
    model=Model(num_layers=3),
    training=Training(steps=120, precision="bf16", global_batch_size=2),
    cuda_graph=CudaGraph("torch", ("attn",), 3),
    placement=Placement("cuda"),
)
PIPELINE = dataclasses.replace(SPEC, parallelism=Parallelism(pp=2, tp=2), placement=Placement("cuda", ranks_per_node=4))


def result(layer: str, micro_batch: int = 0, *, is_gradient: bool = False) -> LayerResult:
    return LayerResult(layer, layer_names(3).index(layer), micro_batch, is_gradient)


def off(run: AttemptRecord) -> None:
    if run.spec.graphed:
        for step in run.metrics[DIVERGES_AT:]:
            step["loss"] += 0.5


def check_with(run: AttemptRecord, rank: int, step: int, fault: LayerResult | str) -> None:
    """Record ``fault`` in a check, of a layer's result or of another named result."""
    name = fault if isinstance(fault, str) else fault.name
    difference = TensorDifference(name, 1e-3, noise=1e-6)
    first = None if isinstance(fault, str) else (fault, difference)
    (event,) = (one for one in run.events[rank] if (one["kind"], one["step"]) == ("step_check", step))
    event["check"] = dataclasses.asdict(StepCheck(step, 40, 1, (difference,), first=first))


def answer_of(root: Path, *edits: Edit, spec: RunSpec = SPEC) -> Answer:
    """Return the answer if the run with checks has the results that ``edits`` give, one round after the other."""
    search = start_search(*written(root, spec, off), GPUS)
    sweep, rounds = SweepPaths(root / search.name), iter(edits)

    def make(plan: Plan) -> None:
        write_json(sweep.plan, plan)
        assert len(make_runs(sweep, plan, next(rounds))) == 1

    return run_search(read_answer, sweep, search, GPUS, make)


def test_one_run_checks_the_steps_up_to_the_failure(tmp_path: Path) -> None:
    search = start_search(*written(tmp_path, SPEC, off), GPUS)
    assert search.trial.checked_steps == tuple(range(4, DIVERGES_AT + 2 + 1))
    assert search.trial.training == SPEC.training and search.trial.cuda_graph == SPEC.cuda_graph
    (cell,) = plan_side_sweep(search, [search.trial], GPUS).cells
    assert cell.run_ids == (search.trial.run_id,) and cell.cell_id != SPEC.cell_id


def test_a_late_failure_is_sought_in_some_of_the_steps_before_it(tmp_path: Path) -> None:
    def off_late(run: AttemptRecord) -> None:
        if run.spec.graphed:
            for step in run.metrics[100:]:
                step["loss"] += 0.5

    steps = start_search(*written(tmp_path, SPEC, off_late), GPUS).trial.checked_steps
    assert (len(steps), steps[0], steps[-1]) == (MOST_CHECKS, 4, 102)


FIRST: list[tuple[LayerResult, str]] = [
    (result("decoder layer 2", 1),
     "the output of decoder layer 2, micro-batch 1, on rank 0. It differs by 0.001 of its norm, but rounding explains only 6e-06. Everything "
     "before it agrees up to rounding, so decoder layer 2 computes another result from the same input."),
    (result("embedding"),
     "the output of the embedding, micro-batch 0, on rank 0. It differs by 0.001 of its norm, but rounding explains only 6e-06. Everything "
     "before it agrees up to rounding, so the embedding computes another result from the same input."),
    (result("decoder layer 1", is_gradient=True),
     "the gradient of the output of decoder layer 1, micro-batch 0, on rank 0. It differs by 0.001 of its norm, but rounding explains only "
     "6e-06. All outputs and the gradients of later layers agree up to rounding, so the backward pass of decoder layer 2 computes "
     "another result."),
    (result("final norm", is_gradient=True),
     "the gradient of the output of the final norm, micro-batch 0, on rank 0. It differs by 0.001 of its norm, but rounding explains only "
     "6e-06. All outputs and the gradients of later layers agree up to rounding, so the output layer or the loss computes another "
     "result."),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "words"), FIRST)
def test_the_first_place_is_named_with_what_it_means(tmp_path: Path, fault: LayerResult, words: str) -> None:
    answer = answer_of(tmp_path, lambda run: check_with(run, 0, 5, fault))
    assert (answer.summary, answer.exit_code) == (f"First to differ: step 5, {words}", 0)
    assert "Checked: 9 steps of 1 graphed runs" in answer.text


@st.composite
def results(draw: st.DrawFn) -> LayerResult:
    return result(draw(st.sampled_from(layer_names(3))), draw(st.integers(0, 1)), is_gradient=draw(st.booleans()))


@given(one=results(), other=results())
def test_outputs_come_before_gradients_which_come_from_the_last_layer_on(one: LayerResult, other: LayerResult) -> None:
    def key(place: LayerResult) -> tuple[Any, ...]:
        names = layer_names(3)[:: -1 if place.is_gradient else 1]
        return place.is_gradient, place.micro_batch, names.index(place.layer)

    assert (one.place < other.place) == (key(one) < key(other))


def test_the_first_place_of_all_ranks_is_named_with_these_ranks(tmp_path: Path) -> None:
    """With tp 2 and pp 2, the layers of the second stage show the results of the first stage."""

    def edit(run: AttemptRecord) -> None:
        check_with(run, 0, 6, result("embedding"))
        check_with(run, 1, 5, result("decoder layer 0", 1))
        check_with(run, 2, 5, result("decoder layer 2"))
        check_with(run, 3, 5, result("decoder layer 2"))

    answer = answer_of(tmp_path, edit, spec=PIPELINE)
    assert "step 5, the output of decoder layer 2, micro-batch 0, on ranks 2, 3." in answer.summary


def test_a_fault_behind_the_layers_is_named_itself(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, lambda run: check_with(run, 0, 5, "gradient of 0.head.weight"))
    assert answer.exit_code == 0
    assert answer.summary.startswith(
        "All layers agree up to rounding. Another result does not: gradient of 0.head.weight"
    )


def test_checks_that_find_nothing_name_no_layer(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, unchanged)
    assert (answer.exit_code, answer.summary) == (
        4, "No layer can be named: the replays of all checked steps agree with uncaptured code up to rounding."
    )  # fmt: skip


def end_numeric(run: AttemptRecord) -> None:
    """End the run at step 7, so that this check and later ones did not take place."""
    del run.metrics[7:]
    run.outcome = ended("NUMERIC", "measure")
    for rank, events in run.events.items():
        run.events[rank] = [one for one in events if one["kind"] != "step_check" or one["step"] < 7]


def test_a_run_that_ends_at_a_nan_is_searched_up_to_there(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        check_with(run, 0, 6, result("decoder layer 1"))
        end_numeric(run)

    answer = answer_of(tmp_path / "found", edit)
    assert answer.exit_code == 0 and "The run ended NUMERIC in measure." in answer.text
    answer = answer_of(tmp_path / "lost", end_numeric)
    assert answer.exit_code == 4 and "events of rank 0 have no check of every planned step" in answer.summary


def test_a_place_is_not_the_first_while_a_rank_lacks_an_earlier_check(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        check_with(run, 3, 5, result("decoder layer 2"))
        run.events[1] = [one for one in run.events[1] if (one["kind"], one["step"]) != ("step_check", 4)]

    answer = answer_of(tmp_path, edit, spec=PIPELINE)
    assert answer.exit_code == 4
    assert answer.summary.startswith("No layer can be named: rank 1 has no check of step 4.")


def test_a_run_without_outcome_must_be_resumed_first(tmp_path: Path) -> None:
    sweep, plan, cell = written(tmp_path, SPEC, off)
    sweep.run(cell.run_ids[0]).attempt(1).outcome.unlink()
    with pytest.raises(InputError, match="has no outcome") as error:
        start_search(sweep, plan, cell, GPUS)
    assert f"resume {ORIGIN}" in str(error.value)


def test_a_lost_run_is_resumed(tmp_path: Path) -> None:
    def lose(run: AttemptRecord) -> None:
        run.outcome = ended("PREEMPTED", "measure")

    answer = answer_of(tmp_path, lose)
    assert (answer.exit_code, answer.summary) == (
        2,
        "Runs were lost before the answer was known. The same command resumes them.",
    )


@pytest.mark.parametrize(
    ("spec", "edit", "message"),
    [
        (SPEC, unchanged, "graphs are not known to change its results: BITWISE"),
        (dataclasses.replace(SPEC, cuda_graph=CudaGraph("torch_compile")), off, r"\[torch_native.layer_check_steps\]: layer_check_steps=13"),
    ],
)  # fmt: skip
def test_a_cell_without_a_first_layer_is_rejected(tmp_path: Path, spec: RunSpec, edit: Edit, message: str) -> None:
    sweep, plan, cell = written(tmp_path, spec, edit)
    with pytest.raises(InputError, match=message):
        start_search(sweep, plan, cell, GPUS)
    with pytest.raises(InputError, match="is eager"):
        start_search(sweep, plan, plan.cells[0], GPUS)


def test_a_failed_capture_has_no_first_layer(tmp_path: Path) -> None:
    def no_capture(run: AttemptRecord) -> None:
        if run.spec.graphed:
            del run.metrics[3:]
            run.outcome = ended("CAPTURE_FAILED", "capture")

    with pytest.raises(InputError, match="graphs are not known to change its results: CAPTURE_FAILED"):
        start_search(*written(tmp_path, SPEC, no_capture), GPUS)


def test_the_verb_runs_a_side_sweep_and_prints_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records replace the run, since a CPU captures no graph."""
    _, _, cell = written(tmp_path, SPEC, off)
    rounds = []

    def make(paths: SweepPaths, plan: Plan, target: Any, policy: str, executor: str, *, wait: bool) -> None:
        write_plan(paths, plan)
        rounds.append(make_runs(paths, plan, lambda run: check_with(run, 0, 4, result("decoder layer 1", 1))))

    monkeypatch.setattr(run_sweep, "carry_out", make)
    monkeypatch.setattr("orchestrator.cli.planning.this_host", lambda: GPUS)
    command = ["bisect", ORIGIN, cell.run_ids[0], "--layers", "--store", str(tmp_path), "--executor", "local"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "First to differ: step 4, the output of decoder layer 1" in out and "report: " not in out
    (own,) = (path for path in tmp_path.iterdir() if path.name != ORIGIN)
    assert own.name == f"{ORIGIN}-layers-{cell.cell_id.split('-')[1]}"

    assert main([*command, "--json"]) == 0
    content = validated("bisect", capsys.readouterr().out)
    assert (content["first"]["step"], content["first"]["ranks"]) == (4, [0])
    assert content["first"]["result"] == dataclasses.asdict(result("decoder layer 1", 1))
    assert content["checks"]["steps"] == list(range(4, 13))
    assert len(rounds) == 1, "all of it was on disk"
    text = (own / "report" / "layers.md").read_text()
    assert main(command) == 0 and (own / "report" / "layers.md").read_text() == text, "the same records, the same bytes"
