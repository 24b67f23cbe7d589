"""Test the lean optimizer: exact masters from two halves, fp32 AdamW's update on them, and whole steps, exact to the
bit."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launch.contract.spec import CudaGraph, Parallelism, RunSpec, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.optim.adamw import Optimizer
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.optim.split_masters import join, split
from tests.distributed import workers
from tests.numerics.full_iteration_on_cpu import full_iteration_on_cpu
from tests.numerics.optimizer_steps import accumulate, take_step
from tests.numerics.tiny import CPU, batches, make_spec

INFINITY, NEXT_TO_INFINITY, TIE = 0x7F800000, 0x7F7FFFFF, 0x3F808000


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view({4: torch.int32, 2: torch.int16}[values.itemsize])


def test_two_halves_of_any_master_are_the_master() -> None:
    """The masters have all signs, exponents and borders of rounding, and a million random bit patterns."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor(
        [0, 1, 0x7FFF, 0x8000, 0x8001, TIE, NEXT_TO_INFINITY, INFINITY, 0x7F7F8000, 0x807FFFFF - 2**32]
    )
    bits = torch.cat((edges, edges - 2**31, torch.randint(-(2**31), 2**31, (2**20,), generator=generator))).int()
    masters = bits.view(torch.float32)
    weights, low = split(masters)
    number = ~masters.isnan()
    assert torch.equal(bits_of(join(weights, low))[number], bits[number])
    assert weights[~number].isnan().all() and join(weights, low)[~number].isnan().all()
    # Rounding is to nearest, as in PyTorch, but ties go away from zero.
    tied = (bits & 0xFFFF) == 0x8000
    assert torch.equal(bits_of(weights)[number & ~tied], bits_of(masters.bfloat16())[number & ~tied])
    assert (weights[number & tied].abs() > masters[number & tied].abs()).all()


def test_the_nan_of_cuda_stays_one() -> None:
    """The value is 0x7fffffff, which rounds up to minus zero. The loss of such a model would look finite."""
    weights, low = split(torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32))
    assert weights.isnan().all() and join(weights, low).isnan().all()


def optimizers(**training: Any) -> dict[str, tuple[FlatParameters, Optimizer]]:
    """Return a lean optimizer and an fp32 one, over equal bf16 weights."""
    made = {}
    for precision in ("fp32", "lean"):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)).bfloat16()
        main = FlatParameters(module, lean=precision == "lean")
        made[precision] = main, Optimizer(main, Training(optimizer_precision=precision, **training))
    return made


def masters(main: FlatParameters) -> torch.Tensor:
    return torch.cat([shard.masters(slice(None)) for shard in main.shards])


def test_moments_that_bfloat16_represents_give_the_update_of_fp32() -> None:
    """With gradients of one size and betas of a half, four bits represent the moments exactly. So only rounded masters
    would show."""
    made = optimizers(
        learning_rate=1e-3, weight_decay=0.1, adam_beta1=0.5, adam_beta2=0.5, clip_grad=0.0, learning_rate_schedule="constant"
    )  # fmt: skip
    for main, optimizer in made.values():
        drawn = torch.Generator().manual_seed(1)
        for step in range(4):
            signs = [torch.randint(2, p.shape, generator=drawn).mul(2).sub(1).to(p.dtype) for p in main.parameters]
            accumulate(main, signs, 1.0)
            take_step(optimizer, step)
    fp32, lean = (masters(made[name][0]) for name in ("fp32", "lean"))
    assert (fp32 != fp32.bfloat16()).float().mean() > 0.8, "masters have bits that weights lack"
    torch.testing.assert_close(lean, fp32, rtol=2e-7, atol=1e-9)
    assert torch.equal(*(torch.cat([p.detach().flatten() for p in made[name][0].parameters]) for name in made))


