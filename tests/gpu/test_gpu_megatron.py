"""On GPUs, test that Megatron-Core with Transformer Engine's layers trains the same as torch_native, in bfloat16, and
that its graphs compute the same as its eager code."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launch.contract.errors import ReplayError
from launch.contract.plan import Margins
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.probe import PROBED_STEPS
from launch.contract.spec import CudaGraph, Data, Model, Parallelism, Placement, RunSpec, Training
from launch.engines.determinism import use_deterministic_algorithms
from launch.engines.protocol import Engine, RankPlace, StepResult
from launch.support import unsupported
from launch.train.data_loader import batch, open_source
from launch.train.telemetry import memory
from launch.train.telemetry.profiler import probe
from launch.train.worker import ENGINES
from tests.gpu.test_gpu_eager import GPT_OSS, MOE
from tests.megatron_release import RELEASE

# Megatron-Core and Transformer Engine cause these warnings.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

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
WITHOUT_SINKS = replace(GPT_OSS, attention_sinks=False)
"""Megatron-Core's sinks are not deterministic (tests/gpu/test_gpu_attention.py)."""
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
UPDATED = CudaGraph("full_iteration", optimizer=True)
ROUTED = ("attn", "moe_router", "moe_preprocess")
YARN_GRAPHS = (CudaGraph("transformer_engine", ("attn",)), CudaGraph("transformer_engine", ROUTED))
CASES: list[tuple[str, CudaGraph]] = [
    *[("dense", CudaGraph("transformer_engine", scope)) for scope in ((), ("attn",), ("mlp",), ("attn", "mlp"))],
    ("dense", CudaGraph("local")),
    ("dense", WHOLE),
    *[
        ("moe", CudaGraph("transformer_engine", scope))
        for scope in (("attn",), ("moe_router",), ("moe_router", "moe_preprocess"), ("attn", "moe_router"), ROUTED)
    ],
    *[("padded", CudaGraph("transformer_engine", scope)) for scope in ((), ("moe",), ("attn", "moe"), ROUTED)],
    ("padded", CudaGraph("local")),
    ("padded", WHOLE),
    ("gpt-oss", CudaGraph("transformer_engine", ROUTED)),
    ("padded gpt-oss", CudaGraph("local")),
    ("padded gpt-oss", WHOLE),
    ("padded yarn", CudaGraph("local")),
    ("padded yarn", WHOLE),
    *[("padded yarn", replace(graph, mend=("yarn_positions",))) for graph in YARN_GRAPHS],
    ("steered", CudaGraph("transformer_engine", ROUTED)),
    ("padded, steered", WHOLE),
]
REFUSED: list[tuple[str, CudaGraph]] = [("padded yarn", YARN_GRAPHS[0])]


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


@pytest.mark.parametrize(
    "model",
    [Model(qk_layernorm=True), MOE, GPT_OSS, replace(YARN, init_std=0.02)],
    ids=["dense", "moe", "gpt-oss", "yarn"],
)
def test_both_engines_train_the_same(model: Model) -> None:
    training = Training(steps=8, global_batch_size=4, micro_batch_size=2, precision="bf16")
    spec = RunSpec(
        engine="megatron", megatron_core=RELEASE, model=model, training=training, placement=Placement(device="cuda")
    )
    assert unsupported(spec) == ()
    found, expected = results_of(spec), results_of(replace(spec, engine="torch_native"))
    # bfloat16 has an error of about 4e-3 in a loss of 5.5 nats. A wrong layout or factor has a far larger one.
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=3e-2)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-1, atol=0)


@pytest.mark.parametrize("model", [Model(qk_layernorm=True), MOE], ids=["dense", "moe"])
def test_exchanges_beside_passes_change_nothing(model: Model) -> None:
    """On one GPU, only hooks and buckets remain of these exchanges."""
    training = Training(steps=8, global_batch_size=4, micro_batch_size=2, precision="bf16")
    spec = RunSpec(
        engine="megatron", megatron_core=RELEASE, model=model, training=training, placement=Placement(device="cuda")
    )
    beside = replace(spec, parallelism=Parallelism(**OVERLAPPED))
    assert unsupported(beside) == ()
    found, expected = results_of(beside), results_of(spec)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=3e-2)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-1, atol=0)


