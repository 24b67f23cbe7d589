"""No graphs: operations run one by one, as they are called, or as ``training.compile`` has compiled them."""

from __future__ import annotations

import torch

from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import CudaGraph
from launch.engines.torch_native.compiled_model import CompiledModel
from launch.engines.torch_native.graphs.protocol import Ran
from launch.engines.torch_native.train_step import Iteration


class Eager:
    capture_step = None

    def __init__(self, iteration: Iteration, settings: CudaGraph) -> None:
        self._iteration = iteration
        self._warmup_steps = settings.warmup_steps

    def run(self, step: int, batch: torch.Tensor) -> Ran:
        return Ran(*self._iteration.run(batch), "warmup" if step < self._warmup_steps else "steady")

    def stats(self) -> GraphStats:
        whole = self._iteration.whole
        anew = whole.recompilations if isinstance(whole, CompiledModel) else 0
        return GraphStats(impl="none", mechanism="eager", recompilations=anew)

    def close(self) -> None:
        pass
