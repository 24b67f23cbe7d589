"""Test the work of a step: what adds up, what doubles, and the written-out formulas of one layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.limits.step_work import KINDS, StepWork, Work, work_of_stages
from analysis.memory.static_memory import bytes_of_stages
from launch.contract.model_flops import PASSES, model_flops
from launch.contract.spec import CudaGraph, Model, Parallelism, RunSpec, Training

DENSE = Model(
    num_layers=4, hidden_size=64, num_attention_heads=8, num_query_groups=4, kv_channels=16, ffn_hidden_size=96,
    vocab_size=512,
)  # fmt: skip
MOE = replace(DENSE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32, moe_layer_freq=2)
SHARED = replace(MOE, moe_layer_freq=1, moe_shared_expert_ffn_hidden_size=48, qk_layernorm=True)
MODELS = (DENSE, MOE, SHARED, replace(DENSE, window_size=32, window_attn_skip_freq=2))


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    """Draw layouts that divide the model and the batch evenly."""
    model = draw(st.sampled_from(MODELS))
    tp, dp, pp = (draw(st.sampled_from((1, 2))) for _ in range(3))
    vpp = draw(st.sampled_from((1, 2))) if pp > 1 else 1
    layout = Parallelism(
        tp=tp, dp=dp, pp=pp, vpp=vpp, schedule="interleaved" if vpp > 1 else "1f1b",
        ep=draw(st.sampled_from((1, 2))) if model.is_moe and tp * dp > 1 else 1,
        sequence_parallel=tp > 1 and draw(st.booleans()), distributed_optimizer=draw(st.booleans()),
    )  # fmt: skip
    training = Training(
        sequence_length=128, micro_batch_size=2, global_batch_size=16, precision=draw(st.sampled_from(("fp32", "bf16"))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
    )  # fmt: skip
    return RunSpec(model=model, parallelism=layout, training=training, engine="megatron")


def with_training(spec: RunSpec, **changes: object) -> RunSpec:
    return replace(spec, training=replace(spec.training, **changes))  # type: ignore[arg-type]


def with_layout(spec: RunSpec, **changes: object) -> RunSpec:
    return replace(spec, parallelism=replace(spec.parallelism, **changes))  # type: ignore[arg-type]


def whole(spec: RunSpec) -> StepWork:
    """Return the work of all ranks together."""
    ranks, found = spec.parallelism.stage_size, dict.fromkeys(KINDS, Work())
    for stage in work_of_stages(spec):
        found = {kind: found[kind] + stage[kind].times(ranks) for kind in KINDS}
    return found


def operations(spec: RunSpec) -> float:
    return sum(work.operations for work in whole(spec).values())


@given(specs())
def test_all_ranks_together_take_the_operations_of_the_model(spec: RunSpec) -> None:
    assert operations(with_training(spec, recompute="none")) == pytest.approx(model_flops(spec), rel=1e-12)


@given(specs())
def test_stages_add_up_to_the_whole(spec: RunSpec) -> None:
    """A rank's number of micro-batches does not depend on the number of stages."""
    staged, one = whole(spec), whole(with_layout(spec, pp=1, vpp=1, schedule="1f1b"))
    for kind in KINDS:
        assert staged[kind].operations == pytest.approx(one[kind].operations, rel=1e-12)
        assert staged[kind].bytes == pytest.approx(one[kind].bytes, rel=1e-12)


@given(specs())
def test_twice_the_batch_takes_twice_the_operations_and_one_update(spec: RunSpec) -> None:
    once, twice = whole(spec), whole(with_training(spec, global_batch_size=2 * spec.training.global_batch_size))
    for kind in KINDS:
        assert twice[kind].operations == pytest.approx(2 * once[kind].operations, rel=1e-12)
    assert twice["optimizer"] == once["optimizer"]
    assert twice["elementwise"].bytes == pytest.approx(2 * once["elementwise"].bytes, rel=1e-12)
    # The first micro-batch writes gradients without reading them.
    for kind in ("dense", "logits"):
        assert 2 * once[kind].bytes < twice[kind].bytes < 2.5 * once[kind].bytes


