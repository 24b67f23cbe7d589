"""Training by Megatron-Core on GPUs: specs, what a run computed, and how two runs are compared."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch.contract.plan import Margins
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.probe import PROBED_STEPS
from launch.contract.spec import CudaGraph, Data, Model, Parallelism, Placement, RunSpec, Training
from launch.engines.determinism import use_deterministic_algorithms
from launch.engines.protocol import Engine, RankPlace, StepResult
from launch.train.data_loader import batch, open_source
from launch.train.telemetry import memory
from launch.train.telemetry.profiler import probe
from launch.train.worker import ENGINES
from tests.gpu.test_gpu_eager import GPT_OSS, MOE
from tests.megatron_release import RELEASE

STEPS = 8
MICRO_BATCHES = 4
MARGINS = Margins()
OF_A_GRADIENT = 2e-2
"""How far a parameter's gradient may be from the eager one, as a share of its own norm."""
SMALLEST = 1e-4
"""A share of the norm of all gradients. A smaller gradient of a parameter is only rounding."""

DENSE = replace(MOE, num_moe_experts=0, moe_router_topk=0, moe_ffn_hidden_size=0, moe_aux_loss_coeff=0.0)
PADDING = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
PADDED = replace(MOE, **PADDING)  # type: ignore[arg-type]
STEERED = replace(
    MOE,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.05,
    moe_shared_expert_ffn_hidden_size=64,
)
YARN = replace(
    GPT_OSS,
    rope_scaling="yarn",
    rope_scaling_factor=4.0,
    rope_original_max_position=64,
    init_std=0.2,  # With 0.02, positions hardly affect attention.
)

MODELS = {
    "dense": DENSE,
    "moe": MOE,
    "padded": PADDED,
    "gpt-oss": GPT_OSS,
    "padded gpt-oss": replace(GPT_OSS, **PADDING),  # type: ignore[arg-type]
    "padded yarn": replace(YARN, **PADDING),  # type: ignore[arg-type]
    "steered": STEERED,
    "padded, steered": replace(STEERED, **PADDING),  # type: ignore[arg-type]
}
OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
EAGER = CudaGraph("none")
WHOLE = CudaGraph("full_iteration")

ROUTED = ("attn", "moe_router", "moe_preprocess")


def named(case: tuple[str, CudaGraph]) -> str:
    return f"{case[0]}, {case[1].label}"


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    """Remove what a failed test would leave to later ones: process groups, and state in modules and classes.
    Megatron-Core and Transformer Engine keep there what is initialized, who captures, and who reads a buffer."""
    yield
    from megatron.core import parallel_state
    from megatron.core.transformer import cuda_graphs
    from transformer_engine.pytorch.graph import set_capture_end
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    parallel_state.destroy_model_parallel()
    cuda_graphs._set_capture_end()
    set_capture_end()
    FP8GlobalStateManager.reset()  # A layer's graphs leave a flag there that forbids casts of weights.
    cuda_graphs.delete_cuda_graphs()
    cuda_graphs.fwd_buffer_reuse_ref_count = cuda_graphs.bwd_buffer_reuse_ref_count = 0
    torch.cuda.set_stream(torch.cuda.default_stream())
    if dist.is_initialized():
        dist.destroy_process_group()


def fused(spec: RunSpec) -> RunSpec:
    training = replace(spec.training, gradient_accumulation_fusion=True, moe_router_fusion=spec.model.is_moe)
    return replace(spec, training=training)


FP8: tuple[Any, ...] = ("delayed", "current")


