"""Compare gradients, their reduction and the update in every layout with one process."""

from __future__ import annotations

import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from launch.contract.spec import Parallelism, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.optim.adamw import Optimizer
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.parallel.buckets import ALIGNMENT, Kind, make_buckets
from launch.engines.torch_native.parallel.data_parallel import all_reduce_mean
from launch.engines.torch_native.parallel.process_groups import Group, make_mesh
from tests.distributed import workers
from tests.numerics.optimizer_steps import accumulate, take_step
from tests.numerics.parallel.sharded_toy import CPU, Case, compare_all

LAYOUTS = {
    2: [Parallelism(dp=2), Parallelism(dp=2, ep=2), Parallelism(tp=2), Parallelism(tp=2, ep=2)],
    3: [Parallelism(dp=3), Parallelism(tp=3)],
    4: [
        Parallelism(dp=4),
        Parallelism(dp=4, ep=2),
        Parallelism(tp=2, dp=2),
        Parallelism(tp=2, dp=2, ep=2),
        Parallelism(tp=2, dp=2, ep=4),
    ],
}
HELD_UP_SECONDS = 60.0
CONSTANT = {"learning_rate": 0.01, "learning_rate_schedule": "constant", "weight_decay": 0.1}


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_trains_what_one_process_does(world_size: int, sharded: bool) -> None:
    cases = [
        Case(dims, sharded, bucket_elements, clip_grad, "overlapped")
        for dims, (bucket_elements, clip_grad) in product(LAYOUTS[world_size], [(1, 0.1), (150, 0.0), (2**25, 1e6)])
    ]
    workers(world_size).run(compare_all, cases)


def test_every_way_to_accumulate_trains_the_same() -> None:
    dims = Parallelism(tp=2, dp=2, ep=2)
    ways = ("reduced at the end", "accumulated at once")
    workers(4).run(compare_all, [Case(dims, sharded, 150, 0.1, way) for way in ways for sharded in (False, True)])


class Chain(nn.Module):
    """Layers whose first and last weights are one parameter, as an embedding and an output layer may be."""

    def __init__(self, dtype: torch.dtype = torch.float32, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(16, 16, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=dtype) for _ in range(5))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False).tanh() if self.recompute else layer(x).tanh()
        return (x @ self.first.weight).square().mean()


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_added_as_they_come_and_not_kept(recompute: bool, compiled: bool) -> None:
    chain = Chain(recompute=recompute)
    kept: list[StorageWeakRef] = []
    alive = []

    def watch(gradient: torch.Tensor) -> None:
        alive.append(sum(not reference.expired() for reference in kept))
        kept.append(StorageWeakRef(gradient.untyped_storage()))

    watches = [parameter.register_hook(watch) for parameter in chain.parameters()]
    main = FlatParameters(chain)
    forward = torch.compile(chain, backend="aot_eager", fullgraph=True) if compiled else chain
    x = torch.randn(4, 16, requires_grad=True)
    with main.accumulate_gradients(0.5):
        *zeros, input_gradient = torch.autograd.grad(forward(x), [*main.parameters, x])
    assert [zero.abs().max().item() for zero in zeros] == [0.0] * len(main.parameters)
    assert len(alive) == len(main.parameters)
    if not compiled:  # A compiled backward pass returns all gradients at once.
        assert max(alive) <= 1

    for handle in watches:
        handle.remove()
    found = main.gradients.clone()
    main.gradients.zero_()
    *gradients, expected = torch.autograd.grad(forward(x), [*main.parameters, x])
    accumulate(main, gradients, 0.5)
    torch.testing.assert_close(found, main.gradients, rtol=0, atol=0)
    torch.testing.assert_close(input_gradient, expected, rtol=0, atol=0)


def test_last_gradients_come_once_a_step() -> None:
    chain = Chain()
    main = FlatParameters(chain)
    x = torch.randn(4, 16)
    for _ in range(2):
        with main.accumulate_gradients(1.0, last=True):
            torch.autograd.grad(chain(x), main.parameters)
        main.finish()
    with main.accumulate_gradients(1.0, last=True):
        torch.autograd.grad(chain(x), main.parameters)
        with pytest.raises(RuntimeError, match=r"layers\.4\.(weight|bias) already had its last gradient of this step"):
            torch.autograd.grad(chain(x), main.parameters)


