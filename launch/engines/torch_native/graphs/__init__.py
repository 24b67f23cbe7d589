"""CUDA graphs: what each implementation captures of an iteration, how it runs from it, and the evidence that it did."""

from __future__ import annotations

from launch.contract.spec import RunSpec
from launch.engines.torch_native.graphs.eager import Eager
from launch.engines.torch_native.graphs.full_iteration import FullIteration
from launch.engines.torch_native.graphs.layer_callables import GraphedLayers
from launch.engines.torch_native.graphs.protocol import Graphs
from launch.engines.torch_native.train_step import Iteration


def make_graphs(spec: RunSpec, iteration: Iteration) -> Graphs:
    """What runs the steps of ``spec``."""
    impl = spec.cuda_graph.impl
    if impl == "none":
        return Eager(iteration, spec.cuda_graph)
    if impl == "torch_compile":
        # Only here: Dynamo takes as long to load as all the rest of torch.
        from launch.engines.torch_native.graphs.torch_compile import Compiled

        return Compiled(iteration, spec)
    if impl == "full_iteration":
        return FullIteration(iteration, spec)
    return GraphedLayers(iteration, spec)
