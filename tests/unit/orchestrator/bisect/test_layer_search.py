"""bisect --layers over written records: its runs, what it attributes to graphs, and its answer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.graphs.layer_divergence import DigestDifference, OfRanks, What, first_difference, locate
from launch.common.atomic_files import JsonLines, write_json
from launch.contract.outcomes import Outcome
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Margins, Plan, PlannedBundle
from launch.contract.records.layer_digests import StepDigests, hexadecimal, layer_names
from launch.contract.spec import CudaGraph, Model, Parallelism, Placement, RunSpec, Training, spec_from_json
from orchestrator.bisect.layer_answer import LayerAnswer, LayerSearch
from orchestrator.bisect.layer_search import read_answer, start_search
from orchestrator.bisect.side_sweep import plan_side_sweep, run_search
from orchestrator.cli.main import main
from orchestrator.errors import InputError
from orchestrator.sweeps.store import write_plan
from orchestrator.targets.host import Host
from orchestrator.workflow import run_sweep
from tests.records import STARTED, AttemptRecord, attempt_record, write_attempt, written_cell

GPUS = Host(("0", "1", "2", "3"), frozenset(), True)
ORIGIN = "origin"
DIVERGES_AT = 20
WARMUP = 3
SPEC = RunSpec(
    model=Model(num_layers=3),
    training=Training(steps=120, precision="bf16", global_batch_size=2),
    cuda_graph=CudaGraph("torch", ("attn",), WARMUP),
    placement=Placement("cuda"),
)
NAMES = layer_names(3)
PIPELINE = dataclasses.replace(SPEC, parallelism=Parallelism(pp=2, tp=2), placement=Placement("cuda", ranks_per_node=4))

Place = tuple[int, What, int | None, str]
"""Step, what, micro-batch and layer."""
Differs = Callable[[RunSpec, int], Place | None]
"""Return the place from which a run's digests on a rank differ from those of its workload."""


def other_from(place: Place, *, rank: int = 0, graphed: bool = True, repeats: tuple[int, ...] = (0, 1)) -> Differs:
    def differs(spec: RunSpec, on: int) -> Place | None:
        return place if on == rank and spec.graphed == graphed and spec.repeat in repeats else None

    return differs


def alike(spec: RunSpec, rank: int) -> Place | None:
    return None


def digests_of(spec: RunSpec, rank: int, other: Place | None) -> list[StepDigests]:
    """All from ``other`` on in the order of a step are the run's own, if it is given."""
    names = layer_names(spec.model.num_layers)
    if spec.parallelism.pp == 2:
        names = names[:2] if rank < 2 else names[2:]
    order = {"outputs": 0, "gradients": 1, "parameter_gradients": 2, "parameters": 3}
    every = layer_names(spec.model.num_layers)

    def key(step: int, what: str, micro_batch: int | None, layer: str) -> tuple[int, int, int, int]:
        number = every.index(layer)
        return step, order[what], micro_batch or 0, {"outputs": number, "gradients": -number}.get(what, 0)

    def one(step: int, what: str, micro_batch: int | None, layer: str) -> str:
        same_layer = micro_batch is not None or (other is not None and other[3] in (layer, "all"))
        own = (
            other is not None
            and same_layer
            and key(step, what, micro_batch, layer)
            >= key(other[0], other[1], other[2], every[0] if other[3] == "all" else other[3])
        )
        text = repr((step, what, micro_batch, layer, rank, spec.run_id if own else ""))
        return hexadecimal(int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) | 1)

    passes, of_step = ("outputs", "gradients"), ("parameter_gradients", "parameters")
    return [
        StepDigests(
            step,
            *({name: tuple(one(step, what, m, name) for m in range(spec.num_microbatches)) for name in names} for what in passes),
            *({name: one(step, what, None, name) for name in names if name != "loss"} for what in of_step),
        )
        for step in range(spec.digest_steps)
    ]  # fmt: skip


# --- where runs differ ----------------------------------------------------------------------------------------------

SIX = dataclasses.replace(SPEC, digest_steps=6)


def runs(differs: Differs, spec: RunSpec = SIX) -> tuple[dict[int, OfRanks], dict[int, OfRanks]]:
    """The digests of two eager and two graphed repeats."""
    eager = dataclasses.replace(spec, cuda_graph=CudaGraph(warmup_steps=WARMUP))
    sides = []
    for side in (eager, spec):
        repeats = [dataclasses.replace(side, repeat=repeat) for repeat in (0, 1)]
        ranks = range(spec.parallelism.world_size)
        sides.append({one.repeat: [digests_of(one, rank, differs(one, rank)) for rank in ranks] for one in repeats})
    return sides[0], sides[1]


