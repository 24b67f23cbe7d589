"""Test bisecting captured sets: the decisions for any family of failing sets, and the verb on written records."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.report.write_report import write_report
from launch.common.atomic_files import read_json, write_json
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan, Reason
from launch.contract.spec import CudaGraph, Fault, Model, Placement, RunSpec, Training, spec_from_json
from orchestrator.bisect.scope_answer import ScopeSearch
from orchestrator.bisect.scope_candidates import Conclusion, Status, list_candidates, next_scopes
from orchestrator.bisect.scope_search import find_cell, read_answer, start_search
from orchestrator.bisect.search import Answer, answer_to_json
from orchestrator.bisect.side_sweep import plan_side_sweep, run_search, write_answer
from orchestrator.cli.main import main
from orchestrator.errors import InputError
from orchestrator.sweeps.store import write_plan
from orchestrator.targets.host import Host
from orchestrator.workflow import run_sweep
from tests.records import AttemptRecord, Edit, attempt_record, write_attempt
from tests.schemas import validated
from tests.unit.orchestrator.bisect.origin import ORIGIN, ended, make_runs, written

GPUS = Host(("0",), frozenset({"transformer-engine"}), True)
MOE = Model(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64)
DENSE = Model()
WHOLE = ("attn", "moe_router", "moe_preprocess")


def spec_of(model: Model, impl: Any, scope: tuple[str, ...] = (), **fields: Any) -> RunSpec:
    training = Training(steps=120, precision="bf16")
    graph = CudaGraph(impl, scope, 3, fields.pop("optimizer", False))
    return RunSpec(model=model, training=training, cuda_graph=graph, placement=Placement("cuda"), **fields)


SPECS = [
    spec_of(MOE, "transformer_engine", WHOLE),
    spec_of(MOE, "torch"),
    spec_of(dataclasses.replace(MOE, moe_layer_freq=2), "torch"),
    spec_of(DENSE, "torch", ("attn", "mlp")),
    spec_of(DENSE, "full_iteration", optimizer=True),
]


# --- which sets there are -------------------------------------------------------------------------------------------


def labels(spec: RunSpec) -> list[str]:
    return [one.cuda_graph.label.removeprefix(f"{spec.cuda_graph.impl}.") for one in list_candidates(spec)]


def test_smaller_sets_are_those_that_mean_something() -> None:
    assert labels(SPECS[0]) == ["attn", "moe_router", "attn.moe_router", "moe_router.moe_preprocess", ".".join(WHOLE)]
    assert labels(SPECS[1]) == [
        "attn", "moe", "moe_router", "attn.moe_router", "moe_router.moe_preprocess", ".".join(WHOLE), "torch",
    ]  # fmt: skip
    assert labels(SPECS[3]) == ["attn", "mlp", "attn.mlp"]
    assert labels(SPECS[4]) == ["full_iteration", "optimizer"]
    for alone in (
        spec_of(DENSE, "torch", ("attn",)),
        spec_of(DENSE, "full_iteration"),
        spec_of(DENSE, "torch_compile"),
    ):
        (one,) = list_candidates(alone)
        assert one.cuda_graph == alone.cuda_graph


# --- what is decided ------------------------------------------------------------------------------------------------

Family = Callable[[RunSpec], Status]


def search_through(candidates: tuple[RunSpec, ...], family: Family) -> tuple[Conclusion, dict[CudaGraph, Status]]:
    found: dict[CudaGraph, Status] = {}
    for _ in range(len(candidates) + 1):
        step = next_scopes(candidates, found)
        if isinstance(step, Conclusion):
            return step, found
        assert set(found) < {one.cuda_graph for one in step}, "a round adds to what was tried, and takes nothing away"
        found = {one.cuda_graph: family(one) for one in step}
    raise AssertionError("no end")


@given(data=st.data(), spec=st.sampled_from(SPECS))
def test_the_named_set_fails_and_no_smaller_set_does(data: st.DataObject, spec: RunSpec) -> None:
    """The families are arbitrary, so one set allows no conclusion about another."""
    candidates = list_candidates(spec)
    status: st.SearchStrategy[Status] = st.sampled_from(["fails", "fails otherwise", "passes", "unclear"])
    truth = {one.cuda_graph: data.draw(status, label=one.cuda_graph.label) for one in candidates}
    conclusion, found = search_through(candidates, lambda one: truth[one.cuda_graph])
    smallest = conclusion.smallest
    tried = [one for one in candidates if one.cuda_graph in found]
    if smallest is None:
        assert "fails" not in found.values()
        assert {one.cuda_graph for one in conclusion.unclear} == {
            graph for graph, status in found.items() if status != "passes"
        }
        size = max(len(one.captured_parts) for one in tried)
        assert tried == [one for one in candidates if len(one.captured_parts) <= size]
        if len(tried) < len(candidates):
            assert all(found[one.cuda_graph] == "unclear" for one in tried if len(one.captured_parts) == size), (
                "nothing was clear"
            )
        return
    assert truth[smallest.cuda_graph] == "fails"
    smaller = [one for one in candidates if len(one.captured_parts) < len(smallest.captured_parts)]
    assert all(one in tried and truth[one.cuda_graph] != "fails" for one in smaller)
    assert list(conclusion.unclear) == sorted(
        (one for one in smaller if truth[one.cuda_graph] != "passes"), key=lambda one: len(one.captured_parts)
    )
    assert all(
        truth[one.cuda_graph] == "fails" and len(one.captured_parts) == len(smallest.captured_parts)
        for one in conclusion.also
    )


@given(culprits=st.sets(st.sampled_from(["attention", "router", "preprocessing"]), min_size=1))
def test_a_combination_is_named_as_the_parts_that_fail_together(culprits: set[str]) -> None:
    candidates = list_candidates(SPECS[0])
    conclusion, _ = search_through(candidates, lambda one: "fails" if culprits <= one.captured_parts else "passes")
    assert conclusion.smallest is not None
    assert conclusion.smallest.captured_parts == culprits | ({"router"} if "preprocessing" in culprits else set())
    assert conclusion.also == conclusion.unclear == ()


# --- records in the place of runs -----------------------------------------------------------------------------------


def captures(run: AttemptRecord, *parts: str) -> bool:
    graph = run.spec.cuda_graph
    return run.spec.graphed and (not graph.scope or set(parts) <= set(graph.scope))


def nan(*parts: str) -> Edit:
    def edit(run: AttemptRecord) -> None:
        if captures(run, *parts):
            del run.metrics[50:]
            run.metrics[-1]["loss"] = math.nan
            run.outcome = ended("NUMERIC", "measure")

    return edit


def off(*parts: str) -> Edit:
    def edit(run: AttemptRecord) -> None:
        if captures(run, *parts):
            for step in run.metrics[60:]:
                step["loss"] += 0.5

    return edit


def no_capture(*parts: str) -> Edit:
    def edit(run: AttemptRecord) -> None:
        if captures(run, *parts):
            del run.metrics[3:]
            run.outcome = ended("CAPTURE_FAILED", "capture")

    return edit


def eager_too(run: AttemptRecord) -> None:
    del run.metrics[50:]
    run.outcome = ended("CUDA_OOM", "measure")


def refused(run: AttemptRecord) -> None:
    if run.spec.graphed:
        del run.metrics[:]
        run.outcome = ended("ENVIRONMENT", "build")


def unproven(run: AttemptRecord) -> None:
    nan(*WHOLE)(run)
    if run.spec.cuda_graph.scope == ("attn",):
        run.events[0] = [event for event in run.events[0] if event["kind"] != "proof"]


@dataclasses.dataclass
class Trial:
    """A bisection of a written sweep."""

    root: Path
    edit: Edit
    spec: RunSpec = SPECS[0]
    rounds: list[list[str]] = dataclasses.field(default_factory=list)
    later: Edit | None = None
    """The edit of the bisection's runs, if it differs from that of the sweep."""

    def search(self) -> tuple[ScopeSearch, SweepPaths]:
        sweep, plan, cell = written(self.root, self.spec, self.edit)
        search = start_search(sweep, plan, cell, GPUS)
        return search, SweepPaths(self.root / search.name)

    def answer(self) -> Answer:
        search, sweep = self.search()

        def make(plan: Plan) -> None:
            write_json(sweep.plan, plan)
            cells = plan.cell_of_run()
            made = make_runs(sweep, plan, self.later or self.edit)
            self.rounds.append(list(dict.fromkeys(cells[run_id].run_spec.cuda_graph.label for run_id in made)))

        return run_search(read_answer, sweep, search, GPUS, make)


