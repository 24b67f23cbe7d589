"""Test the report of a user's program on a GPU: its model and batch are unknown, so no figure may use their defaults."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.report.write_report import write_report
from analysis.sweep.judge_sweep import judge_sweep
from launch.common.atomic_files import write_json
from launch.contract.plan import Margins, read_plan
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.sketch import SUMS
from launch.contract.spec import Command, GraphImpl, RunSpec
from tests import records


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let written sweeps run a user's program."""
    of_engine = records.workload_spec

    def of_program(*arguments: Any) -> RunSpec:
        spec = of_engine(*arguments)
        unknown = dataclasses.replace(spec.training, global_batch_size=0, sequence_length=0)
        return dataclasses.replace(spec, engine="command", command=Command(run="python train.py"), training=unknown)

    monkeypatch.setattr(records, "workload_spec", of_program)


def test_no_figure_rests_on_a_model_or_a_batch_that_nobody_named(tmp_path: Path) -> None:
    sweep = records.write_sweep(tmp_path / "mine", impls=("transformer_engine",), device="cuda")
    write_report(sweep)
    text = (sweep.report / "report.md").read_text()
    assert "train.py" in text and "BITWISE" in text
    assert "tokens/s," not in text and "layers of" not in text and "fp32" not in text.partition("## Provenance")[0]
    assert "TFLOP/s)" not in text


def test_the_words_that_count_as_graph_settings_are_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_program = records.workload_spec

    def with_words(*arguments: Any) -> RunSpec:
        spec = of_program(*arguments)
        command = dataclasses.replace(spec.command, flags=("--scope", "attn"), eager=("--mode", "1"))
        graph = dataclasses.replace(spec.cuda_graph, arguments=("--mode", "2", "--lr", "3e-4") if spec.graphed else ())
        return dataclasses.replace(spec, command=command, cuda_graph=graph)

    monkeypatch.setattr(records, "workload_spec", with_words)
    report = write_report(records.write_sweep(tmp_path / "mine", impls=("command",), steps=20))
    said = "Counted as graph settings: A1 (`--mode`: `1` eager, `2` graphed; `--lr 3e-4` only graphed)."
    assert said in report.summary


@pytest.mark.parametrize("eager_too", [False, True])
def test_a_speed_up_of_graphs_and_of_compiled_code_is_named_as_that_of_both(tmp_path: Path, eager_too: bool) -> None:
    def compile_code(run: records.AttemptRecord) -> None:
        if not run.spec.graphed:
            stats = GraphStats("none", compiled=3 * eager_too)
            run.events[0].append({**run.events[0][-1], "kind": "proof", "graphs": dataclasses.asdict(stats)})
        for event in run.events[0]:
            if event["kind"] == "proof" and run.spec.graphed:
                event["graphs"] = {**event["graphs"], "compiled": 3}

    report = write_report(
        records.write_sweep(tmp_path / "mine", impls=("transformer_engine",), device="cuda", edit=compile_code)
    )
    said = "Compiled (torch.compile) only in graphed runs: A1. Speed-ups are those of both."
    assert (said in report.summary) is not eager_too, report.summary


@pytest.mark.parametrize(
    ("early", "suspected"),
    [
        (lambda spec: spec.graphed, True),
        (lambda spec: spec.graphed and spec.repeat == 1, True),
        (lambda spec: spec.graphed or spec.repeat == 1, False),
        (lambda spec: not spec.graphed, False),
    ],
    ids=["graphed runs", "a graphed run", "an eager run too", "eager runs"],
)
def test_a_program_that_ends_early_only_with_graphs_blames_the_graphs(
    tmp_path: Path, early: Callable[[RunSpec], bool], suspected: bool
) -> None:
    """It may skip steps after a NaN, so that its arguments are not the cause."""
    fix = "if it took all steps that it was asked for, pass it the number in the message"

    def end(run: records.AttemptRecord) -> None:
        if early(run.spec):
            del run.metrics[100:]
            failure: dict[str, Any] = {"outcome": "CONFIG", "failure_class": "ENDED_EARLY", "remedy": fix}
            run.end(phase="measure", message="ProgramError: the program ended after 100 of 120 steps", **failure)

    report = write_report(
        records.write_sweep(tmp_path / "mine", impls=("transformer_engine",), device="cuda", edit=end)
    )
    said, text = "eager runs took all steps: suspect the graphs, not the arguments", report.markdown.read_text()
    assert (said in report.summary) is (f"But {said}" in text) is suspected
    assert (fix in text) is not suspected and ("compare its losses with those of the eager run" in text) is suspected


