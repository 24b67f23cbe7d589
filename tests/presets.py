"""Read model presets, and count a model's parameters from its sizes alone."""

from __future__ import annotations

from pathlib import Path

import yaml

from launch.contract.spec import Model

MODELS = Path(__file__).parents[1] / "recipes" / "models"
PRESETS = sorted(path.stem for path in MODELS.glob("*.yaml"))


def preset(name: str) -> Model:
    return Model(**yaml.safe_load((MODELS / f"{name}.yaml").read_text()))


def parameters(model: Model, experts: int | None = None, embeddings: int = 2) -> int:
    """Return the number of parameters of ``model``.

    Count ``experts`` in each layer (None: all), and both the embedding and the output layer or one of them.
    """
    layer = _attention(model) + _feed_forward(model, experts) + 2 * model.hidden_size
    return model.num_layers * layer + model.hidden_size + embeddings * model.vocab_size * model.hidden_size


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + bias * outputs


def _attention(model: Model) -> int:
    queries = model.num_attention_heads * model.kv_channels
    keys = model.num_query_groups * model.kv_channels
    count = _linear(model.hidden_size, queries + 2 * keys, model.add_qkv_bias or model.add_bias_linear)
    count += _linear(queries, model.hidden_size, model.add_bias_linear)
    return count + 2 * model.kv_channels * model.qk_layernorm + model.num_attention_heads * model.attention_sinks


def _gated_mlp(model: Model, width: int) -> int:
    return _linear(model.hidden_size, 2 * width, model.add_bias_linear) + _linear(
        width, model.hidden_size, model.add_bias_linear
    )


def _feed_forward(model: Model, experts: int | None) -> int:
    if not model.is_moe:
        return _gated_mlp(model, model.ffn_hidden_size)
    router = _linear(model.hidden_size, model.num_moe_experts, model.add_bias_linear)
    chosen = model.num_moe_experts if experts is None else experts
    return router + chosen * _gated_mlp(model, model.moe_ffn_hidden_size)
