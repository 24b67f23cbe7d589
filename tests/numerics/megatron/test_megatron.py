"""Test one model in two engines: Megatron-Core trains the same as torch_native, from the same initial weights, in
float32.

Every case is three optimizer steps of Megatron-Core's own layers, schedule, gradient buffers and optimizer.
"""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from launch.contract.errors import EnvironmentFault, UnsupportedError
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import CudaGraph, Model, Parallelism, Placement, RunSpec, Training
from launch.engines.megatron.build import build, check_release
from launch.engines.megatron.init.mamba_weights import mamba_weights
from launch.engines.megatron.init.weight_map import Layout, Origin, find_origin, to_megatron
from launch.engines.profile_ranges import RANGES
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.parallel.process_groups import Group
from launch.megatron_config.transformer_config import (
    data_parallel_settings,
    model_settings,
    optimizer_settings,
    transformer_settings,
)
from launch.support import unsupported
from tests.distributed import RankError, workers
from tests.megatron_release import RELEASE
from tests.numerics.megatron.megatron_on_cpu import OF_CUDA, cpu_as_cuda, logits_of, train_megatron
from tests.numerics.megatron.megatron_weights import from_megatron
from tests.numerics.tiny import CPU, DENSE, GPT_OSS, MOE, logits, make_spec, train
from tests.presets import PRESETS, preset

LOSS, NORM, WEIGHT = 5e-6, 2e-5, 1e-5
"""Two relative tolerances, and an absolute one of a thousandth of what an optimizer step changes at this learning rate.
"""


@dataclass(frozen=True)
class Case:
    model: Model
    training: dict[str, Any] = field(default_factory=dict)
    parallelism: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> RunSpec:
        layout = Parallelism(**self.parallelism)
        settings = {"steps": 3, "global_batch_size": 8, "micro_batch_size": 2, **self.training}
        spec = make_spec(self.model, **settings)
        return replace(spec, parallelism=layout, data=replace(spec.data, **self.data))