def plan_sets(search: ScopeSearch, sets: tuple[RunSpec, ...]) -> Plan:
    return plan_side_sweep(search, sets, GPUS)


def smallest(answer: Answer) -> str | None:
    smallest = answer.json_fields["smallest"]
    return smallest["label"] if smallest else None


def statuses(answer: Answer) -> list[str]:
    """Return the statuses of the sets that were tried."""
    return [one["status"] for one in answer.json_fields["sets"] if one["status"]]


TE = "transformer_engine"


@pytest.mark.parametrize(
    ("edit", "named", "rounds"),
    [
        (nan("attn"), f"{TE}.attn", 1),
        (off("moe_router"), f"{TE}.moe_router", 1),
        (no_capture("moe_router", "moe_preprocess"), f"{TE}.moe_router.moe_preprocess", 2),
        (no_capture("attn", "moe_router"), f"{TE}.attn.moe_router", 2),
        (nan(*WHOLE), f"{TE}.attn.moe_router.moe_preprocess", 3),
    ],
)
def test_the_smallest_set_that_fails_is_named(tmp_path: Path, edit: Edit, named: str, rounds: int) -> None:
    trial = Trial(tmp_path, edit)
    answer = trial.answer()
    assert (smallest(answer), answer.exit_code) == (named, 0)
    expected = [["eager", f"{TE}.attn", f"{TE}.moe_router"], [f"{TE}.attn.moe_router", f"{TE}.moe_router.moe_preprocess"],
                [f"{TE}.attn.moe_router.moe_preprocess"]]  # fmt: skip
    assert trial.rounds == expected[:rounds]
    assert named in answer.text