@st.composite
def places(draw: st.DrawFn) -> Place:
    what: What = draw(st.sampled_from(["outputs", "gradients", "parameter_gradients", "parameters"]))
    in_pass = what in ("outputs", "gradients")
    layer = draw(st.sampled_from(NAMES if in_pass else NAMES[:-1]))
    return draw(st.integers(0, 5)), what, draw(st.integers(0, 1)) if in_pass else None, layer


@given(place=places(), rank=st.integers(0, 3))
def test_the_first_difference_is_found(place: Place, rank: int) -> None:
    """On one of four ranks; each pair of ranks holds some of the layers."""
    spec = dataclasses.replace(PIPELINE, digest_steps=6)
    step, what, micro_batch, layer = place
    holds = (rank < 2) == (layer in NAMES[:2])
    eager, graphed = runs(other_from(place, rank=rank if holds else (rank + 2) % 4), spec)
    found = first_difference(eager[0], graphed[0], NAMES)
    assert found == DigestDifference(step, what, micro_batch, (layer,), (rank if holds else (rank + 2) % 4,))
    assert first_difference(eager[0], eager[1], NAMES) is None


@given(graphed=places(), eager=places())
def test_only_differences_before_those_of_eager_runs_are_attributed(graphed: Place, eager: Place) -> None:
    def differs(spec: RunSpec, rank: int) -> Place | None:
        return graphed if spec.graphed else eager if spec.repeat == 1 else None

    one, other = runs(differs)
    located = locate(one, other, SIX)
    assert located.eager is not None and located.first is not None
    # Repeat 0 has only the graphed difference; the eager baseline of repeat 1 differs too.
    truly_first = locate({0: one[0]}, {0: other[0]}, SIX).first
    assert truly_first is not None
    before = truly_first.place(NAMES) < located.eager.place(NAMES)
    assert located.attributable == (before and graphed[0] >= WARMUP)
    if located.attributable:
        assert located.first == truly_first


def test_one_eager_run_attributes_nothing_to_graphs() -> None:
    eager, graphed = runs(other_from((4, "outputs", 0, "loss")))
    assert locate(eager, graphed, SIX).attributable
    assert not locate({0: eager[0]}, {0: graphed[0]}, SIX).attributable


def test_runs_of_different_lengths_are_compared_over_common_steps() -> None:
    """As where one ended at a NaN."""
    eager, graphed = runs(other_from((5, "outputs", 0, "embedding")))
    assert first_difference(eager[0], [graphed[0][0][:5]], NAMES) is None
    assert locate(eager, {0: [graphed[0][0][:5]]}, SIX).steps == 5


# --- the verb -------------------------------------------------------------------------------------------------------

Edit = Callable[[AttemptRecord], None]


def off(run: AttemptRecord) -> None:
    if run.spec.graphed:
        for step in run.metrics[DIVERGES_AT:]:
            step["loss"] += 0.5


def unchanged(run: AttemptRecord) -> None:
    pass


def only_without_deterministic_mode(run: AttemptRecord) -> None:
    if not run.spec.training.deterministic:
        off(run)


def near_in_deterministic_mode(run: AttemptRecord) -> None:
    """Other bits there, and what diverged where it was run at first alone."""
    if run.spec.training.deterministic and run.spec.graphed:
        for step in run.metrics[DIVERGES_AT:]:
            step["loss"] += 1e-7
    elif not run.spec.digest_steps:
        off(run)


def ended(outcome: Any, phase: Any) -> Outcome:
    return Outcome(outcome, phase, "bundle000", STARTED, STARTED + 9, 0, outcome, "said so", "r")


def eager_fails(run: AttemptRecord) -> None:
    if run.spec.digest_steps and run.spec.training.deterministic:
        run.outcome = ended("FAILED", "warmup")
    else:
        off(run)


