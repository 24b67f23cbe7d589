"""On GPUs, test that Megatron-Core with Transformer Engine's layers trains the same as torch_native, in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launch.contract.spec import Model, Parallelism, Placement, RunSpec, Training
from launch.support import unsupported
from tests.gpu.megatron_training import (  # noqa: F401 (fixtures)
    EAGER,
    MODELS,
    OF_A_GRADIENT,
    OVERLAPPED,
    YARN,
    eager_twins,
    fused,
    gradients_apart,
    no_groups_left,
    results_of,
    spec_of,
    trained,
)
from tests.gpu.test_gpu_eager import GPT_OSS, MOE
from tests.megatron_release import RELEASE

# Megatron-Core and Transformer Engine cause these warnings.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    "model",
    [Model(qk_layernorm=True), MOE, GPT_OSS, replace(YARN, init_std=0.02)],
    ids=["dense", "moe", "gpt-oss", "yarn"],
)
def test_both_engines_train_the_same(model: Model) -> None:
    training = Training(steps=8, global_batch_size=4, micro_batch_size=2, precision="bf16")
    spec = RunSpec(
        engine="megatron", megatron_core=RELEASE, model=model, training=training, placement=Placement(device="cuda")
    )
    assert unsupported(spec) == ()
    found, expected = results_of(spec), results_of(replace(spec, engine="torch_native"))
    # bfloat16 has an error of about 4e-3 in a loss of 5.5 nats. A wrong layout or factor has a far larger one.
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=3e-2)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-1, atol=0)


@pytest.mark.parametrize("model", [Model(qk_layernorm=True), MOE], ids=["dense", "moe"])
def test_exchanges_beside_passes_change_nothing(model: Model) -> None:
    """On one GPU, only hooks and buckets remain of these exchanges."""
    training = Training(steps=8, global_batch_size=4, micro_batch_size=2, precision="bf16")
    spec = RunSpec(
        engine="megatron", megatron_core=RELEASE, model=model, training=training, placement=Placement(device="cuda")
    )
    beside = replace(spec, parallelism=Parallelism(**OVERLAPPED))
    assert unsupported(beside) == ()
    found, expected = results_of(beside), results_of(spec)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=3e-2)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-1, atol=0)


@pytest.mark.parametrize("name", ["dense", "moe", "padded", "gpt-oss", "steered"])
def test_fusions_compute_the_same_by_fewer_kernels(name: str) -> None:
    plain, again = eager_twins(name)
    spec = fused(spec_of(MODELS[name], EAGER))
    assert unsupported(spec) == ()
    found = trained(spec)
    torch.testing.assert_close(found.losses, plain.losses, rtol=0, atol=3e-2)
    torch.testing.assert_close(found.norms, plain.norms, rtol=1e-1, atol=0)
    off, noise = (gradients_apart(run.gradients[0], plain.gradients[0]) for run in (found, again))
    assert {name for name, apart in off.items() if apart > OF_A_GRADIENT + 4 * noise[name]} == set(), off
    assert found.kernels < plain.kernels