def test_a_failing_combination_is_reported(tmp_path: Path) -> None:
    answer = Trial(tmp_path / "a", no_capture("attn", "moe_router")).answer()
    assert answer.summary == f"{TE}.attn.moe_router is the smallest set that fails."
    whole = Trial(tmp_path / "b", nan(*WHOLE)).answer()
    assert whole.summary == f"{TE}.attn.moe_router.moe_preprocess, the whole set, is the smallest set that fails."
    step = Trial(tmp_path / "d", no_capture("moe_router", "moe_preprocess")).answer()
    assert step.summary == f"{TE}.moe_router.moe_preprocess is the smallest set that fails."
    both = Trial(tmp_path / "c", nan()).answer()
    assert both.summary == f"{TE}.attn is the smallest set that fails."
    assert [one["label"] for one in both.json_fields["also"]] == [f"{TE}.moe_router"]


def test_a_failure_that_does_not_occur_again_is_not_reproduced(tmp_path: Path) -> None:
    answer = Trial(tmp_path, nan("attn"), later=lambda run: None).answer()
    assert (smallest(answer), answer.exit_code) == (None, 4)
    assert "Not reproduced: all sets pass now, including the whole set." in answer.text
    assert statuses(answer) == ["passes"] * 5


def test_a_set_without_proof_of_replay_is_unclear(tmp_path: Path) -> None:
    answer = Trial(tmp_path, unproven).answer()
    assert (smallest(answer), answer.exit_code) == (f"{TE}.attn.moe_router.moe_preprocess", 4)
    assert f"The status of {TE}.attn is unclear" in answer.summary


def test_a_failing_eager_baseline_makes_all_sets_unclear(tmp_path: Path) -> None:
    answer = Trial(tmp_path, nan("attn"), later=eager_too).answer()
    assert answer.exit_code == 4 and statuses(answer) == ["unclear"] * 5, "the other sets have no run to wait for"
    assert answer.text.count("not tried: ") == 3
    assert answer.summary.startswith("No set is known to fail.") and "reproduced" not in answer.summary


def ends(outcome: Any, *scopes: tuple[str, ...]) -> Edit:
    def edit(run: AttemptRecord) -> None:
        if run.spec.cuda_graph.scope in scopes:
            del run.metrics[3:]
            run.outcome = ended(outcome, "capture")

    return edit


@pytest.mark.parametrize(
    "outcome",
    ["CUDA_OOM", "HANG", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("TIMEOUT", "FAILED"))],
)
def test_a_set_that_fails_otherwise_is_not_named(tmp_path: Path, outcome: str) -> None:
    """DIVERGED is sought. A smaller set fails in another way, and all others pass, including the whole set."""
    answer = Trial(tmp_path / "gone", off("attn"), later=ends(outcome, ("attn",))).answer()
    assert (smallest(answer), answer.exit_code) == (None, 4)
    assert answer.summary == f"No set is known to fail. The status of {TE}.attn is unclear."
    assert f"{outcome} in capture (said so)" in answer.text
    assert statuses(answer) == ["fails otherwise", *["passes"] * 4]

    every = Trial(tmp_path / "every", off("attn"), later=ends(outcome, ("attn",), ("moe_router",), WHOLE)).answer()
    assert (smallest(every), every.exit_code) == (None, 4)
    assert every.summary.startswith("No set is known to fail.")


