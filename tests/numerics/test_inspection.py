"""Test what an inspection finds in real steps on a CPU: shapes that change, and places that draw numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import getsourcelines
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from launch.common.atomic_files import dumps
from launch.common.typed_json import from_json
from launch.contract.records.inspection import Inspection
from launch.contract.records.kernels import BOUNDS_US
from launch.contract.spec import Parallelism, RunSpec
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.train.data_loader import batch, open_source
from launch.train.inspection.capture_blockers import inspect
from launch.train.inspection.dispatch_trace import Operation, first_divergence
from launch.train.inspection.source_line import NOWHERE, Line, current_user_line
from launch.train.telemetry.kernel_times import kernels_of
from launch.train.telemetry.profiler import host_syncs
from tests.distributed import workers
from tests.numerics.tiny import CPU, DENSE, GPT_OSS, MOE, make_spec

HERE = "tests/numerics/test_inspection.py"


def inspected(spec: RunSpec, rank: int = 0, hook: Callable[..., Any] | None = None) -> Inspection:
    """Return the inspection of one rank after two steps."""
    engine = TorchNativeEngine(spec, RankPlace(rank, spec.parallelism.world_size, CPU))
    if hook is not None:
        engine.chunks[0].register_forward_hook(hook)
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    batches = [batch(source, spec, step, spec.parallelism.rank_in("dp", rank)) for step in range(4)]
    for tokens in batches[:2]:
        engine.step(tokens)
    return inspect(engine.step, batches[2:])


def inspected_rank(spec: RunSpec) -> dict[str, Any]:
    return json.loads(dumps(inspected(spec, dist.get_rank())))


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(DENSE),
        make_spec(MOE),
        make_spec(GPT_OSS, recompute="full"),
        make_spec(replace(MOE, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)),
    ],
    ids=["dense", "moe", "recomputed", "padded"],
)
def test_a_step_of_one_rank_changes_no_shape_and_draws_no_number(spec: RunSpec) -> None:
    assert inspected(spec) == Inspection(())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("plain_kernels")
def test_compiled_parts_run_compiled_while_they_are_inspected() -> None:
    from torch._dynamo.utils import counters

    spec = make_spec(MOE, precision="bf16", compile="elementwise")
    inspected(spec)
    compiled = counters["stats"]["unique_graphs"]
    assert inspected(spec) == Inspection(())
    assert counters["stats"]["unique_graphs"] == compiled > 0


LAYOUTS = {
    "alltoall": Parallelism(dp=2, ep=2),
    "allgather": Parallelism(dp=2, ep=2, dispatcher="allgather", distributed_optimizer=True),
    "tp": Parallelism(tp=2, sequence_parallel=True),
    "pp": Parallelism(pp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_dispatcher_that_sizes_what_it_receives_changes_shapes(name: str) -> None:
    spec = replace(make_spec(replace(MOE, vocab_size=32)), parallelism=LAYOUTS[name])
    for found in workers(2).run(inspected_rank, spec):
        findings = from_json(Inspection, found).findings
        if name != "alltoall":
            assert findings == ()
            continue
        assert {finding.kind for finding in findings} == {"shape"}
        lines = [(finding.file.removeprefix("launch/engines/torch_native/"), finding.function) for finding in findings]
        assert lines[:2] == [
            ("parallel/collectives.py", "_all_to_all"),
            ("moe/token_dispatcher.py", "AllToAllDispatcher._received_permutation"),
        ]


def line_of(function: Callable[..., Any], code: str) -> int:
    """Return the line of ``code`` in the source of ``function``."""
    lines, first = getsourcelines(function)
    return first + next(place for place, line in enumerate(lines) if code in line)


def routes_by_content(_module: Any, tokens: tuple[torch.Tensor], _losses: Any) -> None:
    tokens[0][tokens[0] > 3].float().mean()


def branches_on_content(_module: Any, tokens: tuple[torch.Tensor], _losses: Any) -> None:
    for _ in range(int(tokens[0].sum()) % 97):
        torch.zeros(1).add_(1)


def draws(_module: Any, _tokens: Any, _losses: Any) -> None:
    nn.functional.dropout(torch.ones(8), 0.5)


OWN = torch.Generator().manual_seed(0)


def draws_from_its_own(_module: Any, _tokens: Any, _losses: Any) -> None:
    torch.rand(3, generator=OWN)


@pytest.mark.parametrize(
    ("hook", "code", "kind"),
    [
        (routes_by_content, "tokens[0][tokens", "shape"),
        (branches_on_content, "add_(1)", "operators"),
        (draws, "dropout", "default generator"),
        (draws_from_its_own, "OWN", "generator"),
    ],
)
def test_a_line_that_breaks_a_capture_is_named(hook: Callable[..., Any], code: str, kind: str) -> None:
    """Each step counts the line twice, because it has two micro-batches."""
    spec = make_spec(DENSE, micro_batch_size=2)
    findings = {finding.kind: finding for finding in inspected(spec, hook=hook).findings}
    assert kind in findings, findings
    finding = findings[kind]  # type: ignore[index]
    if kind == "operators":  # The tokens decide which of two loops ends first.
        assert finding.file in (
            HERE,
            "launch/engines/torch_native/microbatches.py",
            "launch/engines/torch_native/decoder.py",
        )
        return
    assert (finding.file, finding.function) == (HERE, hook.__qualname__)
    assert finding.line == line_of(hook, code) and code in finding.code
    assert finding.count == 2


def test_an_inspection_changes_nothing_that_is_computed() -> None:
    spec = make_spec(MOE)
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    batches = [batch(source, spec, step, 0) for step in range(3)]
    looked_at, plain = (TorchNativeEngine(spec, RankPlace(0, 1, CPU)) for _ in range(2))
    inspect(looked_at.step, batches)
    for tokens in batches:
        plain.step(tokens)
    assert torch.equal(looked_at.flat_parameters.weights, plain.flat_parameters.weights)


# --- what is told from what was seen --------------------------------------------------------------------------------

SHAPES = st.lists(st.tuples(st.integers(1, 3)), max_size=2).map(tuple)
OPERATIONS = st.lists(
    st.builds(Operation, st.sampled_from(["aten.mm", "aten.add"]), SHAPES, SHAPES, st.just(Line("decoder.py", 3, "f"))),
    max_size=6,
)


@given(OPERATIONS, OPERATIONS)
def test_steps_differ_exactly_where_they_are_not_equal(first: list[Operation], second: list[Operation]) -> None:
    alike = [(one.name, one.gave) for one in first] == [(other.name, other.gave) for other in second]
    assert (first_divergence(first, second) == []) == alike
    assert first_divergence(first, first) == []


def test_causes_are_told_and_not_what_follows_from_them() -> None:
    sizing, using = Line("sizes.py", 1, "sizing"), Line("uses.py", 2, "using")
    steps = [
        [Operation("aten.empty", (), ((rows, 4),), sizing), Operation("aten.mul", ((rows, 4),), ((rows, 4),), using)]
        for rows in (3, 5)
    ]
    (change,) = first_divergence(*steps)
    assert (change.line, change.detail) == (sizing, "aten.empty gave (3, 4), then (5, 4)")
    (hidden,) = first_divergence(*(step[1:] for step in steps))
    assert hidden.line == using, "where compiled code made it, the first that meets it is told"


KERNELS = st.lists(st.tuples(st.sampled_from(["gemm", "add", "softmax"]), st.integers(0, 3_000_000)), max_size=30)


@given(KERNELS, st.integers(1, 3))
def test_kernels_are_parted_by_length_and_added_up_by_name(ran: list[tuple[str, int]], steps: int) -> None:
    kernels = kernels_of(ran, steps)
    assert kernels.number == pytest.approx(len(ran) / steps)
    for bound in BOUNDS_US:
        below = sum(nanoseconds < bound * 1e3 for _, nanoseconds in ran)
        assert kernels.share_below(bound) == pytest.approx(below / len(ran) if ran else 0)
    milliseconds = [one.milliseconds for one in kernels.longest]
    assert milliseconds == sorted(milliseconds, reverse=True)
    assert sum(milliseconds) * steps * 1e6 == pytest.approx(sum(nanoseconds for _, nanoseconds in ran))


def test_waits_are_those_between_launches() -> None:
    """The profiler itself waits before the first launch and after the last."""
    names = ["cudaDeviceSynchronize", "cudaLaunchKernel", "cudaStreamSynchronize", "cudaEventQuery", "cuLaunchKernelEx",
             "cudaEventSynchronize", "cudaLaunchKernel", "cudaDeviceSynchronize"]  # fmt: skip
    calls = list(enumerate(names))
    assert host_syncs(reversed(calls)) == 2
    assert host_syncs(calls[:1]) == 0 and host_syncs([]) == 0


def test_a_thread_of_its_own_is_nowhere() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(current_user_line).result() == NOWHERE
    assert current_user_line().file == __file__
