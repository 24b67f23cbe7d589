"""The terms of a rank's eager step, and of memory outside the allocator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from operator import attrgetter

from analysis.memory.activations import FP32, logits_bytes, routed_tokens, tensors_of_width, tokens_of
from analysis.memory.rank_load import CellLoad, RankLoad
from analysis.memory.static_memory import Part
from analysis.memory.term import Term, mib, times_constant, total
from launch.contract.spec import RunSpec

STATE, EAGER = "analysis/memory/static_memory.py", "analysis/memory/eager_terms.py"
ACTIVATIONS = "analysis/memory/activations.py"
NATIVE = "launch/engines/torch_native"
FP8_WEIGHTS = "Transformer Engine 2.11, pytorch/module/base.py, get_weight_workspace"
RING = "Transformer Engine 2.11, pytorch/attention/dot_product_attention/context_parallel.py"
PACKED = "Transformer Engine 2.11, common/fused_attn/utils.cu, get_max_batch_size and get_max_tokens"
COMPILED = f"{NATIVE}/compiled_model.py"
RECOMPUTATION = f"{NATIVE}/layers/recomputation.py"
NOTHING: frozenset[Part] = frozenset()


@lru_cache(maxsize=4)
def step(rank: RankLoad, captured: frozenset[Part] = NOTHING) -> tuple[Term, ...]:
    """Return the terms of what a step computes outside the graphs of the parts ``captured``."""
    return (*_activations(rank, captured), *_in_passing(rank, captured))


def eager_step(rank: RankLoad) -> tuple[Term, ...]:
    """Return the terms of a step without graphs."""
    terms = (*between_steps(rank), *step(rank))
    return (*terms, *_kept_by_allocator(rank, total(terms)))


@lru_cache(maxsize=4)
def between_steps(rank: RankLoad, streams: int = 1) -> tuple[Term, ...]:
    """Return the terms of what stays from step to step. Each stream that multiplies matrices has its own workspaces."""
    state, element = rank.state, rank.cell.element
    elements = state.weights // element
    own, layers = state.optimizer / elements, _workspaces_of_layers(rank.cell)
    more = ": 2 a stream, of {}" + (", and {} of Transformer Engine" if layers else "")
    return (
        Term("weights", state.weights, "{:,} elements x {} bytes", (elements, element), STATE),
        Term("gradients", state.gradients, "{:,} elements x {:g} bytes", (elements, state.gradients / elements), STATE),
        Term("optimizer state", state.optimizer, "{:,} elements x {:.3g} bytes", (elements, own), STATE),
        times_constant(rank.cell.constants.workspace, 2 * streams + layers, "allocated", more, (streams, layers)),
        *_fp8_casts(rank),
    )


def _fp8_casts(rank: RankLoad) -> Iterator[Term]:
    """Yield the fp8 casts of the layers' weights. All micro-batches share them, or each pass in flight has its own.

    A product reads its weight by rows in the forward pass and by columns in the backward pass. Each cast takes one byte per
    element, and Transformer Engine keeps both if it knows ``is_first_microbatch``. Scales take a few bytes per matrix. Embeddings, routers and the output layer are not cast.
    """
    if rank.spec.training.fp8 == "none":
        return
    cast: tuple[Part, ...] = ("attention", "mamba", "mlp", "experts")
    layers = [
        (rank.layers_with.get(part, 0) * rank.spec.parallelism.vpp, rank.cell.layer_weights(part)) for part in cast
    ]
    elements = round(sum(count * weights for count, weights in layers) / rank.cell.element)
    casts = 2 if rank.spec.training.fp8_weight_caching else 2 * rank.passes
    yield Term("fp8 casts of weights", casts * elements, "{:,} elements x {} x 1 byte", (elements, casts), FP8_WEIGHTS)


def held_bytes(rank: RankLoad, streams: int) -> int:
    """Return the sum of :func:`between_steps`."""
    return rank.between_steps + (2 * streams + _workspaces_of_layers(rank.cell)) * round(
        rank.cell.constants.workspace.value
    )


def _workspaces_of_layers(cell: CellLoad) -> int:
    """Return the bytes of Transformer Engine's workspaces: one, and four for grouped products of experts."""
    if cell.is_native and cell.spec.training.fp8 == "none":
        return 0
    return 5 if cell.spec.model.is_moe else 1