def reduced_gradients(bucket_elements: int, sharded: bool) -> torch.Tensor:
    """Return the reduced gradients of a chain on this rank, in the order of its parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh(RankPlace(rank, size, CPU), Parallelism(dp=size))
    chain = Chain()
    main = FlatParameters(chain, mesh, distributed_optimizer=sharded, bucket_elements=bucket_elements)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    with main.accumulate_gradients(0.3, last=True):
        torch.autograd.grad(chain(x), main.parameters)
    main.finish()
    return torch.cat([stretch.gradients for stretch in main.shards])


def test_buckets_change_no_bit_of_the_sum_of_two() -> None:
    """With more than two ranks, the order in which collectives add depends on the place in a buffer."""
    many, one = (workers(2).run(reduced_gradients, bucket_elements, False) for bucket_elements in (1, 2**25))
    torch.testing.assert_close(many, one, rtol=0, atol=0)
    torch.testing.assert_close(one[0], one[1], rtol=0, atol=0)
    shards = torch.cat(workers(2).run(reduced_gradients, 2**25, True))
    assert sorted(shards[shards != 0].tolist()) == sorted(one[0][one[0] != 0].tolist())


def seconds_until_reduced_within_the_backward_pass() -> float:
    """Return the seconds from the middle of the backward pass, which is held there, until the last layer's sum has
    arrived."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chain = Chain()
    mesh = make_mesh(RankPlace(rank, size, CPU), Parallelism(dp=size))
    main = FlatParameters(chain, mesh, bucket_elements=1)
    bias, reduced = main.gradients[:16], torch.full((16,), 1.5)  # layers[4] comes first. Its gradient is 1.
    waited = []

    def hold(_: torch.Tensor) -> None:
        begin = time.monotonic()
        while not torch.equal(bias, reduced) and time.monotonic() < begin + HELD_UP_SECONDS:
            time.sleep(0.01)
        waited.append(time.monotonic() - begin)

    hidden = chain.layers[0](torch.ones(4, 16))
    hidden.register_hook(hold)
    rest = [*chain.layers[0].parameters(), *chain.layers[4].parameters()]
    with main.accumulate_gradients(1.0 + rank, last=True):
        torch.autograd.grad(chain.layers[4](hidden).mean(0).sum(), rest)
    main.finish()
    return waited[0]


def test_last_layers_are_reduced_while_the_first_are_differentiated() -> None:
    assert max(workers(2).run(seconds_until_reduced_within_the_backward_pass)) < HELD_UP_SECONDS


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8))
        self.vector = nn.Parameter(torch.linspace(0, 1, 8, dtype=torch.float64))

    def forward(self, stage: int, dp_rank: int) -> torch.Tensor:
        return ((self.embedding + stage).square() * self.vector * (1 + dp_rank)).mean()