def fused(spec: RunSpec) -> RunSpec:
    training = replace(spec.training, gradient_accumulation_fusion=True, moe_router_fusion=spec.model.is_moe)
    return replace(spec, training=training)


@pytest.mark.parametrize("name", ["dense", "moe", "padded", "gpt-oss", "steered"])
def test_fusions_compute_the_same_by_fewer_kernels(name: str) -> None:
    plain, again = eager_twins(name)
    spec = fused(spec_of(MODELS[name], EAGER))
    assert unsupported(spec) == ()
    found = trained(spec)
    torch.testing.assert_close(found.losses, plain.losses, rtol=0, atol=3e-2)
    torch.testing.assert_close(found.norms, plain.norms, rtol=1e-1, atol=0)
    off, noise = (gradients_apart(run.gradients[0], plain.gradients[0]) for run in (found, again))
    assert {name for name, apart in off.items() if apart > OF_A_GRADIENT + 4 * noise[name]} == set(), off
    assert found.kernels < plain.kernels


FUSED_LAYERS = CudaGraph("transformer_engine", mend=("fused_gradients",))
FUSED: list[tuple[str, CudaGraph]] = [
    ("dense", WHOLE),
    ("padded", WHOLE),
    ("dense", CudaGraph("local")),
    ("dense", replace(FUSED_LAYERS, scope=("attn", "mlp"))),
    ("moe", replace(FUSED_LAYERS, scope=ROUTED)),
    ("padded", FUSED_LAYERS),
]


@cache
def eager_twins_fused(name: str) -> tuple[Trained, Trained]:
    first, second = (trained(fused(spec_of(MODELS[name], EAGER))) for _ in range(2))
    return first, second


@pytest.mark.parametrize("case", FUSED, ids=named)
def test_graphs_compute_what_eager_code_computes_fused(case: tuple[str, CudaGraph]) -> None:
    """Products add to the gradients that Megatron-Core keeps, in a capture and outside."""
    name, graph = case
    check(trained(fused(spec_of(MODELS[name], graph))), *eager_twins_fused(name), graph)


def test_callables_of_all_micro_batches_keep_the_last_ones_fused_gradients() -> None:
    """If this test fails, remove the row of launch.support that rejects them. With one micro-batch per step, nothing is
    lost."""
    graph = CudaGraph("transformer_engine", ("attn", "mlp"))
    several = fused(spec_of(DENSE, graph))
    assert [reason.rule for reason in unsupported(several)] == ["megatron.fused_gradients"]
    (eager, again), found = eager_twins_fused("dense"), trained(several)
    replayed = slice(graph.capture_step + 1, None)
    assert difference(found, eager, replayed)[1] > 0.1 > 4 * difference(again, eager, replayed)[1]
    alone = [with_one_micro_batch(fused(spec_of(DENSE, kind))) for kind in (EAGER, EAGER, graph)]
    assert unsupported(alone[-1]) == ()
    eager, again, found = map(trained, alone)
    check(found, eager, again, graph)


def with_one_micro_batch(spec: RunSpec) -> RunSpec:
    return replace(spec, training=replace(spec.training, global_batch_size=2))


