"""Test the ends of parameters: a parameter that ends farther from eager runs than these drift apart is named, and rounding is no
fault."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from analysis.pairing.eager_baseline import MissingRun
from analysis.pairing.parameter_ends import compare_ends
from analysis.report.write_report import write_report
from analysis.sweep.judge_sweep import judge_sweep
from launch.contract.records.sketch import SUMS, ChangedTensor, Sketch
from launch.train.telemetry.parameter_digest import changes_since, sketch_tensors
from tests.records import AttemptRecord, write_sweep

NAMES = ("embedding", "query.weight", "query.bias", "key.bias", "norm.weight", "norm.bias", "expert.weight", "head")
MISSING = MissingRun("eager-1-perturbed", "resume the sweep")


def run(seed: int, drift: float, *, wrong: str | tuple[str, ...] = (), by: float = 1.0, since: float = 1.0) -> Any:
    """Return a run whose parameters differ from those of other runs by the share ``drift`` of their change.

    The gradient of the key's bias is only rounding, so its whole change is. ``wrong`` parameters are off by the share ``by``.
    """
    random, shared = np.random.default_rng((seed, 1)), np.random.default_rng(0)
    ends = {}
    for name in NAMES:
        own = 1.0 if name == "key.bias" and drift else drift
        end, fault = (shared.normal(size=SUMS) / SUMS**0.5 for _ in range(2))
        end = 10 * end + own * random.normal(size=SUMS) / SUMS**0.5 + by * fault * (name in wrong)
        ends[0, name] = ChangedTensor(Sketch(name, 10.0, tuple(end.tolist())), since)
    return SimpleNamespace(parameter_ends=ends)


def judge(eager: list[Any], graphed: Any, perturbed: Any = None, missing: MissingRun | None = None) -> Any:
    return compare_ends(graphed, eager, perturbed, missing).doubt()


@pytest.mark.parametrize(("drift", "by"), [(1e-6, 0.1), (1e-6, 1.0), (0.01, 0.5)])
@pytest.mark.parametrize("wrong", ["query.bias", "norm.bias"])
def test_a_parameter_that_ends_elsewhere_is_named(drift: float, by: float, wrong: str) -> None:
    found = judge([run(1, drift), run(2, drift)], run(3, drift, wrong=(wrong,), by=by))
    assert found and found.verdict == "INCONCLUSIVE" and not found.needed_run
    assert f"{wrong} on rank 0 by {by:.2g}"[:-1] in found.reason and "key.bias" not in found.reason, found.reason


@pytest.mark.parametrize("graphed", [1e-6, 1e-4, 0.01, 0.2])
@pytest.mark.parametrize("eager", [1e-6, 0.01, 0.2])
def test_rounding_is_no_fault_even_if_it_takes_all_parameters_farther_than_noise_does(
    eager: float, graphed: float
) -> None:
    found = [judge([run(3 * n, eager), run(3 * n + 1, eager)], run(3 * n + 2, graphed)) for n in range(300)]
    assert not any(found), next(filter(None, found)).reason


def test_a_fault_in_several_parameters_does_not_hide_itself() -> None:
    """A parameter group of biases and norms is half of the model."""
    wrong = ("query.bias", "norm.weight", "norm.bias")
    found = judge([run(1, 1e-4), run(2, 1e-4)], run(3, 1e-4, wrong=wrong))
    assert all(name in found.reason for name in wrong)


@pytest.mark.parametrize(("drift", "by"), [(1e-6, 0.5), (0.01, 0.5), (0.05, 0.9)])
def test_a_fault_in_all_parameters_does_not_hide_itself(drift: float, by: float) -> None:
    """At a low learning rate no curve shows that a replay leaves out every other update."""
    found = judge([run(1, drift), run(2, drift)], run(3, drift, wrong=NAMES, by=by))
    assert found and found.verdict == "INCONCLUSIVE" and "and 4 more" in found.reason, found


def test_a_perturbed_run_shows_a_smaller_fault_in_all_parameters() -> None:
    """It rounds in each module, as other kernels do. Such a fault is one lost update in ten."""
    eager, graphed = [run(1, 0.0), run(1, 0.0)], run(3, 1e-6, wrong=NAMES, by=0.1)
    assert judge(eager, graphed, missing=MISSING).needed_run
    assert judge(eager, graphed, run(4, 1e-3)) and judge(eager, graphed, run(4, 0.1)) is None
    assert judge([run(1, 1e-3), run(2, 1e-3)], graphed) is None


def rounded_run(seed: int, drift: float, *, moved: float = 0.004, frozen: int = 0, elements: int = 32) -> Any:
    """Return a run with bf16 parameters of few ``elements``. By default, most move by less than a unit in the last place.

    The first ``frozen`` elements of the first parameter get no update.
    """
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    begun, ended = {}, {}
    for place in range(20):
        begin, update = 1 + 3 * torch.rand(elements, generator=shared), moved * torch.randn(elements, generator=shared)
        update *= 1 + drift * torch.randn(elements, generator=own)
        if place == 0:
            update[:frozen] = 0.0
        begun[str(place)], ended[str(place)] = begin.bfloat16(), (begin + update).bfloat16()
    changes = changes_since(sketch_tensors(begun.items()), sketch_tensors(ended.items()))
    return SimpleNamespace(parameter_ends={(0, one.last.name): one for one in changes})


@pytest.mark.parametrize("elements", [1, 4, 32])
def test_a_bf16_element_that_is_rounded_the_other_way_is_no_fault(elements: int) -> None:
    eager = [rounded_run(seed, 0.02, elements=elements) for seed in range(3)]
    doubts = [judge(eager, rounded_run(seed, 0.02, elements=elements)) for seed in range(10, 60)]
    assert not any(doubts), next(filter(None, doubts)).reason


@pytest.mark.parametrize(("frozen", "moved", "drift"), [(32, 0.004, 0.02), (1, 0.2, 0.001), (4, 0.2, 0.001)])
def test_bf16_elements_that_get_no_update_are_no_rounding(frozen: int, moved: float, drift: float) -> None:
    eager = [rounded_run(seed, drift, moved=moved) for seed in range(3)]
    found = judge(eager, rounded_run(99, drift, moved=moved, frozen=frozen))
    assert found and found.reason.startswith("parameters end far from those of eager runs: 0 on rank 0"), found


def test_routing_of_other_tokens_to_experts_is_no_fault() -> None:
    eager = [run(1, 1e-4), run(2, 1e-4)]
    assert judge(eager, run(3, 1e-4, wrong=("expert.weight",), by=0.25)) is None
    assert judge(eager, run(3, 1e-4, wrong=("expert.weight",), by=2.0))


def test_equal_eager_runs_wait_for_the_perturbed_run_and_decide_nothing_without_one() -> None:
    eager, graphed = [run(1, 0.0), run(2, 0.0)], run(3, 1e-5, wrong=("query.bias",))
    found = judge(eager, graphed, missing=MISSING)
    assert found.needed_run == MISSING.run_id and found.fix == MISSING.fix and "query.bias" in found.reason
    assert judge(eager, graphed) is None
    assert "query.bias on rank 0 by " in compare_ends(graphed, eager, None, None).unjudged
    known = judge(eager, graphed, run(4, 1e-5), MISSING)
    assert known and not known.needed_run and "query.bias" in known.reason and "key.bias" not in known.reason
    # The key's bias alone waits too, and the perturbed run explains it.
    assert judge(eager, run(3, 1e-5), missing=MISSING).needed_run
    assert judge(eager, run(3, 1e-5), run(4, 1e-5), MISSING) is None
    # A perturbed run that changes nothing shows no drift.
    assert judge(eager, graphed, run(1, 0.0)) is None and compare_ends(graphed, eager, run(1, 0.0), None).unjudged


def test_what_is_not_recorded_everywhere_is_not_compared() -> None:
    one, two, graphed = (run(seed, 1e-4, wrong=("query.bias",) * (seed == 3)) for seed in (1, 2, 3))
    assert judge([one], graphed) is None
    del two.parameter_ends[0, "query.bias"]
    assert judge([one, two], graphed) is None
    two.parameter_ends.clear()
    assert judge([one, two], graphed) is None
    assert judge([one, run(4, 1e-4)], SimpleNamespace(parameter_ends={})) is None
    assert judge([run(1, 0.0, since=0.0)] * 2, run(3, 0.1, since=0.0)) is None


def sketch(record: AttemptRecord, eager: float, wrong: tuple[str, ...]) -> None:
    """Let the curves of ``record`` differ by rounding, and record ends. ``eager`` is the drift of eager runs."""
    draw = random.Random(10 * record.spec.repeat + record.spec.graphed)
    noisy = record.spec.graphed or record.spec.perturbed or eager
    for line in record.metrics[4:]:
        line["loss"] += draw.gauss(0, 1e-6) if noisy else 0.0
    seed = 2 * record.spec.repeat + record.spec.graphed
    drift = 1e-5 if record.spec.graphed or record.spec.perturbed else eager
    ends = run(seed, drift, wrong=wrong if record.spec.graphed else ()).parameter_ends
    last = [event for event in record.events[0] if event["kind"] == "parameters"][-1]
    last |= {"digest": str(seed if drift else 0), "sketches": [dataclasses.asdict(one) for one in ends.values()]}


@pytest.mark.parametrize(
    ("eager", "wrong", "perturbed", "verdict", "needed"),
    [
        (1e-5, (), False, "EQUIVALENT", False),
        (1e-5, ("query.bias",), False, "INCONCLUSIVE", False),
        (0.0, ("query.bias",), None, "INCONCLUSIVE", True),
        (0.0, ("query.bias",), True, "INCONCLUSIVE", False),
        (0.0, (), True, "EQUIVALENT", False),
        (0.0, ("query.bias",), False, "EQUIVALENT", False),
    ],
    ids=["rounding", "drift is known", "the perturbed run is missing", "the perturbed run", "rounding and the perturbed run", "no drift"],
)  # fmt: skip
def test_curves_that_agree_do_not_pass_if_a_parameter_ends_elsewhere(
    tmp_path: Path, eager: float, wrong: tuple[str, ...], perturbed: bool | None, verdict: str, needed: bool
) -> None:
    """``perturbed`` says whether there is a perturbed run; None says that it is planned and has not begun."""

    def edit(record: AttemptRecord) -> None:
        sketch(record, eager, wrong)
        record.begun = not (record.spec.perturbed and perturbed is None)

    sweep = write_sweep(tmp_path / "mine", perturbed=perturbed is not False, if_needed=True, edit=edit)
    (found,) = (cell for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found.verdict is not None and found.verdict.verdict == verdict, found.verdict
    assert bool(found.verdict.needed_run) is needed
    assert ("query.bias on rank 0 by " in found.verdict.reason) is (verdict == "INCONCLUSIVE")
    said = write_report(sweep).summary.partition("**Parameters that end far from those of eager runs**: A1 (")[2]
    assert ("query.bias on rank 0 by 0.9" in said) is (bool(wrong) and verdict == "EQUIVALENT"), said


def test_a_perturbed_run_that_lost_its_ends_is_missing(tmp_path: Path) -> None:
    def edit(record: AttemptRecord) -> None:
        sketch(record, 0.0, ("query.bias",))
        for event in record.events[0] if record.spec.perturbed else ():
            event.pop("sketches", None) and event.update(sketches=[])

    sweep = write_sweep(tmp_path, perturbed=True, if_needed=True, edit=edit)
    (found,) = (cell for cell in judge_sweep(sweep).results if cell.cell.graphed)
    assert found.verdict is not None and found.verdict.verdict == "INCONCLUSIVE" and found.verdict.needed_run
    assert "the perturbed run has incomplete records, or other code" in found.verdict.fix


def test_the_report_says_which_parameters_were_not_compared(tmp_path: Path) -> None:
    def edit(record: AttemptRecord) -> None:
        sketch(record, 1e-5, ("query.bias",))
        last = [event for event in record.events[0] if event["kind"] == "parameters"][-1]
        for one in last["sketches"] if record.spec.graphed else ():
            one["last"]["name"] = "graphed." + one["last"]["name"]

    summary = write_report(write_sweep(tmp_path / "mine", edit=edit)).summary
    first = "graphed.embedding on rank 0, graphed.expert.weight on rank 0, graphed.head on rank 0 and 5 more"
    assert f"**Parameters that eager runs do not have by this name**: A1 ({first})." in summary


@pytest.mark.parametrize(
    "damage", [{"last": {"name": "head", "norm": 1.0, "sums": [1.0]}}, {"change": -1.0}, {"last": 3}]
)
def test_a_damaged_sketch_is_a_problem_of_the_run(tmp_path: Path, damage: dict[str, Any]) -> None:
    def edit(record: AttemptRecord) -> None:
        sketch(record, 1e-5, ())
        if record.spec.graphed:
            next(event for event in record.events[0] if event.get("sketches"))["sketches"][0] |= damage

    (found,) = (
        cell for cell in judge_sweep(write_sweep(tmp_path, edit=edit), lambda *_: None).results if cell.cell.graphed
    )
    assert (
        found.verdict
        and found.verdict.verdict == "INCOMPARABLE"
        and "parameters of rank 0 cannot be read" in found.verdict.reason
    )