def test_rounded_moments_stay_within_their_rounding() -> None:
    """Three roundings of 2**-9 explain the difference of each of 50 updates from that of fp32. There is no drift."""
    made = optimizers(learning_rate=1e-3, weight_decay=0.0, clip_grad=0.5, learning_rate_schedule="constant")
    norms = []
    for main, optimizer in made.values():
        drawn = torch.Generator().manual_seed(1)
        before = masters(main).clone()
        for step in range(50):
            accumulate(main, [torch.randn(p.shape, generator=drawn).to(p.dtype) + 0.5 for p in main.parameters], 1.0)
            norms.append(take_step(optimizer, step))
        made_update = masters(main) - before
        norms.append(made_update.norm())
    assert torch.equal(torch.stack(norms[:50]), torch.stack(norms[51:101])), "gradients and their norm are the same"
    assert norms[101] == pytest.approx(norms[50].item(), rel=5e-3)


def test_what_is_kept_takes_eight_bytes_beside_the_gradient() -> None:
    main, optimizer = optimizers()["lean"]
    accumulate(main, [torch.ones_like(p) for p in main.parameters], 1.0)
    take_step(optimizer, 0)
    moments = [one for one in optimizer.state() if one.dim()]
    kept = sum(one.nbytes for one in (*main.stored_weights(), *moments))
    assert kept == 8 * main.weights.numel() and {one.dtype for one in moments} == {torch.bfloat16}


def lean_spec(graph: CudaGraph | None = None, **training: Any) -> RunSpec:
    settings = {"steps": 6, "precision": "bf16", "optimizer_precision": "lean", "weight_decay": 0.1}
    return make_spec(graph=graph, **settings | training)


def trained(spec: RunSpec) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """Train one rank of a data-parallel layout. Return losses and norms, and all state of the optimizer as integers."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with full_iteration_on_cpu():
        engine = TorchNativeEngine(spec, RankPlace(rank, spec.parallelism.world_size, CPU))
        results = [engine.step(batch) for batch in batches(spec, rank)]
        assert not spec.graphed or engine.graph_stats().replays > 0
        engine.close()
    state = (*engine.flat_parameters.stored_weights(), *engine._optimizer.state())
    bits = torch.cat([one.flatten().view(torch.int16) for one in state])
    return [(one.loss.item(), one.grad_norm.item()) for one in results], bits


GRAPHS = (
    CudaGraph("full_iteration", warmup_steps=2, optimizer=True),
    CudaGraph("full_iteration", warmup_steps=2),
)


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
def test_graphed_steps_equal_eager_ones_to_the_bit(gradients: str) -> None:
    expected, kept = trained(lean_spec(gradient_precision=gradients))
    assert expected[-1] != expected[0]
    for graph in GRAPHS:
        found, own = trained(lean_spec(graph, gradient_precision=gradients))
        assert found == expected and torch.equal(own, kept), graph.label


def test_it_is_another_task_but_learns_the_same() -> None:
    lean, fp32 = lean_spec(steps=30), lean_spec(steps=30, optimizer_precision="fp32")
    assert lean.task_id != fp32.task_id and lean.workload_id != fp32.workload_id
    (found, _), (expected, _) = trained(lean), trained(fp32)
    assert found[0] == expected[0] and found != expected
    differences = [loss - other for (loss, _), (other, _) in zip(found, expected, strict=True)]
    # Rounding differs by processor and moves single steps. A wrong update moves them all one way.
    assert abs(mean(differences)) < 5e-3 and max(map(abs, differences)) < 5e-2


def test_ranks_that_share_it_train_what_whole_ones_do() -> None:
    """The test does not clip, because ranks sum the norm of their shares in another order."""
    whole = replace(lean_spec(clip_grad=0.0), parallelism=Parallelism(dp=2))
    shared = replace(whole, parallelism=Parallelism(dp=2, distributed_optimizer=True))
    first, second = workers(2).run(trained, whole)
    assert first[0] == second[0] and torch.equal(first[1], second[1])
    for losses, kept in workers(2).run(trained, shared):
        assert [loss for loss, _ in losses] == [loss for loss, _ in first[0]] and len(kept) < 0.7 * len(first[1])
