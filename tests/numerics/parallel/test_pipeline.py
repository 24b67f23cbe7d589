"""Test the executor of pipelines on a toy model: every schedule gives the losses and gradients of one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from launch.contract.spec import Parallelism
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.parallel.pipeline import Pipeline
from launch.engines.torch_native.parallel.pipeline_schedule import Schedule
from launch.engines.torch_native.parallel.process_groups import make_mesh
from tests.distributed import workers

ROWS, WIDTH, STEPS = 3, 5, 2
Gradients = dict[int, torch.Tensor]


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weight_of(virtual: int) -> torch.Tensor:
    return drawn(WIDTH, WIDTH, seed=virtual).requires_grad_()


def tokens_of(replica: int, step: int, micro_batch: int) -> torch.Tensor:
    return drawn(ROWS, WIDTH, seed=10_000 + 1_000 * replica + 100 * step + micro_batch)


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute (ROWS, WIDTH) -> (ROWS, WIDTH). Neither the output nor the gradient of the input is contiguous."""
    return (weight @ x.mT).tanh().mT


def one_process(parts: int, micro_batches: int, replica: int) -> tuple[list[float], list[Gradients]]:
    """Return the losses in order, and each step's gradients summed over micro-batches. Weights are updated between
    steps."""
    weights = [weight_of(virtual) for virtual in range(parts)]
    losses, steps = [], []
    for step in range(STEPS):
        gradients = {virtual: torch.zeros_like(weight) for virtual, weight in enumerate(weights)}
        for micro_batch in range(micro_batches):
            x = tokens_of(replica, step, micro_batch)
            for weight in weights:
                x = layer(x, weight)
            loss = x.square().mean()
            losses.append(loss.item())
            for virtual, gradient in enumerate(torch.autograd.grad(loss, weights)):
                gradients[virtual] += gradient
        descend(weights, gradients.values())
        steps.append(gradients)
    return losses, steps


def descend(weights: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= 0.1 * gradient


@dataclass
class Stages:
    """A rank's virtual stages. They take the place of an engine for the executor."""

    stage: int
    stages: int
    chunks: int
    replica: int
    step: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = [chunk * self.stages + self.stage for chunk in range(self.chunks)]
        self.weights = {virtual: weight_of(virtual) for virtual in held}
        self.running: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.clear()

    def clear(self) -> None:
        self.gradients = {virtual: torch.zeros_like(weight) for virtual, weight in self.weights.items()}

    def forward(self, chunk: int, micro_batch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        virtual = chunk * self.stages + self.stage
        assert (activation is None) == (virtual == 0)
        x = tokens_of(self.replica, self.step, micro_batch) if activation is None else activation
        out = layer(x.requires_grad_(), self.weights[virtual])
        if last := virtual == self.stages * self.chunks - 1:
            out = out.square().mean()
            self.losses.append((self.step * 1_000 + micro_batch, out.item()))
        self.running[chunk, micro_batch] = x, out
        return None if last else out

    def backward(self, chunk: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        virtual = chunk * self.stages + self.stage
        x, out = self.running.pop((chunk, micro_batch))
        of_weight, of_x = torch.autograd.grad(out, (self.weights[virtual], x), gradient)
        self.gradients[virtual] += of_weight
        return None if virtual == 0 else of_x


Trained = tuple[int, list[tuple[int, float]], list[Gradients]]


def train(dims: Parallelism, schedule: Schedule, chunks: int, micro_batches: int) -> Trained:
    """Return the results of a rank, and the number of its replica."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh(RankPlace(rank, world_size, torch.device("cpu")), dims)
    pipeline = Pipeline(mesh, schedule, chunks, micro_batches, (ROWS, WIDTH), torch.float64)
    stages = Stages(mesh.pp.rank, mesh.pp.size, chunks, replica=rank % (world_size // dims.pp))
    steps = []
    for step in range(STEPS):
        stages.step = step
        pipeline.run(stages.forward, stages.backward)
        steps.append(stages.gradients)
        descend(stages.weights.values(), stages.gradients.values())
        stages.clear()
    return stages.replica, stages.losses, steps


@pytest.mark.parametrize(
    ("dims", "schedule", "chunks", "micro_batches"),
    [
        (Parallelism(), "1f1b", 1, 3),
        (Parallelism(), "gpipe", 1, 3),
        (Parallelism(pp=2), "1f1b", 1, 1),
        (Parallelism(pp=2), "1f1b", 1, 7),
        (Parallelism(pp=2), "gpipe", 1, 7),
        (Parallelism(pp=2), "interleaved", 2, 2),
        (Parallelism(pp=2), "interleaved", 3, 6),
        (Parallelism(pp=4), "1f1b", 1, 2),
        (Parallelism(pp=4), "1f1b", 1, 9),
        (Parallelism(pp=4), "gpipe", 1, 5),
        (Parallelism(pp=4), "interleaved", 2, 8),
        (Parallelism(pp=2, dp=2), "1f1b", 1, 5),
        (Parallelism(pp=2, tp=2), "gpipe", 1, 5),
        (Parallelism(pp=2, dp=2), "interleaved", 2, 4),
    ],
)
def test_a_pipeline_is_one_process(dims: Parallelism, schedule: Schedule, chunks: int, micro_batches: int) -> None:
    """Each rank of a stage gets its own micro-batches, so that mixed-up pipelines would show."""
    ranks: list[Trained] = workers(dims.world_size).run(train, dims, schedule, chunks, micro_batches)
    for replica in range(dims.world_size // dims.pp):
        expected_losses, expected_steps = one_process(dims.pp * chunks, micro_batches, replica)
        own = [(losses, steps) for of, losses, steps in ranks if of == replica]
        losses = [loss for losses, _ in own for _, loss in sorted(losses)]
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-12)
        for step, expected in enumerate(expected_steps):
            gradients = {virtual: gradient for _, steps in own for virtual, gradient in steps[step].items()}
            torch.testing.assert_close(dict(sorted(gradients.items())), expected, rtol=0, atol=1e-12)
