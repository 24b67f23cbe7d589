"""Test fingerprints of results: any changed bit shows, and a difference has the size that a comparison with a copy
would find."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from launch.train.inspection import fingerprint
from launch.train.inspection.fingerprint import COLUMNS, NOT_FINITE, FingerprintMaker

SHAPE = 32, 4096
Change = Callable[[torch.Tensor], object]


@pytest.fixture(autouse=True)
def small_chunks() -> object:
    """Use five chunks. The last one is smaller."""
    with mock.patch.object(fingerprint, "CHUNK_ELEMENTS", 7 * COLUMNS):
        yield


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def difference(result: torch.Tensor, reference: torch.Tensor) -> float | None:
    maker = FingerprintMaker(result.numel(), result.device)
    made = maker.make(lambda: [("result", reference)])
    return maker.differences(lambda: [("result", result)], made).get("result")


def exact_difference(result: torch.Tensor, reference: torch.Tensor) -> float:
    return float((result.double() - reference.double()).norm() / reference.double().norm())


def flip_bit(place: int, bit: int) -> Change:
    def flip(tensor: torch.Tensor) -> None:
        bits = tensor.view(-1).view(torch.int16)
        bits[place] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)

    return flip


def swap(first: slice, second: slice) -> Change:
    def swapped(tensor: torch.Tensor) -> None:
        flat = tensor.view(-1)
        flat[first], flat[second] = flat[second].clone(), flat[first].clone()

    return swapped


OTHER_BITS: dict[str, Change] = {
    "first bit": flip_bit(0, 0),
    "sign bit of the last element": flip_bit(-1, 15),
    "two elements swapped": swap(slice(3, 4), slice(4, 5)),
    "two chunks swapped": swap(slice(0, 7 * COLUMNS), slice(7 * COLUMNS, 14 * COLUMNS)),
    "two signs": lambda tensor: tensor.view(-1)[5:7].neg_(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OTHER_BITS)
def test_other_bits_show(name: str, dtype: torch.dtype) -> None:
    reference = numbers(*SHAPE, dtype=dtype)
    changed = reference.clone()
    assert difference(changed, reference) is None
    OTHER_BITS[name](changed)
    assert difference(changed, reference) is not None


def test_zeros_of_either_sign_and_numbers_that_are_not_finite() -> None:
    zeros, nan = torch.zeros(3), torch.full((3,), torch.nan)
    assert difference(-zeros, zeros) == 0.0 and difference(nan, nan.clone()) is None
    assert difference(nan, zeros) == difference(torch.ones(3), zeros) == NOT_FINITE


def test_numbers_that_are_not_finite_in_both_do_not_count() -> None:
    """NaN may have other bits, and other numbers still count."""
    reference = numbers(9)
    reference[4] = torch.nan
    changed = reference.clone()
    changed.view(torch.int32)[4] ^= 1
    assert difference(changed, reference) == 0.0
    changed[2] *= 1 + 1e-5
    finite = ~reference.isnan()
    assert difference(changed, reference) == pytest.approx(exact_difference(changed[finite], reference[finite]))
    changed[3] = torch.inf
    assert difference(changed, reference) == NOT_FINITE


CHANGES: dict[str, Change] = {
    "all": lambda tensor: tensor.add_(1e-6 * numbers(*tensor.shape).flip(0)),
    "one row": lambda tensor: tensor[17].mul_(1.01),
    "one column": lambda tensor: tensor[:, 17].mul_(1.01),
    "columns as wide as a head": lambda tensor: tensor[:, 128:192].mul_(0.99),
    "low rank": lambda tensor: tensor.add_(1e-3 * torch.outer(*(torch.linspace(-1, 2, size) for size in SHAPE))),
    "a constant": lambda tensor: tensor.add_(1e-3),
    "one element": lambda tensor: tensor[20, 3].mul_(4),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_has_its_size(name: str) -> None:
    """The tolerance is four standard errors, for the difference and for the reference."""
    reference = numbers(*SHAPE)
    changed = reference.clone()
    CHANGES[name](changed)
    assert difference(changed, reference) == pytest.approx(exact_difference(changed, reference), rel=0.1)


@pytest.mark.parametrize("elements", [1, 2, COLUMNS])
def test_differences_of_few_numbers_are_exact(elements: int) -> None:
    reference = numbers(elements)
    changed = reference + 1e-5
    assert difference(changed, reference) == pytest.approx(exact_difference(changed, reference), rel=1e-12)


def test_parts_of_other_tensors_and_empty_ones() -> None:
    """A rank may own any part of a parameter, or none."""
    whole = numbers(*SHAPE)
    assert difference(whole[:, 3:9], whole[:, 3:9].clone()) is None
    assert difference(whole[:0], whole[:0].clone()) is None


def test_random_numbers_of_the_run_stay() -> None:
    before = torch.get_rng_state()
    difference(numbers(5), numbers(5))
    assert torch.equal(torch.get_rng_state(), before)
