"""Hook PyTorch, loggers and trainers to observe steps, graphs and metrics. No hook changes a value."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from launch.contract.metric_names import column_of
from launch.observe.description.used_settings import after
from launch.observe.import_hook import after_import

if TYPE_CHECKING:
    from launch.observe.observer import Observer


def install(torch: ModuleType, observer: Observer) -> None:
    """Hook PyTorch now, and other libraries when they are imported."""
    # torch.optim deletes its attribute for this module.
    optimizers = sys.modules["torch.optim.optimizer"]

    optimizers.register_optimizer_step_pre_hook(_untraced(observer.before_optimizer))
    optimizers.register_optimizer_step_post_hook(_untraced(observer.after_optimizer))
    _hook_graph(torch.cuda.graphs.CUDAGraph, observer)
    if hasattr(torch.accelerator, "Graph"):  # PyTorch 2.8 has none.
        _hook_graph(torch.accelerator.Graph, observer)
    after_import("torch._inductor.cudagraph_trees", observer.graphs.purpose.hook_recordings)
    after_import("torch._dynamo.callback", observer.graphs.hook_compilations)
    after_import("torch.amp.grad_scaler", lambda module: _hook_scaler(module.GradScaler, observer))
    observer.used.hook_autocast(torch)
    take = _untraced(observer.take_batch)
    after_import("torch.utils.data.dataloader", lambda module: observer.used.hook_loaders(module, take))
    after_import("torch.optim.lr_scheduler", observer.used.hook_schedulers)
    observer.used.hook_backward(torch.autograd)
    after_import("torch.nn.parallel.distributed", observer.used.hook_sync)
    after_import("torch.utils.checkpoint", observer.used.hook_checkpoints)
    after_import("torch._dynamo.variables.builder", observer.used.hook_compiled_checkpoints)
    _hook_clipping(torch, observer)
    after_import("torch.utils.tensorboard.writer", lambda module: _hook_writer(torch, module.SummaryWriter, observer))
    after_import("transformers.trainer", lambda module: _hook_trainer(module.Trainer, observer))
    for package in ("lightning.pytorch", "pytorch_lightning"):
        after_import(
            f"{package}.loggers.csv_logs", lambda module: _hook_logger(module.CSVLogger, "log_metrics", observer)
        )
    after_import("wandb.sdk.wandb_run", lambda module: _hook_logger(module.Run, "log", observer))
    observer.streams.hook()
    if (bars := observer.bars) is not None:
        after_import("tqdm.std", lambda module: bars.hook(module.tqdm))


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Return ``hook`` for functions that the program may compile: Dynamo neither traces it nor what it calls.

    It takes 0.4 us longer. It imports Dynamo only when it is called, and torch.optim has imported that by then.
    """
    untraced: Callable[..., None] = sys.modules["torch._compile"]._disable_dynamo(lambda *arguments: hook(*arguments))
    return untraced


def _hook_graph(graph: Any, observer: Observer) -> None:
    """Observe captures and replays. A step may have hundreds of replays, so their hook only notes the graph."""
    counter, capture_begin, capture_end, replay = observer.graphs, graph.capture_begin, graph.capture_end, graph.replay

    @functools.wraps(capture_begin)
    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        observer.before_capture()
        capture_begin(self, *arguments, **named)
        self._observed_number = counter.begin_capture()

    @functools.wraps(capture_end)
    def end(self: Any) -> None:
        succeeded = False
        try:
            capture_end(self)
            succeeded = True
        finally:
            counter.end_capture(self._observed_number, succeeded=succeeded)

    @functools.wraps(replay)
    def note(self: Any) -> None:
        counter.replayed.append(self._observed_number)
        replay(self)

    graph._observed_number = 0  # An object that never captured may be replayed, which PyTorch then rejects.
    graph.capture_begin, graph.capture_end, graph.replay = begin, end, note


def _hook_scaler(scaler: Any, observer: Observer) -> None:
    """Observe the first step by a gradient scaler. Later ones cost nothing."""
    step, tell = scaler.step, _untraced(observer.say_scaler)

    @functools.wraps(step)
    def first(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.is_enabled():
            tell()
            scaler.step = step
        return step(self, *arguments, **named)

    scaler.step = first


def _hook_clipping(torch: ModuleType, observer: Observer) -> None:
    clipping, tell = sys.modules["torch.nn.utils.clip_grad"], _untraced(observer.take_clipping)
    clip = clipping.clip_grad_norm_

    @functools.wraps(clip)
    def clip_grad_norm_(parameters: Any, max_norm: Any, norm_type: Any = 2.0, *arguments: Any, **named: Any) -> Any:
        norm = clip(parameters, max_norm, norm_type, *arguments, **named)
        tell(norm, max_norm, norm_type)
        return norm

    clipping.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = clip_grad_norm_  # type: ignore[attr-defined]


def _hook_writer(torch: ModuleType, writer: Any, observer: Observer) -> None:
    """Observe the scalars of TensorBoard's writer. It logs many in each step, so the hook of all others is short."""
    write, exact = writer.add_scalar, (torch.float32, torch.float64)

    @functools.wraps(write)
    def add_scalar(
        self: Any, tag: Any, scalar_value: Any, global_step: Any = None, *arguments: Any, **named: Any
    ) -> None:
        column = column_of(tag) if type(tag) is str else None
        if column is None or column == "step":
            write(self, tag, scalar_value, global_step, *arguments, **named)
            return
        number = scalar_value
        if type(scalar_value) is torch.Tensor and scalar_value.dtype in exact and scalar_value.numel() == 1:
            # The writer takes a tensor's number from its device. It takes an array as it is, so this is done once for both.
            scalar_value = scalar_value.detach().cpu().numpy()
            number = scalar_value.item()
        write(self, tag, scalar_value, global_step, *arguments, **named)
        observer.say_scalar(column, number, global_step)

    writer.add_scalar = add_scalar


def _hook_logger(logger: Any, method: str, observer: Observer) -> None:
    """Observe a method of ``logger`` that takes a mapping of metrics, and perhaps their step."""

    def tell(_: Any, _self: Any, metrics: Mapping[str, Any], step: Any = None, *_rest: Any) -> None:
        observer.say("its logger", {**metrics, **({} if step is None else {"step": step})})

    setattr(logger, method, after(getattr(logger, method), tell))


def _hook_trainer(trainer: Any, observer: Observer) -> None:
    """Observe each micro-batch's loss before the Trainer rounds their sum to four decimals."""
    trainer.training_step = after(trainer.training_step, lambda loss, *_: observer.take_own("loss", loss, to_sum=True))