def results_of(spec: RunSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses and gradient norms, each of shape (steps,)."""
    device = torch.device("cuda", 0)
    engine: Engine = importlib.import_module(ENGINES[spec.engine]).build(spec, RankPlace(0, 1, device))
    try:
        source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
        results = [engine.step(batch(source, spec, step, 0).to(device)) for step in range(spec.training.steps)]
    finally:
        engine.close()
    return torch.stack([result.loss for result in results]), torch.stack([result.grad_norm for result in results])


@dataclass(frozen=True)
class Trained:
    """The results of a training run. ``losses`` and ``norms`` have shape (steps,). ``gradients`` has those of each
    step, by parameter name. ``random`` is the state of the device's generator after the steps."""

    losses: torch.Tensor
    norms: torch.Tensor
    gradients: Sequence[dict[str, torch.Tensor]]
    kinds: Sequence[str]
    capture_step: int | None
    stats: GraphStats
    launches: float
    kernels: float
    host_ms: float | None
    random: torch.Tensor
    pool_while_open: int
    pool_when_closed: int = 0


def spec_of(model: Model, graph: CudaGraph, parallelism: Parallelism = Parallelism()) -> RunSpec:  # noqa: B008 (frozen)
    """Return a spec whose micro-batches differ in each step."""
    return RunSpec(
        engine="megatron",
        megatron_core=RELEASE,
        model=model,
        parallelism=parallelism,
        training=Training(
            steps=STEPS, sequence_length=64 * (2 * parallelism.cp if parallelism.cp > 1 else 1), micro_batch_size=2,
            global_batch_size=2 * MICRO_BATCHES * parallelism.dp, precision="bf16", clip_grad=0.0,
            capturable_optimizer=graph.optimizer,
        ),
        cuda_graph=graph,
        data=Data(kind="text"),
        placement=Placement(device="cuda", ranks_per_node=parallelism.world_size),
    )  # fmt: skip


def trained(spec: RunSpec, rank: int = 0) -> Trained:
    """Train, with the known fault of local graphs repaired, so that all other results can be compared."""
    with inputs_kept():
        return trained_as_released(spec, rank)


def trained_as_released(spec: RunSpec, rank: int = 0) -> Trained:
    from megatron.core.pipeline_parallel import utils

    utils._COMP_STREAM = utils._COMM_STREAM = None  # Drop the streams of an earlier engine in this process.
    device = torch.device("cuda", rank)
    before = pool_of(device)  # The local graphs of 0.19.2 leave some memory behind.
    found = _train(spec, rank, device)
    torch._C._cuda_clearCublasWorkspaces()  # The workspace of the capture's stream lies in the pool of its graphs.
    return replace(found, pool_when_closed=max(0, pool_of(device) - before))


@contextmanager
def inputs_kept() -> Iterator[None]:
    """Do what ``cuda_graph.mend: [local_inputs]`` does."""
    from launch.engines.megatron.mends import MENDS

    with MENDS["local_inputs"]() if RELEASE == "0.16" else nullcontext():
        yield


def _train(spec: RunSpec, rank: int, device: torch.device) -> Trained:
    """Train without ``launch.support``, which rejects the faulty cells that are tested here."""
    from launch.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(spec, RankPlace(rank, spec.parallelism.world_size, device))
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    dp_rank = spec.parallelism.rank_in("dp", rank)
    batches = [batch(source, spec, step, dp_rank).to(device) for step in range(STEPS + PROBED_STEPS)]
    results: list[StepResult] = []
    gradients = []
    try:
        for tokens in batches[:STEPS]:
            results.append(engine.step(tokens))
            gradients.append(gradients_of(engine))
        random = torch.cuda.get_rng_state(device)
        seen = probe(engine.step, batches[STEPS:]).probe
        return Trained(
            torch.stack([result.loss for result in results]).cpu(),
            torch.stack([result.grad_norm for result in results]).cpu(),
            gradients,
            [result.kind for result in results],
            engine.capture_step,
            engine.graph_stats(),
            seen.graph_launches,
            seen.kernels,
            seen.host_ms,
            random,
            pool_of(device),
        )
    finally:
        engine.close()  # Close it after a failed capture too, because Megatron-Core keeps graphs in its classes.
        forget_last_micro_batch(engine)


def forget_last_micro_batch(engine: Any) -> None:
    """Release the probabilities that Megatron-Core's token dispatchers keep. Through their autograd graph they hold the
    model, in a cycle that Python's collector cannot see."""
    for chunk in engine.chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if dispatcher is not None:
                for name, value in list(vars(dispatcher).items()):
                    if torch.is_tensor(value):
                        delattr(dispatcher, name)


def gradients_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the gradients as the optimizer left them. It clips them in place."""
    return {
        f"{number}.{name}": parameter.main_grad.float().cpu()
        for number, chunk in enumerate(engine.chunks)
        for name, parameter in chunk.named_parameters()
    }


def pool_of(device: torch.device) -> int:
    """Return the bytes of memory that graphs hold."""
    gc.collect()
    torch.cuda.empty_cache()
    return memory.sample(device).graph_pool or 0


@cache
def eager_twins(name: str) -> tuple[Trained, Trained]:
    """Return two eager runs. Their difference is the noise of eager code."""
    first, second = (trained(spec_of(MODELS[name], EAGER)) for _ in range(2))
    return first, second


def check(found: Trained, eager: Trained, again: Trained, graph: CudaGraph, sequence_parallel: bool = False) -> None:
    replayed = slice(graph.capture_step + 1, None)
    assert found.capture_step == graph.capture_step
    kinds = ["warmup"] * graph.capture_step + ["capture"]
    assert found.kinds == kinds + ["steady"] * (STEPS - len(kinds))
    assert found.stats.proven, found.stats
    assert found.launches == found.stats.launches_per_step > 0, (found.launches, found.stats)
    assert found.pool_while_open > 0
    noise = difference(again, eager, replayed)
    off = difference(found, eager, replayed)
    assert off[0] <= MARGINS.loss + 4 * noise[0], (off, noise)
    assert off[1] <= MARGINS.grad_norm + 4 * noise[1], (off, noise)
    first = graph.capture_step + 1
    wrong = gradients_apart(found.gradients[first], eager.gradients[first])
    noisy = gradients_apart(again.gradients[first], eager.gradients[first])
    assert {name for name, apart in wrong.items() if apart > OF_A_GRADIENT + 4 * noisy[name]} == set(), wrong
    # These graphs are captured outside the block's own random states.
    if not (graph.impl == "local" and sequence_parallel):
        assert torch.equal(found.random, eager.random), (graph, found.random.tolist(), eager.random.tolist())
    # Local graphs keep some buffers. Where they are kept is unknown.
    assert found.pool_when_closed == 0 or graph.impl == "local"
    assert found.host_ms is None, "the host reads the gradient norm in each step"


def difference(found: Trained, eager: Trained, steps: slice) -> tuple[float, float]:
    """Return the largest difference of losses, absolute, and of gradient norms, relative."""
    losses = (found.losses - eager.losses)[steps].abs().max().item()
    return losses, ((found.norms - eager.norms) / eager.norms)[steps].abs().max().item()


def gradients_apart(found: dict[str, torch.Tensor], eager: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return how far each parameter's gradient is from the eager one, as a share of the eager one's norm."""
    smallest = SMALLEST * torch.stack([gradient.norm() for gradient in eager.values()]).norm().item()
    return {
        name: (found[name] - gradient).norm().item() / gradient.norm().item()
        for name, gradient in eager.items()
        if gradient.norm().item() > smallest
    }


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Set what launch.engines.megatron.build sets in a process. Afterwards, allow nondeterministic operations again and
    restore the environment."""
    with mock.patch.dict(os.environ):  # An engine changes the environment.
        use_deterministic_algorithms()
        yield
        torch.use_deterministic_algorithms(False)


def deterministic_of(spec: RunSpec, fuses: bool) -> RunSpec:
    training = replace(spec.training, deterministic=True, gradient_accumulation_fusion=fuses)
    return replace(spec, training=training)
