"""A lower bound on the bytes that a rank sends in an optimizer step, by kind of parallelism.

A ring over n ranks sends 2 (n - 1) / n of a tensor to sum it on all of them, and half as many bytes to scatter the sum or to
gather its parts (Patarasuk and Yuan 2009, 10.1016/j.jpdc.2008.09.002). Recomputation repeats what a forward pass sends. The
exchange of context parallelism is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from analysis.limits.step_work import repeated_pieces
from analysis.memory.activations import routed_tokens, sharded_tokens, tokens_of
from analysis.memory.static_memory import BYTES, gradient_bytes, stages
from launch.contract.model_flops import mlp_width
from launch.contract.pipeline_stages import layers_of_stages
from launch.contract.spec import RunSpec

Exchange = Literal["data", "tensor", "expert", "pipeline"]


def bytes_sent(spec: RunSpec) -> Mapping[Exchange, float]:
    """Return the bytes that a rank sends, by kind, for the stage that sends most. Leave out kinds without any."""
    if spec.engine == "command":
        return {}
    layout = spec.parallelism
    layers = layers_of_stages(spec.model.num_layers, layout.pp, layout.vpp)
    found: dict[Exchange, float] = {
        "data": max(_data(spec, stage) for stage in range(layout.pp)),
        "tensor": max(_tensor(spec, stage, numbers) for stage, numbers in enumerate(layers)),
        "expert": max(_expert(spec, numbers) for numbers in layers),
        "pipeline": max(_pipeline(spec, stage) for stage in range(layout.pp)),
    }
    return {kind: sent for kind, sent in found.items() if sent}


def _others(ranks: int) -> float:
    """Return the share of a tensor that belongs to the other ranks of a group."""
    return (ranks - 1) / ranks


def _data(spec: RunSpec, stage: int) -> float:
    """Gradients are summed and weights or their sums gathered, over the replicas of each parameter."""
    layout, held, weight = spec.parallelism, stages(spec.model, spec.parallelism)[stage], BYTES[spec.training.precision]
    gradient = gradient_bytes(spec.training)
    gathered = weight if layout.distributed_optimizer else gradient
    dense, experts = _others(layout.dp * layout.cp), _others(layout.expert_dp)
    return (held.dense * dense + held.experts * experts) * (gradient + gathered)


def _tensor(spec: RunSpec, stage: int, layers: Sequence[int]) -> float:
    """Attention and an MLP each sum their output over ranks, and the gradient of their input."""
    layout, summed = spec.parallelism, 0.0
    for number in layers:
        parts = spec.model.parts_of_layer(number)
        summing = ("attention" in parts) + ("mamba" in parts) + bool(mlp_width(spec.model, parts))
        again = len(repeated_pieces(spec, "experts" in parts) & {"attention", "mlp"})
        summed += 2 * summing + again
    # The embedding sums its output, and the logits the gradient of their input.
    summed += (stage == 0) + (stage == layout.pp - 1)
    tensor = tokens_of(spec) * spec.model.hidden_size * BYTES[spec.training.precision]
    return summed * 2 * _others(layout.tp) * tensor * spec.num_microbatches


def _expert(spec: RunSpec, layers: Sequence[int]) -> float:
    """Rows go to the ranks of their experts and back, and so do their gradients."""
    layout, model = spec.parallelism, spec.model
    trips = (4 + 2 * ("experts" in repeated_pieces(spec, True))) * sum(
        "experts" in model.parts_of_layer(number) for number in layers
    )
    if layout.dispatcher == "allgather":
        copies = float(layout.ep * layout.etp - 1)
    else:
        copies = model.moe_router_topk * (_others(layout.ep) + layout.etp - 1)
    row = model.hidden_size * BYTES[spec.training.precision]
    return trips * routed_tokens(spec) * copies * row * spec.num_microbatches


def _pipeline(spec: RunSpec, stage: int) -> float:
    """A chunk sends its output to the next one, and the gradient of its input to the one before."""
    layout = spec.parallelism
    if layout.pp == 1:
        return 0.0
    ends = (stage == 0) + (stage == layout.pp - 1)
    tensor = sharded_tokens(spec) * spec.model.hidden_size * BYTES[spec.training.precision]
    return (2 * layout.vpp - ends) * tensor * spec.num_microbatches
