"""Test that each model preset loads as a Model, and has the number of parameters that its authors published."""

from __future__ import annotations

import dataclasses

import pytest

from tests.presets import PRESETS, parameters, preset

TOTAL = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
}
"""Elements of the published checkpoints, as Hugging Face counts them in the safetensors files. GPT-OSS's files pack the
experts. Its numbers come from its model card, which gives two decimals of a billion: 20.91 and 116.83."""

ACTIVE = {
    "qwen3_30b_a3b": (3.3, 2),
    "qwen3_235b_a22b": (22, 2),
    "gpt_oss_20b": (3.61, 1),
    "gpt_oss_120b": (5.13, 1),
}
"""Published billions of active parameters per token, and how many of embedding and output layer they include. GPT-OSS's
exclude the embedding (model card, arXiv 2508.10925, table 1), Qwen3's include both."""


def test_the_shipped_presets_are_these() -> None:
    assert set(PRESETS) == {*TOTAL, "hybrid_12l", "qwen3_8l", "tiny_dense", "tiny_moe"}


@pytest.mark.parametrize("name", TOTAL)
def test_a_preset_has_its_published_number_of_parameters(name: str) -> None:
    assert parameters(preset(name)) == TOTAL[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_a_preset_has_its_published_number_of_active_parameters(name: str) -> None:
    model = preset(name)
    billions, embeddings = ACTIVE[name]
    # A published 3.3 stands for 3.25 to 3.35. It may also be truncated, from 3.353.
    assert parameters(model, model.moe_router_topk, embeddings) == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_its_name_to_the_recipe(name: str) -> None:
    assert preset(name).preset == ""


@pytest.mark.parametrize(
    ("part", "whole", "sizes"),
    [
        ("qwen3_8l", "qwen3_30b_a3b", {"num_layers", "vocab_size"}),
        ("llama3_70b", "llama3_8b", {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"}),
        ("gpt_oss_20b", "gpt_oss_120b", {"num_layers", "num_moe_experts"}),
        (
            "qwen3_235b_a22b",
            "qwen3_30b_a3b",
            {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "moe_ffn_hidden_size"},
        ),
    ],
)
def test_models_of_a_family_differ_in_sizes_alone(part: str, whole: str, sizes: set[str]) -> None:
    one, other = (dataclasses.asdict(preset(name)) for name in (part, whole))
    assert {field for field in one if one[field] != other[field]} == sizes