def lean(spec: RunSpec) -> RunSpec:
    training = replace(spec.training, optimizer_precision="lean")
    return replace(spec, training=training, parallelism=replace(spec.parallelism, distributed_optimizer=True))


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [Model(qk_layernorm=True), MOE], ids=["dense", "moe"])
def test_a_lean_optimizer_trains_beside_that_of_fp32(
    model: Model, gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps 6 bytes per element, in groups that an update copies one by one."""
    from launch.engines.megatron import engine as module

    monkeypatch.setattr(module, "COPIED_ELEMENTS", 2**16)
    made, groups, split_groups = [], [], module.split_groups

    def split_and_keep(optimizer: Any, most: int) -> None:
        groups.append(len(optimizer.param_groups))
        split_groups(optimizer, most)
        made.append(optimizer)

    monkeypatch.setattr(module, "split_groups", split_and_keep)
    spec = spec_of(model, EAGER)
    spec = lean(replace(spec, training=replace(spec.training, gradient_precision=gradients)))
    assert unsupported(spec) == ()
    found = results_of(spec)
    states = [state for part in made[0].chained_optimizers for state in part.optimizer.state.values()]
    assert len(made[0].param_groups) > groups[0] and states
    for state in states:
        assert {name: one.dtype for name, one in state.items()} == {
            "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master_param": torch.int16
        }  # fmt: skip
    plain = replace(spec, training=replace(spec.training, optimizer_precision="fp32"))
    for expected in (results_of(plain), results_of(replace(spec, engine="torch_native"))):
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=3e-2)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-1, atol=0)


@pytest.mark.parametrize("case", [("dense", WHOLE), ("moe", CudaGraph("transformer_engine", ROUTED))], ids=named)
def test_graphs_compute_what_eager_code_computes_beside_a_lean_optimizer(case: tuple[str, CudaGraph]) -> None:
    name, graph = case
    eager, again = (trained(lean(spec_of(MODELS[name], EAGER))) for _ in range(2))
    check(trained(lean(spec_of(MODELS[name], graph))), eager, again, graph)


FP8: tuple[Any, ...] = ("delayed", "current")


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("model", [Model(qk_layernorm=True), MOE, GPT_OSS], ids=["dense", "moe", "gpt-oss"])
def test_fp8_is_near_bfloat16_and_something_else(model: Model, fp8: Any) -> None:
    training = Training(steps=8, global_batch_size=4, micro_batch_size=2, precision="bf16", fp8=fp8)
    spec = RunSpec(
        engine="megatron", megatron_core=RELEASE, model=model, training=training, placement=Placement(device="cuda")
    )
    assert unsupported(spec) == ()
    found, expected = results_of(spec), results_of(replace(spec, training=replace(training, fp8="none")))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-1)
    # In the first step, no scale is known yet.
    torch.testing.assert_close(found[1][1:], expected[1][1:], rtol=3e-1, atol=0)
    assert not torch.equal(found[0], expected[0])


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


# --- graphs ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("case", CASES, ids=named)
def test_graphs_compute_what_eager_code_computes(case: tuple[str, CudaGraph]) -> None:
    """The capture changes nothing else either: random numbers, kinds of steps, or the memory after everything is
    closed."""
    name, graph = case
    check(trained(spec_of(MODELS[name], graph)), *eager_twins(name), graph)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Set what launch.engines.megatron.build sets in a process. Afterwards, allow nondeterministic operations again and
    restore the environment."""
    with mock.patch.dict(os.environ):  # An engine changes the environment.
        use_deterministic_algorithms()
        yield
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("fuses", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("model", [DENSE, MOE, PADDED, WITHOUT_SINKS], ids=["dense", "moe", "padded", "without sinks"])
def test_deterministic_runs_are_equal_to_the_bit(model: Model, fuses: bool) -> None:
    """Compare eager runs with each other and with graphs: losses, gradient norms and every gradient of every step."""
    whole = (WHOLE,) if not model.is_moe or model.moe_pad_expert_input_to_capacity else ()
    mend = ("fused_gradients",) if fuses else ()
    parts = CudaGraph("transformer_engine", ROUTED if model.is_moe else ("attn", "mlp"), mend=mend)
    specs = (deterministic_of(spec_of(model, graph), fuses) for graph in (EAGER, EAGER, parts, *whole))
    first, *others = map(trained, specs)
    for other in others:
        assert torch.equal(other.losses, first.losses) and torch.equal(other.norms, first.norms)
        for one, expected in zip(other.gradients, first.gradients, strict=True):
            assert [name for name in expected if not torch.equal(one[name], expected[name])] == []


def test_a_router_adds_its_bias_which_megatron_core_misreads() -> None:
    """Megatron-Core 0.16 does not find the product that misreads it (docs/upstream_faults.md)."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    from launch.engines.megatron.router_bias import router_bias_converted, uses_product

    weight, rows, bias = (torch.randn(shape, device="cuda").bfloat16() for shape in ((32, 256), (64, 256), (32,)))
    right = torch.addmm(bias.float(), rows.float(), weight.float().T)
    as_released = router_gating_linear(rows, weight, bias, torch.float32)
    assert torch.allclose(as_released, right, atol=1e-2) is not uses_product()
    if uses_product():
        with router_bias_converted():
            repaired = router_gating_linear(rows, weight, bias, torch.float32)
        torch.testing.assert_close(repaired, right, rtol=0, atol=1e-2)


HAS_OPTIMIZER_GRAPH = pytest.mark.skipif(RELEASE == "0.16", reason="it has no graph of the optimizer")
CLIP = 0.25


@cache
def trained_with_updates(name: str, graph: CudaGraph, capturable: bool = True, schedule: Any = "cosine") -> Trained:
    """Deterministic, with gradients that are clipped, and learning rates that change in each step of a cosine."""
    spec = deterministic_of(spec_of(MODELS[name], graph), fuses=False)
    training = replace(
        spec.training,
        capturable_optimizer=capturable,
        clip_grad=CLIP,
        learning_rate=3e-3,
        learning_rate_schedule=schedule,
    )
    spec = replace(spec, training=training)
    assert unsupported(spec) == ()
    return trained(spec)


@HAS_OPTIMIZER_GRAPH
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["dense", "padded"])
def test_a_graph_of_the_optimizer_updates_what_eager_code_updates(name: str) -> None:
    """Losses and norms of every step are bitwise equal, and so are the clipped gradients."""
    eager, found = trained_with_updates(name, EAGER), trained_with_updates(name, UPDATED)
    assert found.kinds == ["warmup"] * 3 + ["capture"] + ["steady"] * (STEPS - 4)
    assert found.stats.proven and found.stats.effective_scope == ("forward_backward", "optimizer"), found.stats
    assert found.stats.graphs == found.stats.launches_per_step == found.launches == 2, (found.launches, found.stats)
    assert torch.equal(found.losses, eager.losses) and torch.equal(found.norms, eager.norms)
    for one, expected in zip(found.gradients, eager.gradients, strict=True):
        assert [key for key in expected if not torch.equal(one[key], expected[key])] == []
    assert found.pool_while_open > 0 and found.pool_when_closed == 0


@HAS_OPTIMIZER_GRAPH
@pytest.mark.usefixtures("deterministic")
def test_a_capturable_optimizer_trains_as_another_does() -> None:
    """The learning rate moves losses by more than rounding, and some steps are clipped."""
    found, plain = (trained_with_updates("dense", EAGER, capturable) for capturable in (True, False))
    constant = trained_with_updates("dense", EAGER, schedule="constant")
    assert (plain.norms > CLIP).any()
    torch.testing.assert_close(found.losses, plain.losses, rtol=0, atol=3e-2)
    torch.testing.assert_close(found.norms, plain.norms, rtol=1e-1, atol=0)
    assert not torch.equal(found.losses, constant.losses)


@HAS_OPTIMIZER_GRAPH
@pytest.mark.usefixtures("deterministic")
def test_no_step_with_a_captured_optimizer_waits_for_the_device() -> None:
    assert trained_with_updates("dense", UPDATED).host_ms is not None


def deterministic_of(spec: RunSpec, fuses: bool) -> RunSpec:
    training = replace(spec.training, deterministic=True, gradient_accumulation_fusion=fuses)
    return replace(spec, training=training)


@cache
def eager_twins_overlapped() -> tuple[Trained, Trained]:
    first, second = (trained(spec_of(DENSE, EAGER, Parallelism(**OVERLAPPED))) for _ in range(2))
    return first, second


@pytest.mark.parametrize(
    "graph",
    [CudaGraph("transformer_engine"), CudaGraph("transformer_engine", ("attn",)), CudaGraph("local"), WHOLE],
    ids=str,
)
def test_graphs_compute_what_eager_code_computes_beside_exchanges(graph: CudaGraph) -> None:
    check(trained(spec_of(DENSE, graph, Parallelism(**OVERLAPPED))), *eager_twins_overlapped(), graph)


IN_8_BITS = [
    ("dense", CudaGraph("transformer_engine")),
    ("dense", CudaGraph("transformer_engine", ("attn",))),
    ("dense", CudaGraph("local")),
    ("dense", WHOLE),
    ("moe", CudaGraph("transformer_engine", ROUTED)),
    ("padded", WHOLE),
]


def in_8_bits(name: str, graph: CudaGraph, fp8: Any) -> RunSpec:
    spec = spec_of(MODELS[name], graph)
    return replace(spec, training=replace(spec.training, fp8=fp8))


@cache
def eager_twins_in_8_bits(name: str, fp8: Any) -> tuple[Trained, Trained]:
    first, second = (trained(in_8_bits(name, EAGER, fp8)) for _ in range(2))
    return first, second


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("case", IN_8_BITS, ids=named)
def test_graphs_compute_what_eager_code_computes_in_8_bits(case: tuple[str, CudaGraph], fp8: Any) -> None:
    """Scales continue from step to step, and micro-batches share the casts of weights."""
    name, graph = case
    check(trained(in_8_bits(name, graph, fp8)), *eager_twins_in_8_bits(name, fp8), graph)


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_what_is_refused_computes_something_else(case: tuple[str, CudaGraph]) -> None:
    """If this test fails, remove the row of launch.support that names this fault of Megatron-Core."""
    name, graph = case
    assert len(unsupported(spec_of(MODELS[name], graph))) > len(unsupported(spec_of(MODELS["padded"], graph)))
    eager, again = eager_twins(name)
    found = trained(spec_of(MODELS[name], graph))
    noise = difference(again, eager, slice(graph.capture_step + 1, None))
    off = difference(found, eager, slice(graph.capture_step + 1, None))
    assert off[0] > MARGINS.loss + 4 * noise[0] or off[1] > MARGINS.grad_norm + 4 * noise[1], (off, noise)


def test_local_graphs_as_released_lose_the_input_of_the_first_layer() -> None:
    """If this test fails, remove the row of launch.support about local graphs."""
    eager, again = eager_twins("dense")
    found = trained_as_released(spec_of(DENSE, CudaGraph("local")))
    wrong, noisy = (gradients_apart(run.gradients[1], eager.gradients[1]) for run in (found, again))
    apart = {name for name, by in wrong.items() if by > OF_A_GRADIENT + 4 * noisy[name]}
    lost = "0.module.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in apart
    assert lost == (RELEASE == "0.16"), wrong
    assert not [name for name in apart if "layers.1" in name], wrong


@pytest.mark.parametrize("graph", [CudaGraph("transformer_engine", ("attn",)), CudaGraph("local"), WHOLE], ids=str)
def test_another_shape_is_refused(graph: CudaGraph) -> None:
    from launch.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(spec_of(DENSE, graph), RankPlace(0, 1, torch.device("cuda", 0)))
    tokens = torch.randint(256, (MICRO_BATCHES, 2, 65), device="cuda")
    try:
        for _ in range(STEPS):
            engine.step(tokens)
        with pytest.raises(ReplayError, match=r"the batch has shape .*64\).* captured with .*65\)"):
            engine.step(tokens[..., :-1])
    finally:
        engine.close()


# --- on several GPUs ------------------------------------------------------------------------------------------------

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
