"""On two and on four GPUs, over NCCL, test that graphs compute the same bits as the same ranks do uncaptured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launch.contract.records.probe import PROBED_STEPS
from launch.contract.spec import CudaGraph, Data, Model, Parallelism, Placement, RunSpec, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import build
from launch.train.data_loader import batch, open_source
from launch.train.telemetry.profiler import probe

pytestmark = pytest.mark.gpu

STEPS = 10
MOE = Model(
    num_layers=4, hidden_size=128, kv_channels=32, num_query_groups=2, qk_layernorm=True,
    num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128, moe_aux_loss_coeff=1e-3,
)  # fmt: skip
EAGER = CudaGraph("none")
WHOLE = (CudaGraph("full_iteration"), CudaGraph("full_iteration", optimizer=True))
LAYERS = tuple(CudaGraph(impl, ()) for impl in ("torch", "transformer_engine"))
ROUTERS = tuple(CudaGraph(impl, ("attn", "moe_router", "moe_preprocess")) for impl in ("torch", "transformer_engine"))
CASES: dict[str, tuple[Parallelism, tuple[CudaGraph, ...]]] = {
    "two, ep2, alltoall": (Parallelism(ep=2, dp=2), ROUTERS),
    "two, tp2 ep2, allgather": (
        Parallelism(tp=2, ep=2, sequence_parallel=True, dispatcher="allgather"), (*WHOLE, *LAYERS, *ROUTERS)
    ),
    "two, ep2, allgather, distributed optimizer": (
        Parallelism(ep=2, dp=2, dispatcher="allgather", distributed_optimizer=True), (*WHOLE, *LAYERS, *ROUTERS)
    ),
    "two, pp2, 1f1b": (Parallelism(pp=2), (*WHOLE, *LAYERS, *ROUTERS)),
    "two, pp2, interleaved": (Parallelism(pp=2, vpp=2, schedule="interleaved"), (*WHOLE, *LAYERS)),
    "four, tp2 pp2 ep2, alltoall": (Parallelism(tp=2, pp=2, ep=2, sequence_parallel=True), ROUTERS),
    "four, tp2 pp2 ep2, allgather": (
        Parallelism(tp=2, pp=2, ep=2, sequence_parallel=True, dispatcher="allgather"), (*WHOLE, *LAYERS, *ROUTERS)
    ),
    "four, ep4, allgather, distributed optimizer": (
        Parallelism(ep=4, dp=4, dispatcher="allgather", distributed_optimizer=True), (*WHOLE, *LAYERS, *ROUTERS)
    ),
    "four, tp2 pp2, interleaved": (
        Parallelism(tp=2, pp=2, vpp=2, schedule="interleaved", sequence_parallel=True), (*WHOLE, *LAYERS)
    ),
}  # fmt: skip


def train_all(rank: int, specs: Sequence[RunSpec], folder: Path) -> None:
    """Run as one rank: save the result of each of ``specs``, in their order."""
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # launch.train.worker does the same.
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=specs[0].parallelism.world_size,
        device_id=device,
    )
    torch.save([_train(spec, rank, device) for spec in specs], folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def _train(spec: RunSpec, rank: int, device: torch.device) -> dict[str, Any]:
    engine = build(spec, RankPlace(rank, spec.parallelism.world_size, device))
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    dp_rank = spec.parallelism.rank_in("dp", rank)

    batches = [batch(source, spec, step, dp_rank).to(device) for step in range(STEPS + PROBED_STEPS)]
    results = [engine.step(tokens) for tokens in batches[:STEPS]]
    stats, weights = engine.graph_stats(), engine.flat_parameters.weights.cpu().clone()
    seen = probe(engine.step, batches[STEPS:]).probe
    engine.close()
    return {
        "steps": [(result.loss.item(), result.grad_norm.item()) for result in results],
        "weights": weights,
        "proven": stats.proven,
        "launches": (seen.graph_launches, stats.launches_per_step),
    }


@pytest.mark.parametrize(("parallelism", "graphs"), CASES.values(), ids=CASES.keys())
def test_gpus_replay_what_they_compute(parallelism: Parallelism, graphs: tuple[CudaGraph, ...], tmp_path: Path) -> None:
    needed, found = parallelism.world_size, torch.cuda.device_count()
    assert found >= needed, f"{needed} GPUs are needed, and this host has {found}: deselect with -k 'not four'"
    eager = RunSpec(
        model=MOE,
        parallelism=parallelism,
        training=Training(
            steps=STEPS, sequence_length=256, micro_batch_size=2, global_batch_size=16, precision="bf16",
            deterministic=True,
        ),
        data=Data(kind="text"),
        placement=Placement(device="cuda", ranks_per_node=needed),
    )  # fmt: skip
    mp.spawn(train_all, args=([replace(eager, cuda_graph=g) for g in (EAGER, EAGER, *graphs)], tmp_path), nprocs=needed)
    for rank in range(needed):
        first, second, *graphed = torch.load(tmp_path / f"rank{rank}.pt")
        assert first["steps"] == second["steps"] and torch.equal(first["weights"], second["weights"])
        for graph, trained in zip(graphs, graphed, strict=True):
            assert trained["steps"] == first["steps"], graph.label
            assert torch.equal(trained["weights"], first["weights"]), graph.label
            assert trained["proven"], graph.label
            assert trained["launches"][0] == trained["launches"][1] > 0, (graph.label, trained["launches"])