@pytest.mark.parametrize(("computing_ms", "compiled", "named"), [(7.0, 0, True), (8.5, 0, False), (7.0, 1, False)])
def test_kernels_that_take_less_time_are_no_gain_of_graphs(
    tmp_path: Path, computing_ms: float, compiled: int, named: bool
) -> None:
    def probe(run: records.AttemptRecord) -> None:
        for event in run.events[0]:
            if event["kind"] == "probe" and "probe" in event:
                event["probe"] |= {"kernels": 500.0, "computing_ms": computing_ms if run.spec.graphed else 10.0}
            if event["kind"] == "proof" and run.spec.graphed:
                event["graphs"] = {**event["graphs"], "compiled": compiled}

    report = write_report(
        records.write_sweep(tmp_path / "mine", impls=("transformer_engine",), device="cuda", edit=probe)
    )
    said = f"**Other kernels in graphed runs**: A1 ({computing_ms:.2f} ms a step, 10.00 ms in eager runs)."
    assert (said in report.summary) is named, report.summary


@pytest.mark.parametrize(
    ("eager", "graphed", "named"),
    [
        (3.0, 1.0, "3 a step, 1"),
        (0.67, 0.0, "1 a step, 0"),
        (0.34, 0.0, ""),
        (1.0, 1.0, ""),
        (1.0, 3.0, ""),
        (1.0, None, ""),
    ],
)
def test_waits_of_eager_runs_alone_are_no_gain_of_graphs(
    tmp_path: Path, eager: float, graphed: float | None, named: str
) -> None:
    def probe(run: records.AttemptRecord) -> None:
        waits = graphed if run.spec.graphed else eager
        for event in run.events[0]:
            if event["kind"] == "probe" and "probe" in event:
                event["probe"] |= {"waits": waits} if waits is not None else {}

    report = write_report(
        records.write_sweep(tmp_path / "mine", impls=("transformer_engine",), device="cuda", edit=probe)
    )
    assert ("**More waits for the GPU in eager runs**" in report.summary) is bool(named), report.summary
    assert f"A1 ({named} in graphed runs)." in report.summary or not named


@pytest.mark.parametrize(
    ("impl", "by_graphs", "named"), [("command", 3, True), ("command", 300, False), ("transformer_engine", 3, False)]
)
def test_few_kernels_in_graphs_of_which_nobody_said_what_they_capture_are_named(
    tmp_path: Path, impl: GraphImpl, by_graphs: int, named: bool
) -> None:
    def probe(run: records.AttemptRecord) -> None:
        for event in run.events[0]:
            if event["kind"] == "probe":
                event["launches"] = {"by_graphs": by_graphs, "one_by_one": 412 - by_graphs, "unknown": 0}

    report = write_report(records.write_sweep(tmp_path / "mine", impls=(impl,), device="cuda", edit=probe))
    assert ("**Few kernels in graphs**: A1 (graphs launch 3 of 412 kernels of a step)." in report.summary) is named
    assert f"graphs launch {by_graphs} of 412 kernels of a step" in (tmp_path / "mine/report/report.md").read_text()


@pytest.mark.parametrize("allowed", [(), ("settings.NCCL",), ("settings.NCCL_ALGO",), ("settings", "packages")])
@pytest.mark.parametrize("place", ["settings.NCCL_ALGO", "packages.apex", "code.changes", "torch.cudnn_benchmark"])
def test_a_difference_beside_graph_settings_counts_unless_it_is_allowed_by_name(
    tmp_path: Path, allowed: tuple[str, ...], place: str
) -> None:
    section, _, name = place.partition(".")

    def differ(run: records.AttemptRecord) -> None:
        run.environment.setdefault("program", {})["command"] = f"python train.py {run.spec.cuda_graph.impl}"
        run.environment.setdefault(section, {})[name] = "1" if run.spec.graphed else "2"
        if section == "packages":
            run.environment["digests"]["libraries"] = run.spec.cuda_graph.impl

    sweep = records.write_sweep(tmp_path / "mine", edit=differ)
    plan = read_plan(sweep)
    write_json(sweep.plan, dataclasses.replace(plan, margins=Margins(allow_differences=allowed)))
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None
    if allowed and any(place == one or place.startswith(f"{one}.") for one in allowed):
        assert found.verdict == "BITWISE", found
    else:
        assert found.verdict == "INCOMPARABLE" and f"{place}: 2 (eager), 1 (graphed)" in found.reason, found
        assert f"--allow-difference {place}" in found.fix and "program.command" not in found.reason
        assert found.fix.startswith("run the sweep again" if section == "code" else "make both sides equal")


