"""Digests of layers: what they see, that they change nothing, and that a fault put into one layer is found there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from analysis.graphs.layer_divergence import DigestDifference, OfRanks, first_difference
from launch.contract.paths import AttemptPaths
from launch.contract.records.layer_digests import MISSING, hexadecimal, layer_names, read_digests
from launch.contract.records.step_metrics import read_metrics
from launch.contract.spec import Parallelism, RunSpec
from launch.engines.protocol import RankPlace
from launch.engines.torch_native import layer_digests
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.layer_digests import digest
from tests.distributed import workers
from tests.numerics.digested import DTYPES, Fault, OtherGradient, in_layer, sound, train_ranks, trained, with_other_bit
from tests.numerics.tiny import CPU, DENSE, MOE, make_spec, train

STEPS = 4
SPEC = dataclasses.replace(make_spec(dataclasses.replace(MOE, num_layers=3), steps=STEPS), digest_steps=STEPS)
NAMES = layer_names(3)


# --- what a digest sees ---------------------------------------------------------------------------------------------


@given(data=st.data(), dtype=st.sampled_from(list(DTYPES)), size=st.integers(1, 40), at_once=st.integers(1, 16))
def test_any_bit_and_any_exchange_is_seen(data: st.DataObject, dtype: torch.dtype, size: int, at_once: int) -> None:
    """In pieces of any size: a flipped bit, the sign of a zero and bits of a NaN too, and two unequal elements exchanged."""
    integer = DTYPES[dtype]
    width = torch.iinfo(integer).bits
    value = st.one_of(st.just(0), st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1))
    bits = torch.tensor(data.draw(st.lists(value, min_size=size, max_size=size)), dtype=integer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_digests, "CHUNK_ELEMENTS", at_once)
        before = digest([bits.view(dtype)])
        assert digest([bits.clone().view(dtype)]) == before
        flipped = bits.clone()
        one = torch.tensor(1, dtype=integer)
        flipped[data.draw(st.integers(0, size - 1))] ^= one << data.draw(st.integers(0, width - 1))
        assert digest([flipped.view(dtype)]) != before
        other = bits.clone()
        other[data.draw(st.integers(0, size - 1))] ^= -1
        assert digest([other.view(dtype)]) != before, "all bits of one"
        i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
        exchanged = bits.clone()
        exchanged[[i, j]] = bits[[j, i]]
        assert (digest([exchanged.view(dtype)]) == before) == bool(bits[i] == bits[j])


def test_a_digest_is_the_same_however_it_is_cut_and_laid_out() -> None:
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(1))
    whole = digest([x])
    assert digest([x[:2], x[2:]]) == whole == digest([x.t().contiguous().t()])
    assert digest([x.t()]) != whole
    assert digest([torch.zeros(8)]) != digest([torch.zeros(9)])
    assert digest([torch.zeros(8)]) != digest([-torch.zeros(8)])
    assert hexadecimal(int(digest([torch.zeros(())]))) != MISSING, "a loss of exactly 0"


# --- one rank -------------------------------------------------------------------------------------------------------


def recorded(root: Path, ranks: int = 1) -> OfRanks:
    return [tuple(read_digests(AttemptPaths(root / "1"), rank)) for rank in range(ranks)]


def numbers(root: Path) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in read_metrics(AttemptPaths(root / "1"))]


def located(spec: RunSpec, root: Path, fault: Fault, ranks: int = 1) -> DigestDifference | None:
    for name, one in (("sound", sound), ("faulty", fault)):
        trained(spec, root / name, one)
    return first_difference(
        recorded(root / "sound", ranks), recorded(root / "faulty", ranks), layer_names(spec.model.num_layers)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eager_repeats_agree_and_digests_change_nothing(tmp_path: Path, precision: str) -> None:
    spec = dataclasses.replace(SPEC, training=dataclasses.replace(SPEC.training, precision=precision))
    for name in "ab":
        trained(spec, tmp_path / name)
    assert recorded(tmp_path / "a") == recorded(tmp_path / "b")
    (steps,) = recorded(tmp_path / "a")
    assert [one.step for one in steps] == list(range(STEPS))
    assert tuple(steps[0].outputs) == tuple(steps[0].gradients) == NAMES
    assert {len(row) for row in steps[0].outputs.values()} == {spec.num_microbatches} == {4}
    assert tuple(steps[0].parameters) == NAMES[:-1], "the loss holds none"
    trained(dataclasses.replace(spec, digest_steps=0), tmp_path / "c")
    assert len(numbers(tmp_path / "a")) == STEPS
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b") == numbers(tmp_path / "c")
    assert not AttemptPaths(tmp_path / "c" / "1").digests(0).exists()


def test_digests_are_written_where_a_graph_would_write_them_again() -> None:
    """A replay writes to the addresses of its capture, and to none that is given out anew."""
    engine = TorchNativeEngine(SPEC, RankPlace(0, 1, CPU))
    digested = engine._digester
    assert digested is not None
    static = (digested._outputs, digested._gradients, digested._parameter_gradients)
    addresses = [tensor.data_ptr() for tensor in static]
    results = train(engine, SPEC)
    assert [
        tensor.data_ptr() for tensor in (digested._outputs, digested._gradients, digested._parameter_gradients)
    ] == addresses
    taken = [result.digests.outputs.data_ptr() for result in results if result.digests]
    assert len({*taken, addresses[0]}) == STEPS + 1, "and what a step gives is its own"


def test_only_the_first_steps_are_digested(tmp_path: Path) -> None:
    trained(dataclasses.replace(SPEC, digest_steps=2), tmp_path)
    ((first, second),) = recorded(tmp_path)
    assert (first.step, second.step) == (0, 1) and first != second


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_is_computed_twice_is_digested_as_once(tmp_path: Path, recompute: str) -> None:
    training = dataclasses.replace(SPEC.training, recompute=recompute)
    for name, spec in (("none", SPEC), ("again", dataclasses.replace(SPEC, training=training))):
        trained(spec, tmp_path / name)
    assert recorded(tmp_path / "none") == recorded(tmp_path / "again")


# --- faults put into one layer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "step", "micro_batch"), [(0, 0, 0), (1, 2, 3), (2, 3, 1)])
def test_one_bit_of_a_layers_output_is_found_there(tmp_path: Path, layer: int, step: int, micro_batch: int) -> None:
    found = located(SPEC, tmp_path, lambda engine: in_layer(engine, layer, 4 * step + micro_batch, with_other_bit))
    assert found == DigestDifference(step, "outputs", micro_batch, (f"decoder layer {layer}",), (0,))


def test_one_bit_of_a_gradient_is_found_in_the_backward_pass(tmp_path: Path) -> None:
    """Of what layer 1 gives: the gradient that flows into the layer is other than the one that its output has."""

    def fault(engine: TorchNativeEngine) -> None:
        def hook(module: nn.Module, inputs: Any) -> Any:
            x, *others = inputs
            return (OtherGradient.apply(x) if next(calls) == 2 * 4 + 1 else x, *others)

        calls: Iterator[int] = iter(range(1 << 30))
        engine.chunks[0].layers["1"].register_forward_pre_hook(hook)

    assert located(SPEC, tmp_path, fault) == DigestDifference(2, "gradients", 1, ("decoder layer 0",), (0,))


def test_a_parameters_gradient_and_what_an_update_makes_are_told_apart(tmp_path: Path) -> None:
    def gradient(engine: TorchNativeEngine) -> None:
        finish, steps = engine.flat_parameters.finish, iter(range(STEPS))

        def other() -> None:
            finish()
            if next(steps) == 1:
                norm = engine.chunks[0].layers["2"].mlp_norm
                engine.flat_parameters.gradients_of(norm)[0][0] *= 2

        engine.flat_parameters.finish = other  # type: ignore[method-assign]

    def update(engine: TorchNativeEngine) -> None:
        set_rate, steps = engine._optimizer.set_rate, iter(range(STEPS))
        engine._optimizer.set_rate = lambda step: set_rate(step + (next(steps) == 1))  # type: ignore[method-assign]

    found = located(SPEC, tmp_path / "gradient", gradient)
    assert found == DigestDifference(1, "parameter_gradients", None, ("decoder layer 2",), (0,))
    found = located(SPEC, tmp_path / "update", update)
    assert found == DigestDifference(1, "parameters", None, NAMES[:-1], (0,))


# --- several ranks --------------------------------------------------------------------------------------------------


def test_the_layer_has_its_number_in_the_whole_and_the_rank_is_named(tmp_path: Path) -> None:
    """Four virtual stages of a layer each on two stages of two tensor-parallel ranks: layer 2 is the second chunk of the
    first stage."""
    layout = Parallelism(tp=2, pp=2, vpp=2, schedule="interleaved")
    model = dataclasses.replace(DENSE, num_layers=4, vocab_size=32)
    spec = dataclasses.replace(make_spec(model, steps=2), parallelism=layout, digest_steps=2)
    assert spec.num_microbatches == 4
    workers(4).run(train_ranks, spec, tmp_path, 2, 4 + 2, 1)
    one, other = (recorded(tmp_path / name, 4) for name in ("sound", "faulty"))
    assert first_difference(one, other, layer_names(4)) == DigestDifference(1, "outputs", 2, ("decoder layer 2",), (1,))
    assert set(one[0][0].outputs) == {"embedding", "decoder layer 0", "decoder layer 2"}
    assert set(one[3][0].outputs) == {"decoder layer 1", "decoder layer 3", "final norm", "output layer", "loss"}
