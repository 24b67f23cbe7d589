"""Compare the computed size of weights, gradients and optimizer state with measurements on H200s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.memory.static_memory import MASTER, MOMENTS, stages, state_bytes
from launch.contract.spec import Model, Parallelism, RunSpec, Training
from tests.presets import parameters, preset

BF16 = Training(precision="bf16")
SEEN = {
    # Bytes that the allocator held after the build, in runs whose optimizer already has its state (docs/results).
    "qwen3_8l": (preset("qwen3_8l"), 91_126_114_816),
    "launch_bound": (
        Model(
            num_layers=24, hidden_size=1024, num_attention_heads=16, num_query_groups=16, kv_channels=64,
            ffn_hidden_size=2816, vocab_size=18944,
        ),
        6_248_321_536,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_an_h200_held_was_forecast_to_four_kilobytes(name: str) -> None:
    model, allocated = SEEN[name]
    assert 0 <= allocated - state_bytes(RunSpec(model=model, training=BF16)) < 4096


@pytest.mark.parametrize("name", ["gpt_oss_20b", "gpt_oss_120b", "qwen3_30b_a3b", "llama3_8b", "qwen3_8l"])
def test_parameters_of_one_rank_are_those_of_the_model(name: str) -> None:
    model = preset(name)
    (held,) = stages(model, Parallelism())
    assert held.dense + held.experts == parameters(model, embeddings=1 if model.tie_embeddings else 2)


def test_ranks_share_what_the_layout_says() -> None:
    """ep splits experts, and the ranks with the same experts share their optimizer state. tp splits all other weights,
    and dp shares their state."""
    model = preset("qwen3_8l")
    (whole,) = stages(model, Parallelism())
    layout = Parallelism(ep=4, dp=8, distributed_optimizer=True)
    (held,) = stages(model, layout)
    assert (held.dense, held.experts) == (whole.dense, whole.experts // 4)
    own = MOMENTS + MASTER
    found = state_bytes(RunSpec(model=model, parallelism=layout, training=BF16))
    assert found == 6 * (held.dense + held.experts) + own * held.dense // 8 + own * held.experts // 2
    (split,) = stages(model, Parallelism(tp=2, etp=2))
    assert split.experts * 2 == whole.experts and split.dense < whole.dense * 0.6


def test_a_hybrid_model_has_the_parameters_of_its_layers() -> None:
    """Attention and an MLP in layers of their own have the parameters of one layer with both. A Mamba-2 layer has those that
    Megatron-Core's MambaMixer makes."""
    model = replace(preset("hybrid_12l"), num_layers=2)
    (apart,), (together,) = (
        stages(replace(model, hybrid_override_pattern="*-"), Parallelism()),
        stages(replace(model, num_layers=1, hybrid_override_pattern=""), Parallelism()),
    )
    assert apart == together
    (mamba,) = stages(replace(model, hybrid_override_pattern="*-M", num_layers=3), Parallelism())
    hidden, inner, convolved, heads = 1024, 2048, 4096, 32
    projections = hidden * (inner + convolved + heads) + inner * hidden
    assert mamba.dense - apart.dense == hidden + projections + 5 * convolved + inner + 3 * heads


def test_the_fullest_stage_counts() -> None:
    """The last of two stages has the output head and the last norm. The first has the embedding, which is as large as
    the head."""
    model = replace(preset("llama3_8b"), num_layers=4)
    first, last = stages(model, Parallelism(pp=2))
    assert last.dense - first.dense == model.hidden_size
    tied = replace(model, tie_embeddings=True)
    assert stages(tied, Parallelism(pp=2)) == [first, last]
    assert stages(tied, Parallelism())[0].dense == first.dense + last.dense - model.vocab_size * model.hidden_size


@pytest.mark.parametrize(
    ("precision", "gradients", "optimizer", "an_element"),
    [
        ("bf16", "fp32", "fp32", 18),
        ("bf16", "bf16", "fp32", 16),
        ("fp32", "fp32", "fp32", 16),
        ("bf16", "fp32", "lean", 12),
        ("bf16", "bf16", "lean", 10),
    ],
)
def test_bytes_of_an_element(precision: str, gradients: str, optimizer: str, an_element: int) -> None:
    training = Training(precision=precision, gradient_precision=gradients, optimizer_precision=optimizer)
    spec = RunSpec(training=training)
    (held,) = stages(spec.model, spec.parallelism)
    assert state_bytes(spec) == an_element * held.dense