def train_tied(sharded: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Train two stages that share an embedding. Return the norms, and this rank's weights."""
    rank, dims = dist.get_rank(), Parallelism(dp=2, pp=2)
    mesh = make_mesh(RankPlace(rank, 4, CPU), dims)
    stage = Stage()
    main = FlatParameters(stage, mesh, distributed_optimizer=sharded, tied={"embedding": mesh.pp}, bucket_elements=1)
    optimizer = Optimizer(main, Training(**CONSTANT, clip_grad=0.1))
    norms = []
    for step in range(3):
        first = mesh.pp.rank == 0
        if first:  # As in a pipeline, the backward pass of this stage begins after that of the last stage.
            dist.recv(torch.empty(1), rank + dims.dp)
        with main.accumulate_gradients(1.0, last=True):
            torch.autograd.grad(stage(mesh.pp.rank, mesh.dp.rank), main.parameters)
        if not first:
            dist.send(torch.empty(1), rank - dims.dp)
        main.finish()
        norms.append(take_step(optimizer, step).item())
    return norms, [stage.embedding.detach(), stage.vector.detach()]


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_an_embedding_on_two_stages_is_counted_once(sharded: bool) -> None:
    first, last = Stage(), Stage()
    first.embedding = last.embedding
    main = FlatParameters(nn.ModuleList([first, last]))
    optimizer = Optimizer(main, Training(**CONSTANT, clip_grad=0.1))
    norms = []
    for step in range(3):
        loss = sum(stage(number, dp_rank) for number, stage in enumerate((first, last)) for dp_rank in (0, 1))
        accumulate(main, torch.autograd.grad(loss, main.parameters), 0.5)
        norms.append(take_step(optimizer, step).item())
    for rank, (found, weights) in enumerate(workers(4).run(train_tied, sharded)):
        stage = (first, last)[rank // 2]
        torch.testing.assert_close(found, norms, rtol=1e-12, atol=0)
        torch.testing.assert_close(weights, [stage.embedding.detach(), stage.vector.detach()], rtol=1e-12, atol=1e-13)


def train_in_bfloat16(sharded: bool, gradient_dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Train with gradients whose sums bfloat16 represents exactly. Their sum is the same for every number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh(RankPlace(rank, size, CPU), Parallelism(dp=size))
    chain = Chain(torch.bfloat16)
    main = FlatParameters(chain, mesh, gradient_dtype, distributed_optimizer=sharded, bucket_elements=200)
    optimizer = Optimizer(main, Training(**CONSTANT, clip_grad=0.5))
    norms = []
    for step in range(3):
        for parameter in main.parameters:
            drawn = torch.randint(-4, 5, parameter.shape, generator=torch.Generator().manual_seed(step))
            with main.accumulate_gradients(1.0, last=True):
                torch.autograd.grad((parameter * drawn * (1 + rank)).sum(), parameter)
        main.finish()
        norms.append(take_step(optimizer, step))
    assert main.gradients.dtype == gradient_dtype
    return torch.stack(norms), [parameter.detach().clone() for parameter in chain.parameters()]


def test_bfloat16_gradients_and_weights_are_shared_as_float32_ones() -> None:
    expected = workers(2).run(train_in_bfloat16, False, torch.float32)[0]
    for sharded in (False, True):
        for norms, weights in workers(2).run(train_in_bfloat16, sharded, torch.bfloat16):
            torch.testing.assert_close(norms, expected[0], rtol=1e-6, atol=0)
            torch.testing.assert_close(weights, expected[1], rtol=2**-7, atol=0)


def averages() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh(RankPlace(rank, size, CPU), Parallelism(tp=2, dp=size // 2))
    one, other = torch.tensor(float(rank)), torch.tensor(10.0 * rank)
    for tensor in (one, other):
        all_reduce_mean(mesh.dp, tensor)
    return [one.item(), other.item()]


def test_averages_are_over_the_ranks_of_a_group() -> None:
    assert workers(4).run(averages) == [[1.0, 10.0], [2.0, 20.0], [1.0, 10.0], [2.0, 20.0]]


@given(
    runs=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=4),
    least=st.integers(1, 3000),
    size=st.integers(1, 5),
)
def test_buckets_and_their_shards_cover_every_element_once(runs: list[list[int]], least: int, size: int) -> None:
    places = [blocks * ALIGNMENT for run in runs for blocks in run]
    by_rank = []
    for rank in range(size):
        kinds = [
            Kind(bool(number % 2), Group(rank, size), (), size * (1 + number))
            for number, run in enumerate(runs)
            for _ in run
        ]
        by_rank.append(make_buckets(places, kinds, least, sharded=True))
    for of_ranks in zip(*by_rank, strict=True):
        owned = [bucket.owned for bucket in of_ranks]
        borders = [of_ranks[0].start, *(part.stop for part in owned)]
        assert [part.start for part in owned] == borders[:-1]
        assert borders[-1] == of_ranks[0].end
        assert all(border % ALIGNMENT == 0 for border in borders)
    buckets = by_rank[0]
    assert [number for bucket in buckets for number in bucket.parameters] == list(range(len(places)))
    assert [bucket.start for bucket in buckets] == [0, *(bucket.end for bucket in buckets[:-1])]
    for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
        taken = sum(places[number] for number in bucket.parameters)
        assert taken <= bucket.end - bucket.start < taken + ALIGNMENT * size
        assert taken >= least or following is None or following.kind != bucket.kind