CALM_GPT_OSS = replace(GPT_OSS, init_std=0.4)
"""Steps of the other GPT-OSS model amplify rounding errors."""
SIGMOID = replace(MOE, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
LLAMA_3 = replace(
    DENSE,
    qk_layernorm=False,
    rope_scaling="llama3",
    rope_scaling_factor=8.0,
    rope_original_max_position=8192,
    rotary_base=500_000.0,
)
PACKED = {"packed_sequences": True, "eod_token": 3, "max_documents": 6}
"""Sequences of 1 to 4 documents in these runs."""
ONE_PACK = {"micro_batch_size": 1, "sequence_length": 32}
ALONE = {
    "dense": Case(DENSE),
    "llama 3": Case(LLAMA_3),
    "tied, with qkv biases": Case(replace(DENSE, tie_embeddings=True, add_qkv_bias=True)),
    "biases everywhere": Case(replace(DENSE, add_bias_linear=True)),
    "experts": Case(MOE),
    "experts through all-gather": Case(MOE, {}, {"dispatcher": "allgather"}),
    "weights are shares of all experts": Case(replace(MOE, moe_router_normalize_topk=False)),
    "router losses": Case(replace(MOE, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01)),
    "expert bias": Case(replace(SIGMOID, moe_router_bias_update_rate=0.05)),
    "expert bias and router losses": Case(replace(SIGMOID, moe_aux_loss_coeff=0.1)),
    "dense and expert layers": Case(replace(MOE, moe_layer_freq=2)),
    "a shared expert": Case(replace(MOE, moe_shared_expert_ffn_hidden_size=12)),
    "experts padded to capacity": Case(
        # The engines drop different rows of equal ones. With this seed all rows of a micro-batch differ.
        replace(MOE, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
        {"seed": 4},
    ),
    "gpt-oss": Case(CALM_GPT_OSS),
    "distributed optimizer": Case(MOE, {}, {"distributed_optimizer": True}),
    "selective recomputation": Case(MOE, {"recompute": "selective"}),
    "full recomputation": Case(MOE, {"recompute": "full"}),
    "modules recomputed": Case(
        replace(MOE, moe_layer_freq=2, moe_shared_expert_ffn_hidden_size=12),
        {"recompute": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp", "shared_experts")},
    ),
    "experts recomputed": Case(MOE, {"recompute": "selective", "recompute_modules": ("moe",)}),
    "packed": Case(LLAMA_3, ONE_PACK, {}, PACKED),
    "packed, experts and router losses": Case(
        replace(MOE, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01), ONE_PACK, {}, PACKED
    ),
    "packed, yarn and windows": Case(replace(CALM_GPT_OSS, attention_sinks=False), ONE_PACK, {}, PACKED),
    "unclipped": Case(DENSE, {"clip_grad": 0.0}),
    "clipped": Case(DENSE, {"clip_grad": 0.1, "learning_rate_warmup_steps": 2}),
}
EVEN = replace(MOE, vocab_size=32)
EVEN_GPT_OSS = replace(CALM_GPT_OSS, vocab_size=32)
STEERED = replace(
    SIGMOID, vocab_size=32, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01, moe_shared_expert_ffn_hidden_size=12
)
PADDED = replace(EVEN, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
TOGETHER = {
    "packed, pp": Case(EVEN, ONE_PACK, {"pp": 2}, PACKED),
    "packed, tp": Case(replace(DENSE, vocab_size=32), ONE_PACK, {"tp": 2, "etp": 2, "sequence_parallel": True}, PACKED),
    "dp": Case(EVEN, {}, {"dp": 2}),
    "dp, distributed optimizer": Case(EVEN, {}, {"dp": 2, "distributed_optimizer": True}),
    "dp, gradients in the backward pass": Case(EVEN, {}, {"dp": 2, "overlap_grad_reduce": True}),
    "dp, parameters in the forward pass": Case(EVEN, {}, {"dp": 2, **OVERLAPPED}),
    "pp, dp, both": Case(EVEN, {}, {"pp": 2, "dp": 2, **OVERLAPPED}),
    "vpp, dp, both": Case(
        replace(EVEN, num_layers=4), {}, {"pp": 2, "vpp": 2, "dp": 2, "schedule": "interleaved", **OVERLAPPED}
    ),
    "ep, dp, both": Case(EVEN, {}, {"dp": 4, "ep": 2, **OVERLAPPED}),
    "cp": Case(DENSE, {}, {"cp": 2}),
    "cp, experts, router losses": Case(STEERED, {}, {"cp": 2}),
    "cp, dp, ep": Case(EVEN, {}, {"cp": 2, "dp": 2, "ep": 4, "distributed_optimizer": True}),
    "tp, cp": Case(
        replace(DENSE, vocab_size=32), {"sequence_length": 16}, {"tp": 2, "cp": 2, "sequence_parallel": True}
    ),
    "cp, pp": Case(replace(EVEN, tie_embeddings=True), {}, {"cp": 2, "pp": 2}),
    "tp, etp": Case(STEERED, {}, {"tp": 2, "etp": 2, "sequence_parallel": True}),
    "tp, etp, ep, dp": Case(EVEN, {}, {"tp": 2, "etp": 2, "ep": 2, "dp": 2, "sequence_parallel": True}),
    "etp beyond tp": Case(EVEN, {}, {"dp": 4, "ep": 2, "etp": 2, **OVERLAPPED}),
    "etp through all-gather": Case(
        EVEN, {}, {"tp": 2, "etp": 2, "ep": 2, "dp": 2, "sequence_parallel": True, "dispatcher": "allgather"}
    ),
    "tp": Case(replace(DENSE, vocab_size=32), {}, {"tp": 2}),
    "tp, sequence parallel": Case(replace(DENSE, vocab_size=32), {}, {"tp": 2, "sequence_parallel": True}),
    "pp": Case(replace(EVEN, tie_embeddings=True), {"recompute": "full"}, {"pp": 2}),
    "vpp": Case(replace(EVEN, num_layers=4, tie_embeddings=True), {}, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
    "ep": Case(EVEN, {}, {"dp": 2, "ep": 2}),
    "ep, padded": Case(PADDED, {"seed": 6, "steps": 1}, {"dp": 2, "ep": 2}),
    "tp, ep of gpt-oss": Case(EVEN_GPT_OSS, {}, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "tp, ep, dp": Case(
        STEERED, {}, {"tp": 2, "ep": 2, "dp": 2, "sequence_parallel": True, "distributed_optimizer": True}
    ),
    "tp, pp, ep": Case(
        replace(EVEN, moe_layer_freq=2),
        {"recompute": "selective"},
        {"tp": 2, "pp": 2, "ep": 2, "sequence_parallel": True},
    ),
}


def train_native(spec: RunSpec) -> dict[str, Any]:
    """Return the results of :func:`train_megatron`, but of torch_native on one rank."""
    alone = replace(spec, parallelism=Parallelism())
    engine = TorchNativeEngine(alone, RankPlace(0, 1, CPU))

    def weights() -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in engine.chunks[0].named_parameters()}

    before = weights()
    results = train(engine, alone)
    return {
        "loss": torch.stack([result.loss for result in results]),
        "grad_norm": torch.stack([result.grad_norm for result in results]),
        "before": before,
        "after": weights(),
    }


@pytest.mark.parametrize("name", ALONE)
def test_megatron_trains_what_torch_native_trains(name: str) -> None:
    spec = ALONE[name].spec
    expected, found = train_native(spec), train_megatron(spec)
    torch.testing.assert_close(found["before"], expected["before"], rtol=0, atol=0)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=LOSS, atol=0)
    torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=NORM, atol=0)
    torch.testing.assert_close(found["after"], expected["after"], rtol=0, atol=WEIGHT)


def test_packed_sequences_get_the_same_number_of_borders() -> None:
    """A document ends after each end token. Surplus documents are empty, and an end in the last place begins no other."""
    from launch.engines.megatron.packed_sequences import document_borders

    rows = torch.tensor([[5, 3, 7, 8, 9, 3, 3, 1], [1, 2, 4, 5, 6, 7, 8, 3], [3, 2, 4, 5, 6, 3, 8, 9]])
    expected = [[0, 2, 6, 7, 8, 8], [0, 8, 8, 8, 8, 8], [0, 1, 6, 8, 8, 8]]
    found = document_borders(rows, 3, 5)
    assert found.dtype == torch.int32 and found.tolist() == expected
    assert document_borders(rows, 3, 4).tolist() == [row[:5] for row in expected]
    assert document_borders(rows[0], 3, 12).tolist() == [*expected[0], *[8] * 7]


EXHAUSTIVE = {"pp, dp, both", "cp, dp, ep", "tp, ep, dp", "etp through all-gather"}
"""Combinations of what others combine too."""


def slow_on_many_ranks(cases: Mapping[str, Case]) -> list[Any]:
    """Two ranks show each kind of parallelism by itself. More ranks show combinations."""
    many = [name for name, case in cases.items() if case.spec.parallelism.world_size > 2]
    marks = {name: pytest.mark.exhaustive if name in EXHAUSTIVE else pytest.mark.slow for name in many}
    return [pytest.param(name, marks=marks[name]) if name in many else name for name in cases]


@pytest.mark.parametrize("name", slow_on_many_ranks(TOGETHER))
def test_ranks_train_what_one_trains(name: str) -> None:
    spec = TOGETHER[name].spec
    expected = train_native(spec)
    for found in workers(spec.parallelism.world_size).run(train_megatron, spec):
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=LOSS, atol=0)
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=NORM, atol=0)


BESIDE: dict[str, Case] = {
    "ep": Case(STEERED, {}, {"dp": 2, "ep": 2}),
    "packed, ep": Case(EVEN, ONE_PACK, {"dp": 2, "ep": 2}, PACKED),
    "ep, dp, exchanges beside passes": Case(EVEN, {}, {"dp": 4, "ep": 2, **OVERLAPPED}),
    "a rank with a part of one expert": Case(
        replace(EVEN, num_moe_experts=2), {}, {"tp": 2, "etp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}
    ),
    "vpp, ep": Case(replace(EVEN, num_layers=4), {}, {"pp": 2, "vpp": 2, "dp": 2, "ep": 2, "schedule": "interleaved"}),
    "dense and expert layers": Case(
        replace(EVEN, num_layers=3, moe_layer_freq=2), {"recompute": "selective"}, {"dp": 2, "ep": 2}
    ),
}


def with_and_without(case: Case) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    spec = replace(case, training={**case.training, "precision": "bf16"}).spec
    beside = replace(spec, parallelism=replace(spec.parallelism, overlap_moe_expert_parallel_comm=True))
    ranks = workers(spec.parallelism.world_size)
    return ranks.run(train_megatron, beside), ranks.run(train_megatron, spec)


def test_megatron_core_leaves_the_last_norm_out_behind_a_dense_layer() -> None:
    """launch.support rejects it for this reason."""
    found, expected = with_and_without(Case(replace(EVEN, moe_layer_freq=2), {"steps": 1}, {"dp": 2, "ep": 2}))
    assert (found[0]["loss"] - expected[0]["loss"]).abs() > 1e-1


def is_refused(spec: RunSpec) -> bool:
    return bool(unsupported(replace(spec, engine="megatron", placement=Placement(device="cuda"))))


def test_megatron_core_freed_the_tokens_of_a_rank_with_one_expert() -> None:
    """launch.support rejects it for 0.16 for this reason."""
    case = Case(replace(EVEN, num_moe_experts=2), {"steps": 1, "precision": "bf16"}, {"dp": 2, "ep": 2})
    freed = pytest.raises(RankError, match="data is not allocated") if RELEASE == "0.16" else nullcontext()
    with freed:
        found, expected = with_and_without(case)
        torch.testing.assert_close(found[0]["loss"], expected[0]["loss"], rtol=LOSS, atol=0)
    beside = replace(case.spec.parallelism, overlap_moe_expert_parallel_comm=True)
    assert is_refused(replace(case.spec, parallelism=beside)) == (RELEASE == "0.16")


def test_experts_drifted_apart_without_ep_where_etp_is_not_tp() -> None:
    """launch.support rejects it for 0.16 for this reason."""
    spec = Case(EVEN, {}, {"tp": 2, "sequence_parallel": True}).spec
    norm = workers(2).run(train_megatron, spec)[0]["grad_norm"]
    drifted = not torch.allclose(norm, train_native(spec)["grad_norm"], rtol=NORM, atol=0)
    assert drifted == is_refused(spec) == (RELEASE == "0.16")


@pytest.mark.parametrize("name", slow_on_many_ranks(BESIDE))
def test_tokens_that_are_exchanged_beside_computations_give_the_same(name: str) -> None:
    """The overlap uses a different schedule, and needs 16 bits."""
    for found, expected in zip(*with_and_without(BESIDE[name]), strict=True):
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=LOSS, atol=0)
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=NORM, atol=0)


