"""The model presets: each loads as a Model, and has the number of parameters that its authors published."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launch.spec import Model

MODELS = Path(__file__).parents[2] / "recipes" / "models"
PRESETS = sorted(path.stem for path in MODELS.glob("*.yaml"))

# Billions of parameters, as published: total, and active for one token (None: no such figure, or the total).
# Active counts hold the output layer; those of GPT-OSS leave the input embedding out (model card, table 1), Qwen3's
# 3.3 B has both.
PUBLISHED = {
    "llama3_8b": (8.03, None, True),
    "qwen3_30b_a3b": (30.5, 3.3, True),
    "gpt_oss_20b": (20.91, 3.61, False),
    "gpt_oss_120b": (116.83, 5.13, False),
}


def preset(name: str) -> Model:
    return Model(**yaml.safe_load((MODELS / f"{name}.yaml").read_text()))


def linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + bias * outputs


def attention(model: Model) -> int:
    queries = model.num_attention_heads * model.kv_channels
    keys = model.num_query_groups * model.kv_channels
    count = linear(model.hidden_size, queries + 2 * keys, model.add_qkv_bias or model.add_bias_linear)
    count += linear(queries, model.hidden_size, model.add_bias_linear)
    return count + 2 * model.kv_channels * model.qk_layernorm + model.num_attention_heads * model.attention_sinks


def gated_mlp(model: Model, width: int) -> int:
    return linear(model.hidden_size, 2 * width, model.add_bias_linear) + linear(
        width, model.hidden_size, model.add_bias_linear
    )


def feed_forward(model: Model, experts: int) -> int:
    if not model.is_moe:
        return gated_mlp(model, model.ffn_hidden_size)
    router = linear(model.hidden_size, model.num_moe_experts, model.add_bias_linear)
    return router + experts * gated_mlp(model, model.moe_ffn_hidden_size)


def parameters(model: Model, experts: int, embeddings: int = 2) -> int:
    layer = attention(model) + feed_forward(model, experts) + 2 * model.hidden_size
    return model.num_layers * layer + model.hidden_size + embeddings * model.vocab_size * model.hidden_size


def test_the_shipped_presets_are_these() -> None:
    assert set(PRESETS) == {*PUBLISHED, "qwen3_8l", "tiny_dense", "tiny_moe"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_its_published_number_of_parameters(name: str) -> None:
    model = preset(name)
    total, active, counts_embedding = PUBLISHED[name]
    assert parameters(model, model.num_moe_experts) == pytest.approx(total * 1e9, rel=0.01)
    if active is not None:
        count = parameters(model, model.moe_router_topk, embeddings=2 if counts_embedding else 1)
        # 3.3 stands for 3.25 to 3.35: a published figure is known to half its last digit.
        assert count == pytest.approx(active * 1e9, rel=0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_its_name_to_the_recipe(name: str) -> None:
    assert preset(name).preset == ""


def test_qwen3_8l_is_qwen3_30b_a3b_but_for_depth_and_vocabulary() -> None:
    whole, part = (yaml.safe_load((MODELS / f"{n}.yaml").read_text()) for n in ("qwen3_30b_a3b", "qwen3_8l"))
    assert {key for key in whole | part if whole.get(key) != part.get(key)} == {"num_layers", "vocab_size"}
