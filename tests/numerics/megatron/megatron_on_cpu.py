"""Run the megatron engine without a GPU. Its code and Megatron-Core's are unchanged except for the device.

Megatron-Core allocates on the device "cuda" by name and checks for the type of CUDA tensors, in its schedules, gradient
buffers and optimizers. A few replaced functions make both mean the CPU. The product itself rejects this engine on a
CPU.
"""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from launch.contract.spec import RunSpec
from launch.engines.protocol import RankPlace
from launch.train.data_loader import batch, open_source

CPU = torch.device("cpu")
ADAM = importlib.import_module("torch.optim.adam")
TYPE, ADD_IN_PLACE = torch.Tensor.type, torch.Tensor.__iadd__
ALL_GATHER, REDUCE_SCATTER = dist.all_gather, dist.reduce_scatter
FACTORIES = ("arange", "empty", "ones", "tensor", "zeros")


def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``factory`` so that "cuda" means the CPU."""

    def make(*arguments: Any, **settings: Any) -> torch.Tensor:
        device = settings.get("device")
        if device is not None and torch.device(device).type == "cuda":
            settings["device"] = CPU
        settings.pop("pin_memory", None)
        return factory(*arguments, **settings)

    return make


def type_on_cuda(tensor: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
    answer = TYPE(tensor, *arguments, **settings)
    return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer


def add_out_of_place(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Replace an in-place addition that autograd forbids. The experts of Megatron-Core 0.16.1 add their bias in this
    way."""
    return tensor + other if "ParallelRegion" in str(tensor.grad_fn) else ADD_IN_PLACE(tensor, other)


def gather_uneven(outputs: list[torch.Tensor], part: torch.Tensor, group: Any = None) -> None:
    """Gather parts of different lengths, which NCCL accepts and gloo does not."""
    if len({output.shape for output in outputs}) == 1:
        ALL_GATHER(outputs, part, group=group)
        return
    outputs[dist.get_rank(group)].copy_(part)
    for rank, output in enumerate(outputs):
        dist.broadcast(output, group=group, group_src=rank)


def scatter_uneven(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None) -> None:
    if len({part.shape for part in parts}) == 1:
        REDUCE_SCATTER(output, parts, group=group)
        return
    for rank, part in enumerate(parts):
        total = part.clone()
        dist.all_reduce(total, group=group)
        if rank == dist.get_rank(group):
            output.copy_(total)


def as_on_cuda(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert sizes as the all-to-all dispatcher does for tensors on a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def marked_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> nn.Module:
    """Mark the norm's weight as Transformer Engine does. Megatron-Core 0.16.1's own norm refuses sequence
    parallelism.
    """
    norm = nn.RMSNorm(hidden_size, eps)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


def without_context_parallelism(make: Callable[..., None]) -> Callable[..., None]:
    """Hide context parallelism from Megatron-Core 0.16.1's own attention, which refuses it."""

    def made(attention: Any, config: Any, *arguments: Any, **settings: Any) -> None:
        cp, config.context_parallel_size = config.context_parallel_size, 1
        make(attention, config, *arguments, **settings)
        config.context_parallel_size = cp

    return made


class Gathered(torch.autograd.Function):
    """Gather every rank's part, of shape (ranks, ...). A part's gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = part.new_empty(dist.get_world_size(group), *part.shape)
        dist.all_gather([*parts.unbind()], part.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = (gradient.contiguous() for gradient in gradients)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


def of_whole_sequences(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compute attention over the rows of all context-parallel ranks, and return this rank's rows.

    Rank r has chunks r and 2 * cp - 1 - r of 2 * cp.
    """

    def attend(attention: Any, *parts: torch.Tensor, **named: Any) -> torch.Tensor:
        from megatron.core import parallel_state

        cp, rank = (parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank())
        if cp == 1:
            return forward(attention, *parts, **named)
        group = parallel_state.get_context_parallel_group()

        def whole(part: torch.Tensor) -> torch.Tensor:
            first, second = Gathered.apply(part, group).chunk(2, dim=1)
            return torch.cat([first, second.flip(0)]).flatten(0, 1)

        query, key, value, mask = parts
        chunks = forward(attention, whole(query), whole(key), whole(value), mask, **named).chunk(2 * cp)
        return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])

    return attend