@pytest.mark.parametrize("model", [LLAMA_3, MOE, GPT_OSS], ids=["llama 3", "experts", "gpt-oss, clamped"])
def test_logits_are_the_same(model: Model) -> None:
    tokens = torch.randint(model.vocab_size, (2, 8), generator=torch.Generator().manual_seed(3))
    spec = Case(model).spec
    expected = logits(TorchNativeEngine(spec, RankPlace(0, 1, CPU)).chunks[0], tokens)
    found = logits_of(spec, tokens)
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5 * expected.abs().max().item())


def test_the_loop_finds_what_it_asks_an_engine_for() -> None:
    spec = replace(Case(DENSE, {"steps": 5}).spec, cuda_graph=CudaGraph(warmup_steps=2))
    found = train_megatron(spec)
    assert found["kind"] == ["warmup", "warmup", "steady", "steady", "steady"]
    assert found["capture_step"] is None
    assert found["choices"] == {"layers": "modules of Megatron-Core"}
    assert GraphStats(**found["graph_stats"]) == GraphStats(impl="none", mechanism="eager")
    assert {(result.dtype, result.shape) for result in found["own"]} == {(torch.float32, torch.Size([]))}
    assert len({result.data_ptr() for result in found["own"]}) == 2 * spec.training.steps