@given(specs())
def test_recomputation_adds_a_forward_pass_of_layers(spec: RunSpec) -> None:
    none, full = whole(with_training(spec, recompute="none")), whole(with_training(spec, recompute="full"))
    for kind in ("grouped", "attention"):
        assert full[kind].operations == pytest.approx(none[kind].operations * (PASSES + 1) / PASSES, rel=1e-12)
    for same in ("logits", "optimizer"):
        assert full[same] == none[same]
    assert none["dense"].operations < full["dense"].operations <= none["dense"].operations * (PASSES + 1) / PASSES
    assert none["elementwise"].bytes < full["elementwise"].bytes < 2 * none["elementwise"].bytes
    core = whole(with_training(spec, recompute="selective"))
    assert core == {**none, "attention": full["attention"]}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_dense_layer_on_one_gpu_moves_what_is_written_out_here(precision: str) -> None:
    """The step sends one micro-batch of 256 tokens through one layer: 2 norms, 4 products, attention, and AdamW."""
    model = replace(DENSE, num_layers=1)
    spec = with_training(
        RunSpec(model=model), sequence_length=128, micro_batch_size=2, global_batch_size=2, precision=precision
    )
    (work,) = work_of_stages(spec)
    tokens, element, gradient = 256, 2 if precision == "bf16" else 4, 4
    shapes = [(64, 256), (128, 64), (64, 192), (96, 64)]
    weights = sum(n * k for n, k in shapes)
    rows = sum(3 * tokens * (n + k) for n, k in shapes)
    assert work["dense"] == Work(6 * tokens * weights, (rows + 2 * weights) * element + weights * gradient)
    assert work["attention"] == Work(3 * 2 * tokens * 2 * 128 * 64, 3 * tokens * 2 * (128 + 64) * element)
    head = 64 * 512
    assert work["logits"] == Work(6 * tokens * head, (3 * tokens * (64 + 512) + 2 * head) * element + head * gradient)
    norms, rotation, activation, embedding, loss = 3 * 8 * 64, 4 * (128 + 64), 8 * 96, 4 * 64, 3 * 512
    assert work["elementwise"].bytes == tokens * (norms + rotation + activation + embedding + loss) * element
    elements = weights + 2 * head + 3 * 64
    # The gradient's norm reads the gradients once more.
    moments_and_masters = 2 * (12 if precision == "bf16" else 8) + (2 if precision == "bf16" else 2 * 4)
    assert work["optimizer"].bytes == elements * (moments_and_masters + 2 * gradient)


def test_experts_move_their_weights_once_for_few_rows() -> None:
    """Two tokens reach at most four of eight experts."""
    few = with_training(RunSpec(model=SHARED), sequence_length=2, micro_batch_size=1, global_batch_size=1)
    many = with_training(few, sequence_length=4)
    expert, rows = 3 * 64 * 32, 3 * (64 + 64 + 32 + 64)
    assert work_of_stages(few)[0]["grouped"].bytes == 4 * 4 * (4 * (expert * 3) + 4 * rows)
    assert work_of_stages(many)[0]["grouped"].bytes == 4 * 4 * (8 * (expert * 3) + 8 * rows)


def test_dropped_tokens_take_no_operations() -> None:
    kept = RunSpec(model=SHARED, training=Training(sequence_length=128, global_batch_size=4))
    dropping = replace(kept, model=replace(SHARED, moe_expert_capacity_factor=0.5))
    assert work_of_stages(dropping)[0]["grouped"].operations == work_of_stages(kept)[0]["grouped"].operations / 2


def test_the_distributed_optimizer_divides_the_update() -> None:
    spec = with_layout(RunSpec(model=DENSE), dp=4)
    sharded = with_layout(spec, distributed_optimizer=True)
    assert work_of_stages(sharded)[0]["optimizer"].bytes * 4 == work_of_stages(spec)[0]["optimizer"].bytes
    unclipped = with_training(spec, clip_grad=0.0)
    (clipped,), (free,) = work_of_stages(spec), work_of_stages(unclipped)
    elements = bytes_of_stages(spec)[0] / 16
    assert clipped["optimizer"].bytes - free["optimizer"].bytes == 4 * elements


def test_a_graph_changes_no_work() -> None:
    eager = RunSpec(model=MOE)
    assert work_of_stages(replace(eager, cuda_graph=CudaGraph(impl="torch"))) == work_of_stages(eager)


def test_a_users_program_has_unknown_work() -> None:
    spec = RunSpec(engine="command")
    assert work_of_stages(spec) == []
