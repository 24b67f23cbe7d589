"""The torch_native engine: one model under training on one rank."""

from __future__ import annotations

import torch

from launch.engines.base import Mesh, StepResult
from launch.engines.torch_native.data_parallel import average
from launch.engines.torch_native.graphs import Forward, make_graphs
from launch.engines.torch_native.model import build_decoder
from launch.engines.torch_native.optimizer import MainParameters, Optimizer
from launch.errors import UnsupportedError
from launch.record import GraphStats
from launch.spec import RunSpec
from launch.support import unsupported

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TorchNativeEngine:
    """``dtype`` is what weights and activations are held in; by default what ``training.precision`` says."""

    def __init__(self, spec: RunSpec, mesh: Mesh, dtype: torch.dtype | None = None) -> None:
        self._mesh = mesh
        self._step = 0
        dtype = dtype or PRECISIONS[spec.training.precision]
        self.decoder = build_decoder(spec.model, spec.training.seed, dtype, mesh.device)
        self._main = MainParameters(self.decoder)
        self._optimizer = Optimizer(self._main, spec.training)
        self._graphs = make_graphs(spec, self.decoder)

    @property
    def capture_step(self) -> int | None:
        return self._graphs.capture_step

    def step(self, batch: torch.Tensor) -> StepResult:
        with self._graphs.step(self._step) as (forward, kind):
            loss = self._accumulate(forward, batch)
        average(self._mesh, self._main.gradients, loss)
        norm = self._optimizer.step(self._step)
        self._step += 1
        return StepResult(loss.float(), norm.float(), kind)

    def graph_stats(self) -> GraphStats:
        return self._graphs.stats()

    def close(self) -> None:
        self._graphs.close()

    def _accumulate(self, forward: Forward, batch: torch.Tensor) -> torch.Tensor:
        """Add the mean gradients of all micro-batches to the main gradients; return their mean cross-entropy.

        What is differentiated holds the router's losses too; what is returned does not.
        """
        share = 1.0 / len(batch)
        loss = torch.zeros((), device=self._mesh.device, dtype=self._main.gradients.dtype)
        for tokens in batch:
            losses = forward(tokens)
            self._main.accumulate(torch.autograd.grad(losses.objective, self._main.parameters), share)
            loss.add_(losses.cross_entropy.detach(), alpha=share)
        return loss


def build(spec: RunSpec, mesh: Mesh) -> TorchNativeEngine:
    """The engine of ``spec`` on this rank, its weights drawn.

    Raises:
        UnsupportedError: ``spec`` asks for what this engine does not have; the message names every field at fault.
    """
    if reasons := unsupported(spec):
        raise UnsupportedError("; ".join(f"{reason.message}: {reason.remedy}" for reason in reasons))
    if spec.training.deterministic:
        torch.use_deterministic_algorithms(True)
    return TorchNativeEngine(spec, mesh)