def written(root: Path, spec: RunSpec = SPEC, edit: Edit = off) -> tuple[SweepPaths, Plan, Cell]:
    """Write a sweep of ``spec`` and its eager baseline. Return the cell of ``spec``."""
    sweep = SweepPaths(root / ORIGIN)
    eager = dataclasses.replace(spec, cuda_graph=CudaGraph(warmup_steps=WARMUP))
    cells = tuple(written_cell(one, 2) for one in (eager, spec))
    run_ids = tuple(cell.run_ids[repeat] for repeat in range(2) for cell in cells)
    bundle = PlannedBundle("bundle000", spec.workload_id, run_ids)
    plan = Plan(ORIGIN, f"name: {ORIGIN}\n", "origin.yaml", Margins(), cells, (bundle,))
    write_json(sweep.plan, plan)
    make_runs(sweep, plan, edit, alike)
    return sweep, plan, cells[1]


def make_runs(sweep: SweepPaths, plan: Plan, edit: Edit, differs: Differs) -> list[str]:
    """Write records in place of runs. Return the runs that had none."""
    made = []
    for run_id, cell in plan.cell_of_run().items():
        spec = spec_from_json(cell.spec_of(cell.run_ids.index(run_id)))
        attempt = sweep.run(run_id).attempt(1)
        if attempt.outcome.exists():
            continue
        made.append(run_id)
        record = attempt_record(spec)
        edit(record)
        write_attempt(sweep, record)
        for rank in range(spec.parallelism.world_size if spec.digest_steps else 0):
            with JsonLines(attempt.digests(rank)) as lines:
                for one in digests_of(spec, rank, differs(spec, rank)):
                    lines.write(dataclasses.asdict(one))
    return made


@dataclasses.dataclass
class Trial:
    """A search in a written sweep, whose runs come out as ``edit`` and ``differs`` say."""

    root: Path
    differs: Differs
    edit: Edit = off
    spec: RunSpec = SPEC
    target: Host = GPUS
    rounds: list[int] = dataclasses.field(default_factory=list)

    def search(self) -> tuple[LayerSearch, SweepPaths]:
        search = start_search(*written(self.root, self.spec), self.target)
        return search, SweepPaths(self.root / search.name)

    def answer(self) -> LayerAnswer:
        search, sweep = self.search()

        def make(plan: Plan) -> None:
            write_json(sweep.plan, plan)
            self.rounds.append(len(make_runs(sweep, plan, self.edit, self.differs)))

        answer = run_search(read_answer, sweep, search, self.target, make)
        assert answer.text.isprintable() or "\n" in answer.text
        return answer


def test_the_steps_up_to_the_failure_are_digested_first_in_deterministic_mode(tmp_path: Path) -> None:
    search, _ = Trial(tmp_path, alike).search()
    assert [one.digest_steps for one in search.trials] == [DIVERGES_AT + 1 + 2] * 2
    assert [one.training.deterministic for one in search.trials] == [True, False]
    plan = plan_side_sweep(search, search.trials, GPUS)
    assert [(c.label, len(c.repeat_ids)) for c in plan.cells] == [
        (f"{label}, lr 0.0003{mode}", 2) for mode in (", deterministic=true", "") for label in ("eager", "torch.attn")
    ]
    assert len(plan.bundles) == 2, "each trial has its own eager runs"
    known = dataclasses.replace(
        SPEC, training=dataclasses.replace(SPEC.training, deterministic=True, steps=DIVERGES_AT + 1)
    )
    search, _ = Trial(tmp_path / "known", alike, spec=known).search()
    (trial,) = search.trials
    assert trial.training.deterministic and trial.digest_steps == trial.training.steps


PLACES: list[tuple[Place, str, str]] = [
    ((4, "outputs", 1, "decoder layer 2"),
     "First to differ: step 4, the output of decoder layer 2 in the forward pass of micro-batch 1.",
     "Everything before agrees, parameters included: decoder layer 2 computes another result from the same input."),
    ((5, "outputs", 0, "embedding"),
     "First to differ: step 5, the output of the embedding in the forward pass of micro-batch 0.",
     "the embedding computes another result from the same input."),
    ((4, "gradients", 0, "decoder layer 1"),
     "First to differ: step 4, the gradient of the output of decoder layer 1 in the backward pass of micro-batch 0.",
     "the backward pass of decoder layer 2 computes another result."),
    ((4, "gradients", 0, "decoder layer 2"),
     "First to differ: step 4, the gradient of the output of decoder layer 2 in the backward pass of micro-batch 0.",
     "the backward pass of the final norm computes another result."),
    ((4, "parameter_gradients", None, "decoder layer 0"),
     "First to differ: step 4, the gradients of the parameters of decoder layer 0.",
     "All outputs of the step and the gradients between layers agree"),
    ((4, "parameters", None, "all"),
     "First to differ: step 4, the parameters of 6 layers (the first is the embedding) after the update.",
     "All gradients of the step agree: the update computes another result."),
]  # fmt: skip


