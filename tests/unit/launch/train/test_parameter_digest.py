"""Test that a digest of parameters shows whether an optimizer has stepped, and sketches how far runs end apart."""

from __future__ import annotations

import math

import pytest
import torch

from launch.contract.records.sketch import ChangedTensor
from launch.train.telemetry import parameter_digest
from launch.train.telemetry.parameter_digest import changes_since, digest_parameters, sketch_tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_of_single_bits_change_the_digest_even_where_they_cancel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_digest, "CHUNK_ELEMENTS", 7)
    parameters = [torch.randn(5, 4).to(dtype), torch.randn(3).to(dtype)]
    before = digest_parameters(parameters)
    assert digest_parameters([each.clone() for each in parameters]) == before
    bits = parameters[0].view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    bits[0, 0] += 1
    changed = digest_parameters(parameters)
    bits[3, 1] -= 1
    assert len({before, changed, digest_parameters(parameters)}) == 3


def test_no_parameters_have_no_digest() -> None:
    assert digest_parameters([]) == ""


def sketched(begun: dict[str, torch.Tensor], ended: dict[str, torch.Tensor]) -> dict[str, ChangedTensor]:
    return {one.last.name: one for one in changes_since(sketch_tensors(begun.items()), sketch_tensors(ended.items()))}


@pytest.mark.parametrize(
    "difference",
    [torch.randn(64, 48), torch.eye(64, 48) * (torch.arange(48) == 7), torch.ones(64, 48) * (torch.arange(48) == 16), torch.randn(64, 1) * 1e-6],
    ids=["anywhere", "one element", "a column", "all columns alike, and little"],
)  # fmt: skip
def test_a_sketch_estimates_how_far_two_runs_end_apart_and_how_far_they_came(
    difference: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_digest, "CHUNK_ELEMENTS", 1000)
    difference = difference.double().expand(64, 48)
    first, one = (torch.randn(64, 48, dtype=torch.float64) for _ in range(2))
    estimates = []
    for place in range(50):
        a, b = (sketched({f"{place}": first}, {f"{place}": end})[f"{place}"] for end in (one, one + difference))
        estimates.append((a.last.distance(b.last) ** 2, a.change**2))
        assert b.last.norm == pytest.approx((one + difference).norm().item())
    (distance, change), (true, moved) = (
        torch.tensor(estimates).mean(dim=0).sqrt(),
        (difference.norm(), (one - first).norm()),
    )
    assert distance == pytest.approx(true, rel=0.2) and change == pytest.approx(moved, rel=0.2)


def test_a_sketch_of_few_elements_is_exact_and_leaves_random_numbers_alone() -> None:
    torch.manual_seed(0)
    drawn, one = torch.rand(1), torch.tensor([3.0, -4.0])
    torch.manual_seed(0)
    found = sketched({"bias": torch.zeros(2)}, {"bias": one})["bias"]
    assert found.change == 5 and found.last.distance(sketched({"bias": one}, {"bias": -one})["bias"].last) == 10
    assert torch.equal(torch.rand(1), drawn)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_have_digests_and_sketches(dtype: torch.dtype) -> None:
    one = torch.randn(4, 2, dtype=dtype)
    found = sketched({"weight": one}, {"weight": one.conj()})["weight"]
    assert found.change == pytest.approx(2 * one.imag.norm().item()) and found.last.norm == pytest.approx(
        one.norm().item()
    )
    assert digest_parameters([one]) == digest_parameters([one.clone()]) != digest_parameters([one.conj()])


def test_what_has_no_sketch_is_left_out() -> None:
    begun = {
        "kept": torch.ones(3),
        "empty": torch.ones(0),
        "nan": torch.ones(2),
        "counter": torch.ones(1, dtype=torch.int64),
    }
    ended = {**begun, "nan": torch.tensor([1.0, math.nan]), "new": torch.ones(2)}
    assert sketched(begun, ended).keys() == {"kept", "empty"} and sketch_tensors([]) == ()
