"""List every legal combination of the options of parallelism, over small models.

A layout is compared with one process that trains on the same micro-batches: their sequences do not depend on dp
(launch.train.data_loader.batch), and a micro-batch's auxiliary loss covers its own sequences only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist

from launch.contract.spec import Data, Model, Parallelism, RunSpec, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.train.data_loader import batch, open_source
from tests.numerics.parallel.whole_parameters import whole_parameters
from tests.numerics.tiny import DENSE, GPT_OSS, MOE, no_inductor

MOST_RANKS = 8
MICRO_BATCH_SIZE = 2

MIXTURE = replace(MOE, vocab_size=32, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01)
MODELS: dict[str, Model] = {
    "dense": replace(DENSE, vocab_size=32, num_query_groups=4),
    "tied": replace(DENSE, vocab_size=32, tie_embeddings=True, add_qkv_bias=True),
    "moe": MIXTURE,
    # These weights reach the activation's clamps, but do not amplify rounding errors within two steps.
    "gpt_oss": replace(GPT_OSS, vocab_size=32, init_std=1.0),
    "shared": replace(MIXTURE, moe_shared_expert_ffn_hidden_size=12, moe_layer_freq=2),
    "balanced": replace(
        MIXTURE,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.1,
    ),
    "padded": replace(MIXTURE, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
}


@dataclass(frozen=True)
class Layout:
    model: str = "dense"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: Literal["none", "full"] = "none"
    micro_batches: int = 1
    """The number of micro-batches of each rank."""
    uneven: bool = False
    """Whether the model has one layer more than the stages can share evenly."""

    def __str__(self) -> str:
        """Name what differs from the defaults: ``moe-tp2-sequence_parallel``."""
        words = [self.model]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                name = f"{field.name}_" if isinstance(value, str) else field.name
                words.append(name if value is True else f"{name}{value}")
        return "-".join(words)

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def vpp(self) -> int:
        return 2 if self.schedule == "interleaved" else 1

    @property
    def layers(self) -> int:
        """Use at least three layers. Then one layer has neighbours on both sides, and models with two kinds of layers
        have both kinds."""
        stages = self.pp * self.vpp
        even = {1: 3, 2: 2 if self.uneven else 4}.get(stages, stages)
        return even + self.uneven

    @property
    def cost(self) -> int:
        """Estimate the relative cost of training in this layout."""
        return self.world_size * self.layers * self.micro_batches

    @property
    def task(self) -> tuple[str, int, int]:
        """Return what any layout trains: model, layers, and the micro-batches of all ranks."""
        return self.model, self.layers, self.micro_batches * self.dp

    @property
    def spec(self) -> RunSpec:
        parallelism = Parallelism(
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            ep=self.ep,
            dp=self.dp,
            sequence_parallel=self.sequence_parallel,
            schedule=self.schedule,
            dispatcher=self.dispatcher,
            distributed_optimizer=self.distributed_optimizer,
        )
        spec = spec_of(*self.task)
        return replace(spec, parallelism=parallelism, training=replace(spec.training, recompute=self.recompute))

    @property
    def legal(self) -> bool:
        return self.world_size <= MOST_RANKS and self._fits_the_model and self._is_spelt_one_way

    @property
    def _fits_the_model(self) -> bool:
        model = MODELS[self.model]
        # The capacity follows from the tokens of a rank, and tp leaves a rank fewer tokens.
        padded = model.moe_pad_expert_input_to_capacity
        return (
            model.num_query_groups % self.tp == 0
            and (self.tp * self.dp) % self.ep == 0
            and (self.tp == 1 or not padded)
            and (self.schedule != "interleaved" or (self.pp > 1 and self.micro_batches % self.pp == 0))
        )

    @property
    def _is_spelt_one_way(self) -> bool:
        """Return whether options without an effect here have their defaults."""
        moe = MODELS[self.model].is_moe
        # This is the larger number of replicas, of dense parameters or of experts.
        replicas = max(self.dp, self.tp * self.dp // self.ep if moe else 1)
        return (
            (moe or self.ep == 1)
            and (self.ep > 1 or self.dispatcher == "alltoall")
            and (self.pp > 1 or (self.schedule == "1f1b" and self.micro_batches < 4 and not self.uneven))
            and (self.tp > 1 or not self.sequence_parallel)
            and (replicas > 1 or not self.distributed_optimizer)
        )


OPTIONS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "ep": (1, 2, 4),
    "dp": (1, 2, 4),
    "schedule": ("1f1b", "gpipe", "interleaved"),
    "dispatcher": ("allgather", "alltoall"),
    "sequence_parallel": (False, True),
    "distributed_optimizer": (False, True),
    "recompute": ("none", "full"),
    "micro_batches": (1, 3, 4),
    "uneven": (False, True),
}


@cache
def legal_layouts() -> tuple[Layout, ...]:
    """Return every legal layout of more than one rank."""
    degrees = [list(OPTIONS).index(name) for name in ("tp", "pp", "dp")]
    candidates = (
        Layout(*values)
        for values in product(*OPTIONS.values())
        # Drop most combinations here, before they are built.
        if 1 < prod(values[place] for place in degrees) <= MOST_RANKS
    )
    return tuple(layout for layout in candidates if layout.legal)


def spec_of(model: str, layers: int, micro_batches: int) -> RunSpec:
    """Return the spec of one process that trains the same."""
    training = Training(
        steps=2,
        sequence_length=8,
        micro_batch_size=MICRO_BATCH_SIZE,
        global_batch_size=MICRO_BATCH_SIZE * micro_batches,
        learning_rate=1e-2,
        # A key's bias has no gradient except rounding errors. With 1e-8, Adam would turn a gradient of 1e-10 into
        # steps.
        adam_epsilon=1e-6,
    )
    return RunSpec(model=replace(MODELS[model], num_layers=layers), training=training, data=Data(kind="synthetic"))


def train_rank(spec: RunSpec, dtype: torch.dtype | None, device: str = "cpu") -> dict[str, Any]:
    """Train on this rank.

    Return losses and gradient norms of shape (steps,), and the whole model's parameters by name before and after.
    ``dtype`` is the engine's parameter type.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    engine = TorchNativeEngine(spec, RankPlace(rank, spec.parallelism.world_size, place), dtype)
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    dp_rank = spec.parallelism.rank_in("dp", rank)
    first = whole_parameters(engine)
    results = [engine.step(batch(source, spec, step, dp_rank).to(place)) for step in range(spec.training.steps)]
    trained = {
        "loss": torch.stack([result.loss for result in results]),
        "grad_norm": torch.stack([result.grad_norm for result in results]),
        "first": first,
        "last": whole_parameters(engine),
    }
    engine.close()
    return trained


def train_rank_without_inductor(spec: RunSpec, dtype: torch.dtype) -> dict[str, Any]:
    with no_inductor():
        return train_rank(spec, dtype)
