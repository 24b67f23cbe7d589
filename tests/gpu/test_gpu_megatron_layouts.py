"""On several GPUs, test that ranks of Megatron-Core replay what they compute, and train what one rank trains."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launch.contract.spec import CudaGraph, Model, Parallelism, Placement, RunSpec
from launch.support import unsupported
from tests.gpu.megatron_training import (  # noqa: F401 (fixtures)
    DENSE,
    EAGER,
    OVERLAPPED,
    PADDED,
    ROUTED,
    WHOLE,
    check,
    fused,
    no_groups_left,
    spec_of,
    trained,
)
from tests.gpu.test_gpu_eager import MOE

# Megatron-Core and Transformer Engine cause these warnings.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

OF_LAYERS = (CudaGraph("transformer_engine"), CudaGraph("local"), WHOLE)
LAYOUTS: dict[str, tuple[Model, Parallelism, tuple[CudaGraph, ...]]] = {
    "two, ep2": (MOE, Parallelism(ep=2, dp=2), (CudaGraph("transformer_engine", ROUTED),)),
    "two, ep2, padded": (PADDED, Parallelism(ep=2, dp=2), OF_LAYERS),
    "two, tp2 ep2": (
        MOE, Parallelism(tp=2, ep=2, sequence_parallel=True), (CudaGraph("transformer_engine", ROUTED),)
    ),
    "two, tp2 ep2, padded": (PADDED, Parallelism(tp=2, ep=2, sequence_parallel=True), OF_LAYERS),
    "two, tp2": (DENSE, Parallelism(tp=2, sequence_parallel=True), OF_LAYERS),
    "two, dp2, distributed optimizer": (DENSE, Parallelism(dp=2, distributed_optimizer=True), OF_LAYERS),
    "two, dp2, overlapped": (DENSE, Parallelism(dp=2, **OVERLAPPED), OF_LAYERS),
    "two, ep2, overlapped": (
        MOE, Parallelism(ep=2, dp=2, **OVERLAPPED), (CudaGraph("transformer_engine", ROUTED),)
    ),
    "two, ep2, experts' exchange beside": (
        MOE, Parallelism(ep=2, dp=2, overlap_moe_expert_parallel_comm=True),
        (CudaGraph("transformer_engine", ("attn",)), CudaGraph("transformer_engine", ROUTED)),
    ),
    "two, ep2, experts' exchange beside, delayed": (
        MOE, Parallelism(ep=2, dp=2, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True),
        (CudaGraph("transformer_engine", ("moe_router", "moe_preprocess")),),
    ),
    "two, cp2": (DENSE, Parallelism(cp=2), OF_LAYERS),
    "two, cp2 ep2": (MOE, Parallelism(cp=2, ep=2), (CudaGraph("transformer_engine", ROUTED),)),
    "two, tp2 etp2, padded": (PADDED, Parallelism(tp=2, etp=2, sequence_parallel=True), OF_LAYERS),
    "two, tp2 etp2": (
        MOE, Parallelism(tp=2, etp=2, sequence_parallel=True), (CudaGraph("transformer_engine", ROUTED),)
    ),
    "two, pp2": (DENSE, Parallelism(pp=2), OF_LAYERS[:2]),
    "two, pp2, no waits": (DENSE, Parallelism(pp=2, batch_p2p_sync=False), OF_LAYERS),
    "two, pp2, interleaved": (
        replace(DENSE, num_layers=4), Parallelism(pp=2, vpp=2, schedule="interleaved"), OF_LAYERS
    ),
    "four, tp2 pp2 ep2": (
        MOE, Parallelism(tp=2, pp=2, ep=2, sequence_parallel=True), (CudaGraph("transformer_engine", ROUTED),)
    ),
    "four, tp2 pp2 ep2, padded": (PADDED, Parallelism(tp=2, pp=2, ep=2, sequence_parallel=True), OF_LAYERS[:2]),
    "four, tp2 pp2 ep2, interleaved, padded": (
        replace(PADDED, num_layers=4),
        Parallelism(tp=2, pp=2, vpp=2, schedule="interleaved", ep=2, sequence_parallel=True, distributed_optimizer=True),
        OF_LAYERS,
    ),
    "four, ep4": (
        MOE, Parallelism(ep=4, dp=4, distributed_optimizer=True), (CudaGraph("transformer_engine", ROUTED),)
    ),
    "four, ep4, padded": (PADDED, Parallelism(ep=4, dp=4, distributed_optimizer=True), OF_LAYERS),
}  # fmt: skip


def train_rank(rank: int, specs: Sequence[RunSpec], folder: Path) -> None:
    """Run as one rank: save the result of each of ``specs``, in their order. Destroying the process groups is part of
    the test."""
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # launch.train.worker does the same.
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=specs[0].parallelism.world_size
    )
    torch.save([trained(spec, rank) for spec in specs], folder / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_replay_what_they_compute(name: str, tmp_path: Path) -> None:
    model, parallelism, graphs = LAYOUTS[name]
    specs = [spec_of(model, graph, parallelism) for graph in (EAGER, EAGER, *graphs)]
    replayed_by_ranks([spec for spec in specs if is_captured(spec)], tmp_path)


def is_captured(spec: RunSpec) -> bool:
    """Return whether this release can capture ``spec``. tests/numerics/megatron/test_megatron_graphs.py tests that 0.19 cannot capture
    local graphs of a pipeline."""
    return "megatron.local_pipeline" not in {reason.rule for reason in unsupported(spec)}


@pytest.mark.parametrize("name", ["two, pp2", "two, pp2, interleaved", "two, ep2, experts' exchange beside"])
def test_ranks_replay_what_they_compute_fused(name: str, tmp_path: Path) -> None:
    """Each micro-batch has its own graphs here. The first one's products write gradients, and those of the others add
    to them."""
    model, parallelism, graphs = LAYOUTS[name]
    of_layers = [graph for graph in graphs if graph.impl == "transformer_engine"]
    specs = [fused(spec_of(model, graph, parallelism)) for graph in (EAGER, EAGER, *of_layers)]
    assert all(unsupported(spec) == () for spec in specs)
    replayed_by_ranks(specs, tmp_path)


def replayed_by_ranks(specs: Sequence[RunSpec], folder: Path) -> None:
    """Run two eager specs, and graphed specs that must compute the same, on as many GPUs as they have ranks."""
    parallelism = specs[0].parallelism
    needed, found = parallelism.world_size, torch.cuda.device_count()
    assert found >= needed, (
        f"{needed} GPUs are needed, and this host has {found}: deselect with -k 'not two' or 'not four'"
    )
    mp.spawn(train_rank, args=(specs, folder), nprocs=needed)
    for rank in range(needed):
        eager, again, *graphed = torch.load(folder / f"rank{rank}.pt", weights_only=False)
        for spec, result in zip(specs[2:], graphed, strict=True):
            check(result, eager, again, spec.cuda_graph, parallelism.sequence_parallel)


ALIKE: dict[str, tuple[Model, Parallelism]] = {
    "two, dp2, overlapped": (DENSE, Parallelism(dp=2, **OVERLAPPED)),
    "two, ep2, overlapped": (MOE, Parallelism(ep=2, dp=2, **OVERLAPPED)),
    "two, ep2, experts' exchange beside": (MOE, Parallelism(ep=2, dp=2, overlap_moe_expert_parallel_comm=True)),
    "two, ep2, experts' exchange beside, delayed": (
        MOE,
        Parallelism(ep=2, dp=2, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True, **OVERLAPPED),
    ),
    "two, cp2": (DENSE, Parallelism(cp=2)),
    "two, cp2 ep2": (MOE, Parallelism(cp=2, ep=2)),
    "two, tp2 etp2": (MOE, Parallelism(tp=2, etp=2, sequence_parallel=True)),
    "two, pp2, overlapped": (DENSE, Parallelism(pp=2, **OVERLAPPED)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_ranks_train_what_one_trains(name: str, tmp_path: Path) -> None:
    model, parallelism = ALIKE[name]
    needed, found = parallelism.world_size, torch.cuda.device_count()
    assert found >= needed, (
        f"{needed} GPUs are needed, and this host has {found}: deselect with -k 'not two' or 'not four'"
    )
    spec = spec_of(model, EAGER, parallelism)
    assert unsupported(spec) == ()
    mp.spawn(train_rank, args=([spec], tmp_path), nprocs=needed)
    alone = trained(replace(spec, parallelism=Parallelism(), placement=Placement(device="cuda")))
    for rank in range(needed):
        (result,) = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        # As between engines, a wrong factor would have a far larger error.
        torch.testing.assert_close(result.losses, alone.losses, rtol=0, atol=3e-2)
        torch.testing.assert_close(result.norms, alone.norms, rtol=1e-1, atol=0)
