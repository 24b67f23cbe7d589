"""Measure the products of experts in bfloat16: PyTorch's grouped_mm, which engine torch_native uses, beside quack-kernels if installed.

    python3 -m benchmarks.grouped_products                       # the experts of three models
    python3 -m benchmarks.grouped_products gpt_oss_20b --tokens 4096

A row is a product of one layer for one micro-batch: forward, gradient of the input, gradient of the weight, and that gradient added to
float32 (PyTorch: the product, then engine torch_native's kernel). Each figure is the median of 30 calls, in TFLOP/s. It has an asterisk if
the numbers differ from PyTorch's by more than rounding.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from time import perf_counter

import torch

from launch.contract.spec import Model
from launch.engines.torch_native.optim.accumulation import FusedAccumulation
from launch.engines.torch_native.products.grouped_mm import grouped_mm

MODELS = {
    "gpt_oss_20b": Model(hidden_size=2880, num_moe_experts=32, moe_router_topk=4, moe_ffn_hidden_size=2880),
    "qwen3_30b_a3b": Model(hidden_size=2048, num_moe_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768),
    "olmoe": Model(hidden_size=2048, num_moe_experts=64, moe_router_topk=8, moe_ffn_hidden_size=1024),
}
CALLS = 30
TOLERANCE = 0.02
"""The most that two libraries' results may differ, as a share of the result's norm."""

Call = Callable[[], torch.Tensor]


def measure(model: Model, tokens: int, device: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name of each product, and its TFLOP/s by library."""
    sizes = {
        "fc1": (model.hidden_size, 2 * model.moe_ffn_hidden_size),
        "fc2": (model.moe_ffn_hidden_size, model.hidden_size),
    }
    rows, experts = tokens * model.moe_router_topk, model.num_moe_experts
    torch.manual_seed(0)
    chosen = torch.randint(experts, (rows,), device=device)
    offsets = torch.bincount(chosen, minlength=experts).cumsum(0).int()
    for layer, (inputs, outputs) in sizes.items():
        x, dy = (torch.randn(rows, size, device=device).bfloat16() for size in (inputs, outputs))
        weight = torch.randn(experts, inputs, outputs, device=device).bfloat16()
        operations = 2 * rows * inputs * outputs
        for name, calls in products(x, dy, weight, offsets).items():
            expected = calls["torch"]().clone().float()
            figures = {}
            for library, call in calls.items():
                found, seconds = call().float(), median_seconds(call, device)
                wrong = (found - expected).norm() > TOLERANCE * expected.norm() and "added" not in name
                figures[library] = f"{operations / seconds / 1e12:.0f}{'*' * bool(wrong)}"
            yield f"{layer} {inputs} x {outputs}, {name}", figures


def products(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
) -> Mapping[str, dict[str, Call]]:
    """Return the products by name, each by library. Additions go on in one tensor, so their numbers are not compared."""
    transposed, added = weight.transpose(1, 2), torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    accumulate = FusedAccumulation()

    def weight_gradient() -> torch.Tensor:
        if x.is_cuda:
            return torch.nn.functional.grouped_mm(x.t(), dy, offs=offsets)
        parts = zip(x.tensor_split(offsets[:-1].tolist()), dy.tensor_split(offsets[:-1].tolist()), strict=True)
        return torch.stack([left.t() @ right for left, right in parts])

    def add_weight_gradient() -> torch.Tensor:
        accumulate(added, weight_gradient(), 1.0, first=False, last=False)
        return added

    found: dict[str, dict[str, Call]] = {
        "forward": {"torch": lambda: grouped_mm(x, weight, offsets)},
        "input gradient": {"torch": lambda: grouped_mm(dy, transposed, offsets)},
        "weight gradient": {"torch": weight_gradient},
        "weight gradient, added": {"torch": add_weight_gradient},
    }
    if x.is_cuda and find_spec("quack"):
        from quack.gemm_interface import gemm, gemm_add_inplace

        bounds = torch.cat([offsets.new_zeros(1), offsets])

        def add_by_quack() -> torch.Tensor:
            gemm_add_inplace(x.t(), dy, added, cu_seqlens_k=bounds)
            return added

        found["forward"]["quack"] = lambda: gemm(x, weight, cu_seqlens_m=bounds)
        found["input gradient"]["quack"] = lambda: gemm(dy, transposed, cu_seqlens_m=bounds)
        found["weight gradient"]["quack"] = lambda: gemm(x.t(), dy, cu_seqlens_k=bounds)
        found["weight gradient, added"]["quack"] = add_by_quack
    return found


def median_seconds(call: Call, device: str) -> float:
    """Return the median time of a call after three others."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = []
    for _ in range(3 + CALLS):
        synchronize()
        begun = perf_counter()
        call()
        synchronize()
        seconds.append(perf_counter() - begun)
    return statistics.median(seconds[3:])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the products of experts.")
    parser.add_argument(
        "models", nargs="*", default=[*MODELS], metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a micro-batch (default: 4096)")
    arguments = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in arguments.models:
        print(
            f"{name}, {arguments.tokens} tokens, TFLOP/s on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'}"
        )
        for product, figures in measure(MODELS[name], arguments.tokens, device):
            print(
                f"  {product:45}",
                "  ".join(f"{library} {figure:>5}" for library, figure in figures.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