def _activations(rank: RankLoad, captured: frozenset[Part]) -> Iterator[Term]:
    """Yield the terms of what forward passes keep for backward passes, except in ``captured`` parts."""
    for part, kept in rank.kept.items():
        if part not in captured:
            layers = rank.layers_with[part]
            each = (rank.passes, layers, kept / layers)
            formula = "{} passes in flight x {:g} layers x {:,.0f} bytes"
            yield Term(f"activations: {part}", rank.passes * kept, formula, each, ACTIVATIONS)
    if rank.expected_imbalance and "experts" not in captured:
        constant = rank.cell.constants.imbalance
        values = (mib(rank.held_by_experts), constant.value)
        yield Term("expert imbalance", rank.expected_imbalance, "{:.0f} MiB x ({:g} - 1)", values, constant.measured)
    if rank.spec.training.recompute == "full":
        yield _recomputation(rank)
    elif rank.spec.training.recompute == "selective":
        yield _selective_recomputation(rank, captured)


def _recomputation(rank: RankLoad) -> Term:
    """Return the (negative) term of full recomputation, which keeps the inputs of all layers."""
    kept = rank.passes * sum(rank.kept.values()) + rank.expected_imbalance
    stays = min(kept, round(rank.passes * rank.layers * rank.cell.layer_input))
    values = (rank.passes, rank.layers, rank.cell.layer_input)
    formula = "{} passes in flight x {:g} layers x {:,} bytes of input stay"
    return Term("recomputation", stays - kept, formula, values, RECOMPUTATION)


def _selective_recomputation(rank: RankLoad, captured: frozenset[Part]) -> Term:
    """Return the (negative) term of selective recomputation.

    Some modules keep only their inputs, except in the layer that is being recomputed.
    """
    less = sum(size for part, size in rank.recomputed.items() if part not in captured)
    one = round(less / rank.layers)
    formula = "{} passes in flight x {:.0f} MiB of {}, less {:.0f} MiB of one layer"
    values = (rank.passes, mib(less), ", ".join(sorted(rank.spec.training.recomputed)), mib(one))
    return Term("recomputation", one - rank.passes * less, formula, values, RECOMPUTATION)


def _in_passing(rank: RankLoad, captured: frozenset[Part]) -> Iterator[Term]:
    """Yield the terms of what is alive for a moment: the larger of loss and backward pass, and what ranks exchange."""
    moments = [_backward(rank, part) for part in rank.kept if part in ("mlp", "experts") and part not in captured]
    if rank.spec.parallelism.cp > 1 and "attention" in rank.kept and "attention" not in captured:
        moments.append(_ring(rank))
    if _reserves_packed_documents(rank.spec) and "attention" in rank.kept:
        moments.append(_packed_attention(rank.spec))
    of_layers, of_loss = [max(moments, key=attrgetter("bytes"))] if moments else [], []
    if rank.spec.training.recompute == "full":
        of_layers.append(_recomputed_layer(rank))
    if rank.is_last:
        of_loss = [max(_loss(rank), _output_layer(rank), key=attrgetter("bytes")), *_logits_block(rank)]
    of_model = [_whole_backward(rank)] if rank.spec.compiles_whole else []
    yield from max(of_layers, of_loss, of_model, key=total)
    yield from _exchanged(rank)


def _whole_backward(rank: RankLoad) -> Term:
    """Return the gradients of a compiled model beyond its activations. Its backward pass is one function and returns all of them."""
    kept = sum(rank.kept.values())
    values = (mib(rank.state.weights), mib(kept))
    formula = "{:.0f} MiB for all weights, less {:.0f} MiB of activations that are free by then"
    return Term("backward pass: gradients", max(0, rank.state.weights - kept), formula, values, COMPILED)


def _recomputed_layer(rank: RankLoad) -> Term:
    """Return what the layer that is being recomputed holds."""
    size = max(sum(kept.values()) for kept in rank.cell.kept_by_layer.values())
    return Term("recomputed layer", size, "{:,} bytes of the largest layer", (size,), RECOMPUTATION)


