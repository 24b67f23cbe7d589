"""On two GPUs, over NCCL, test step checks of several ranks in both engines: right graphs are clean, a check changes nothing, and
a fault of one rank is found and named.

Each layout trains in two processes of its own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launch.contract.records.step_check import StepCheck
from launch.contract.spec import CudaGraph, Data, Model, Parallelism, Placement, RunSpec, Training
from launch.engines.protocol import RankPlace
from launch.support import unsupported
from launch.train.data_loader import batch, open_source
from launch.train.inspection.step_check import check_step
from launch.train.worker import ENGINES
from tests.gpu.test_gpu_step_check import worst
from tests.megatron_release import RELEASE
from tests.numerics.checked_step import faults_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

RANKS = 2
CLEAN_CHECKS = 3
DENSE = Model(num_layers=2, hidden_size=128, kv_channels=32, num_query_groups=2, qk_layernorm=True)
MOE = replace(DENSE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128, moe_aux_loss_coeff=1e-3)
PADDED = replace(MOE, moe_expert_capacity_factor=1.25, moe_pad_expert_input_to_capacity=True)
WHOLE, UPDATED = CudaGraph("full_iteration"), CudaGraph("full_iteration", optimizer=True)
ROUTED = ("attn", "moe_router", "moe_preprocess")
TORCH, LAYERS = CudaGraph("torch"), CudaGraph("transformer_engine")
LOCAL = CudaGraph("local", mend=("local_inputs",) if RELEASE == "0.16" else ())
Case = tuple[Model, Parallelism, tuple[CudaGraph, ...]]
TORCH_NATIVE: dict[str, Case] = {
    "tp2": (DENSE, Parallelism(tp=2, sequence_parallel=True), (WHOLE, LAYERS)),
    "ep2, allgather": (
        MOE, Parallelism(dp=2, ep=2, dispatcher="allgather"), (WHOLE, UPDATED, CudaGraph("torch", ROUTED))
    ),
    "pp2": (DENSE, Parallelism(pp=2), (WHOLE, TORCH)),
    "dp2, distributed optimizer": (DENSE, Parallelism(dp=2, distributed_optimizer=True), (WHOLE, UPDATED, LAYERS)),
}  # fmt: skip
MEGATRON: dict[str, Case] = {
    "tp2": (DENSE, Parallelism(tp=2, sequence_parallel=True), (WHOLE, LAYERS)),
    "ep2": (MOE, Parallelism(dp=2, ep=2), (CudaGraph("transformer_engine", ROUTED),)),
    "ep2, padded": (PADDED, Parallelism(dp=2, ep=2, distributed_optimizer=True), (WHOLE,)),
    # 0.19 cannot capture local graphs of several micro-batches over stages (rule megatron.local_pipeline).
    "pp2": (DENSE, Parallelism(pp=2), (LAYERS, LOCAL) if RELEASE == "0.16" else (LAYERS,)),
    "cp2": (DENSE, Parallelism(cp=2), (WHOLE, LAYERS)),
    "dp2, distributed optimizer": (DENSE, Parallelism(dp=2, distributed_optimizer=True), (WHOLE,)),
}
CASES = [("torch_native", name) for name in TORCH_NATIVE] + [("megatron", name) for name in MEGATRON]


def spec_of(engine: Any, model: Model, layout: Parallelism, graph: CudaGraph) -> RunSpec:
    """Return a spec with steps of eight samples in micro-batches of one, and a learning rate that visibly changes weights."""
    return RunSpec(
        engine=engine,
        megatron_core=RELEASE,
        model=model,
        parallelism=layout,
        training=Training(
            steps=60, sequence_length=256 if layout.cp > 1 else 64, micro_batch_size=1, global_batch_size=8, precision="bf16", learning_rate=3e-3,
            capturable_optimizer=engine == "megatron" and graph.optimizer,
        ),
        cuda_graph=graph,
        data=Data(kind="text"),
        placement=Placement(device="cuda", ranks_per_node=RANKS),
        step_checks=15,
    )  # fmt: skip


@contextmanager
def built(spec: RunSpec, place: RankPlace) -> Iterator[Any]:
    """Yield the engine of ``spec``. Close it at the end."""
    if spec.engine == "megatron":
        from megatron.core.pipeline_parallel import utils

        utils._COMP_STREAM = utils._COMM_STREAM = None  # Drop the streams of an earlier engine in this process.
    engine = importlib.import_module(ENGINES[spec.engine]).build(spec, place)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def stale_weight(engine: Any) -> Iterator[None]:
    """Move a weight of attention to new memory, in the last layer of this rank. The graph keeps the old one."""
    named = [
        parameter for chunk in engine.chunks for name, parameter in chunk.named_parameters() if "qkv.weight" in name
    ]
    kept = named[-1].data
    named[-1].data = kept * 1.5
    yield
    named[-1].data = kept


Fault = Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True)
class Checked:
    """What one rank found. ``results`` has the loss and the gradient norm of each step, ``weights`` those after the last one."""

    clean: list[StepCheck]
    faulty: list[StepCheck]
    results: list[tuple[float, float]]
    weights: torch.Tensor
    proven: bool


def train(spec: RunSpec, place: RankPlace, checks: int, fault: Fault | None = None) -> Checked:
    """Train until ``checks`` steps after the capture were checked. Then check the next step with ``fault`` on rank 1."""
    dp_rank = spec.parallelism.rank_in("dp", place.rank)
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    clean, faulty, results = [], [], []
    with built(spec, place) as engine:
        for step in range(spec.first_compared + CLEAN_CHECKS):
            tokens = batch(source, spec, step, dp_rank).to(place.device)
            if 0 <= step - spec.first_compared < checks:
                clean.append(check_step(engine.checkable_step(), step, tokens))
            result = engine.step(tokens)
            results.append((result.loss.item(), result.grad_norm.item()))
        weights = torch.cat([weight.detach().flatten().float() for _, weight in engine.named_parameters()]).cpu()
        if fault is not None:
            step = spec.first_compared + CLEAN_CHECKS
            tokens = batch(source, spec, step, dp_rank).to(place.device)
            with fault(engine) if place.rank == 1 else nullcontext():
                faulty.append(check_step(engine.checkable_step(), step, tokens))
        return Checked(clean, faulty, results, weights, engine.graph_stats().proven)


def train_rank(rank: int, specs: Sequence[RunSpec], folder: Path) -> None:
    """Run as one rank. For each spec save three runs: a checked one that is not deterministic, one without checks, and one with
    checks of layers, both deterministic."""
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # launch.train.worker does the same.
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=RANKS, device_id=device)
    torch.save(train_all(specs, RankPlace(rank, RANKS, device)), folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def train_all(specs: Sequence[RunSpec], place: RankPlace) -> list[tuple[Checked, Checked, Checked]]:
    # Deterministic algorithms stay on in a process, so runs without them are the first.
    noisy = [train(spec, place, CLEAN_CHECKS, fault_of(spec)) for spec in specs]
    exact = [replace(spec, training=replace(spec.training, deterministic=True)) for spec in specs]
    plain = [train(replace(spec, step_checks=0), place, 0) for spec in exact]
    layers = [train(replace(spec, layer_check_steps=60), place, CLEAN_CHECKS, fault_of(spec)) for spec in exact]
    return list(zip(noisy, plain, layers, strict=True))


def fault_of(spec: RunSpec) -> Fault | None:
    """Local graphs copy moved weights into their memory, so they do not have this fault. Padded experts drop tokens, and checks do
    not judge such models unless bits are equal."""
    has_it = spec.cuda_graph.impl != "local" and spec.model.moe_expert_capacity_factor is None
    return stale_weight if has_it else None


@pytest.mark.parametrize(("engine", "name"), CASES, ids=[f"two, {engine}, {name}" for engine, name in CASES])
def test_checks_of_two_ranks(
    engine: str, name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = torch.cuda.device_count()
    assert found >= RANKS, f"{RANKS} GPUs are needed, and this host has {found}: deselect with -k 'not two'"
    model, layout, graphs = (TORCH_NATIVE if engine == "torch_native" else MEGATRON)[name]
    specs = [spec_of(engine, model, layout, graph) for graph in graphs]
    for spec in specs:
        assert unsupported(spec) == ()
    mp.spawn(train_rank, args=(specs, tmp_path), nprocs=RANKS)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]
    for spec, runs in zip(specs, zip(*ranks, strict=True), strict=True):
        label = spec.cuda_graph.label
        for noisy, plain, layers in runs:
            expect_clean(noisy, layers, plain, label)
        if fault_of(spec) is not None:
            expect_fault_of_rank_1(
                layout, [noisy.faulty[0] for noisy, _, _ in runs], [each.faulty[0] for *_, each in runs]
            )
        checks = [one for noisy, _, layers in runs for one in (*noisy.clean, *layers.clean)]
        record_property(
            f"{label}, clean: checks, unequal, worst",
            (len(checks), sum(one.unequal > 0 for one in checks), worst(checks)),
        )
        record_property(f"{label}, fault of rank 1", [worst(noisy.faulty) for noisy, _, _ in runs])
        record_property(f"{label}, seconds of a check", max(one.seconds for one in checks))


def expect_clean(noisy: Checked, layers: Checked, plain: Checked, label: str) -> None:
    """Checks of both kinds find nothing, and change not a bit of a deterministic run."""
    for checked in (noisy, layers):
        assert checked.proven and len(checked.clean) == CLEAN_CHECKS, label
        for one in checked.clean:
            assert one.tensors and (one.unequal == 0 or one.calibrated), (label, one)
            assert faults_of(one) == [], (label, one)
    assert [one.unequal for one in layers.clean] == [0] * CLEAN_CHECKS, f"{label}: deterministic code has equal bits"
    assert plain.proven and layers.results == plain.results and torch.equal(layers.weights, plain.weights), label


def expect_fault_of_rank_1(layout: Parallelism, checks: Sequence[StepCheck], of_layers: Sequence[StepCheck]) -> None:
    """A check names parameters of attention. With layers, only the faulty rank names the faulty output, unless ranks share it."""
    assert all(one.calibrated for one in (*checks, *of_layers)), checks
    # Ranks that share an optimizer have parts of its gradients, so another rank may hold those of the faulty layer.
    named = [name for one in (checks if layout.dp > 1 else checks[1:]) for name in faults_of(one)]
    assert any("attention." in name for name in named), checks
    first = [one.first[0].name if one.first else "" for one in of_layers]
    output = "output of decoder layer 1, micro-batch 0"
    shared = layout.tp > 1 or layout.cp > 1
    elsewhere = (
        output if shared else "gradient of the output of decoder layer 0, micro-batch 0" if layout.pp > 1 else ""
    )
    assert first == [elsewhere, output], of_layers