def test_a_profile_names_micro_batches_and_what_megatron_core_names() -> None:
    nvtx = OF_CUDA["nvtx"]
    nvtx.reset_mock()
    with mock.patch.object(RANGES, "are_named", True):
        train_megatron(Case(DENSE, {"steps": 1}).spec)
    assert mock.call("micro-batch forward") in nvtx.range.call_args_list
    assert any("self_attention" in call.args[0] for call in nvtx.range_push.call_args_list)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_bfloat16_is_near(distributed_optimizer: bool) -> None:
    layout = {"distributed_optimizer": distributed_optimizer}
    found = train_megatron(Case(DENSE, {"precision": "bf16", "steps": 6}, layout).spec)
    expected = train_native(Case(DENSE, {"precision": "bf16", "steps": 6}).spec)
    # The rounding of a bfloat16 weight is at most 4e-3 of the weight.
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-2, atol=0)
    torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=5e-2, atol=0)


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_what_was_seen_to_train_is_what_plans_let_through(name: str) -> None:
    spec = replace((ALONE | TOGETHER)[name].spec, engine="megatron", placement=Placement(device="cuda"))
    if spec.parallelism.cp > 1:  # Transformer Engine's attention supports context parallelism only in 16 bits.
        spec = replace(spec, training=replace(spec.training, precision="bf16"))
    assert unsupported(spec) == ()


