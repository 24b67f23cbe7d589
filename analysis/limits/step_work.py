"""The work of a rank in an optimizer step, by kind: floating-point operations, and bytes that move to and from its memory.

The counts follow from the recipe alone. They leave out all that another implementation could avoid: padding, copies, zeroing,
and the traffic between operations that a compiler can fuse. Experts have an even load, and drop tokens above their capacity.
A rank has r rows in a micro-batch: tokens, or tokens at one of their experts. An element has e bytes, a gradient g.

- **Products** (dense, grouped, logits). A row times a weight of n x k takes 2nk operations in the forward pass and twice as many
  in the backward pass (launch/contract/model_flops.py). Each of the three products reads two tensors and writes one: 3 r (n + k)
  e bytes for rows, 2nk e for reading the weight, and nk g for the gradient, which all micro-batches but the first also read.
- **Attention**. Scores stay on the chip (Dao et al., arXiv:2205.14135), and recomputing them in the backward pass does not count.
  Queries, keys and values are read and the result is written. The backward pass reads these and the result's gradient, and
  writes three gradients. The scan of a Mamba-2 layer counts as attention: it reads what the layer's first product wrote and
  writes the input of its second, three times as in products. Convolution and states stay on the chip.
- **Elementwise**. A residual addition with its norm reads two tensors and writes two; backward, it reads three and writes one.
  Rotation, activation, dispatch and combination of experts' rows, the embedding, and the loss over logits follow the same rule:
  each tensor moves once.
- **Optimizer**. It reads gradients, twice if it clips them, since the norm must be known first. It reads and writes moments and
  master weights, and writes weights (analysis/memory/static_memory.py).

The router's product, biases, the gates of a router and random masks do not count: they are small beside these. Recomputation
adds the forward pass of what it repeats (Korthikanti et al., arXiv:2205.05198), without an MLP's last product, whose result no
backward pass reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from analysis.memory.activations import expert_rows, routed_tokens, sharded_tokens, tokens_of
from analysis.memory.static_memory import BYTES, gradient_bytes, state_of_stages, updated_parameters
from launch.contract.mamba_sizes import STATE, inner_width, projected_width
from launch.contract.model_flops import (
    MULTIPLY_ADD,
    PASSES,
    SCAN,
    Product,
    attention_multiplies,
    layer_products,
    logits_product,
    mlp_width,
    queries,
)
from launch.contract.pipeline_stages import layers_of_stages
from launch.contract.spec import LayerPart, RunSpec

Kind = Literal["dense", "grouped", "attention", "logits", "elementwise", "optimizer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Piece = Literal["attention", "core_attn", "layernorm", "mlp", "experts", "moe_act"]
"""The pieces of a layer that recomputation repeats. "attention" has its projections and rotation, "experts" also the dispatch."""
REPEATED: Mapping[str, tuple[Piece, ...]] = {
    "core_attn": ("core_attn",),
    "layernorm": ("layernorm",),
    "mlp": ("mlp",),
    "shared_experts": ("mlp",),
    "moe": ("mlp", "experts", "moe_act"),
    "moe_act": ("moe_act",),
}
"""The pieces that selective recomputation repeats, by Megatron's name of the module. "moe" includes a shared expert."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes read and written."""

    operations: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)

    def times(self, count: float) -> Work:
        return Work(self.operations * count, self.bytes * count)


StepWork = Mapping[Kind, Work]


def work_of_stages(spec: RunSpec) -> list[StepWork]:
    """Return the work of a rank in a step, by pipeline stage. It is empty for a user's program, whose model is unknown."""
    if spec.engine == "command":
        return []
    layers = layers_of_stages(spec.model.num_layers, spec.parallelism.pp, spec.parallelism.vpp)
    return [_sum(_stage(spec, stage, numbers)) for stage, numbers in enumerate(layers)]


def _sum(parts: Iterable[tuple[Kind, Work]]) -> StepWork:
    found = dict.fromkeys(KINDS, Work())
    for kind, work in parts:
        found[kind] += work
    return found


def _stage(spec: RunSpec, stage: int, numbers: Iterable[int]) -> Iterator[tuple[Kind, Work]]:
    for number in numbers:
        yield from _layer(spec, number)
    if stage == 0:
        yield "elementwise", _passes(spec, sharded_tokens(spec), 2 * spec.model.hidden_size, 2 * spec.model.hidden_size)
    if stage == spec.parallelism.pp - 1:
        yield from _output(spec)
    yield "optimizer", _optimizer(spec, stage)


def _layer(spec: RunSpec, number: int) -> Iterator[tuple[Kind, Work]]:
    model, parts = spec.model, spec.model.parts_of_layer(number)
    repeated = repeated_pieces(spec, "experts" in parts)
    for part, products in layer_products(model, number).items():
        kind: Kind = "grouped" if part == "experts" else "dense"
        for product in products:
            again = part in repeated and not (part == "mlp" and product is products[-1])
            yield kind, _product(spec, part, product, again)
    if "attention" in parts:
        yield "attention", _attention(spec, number, "core_attn" in repeated)
    if "mamba" in parts:
        yield "attention", _scan(spec)
    for piece, work in _elementwise_pieces(spec, parts):
        yield "elementwise", work[0] + work[1] + (work[0] if piece in repeated else Work())


def repeated_pieces(spec: RunSpec, has_experts: bool) -> frozenset[Piece]:
    """Return the pieces of a layer that are computed twice in the forward direction."""
    if spec.training.recompute == "full":
        return frozenset(get_args(Piece))
    elsewhere = {"mlp"} if has_experts else {"shared_experts", "moe", "moe_act"}
    return frozenset(piece for name in spec.training.recomputed - elsewhere for piece in REPEATED[name])