@pytest.mark.parametrize("numbered", [True, False])
def test_a_run_that_resumed_a_checkpoint_is_named(tmp_path: Path, numbered: bool) -> None:
    """The second run of the bundle resumes what the first one wrote, and so on."""

    def resume(run: records.AttemptRecord) -> None:
        runs_before = 2 * run.spec.repeat + run.spec.graphed
        for line in run.metrics:
            line["loss"] /= 1 + runs_before
        choices = {"first_number": str(110 * runs_before)} if numbered else {}
        run.events[0].append({**run.events[0][0], "kind": "choices", "choices": choices})

    sweep = records.write_sweep(tmp_path / "mine", edit=resume)
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None and "{output}" in found.fix, found
    if numbered:
        assert found.verdict == "INCOMPARABLE" and "numbers its first step 0 (eager) and 110 (graphed)" in found.reason
    else:
        assert found.verdict == "INCONCLUSIVE" and "the runs do not start alike" in found.reason, found


def show_later(losses: list[float]) -> list[float]:
    """Show each loss a step late, when the next replay has replaced it."""
    return [*losses[1:], losses[-1]]


def show_earlier(losses: list[float]) -> list[float]:
    return [losses[0], *losses[:-1]]


def show_last(losses: list[float]) -> list[float]:
    """Show at the end what a graph wrote last."""
    return [losses[-1]] * len(losses)


@pytest.mark.parametrize(
    ("show", "verdict", "reason"),
    [
        (show_later, "INCOMPARABLE", "is eager's of step 5, and so on"),
        (show_earlier, "INCOMPARABLE", "is eager's of step 4, and so on"),
        (show_last, "INCOMPARABLE", "all its losses are 1.696"),
        (sorted, "DIVERGED", "first at step "),
    ],
)
@pytest.mark.parametrize("norms_differ", [False, True])
def test_losses_that_a_program_shows_at_other_steps_are_no_fault_of_graphs(
    tmp_path: Path, show: Callable[[list[float]], list[float]], verdict: str, reason: str, norms_differ: bool
) -> None:
    def log_otherwise(run: records.AttemptRecord) -> None:
        if run.spec.graphed:
            first = run.spec.cuda_graph.capture_step + 1
            shown = show([line["loss"] for line in run.metrics[first:]])
            for line, loss in zip(run.metrics[first:], shown, strict=True):
                line["loss"] = loss
                line["grad_norm"] *= 1 + 0.02 * norms_differ
        elif run.spec.repeat:
            run.metrics[60]["loss"] += 1e-4

    sweep = records.write_sweep(tmp_path / "mine", edit=log_otherwise)
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None and found.verdict == ("DIVERGED" if norms_differ else verdict), found
    assert norms_differ or reason in found.reason, found


@pytest.mark.parametrize(
    ("rates", "allowed", "verdict"),
    [
        (("0.1", "0.2"), (), "INCOMPARABLE"),
        (("0.1", "0.2"), ("lr",), "BITWISE"),
        (("0.1", "0.2"), ("choices.optimizers",), "BITWISE"),
        (("0.1", "0.2"), ("packages",), "INCOMPARABLE"),
        (("0.1", "0.2"), ("max_steps",), "INCOMPARABLE"),
        (("0.1", "0.2"), ("min-lr",), "BITWISE"),
        (("0.1", ""), (), "BITWISE"),
    ],
)
def test_another_learning_rate_is_no_graph_setting(
    tmp_path: Path, rates: tuple[str, str], allowed: tuple[str, ...], verdict: str
) -> None:
    def choose(run: records.AttemptRecord) -> None:
        rate = rates[run.spec.graphed]
        choices = {"loss": "printed"} | ({"optimizers": f"lr {rate}"} if rate else {})
        run.events[0].append({**run.events[0][-1], "kind": "choices", "choices": choices})

    sweep = records.write_sweep(tmp_path / "mine", edit=choose)
    write_json(sweep.plan, dataclasses.replace(read_plan(sweep), margins=Margins(allow_differences=allowed)))
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None and found.verdict == verdict, found
    assert ("choices.optimizers: lr 0.1 (eager), lr 0.2 (graphed)" in found.reason) is (verdict == "INCOMPARABLE")