@pytest.mark.parametrize(("place", "words", "meaning"), PLACES)
def test_the_first_place_is_named_with_what_it_means(tmp_path: Path, place: Place, words: str, meaning: str) -> None:
    trial = Trial(tmp_path, other_from(place))
    answer = trial.answer()
    assert (answer.summary, answer.exit_code) == (words, 0)
    assert meaning in answer.text and "The 2 eager repeats agree bit for bit in the first 23 steps." in answer.text
    assert "In deterministic mode the failure occurred again (DIVERGED: " in answer.text
    assert "Each of the 2 graphed repeats differs there." in answer.text
    assert trial.rounds == [4], "deterministic mode is enough"


def test_ranks_are_named_with_their_coordinates(tmp_path: Path) -> None:
    """tp 2, pp 2: decoder layer 1 and behind it is on the second stage."""
    differs = other_from((4, "outputs", 1, "decoder layer 1"), rank=3)
    answer = Trial(tmp_path, differs, spec=PIPELINE).answer()
    assert answer.summary.endswith("of micro-batch 1, on rank 3 (tp 1, pp 1).")


def test_a_difference_in_one_repeat_is_reported(tmp_path: Path) -> None:
    answer = Trial(tmp_path, other_from((7, "outputs", 0, "loss"), repeats=(1,))).answer()
    assert answer.exit_code == 0
    assert (
        "Graphed repeats do not all differ there: graphed repeat 0 agrees; graphed repeat 1 differs first in step 7, the output of the loss"
        in answer.text
    )


def test_a_failure_hidden_by_deterministic_mode_is_sought_without_it(tmp_path: Path) -> None:
    def differs(spec: RunSpec, rank: int) -> Place | None:
        return None if spec.training.deterministic else other_from((4, "outputs", 0, "decoder layer 0"))(spec, rank)

    trial = Trial(tmp_path, differs, only_without_deterministic_mode)
    answer = trial.answer()
    assert (answer.exit_code, trial.rounds) == (0, [4, 5])
    assert "In deterministic mode the failure did not occur again (BITWISE)." in answer.text
    assert "Graphed and eager runs agree bit for bit in the first 23 steps." in answer.text
    assert "Without deterministic mode the failure occurred again" in answer.text


def test_eager_runs_that_differ_as_early_leave_nothing_to_name(tmp_path: Path) -> None:
    def differs(spec: RunSpec, rank: int) -> Place | None:
        if spec.training.deterministic:
            return None
        if not spec.graphed:
            return (1, "gradients", 1, "decoder layer 0") if spec.repeat == 1 else None
        return (4, "outputs", 0, "decoder layer 0")

    answer = Trial(tmp_path, differs, only_without_deterministic_mode).answer()
    assert (answer.first_difference, answer.exit_code) == (None, 4)
    assert answer.summary == (
        "No layer can be named. Eager runs differ as early. In deterministic mode they agree, but the failure does "
        "not occur there."
    )
    assert (
        "Two eager repeats differ, first in step 1, the gradient of the output of decoder layer 0 in the "
        "backward pass of micro-batch 1. Differences from there on cannot be attributed to graphs." in answer.text
    )


def test_eager_runs_that_differ_in_deterministic_mode_are_reported(tmp_path: Path) -> None:
    answer = Trial(tmp_path, other_from((4, "outputs", 0, "loss"), graphed=False, repeats=(1,))).answer()
    assert (answer.exit_code, answer.summary) == (
        4, "No layer can be named. Eager runs differ as early, in deterministic mode too."
    )  # fmt: skip


def test_a_failure_that_digests_hide_does_not_occur_again(tmp_path: Path) -> None:
    trial = Trial(tmp_path, alike, unchanged)
    answer = trial.answer()
    assert (answer.exit_code, trial.rounds) == (4, [4, 5])
    assert answer.summary.startswith("No layer can be named. Digests add work to a step, which may hide")
    assert answer.text.count("the failure did not occur again (BITWISE)") == 2


