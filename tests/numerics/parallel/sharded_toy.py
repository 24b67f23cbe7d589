"""Define a model that can be sharded by hand. Train it on every rank as the engine does, and whole in one process.

A rank computes what it would compute in the engine: for whole parameters the gradient of its own micro-batches, for
partial ones a portion of that, and for its experts the gradient of all tokens of its expert-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from launch.contract.spec import Parallelism, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.optim.adamw import Optimizer
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.parallel.process_groups import Group, ParallelMesh, make_mesh
from launch.engines.torch_native.parallel.sharding import WHOLE, Sharding
from tests.numerics.optimizer_steps import accumulate, take_step
from tests.sharding import join_parts

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, TOKENS, MICRO_BATCHES, STEPS = 8, 18, 4, 8, 2, 3
SHARDINGS = {
    "twice": WHOLE,
    "norm": Sharding(partial=True),
    "up": Sharding(axis="tp", dim=0, sections=(12, 6)),
    "down": Sharding(axis="tp", dim=1),
    "bias": WHOLE,
    "experts": Sharding(axis="ep"),
}
SHAPES = {
    "twice": (HIDDEN, HIDDEN),
    "norm": (HIDDEN,),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "bias": (HIDDEN,),
    "experts": (EXPERTS, HIDDEN, HIDDEN),
}

Weights = Mapping[str, torch.Tensor]
Way = Literal["overlapped", "reduced at the end", "accumulated at once"]


@dataclass(frozen=True)
class Case:
    dims: Parallelism
    sharded: bool
    bucket_elements: int
    clip_grad: float
    way: Way


class Toy(nn.Module):
    """The model, with this rank's shards of the parameters."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.shardings = SHARDINGS
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            whole = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
            self.register_parameter(name, nn.Parameter(SHARDINGS[name].take(whole, group_of(name, mesh)).clone()))

    def whole(self, mesh: ParallelMesh) -> dict[str, torch.Tensor]:
        """Return all weights. Gradients reach this rank's shards of them."""
        wholes = {}
        for name, part in self.named_parameters():
            group = group_of(name, mesh)
            parts = [torch.empty_like(part) for _ in range(group.size)]
            if group.process_group is not None:
                dist.all_gather(parts, part.detach().contiguous(), group=group.process_group)
            parts[group.rank] = part
            wholes[name] = join_parts(SHARDINGS[name], parts)
        return wholes


def group_of(name: str, mesh: ParallelMesh) -> Group:
    return {"tp": mesh.tp, "ep": mesh.ep, None: Group()}[SHARDINGS[name].axis]


def objective(weights: Weights, step: int, micro_batch: int, dp_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + dp_rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    x = x @ weights["twice"] * weights["norm"]
    x = x + torch.tanh(x @ weights["up"].t()) @ weights["down"].t() + weights["bias"]
    experts = weights["experts"][torch.arange(TOKENS) % EXPERTS]
    x = x + torch.bmm(x.unsqueeze(1), experts).squeeze(1)
    return (x @ weights["twice"].t()).square().mean()


def rank_objective(toy: Toy, mesh: ParallelMesh, rank: int, step: int, micro_batch: int) -> torch.Tensor:
    """Return the value that this rank differentiates. The value itself has no meaning."""
    weights, dims = toy.whole(mesh), mesh.dims
    fixed = {name: weight.detach() for name, weight in weights.items()}
    portion = portion_of(dims, rank)
    norm = portion * weights["norm"] + (1 - portion) * fixed["norm"]
    dense = weights | {"norm": norm, "experts": fixed["experts"]}
    total = objective(dense, step, micro_batch, dims.rank_in("dp", rank))
    for other in dims.group("ep", rank):
        of_other = objective(fixed | {"experts": weights["experts"]}, step, micro_batch, dims.rank_in("dp", other))
        total = total + portion_of(dims, other) * of_other
    return total


def portion_of(dims: Parallelism, rank: int) -> float:
    """Return one tensor-parallel rank's tokens. Portions are unequal, so that a sum differs from a mean."""
    return (1 + dims.rank_in("tp", rank)) / sum(range(1, dims.tp + 1))


def train(case: Case, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the gradient norms of all steps, and all weights after them."""
    mesh = make_mesh(RankPlace(rank, case.dims.world_size, CPU), case.dims)
    toy = Toy(mesh)
    options: dict[str, Any] = {"distributed_optimizer": case.sharded, "bucket_elements": case.bucket_elements}
    main = FlatParameters(toy, mesh, **options)
    optimizer = Optimizer(main, training_of(case))
    norms = []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            loss = rank_objective(toy, mesh, rank, step, micro_batch)
            backward(main, loss, case.way, micro_batch == MICRO_BATCHES - 1)
        main.finish()
        norms.append(take_step(optimizer, step).item())
    return norms, {name: weight.detach().clone() for name, weight in toy.whole(mesh).items()}


def backward(main: FlatParameters, loss: torch.Tensor, way: Way, last: bool) -> None:
    share = 1 / MICRO_BATCHES
    if way == "accumulated at once":
        accumulate(main, torch.autograd.grad(loss, main.parameters), share)
        return
    with main.accumulate_gradients(share, last=last and way == "overlapped"):
        torch.autograd.grad(loss, main.parameters)


def train_whole(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in one process, using only AdamW of the above."""
    alone = make_mesh(RankPlace(0, 1, CPU), Parallelism())
    toy = Toy(alone)
    main = FlatParameters(toy)
    optimizer = Optimizer(main, training_of(case))
    norms = []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            losses = [objective(toy.whole(alone), step, micro_batch, dp_rank) for dp_rank in range(case.dims.dp)]
            mean = torch.stack(losses).mean()
            accumulate(main, torch.autograd.grad(mean, main.parameters), 1 / MICRO_BATCHES)
        norms.append(take_step(optimizer, step).item())
    return norms, {name: weight.detach().clone() for name, weight in toy.named_parameters()}


def training_of(case: Case) -> Training:
    return Training(
        learning_rate=0.01,
        learning_rate_schedule="constant",
        weight_decay=0.1,
        clip_grad=case.clip_grad,
        adam_epsilon=1e-3,
    )


@contextmanager
def explained(case: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{case}: {error}") from error


def compare_all(cases: list[Case]) -> None:
    """Train each case on this rank, and compare it with the whole model."""
    for case in cases:
        with explained(case):
            norms, weights = train(case, dist.get_rank())
            expected_norms, expected = train_whole(case)
            torch.testing.assert_close(norms, expected_norms, rtol=1e-12, atol=0)
            torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-13)
