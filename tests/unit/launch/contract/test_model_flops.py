"""Compare the operations of a model with Megatron's formula, written out, and test what each part adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.contract.model_flops import flops_per_token, model_flops
from launch.contract.spec import Model, RunSpec, Training
from tests.presets import parameters, preset

SEQUENCE = 4096


def megatron(model: Model, sequence: int) -> float:
    """Return a token's share of ``num_floating_point_operations`` of Megatron-LM (megatron/training/training.py). The
    model has no windows, and experts in all layers or in none."""
    queries, keys = model.kv_channels * model.num_attention_heads, model.kv_channels * model.num_query_groups
    projections = model.hidden_size * (queries + keys + keys) + queries * model.hidden_size
    core = queries / 2 * 2 * sequence
    wide = model.moe_ffn_hidden_size * model.moe_router_topk + model.moe_shared_expert_ffn_hidden_size
    feed_forward = model.hidden_size * 3 * (wide if model.is_moe else model.ffn_hidden_size)
    logits = model.hidden_size * model.vocab_size
    return 3 * 2 * (model.num_layers * (projections + core + feed_forward) + logits)


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b", "tiny_moe"])
def test_it_is_what_megatron_counts(name: str) -> None:
    model = preset(name)
    assert flops_per_token(model, SEQUENCE) == pytest.approx(megatron(model, SEQUENCE), rel=1e-12)


def test_a_dense_model_takes_six_for_each_weight_that_a_token_meets() -> None:
    """The embedding and the norms need no matrix product."""
    model = preset("llama3_8b")
    norms = (2 * model.num_layers + 1) * model.hidden_size
    attention = 6 * model.num_layers * model.num_attention_heads * model.kv_channels * SEQUENCE
    assert flops_per_token(model, SEQUENCE) == 6 * (parameters(model, embeddings=1) - norms) + attention


def test_a_window_saves_what_it_does_not_see() -> None:
    """With a window of w in a sequence of s, tokens see 1, 2, ... w, w, ... keys."""
    model = Model(num_layers=1, window_size=128)
    whole = replace(model, window_size=0)
    saved = (flops_per_token(whole, SEQUENCE) - flops_per_token(model, SEQUENCE)) / (6 * 2 * 4 * 16)
    seen = sum(min(token, 128) for token in range(1, SEQUENCE + 1)) / SEQUENCE
    assert saved == pytest.approx(SEQUENCE / 2 - seen, rel=1e-6)
    assert flops_per_token(replace(model, window_size=SEQUENCE), SEQUENCE) == flops_per_token(whole, SEQUENCE)


def test_dense_layers_among_those_with_experts_count_as_dense() -> None:
    model = Model(num_layers=4, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32, ffn_hidden_size=512)
    every_second = replace(model, moe_layer_freq=2)
    more = flops_per_token(every_second, 128) - flops_per_token(model, 128)
    assert more == 6 * 2 * 3 * 64 * (512 - 2 * 32)


def test_a_hybrid_model_counts_each_layer_as_megatron_does() -> None:
    """``mamba_layer_flops`` of Megatron-LM (core_r0.19.0 megatron/training/training.py) for one layer's forward pass."""
    model = preset("hybrid_12l")
    hidden, inner, state, groups, heads = 1024, 2048, 128, 8, 32
    mamba = 2 * hidden * (2 * inner + 2 * groups * state + heads) + 7 * inner * state + 2 * inner * hidden
    without = replace(model, hybrid_override_pattern=model.hybrid_override_pattern.replace("M", "?"))
    assert flops_per_token(model, SEQUENCE) - flops_per_token(without, SEQUENCE) == 3 * 5 * mamba
    dense = replace(model, hybrid_override_pattern="", num_layers=1)
    apart = replace(model, hybrid_override_pattern="*-", num_layers=2)
    assert flops_per_token(apart, SEQUENCE) == flops_per_token(dense, SEQUENCE)


def test_a_step_is_of_the_global_batch() -> None:
    spec = RunSpec(training=Training(global_batch_size=16, micro_batch_size=2, sequence_length=256))
    assert model_flops(spec) == flops_per_token(spec.model, 256) * 16 * 256