def _ring(rank: RankLoad) -> Term:
    """Return what attention holds while keys and values go round the ranks that share a sequence.

    Its forward pass has a buffer of keys and values for each rank, and a partial result for each, beside the whole result. Its
    backward pass needs less: two buffers of keys, values and their gradients.
    """
    spec, model, layout = rank.spec, rank.spec.model, rank.spec.parallelism
    element = rank.cell.element * tokens_of(spec) * model.kv_channels // layout.tp
    keys, queries = 2 * model.num_query_groups * element, model.num_attention_heads * element
    values = (layout.cp, mib(keys), mib(queries), mib(queries))
    formula = "{} ranks x ({:.0f} MiB of keys and values + {:.0f} MiB of partial results), and {:.0f} MiB of results"
    return Term("ring of keys and values", layout.cp * (keys + queries) + queries, formula, values, RING)


def _reserves_packed_documents(spec: RunSpec) -> bool:
    return spec.engine == "megatron" and spec.data.packed_sequences and spec.training.deterministic


def _packed_attention(spec: RunSpec) -> Term:
    """Return the workspace of cuDNN's deterministic backward pass over packed documents, as measured on an H200.

    Transformer Engine rounds their number and the sequence up, and cuDNN takes each document to be as long as the sequence.
    """
    documents, tokens = spec.data.max_documents or 1, tokens_of(spec)
    if documents <= 512:
        documents = max(32, _power_of_two(documents))
    tokens = max(1024, _power_of_two(tokens)) if tokens <= 2**15 else 2**15 * math.ceil(tokens / 2**15)
    values = (documents, spec.model.num_attention_heads // spec.parallelism.tp, tokens, 2)
    formula = "{} documents x {} heads x {:,} tokens squared x {} bytes"
    return Term("backward pass: packed attention", math.prod(values) * tokens, formula, values, PACKED)


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def _loss(rank: RankLoad) -> Term:
    values = (tokens_of(rank.spec), rank.spec.model.vocab_size // rank.spec.parallelism.tp)
    return Term(
        "logits and loss", logits_bytes(rank.spec), "{:,} tokens x {:,} logits, and copies", values, ACTIVATIONS
    )


def _logits_block(rank: RankLoad) -> Iterator[Term]:
    """Yield the block of the logits in training precision, which torch_native's eager loss frees in its forward pass.

    The fp32 gradients of the backward pass do not fit into this block.
    """
    spec = rank.spec
    if rank.cell.is_native and spec.training.compile != "elementwise" and rank.cell.element < FP32:
        values = (tokens_of(spec), spec.model.vocab_size // spec.parallelism.tp, rank.cell.element)
        yield Term(
            "unused block of logits", math.prod(values), "{:,} tokens x {:,} logits x {} bytes", values, EAGER, "cached"
        )


def _output_layer(rank: RankLoad) -> Term:
    spec, vocabulary = rank.spec, rank.spec.model.vocab_size // rank.spec.parallelism.tp
    values = (tokens_of(spec), spec.model.hidden_size, vocabulary, rank.cell.element)
    size = (values[0] + values[1]) * vocabulary * rank.cell.element
    formula = "({:,} tokens + {:,} channels) x {:,} logits x {} bytes"
    return Term("gradients of the output layer", size, formula, values, EAGER)


def _backward(rank: RankLoad, part: Part) -> Term:
    """Return the gradients of gate and up and of rows, less the activations that the layer frees meanwhile."""
    spec, model, layout = rank.spec, rank.spec.model, rank.spec.parallelism
    weights = 0 if spec.training.gradient_accumulation_fusion else rank.cell.layer_weights(part) * 2 // 3
    experts = part == "experts"
    rows = rank.cell.rows.mean if experts else tokens_of(spec)
    width = model.moe_ffn_hidden_size // layout.etp if experts else model.ffn_hidden_size // layout.tp
    given_back = (tensors_of_width(spec, weighted=experts) - 2) * width
    moving = max(0, rows * (model.hidden_size - given_back) * rank.cell.element)
    values = (mib(weights), rows)
    return Term(f"backward pass: {part}", weights + moving, "{:.0f} MiB of weights, and {:,} rows", values, EAGER)


def _exchanged(rank: RankLoad) -> Iterator[Term]:
    """Yield the communication buffers, if any.

    Two tensors are sent and two received between stages. Rows of experts are sent and received, too.
    """
    spec, layout = rank.spec, rank.spec.parallelism
    stages = 4 * rank.cell.layer_input if layout.pp > 1 else 0
    rows = 0
    if layout.ep > 1 and "experts" in rank.kept:
        rows = rank.cell.rows.mean if layout.dispatcher == "alltoall" else layout.ep * routed_tokens(spec)
    experts = 2 * rows * spec.model.hidden_size * rank.cell.element
    if stages or experts:
        values = (mib(stages), mib(experts))
        formula = "{:.0f} MiB between stages, {:.0f} MiB of experts' rows"
        yield Term("communication buffers", stages + experts, formula, values, f"{NATIVE}/parallel/pipeline.py")


def _kept_by_allocator(rank: RankLoad, allocated: int) -> Iterator[Term]:
    """Yield the blocks that held the weights before they had a buffer, and the unused parts of blocks.

    torch_native's steps reuse the former. Megatron-Core's steps do, too, unless its graphs have their own stream.
    """
    copy, source = rank.state.weights, "launch/engines/megatron/side_stream.py"
    if rank.cell.is_native:
        copy, source = max(0, rank.between_steps + copy - allocated), f"{NATIVE}/optim/flat_parameters.py"
    elif rank.spec.cuda_graph.impl not in ("local", "full_iteration"):
        copy = 0
    if copy:
        values = (mib(rank.state.weights),)
        yield Term("first copy of weights", copy, "of {:.0f} MiB, what nothing reuses", values, source, "cached")
    yield from unused_blocks(rank, allocated + copy)


def unused_blocks(rank: RankLoad, allocated: int, captured: frozenset[Part] = NOTHING) -> Iterator[Term]:
    """Yield the parts of blocks that hold no tensor.

    They are a fixed size of torch_native's few large blocks, and otherwise a share of the allocated bytes.
    """
    if rank.cell.is_native:
        most, step = rank.cell.constants.native_unused, max(0, allocated - held_bytes(rank, 2))
        values = (mib(most.value), mib(step))
        formula = "{:.0f} MiB, at most the {:.0f} MiB of a step"
        yield Term("unused blocks", min(round(most.value), step), formula, values, most.measured, "cached")
        return
    share = rank.cell.constants.megatron_unused
    values = (share.value, mib(allocated))
    yield Term(
        "unused blocks", round(share.value * allocated), "{:.0%} of {:.0f} MiB", values, share.measured, "cached"
    )
    if rank.expected_imbalance and "experts" not in captured:
        changing, kept = rank.cell.constants.changing_blocks, rank.held_by_experts + rank.expected_imbalance
        values = (changing.value, mib(kept))
        formula = "{:g} x {:.0f} MiB of experts: each routing needs blocks of other sizes"
        yield Term("changing blocks", round(changing.value * kept), formula, values, changing.measured, "cached")


def outside(cell: CellLoad) -> tuple[Term, ...]:
    """Return the terms of the context, kernels and communicators of a rank of any stage."""
    layout, constants = cell.spec.parallelism, cell.constants
    several = layout.world_size > 1
    kernels = [constants.eager_kernels] if several else [constants.native_kernels] if cell.is_native else []
    if not cell.is_native:
        kernels.append(constants.megatron_kernels)
    terms = [times_constant(constant) for constant in (constants.context, *kernels)]
    degrees = (layout.tp, layout.cp, layout.dp, layout.pp, layout.ep)
    if groups := several + sum(degree > 1 for degree in degrees) + (0 if cell.is_native else 4):
        more = ": all ranks, each kind of parallelism" + ("" if cell.is_native else ", 4 groups of Megatron-Core")
        terms.append(times_constant(constants.communicator, groups, more=more))
    if layout.pp > 1 or layout.cp > 1 or (layout.ep > 1 and layout.dispatcher == "alltoall"):
        terms.append(times_constant(constants.peers))
    return tuple(terms)
