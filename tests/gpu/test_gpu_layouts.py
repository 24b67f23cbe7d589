"""On two and on four GPUs, over NCCL, test that tensor, pipeline and expert parallelism train the same model as one
GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launch.contract.spec import Data, Model, Parallelism, Placement, RunSpec, Training
from tests.numerics.parallel.layouts import train_rank

pytestmark = pytest.mark.gpu

MOE = Model(
    num_layers=4, hidden_size=128, kv_channels=32, num_query_groups=2, qk_layernorm=True,
    num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128, moe_aux_loss_coeff=1e-3,
)  # fmt: skip
ALONE = RunSpec(
    model=MOE,
    training=Training(
        steps=5, sequence_length=256, micro_batch_size=2, global_batch_size=16, learning_rate=1e-3, precision="bf16"
    ),
    data=Data(kind="text"),
    placement=Placement(device="cuda"),
)
LAYOUTS = {
    "two, ep2, alltoall": Parallelism(ep=2, dp=2),
    "two, tp2 ep2, allgather": Parallelism(tp=2, ep=2, sequence_parallel=True, dispatcher="allgather"),
    "two, pp2, interleaved": Parallelism(pp=2, vpp=2, schedule="interleaved"),
    "four, tp2 pp2 ep2, alltoall": Parallelism(tp=2, pp=2, ep=2, sequence_parallel=True),
    "four, tp2 pp2 ep2, allgather": Parallelism(tp=2, pp=2, ep=2, sequence_parallel=True, dispatcher="allgather"),
    "four, ep4, alltoall": Parallelism(ep=4, dp=4),
    "four, ep4, allgather, distributed optimizer": Parallelism(
        ep=4, dp=4, dispatcher="allgather", distributed_optimizer=True
    ),
    "four, tp2 pp2, interleaved": Parallelism(tp=2, pp=2, vpp=2, schedule="interleaved", sequence_parallel=True),
}
LOSS_TOLERANCE = 2e-2
"""Nats, for a loss of about 5.5. bfloat16 has an error of about 4e-3 of them, and layouts round partial sums at
different places."""
NORM_TOLERANCE = 5e-2
"""A share of the gradient norm. A gradient that is lost or counted twice changes the norm by a tenth or more."""


def train_on_gpu(rank: int, spec: RunSpec, folder: Path) -> None:
    """Run as one process of ``spec``, and leave losses and gradient norms in the folder."""
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # launch.train.worker does the same.
    torch.cuda.set_device(rank)
    rendezvous = f"file://{folder}/rendezvous"
    world_size = spec.parallelism.world_size
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world_size, device_id=device)
    trained = train_rank(spec, None, "cuda")
    torch.save({name: trained[name].cpu() for name in ("loss", "grad_norm")}, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Train in a separate process, as all layouts do."""
    folder = tmp_path_factory.mktemp("alone")
    mp.spawn(train_on_gpu, args=(ALONE, folder), nprocs=1)
    trained: dict[str, torch.Tensor] = torch.load(folder / "rank0.pt")
    return trained


@pytest.mark.parametrize("parallelism", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_gpus_train_as_one_does(parallelism: Parallelism, alone: dict[str, torch.Tensor], tmp_path: Path) -> None:
    needed, found = parallelism.world_size, torch.cuda.device_count()
    assert found >= needed, f"{needed} GPUs are needed, and this host has {found}: deselect with -k 'not four'"
    spec = replace(ALONE, parallelism=parallelism, placement=Placement(device="cuda", ranks_per_node=needed))
    mp.spawn(train_on_gpu, args=(spec, tmp_path), nprocs=needed)
    for rank in range(needed):
        trained = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(trained["loss"], alone["loss"], rtol=0, atol=LOSS_TOLERANCE)
        torch.testing.assert_close(trained["grad_norm"], alone["grad_norm"], rtol=NORM_TOLERANCE, atol=0)
    assert alone["loss"][0] - alone["loss"][-1] > 5 * LOSS_TOLERANCE, "there was something to learn"
