"""Model FLOPs of a step, counted as Megatron counts them, so that figures compare with published ones.

A product of m x n by n x k takes 2mnk operations. Each forward product has two of its size in the backward pass, which makes 6
operations per weight and token. The count includes the attention projections, the gated feed-forward (three matrices; with
experts, those of the top-k and shared experts), both projections and the scan of a Mamba-2 layer, and the output layer. It
excludes the embedding, the router, norms and elementwise operations. Attention takes 2 products (with keys, with values) per key that a token sees: on average half the
sequence under a causal mask, less with a window. Recomputation and expert padding do not count: these are FLOPs of the model,
not of the hardware.

In short, with L layers, hidden size h, feed-forward width f (of the experts that a token uses), q = heads x head size,
k = query groups x head size, vocabulary v and sequence s: 6 (L (h (2q + 2k + 3f) + q s) + h v) per token.

Sources: Chowdhery et al. (PaLM), arXiv:2204.02311, appendix B, which counts all keys; Narayanan et al., arXiv:2104.04473,
appendix; Megatron-LM, ``num_floating_point_operations`` in
megatron/training/training.py; windows as in ``calculate_swa_context`` of Megatron-Bridge's flop_utils.py. Documents of a
packed sequence count as one, which overestimates attention.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from launch.contract.mamba_sizes import STATE, inner_width, projected_width
from launch.contract.spec import LayerPart, Model, RunSpec

PASSES = 3
"""The forward product, and two of the same size backward: one for weight gradients, one for input gradients."""
MULTIPLY_ADD = 2
GATED_MATRICES = 3
"""Gate, up and down."""

SCAN = 7
"""Operations of a scan's forward pass per channel and state (Megatron-LM core_r0.19.0 megatron/training/training.py,
``mamba_layer_flops``)."""


class Product(NamedTuple):
    """The product of a row with a weight of ``inputs`` x ``outputs``. Tensor-parallel ranks split ``split``."""

    inputs: int
    outputs: int
    split: Literal["inputs", "outputs"]

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


def model_flops(spec: RunSpec) -> float:
    """Return the operations of one optimizer step over the global batch, on all GPUs together; 0 if the model is unknown."""
    if spec.engine == "command":
        return 0.0
    return flops_per_token(spec.model, spec.training.sequence_length) * tokens_per_step(spec)


def tokens_per_step(spec: RunSpec) -> int:
    return spec.training.global_batch_size * spec.training.sequence_length


def flops_per_token(model: Model, sequence_length: int) -> float:
    """Return the operations per token, forward and backward."""
    layers = sum(
        sum(_weights_per_token(model, number).values()) + mixing_multiplies(model, number, sequence_length)
        for number in range(model.num_layers)
    )
    return PASSES * MULTIPLY_ADD * (layers + logits_product(model).weights)


def _weights_per_token(model: Model, number: int) -> Mapping[LayerPart, int]:
    """Return the weights that a token meets in layer ``number``. It meets those of ``moe_router_topk`` experts."""
    return {
        part: sum(product.weights for product in products) * (model.moe_router_topk if part == "experts" else 1)
        for part, products in layer_products(model, number).items()
    }


def layer_products(model: Model, number: int) -> Mapping[LayerPart, tuple[Product, ...]]:
    """Return the products of layer ``number``, counted from 0, for each row: a token, or a token at one of its experts.

    A shared expert counts as an mlp in a layer with experts.
    """
    parts, hidden = model.parts_of_layer(number), model.hidden_size
    found: dict[LayerPart, tuple[Product, ...]] = {}
    if "attention" in parts:
        columns = queries(model) + 2 * model.num_query_groups * model.kv_channels
        found["attention"] = Product(hidden, columns, "outputs"), Product(queries(model), hidden, "inputs")
    if "mamba" in parts:
        inner = inner_width(model)
        found["mamba"] = Product(hidden, projected_width(model), "outputs"), Product(inner, hidden, "inputs")
    if width := mlp_width(model, parts):
        found["mlp"] = _gated(hidden, width)
    if "experts" in parts:
        found["experts"] = _gated(hidden, model.moe_ffn_hidden_size)
    return found


def logits_product(model: Model) -> Product:
    return Product(model.hidden_size, model.vocab_size, "outputs")


def queries(model: Model) -> int:
    """Return the columns of all queries of a token."""
    return model.num_attention_heads * model.kv_channels


def mlp_width(model: Model, parts: Collection[LayerPart]) -> int:
    """Return the width of the MLP of a layer with ``parts``, or of its shared expert; 0 if it has none."""
    if "experts" in parts:
        return model.moe_shared_expert_ffn_hidden_size
    return model.ffn_hidden_size if "mlp" in parts else 0


def mixing_multiplies(model: Model, number: int, sequence_length: int) -> float:
    """Return the multiplications per token of what layer ``number`` does between tokens: attention, or a scan."""
    parts = model.parts_of_layer(number)
    scan = SCAN * inner_width(model) * STATE / MULTIPLY_ADD if "mamba" in parts else 0.0
    return scan + (attention_multiplies(model, number, sequence_length) if "attention" in parts else 0.0)


def attention_multiplies(model: Model, number: int, sequence_length: int) -> float:
    """Return the multiplications per token of layer ``number``'s queries with keys, and of probabilities with values."""
    return 2 * queries(model) * _keys_seen(model.window_of_layer(number), sequence_length)


def _gated(hidden: int, width: int) -> tuple[Product, ...]:
    return Product(hidden, (GATED_MATRICES - 1) * width, "outputs"), Product(width, hidden, "inputs")


def _keys_seen(window: int, sequence_length: int) -> float:
    """Return the average number of keys per token. ``window`` 0 means none."""
    if not 0 < window < sequence_length:
        return sequence_length / 2
    return window - window * (window - 1) / (2 * sequence_length)
