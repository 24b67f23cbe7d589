"""The device work of one optimizer step, in parts that can be captured. The host reads no result in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from launch.engines.profile_ranges import RANGES
from launch.engines.torch_native.decoder import Decoder, Losses, ObserveOutput, RunLayer
from launch.engines.torch_native.microbatches import Choices, Microbatches
from launch.engines.torch_native.optim.adamw import Optimizer
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.parallel.data_parallel import all_reduce_mean, all_reduce_sum
from launch.engines.torch_native.parallel.pipeline import Pipeline
from launch.engines.torch_native.parallel.process_groups import ParallelMesh


@dataclass(eq=False)
class TrainStep:
    """Computes a step. Graph implementations replace ``model`` or ``graphed``.

    Attributes:
        model: runs a chunk that is the whole model.
        graphed: (chunk, microbatch) -> replacements of layers, by the layer's name.
        keep_routing: whether ``microbatches`` keeps the experts of each token and, with ``observes_layers``, outputs of layers.
        repeated: choices that routers repeat instead of making their own.
        microbatches: the microbatches of the last step; after a replay of the whole step, those of its capture.
    """

    mesh: ParallelMesh
    chunks: Sequence[Decoder]
    main: FlatParameters
    optimizer: Optimizer
    pipeline: Pipeline
    observes_layers: bool = False
    model: Callable[[torch.Tensor, ObserveOutput], Losses] = field(init=False)
    graphed: Callable[[int, int], Mapping[str, RunLayer]] = field(init=False)
    keep_routing: bool = field(init=False, default=False)
    repeated: Choices = field(init=False, default_factory=dict)
    microbatches: Microbatches = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.chunks[0]
        self.graphed = lambda chunk, microbatch: {}

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute the main gradients of the step from all microbatches. Return its loss, shape ().

        Args:
            batch: int64 (microbatches, microbatch size, sequence + 1).
        """
        self.main.clear_gradients()
        self.microbatches = microbatches = Microbatches(
            batch, self.chunks, self.model, self.graphed, self.main, self.keep_routing,
            self.keep_routing and self.observes_layers, self.repeated,
        )  # fmt: skip
        self.pipeline.run(
            RANGES.of_microbatch("forward", microbatches.forward),
            RANGES.of_microbatch("backward", microbatches.backward),
        )
        self.main.finish()
        # Only the last stage has losses. They are zero on other stages.
        loss = microbatches.losses.mean()
        all_reduce_sum(self.mesh.pp, loss)
        all_reduce_mean(self.mesh.dp, loss)
        return loss

    def update(self) -> torch.Tensor:
        """Compute the next weights from the main gradients. Return the gradient norm before clipping, shape ()."""
        norm = self.optimizer.update()
        self._update_expert_biases()
        return norm

    def _update_expert_biases(self) -> None:
        """Move the routers' biases against the load of the whole step, if the model has them."""
        if not self.chunks[0].context.model.moe_router_enable_expert_bias:
            return
        for chunk, tokens_per_expert in self.microbatches.tokens_per_expert.items():
            load = tokens_per_expert.float()
            all_reduce_sum(self.mesh.tp, load)
            all_reduce_sum(self.mesh.dp, load)
            for router, router_load in zip(self.chunks[chunk].routers(), load, strict=True):
                router.update_expert_bias(router_load)