@pytest.mark.parametrize(
    ("name", "values", "allowed", "verdict"),
    [
        ("optimizer_kinds", ("AdamW", "AdamW fused"), "", "INCOMPARABLE"),
        ("optimizer_kinds", ("AdamW", "AdamW fused"), "lr", "INCOMPARABLE"),
        ("optimizer_kinds", ("AdamW", "AdamW fused"), "optim", "BITWISE"),
        ("optimizer_kinds", ("AdamW", ""), "", "BITWISE"),
        ("parameters", ("torch.float32", "torch.bfloat16"), "", "INCOMPARABLE"),
        ("torch_at_end", ("cudnn_benchmark True", ""), "", "INCOMPARABLE"),
        ("mixed_precision", ("none", "autocast cuda bfloat16"), "", "INCOMPARABLE"),
        ("mixed_precision", ("none", "autocast cuda bfloat16"), "bf16", "BITWISE"),
        ("data_loaders", ("num_workers 0", "num_workers 4"), "", "INCOMPARABLE"),
        ("clipping", ("max_norm 1", "max_norm 0.3"), "", "INCOMPARABLE"),
        ("clipping", ("max_norm 1", "max_norm 0.3"), "clip-grad", "BITWISE"),
        ("recomputation", ("checkpoints", "none"), "", "INCOMPARABLE"),
        ("recomputation", ("checkpoints", ""), "", "BITWISE"),
        ("schedulers", ("StepLR (step_size 3)", "none"), "", "INCOMPARABLE"),
        ("schedulers", ("StepLR (step_size 3)", "none"), "lr-warmup-steps", "BITWISE"),
        ("schedulers", ("StepLR (step_size 3)", ""), "", "BITWISE"),
        ("samplers", ("RandomSampler", "SequentialSampler"), "", "BITWISE"),
        ("batches", ("a b", "d e"), "", "BITWISE"),
        ("backward_passes", ("1", "4"), "", "INCOMPARABLE"),
        ("backward_passes", ("1", "4"), "micro-batch-size", "BITWISE"),
        ("backward_passes", ("1", ""), "", "BITWISE"),
        ("modules", ("training", "1 of 1 module in evaluation mode"), "", "INCOMPARABLE"),
        ("data_parallel", ("bucket_bytes_cap 1", "bucket_bytes_cap 2"), "", "INCOMPARABLE"),
        ("weights", ("norm 1", "norm 2"), "", "INCOMPARABLE"),
        ("weights", ("norm 1", "norm 2"), "seed", "BITWISE"),
        ("gradient_sync", ("each backward pass", "without some"), "", "INCOMPARABLE"),
        ("trained", ("10 numbers", "8 numbers"), "", "INCOMPARABLE"),
        ("data_loaders", ("num_workers 0", "num_workers 4"), "num-workers", "BITWISE"),
        ("data_loaders", ("num_workers 0", "num_workers 4"), "choices.data_loaders", "BITWISE"),
    ],
)
def test_what_else_makes_a_step_faster_is_no_graph_setting(
    tmp_path: Path, name: str, values: tuple[str, str], allowed: str, verdict: str
) -> None:
    def choose(run: records.AttemptRecord) -> None:
        value = values[run.spec.graphed]
        choices = {"loss": "printed"} | ({name: value} if value else {})
        run.events[0].append({**run.events[0][-1], "kind": "choices", "choices": choices})

    sweep = records.write_sweep(tmp_path / "mine", edit=choose)
    margins = Margins(allow_differences=(allowed,) if allowed else ())
    write_json(sweep.plan, dataclasses.replace(read_plan(sweep), margins=margins))
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None and found.verdict == verdict, found
    if verdict == "INCOMPARABLE":
        assert f"choices.{name}: {values[0]} (eager), {values[1] or 'unset'} (graphed)" in found.reason
        assert f"--allow-difference choices.{name}" in found.fix


