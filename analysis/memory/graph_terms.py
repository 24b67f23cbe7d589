"""The terms that graphs add: pools, static inputs and outputs, and a copy for each micro-batch in flight."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.memory.eager_terms import between_steps, step, unused_blocks
from analysis.memory.rank_load import CellLoad, RankLoad
from analysis.memory.term import Term, mib, times_constant, total

HERE = "analysis/memory/graph_terms.py"
CALLABLES = "launch/engines/torch_native/graphs/layer_callables.py"


def graph_executables(cell: CellLoad) -> Term:
    return times_constant(cell.constants.graph_executables)


def layer_capture(rank: RankLoad, eager: Sequence[Term]) -> list[Term]:
    """Return the terms of the capture of layers after ``eager`` steps.

    All forward passes are captured before the first backward pass, so all activations are alive at once. ``torch`` captures
    each micro-batch separately and keeps its weight gradients, which take the place of activations. Other implementations reuse
    the weight gradients of two layers.
    """
    apart = rank.spec.cuda_graph.impl == "torch"
    passes = 1 if apart else rank.passes
    kept, weights = passes * rank.captured_kept, rank.captured_weights
    gradients = weights if apart else round(2 * weights / rank.layers)
    alive = max(kept, gradients) + (rank.passes - 1) * gradients if apart else kept + gradients
    formula = "{} passes x {:.0f} MiB of activations, and {:.0f} MiB of gradients"
    of_passes = (passes, mib(rank.captured_kept), mib(gradients))
    terms = [*between_steps(rank, 2), _static(rank), Term("captured passes", alive, formula, of_passes, CALLABLES)]
    # A layer's warm-up passes run on another stream and reuse no block of the eager steps.
    layer, held = round((rank.captured_kept + weights) / rank.layers), total(terms)
    before = total(eager)
    more = max(before + layer - held, total(unused_blocks(rank, held, rank.cell.captured)))
    formula = "{:.0f} MiB of eager steps, and {:.0f} MiB of a layer's warm-up pass on another stream"
    values = (mib(before), mib(layer))
    return [*terms, Term("kept from before", more, formula, values, HERE, "cached")]


def layer_replay(rank: RankLoad) -> list[Term]:
    """Return the terms of a step with graphs of layers. Inside their pools, torch counts only weight gradients."""
    captured = rank.cell.captured
    copies = rank.passes if rank.spec.cuda_graph.impl == "torch" else 1 / rank.layers
    values = (copies, mib(rank.captured_weights))
    gradients = round(copies * rank.captured_weights)
    pooled = Term("gradients in graph pools", gradients, "{:.3g} x {:.0f} MiB of weights", values, CALLABLES)
    terms = [*between_steps(rank, 2), _static(rank), pooled, *step(rank, captured)]
    values = (rank.passes, mib(rank.captured_kept))
    inside = _inside(rank.passes * rank.captured_kept, "{} passes in flight x {:.0f} MiB of activations", values)
    return [*terms, inside, *unused_blocks(rank, total(terms) + inside.bytes, captured)]


def _static(rank: RankLoad) -> Term:
    """Return the static inputs, outputs and input gradients. Transformer Engine and Megatron-Core share them among layers."""
    tensors = 3 if rank.spec.cuda_graph.impl == "torch" else 1
    calls = max((rank.layers_with.get(part, 0) for part in rank.cell.captured), default=0)
    if {"attention", "mlp"} <= rank.cell.captured or {"attention", "experts"} <= rank.cell.captured:
        # Attention and the feed-forward are two callables.
        calls *= 2
    values = (rank.passes, calls, tensors, mib(rank.cell.layer_input))
    formula = "{} passes in flight x {:g} callables x {} x {:.1f} MiB"
    size = round(rank.passes * calls * tensors * rank.cell.layer_input)
    return Term("static inputs and outputs", size, formula, values, CALLABLES)


def step_capture(rank: RankLoad, eager: Sequence[Term], replay: Sequence[Term]) -> list[Term]:
    """Return the terms of the capture of a whole step. A capture computes nothing."""
    terms = [*between_steps(rank, 2), *step(rank)]
    if (more := _whole_step(rank).bytes - total(step(rank))) > 0:
        # The pool keeps them, although torch no longer counts them as allocated.
        formula = "{:.3g} micro-batches x {:.0f} MiB: two streams use them, and a capture reuses no such block"
        values = (more / rank.state.weights, mib(rank.state.weights))
        terms.append(Term("gradients of earlier micro-batches", more, formula, values, HERE, "pool"))
    before, after = total(eager), total(replay)
    formula, values = "the larger of {:.0f} MiB of eager steps and {:.0f} MiB of replays", (mib(before), mib(after))
    more = max(0, max(before, after) - total(terms))
    return [*terms, Term("kept from before", more, formula, values, HERE, "cached")]


def step_replay(rank: RankLoad) -> list[Term]:
    """Return the terms of a step in one graph. Its tensors are in a pool, where torch counts none."""
    terms, inside = between_steps(rank, 2), _whole_step(rank)
    return [*terms, inside, *unused_blocks(rank, total(terms) + inside.bytes, rank.cell.captured)]


def _whole_step(rank: RankLoad) -> Term:
    """Return what the pool of a whole step's graph holds."""
    eager, weights = total(step(rank)), rank.state.weights
    if rank.cell.is_native or rank.spec.training.gradient_accumulation_fusion:
        return _inside(eager, "{:.0f} MiB of an eager step", (mib(eager),))
    # Weight gradients are used on a second stream, and a capture does not reuse such blocks.
    before = rank.spec.num_microbatches - 1
    formula = "{} micro-batches x {:.0f} MiB of gradients, and the larger of these and {:.0f} MiB of an eager step"
    return _inside(max(eager, weights) + before * weights, formula, (before, mib(weights), mib(eager)))


def _inside(size: int, formula: str, values: tuple[float, ...]) -> Term:
    return Term("inside of graph pools", size, formula, values, HERE, "pool")