def test_bits_that_differ_in_deterministic_mode_are_not_the_failure_that_is_sought(tmp_path: Path) -> None:
    """There any differing bit is DIVERGED; the original run was off by half a nat."""
    trial = Trial(tmp_path, other_from((4, "outputs", 0, "decoder layer 0")), near_in_deterministic_mode)
    answer = trial.answer()
    assert (answer.exit_code, trial.rounds) == (4, [4, 5])
    assert "In deterministic mode it is unknown whether the failure occurred again" in answer.text
    assert "within the margins of the original run" in answer.text


def test_a_deterministic_run_is_compared_bit_for_bit(tmp_path: Path) -> None:
    known = dataclasses.replace(SPEC, training=dataclasses.replace(SPEC.training, deterministic=True))
    answer = Trial(tmp_path, other_from((20, "outputs", 0, "loss")), near_in_deterministic_mode, known).answer()
    assert answer.exit_code == 0


def test_bits_that_differ_without_the_failure_are_no_answer(tmp_path: Path) -> None:
    answer = Trial(tmp_path, other_from((4, "outputs", 0, "loss")), unchanged).answer()
    assert answer.exit_code == 4 and "Graphed runs differ from eager runs first in step 4" in answer.text


def test_a_difference_before_the_capture_or_after_the_digests_names_no_layer(tmp_path: Path) -> None:
    early = Trial(tmp_path / "early", other_from((1, "outputs", 0, "decoder layer 0"))).answer()
    assert early.exit_code == 4
    assert "Nothing is captured before step 3, so graphs are not the cause." in early.text
    late = Trial(tmp_path / "late", alike).answer()
    assert late.exit_code == 4
    assert "agree bit for bit in the first 23 steps; the failure begins later." in late.text


def test_the_second_trial_runs_if_the_eager_baseline_of_the_first_fails(tmp_path: Path) -> None:
    answer = Trial(tmp_path, other_from((4, "outputs", 0, "loss")), eager_fails).answer()
    assert answer.exit_code == 0
    assert (
        "In deterministic mode it is unknown whether the failure occurred again (the eager baseline ended FAILED"
        in answer.text
    )


def test_incomplete_digests_are_no_evidence(tmp_path: Path) -> None:
    trial = Trial(tmp_path, other_from((4, "outputs", 0, "loss")))
    search, sweep = trial.search()
    for number, torn in enumerate((
        lambda lines: [],
        lambda lines: lines[1:],
        lambda lines: lines[:3],
        lambda lines: [{**lines[0], "outputs": {}}, *lines[1:]],
        lambda lines: [{**lines[0], "parameters": {**lines[0]["parameters"], "embedding": "0" * 16}}, *lines[1:]],
        lambda lines: [{**lines[0], "gradients": {k: v[:1] for k, v in lines[0]["gradients"].items()}}, *lines[1:]],
    )):  # fmt: skip
        plan = plan_side_sweep(search, search.trials[:1], GPUS)
        if not number:
            make_runs(sweep, plan, off, trial.differs)
        path = sweep.run(plan.cells[-1].run_ids[1]).attempt(1).digests(0)
        whole = path.read_text()
        path.write_text("".join(json.dumps(line) + "\n" for line in torn(list(map(json.loads, whole.splitlines())))))
        answer = run_search(read_answer, sweep, search, GPUS, lambda plan: None)
        assert (answer.first_difference, answer.exit_code) == (None, 4)
        assert f"The first difference is unknown: {plan.cells[-1].run_ids[1]}: " in answer.text
        assert answer.summary.startswith(
            f"No layer can be named. Digests are incomplete: {plan.cells[-1].run_ids[1]}: "
        )
        path.write_text(whole)
    assert run_search(read_answer, sweep, search, GPUS, lambda plan: None).exit_code == 0


def test_an_eager_repeat_whose_digests_end_early_is_no_evidence_that_eager_runs_agree(tmp_path: Path) -> None:
    def differs(spec: RunSpec, rank: int) -> Place | None:
        if spec.graphed:
            return 4, "outputs", 0, "decoder layer 1"
        return (4, "outputs", 0, "decoder layer 0") if spec.repeat == 1 else None

    trial = Trial(tmp_path, differs)
    search, sweep = trial.search()
    plan = plan_side_sweep(search, search.trials[:1], GPUS)
    make_runs(sweep, plan, off, trial.differs)
    torn = plan.cells[0].run_ids[1]
    path = sweep.run(torn).attempt(1).digests(0)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    answer = run_search(read_answer, sweep, search, GPUS, lambda plan: None)
    assert (answer.first_difference, answer.exit_code) == (None, 4)
    assert f"{torn}: digests are of 3 steps, and 23 were to be digested" in answer.summary


