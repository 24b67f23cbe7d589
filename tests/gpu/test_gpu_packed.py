"""On a GPU, test packed sequences in Megatron-Core with Transformer Engine's attention: real text, whose lines are documents."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from launch.contract.errors import CaptureError
from launch.contract.spec import CudaGraph, Data, Model, RunSpec
from launch.engines.protocol import RankPlace
from launch.failures.classes import classify
from launch.support import unsupported
from launch.train.data_loader import batch, open_source
from orchestrator.rules import refusals
from tests.gpu.megatron_training import (
    DENSE,
    EAGER,
    MODELS,
    PADDED,
    WHOLE,
    Trained,
    check,
    deterministic,
    deterministic_of,
    gradients_apart,
    gradients_of,
    named,
    no_groups_left,
    results_of,
    spec_of,
    trained,
)
from tests.gpu.test_gpu_eager import GPT_OSS, MOE
from tests.megatron_release import RELEASE

__all__ = ["deterministic", "no_groups_left"]

# Megatron-Core and Transformer Engine cause these warnings.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = torch.device("cuda", 0)
LENGTH = 256
NEWLINE = 10
ROUTER = ("moe_router", "moe_preprocess")
CASES: list[tuple[str, CudaGraph]] = [
    ("dense", CudaGraph("transformer_engine", ("mlp",))),
    ("moe", CudaGraph("transformer_engine", ("moe_router",))),
    ("moe", CudaGraph("transformer_engine", ROUTER)),
    ("padded", CudaGraph("transformer_engine", ("moe",))),
]
if RELEASE != "0.16":
    # 0.16.1 dies of an illegal memory access in whole steps, so a rule rejects them (capture.packed_whole_step).
    CASES += [("dense", WHOLE), ("padded", WHOLE), ("padded, steered", WHOLE)]


def packed(spec: RunSpec) -> RunSpec:
    """Return ``spec`` with sequences of 256 bytes, which hold up to 26 lines of Python's standard library."""
    sequences = spec.num_microbatches
    training = replace(spec.training, sequence_length=LENGTH, micro_batch_size=1, global_batch_size=sequences)
    return replace(
        spec, training=training, data=Data("text", eod_token=NEWLINE, packed_sequences=True, max_documents=32)
    )


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_packed_documents_are_as_if_alone(model: Model) -> None:
    """The loss and every gradient are those of the documents one by one. With large weights, attention across documents shows."""
    from launch.engines.megatron.engine import MegatronEngine

    # Router losses are means over the tokens of a pass.
    spec = packed(spec_of(replace(model, init_std=0.1, moe_aux_loss_coeff=0.0), EAGER))
    spec = replace(spec, training=replace(spec.training, global_batch_size=1))
    assert unsupported(spec) == ()
    tokens = batch(open_source(spec.data, spec.model.vocab_size, spec.training.seed), spec, 0, 0).to(DEVICE)
    engine = MegatronEngine(spec, RankPlace(0, 1, DEVICE))
    row = tokens[0, 0]
    ends = [place + 1 for place in range(LENGTH - 1) if row[place] == NEWLINE]
    assert len(ends) > 3

    def passes(borders: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
        engine._clear_gradients()
        total = 0.0
        for start, end in zip([0, *borders], [*borders, LENGTH], strict=True):
            positions = torch.arange(end - start, device=DEVICE).unsqueeze(0)
            document, labels = row[start:end].unsqueeze(0), row[start + 1 : end + 1].unsqueeze(0).contiguous()
            loss = engine.chunks[0](document, positions, None, labels=labels).float().sum() / LENGTH
            loss.backward()
            total += loss.item()
        return total, gradients_of(engine)

    (alone, expected), (whole, crossed) = passes(ends), passes([])
    loss = engine.step(tokens).loss.item()
    found = gradients_of(engine)
    engine.close()
    print(f"packed {loss}, documents alone {alone}, one long document {whole}")
    assert abs(loss - alone) < 0.1 * abs(whole - alone), (loss, alone, whole)
    off, wrong = gradients_apart(found, expected), gradients_apart(crossed, expected)
    # An expert whose tokens all are in the first document sees no other one.
    shared = [share for name, share in wrong.items() if ".experts." not in name]
    # In bfloat16 a few tokens may choose another expert.
    assert max(off.values()) < 0.2 and min(shared) > 0.4, (off, wrong)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_both_engines_train_the_same_on_packed_sequences(model: Model) -> None:
    spec = packed(spec_of(model, EAGER))
    found, expected = results_of(spec), results_of(replace(spec, engine="torch_native"))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=3e-2)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-1, atol=0)


@cache
def eager_twins(name: str) -> tuple[Trained, Trained]:
    first, second = (trained(packed(spec_of(MODELS[name], EAGER))) for _ in range(2))
    return first, second


@pytest.mark.parametrize("case", CASES, ids=named)
def test_graphs_compute_what_eager_code_computes_on_packed_sequences(case: tuple[str, CudaGraph]) -> None:
    """Every step has other borders of documents."""
    name, graph = case
    spec = packed(spec_of(MODELS[name], graph))
    assert refusals(spec) == ()
    check(trained(spec), *eager_twins(name), graph)


@pytest.mark.skipif(RELEASE == "0.16", reason="capture.packed_whole_step rejects whole steps")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("model", [DENSE, PADDED], ids=["dense", "padded"])
def test_whole_steps_on_packed_sequences_are_equal_to_the_bit(model: Model) -> None:
    first, *others = (
        trained(deterministic_of(packed(spec_of(model, graph)), False)) for graph in (EAGER, EAGER, WHOLE)
    )
    for other in others:
        assert torch.equal(other.losses, first.losses) and torch.equal(other.norms, first.norms)


def test_megatron_core_replays_no_attention_of_packed_sequences() -> None:
    """If this test fails, the rule that rejects it needs other releases."""
    spec = packed(spec_of(DENSE, CudaGraph("transformer_engine", ("attn",))))
    assert [reason.rule for reason in refusals(spec)] == ["capture.packed_sequences"]
    with pytest.raises((AssertionError, CaptureError), match="CUDA graph accepts only Tensor inputs"):
        trained(spec)


def test_transformer_engine_has_no_attention_for_packed_sequences_with_sinks() -> None:
    """Eager code fails too, before any capture. If this test fails, this Transformer Engine needs no rule."""
    spec = packed(spec_of(GPT_OSS, EAGER))
    expected = ["megatron.packed_sinks"] if RELEASE == "0.16" else []
    assert [reason.rule for reason in refusals(spec)] == expected
    with pytest.raises(Exception, match="attention") as raised:
        trained(spec)
    found: Any = classify(type(raised.value).__name__, str(raised.value), "warmup")
    print(f"{type(raised.value).__name__}: {raised.value}")
    assert found is not None and found.name == "ATTENTION_BACKEND", str(raised.value)