def test_a_smaller_set_that_fails_otherwise_leaves_a_doubt_and_one_as_small_does_not(tmp_path: Path) -> None:
    def also_hangs(run: AttemptRecord) -> None:
        off("moe_router", "moe_preprocess")(run)
        ends("HANG", ("attn",))(run)

    found = Trial(tmp_path / "a", off(*WHOLE), later=also_hangs).answer()
    assert (smallest(found), found.exit_code) == (f"{TE}.moe_router.moe_preprocess", 4)
    assert f"The status of {TE}.attn is unclear, so a smaller set may fail." in found.summary

    def router_fails(run: AttemptRecord) -> None:
        off("moe_router")(run)
        ends("HANG", ("attn",))(run)

    level = Trial(tmp_path / "b", off(*WHOLE), later=router_fails).answer()
    assert (smallest(level), level.exit_code) == (f"{TE}.moe_router", 0)
    assert "unclear" not in level.summary and "fails otherwise" in level.text


def test_an_outcome_is_sought_with_its_failure_class(tmp_path: Path) -> None:
    def of_class(name: str, *scopes: tuple[str, ...]) -> Edit:
        def edit(run: AttemptRecord) -> None:
            ends("CAPTURE_FAILED", *scopes)(run)
            if run.spec.cuda_graph.scope in scopes:
                run.end(failure_class=name)

        return edit

    def later(run: AttemptRecord) -> None:
        of_class("RNG_CAPTURE", ("attn",))(run)
        of_class("UNJOINED", ("moe_router",), WHOLE)(run)

    answer = Trial(tmp_path, of_class("UNJOINED", WHOLE), later=later).answer()
    assert (answer.json_fields["sought"], smallest(answer)) == ("CAPTURE_FAILED (UNJOINED)", f"{TE}.moe_router")
    assert statuses(answer) == ["fails otherwise", "fails"]


def test_a_nan_that_an_eager_run_may_have_too_is_not_pinned_on_a_set(tmp_path: Path) -> None:
    """NUMERIC counts as the sought failure only if the verdict is DIVERGED."""

    def torn(run: AttemptRecord) -> None:
        nan()(run)
        if run.spec.graphed:
            del run.metrics[:]

    answer = Trial(tmp_path, nan("attn"), later=torn).answer()
    assert (smallest(answer), answer.exit_code) == (None, 4)
    assert set(statuses(answer)) == {"unclear"}


def test_the_report_names_the_way_to_the_smallest_set(tmp_path: Path) -> None:
    sweep, _, cell = written(tmp_path / "several", SPECS[3], off("mlp"))
    text = write_report(sweep).markdown.read_text()
    assert f"`python -m orchestrator bisect SWEEP {cell.cell_id}` finds the smallest set of parts that fails" in text
    sweep, _, _ = written(tmp_path / "one", spec_of(DENSE, "torch", ("attn",)), off("attn"))
    text = write_report(sweep).markdown.read_text()
    assert "**DIVERGED**" in text and "orchestrator bisect" not in text


def test_a_set_that_could_not_be_tried_is_not_said_to_pass(tmp_path: Path) -> None:
    trial = Trial(tmp_path, nan(*WHOLE))
    search, sweep = trial.search()
    attn, *others = search.candidates
    refused = {attn.cuda_graph: (Reason("te.alone", "cannot capture attn alone", "-"),)}
    search = dataclasses.replace(search, candidates=tuple(others), left_out=refused)

    def make(plan: Plan) -> None:
        make_runs(sweep, plan, trial.edit)

    answer = run_search(read_answer, sweep, search, GPUS, make)
    assert (smallest(answer), answer.exit_code) == (f"{TE}.{'.'.join(WHOLE)}", 4)
    assert answer.summary.startswith(
        f"{TE}.attn.moe_router.moe_preprocess, the whole set, is the smallest set that fails among those that could be tried. "
        f"{TE}.attn was not tried: [te.alone] cannot capture attn alone."
    )
    assert "only their combination" not in answer.summary


