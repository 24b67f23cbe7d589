"""The torch_native engine: one model under training on one rank."""

from __future__ import annotations

from collections.abc import Mapping

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
        self._spec = spec
        self._mesh = mesh
        self._step = 0
        dtype = dtype or PRECISIONS[spec.training.precision]
        eod_token = spec.data.eod_token if spec.data.packed_sequences else None
        self.decoder = build_decoder(spec.model, spec.training.seed, dtype, mesh.device, spec.training, eod_token)
        gradient_dtype = torch.promote_types(dtype, PRECISIONS[spec.training.gradient_precision])
        self._main = MainParameters(self.decoder, gradient_dtype)
        self._optimizer = Optimizer(self._main, spec.training)
        self._graphs = make_graphs(spec, self.decoder)

    @property
    def capture_step(self) -> int | None:
        return self._graphs.capture_step

    @property
    def choices(self) -> Mapping[str, str]:
        backends = self.decoder.attention_backends()
        return {f"attention_backend, {layers}": backend for layers, backend in backends.items()}

    def step(self, batch: torch.Tensor) -> StepResult:
        with self._graphs.step(self._step) as (forward, kind):
            loss, choices = self._accumulate(forward, batch)
        average(self._mesh, self._main.gradients, loss)
        norm = self._optimizer.step(self._step)
        self._balance(choices)
        self._step += 1
        return StepResult(loss.float(), norm.float(), kind)

    def graph_stats(self) -> GraphStats:
        return self._graphs.stats()

    def close(self) -> None:
        self._graphs.close()

    def _accumulate(self, forward: Forward, batch: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Add the mean gradients of all micro-batches to the main gradients.

        What is differentiated holds the router's losses too; what is returned does not.

        Returns:
            The mean cross-entropy, and of each micro-batch how many tokens chose each expert.
        """
        share = 1.0 / len(batch)
        loss = torch.zeros((), device=self._mesh.device, dtype=self._main.weights.dtype)
        choices = []
        for tokens in batch:
            losses = forward(tokens)
            self._main.accumulate(torch.autograd.grad(losses.objective, self._main.parameters), share)
            loss.add_(losses.cross_entropy.detach(), alpha=share)
            if losses.choices is not None:
                choices.append(losses.choices)
        return loss, choices

    def _balance(self, choices: list[torch.Tensor]) -> None:
        """Move the routers' biases against the load of the whole step, where the model has them."""
        if not self._spec.model.moe_router_enable_expert_bias:
            return
        total = torch.stack(choices).sum(0).float()
        average(self._mesh, total)
        for router, of_layer in zip(self.decoder.routers(), total, strict=True):
            router.update_expert_bias(of_layer)


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