# --- products and attention -----------------------------------------------------------------------------------------


def _product(spec: RunSpec, part: LayerPart | None, product: Product, again: bool) -> Work:
    """Return the work of ``product`` in a step. ``part`` is None for the logits."""
    training, layout, passes = spec.training, spec.parallelism, PASSES + again
    element, gradient = BYTES[training.precision], gradient_bytes(spec.training)
    experts = part == "experts"
    rows, ranks = (_expert_rows(spec), layout.etp) if experts else (tokens_of(spec), layout.tp)
    # An expert without a row reads and writes nothing.
    held = min(spec.model.num_moe_experts // layout.ep, max(1.0, rows)) if experts else 1
    width = sum(
        size / ranks if side == product.split else size
        for side, size in (("inputs", product.inputs), ("outputs", product.outputs))
    )
    weights, microbatches = held * product.weights / ranks, spec.num_microbatches
    moved = (rows * width * passes + weights * (passes - 1)) * element * microbatches
    accumulated = weights * gradient * (2 * microbatches - 1)
    operations = MULTIPLY_ADD * passes * rows * product.weights / ranks * microbatches
    return Work(operations, moved + accumulated)


def _attention(spec: RunSpec, number: int, again: bool) -> Work:
    model, layout, passes = spec.model, spec.parallelism, PASSES + again
    tokens = tokens_of(spec) * spec.num_microbatches / layout.tp
    multiplies = attention_multiplies(model, number, spec.training.sequence_length)
    moved = 2 * (queries(model) + model.num_query_groups * model.kv_channels) * BYTES[spec.training.precision]
    return Work(MULTIPLY_ADD * passes * multiplies * tokens, moved * passes * tokens)


def _scan(spec: RunSpec) -> Work:
    """Return the work of a Mamba-2 layer between its projections: it reads z, x, B, C and step sizes, and writes the result."""
    model, tokens = spec.model, tokens_of(spec) * spec.num_microbatches
    moved = (projected_width(model) + inner_width(model)) * BYTES[spec.training.precision]
    return Work(PASSES * SCAN * inner_width(model) * STATE * tokens, PASSES * moved * tokens)


def _expert_rows(spec: RunSpec) -> float:
    """Return the rows of a rank's experts in a micro-batch, without the empty rows of buffers."""
    even = routed_tokens(spec) * spec.parallelism.etp * spec.model.moe_router_topk
    return min(even, expert_rows(spec).mean)


# --- elementwise ----------------------------------------------------------------------------------------------------


def _elementwise_pieces(spec: RunSpec, parts: Sequence[LayerPart]) -> Iterator[tuple[Piece, tuple[Work, Work]]]:
    """Yield the (forward, backward) work of the elementwise pieces of a layer with ``parts``. Each part has a norm."""
    model, layout, hidden = spec.model, spec.parallelism, spec.model.hidden_size
    normed = len(parts) * 4 * hidden
    yield "layernorm", _both(spec, sharded_tokens(spec), normed, normed)
    if "attention" in parts:
        rotated = (queries(model) + model.num_query_groups * model.kv_channels) / layout.tp
        yield "attention", _both(spec, tokens_of(spec), 2 * rotated, (2 + model.qk_layernorm) * rotated)
    width = mlp_width(model, parts) / layout.tp
    yield "mlp", _both(spec, tokens_of(spec), 3 * width, 5 * width)
    if "experts" in parts:
        rows, width = _expert_rows(spec), model.moe_ffn_hidden_size / layout.etp
        yield "moe_act", _both(spec, rows, 3 * width, 5 * width)
        # Tokens become rows and rows become tokens; a backward pass also reads rows for the gradient of probabilities.
        yield "experts", _both(spec, routed_tokens(spec), 2 * hidden, 2 * hidden)
        yield "experts", _both(spec, rows, 2 * hidden, 3 * hidden)


def _output(spec: RunSpec) -> Iterator[tuple[Kind, Work]]:
    """Yield the last norm, the logits and the loss, which reads logits twice and writes their gradient."""
    hidden, vocabulary = spec.model.hidden_size, spec.model.vocab_size / spec.parallelism.tp
    yield "logits", _product(spec, None, logits_product(spec.model), again=False)
    yield "elementwise", _passes(spec, sharded_tokens(spec), 4 * hidden, 4 * hidden)
    yield "elementwise", _passes(spec, tokens_of(spec), vocabulary, 2 * vocabulary)


def _passes(spec: RunSpec, rows: float, forward: float, backward: float) -> Work:
    first, second = _both(spec, rows, forward, backward)
    return first + second


def _both(spec: RunSpec, rows: float, forward: float, backward: float) -> tuple[Work, Work]:
    """Return the work of the forward and of the backward pass, given the elements that each moves per row of a micro-batch."""
    moved = rows * spec.num_microbatches * BYTES[spec.training.precision]
    return Work(bytes=moved * forward), Work(bytes=moved * backward)


# --- optimizer ------------------------------------------------------------------------------------------------------


def _optimizer(spec: RunSpec, stage: int) -> Work:
    training, elements = spec.training, updated_parameters(spec)[stage]
    # Without separate master weights, the weights are read too.
    own_masters = training.precision == "bf16" and training.optimizer_precision == "fp32"
    weights = elements * BYTES[training.precision] * (1 if own_masters else 2)
    gradients = elements * gradient_bytes(spec.training) * (2 if training.clip_grad else 1)
    return Work(bytes=2 * state_of_stages(spec)[stage].optimizer + weights + gradients)