def of_documents(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compute attention document by document, as the packed format of Transformer Engine does.

    Queries, keys and values are (tokens, heads, channels). Megatron-Core's own attention refuses them.
    """

    def attend(attention: Any, *parts: torch.Tensor, packed_seq_params: Any = None, **named: Any) -> torch.Tensor:
        if packed_seq_params is None:
            return forward(attention, *parts, **named)
        assert packed_seq_params.qkv_format == "thd"
        *rows, mask = parts
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        documents = zip(*(part.unsqueeze(1).split(lengths) for part in rows), strict=True)
        return torch.cat([forward(attention, *document, mask, **named) for document in documents if len(document[0])])

    return attend


class NoStream:
    """A stream or event that does nothing, because a CPU runs in order."""

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> NoStream:
        return self

    def record(self, stream: Any) -> None: ...

    def wait(self, stream: Any) -> None: ...


STREAM = NoStream()


OF_CUDA = {
    "current_device": lambda: CPU,
    "manual_seed": torch.manual_seed,
    "get_rng_state": torch.get_rng_state,
    "synchronize": lambda: None,
    "Event": NoStream,
    "nvtx": mock.MagicMock(),
    "Stream": lambda *arguments, **settings: STREAM,
    "current_stream": lambda: STREAM,
    "default_stream": lambda: STREAM,
    "stream": lambda stream: nullcontext(),
}
OF_TENSORS = {
    "record_stream": lambda tensor, stream: None,
    "cuda": lambda tensor, **settings: tensor,
    "type": type_on_cuda,
    "__iadd__": add_out_of_place,
}
OF_RANDOM = {
    "_get_cuda_rng_state": lambda **settings: torch.get_rng_state(),
    "_set_cuda_rng_state": lambda state, **settings: torch.set_rng_state(state),
}


@cache
def keep_imports() -> None:
    """Let no garbage collection scan what has been imported. Captures collect garbage a few times each."""
    gc.collect()
    gc.freeze()


@contextmanager
def cpu_as_cuda() -> Iterator[ModuleType]:
    """Replace CUDA by the CPU, and yield the engine's module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core warns about missing features without Transformer Engine.
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.moe import moe_utils, token_dispatcher
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        from launch.engines.megatron import ddp_hooks, engine

        keep_imports()
        # At its first use, PyTorch records the functions that torch.device() affects. Let it record the originals, not
        # the patches.
        with torch.device("meta"):
            torch.empty(1)
        settings_of = ddp_hooks.data_parallel_settings
        attention = DotProductAttention.__init__, DotProductAttention.forward
        with ExitStack() as replaced:
            # Megatron-Core compiles some small functions. On a CPU this takes longer than all steps.
            replaced.enter_context(torch.compiler.set_stance("force_eager"))
            for patch in (
                mock.patch.multiple(torch, **{name: on_cpu(getattr(torch, name)) for name in FACTORIES}),
                mock.patch.multiple(torch.Tensor, **OF_TENSORS),
                mock.patch.multiple(dist, all_gather=gather_uneven, reduce_scatter=scatter_uneven),
                mock.patch.multiple(torch.cuda, **OF_CUDA),
                mock.patch.multiple(random, **OF_RANDOM),
                mock.patch.object(ADAM, "_get_capturable_supported_devices", lambda **settings: ["cpu"]),
                # Its default assumes fp8, and then calls Transformer Engine.
                mock.patch.object(random.CheckpointWithoutOutput.__init__, "__defaults__", (None,)),
                # Otherwise one bucket would hold a whole tiny model.
                mock.patch.object(
                    ddp_hooks, "data_parallel_settings", lambda spec: settings_of(spec) | {"bucket_size": 200}
                ),
                mock.patch.object(WrappedTorchNorm, "__new__", marked_norm),
                mock.patch.object(DotProductAttention, "__init__", without_context_parallelism(attention[0])),
                mock.patch.object(DotProductAttention, "forward", of_documents(of_whole_sequences(attention[1]))),
                mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", as_on_cuda),
                # 0.16.1 reads a name that it defines only with Transformer Engine.
                mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
            ):
                replaced.enter_context(patch)
            yield engine


def train_megatron(spec: RunSpec) -> dict[str, Any]:
    """Train on this rank. Return losses and gradient norms of shape (steps,), and other results of the engine.

    A single rank also returns the weights before and after, by torch_native's names.
    """
    with megatron_engine(spec) as engine:
        return _train(spec, engine)


def logits_of(spec: RunSpec, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the first weights: (batch, sequence) -> (batch, sequence, vocabulary)."""
    with megatron_engine(spec) as engine, torch.no_grad():
        logits: torch.Tensor = engine.chunks[0](tokens, torch.arange(tokens.shape[1]).unsqueeze(0), None)
        return logits


@contextmanager
def megatron_engine(spec: RunSpec) -> Iterator[Any]:
    """Yield this rank's engine, and leave no process groups behind."""
    alone = not dist.is_initialized()
    if alone:  # Megatron-Core keeps its process groups. Each group of gloo has three polling threads.
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    rank, size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    try:
        with cpu_as_cuda() as module:
            engine = module.MegatronEngine(spec, RankPlace(rank, size, CPU))
            try:
                yield engine
            finally:
                engine.close()  # of a capture that failed too: Megatron-Core keeps graphs in its classes
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        if alone and dist.is_initialized():
            dist.destroy_process_group()


def _train(spec: RunSpec, engine: Any) -> dict[str, Any]:
    from tests.numerics.megatron.megatron_weights import whole_weights

    chunk = engine.chunks[0].module
    chunk = chunk.module if spec.training.precision == "bf16" else chunk

    def weights() -> dict[str, torch.Tensor]:
        return whole_weights(chunk, spec.model) if dist.get_world_size() == 1 else {}

    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    dp_rank = spec.parallelism.rank_in("dp", dist.get_rank())
    before = weights()
    results = [engine.step(batch(source, spec, step, dp_rank)) for step in range(spec.training.steps)]
    own = [own for result in results for own in (result.loss, result.grad_norm)]
    return {
        "loss": torch.stack([result.loss for result in results]),
        "grad_norm": torch.stack([result.grad_norm for result in results]),
        "kind": [result.kind for result in results],
        "capture_step": engine.capture_step,
        "choices": dict(engine.choices),
        "before": before,
        "after": weights(),
        "graph_stats": asdict(engine.graph_stats()),
        **({"own": own} if dist.get_world_size() == 1 else {}),
    }
