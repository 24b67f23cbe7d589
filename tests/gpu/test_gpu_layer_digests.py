"""On a GPU: digests of layers are computed anew by every replay, and are those of the same code uncaptured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from launch.contract.records.layer_digests import layer_names
from launch.contract.spec import CudaGraph, Model, RunSpec
from launch.engines.protocol import LayerDigests, RankPlace
from launch.engines.torch_native.engine import build
from launch.train.data_loader import batch, open_source
from tests.gpu.test_gpu_graphs import DENSE, MOE, SHARED, STEPS, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
]
GRAPHS = (
    CudaGraph("full_iteration"),
    CudaGraph("full_iteration", optimizer=True),
    *(CudaGraph(impl, scope) for impl in ("torch", "transformer_engine") for scope in ((), ("attn",))),
)


def digested(spec: RunSpec) -> list[LayerDigests]:
    """Step by step; losses and gradient norms are those that the same run has without digests."""
    device = torch.device("cuda", 0)
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    results = []
    for steps in (STEPS, 0):
        engine = build(replace(spec, digest_steps=steps), RankPlace(0, 1, device))
        results.append([engine.step(batch(source, spec, step, 0).to(device)) for step in range(STEPS)])
        assert engine.graph_stats().proven == spec.graphed
        engine.close()
    for one, other in zip(*results, strict=True):
        assert (one.loss.item(), one.grad_norm.item()) == (other.loss.item(), other.grad_norm.item())
        assert other.digests is None
    return [result.digests for result in results[0] if result.digests is not None]


@pytest.mark.parametrize("model", [DENSE, MOE, SHARED], ids=["dense", "moe", "shared"])
def test_a_replay_digests_what_uncaptured_code_gives(model: Model) -> None:
    expected = digested(spec_of(model, CudaGraph("none")))
    assert len(expected) == STEPS
    assert expected[0].layers == layer_names(model.num_layers)
    assert len({one.outputs[0, 0].item() for one in expected}) == STEPS, "each step has other tokens"
    for graph in GRAPHS:
        found = digested(spec_of(model, graph))
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            for what in ("outputs", "gradients", "parameter_gradients", "parameters"):
                assert torch.equal(getattr(one, what), getattr(other, what)), (graph.label, step, what)


@pytest.mark.parametrize("graph", [CudaGraph("full_iteration"), CudaGraph("torch", ("mlp",))], ids=lambda g: g.label)
def test_a_number_frozen_in_one_layer_is_seen_there(graph: CudaGraph) -> None:
    """The last layer's feed-forward is scaled by a number that Python counts up: a graph keeps that of its capture, so that
    the step behind it is the first to differ, and nothing before that layer does."""
    spec, sides = replace(spec_of(DENSE, graph), digest_steps=STEPS), []
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    number = 0

    def scale(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + number / 100)

    for one in (spec, replace(spec, cuda_graph=CudaGraph("none"))):
        engine, digests = build(one, RankPlace(0, 1, torch.device("cuda", 0))), []
        engine.chunks[0].named_layers()[str(DENSE.num_layers - 1)].mlp.register_forward_hook(scale)
        for number in range(graph.warmup_steps + 2):
            digests.append(engine.step(batch(source, spec, number, 0).cuda()).digests)
        sides.append(digests)
        engine.close()
    for before, after in zip(*(digests[:-1] for digests in sides), strict=True):
        for what in ("outputs", "gradients", "parameter_gradients", "parameters"):
            assert torch.equal(getattr(before, what), getattr(after, what))
    before, after = (digests[-1] for digests in sides)
    last = before.layers.index(f"decoder layer {DENSE.num_layers - 1}")
    assert torch.equal(before.outputs[:last], after.outputs[:last])
    assert not (before.outputs[last:] == after.outputs[last:]).any()