@pytest.mark.parametrize(
    ("eager", "graphed", "samplers", "begun", "allowed", "verdict", "said"),
    [
        ("a b", "d e", "xx", 0.1, "", "INCOMPARABLE", "choices.batches: a b (eager), d e (graphed)"),
        ("a b", "d e", "xy", 0.0, "", "INCOMPARABLE", "choices.samplers: x (eager), y (graphed)"),
        ("a b", "d e", "xx", 0.1, "data-seed", "DIVERGED", "in step 0, data loaders also give the runs other batches"),
        ("a b", "b c", "xx", 0.0, "", "DIVERGED", "in step 0, data loaders also give the runs other batches"),
        ("a b", "a d", "xy", 0.1, "", "DIVERGED", "in step 1, data loaders also give the runs other batches"),
        ("a b", "a none", "xx", 0.1, "", "DIVERGED", ""),
        ("a/e b", "a b", "xy", 0.1, "", "DIVERGED", ""),
        ("a b", "", "xx", 0.1, "", "DIVERGED", ""),
    ],
    ids=[
        "another order", "another sampler", "an allowed order", "fetched ahead", "later", "stale inputs", "an evaluation", "no loader",
    ],
)  # fmt: skip
def test_other_batches_are_no_fault_of_graphs(
    tmp_path: Path, eager: str, graphed: str, samplers: str, begun: float, allowed: str, verdict: str, said: str
) -> None:
    """``begun`` is how far the losses of the first step are apart. Compiled code captures in this step."""

    def load(run: records.AttemptRecord) -> None:
        batches = graphed if run.spec.graphed else eager
        choices = {"batches": batches, "samplers": samplers[run.spec.graphed]} if batches else {}
        run.events[0].append({**run.events[0][-1], "kind": "choices", "choices": choices})
        for step, line in enumerate(run.metrics):
            line["loss"] += 1e-6 * run.spec.repeat
            if run.spec.graphed:
                line["loss"] += 0.5 if step else begun
                line["phase"] = "capture" if step == 0 else "settle" if step < 3 else "measure"

    sweep = records.write_sweep(tmp_path / "mine", edit=load)
    write_json(
        sweep.plan, dataclasses.replace(read_plan(sweep), margins=Margins(allow_differences=(allowed,) * bool(allowed)))
    )
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None and found.verdict == verdict and said in found.reason, found
    assert said or "batches" not in found.reason, found
    assert verdict == "DIVERGED" or "--allow-difference choices.batches" in found.fix


CASES = {
    "digits that show the margin": ("printed", 6, 1e-5, 0.0, "EQUIVALENT", ""),
    "equal digits": ("printed", 6, 0.0, 0.0, "EQUIVALENT", "all printed digits are equal"),
    "equal digits of a logger": ("its logger", 6, 0.0, 0.0, "EQUIVALENT", "all printed digits are equal"),
    "equal bits": ("launch.observe.step", 6, 0.0, 0.0, "BITWISE", ""),
    "all digits": ("printed", 17, 0.0, 0.0, "BITWISE", ""),
    "too few digits": ("printed", 2, 1e-5, 0.0, "INCONCLUSIVE", "recorded in units of 0.01 (eager repeat 0, step "),
    "too few equal digits": (
        "printed",
        2,
        0.0,
        0.0,
        "INCONCLUSIVE",
        "recorded in units of 0.01 (eager repeat 0, step ",
    ),
    "off by less than the digits show": ("printed", 2, 1e-5, 0.01, "INCONCLUSIVE", "recorded in units of 0.01"),
    "far off despite too few digits": ("printed", 2, 1e-5, 0.2, "DIVERGED", "the loss is "),
}


