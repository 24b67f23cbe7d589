"""Test step checks of layer graphs, and of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch.distributed as dist

from launch.contract.spec import CudaGraph, GraphImpl, Parallelism, RunSpec
from launch.engines.torch_native.engine import TorchNativeEngine
from tests.distributed import workers
from tests.numerics.checked_step import (
    FEW,
    FULL,
    MODEL,
    check,
    engine_of,
    faults_of,
    previous_batch,
    spec_of,
    sum_in_halves,
    train_to_first_check,
    weigh_sample,
)
from tests.numerics.graphed_callables_on_cpu import graphs_on_cpu
from tests.numerics.tiny import batches, make_spec

EXHAUSTIVE = pytest.mark.exhaustive

LAYOUTS = {
    "tp": (Parallelism(tp=2, etp=2, sequence_parallel=True), 4),
    "pp": (Parallelism(pp=2), 4),
    "vpp": (Parallelism(pp=2, vpp=2, schedule="interleaved"), 4),
    "dp and ep": (Parallelism(dp=2, ep=2, distributed_optimizer=True), 6),
    "dp": (Parallelism(dp=2), 6),
    "tp and pp": (Parallelism(tp=2, etp=2, pp=2), 4),
}
"""Layouts with the samples of a step. Six are three micro-batches of two ranks."""


@contextmanager
def stale_norm(engine: TorchNativeEngine) -> Iterator[None]:
    """All of a replay reads another copy of a norm's weight, in the first layer of the last chunk."""
    weights = engine.chunks[-1].named_parameters()
    weight = next(weight.data for name, weight in weights if name.endswith("attention_norm.weight"))
    kept = weight.clone()
    weight.mul_(1.5)
    yield
    weight.copy_(kept)


LAYER_SCOPES = ((), ("attn",), ("attn", "moe_router", "moe_preprocess"))
QUICK_OF_SCOPE = ((0, 1), (1, 1), (0, 0))
"""The implementation and the precision of each scope that are quick, by index."""


@pytest.mark.parametrize(
    ("impl", "scope", "precision"),
    [  # Each scope, implementation and precision is quick once or twice.
        pytest.param(impl, scope, precision, marks=[] if (i, k) == QUICK_OF_SCOPE[j] else [EXHAUSTIVE])
        for i, impl in enumerate(("torch", "transformer_engine"))
        for j, scope in enumerate(LAYER_SCOPES)
        for k, precision in enumerate(("fp32", "bf16"))
    ],
)
def test_faults_of_layer_graphs_are_found_and_named(impl: GraphImpl, scope: tuple[str, ...], precision: str) -> None:
    model = replace(MODEL, num_moe_experts=0, moe_router_topk=0, moe_ffn_hidden_size=0) if scope == () else MODEL
    spec = replace(spec_of(CudaGraph(impl, scope, warmup_steps=1), precision), model=model)
    # With some seeds and processors, the noise of one gradient hides everything in bf16.
    spec = replace(spec, training=replace(spec.training, seed=5))
    with graphs_on_cpu():
        captured = train_to_first_check(spec)
        assert check(captured, lambda engine: nullcontext()).unequal == 0
        assert faults_of(check(captured, sum_in_halves)) == []
        assert "gradient of 0.head.weight" in faults_of(check(captured, weigh_sample(0.0)))
        assert any(
            name.startswith("gradient of 0.layers.0.attention.") for name in faults_of(check(captured, stale_norm))
        )


def check_with_fault_on_rank_1(spec: RunSpec) -> tuple[int, list[str]]:
    """Return how many results of a clean check differ, and the faults of one in which rank 1 reads a stale weight."""
    rank = dist.get_rank()
    captured = engine_of(spec, rank), batches(spec, spec.parallelism.rank_in("dp", rank))
    for _ in range(spec.first_compared):
        captured[0].step(next(captured[1]))
    batch = next(captured[1])
    stale = stale_norm if rank == 1 else lambda engine: nullcontext()
    clean = check((captured[0], batch), lambda engine: nullcontext())
    return clean.unequal, faults_of(check((captured[0], batch), stale))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=EXHAUSTIVE)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_checks_of_several_ranks_are_clean_and_find_a_fault_of_one(name: str, precision: str) -> None:
    layout, samples = LAYOUTS[name]
    spec = make_spec(replace(MODEL, num_layers=4), steps=4, global_batch_size=samples, precision=precision)
    spec = replace(spec, parallelism=layout, cuda_graph=FULL, step_checks=1)
    found = workers(layout.world_size).run(check_with_fault_on_rank_1, spec)
    assert [unequal for unequal, _ in found] == [0] * layout.world_size
    assert any(".attention." in fault for fault in found[1][1]), found


def check_with_late_rank(spec: RunSpec) -> list[str]:
    """Let the replay of rank 1 compute a different batch than that of rank 0."""
    late = dist.get_rank() == 1
    return faults_of(
        check(train_to_first_check(spec, dist.get_rank()), previous_batch if late else lambda _: nullcontext())
    )


def test_a_rank_that_is_out_of_step_is_found_on_both() -> None:
    spec = replace(spec_of(FULL, samples=FEW), parallelism=Parallelism(tp=2, etp=2))
    for faults in workers(2).run(check_with_late_rank, spec):
        assert "gradient of 0.head.weight" in faults
