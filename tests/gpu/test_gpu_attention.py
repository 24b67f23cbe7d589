"""On a GPU, compare every attention backend with the plain formula in float64, and test that none builds a matrix of
scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.contract.spec import Model
from launch.engines.determinism import use_deterministic_algorithms
from launch.engines.torch_native.layers.attention_backends import CoreAttention, Positions, block_masks, plain_attention

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
LENGTH = 384
MODEL = Model(num_attention_heads=8, num_query_groups=2, kv_channels=64)
WINDOW = replace(MODEL, window_size=100)
SINKS = replace(MODEL, attention_sinks=True)
GPT_OSS = replace(WINDOW, attention_sinks=True)
# On tensor cores, products of float32 matrices have at best the precision of TF32.
ROUNDING = {torch.float32: 2e-3, torch.bfloat16: 2e-2}

CASES = {
    "sdpa": ("sdpa", MODEL, torch.bfloat16, False),
    "sdpa, fp32": ("sdpa", MODEL, torch.float32, False),
    "flex": ("flex", MODEL, torch.bfloat16, False),
    "flex, window": ("flex", WINDOW, torch.bfloat16, False),
    "flex, sinks": ("flex", SINKS, torch.bfloat16, False),
    "flex, both": ("flex", GPT_OSS, torch.bfloat16, False),
    "flex, both, fp32": ("flex", GPT_OSS, torch.float32, False),
    "flex, packed": ("flex", MODEL, torch.bfloat16, True),
    "flex, both, packed": ("flex", GPT_OSS, torch.bfloat16, True),
    "transformer_engine": ("transformer_engine", MODEL, torch.bfloat16, False),
    "transformer_engine, window": ("transformer_engine", WINDOW, torch.bfloat16, False),
    "transformer_engine, sinks": ("transformer_engine", SINKS, torch.bfloat16, False),
    "transformer_engine, both": ("transformer_engine", GPT_OSS, torch.bfloat16, False),
}


def inputs(model: Model, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Draw queries, keys, values and sinks."""
    generator = torch.Generator(GPU).manual_seed(3)
    shapes = [
        (2, length, heads, model.kv_channels) for heads in (model.num_attention_heads, *[model.num_query_groups] * 2)
    ]
    shapes.append((model.num_attention_heads,))
    return [torch.randn(shape, device=GPU, dtype=dtype, generator=generator) for shape in shapes]


def positions(core: CoreAttention, documents: torch.Tensor | None, length: int) -> Positions:
    nothing = torch.empty(0, device=GPU)
    masks = block_masks({core.window} if core.backend(GPU) == "flex" else set(), length, documents, GPU)
    return Positions((nothing, nothing), documents, masks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(("backend", "model", "dtype", "packed"), CASES.values(), ids=CASES.keys())
def test_outputs_and_gradients_equal_the_plain_formula(
    backend: str, model: Model, dtype: torch.dtype, packed: bool
) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(model, LENGTH, dtype)]
    documents = torch.arange(LENGTH, device=GPU).floor_divide(75).repeat(2, 1) if packed else None
    core = CoreAttention(model, 0, backend, packed)
    assert core.backend(GPU) == backend
    sinks = tensors[3] if model.attention_sinks else None
    query, key, value = tensors[:3]
    found = core(query, key, value, sinks, positions(core, documents, LENGTH))

    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    query, key, value = (tensor.transpose(1, 2) for tensor in exact[:3])
    exact_sinks = exact[3] if model.attention_sinks else None
    expected = plain_attention(query, key, value, exact_sinks, model.window_size, documents).transpose(1, 2)

    weight = torch.randn(found.shape, device=GPU, dtype=dtype, generator=torch.Generator(GPU).manual_seed(4))
    count = 4 if model.attention_sinks else 3
    gradients = torch.autograd.grad((found * weight).sum(), tensors[:count])
    plain = torch.autograd.grad((expected * weight.double()).sum(), exact[:count])
    for name, one, other in zip(
        ("output", "q", "k", "v", "sinks"), (found, *gradients), (expected, *plain), strict=False
    ):
        error = (one.double() - other).norm() / other.norm()
        assert error < ROUNDING[dtype], f"{name}: relative error {error:.2g}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("backend", "model", "dtype", "packed"),
    [CASES[name] for name in ("sdpa", "sdpa, fp32", "flex, both", "flex, both, packed", "transformer_engine, both")],
)
def test_no_backend_holds_a_matrix_of_scores(backend: str, model: Model, dtype: torch.dtype, packed: bool) -> None:
    length = 32_768
    model = replace(model, num_attention_heads=2, num_query_groups=1)
    tensors: list[Any] = [tensor.requires_grad_() for tensor in inputs(model, length, dtype)]
    documents = torch.arange(length, device=GPU).floor_divide(5000).repeat(2, 1) if packed else None
    core = CoreAttention(model, 0, backend, packed)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    query, key, value, sinks = tensors
    core(
        query, key, value, sinks if model.attention_sinks else None, positions(core, documents, length)
    ).sum().backward()
    added = torch.cuda.max_memory_allocated() - before
    assert added < length * length, f"{added / 2**20:.0f} MiB: one byte a score of one head would be {length**2 >> 20}"


@pytest.fixture
def deterministic() -> Iterator[None]:
    use_deterministic_algorithms()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(("backend", "varies"), [("flex", False), ("transformer_engine", True)])
def test_transformer_engine_adds_the_gradient_of_sinks_in_a_varying_order(backend: str, varies: bool) -> None:
    """A release of which this fails for ``transformer_engine`` no longer needs the rules that refuse it."""
    model = replace(SINKS, num_attention_heads=64, num_query_groups=8)
    tensors = [tensor.requires_grad_() for tensor in inputs(model, 4096, torch.bfloat16)]
    tensors[3] = tensors[3].detach().float().requires_grad_()  # In bf16 rounding hides the change.
    query, key, value, sinks = tensors
    core = CoreAttention(model, 0, backend, False)
    runs = []
    for _ in range(20):
        found = core(query, key, value, sinks, positions(core, None, 4096))
        runs.append(torch.autograd.grad(found.float().square().sum(), tensors))
    unequal = [any(not torch.equal(run[number], runs[0][number]) for run in runs) for number in range(4)]
    assert unequal == [False, False, False, varies]