@pytest.mark.parametrize("side", [0, -1])
@pytest.mark.parametrize("what", ["outputs", "gradients", "parameter_gradients", "parameters"])
def test_a_layer_that_one_rank_of_two_lacks_is_no_evidence(tmp_path: Path, what: str, side: int) -> None:
    trial = Trial(tmp_path, other_from((4, "outputs", 0, "decoder layer 2"), rank=3), spec=PIPELINE)
    search, sweep = trial.search()
    plan = plan_side_sweep(search, search.trials[:1], GPUS)
    make_runs(sweep, plan, off, trial.differs)
    path = sweep.run(plan.cells[side].run_ids[1]).attempt(1).digests(1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[7][what]["embedding"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = run_search(read_answer, sweep, search, GPUS, lambda plan: None)
    assert (answer.first_difference, answer.exit_code) == (None, 4)
    expected = f"rank 1 has {what} of other layers in a step of {'graphed' if side else 'eager'} repeat 1"
    assert expected in answer.summary


def test_a_capture_in_the_first_step_is_attributed_from_there_on() -> None:
    """Warm-up of local graphs is passes, not steps."""
    local = dataclasses.replace(SIX, cuda_graph=CudaGraph("local", (), WARMUP))
    assert locate(*runs(other_from((1, "outputs", 0, "loss")), local), local).attributable


def test_a_run_without_outcome_must_be_resumed_first(tmp_path: Path) -> None:
    sweep, plan, cell = written(tmp_path)
    sweep.run(cell.run_ids[0]).attempt(1).outcome.unlink()
    with pytest.raises(InputError, match="has no outcome") as error:
        start_search(sweep, plan, cell, GPUS)
    assert f"resume {ORIGIN}" in str(error.value)


def test_lost_runs_are_resumed(tmp_path: Path) -> None:
    trial = Trial(tmp_path, other_from((4, "outputs", 0, "loss")))
    search, sweep = trial.search()
    plan = plan_side_sweep(search, search.trials[:1], GPUS)
    make_runs(sweep, plan, off, trial.differs)
    attempt = sweep.run(plan.cells[-1].run_ids[1]).attempt(1)
    attempt.outcome.unlink()
    attempt.digests(0).unlink()
    lost = run_search(read_answer, sweep, search, GPUS, lambda plan: None)
    assert (lost.exit_code, lost.summary) == (
        2,
        "Runs were lost before the answer was known. The same command resumes them.",
    )
    assert trial.answer().exit_code == 0 and trial.rounds == [1]


@pytest.mark.parametrize(
    ("spec", "edit", "message"),
    [
        (SPEC, unchanged, "graphs are not known to change its results: BITWISE"),
        (dataclasses.replace(SPEC, cuda_graph=CudaGraph("torch_compile")), off, r"\[torch_native.digest_steps\]: digest_steps=23"),
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
        start_search(*written(tmp_path, edit=no_capture), GPUS)


def test_the_verb_runs_a_side_sweep_and_prints_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records are written in place of the runs, since a CPU captures no graph."""
    _, _, cell = written(tmp_path)
    rounds = []

    def make(paths: SweepPaths, plan: Plan, target: Any, policy: str, executor: str, *, wait: bool) -> None:
        write_plan(paths, plan)
        rounds.append(make_runs(paths, plan, off, other_from((4, "outputs", 1, "decoder layer 1"))))

    monkeypatch.setattr(run_sweep, "carry_out", make)
    monkeypatch.setattr("orchestrator.cli.planning.this_host", lambda: GPUS)
    command = ["bisect", ORIGIN, cell.run_ids[0], "--layers", "--store", str(tmp_path), "--executor", "local"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "First to differ: step 4, the output of decoder layer 1" in out and "report: " not in out
    (own,) = (path for path in tmp_path.iterdir() if path.name != ORIGIN)
    assert own.name == f"{ORIGIN}-layers-{cell.cell_id.split('-')[1]}"

    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["first"] == {
        "step": 4, "what": "outputs", "micro_batch": 1, "layers": ["decoder layer 1"], "ranks": [0]
    }  # fmt: skip
    assert [trial["deterministic"] for trial in content["trials"]] == [True]
    assert len(rounds) == 1, "all of it was on disk"
    text = (own / "report" / "layers.md").read_text()
    assert main(command) == 0 and (own / "report" / "layers.md").read_text() == text, "the same records, the same bytes"