def test_it_continues_with_what_is_on_disk(tmp_path: Path) -> None:
    """The bisection was ended after the first round, and in the middle of the second."""
    trial = Trial(tmp_path, no_capture("attn", "moe_router"))
    search, sweep = trial.search()
    first, second = search.candidates[:2], search.candidates[:4]
    assert next_scopes(search.candidates, {}) == first
    make_runs(sweep, plan_sets(search, first), trial.edit)
    trial.answer()
    assert trial.rounds == [[f"{TE}.attn.moe_router", f"{TE}.moe_router.moe_preprocess"]]

    late = Trial(tmp_path / "late", trial.edit)
    search, sweep = late.search()
    make_runs(sweep, plan_sets(search, second), late.edit)
    for repeat in (0, 1):
        run_id = plan_sets(search, second).cells[-1].run_ids[repeat]
        sweep.run(run_id).attempt(1).outcome.unlink()
    assert len(statuses(read_answer(sweep, search, GPUS))) == 3
    assert late.answer().exit_code == 2, "made anew by nobody here: an attempt without an outcome stays one"
    assert late.rounds == [[]]


def test_a_node_failure_is_a_lost_run(tmp_path: Path) -> None:
    def node_fails(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.outcome = ended("NODE_FAIL", "measure")

    answer = Trial(tmp_path, nan("attn"), later=node_fails).answer()
    assert (answer.exit_code, statuses(answer)) == (2, [])
    assert "resumes them" in answer.text


def test_what_has_been_found_is_written_beside_the_report(tmp_path: Path) -> None:
    trial = Trial(tmp_path, off("moe_router"))
    answer = trial.answer()
    sweep = SweepPaths(tmp_path / answer.search.name)
    write_answer(sweep, answer)
    content = read_json(sweep.report / "bisect.json")
    assert content == json.loads(json.dumps(answer_to_json(answer)))
    assert content["smallest"]["scope"] == ["moe_router"] and content["exit_code"] == 0
    assert [one["status"] for one in content["sets"]] == ["passes", "fails", None, None, None]
    report = read_json(sweep.report / "report.json")
    assert [cell["verdict"] and cell["verdict"]["verdict"] for cell in report["cells"]] == [None, "BITWISE", "DIVERGED"]
    assert report["recipe"].startswith("# smaller sets of transformer_engine.attn.moe_router.moe_preprocess-")
    text = (sweep.report / "bisect.md").read_text()
    write_answer(sweep, trial.answer())
    assert (sweep.report / "bisect.md").read_text() == text, "the same records, the same bytes"


def test_a_set_that_cannot_run_here_is_refused_by_its_rule(tmp_path: Path) -> None:
    fp32 = dataclasses.replace(spec_of(MOE, "torch"), training=Training(steps=120, precision="fp32"))
    sweep, plan, cell = written(tmp_path / "fp32", fp32, nan("attn"))
    with pytest.raises(InputError, match=r"\[capture.native_fp32_experts\]"):
        start_search(sweep, plan, cell, GPUS)
    sweep, plan, cell = written(tmp_path / "no_gpu", SPECS[0], nan("attn"))
    with pytest.raises(InputError, match=r"no smaller set to try: \[host.gpus\] the run needs 1 GPU"):
        start_search(sweep, plan, cell, Host((), frozenset(), True))


# --- what there is no smaller set of --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "edit", "message"),
    [
        (spec_of(DENSE, "torch_compile"), nan(), "no smaller set to try: cuda_graph.impl=torch_compile takes no scope"),
        (
            spec_of(DENSE, "full_iteration"),
            nan(),
            "no smaller set to try: cuda_graph.impl=full_iteration takes no scope",
        ),
        (spec_of(DENSE, "torch", ("attn",)), nan(), "no smaller set to try: no scope captures less than torch.attn"),
        (SPECS[0], eager_too, "the eager baseline ended CUDA_OOM in measure"),
        (SPECS[0], refused, "graphs are not known to cause its failure: ENVIRONMENT in build (said so)"),
        (SPECS[0], lambda run: None, "graphs are not known to cause its failure: BITWISE"),
        (SPECS[0], unproven, None),
    ],
)
def test_a_cell_that_cannot_be_bisected_is_rejected(
    tmp_path: Path, spec: RunSpec, edit: Edit, message: str | None
) -> None:
    sweep, plan, cell = written(tmp_path, spec, edit)
    if message is None:
        assert start_search(sweep, plan, cell, GPUS)
        return
    with pytest.raises(InputError) as refused:
        start_search(sweep, plan, cell, GPUS)
    assert message in str(refused.value) and len(refused.value.problems) == 1
    with pytest.raises(InputError, match="is eager"):
        start_search(sweep, plan, plan.cells[0], GPUS)


