"""Test that benchmarks/grouped_products.py measures each product of experts."""

import pytest
import torch

from benchmarks import grouped_products
from benchmarks.grouped_products import measure, products
from launch.contract.spec import Model

MODEL = Model(hidden_size=64, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32)


def test_each_product_of_both_layers_has_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_products, "CALLS", 1)
    rows = dict(measure(MODEL, 64, "cpu"))
    assert len(rows) == 8 and "fc1 64 x 64, weight gradient, added" in rows and "fc2 32 x 64, forward" in rows
    assert all(float(figures["torch"]) >= 0 for figures in rows.values())


def test_the_products_are_those_of_autograd() -> None:
    x, weight = torch.randn(8, 4).bfloat16().requires_grad_(), torch.randn(2, 4, 6).bfloat16().requires_grad_()
    dy, offsets = torch.randn(8, 6).bfloat16(), torch.tensor([3, 8], dtype=torch.int32)
    result = torch.cat([x[:3] @ weight[0], x[3:] @ weight[1]])
    result.backward(dy)
    found = products(x.detach(), dy, weight.detach(), offsets)
    expected = {"forward": result, "input gradient": x.grad, "weight gradient": weight.grad}
    for name, tensor in expected.items():
        assert torch.allclose(found[name]["torch"](), tensor, atol=0.05), name
    for times in (1, 2):
        assert torch.allclose(found["weight gradient, added"]["torch"](), times * weight.grad.float(), atol=0.2)
