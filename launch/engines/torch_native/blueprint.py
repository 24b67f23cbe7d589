"""What every part of a decoder is built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from launch.engines.torch_native.elementwise import Elementwise, compiled
from launch.engines.torch_native.mesh import Group, ParallelMesh
from launch.engines.torch_native.tensor_parallel import TensorParallel
from launch.spec import Model, RunSpec, Training


@dataclass(frozen=True)
class Blueprint:
    """``eod_token`` ends a document where documents are packed: the token after it is at position 0 and sees none before
    it. None: a sequence is one document."""

    model: Model
    training: Training = field(default_factory=Training)
    eod_token: Optional[int] = None
    elementwise: Elementwise = field(default_factory=Elementwise)
    tp: TensorParallel = field(default_factory=TensorParallel)
    ep: Group = field(default_factory=Group)
    dispatcher: str = "alltoall"

    @property
    def packed(self) -> bool:
        return self.eod_token is not None


def draw_blueprint(spec: RunSpec, mesh: ParallelMesh) -> Blueprint:
    return Blueprint(
        spec.model,
        spec.training,
        spec.data.eod_token if spec.data.packed_sequences else None,
        compiled() if spec.training.compile == "elementwise" else Elementwise(),
        TensorParallel(mesh.tp, spec.parallelism.sequence_parallel),
        mesh.ep,
        spec.parallelism.dispatcher,
    )
