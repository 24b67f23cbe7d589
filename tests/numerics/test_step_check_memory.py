"""Test step checks that lack memory."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from launch.contract.records.memory import requested_bytes
from launch.contract.records.step_check import COMPARISON_BYTES
from launch.contract.spec import CudaGraph, GraphImpl, Parallelism
from launch.train.inspection import check_memory
from tests.distributed import workers
from tests.numerics.checked_step import PIPELINE, ZERO, run_with_checks
from tests.numerics.test_graphed_layers import EXPERTS
from tests.numerics.tiny import CPU, make_spec


@pytest.mark.parametrize(("ranks", "needed"), [(1, 40), (2, 55)])
def test_several_ranks_count_what_the_allocator_lost_between_blocks(ranks: int, needed: int) -> None:
    with (
        mock.patch("torch.cuda.memory_allocated", lambda _: 60),
        mock.patch("torch.cuda.max_memory_allocated", lambda _: 100),
        mock.patch("torch.cuda.max_memory_reserved", lambda _: 115),
    ):
        assert check_memory.eager_step_bytes(torch.device("cuda", 0), ranks) == needed
    assert check_memory.eager_step_bytes(CPU, ranks) == 0


def test_memory_that_is_missing_is_measured() -> None:
    failed = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    needed = COMPARISON_BYTES + 2**30
    with (
        mock.patch.object(torch, "empty", side_effect=failed),
        mock.patch.object(torch.cuda, "mem_get_info", lambda device: (needed - 7, 2**40)),
    ):
        assert check_memory.missing_bytes(2**30, torch.device("cuda", 0)) == 7
    assert check_memory.missing_bytes(2**30, CPU) == 0
    assert requested_bytes(str(failed)) == 20 * 2**20


@pytest.mark.parametrize(
    ("impl", "scope", "layout", "lacking"),
    [
        ("full_iteration", (), ZERO, "rank 1"),
        ("torch", ("attn", "moe_router"), PIPELINE, "rank 1"),
        ("torch", (), Parallelism(), "backward"),
        ("transformer_engine", ("attn",), Parallelism(), "forward"),
    ],
)
def test_a_run_goes_on_without_a_check_that_lacks_memory(
    impl: GraphImpl, scope: tuple[str, ...], layout: Parallelism, lacking: str
) -> None:
    """If one rank lacks memory, all ranks skip the check. The run's numbers are those of a run without checks."""
    spec = make_spec(replace(EXPERTS, num_layers=4), steps=4, global_batch_size=4)
    spec = replace(spec, parallelism=layout, cuda_graph=CudaGraph(impl, scope, 1))
    ranks = workers(layout.world_size)
    plain, checked = ranks.run(run_with_checks, spec), ranks.run(run_with_checks, replace(spec, step_checks=2), lacking)
    for without, with_checks in zip(plain, checked, strict=True):
        assert with_checks["checks"] == [(3, True, 0, 0)], "the second check had its memory"
        assert with_checks["results"] == without["results"] and with_checks["proven"]
        assert torch.equal(with_checks["weights"], without["weights"])
