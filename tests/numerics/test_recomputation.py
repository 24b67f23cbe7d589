"""Test recomputation of named modules: results are equal bit for bit, and the backward pass needs less memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from launch.contract.spec import Model, RunSpec, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from tests.numerics.tiny import CPU, GPT_OSS, MOE, make_decoder, make_spec, train

MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
MIXED = replace(MOE, num_layers=4, moe_layer_freq=2, moe_shared_expert_ffn_hidden_size=48, ffn_hidden_size=48)
TOGETHER = ("core_attn", "layernorm", "mlp", "moe_act", "shared_experts")


class Allocations(TorchDispatchMode):
    """Record the memory of every tensor that is computed within the block."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def kept(self) -> int:
        """Return the bytes of those that are still alive."""
        return sum(size for storage, size in self._storages.items() if not storage.expired())


def kept_bytes(model: Model, training: Training) -> int:
    """Return the bytes that a forward pass keeps for its backward pass."""
    decoder = make_decoder(model, 1, torch.float32, CPU, training)
    tokens = torch.randint(model.vocab_size, (2, 33), generator=torch.Generator().manual_seed(1))
    with Allocations() as allocations:
        objective = decoder(tokens).objective
    kept = allocations.kept()
    objective.backward()  # The graph stays alive until here.
    return kept


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("modules", [*((name,) for name in MODULES), TOGETHER], ids="+".join)
def test_recomputed_modules_leave_losses_and_norms_to_the_bit(modules: tuple[str, ...], precision: str) -> None:
    plain = make_spec(MIXED, precision=precision, steps=3)
    recomputed = replace(plain, training=replace(plain.training, recompute="selective", recompute_modules=modules))
    assert results(recomputed) == results(plain)


def test_recomputed_modules_with_biases_and_dropped_tokens() -> None:
    padded = replace(GPT_OSS, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    for model in (replace(GPT_OSS, num_layers=1), replace(padded, num_layers=1)):
        plain = make_spec(model, steps=2)
        recomputed = replace(plain.training, recompute="selective", recompute_modules=("layernorm", "moe_act"))
        assert results(replace(plain, training=recomputed)) == results(plain)


def test_each_recomputed_module_is_not_kept() -> None:
    """Attention has windows. Fused kernels keep no more than their results."""
    windowed = replace(MIXED, window_size=4)

    def kept(*modules: str) -> int:
        recompute: Any = "selective" if modules else "none"
        return kept_bytes(windowed, Training(recompute=recompute, recompute_modules=modules))

    plain, alone = kept(), {name: kept(name) for name in MODULES}
    assert all(size < 0.98 * plain for size in alone.values()), (plain, alone)
    assert alone["moe"] < min(alone["moe_act"], alone["shared_experts"])
    assert kept(*TOGETHER) < min(alone[name] for name in TOGETHER)


def results(spec: RunSpec) -> list[tuple[float, float]]:
    return [
        (step.loss.item(), step.grad_norm.item()) for step in train(TorchNativeEngine(spec, RankPlace(0, 1, CPU)), spec)
    ]
