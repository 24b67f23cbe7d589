"""On a CPU, with another scan, test that hybrid models of Megatron-Core train and that each scope captures its layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from launch.contract.spec import CudaGraph, Model, Placement, RunSpec, Training
from launch.support import unsupported
from launch.train.data_loader import batch, open_source
from tests.megatron_release import RELEASE
from tests.numerics.megatron.hybrid_on_cpu import hybrid_models
from tests.numerics.megatron.megatron_graphs_on_cpu import graphs_on_cpu
from tests.numerics.megatron.megatron_on_cpu import megatron_engine

STEPS = 6
MICRO_BATCHES = 2
HYBRID = RunSpec(
    engine="megatron",
    megatron_core=RELEASE,
    model=Model(num_layers=4, hybrid_override_pattern="M*M-", hidden_size=256),
    training=Training(steps=STEPS, sequence_length=64, micro_batch_size=1, global_batch_size=MICRO_BATCHES),
    placement=Placement(device="cuda"),
)


@pytest.fixture(autouse=True)
def hybrid() -> Iterator[None]:
    with hybrid_models():
        yield


def losses_of(spec: RunSpec) -> tuple[list[float], int, int]:
    """Return the losses, the number of graphs, and how many are launched in a step."""
    with megatron_engine(spec) as engine:
        source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
        losses = [engine.step(batch(source, spec, step, 0)).loss.item() for step in range(STEPS)]
        idle = [name for name, each in engine.chunks[0].named_parameters() if not each.main_grad.any()]
        assert idle == []
        stats = engine.graph_stats()
        assert stats.proven or not spec.graphed
        assert stats.effective_scope == spec.cuda_graph.scope
        return losses, stats.graphs, stats.launches_per_step


@cache
def eager_losses() -> list[float]:
    losses, graphs, _ = losses_of(HYBRID)
    assert unsupported(HYBRID) == () and graphs == 0 and losses[-1] < losses[0] - 0.5
    return losses


@pytest.mark.parametrize(
    ("graph", "layers"),
    [
        (CudaGraph("transformer_engine", ("mamba",)), 2),
        (CudaGraph("transformer_engine", ("attn", "mamba")), 3),
        (CudaGraph("transformer_engine", ("attn", "mlp", "mamba")), 4),
        (CudaGraph("transformer_engine"), 4),
        (CudaGraph("local", ("mamba",)), 2),
        (CudaGraph("local", ("attn", "mamba")), 3),
        (CudaGraph("local"), 4),
    ],
    ids=lambda value: value.label if isinstance(value, CudaGraph) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_each_scope_captures_its_layers_and_trains_as_eager_code_does(graph: CudaGraph, layers: int) -> None:
    eager = eager_losses()
    with graphs_on_cpu(graph.impl):
        found, graphs, launches = losses_of(replace(HYBRID, cuda_graph=graph))
    assert found == eager
    assert (graphs, launches) == (2 * layers, 2 * layers * MICRO_BATCHES)
