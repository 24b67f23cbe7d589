"""Test the text of what a program's objects were made with: settings, and nothing that steps change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler

from launch.observe.construction import describe_construction

MODEL = torch.nn.Linear(2, 2)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)


def two_groups() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [one]} for one in MODEL.parameters()], lr=0.1)


def ramp(warmup: int) -> Callable[[int], float]:
    return lambda step: min(1.0, step / warmup)


def counter() -> Callable[[int], float]:
    calls = 0

    def factor(step: int) -> float:
        nonlocal calls
        calls += 1
        return 1.0

    return factor


def decay(step: int, by: float = 1.0, kind: str = "") -> float:
    return by


class Own(lr_scheduler.LambdaLR):
    """A scheduler whose arguments are kept by it and by its base. One side may compile the model."""

    def __init__(self, of: torch.optim.Optimizer, warmup: int, model: object) -> None:
        super().__init__(of, ramp(3))
        self.warmup, self.model = warmup, model


def sequence() -> LRScheduler:
    one = optimizer()
    return lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one, total_iters=3), lr_scheduler.ExponentialLR(one, 0.9)], [3]
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: lr_scheduler.StepLR(optimizer(), 10), "StepLR (step_size 10, gamma 0.1)"),
        (lambda: lr_scheduler.MultiStepLR(optimizer(), [3, 9]), "MultiStepLR (milestones 3 1/9 1, gamma 0.1)"),
        (lambda: lr_scheduler.LambdaLR(optimizer(), ramp(10)), "LambdaLR (lr_lambda <lambda> 10)"),
        (lambda: lr_scheduler.LambdaLR(optimizer(), counter()), "LambdaLR (lr_lambda factor)"),
        (lambda: lr_scheduler.LambdaLR(two_groups(), ramp(10)), "LambdaLR (lr_lambda <lambda> 10)"),
        (
            lambda: lr_scheduler.LambdaLR(two_groups(), [ramp(10), ramp(9)]),
            "LambdaLR (lr_lambda <lambda> 10/<lambda> 9)",
        ),
        (
            lambda: lr_scheduler.LambdaLR(optimizer(), partial(decay, by=0.5, kind="a")),
            "LambdaLR (lr_lambda decay/by/kind/0.5/a)",
        ),
        (
            lambda: lr_scheduler.OneCycleLR(optimizer(), 0.1, total_steps=50),
            "OneCycleLR (total_steps 50, cycle_momentum True, schedule_phases end_step 14/end_step 49)",
        ),
        (lambda: Own(optimizer(), 7, MODEL), "Own (warmup 7, lr_lambda <lambda> 3)"),
        (sequence, "SequentialLR (milestones 3)"),
    ],
)
def test_a_scheduler_is_described_by_its_settings(make: Callable[[], LRScheduler], expected: str) -> None:
    scheduler = make()
    assert describe_construction(scheduler) == expected
    for _ in range(5):
        scheduler.optimizer.step()
        scheduler.step()
    assert describe_construction(scheduler) == expected, "no step changes it"


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (RandomSampler(range(9)), "RandomSampler (replacement False)"),
        (
            RandomSampler(range(9), generator=torch.Generator().manual_seed(5)),
            "RandomSampler (replacement False, generator seed 5)",
        ),
        (
            DistributedSampler(range(10), 2, 1, seed=4),  # type: ignore[arg-type]
            "DistributedSampler (num_replicas 2, rank 1, shuffle True, seed 4, drop_last False, total_size 10)",
        ),
        (SubsetRandomSampler(range(50)), "SubsetRandomSampler"),
    ],
)
def test_a_sampler_is_described_by_its_settings(sampler: Sampler[int], expected: str) -> None:
    assert describe_construction(sampler) == expected