@pytest.mark.parametrize("name", PRESETS)
def test_megatron_core_accepts_every_preset(name: str) -> None:
    model = preset(name)
    spec = RunSpec(engine="megatron", megatron_core=RELEASE, model=model, placement=Placement(device="cuda"))
    assert unsupported(spec) == ()
    with cpu_as_cuda():
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.mamba import MambaModel
        from megatron.core.optimizer import OptimizerConfig

        from launch.engines.megatron.model import Configuration, make_config

        config = make_config(spec, "local", CPU)
        assert config.num_layers == model.num_layers
        # Megatron-Core refuses these fusions without Transformer Engine. So check only that their names are fields.
        assert set(transformer_settings(spec)) <= {field.name for field in fields(Configuration)}
        arguments = {name for name in model_settings(spec) if not name.startswith("yarn_")}
        # In 0.19 MambaModel only renames an argument of its base class.
        classes = MambaModel.__mro__[:2] if model.is_hybrid else (GPTModel,)
        assert arguments <= {name for each in classes for name in signature(each.__init__).parameters}
        DistributedDataParallelConfig(**data_parallel_settings(spec))
        OptimizerConfig(**optimizer_settings(spec))


def test_divided_groups_of_parameters_train_the_same() -> None:
    """Results are equal bit for bit, with the rate and decay of each group. PyTorch's AdamW replaces FusedAdam."""
    spec = Case(MOE, {"weight_decay": 0.1, "clip_grad": 0.1}, {"distributed_optimizer": True}).spec
    expected = train_megatron(spec)
    with cpu_as_cuda() as engine:
        make, split_groups = engine.get_megatron_optimizer, engine.split_groups
    sizes: list[int] = []

    def make_divided(*arguments: Any, **named: Any) -> Any:
        optimizer = make(*arguments, **named)
        whole = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        split_groups(optimizer, 300)
        groups = [group["params"] for group in optimizer.param_groups]
        assert [id(parameter) for group in groups for parameter in group] == whole
        assert all(len(group) == 1 or sum(map(torch.numel, group)) <= 300 for group in groups)
        sizes.extend(map(len, groups))
        return optimizer

    with mock.patch.object(engine, "get_megatron_optimizer", make_divided):
        found = train_megatron(spec)
    assert len(sizes) > 4 and max(sizes) > 1
    for name in ("loss", "grad_norm", "after"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


def test_megatron_core_takes_a_lean_optimizer_as_it_is_meant() -> None:
    """Its update needs Transformer Engine and a GPU, so a class with the same arguments replaces it."""

    class FusedAdam:
        def __init__(
            self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
        ) -> None: ...

    training = Training(precision="bf16", optimizer_precision="lean")
    spec = RunSpec(engine="megatron", training=training, parallelism=Parallelism(dp=2, distributed_optimizer=True))
    with cpu_as_cuda():
        from megatron.core.optimizer import optimizer_config

        from launch.engines.megatron.engine import optimizer_config_of

        module = SimpleNamespace(FusedAdam=FusedAdam)
        stand_in = {
            "transformer_engine": None,
            "transformer_engine.pytorch": None,
            "transformer_engine.pytorch.optimizers": module,
        }
        with (
            mock.patch.dict(sys.modules, stand_in),
            mock.patch.object(optimizer_config, "is_te_min_version", lambda _: True),
        ):
            config = optimizer_config_of(spec, torch.bfloat16)
    assert config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and config.store_param_remainders
    assert (config.exp_avg_dtype, config.exp_avg_sq_dtype) == (torch.bfloat16, torch.bfloat16)
    assert (config.main_params_dtype, config.params_dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("fp8", "recipe"), [("delayed", "delayed"), ("current", "tensorwise")])
def test_megatron_core_takes_fp8_as_it_is_meant(fp8: Any, recipe: str) -> None:
    """Multiplying in 8 bits needs Transformer Engine and a GPU."""
    spec = Case(DENSE, {"precision": "bf16", "fp8": fp8}).spec
    with cpu_as_cuda():
        from megatron.core.enums import Fp8Recipe

        from launch.engines.megatron.model import make_config

        config = make_config(spec, "local", CPU)
    assert (config.fp8, Fp8Recipe(config.fp8_recipe).name, config.fp8_param) == ("hybrid", recipe, False)
    assert config.params_dtype == torch.bfloat16


@st.composite
def attentions(draw: st.DrawFn) -> tuple[Model, int]:
    """Draw a model, and a number of tensor-parallel ranks that divides its query groups."""
    ranks, groups, queries = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    groups *= ranks
    channels = draw(st.sampled_from([2, 6]))
    return Model(num_attention_heads=groups * queries, num_query_groups=groups, kv_channels=channels), ranks


@given(attentions(), st.sampled_from(get_args(Layout)))
def test_layouts_are_carried_there_and_back(attention: tuple[Model, int], layout: Layout) -> None:
    model, ranks = attention
    rows = (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    whole = torch.arange(rows * 8.0).view(rows, 8)
    assert torch.equal(from_megatron(to_megatron(whole, layout, model, Group()), layout, model), whole)
    if layout != "whole":
        parts = [to_megatron(whole, layout, model, Group(rank, ranks)) for rank in range(ranks)]
        assert torch.equal(torch.cat([part.flatten() for part in parts]).sort().values, whole.flatten())


def test_queries_stand_before_their_key_and_value() -> None:
    model = Model(num_attention_heads=4, num_query_groups=2, kv_channels=1)
    rows = torch.tensor([0, 1, 2, 3, 10, 11, 20, 21]).unsqueeze(1)
    assert to_megatron(rows, "qkv", model, Group()).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert to_megatron(rows, "qkv", model, Group(1, 2)).flatten().tolist() == [2, 3, 11, 21]


def test_names_of_both_kinds_of_layers_mean_the_same() -> None:
    for grouped, one in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.experts.linear_fc1.weight5", "mlp.experts.local_experts.5.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.bias12", "mlp.experts.local_experts.12.linear_fc2.bias"),
    ):
        assert find_origin(f"decoder.layers.7.{grouped}", 32) == find_origin(f"decoder.layers.7.{one}", 32)
    assert find_origin("decoder.layers.7.mlp.experts.linear_fc1.weight5", 32) == Origin(
        "layers.7.mlp.gate_up", "expert_gate_up", 37
    )
    with pytest.raises(UnsupportedError, match=r"decoder\.layers\.0\.mlp\.experts\.weight1 has no counterpart"):
        find_origin("decoder.layers.0.mlp.experts.weight1")


def test_the_engine_refuses_by_name_and_says_what_to_install() -> None:
    spec = RunSpec(engine="megatron", cuda_graph=CudaGraph(impl="local"))
    with pytest.raises(UnsupportedError, match=r"cuda_graph\.impl=local.*resources\.device=cpu"):
        build(spec, RankPlace(0, 1, CPU))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(EnvironmentFault, match=r"needs the package transformer-engine.*\.\[gpu\]"):
            build(RunSpec(engine="megatron", placement=Placement(device="cuda")), RankPlace(0, 1, CPU))
    check_release(importlib.metadata.version("megatron-core"), RELEASE)
    with pytest.raises(
        EnvironmentFault, match=r"megatron_core=0\.16, but megatron-core 0\.18\.2 is installed; install"
    ):
        check_release("0.18.2", "0.16")
    with pytest.raises(
        EnvironmentFault, match=r"megatron_core=0\.16, but .* 0\.19\.2 is installed; set megatron_core to '0\.19'"
    ):
        check_release("0.19.2", "0.16")


def test_a_router_adds_its_bias_in_the_precision_of_the_output() -> None:
    """cuBLASLt reads the bias as numbers of the output's type, whatever its own, and so beyond its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core warns about missing features without Transformer Engine.
        from megatron.core.transformer.moe import moe_utils

        from launch.engines.megatron.router_bias import router_bias_converted, uses_product

    assert not uses_product(), "Transformer Engine is not installed"
    experts, channels, tokens = 4, 8, 6
    memory = torch.randn(2 * experts).bfloat16()  # the bias, and what lies behind it
    weight, rows, bias = (
        torch.randn(experts, channels).bfloat16(),
        torch.randn(tokens, channels).bfloat16(),
        memory[:experts],
    )

    def product(
        weight: torch.Tensor, rows: torch.Tensor, output: torch.dtype, layout: str, bias: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor]:
        read = bias if bias.dtype == output else memory.view(output)
        return (torch.addmm(read, rows.to(output), weight.to(output).T),)

    def route() -> torch.Tensor:
        routed: torch.Tensor = moe_utils.router_gating_linear(rows, weight, bias, torch.float32)
        return routed

    right = torch.addmm(bias.float(), rows.float(), weight.float().T)
    with mock.patch.object(moe_utils, "te_general_gemm", product, create=True):
        assert uses_product() and not torch.allclose(route(), right), "no repair is needed"
        with router_bias_converted():
            torch.testing.assert_close(route(), right)
        assert moe_utils.te_general_gemm is product


def test_mamba_layers_start_from_the_seed_and_name_with_the_distributions_of_megatron() -> None:
    """Names of 0.16.1 and 0.19.2 differ for the convolution. Ranges are those of MambaMixer's defaults."""

    def drawn(part: str, seed: int = 1) -> torch.Tensor | None:
        origin = find_origin(f"decoder.layers.4.mixer.{part}")
        assert origin.parameter.startswith("layers.4.mamba.") and origin.layout == "whole"
        return mamba_weights(origin.parameter, (4096,), seed, torch.device("cpu"))

    kernel, steps, decay, skip = map(drawn, ("conv1d.weight", "dt_bias", "A_log", "D"))
    assert kernel is not None and steps is not None and decay is not None and skip is not None
    torch.testing.assert_close(kernel, drawn("conv1d_weight"), rtol=0, atol=0)
    sizes, rates = torch.nn.functional.softplus(steps), decay.exp()
    for values, low, high in ((kernel, -0.5, 0.5), (sizes, 0.001, 0.1), (rates, 1.0, 16.0)):
        assert low - abs(low) / 1000 <= values.min() < values.max() <= high * 1.001
    assert kernel.mean().abs() < 0.02 and abs(sizes.log().mean().exp() - 0.01) < 5e-4 and abs(rates.mean() - 8.5) < 0.3
    assert torch.equal(skip, torch.ones(4096))
    others = drawn("dt_bias", seed=2)
    assert others is not None and not torch.equal(steps, others)
    assert drawn("in_proj.weight") is None and drawn("norm.weight") is None