@pytest.mark.parametrize("name", CASES)
def test_rounded_numbers_show_what_their_digits_show(tmp_path: Path, name: str) -> None:
    source, decimals, noise, off, verdict, reason = CASES[name]

    def rounded(run: records.AttemptRecord) -> None:
        draw = random.Random(10 * run.spec.repeat + run.spec.graphed)
        for line in run.metrics:
            graphed = run.spec.graphed and line["phase"] in ("settle", "measure")
            line["loss"] = round(line["loss"] + draw.gauss(0, noise) + off * graphed, decimals)
        choices = {"loss": source, "grad_norm": "computed by the observer"}
        run.events[0].append({**run.events[0][0], "kind": "choices", "choices": choices})

    sweep = records.write_sweep(tmp_path / "mine", edit=rounded)
    (found,) = (cell for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found.verdict is not None and found.verdict.verdict == verdict, found.verdict
    assert reason in found.verdict.reason


@pytest.mark.parametrize(
    ("digits", "verdict"),
    [
        ({}, "INCONCLUSIVE"),
        (dict.fromkeys(("loss", "grad_norm"), 17), "INCONCLUSIVE"),
        ({"loss": 6}, "INCONCLUSIVE"),
        ({"loss": 6, "grad_norm": 6}, "EQUIVALENT"),
    ],
    ids=["exact", "printed with all digits", "the norm is exact", "rounded"],
)
def test_a_fault_that_only_parameters_show_does_not_pass(tmp_path: Path, digits: dict[str, int], verdict: str) -> None:
    """If all numbers are rounded, rounding of other kernels may change parameters alone."""

    def differ(run: records.AttemptRecord) -> None:
        for line in run.metrics:
            line |= {name: round(line[name], decimals) for name, decimals in digits.items()}
        sources = dict.fromkeys(("loss", "grad_norm"), "launch.observe.step") | dict.fromkeys(digits, "printed")
        run.events[0].append({**run.events[0][0], "kind": "choices", "choices": sources})
        for event in run.events[0]:
            if event["kind"] == "parameters" and event["digest"] == "last" and run.spec.graphed:
                event["digest"] = "other"

    sweep = records.write_sweep(tmp_path / "mine", edit=differ)
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None and found.verdict == verdict, found
    assert ("the parameters of rank 0 differ after the last step" in found.reason) == (verdict == "INCONCLUSIVE")


@pytest.mark.parametrize(
    ("eager", "graphed", "verdict", "said"),
    [
        ("a", "a", "BITWISE", ""),
        ("a", "", "DIVERGED", "of rank 0 change after the capture in eager runs, but not in the graphed run"),
        ("a", "b", "INCONCLUSIVE", "buffers, or weights that no optimizer steps, of rank 0 differ after the last step"),
        (
            "abc",
            "c",
            "INCONCLUSIVE",
            "of rank 0 change in 3 tensors or more in eager runs after the capture, but in 1 in",
        ),
        ("#", "b", "BITWISE", ""),
        ("", "", "BITWISE", ""),
        (None, "", "INCONCLUSIVE", "the eager run has no record of buffers"),
    ],
    ids=["equal", "never updated", "other values", "some never updated", "eager runs differ", "none", "unknown"],
)
def test_running_statistics_that_no_curve_shows_count(
    tmp_path: Path, eager: str | None, graphed: str, verdict: str, said: str
) -> None:
    def add(run: records.AttemptRecord) -> None:
        values = graphed if run.spec.graphed else eager
        if values is not None:
            digest = values.replace("#", str(run.spec.repeat))
            changes = {"digest": digest, "tensors": len(values), "counters": {}, "values": [], "unchanged": []}
            event = {"kind": "other_state", "changes": changes}
            run.events[0].append({**run.events[0][-1], **event})

    sweep = records.write_sweep(tmp_path / "mine", edit=add)
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None and found.verdict == verdict and said in found.reason, found


ONE = {"name": "norm.running_mean", "norm": 4.0, "sums": [1.0] * SUMS}
FAR, NEAR = ({**ONE, "sums": [1.0 + off] + [1.0] * (SUMS - 1)} for off in (3.0, 0.01))


@pytest.mark.parametrize(
    ("eager", "graphed", "loss", "verdict", "said"),
    [
        ({}, {}, 1e-5, "EQUIVALENT", ""),
        ({}, {"values": [NEAR]}, 1e-5, "EQUIVALENT", ""),
        ({}, {"values": [FAR]}, 1e-5, "INCONCLUSIVE", "norm.running_mean by 0.75 of it"),
        ({}, {"values": [FAR]}, 0.5, "DIVERGED", "the loss is"),
        ({"values": [NEAR, FAR]}, {"values": [FAR, NEAR]}, 1e-5, "EQUIVALENT", ""),
        ({}, {"counters": {"batches": 13}}, 1e-5, "INCONCLUSIVE", "end with other numbers than in eager runs: batches is 10 there"),
        ({"counters": {}}, {"counters": {"tokens": 13}}, 1e-5, "EQUIVALENT", ""),
        ({}, {"unchanged": ["scale", "still"]}, 1e-5, "INCONCLUSIVE", "but change in eager runs: scale."),
        ({}, {"unchanged": ["scale (no optimizer steps it)", "still"]}, 1e-5, "INCONCLUSIVE", "but change in eager runs: scale (no optimizer steps it)."),
        ({}, {"unchanged": ["other.still"]}, 1e-5, "EQUIVALENT", ""),
        ({}, {"tensors": 1}, 0.5, "DIVERGED", "the loss is"),
    ],
    ids=[
        "equal", "near", "far", "far curves too", "two of one name", "counters", "a counter that depends on routing", "a frozen parameter", "a frozen average", "another name",
        "fewer and far curves",
    ],
)  # fmt: skip
def test_what_no_loss_depends_on_counts_beside_curves_that_differ_by_rounding(
    tmp_path: Path, eager: dict[str, Any], graphed: dict[str, Any], loss: float, verdict: str, said: str
) -> None:
    usual = {"tensors": 2, "counters": {"batches": 10}, "values": [ONE], "unchanged": ["still"]}

    def add(run: records.AttemptRecord) -> None:
        draw = random.Random(10 * run.spec.repeat + run.spec.graphed)
        for line in run.metrics:
            after = run.spec.graphed and line["phase"] in ("settle", "measure")
            line["loss"] += draw.gauss(0, 1e-6) + loss * after
        changes = {**usual, **(graphed if run.spec.graphed else eager), "digest": str(run.spec.repeat)}
        changes["values"] = [{"last": one, "change": 4.0} for one in changes["values"]]
        run.events[0].append({**run.events[0][-1], "kind": "other_state", "changes": changes})

    sweep = records.write_sweep(tmp_path / "mine", edit=add)
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None and found.verdict == verdict and said in found.reason, found
    if "stay as they were" in found.reason:
        assert ("averaged weights" in found.fix) is ("no optimizer steps it" in said), found


def capture_twice(run: records.AttemptRecord) -> None:
    """Let a graphed run capture in steps 3 and 5, and replay the first graph in step 4."""
    for line in run.metrics[3:8] if run.spec.graphed else ():
        line["phase"] = "capture" if line["step"] in (3, 5) else "warmup" if line["step"] == 4 else "settle"


@pytest.mark.parametrize(
    ("off", "repeats", "verdict", "reason"),
    [
        ((), 2, "BITWISE", ""),
        (range(4, 120), 2, "DIVERGED", "first at step 6: the loss is "),
        (
            range(4, 5),
            2,
            "INCONCLUSIVE",
            "the loss differs by 0.01 at step 4, where graphs that were captured earlier may",
        ),
        (
            range(4, 5),
            1,
            "INCONCLUSIVE",
            "the loss differs by 0.01 at step 4, where graphs that were captured earlier may",
        ),
        (range(1, 2), 2, "INCOMPARABLE", "the loss differs by 0.01 at step 1, where both run eagerly"),
    ],
)
def test_a_replay_between_two_captures_is_not_eager(
    tmp_path: Path, off: Sequence[int], repeats: int, verdict: str, reason: str
) -> None:
    def differ(run: records.AttemptRecord) -> None:
        capture_twice(run)
        for step in off if run.spec.graphed else ():
            run.metrics[step]["loss"] += 0.01

    sweep = records.write_sweep(tmp_path / "mine", edit=differ, repeats=repeats)
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None and found.verdict == verdict and reason in found.reason, found


@pytest.mark.parametrize(
    ("clipped", "off", "verdict"), [(40, 0.0, "EQUIVALENT"), (100, 0.0, "INCONCLUSIVE"), (100, 0.2, "DIVERGED")]
)
def test_a_norm_that_a_program_shows_after_clipping_proves_nothing(
    tmp_path: Path, clipped: int, off: float, verdict: str
) -> None:
    def clip(run: records.AttemptRecord) -> None:
        draw = random.Random(10 * run.spec.repeat + run.spec.graphed)
        for line in run.metrics:
            line["loss"] += draw.gauss(0, 1e-5) + off * (run.spec.graphed and line["step"] > 9)
        for line in run.metrics[-clipped:]:
            line["grad_norm"] = 0.3 * (1 + draw.gauss(0, 1e-7))
        choices = {"loss": "launch.observe.step", "grad_norm": "launch.observe.step"}
        run.events[0].append({**run.events[0][0], "kind": "choices", "choices": choices})

    sweep = records.write_sweep(tmp_path / "mine", edit=clip)
    (found,) = (cell.verdict for cell in judge_sweep(sweep, lambda *_: None).results if cell.cell.graphed)
    assert found is not None and found.verdict == verdict, found
    assert ("launch.observe.step, is 0.3 at 100 of 116 steps" in found.reason) is (verdict == "INCONCLUSIVE"), found
