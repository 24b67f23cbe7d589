"""The settings from which every module of a decoder is built."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from launch.contract.spec import Model, RunSpec, Training
from launch.engines.torch_native.layers.pointwise import Elementwise, compiled
from launch.engines.torch_native.parallel.process_groups import Group, ParallelMesh
from launch.engines.torch_native.parallel.tensor_parallel import TensorParallel
from launch.engines.torch_native.products.products import Products, make_products


@dataclass(frozen=True)
class BuildContext:
    """Settings of a decoder on this rank.

    Attributes:
        eod_token: ends a document in packed sequences. The next token has position 0 and attends to no token before it. None
            means that a sequence is one document.
    """

    model: Model
    training: Training = field(default_factory=Training)
    eod_token: int | None = None
    elementwise: Elementwise = field(default_factory=Elementwise)
    tp: TensorParallel = field(default_factory=TensorParallel)
    ep: Group = field(default_factory=Group)
    dispatcher: str = "alltoall"
    products: Products = field(default_factory=Products)

    @property
    def packed(self) -> bool:
        return self.eod_token is not None

    def inputs_first(self, expert: torch.Tensor) -> torch.Tensor:
        """Return a view of a matrix of an expert as (inputs, outputs). A bias, (outputs,), stays as it is."""
        return expert.T if self.products.outputs_first and expert.dim() == 2 else expert


def make_build_context(spec: RunSpec, mesh: ParallelMesh) -> BuildContext:
    return BuildContext(
        spec.model,
        spec.training,
        spec.data.eod_token if spec.data.packed_sequences else None,
        compiled() if spec.training.compile == "elementwise" else Elementwise(),
        TensorParallel(mesh.tp, spec.parallelism.sequence_parallel),
        mesh.ep,
        spec.parallelism.dispatcher,
        make_products(spec.training),
    )