def test_a_run_without_outcome_must_be_resumed_first(tmp_path: Path) -> None:
    sweep, plan, cell = written(tmp_path, SPECS[0], nan("attn"))
    sweep.run(cell.run_ids[0]).attempt(1).outcome.unlink()
    with pytest.raises(InputError, match=rf"a run has no outcome yet\s+resume {plan.name}"):
        start_search(sweep, plan, cell, GPUS)


def test_a_run_is_found_by_a_prefix_of_its_id(tmp_path: Path) -> None:
    _, plan, cell = written(tmp_path, SPECS[0], nan())
    for name in (*cell.run_ids, cell.cell_id, cell.cell_id[:5]):
        assert find_cell(plan, name) is cell
    with pytest.raises(InputError, match="no run of 'origin' begins with 'x'"):
        find_cell(plan, "x")
    with pytest.raises(InputError, match="'' matches several runs"):
        find_cell(plan, "")


def test_a_nan_on_purpose_that_eager_has_too_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = RunSpec(training=Training(steps=40), cuda_graph=CudaGraph("torch_compile"), fault=Fault("nan", 8))

    def both(run: AttemptRecord) -> None:
        del run.metrics[9:]
        run.outcome = ended("NUMERIC", "measure")

    _, _, cell = written(tmp_path, cpu, both)
    assert main(["bisect", ORIGIN, cell.run_ids[0][:20], "--store", str(tmp_path), "--executor", "local"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: {cell.cell_id}: there is no smaller set to try: cuda_graph.impl=torch_compile takes no scope"
    )
    assert "the eager baseline ended NUMERIC in measure, so graphs are not the cause" in error
    assert [path.name for path in tmp_path.iterdir()] == [ORIGIN], "nothing is planned"


# --- the verb -------------------------------------------------------------------------------------------------------


def test_the_verb_runs_a_side_sweep_and_prints_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records replace the runs, since a CPU captures no graph."""
    _, _, cell = written(tmp_path, SPECS[3], off("mlp"))
    policies = []

    def make(paths: SweepPaths, plan: Plan, target: Any, policy: str, executor: str, *, wait: bool) -> None:
        policies.append((policy, executor, wait))
        write_plan(paths, plan)
        make_runs_anew(paths, plan, off("mlp"))

    monkeypatch.setattr(run_sweep, "carry_out", make)
    monkeypatch.setattr("orchestrator.cli.planning.this_host", lambda: GPUS)
    command = ["bisect", ORIGIN, cell.run_ids[0], "--store", str(tmp_path), "--executor", "local"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "torch.mlp is the smallest set that fails." in out and "torch.attn.mlp" in out
    assert policies == [("unfinished", "local", True)]
    (own,) = (path for path in tmp_path.iterdir() if path.name != ORIGIN)
    assert own.name == f"{ORIGIN}-bisect-{cell.cell_id.split('-')[1]}"
    assert (own / "report" / "report.md").is_file()

    assert main([*command, "--json"]) == 0
    caught = capsys.readouterr()
    assert validated("bisect", caught.out)["smallest"]["label"] == "torch.mlp"
    assert len(policies) == 1, "all of it was on disk"
    assert main([*command, "--max-gpu-hours", "0"]) == 0, "nothing is to be run any more"


def test_a_budget_is_held_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, cell = written(tmp_path, SPECS[3], off("mlp"))
    monkeypatch.setattr("orchestrator.cli.planning.this_host", lambda: GPUS)
    command = [
        "bisect",
        ORIGIN,
        cell.run_ids[0],
        "--store",
        str(tmp_path),
        "--executor",
        "local",
        "--max-gpu-hours",
        "0",
    ]
    assert main(command) == 1
    assert "--max-gpu-hours: 0: this plan may take 3.50 GPU hours" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [ORIGIN]


def make_runs_anew(sweep: SweepPaths, plan: Plan, edit: Edit) -> None:
    """Make runs whose specs are already on disk."""
    for cell in plan.cells:
        for repeat in range(len(cell.run_ids)):
            record = attempt_record(spec_from_json(cell.spec_of(repeat)))
            edit(record)
            write_attempt(sweep, record)
