"""The decoder against the same mathematics written plainly, in float64, gradients included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launch.engines.torch_native.grouped_mm import grouped_mm
from launch.engines.torch_native.model import Decoder, build_decoder
from launch.engines.torch_native.weights import draw_weights
from launch.spec import Model
from tests.numerics import reference
from tests.numerics.tiny import CPU, DENSE, MOE

MODELS = {
    "dense": DENSE,
    "dense, tied, one head a group, no qk-norm": replace(
        DENSE, tie_embeddings=True, num_query_groups=4, qk_layernorm=False
    ),
    "moe": MOE,
    "moe, top-k before softmax": replace(MOE, moe_router_order="topk_then_softmax"),
    "moe, weights not normalised": replace(MOE, moe_router_normalize_topk=False),
    "moe, router losses": replace(MOE, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1),
    "moe, every second layer": replace(MOE, num_layers=3, moe_layer_freq=2),
    "moe, one expert a token": replace(MOE, moe_router_topk=1, moe_router_normalize_topk=False),
}


def tokens_for(model: Model, batch: int = 2, sequence: int = 6) -> torch.Tensor:
    return torch.randint(model.vocab_size, (batch, sequence + 1), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_losses_and_gradients_equal_the_plain_formula(model: Model) -> None:
    decoder = build_decoder(model, 1, torch.float64, CPU)
    for name, parameter in decoder.named_parameters():  # ones would hide a norm's weight that is not applied
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    tokens = tokens_for(model)
    weights = dict(decoder.named_parameters())

    found = decoder(tokens)
    expected = reference.losses(tokens, weights, model)

    torch.testing.assert_close(tuple(found), expected, rtol=1e-11, atol=1e-11)
    gradients = torch.autograd.grad(found.objective, list(weights.values()))
    references = torch.autograd.grad(expected[0], list(weights.values()))
    for name, gradient, plain in zip(weights, gradients, references, strict=True):
        torch.testing.assert_close(
            gradient, plain, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_compute_the_same_within_their_rounding(dtype: torch.dtype) -> None:
    tokens = tokens_for(MOE, batch=8, sequence=16)
    exact = build_decoder(MOE, 1, torch.float64, CPU)(tokens).cross_entropy
    rounded = build_decoder(MOE, 1, dtype, CPU)(tokens).cross_entropy
    assert rounded.dtype == torch.float32
    assert abs(rounded.item() - exact.item()) < (1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_experts_without_tokens_take_no_part_and_get_zero_gradients(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 3, 2, dtype=dtype, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    product = grouped_mm(x, weight, offsets)
    torch.testing.assert_close(product, torch.cat((x[:2] @ weight[1], x[2:] @ weight[3])))
    product.square().sum().backward()
    assert weight.grad is not None
    assert [bool(gradient.any()) for gradient in weight.grad] == [False, True, False, True]


def test_grouped_mm_is_a_well_formed_operator() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    arguments = (x, weight, torch.tensor([2, 5], dtype=torch.int32))
    torch.library.opcheck(torch.ops.launch.grouped_mm.default, arguments)


def test_weights_depend_on_seed_and_name_alone() -> None:
    decoder = build_decoder(MOE, 1, torch.float32, CPU)
    torch.manual_seed(99)
    deeper = build_decoder(replace(MOE, num_layers=5, num_moe_experts=7), 1, torch.float32, CPU)
    torch.testing.assert_close(
        decoder.layers[1].attention.qkv.weight, deeper.layers[1].attention.qkv.weight, rtol=0, atol=0
    )
    # Expert 2 is expert 2 however many there are, so that expert parallelism can draw its own alone.
    torch.testing.assert_close(decoder.layers[1].mlp.gate_up[2], deeper.layers[1].mlp.gate_up[2], rtol=0, atol=0)
    reseeded = build_decoder(MOE, 2, torch.float32, CPU)
    assert not torch.equal(decoder.embedding.weight, reseeded.embedding.weight)
    assert not torch.equal(decoder.layers[0].attention.qkv.weight, decoder.layers[1].attention.qkv.weight)


def test_weights_do_not_depend_on_the_order_of_construction() -> None:
    first, second = Decoder(MOE), Decoder(MOE)
    modules = dict(second.named_children())
    for name in reversed(modules):
        delattr(second, name)
    for name in reversed(modules):
        setattr(second, name, modules[name])
    draw_weights(first, MOE, 1)
    draw_weights(second, MOE, 1)
    assert list(first.state_dict()) != list(second.state_dict())
    torch.testing.assert_close(
        first.state_dict(), {name: second.state_dict()[name] for name in first.state_dict()}, rtol=0, atol=0
    )


def test_first_weights_have_the_deviation_asked_for() -> None:
    wide = replace(MOE, hidden_size=256, vocab_size=256, init_std=0.02, num_layers=8)
    decoder = build_decoder(wide, 1, torch.float32, CPU)
    assert decoder.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert decoder.layers[0].mlp.down.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert decoder.layers[0].attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
