"""Test which attempts each policy begins, and how they are ordered."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.common.atomic_files import dumps
from launch.common.typed_json import from_json
from launch.contract.bundle import BundleOrder, Step
from launch.contract.outcomes import OUTCOMES, Outcome
from launch.contract.paths import IMAGE
from launch.contract.plan import Plan
from orchestrator.errors import InputError
from orchestrator.slurm.job_listing import Job
from orchestrator.submit.attempts_to_begin import MOST_ATTEMPTS, Policy, attempts_to_begin, runs_behind_jobs
from orchestrator.sweeps.close_attempts import MOST_LAUNCHES
from orchestrator.sweeps.run_state import RunState, StateName
from orchestrator.targets.profile import Profile
from orchestrator.targets.slurm_cluster import Target
from tests.planned import BATCH, CLUSTER, COMPILED, CPU_HOST, GPU_HOST, TWO_NODES, cluster, plan

PROPERTY = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])

# State of each run, in a bundle of two repeats: eager 0, compiled 0, eager 1, compiled 1.
#   . planned   + completed as expected   ! ended otherwise   i interrupted   c cancelled   r running   q queued
#   n its node failed   s skipped   C failed by its options   E so, as expected   D cancelled, with an outcome
#   a planned, b ended otherwise, d cancelled with an outcome, and the job of its next attempt ended before that began
STATES: Mapping[str, tuple[StateName, bool, bool]] = {  # name, ended, expected
    ".": ("PLANNED", False, True),
    "+": ("COMPLETED", True, True),
    "!": ("CUDA_OOM", True, False),
    "i": ("INTERRUPTED", False, True),
    "c": ("CANCELLED", False, True),
    "r": ("RUNNING", False, True),
    "q": ("QUEUED", False, True),
    "n": ("NODE_FAIL", True, False),
    "s": ("SKIPPED", False, True),
    "C": ("CONFIG", True, False),
    "D": ("CANCELLED", True, False),
    "E": ("CONFIG", True, True),
}
ORDERS: list[tuple[str, str, str, str]] = [
    # States, and the runs that each policy orders: new, unfinished, failed. x begins, and r runs already.
    ("....", "xxxx", "xxxx", "xxxx"),
    ("++++", "", "", ""),
    ("++..", "  xx", "  xx", "  xx"),
    ("+.++", "xx", "xx", "xx"),  # A graphed run starts together with its eager run.
    (".+++", "xx", "xx", "xx"),  # An eager run starts together with the graphed runs of its repeat.
    ("+!++", "", "", "xx"),
    ("!+++", "", "", "xx"),
    ("+++!", "", "", "  xx"),
    ("!!!!", "", "", "xxxx"),
    ("+i++", "", "xx", "xx"),
    ("i...", "xxxx", "xxxx", "xxxx"),
    ("ii++", "", "xx", "xx"),
    ("++c.", "  xx", "  xx", "  xx"),
    ("cccc", "", "xxxx", "xxxx"),
    ("+!i+", "", "  xx", "xxxx"),
    ("ir++", "", "xr", "xr"),  # A living supervisor begins it while its partner runs. `cancel` finds both in its order.
    ("iq++", "", "xx", "xx"),  # A waiting run stays in the order.
    ("+rq!", "", "", " rxx"),
    ("+n++", "", "xx", "xx"),  # A run that infrastructure ended counts as interrupted.
    ("+n!+", "", "xx", "xxxx"),
    ("+Cs+", "", "", "xxxx"),
    ("+Csi", "", "   x", "xxxx"),
    ("!+si", "", "  xx", "xxxx"),  # The graphed run waits for this eager run, since the other lacked memory.
    ("+Es+", "", "", ""),  # Its failure was expected.
    ("Csss", "", "", "xxxx"),  # The graphed runs were skipped because of their eager baseline.
]


@pytest.mark.parametrize(("states", "new", "unfinished", "failed"), ORDERS)
def test_the_retry_policy(tmp_path: Path, states: str, new: str, unfinished: str, failed: str) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED})
    (bundle,) = found.bundles
    known = {run: state(run, sign) for run, sign in zip(bundle.run_ids, states, strict=True)}
    policies: tuple[Policy, ...] = ("new", "unfinished", "failed")
    for policy, expected in zip(policies, (new, unfinished, failed), strict=True):
        made = attempts_to_begin(found, known, CPU_HOST, policy)
        signs = zip(bundle.run_ids, expected.ljust(4), strict=True)
        wanted = [(run, known[run].next_attempt - (sign == "r")) for run, sign in signs if sign != " "]
        assert [attempt for order in made for attempt in order.schedule] == wanted, policy


@pytest.mark.parametrize(
    ("signs", "policies", "expected"),
    [
        ("!+sins", ("unfinished",), "  xxxx"),  # Each later graphed run waits for another eager run than the first.
        ("!+si!s", ("unfinished",), "  xxxx"),  # The last one may be compared with another attempt of its eager run.
        ("!+s.!s", ("new",), "  xxxx"),
        ("!+s!is", ("unfinished",), "    x"),  # Two eager runs lacked memory, and neither of them begins again.
        ("iCs++s", ("unfinished",), "xx"),  # The graphed run begins again for its eager run's sake. It will fail again.
        ("iCs++s", ("failed",), "xxxxxx"),
        ("++n+..", ("new", "infrastructure"), "  xxxx"),
        ("+b++++", ("unfinished",), "xx"),  # Somebody has asked for another attempt, which has not begun.
        ("+b++++", ("new",), ""),
    ],
)
def test_what_may_begin_once_another_run_has_succeeded_is_ordered_with_it(
    tmp_path: Path, signs: str, policies: tuple[Policy, ...], expected: str
) -> None:
    found = plan(tmp_path, repeats=3, sweep={"grid": COMPILED})
    (bundle,) = found.bundles
    known = {run: state(run, sign) for run, sign in zip(bundle.run_ids, signs, strict=True)}
    made = attempts_to_begin(found, known, CPU_HOST, *policies)
    wanted = [run for run, sign in zip(bundle.run_ids, expected.ljust(6), strict=True) if sign == "x"]
    assert [run for order in made for run, _ in order.schedule] == wanted


def state(run: str, sign: str, attempt: int = 3) -> RunState:
    if sign in "bd":
        ended = state(run, "!" if sign == "b" else "D", attempt)
        return dataclasses.replace(ended, job=Job("7", "x", "NODE_FAIL"), abandoned=True, launches=1)
    if sign == "a":
        return RunState(run, "PLANNED", attempt, job=Job("7", "x", "NODE_FAIL"), abandoned=True, launches=1)
    name, ended, expected = STATES[sign]
    kind = {"failure_class": "OPTIONS", "repeats_alike": True} if name == "CONFIG" else {}
    outcome = Outcome(cast(Any, name), "measure", "a", 0.0, 1.0, **kind) if ended else None
    return RunState(run, name, attempt, sign in "rq", outcome, expected)


def test_a_bundle_whose_job_lives_is_left_to_it(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED})
    runs = found.bundles[0].run_ids
    known = {run: state(run, sign) for run, sign in zip(runs, "ir++", strict=True)}
    assert attempts_to_begin(found, known, CLUSTER, "unfinished") == ()
    known[runs[1]] = dataclasses.replace(known[runs[1]], job=Job("7", "x", "RUNNING"))
    assert attempts_to_begin(found, known, CPU_HOST, "unfinished") == ()


@pytest.mark.parametrize(
    ("signs", "unfinished", "failed", "later"),
    [
        ("!r++", "", "x", "xx"),
        ("+!q+", "", " x", "xx"),
        ("+Csr", "", " x", "xxxx"),  # The skipped run may succeed then.
        ("i!+r", "x", "xx", "xx"),
        ("++qr", "", "", ""),
        ("!!++", "", "", ""),  # Nothing runs, so they begin at once.
    ],
)
def test_what_waits_for_the_end_of_a_job_is_ordered_after_it(
    tmp_path: Path, signs: str, unfinished: str, failed: str, later: str
) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED})
    (bundle,) = found.bundles
    known = {run: state(run, sign) for run, sign in zip(bundle.run_ids, signs, strict=True)}
    waiting: set[str] = set()
    policies: tuple[Policy, ...] = ("unfinished", "failed")
    for policy, expected in zip(policies, (unfinished, failed), strict=True):
        waiting = {*runs_behind_jobs(found, known, CLUSTER, policy)}
        assert waiting == {run for run, sign in zip(bundle.run_ids, expected, strict=False) if sign == "x"}, policy
        if "r" in signs or "q" in signs:
            assert attempts_to_begin(found, known, CLUSTER, policy, asked=waiting) == ()
    ended = {run: known[run] if sign not in "rq" else state(run, "+") for run, sign in zip(known, signs, strict=True)}
    made = attempts_to_begin(found, ended, CLUSTER, "infrastructure", asked=waiting)
    wanted = [run for run, sign in zip(bundle.run_ids, later, strict=False) if sign == "x"]
    assert [run for order in made for run, _ in order.schedule] == wanted


UNASKED: list[tuple[str, str]] = [
    # States, and the runs that a watching command retries by itself (x).
    ("....", ""),  # Nobody has asked for these runs yet.
    ("aaaa", "xxxx"),
    ("++aa", "  xx"),
    ("+n++", "xx"),  # Its eager run starts too.
    ("n+++", "xx"),
    ("n!++", "x"),  # A failure of the run itself is a result. It is not retried, not even as a partner.
    ("!n++", " x"),
    ("+!!+", ""),
    ("+nc.", "xx"),
    ("ci++", ""),
    ("+ann", "xxxx"),
    ("rnaa", ""),
    ("+b..", "xx"),  # Somebody has asked to try this failed run again.
    ("b+..", "xx"),
    ("++dd", "  xx"),  # They were cancelled, and resumed.
]


@pytest.mark.parametrize(("signs", "expected"), UNASKED)
def test_only_what_the_infrastructure_ended_is_made_again_unasked(tmp_path: Path, signs: str, expected: str) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED})
    runs = found.bundles[0].run_ids
    known = {run: state(run, sign, attempt=2) for run, sign in zip(runs, signs, strict=True)}
    made = attempts_to_begin(found, known, CLUSTER, "infrastructure")
    wanted = [run for run, sign in zip(runs, expected.ljust(4), strict=True) if sign == "x"]
    assert [pair for order in made for pair in order.schedule] == [(run, known[run].next_attempt) for run in wanted]


def test_unasked_a_run_is_made_and_submitted_so_often_and_no_more(tmp_path: Path) -> None:
    found = plan(tmp_path)
    (run, other) = found.bundles[0].run_ids

    def made_again(**fields: Any) -> bool:
        known = {run: dataclasses.replace(state(run, "n", 2), **fields), other: state(other, "+")}
        return bool(attempts_to_begin(found, known, CLUSTER, "infrastructure"))

    assert made_again(next_attempt=MOST_ATTEMPTS)
    assert not made_again(next_attempt=MOST_ATTEMPTS + 1)
    assert made_again(abandoned=True, launches=MOST_LAUNCHES - 1)
    assert not made_again(abandoned=True, launches=MOST_LAUNCHES)
    assert not made_again(expected=True)
    assert not made_again(outcome=Outcome("ENVIRONMENT", "init", "", 0.0, 1.0, failure_class="LAUNCH")), "given up"


@PROPERTY
@given(signs=st.text(st.sampled_from(".+!icna"), min_size=6, max_size=6), data=st.data())
def test_retries_unasked_come_to_an_end_whatever_fails(tmp_path: Path, signs: str, data: st.DataObject) -> None:
    found = plan(tmp_path, repeats=3, sweep={"grid": COMPILED})
    runs = found.bundles[0].run_ids
    known = {run: state(run, sign, attempt=2) for run, sign in zip(runs, signs, strict=True)}
    results = {run for run, sign in zip(runs, signs, strict=True) if sign == "!"}
    for _ in range(2 * MOST_ATTEMPTS * MOST_LAUNCHES * len(runs)):
        made = attempts_to_begin(found, known, CLUSTER, "infrastructure")
        if not made:
            return
        assert results.isdisjoint(run for run, _ in made[0].schedule)
        for run, number in made[0].schedule:
            ending = data.draw(st.sampled_from("nna!+"))
            if ending == "a":
                known[run] = dataclasses.replace(known[run], abandoned=True, launches=known[run].launches + 1)
            else:
                known[run] = state(run, ending, number + 1)
            results |= {run} if ending == "!" else set()
    raise AssertionError(f"not over: {known}")


def test_a_perturbed_run_is_retried_without_partners(tmp_path: Path) -> None:
    found = plan(tmp_path, perturbed=True, sweep={"grid": COMPILED})
    runs = found.bundles[0].run_ids
    known = {run: state(run, "n" if run == runs[-1] else "+") for run in runs}
    (order,) = attempts_to_begin(found, known, CLUSTER, "infrastructure")
    assert [run for run, _ in order.schedule] == [runs[-1]]


def test_a_run_that_no_verdict_has_needed_yet_begins_with_no_policy(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED})
    ((perturbed,),) = (bundle.run_ids for bundle in found.bundles_if_needed)
    known = {run: state(run, "+") for run in found.bundles[0].run_ids}
    for policy in get_args(Policy):
        assert not attempts_to_begin(found, known, CLUSTER, policy)
    for sign, policy in ((".", "new"), ("n", "infrastructure"), ("i", "unfinished")):
        (order,) = attempts_to_begin(found, known | {perturbed: state(perturbed, sign)}, CLUSTER, policy)
        assert order.schedule == ((perturbed, 3),) and order.limits == found.cells[0].limits


def test_a_retried_graphed_run_takes_its_eager_twin_and_no_other_graphed_run(tmp_path: Path) -> None:
    """The workload has three cells, in an order that only the bundle states."""
    found = plan(tmp_path, sweep={"grid": COMPILED})
    eager, compiled = found.cells
    eager = dataclasses.replace(eager, run_ids=eager.repeat_ids, perturbed=False)
    third = dataclasses.replace(compiled, cell_id="third", label="third", run_ids=("third-r0", "third-r1"))
    runs = tuple(run for repeat in zip(eager.run_ids, compiled.run_ids, third.run_ids, strict=True) for run in repeat)
    bundle = dataclasses.replace(found.bundles[0], run_ids=runs)
    wide = dataclasses.replace(found, cells=(eager, compiled, third), bundles=(bundle,))

    def attempted(signs: str) -> list[str]:
        known = {run: state(run, sign) for run, sign in zip(runs, signs, strict=True)}
        return [run for order in attempts_to_begin(wide, known, CPU_HOST, "failed") for run, _ in order.schedule]

    assert attempted("++++!+") == [runs[3], runs[4]]
    assert attempted("!+++++") == list(runs[:3])
    assert attempted("++!+!+") == [runs[0], runs[2], runs[3], runs[4]]


@pytest.mark.parametrize("outcome", [name for name in OUTCOMES if name != "CANCELLED"])
def test_an_outcome_that_is_expected_is_not_retried(tmp_path: Path, outcome: Any) -> None:
    found = plan(tmp_path)
    known = {
        run: RunState(run, outcome, 2, False, Outcome(outcome, "measure", "a", 0.0, 1.0), expected=True)
        for run in found.bundles[0].run_ids
    }
    assert attempts_to_begin(found, known, CPU_HOST, "failed") == ()


def test_bundles_are_ordered_apart(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": {**COMPILED, "parallelism.dp": [1, 2]}})
    first, second = found.bundles
    known = {run: state(run, "r" if run in first.run_ids else ".") for run in (*first.run_ids, *second.run_ids)}
    (order,) = attempts_to_begin(found, known, CPU_HOST, "new")
    assert order.bundle_id == second.bundle_id
    assert order.workload_id == second.workload_id


def test_an_order_takes_the_slots_and_limits_of_its_cells(tmp_path: Path) -> None:
    resources = {"minutes_per_run": 2, "hang_minutes": 1}
    (cpu,) = planned_orders(plan(tmp_path, parallelism={"dp": 2}, resources=resources), CPU_HOST)
    assert (cpu.slots, cpu.slot_names) == (1, ("cpu",))
    assert (cpu.limits.run_seconds, cpu.limits.hang_seconds) == (120.0, 60.0)
    gpu = plan(tmp_path, host=GPU_HOST, parallelism={"dp": 2}, training={"precision": "bf16"})
    (order,) = planned_orders(gpu, GPU_HOST)
    assert (order.slots, order.slot_names) == (2, ("0", "1"))


def test_an_order_for_a_cluster_says_how_ranks_start(tmp_path: Path) -> None:
    profile = Profile(
        "site", mpi="pmix", cpus_per_task=2, environment={"NCCL_X": "1"}, srun=("--cpu-bind=none",),
        container_image="img", container_mounts=("/data:/data:ro",),
    )  # fmt: skip
    target = dataclasses.replace(CLUSTER, profile=profile, folders=("/code", "/store"))
    (order,) = planned_orders(plan(tmp_path, host=target, **TWO_NODES), target)
    assert (order.slots, order.slot_names, order.environment) == (0, (), {IMAGE: "img", "NCCL_X": "1"})
    mounts = "--container-mounts=/code:/code,/store:/store,/data:/data:ro"
    arguments = ("--mpi=pmix", "--container-image=img", mounts, "--cpu-bind=none")
    assert order.step == Step(2, 8, 2, "python3", arguments)
    assert from_json(BundleOrder, json.loads(dumps(order))) == order
    (plain,) = planned_orders(plan(tmp_path, host=CLUSTER), CLUSTER)
    assert plain.step == Step(1, 1, 1, sys.executable, ("--mpi=none",))


def test_what_was_planned_is_not_ordered_of_a_cluster_that_cannot_hold_it(tmp_path: Path) -> None:
    found = plan(tmp_path, host=CLUSTER)
    drained, brief = dataclasses.replace(BATCH, state="DRAIN"), dataclasses.replace(BATCH, max_minutes=30.0)
    with pytest.raises(InputError, match="partition batch is DRAIN"):
        planned_orders(found, cluster(drained))
    with pytest.raises(InputError, match="an allocation of 72 minutes, and partition batch allows at most 30"):
        planned_orders(found, cluster(brief))


def planned_orders(found: Plan, host: Target) -> tuple[Any, ...]:
    return attempts_to_begin(found, {run: state(run, ".", 1) for run in found.cell_of_run()}, host, "new")


def test_with_auto_repeats_verdicts_are_judged_before_each_further_block(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED}, repeats="auto")
    (bundle,) = found.bundles
    runs, cells = bundle.run_ids, found.cell_of_run()
    assert len(runs) == 12 and found.looks == (2, 4, 6)
    known = {run: state(run, ".") for run in runs}
    (order,) = attempts_to_begin(found, known, CPU_HOST, "new")
    assert order.looks == (runs[4], runs[8]), "after two repeats of two cells, and after four"
    known |= {run: state(run, "+") for run in runs[:6]}
    (order,) = attempts_to_begin(found, known, CPU_HOST, "new")
    assert order.looks == (runs[6], runs[8]), "of a block that has begun, where the rest of it begins"
    known |= {run: RunState(run, "NOT_NEEDED", 1) for run in runs[6:]}
    for policy in get_args(Policy):
        assert attempts_to_begin(found, known, CPU_HOST, policy) == ()
    known[runs[1]] = state(runs[1], "!")
    assert attempts_to_begin(found, known, CPU_HOST, "unfinished") == ()
    (order,) = attempts_to_begin(found, known, CPU_HOST, "failed")
    assert [run for run, _ in order.schedule] == [*runs[:2], *runs[6:]], "what the failure settled is open again"
    known[runs[1]] = state(runs[1], "+")
    fixed = plan(tmp_path, sweep={"grid": COMPILED}, repeats=6)
    assert fixed.bundles[0].run_ids == runs and fixed.bundles[0].bundle_id != bundle.bundle_id and not fixed.looks
    (order,) = attempts_to_begin(fixed, known | {run: state(run, ".") for run in runs[6:]}, CPU_HOST, "new")
    assert order.looks == () and [run for run, _ in order.schedule] == list(runs[6:])
    assert all(cells[run].cell_id == fixed.cell_of_run()[run].cell_id for run in runs)


def test_a_perturbed_run_that_the_recipe_asks_for_comes_before_the_first_look(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED}, repeats="auto", perturbed=True)
    (bundle,) = found.bundles
    assert bundle.run_ids.index(found.cells[0].run_ids[-1]) == 4
    known = {run: state(run, ".") for run in bundle.run_ids}
    (order,) = attempts_to_begin(found, known, CPU_HOST, "new")
    assert order.looks == (bundle.run_ids[5], bundle.run_ids[9])


def test_cells_that_were_skipped_for_a_command_of_another_bundle_are_tried_again_with_it(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": {"training.micro_batch_size": [1, 2]}})
    first, second = found.cells
    found = dataclasses.replace(found, cells=(first, dataclasses.replace(second, same_command=first.cell_id)))
    known = {run: state(run, sign) for run, sign in zip((*first.run_ids, *second.run_ids), "Csss", strict=True)}
    assert attempts_to_begin(found, known, CPU_HOST, "unfinished") == ()
    orders = attempts_to_begin(found, known, CPU_HOST, "failed")
    assert [dict(order.schedule).keys() for order in orders] == [{*first.run_ids}, {*second.run_ids}]
    assert [order.awaited for order in orders] == [{}, {first.run_ids[0]: 3}], "its earlier attempt is no precedent"
    assert orders[1].precedents[second.cell_id].same_command == (first.cell_id,)
