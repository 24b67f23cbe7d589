"""Compare the decoder with the same mathematics in plain formulas, in float64, including gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launch.contract.spec import Model, Training
from launch.engines.torch_native.decoder import Decoder
from launch.engines.torch_native.init.initial_weights import draw_weights
from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.moe.router import Router
from launch.engines.torch_native.parallel.tensor_parallel import TensorParallel
from launch.engines.torch_native.products.grouped_mm import grouped_mm
from tests.numerics import reference
from tests.numerics.tiny import CPU, DENSE, GPT_OSS, MOE, make_decoder

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
    "moe, sigmoid": replace(MOE, moe_router_score_function="sigmoid", moe_aux_loss_coeff=0.1),
    "moe, expert bias": replace(
        MOE, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_aux_loss_coeff=0.1
    ),
    "moe, shared expert": replace(MOE, moe_shared_expert_ffn_hidden_size=12),
    "moe, drop and pad": replace(MOE, moe_expert_capacity_factor=0.75, moe_pad_expert_input_to_capacity=True),
    "moe, drop and pad with room to spare": replace(
        MOE, moe_expert_capacity_factor=4.0, moe_pad_expert_input_to_capacity=True
    ),
    "biases": replace(DENSE, add_bias_linear=True),
    "qkv biases": replace(DENSE, add_qkv_bias=True),
    "llama 3 scaling": replace(
        DENSE,
        kv_channels=16,
        rope_scaling="llama3",
        rope_scaling_factor=8.0,
        rope_original_max_position=64,
        rotary_base=100.0,
    ),
    "yarn": replace(
        DENSE,
        kv_channels=16,
        rope_scaling="yarn",
        rope_scaling_factor=4.0,
        rope_original_max_position=64,
        rope_beta_fast=8.0,
        rotary_base=100.0,
    ),
    "window": replace(DENSE, window_size=3),
    "window on every other layer, sinks": replace(DENSE, window_size=2, window_attn_skip_freq=2, attention_sinks=True),
    "gpt-oss": GPT_OSS,
    "gpt-oss, drop and pad": replace(
        GPT_OSS, moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=True, num_layers=1
    ),
}


def tokens_for(model: Model, batch: int = 2, sequence: int = 6) -> torch.Tensor:
    return torch.randint(model.vocab_size, (batch, sequence + 1), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_losses_and_gradients_equal_the_plain_formula(model: Model) -> None:
    decoder = make_decoder(model, 1, torch.float64, CPU)
    disturb(decoder)
    compare(decoder, tokens_for(model), model)


def disturb(decoder: Decoder) -> None:
    """Change all norms, biases and sinks. With ones and zeros, a test would not notice that they are not applied."""
    with torch.no_grad():
        for name, tensor in [*decoder.named_parameters(), *decoder.named_buffers()]:
            if tensor.dim() == 1 or name.endswith("bias"):
                tensor += 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))


def compare(decoder: Decoder, tokens: torch.Tensor, model: Model, eod_token: int | None = None) -> None:
    weights = dict(decoder.named_parameters())
    found = decoder(tokens)
    expected = reference.losses(tokens, weights | dict(decoder.named_buffers()), model, eod_token)

    torch.testing.assert_close((found.objective, found.cross_entropy), expected, rtol=1e-11, atol=1e-11)
    gradients = torch.autograd.grad(found.objective, list(weights.values()))
    references = torch.autograd.grad(expected[0], list(weights.values()))
    for name, gradient, plain in zip(weights, gradients, references, strict=True):
        torch.testing.assert_close(
            gradient, plain, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_packed_documents_are_as_if_alone() -> None:
    """Position and mask start again after each end of a document, wherever it is."""
    model = replace(DENSE, window_size=4, window_attn_skip_freq=2)
    end = 3
    decoder = make_decoder(model, 1, torch.float64, CPU, Training(), end)
    tokens = torch.tensor([[5, end, 7, 8, 9, end, end, 11], [1, 2, 4, 5, 6, 7, 8, end], [end, 2, 4, 5, 6, end, 8, 9]])
    compare(decoder, tokens, model, end)


@pytest.mark.parametrize("model", [MOE, replace(GPT_OSS, num_layers=2)], ids=["moe", "gpt-oss"])
@pytest.mark.parametrize(
    "training",
    [
        Training(recompute="selective"),
        Training(recompute="full"),
        pytest.param(Training(compile="elementwise"), marks=pytest.mark.slow),
    ],
    ids=["selective", "full", "compiled"],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_how_a_step_is_run_changes_nothing(model: Model, training: Training) -> None:
    decoder = make_decoder(model, 1, torch.float64, CPU, training)
    disturb(decoder)
    compare(decoder, tokens_for(model), model)


def test_recomputation_saves_what_it_is_to_save() -> None:
    saved = {}
    for recompute in ("none", "selective", "full"):
        training = Training(recompute=recompute)  # type: ignore[arg-type]
        decoder = make_decoder(replace(DENSE, window_size=4, num_layers=4), 1, torch.float32, CPU, training)
        held: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, held=held: held.append(x.numel()) or x, lambda x: x):
            decoder(tokens_for(DENSE, sequence=32))
        saved[recompute] = sum(held)
    assert saved["full"] < saved["none"] / 4
    assert saved["full"] < saved["selective"] < saved["none"]


def test_expert_biases_move_against_the_load() -> None:
    model = replace(MOE, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25)
    (router, _) = make_decoder(model, 1, torch.bfloat16, CPU).routers()
    router.update_expert_bias(torch.tensor([8.0, 2.0, 5.0, 5.0]))
    router.update_expert_bias(torch.tensor([8.0, 2.0, 6.0, 4.0]))
    assert router.expert_bias is not None and router.expert_bias.tolist() == [-0.5, 0.5, -0.25, 0.25]
    assert router.expert_bias.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_compute_the_same_within_their_rounding(dtype: torch.dtype) -> None:
    tokens = tokens_for(MOE, batch=8, sequence=16)
    exact = make_decoder(MOE, 1, torch.float64, CPU)(tokens).cross_entropy
    rounded = make_decoder(MOE, 1, dtype, CPU)(tokens).cross_entropy
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


def test_inductor_leaves_operators_that_read_on_the_host_out_of_its_graphs() -> None:
    for operator in (torch.ops.launch.grouped_mm.default, torch.ops.launch.grouped_mm_weight_gradient.default):
        assert torch.Tag.cudagraph_unsafe in operator.tags


def test_grouped_mm_is_a_well_formed_operator() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    arguments = (x, weight, torch.tensor([2, 5], dtype=torch.int32))
    torch.library.opcheck(torch.ops.launch.grouped_mm.default, arguments)


def test_weights_depend_on_seed_and_name_alone() -> None:
    decoder = make_decoder(MOE, 1, torch.float32, CPU)
    torch.manual_seed(99)
    deeper = make_decoder(replace(MOE, num_layers=5, num_moe_experts=7), 1, torch.float32, CPU)
    torch.testing.assert_close(
        decoder.layers["1"].attention.qkv.weight, deeper.layers["1"].attention.qkv.weight, rtol=0, atol=0
    )
    # An expert's weights do not depend on the number of experts. So each expert-parallel rank can draw only its own
    # experts.
    torch.testing.assert_close(decoder.layers["1"].mlp.gate_up[2], deeper.layers["1"].mlp.gate_up[2], rtol=0, atol=0)
    reseeded = make_decoder(MOE, 2, torch.float32, CPU)
    assert not torch.equal(decoder.embedding.weight, reseeded.embedding.weight)
    assert not torch.equal(decoder.layers["0"].attention.qkv.weight, decoder.layers["1"].attention.qkv.weight)


def test_weights_do_not_depend_on_the_order_of_construction() -> None:
    first, second = Decoder(BuildContext(MOE)), Decoder(BuildContext(MOE))
    modules = dict(second.named_children())
    for name in reversed(modules):
        delattr(second, name)
    for name in reversed(modules):
        setattr(second, name, modules[name])
    draw_weights(first, BuildContext(MOE), 1)
    draw_weights(second, BuildContext(MOE), 1)
    assert list(first.state_dict()) != list(second.state_dict())
    torch.testing.assert_close(
        first.state_dict(), {name: second.state_dict()[name] for name in first.state_dict()}, rtol=0, atol=0
    )


def test_first_weights_have_the_deviation_asked_for() -> None:
    wide = replace(MOE, hidden_size=256, vocab_size=256, init_std=0.02, num_layers=8)
    decoder = make_decoder(wide, 1, torch.float32, CPU)
    assert decoder.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert decoder.layers["0"].mlp.down.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert decoder.layers["0"].attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_a_router_of_bfloat16_computes_in_float32() -> None:
    """Opposite experts have gradients that are equal in bfloat16, so only the difference reaches the tokens."""
    router = Router(MOE, TensorParallel()).bfloat16()
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(64, MOE.hidden_size, generator=drawn).bfloat16().requires_grad_()
    with torch.no_grad():
        router.weight[::2] = torch.randn(2, MOE.hidden_size, generator=drawn)
        router.weight[1::2] = -router.weight[::2]
    gradient = torch.ones(64, 4)
    gradient[:, ::2] += 2.0**-10
    logits = router._logits(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ router.weight.double().t(), rtol=0, atol=1e-5)
    found = torch.autograd.grad(logits, (x, router.weight), gradient)
    expected = gradient.double() @ router.weight.double(), gradient.double().t() @ x.double()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2.0**-7, atol=0)
