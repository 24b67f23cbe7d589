"""Test parts of parameters: every rank takes its own part, and the joined parts are the whole."""

from __future__ import annotations

from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from launch.engines.torch_native.parallel.process_groups import Group
from launch.engines.torch_native.parallel.sharding import WHOLE, Sharding, find_shardings
from tests.sharding import join_parts

SIZES = st.integers(1, 4)


@st.composite
def split_parameters(draw: st.DrawFn) -> tuple[Sharding, torch.Tensor, int]:
    """Draw a sharding, a parameter that it fits, and a number of ranks."""
    ranks = draw(SIZES)
    stretches = [size * ranks for size in draw(st.lists(SIZES, min_size=1, max_size=3))]
    shape = draw(st.lists(SIZES, max_size=2))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, sum(stretches))
    sections = tuple(stretches) if len(stretches) > 1 or draw(st.booleans()) else ()
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return Sharding("tp", dim, sections), whole, ranks


@given(split_parameters())
def test_joined_parts_are_the_whole(case: tuple[Sharding, torch.Tensor, int]) -> None:
    sharding, whole, ranks = case
    parts = [sharding.take(whole, Group(rank, ranks)) for rank in range(ranks)]
    assert {part.shape[sharding.dim] * ranks for part in parts} == {whole.shape[sharding.dim]}
    assert torch.equal(join_parts(sharding, parts), whole)


@given(split_parameters())
def test_a_rank_holds_its_share_of_every_stretch(case: tuple[Sharding, torch.Tensor, int]) -> None:
    sharding, whole, ranks = case
    sizes = sharding.sections or (whole.shape[sharding.dim],)
    ends = list(accumulate(sizes))
    for rank in range(ranks):
        numbers = [
            number
            for size, end in zip(sizes, ends, strict=True)
            for number in range(end - size + rank * size // ranks, end - size + (rank + 1) * size // ranks)
        ]
        expected = whole.index_select(sharding.dim, torch.tensor(numbers))
        assert torch.equal(sharding.take(whole, Group(rank, ranks)), expected)


def test_queries_keys_and_values_are_split_each_by_themselves() -> None:
    sharding = Sharding("tp", 0, sections=(4, 2, 2))
    taken = [sharding.take(torch.arange(8), Group(rank, 2)).tolist() for rank in range(2)]
    assert taken == [[0, 1, 4, 6], [2, 3, 5, 7]]


def test_what_is_held_whole_is_the_same_on_every_rank() -> None:
    whole = torch.arange(6)
    parts = [WHOLE.take(whole, Group(rank, 2)) for rank in range(2)]
    assert all(torch.equal(part, whole) for part in parts)
    assert torch.equal(join_parts(WHOLE, parts), whole)


def test_shardings_have_the_full_names_of_parameters() -> None:
    inner = nn.Linear(2, 4)
    inner.shardings = {"weight": Sharding("tp", 0)}  # type: ignore[assignment]
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(2), inner))
    assert find_shardings(model) == {
        "0.0.weight": WHOLE,
        "0.0.bias": WHOLE,
        "0.1.weight": Sharding("tp", 0),
        "0.1.bias": WHOLE,
    }
    assert find_shardings(inner)["weight"].axis == "tp", "a module's own have no prefix"
