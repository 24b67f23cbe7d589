"""Hook PyTorch, loggers and trainers to observe steps, graphs and metrics. No hook changes a value."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from launch.contract.metric_names import column_of
from launch.observe.import_hook import after_import

if TYPE_CHECKING:
    from launch.observe.observer import Observer


def install(torch: ModuleType, observer: Observer) -> None:
    """Hook PyTorch now, and other libraries when they are imported."""
    # torch.optim deletes its attribute for this module.
    optimizers = sys.modules["torch.optim.optimizer"]

    optimizers.register_optimizer_step_pre_hook(observer.before_optimizer)
    optimizers.register_optimizer_step_post_hook(observer.after_optimizer)
    graph = torch.cuda.graphs.CUDAGraph
    graph.capture_begin = _before(graph.capture_begin, observer.before_capture)
    graph.capture_end = _after(graph.capture_end, lambda *_: observer.after_capture())
    graph.replay = _before(graph.replay, observer.before_replay)
    clipping = sys.modules["torch.nn.utils.clip_grad"]
    clip = clipping.clip_grad_norm_
    seen = _after(clip, lambda norm, *_: observer.take_own("grad_norm", norm))
    clipping.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = seen  # type: ignore[attr-defined]
    after_import("torch.utils.tensorboard.writer", lambda module: _hook_writer(module.SummaryWriter, observer))
    after_import("transformers.trainer", lambda module: _hook_trainer(module.Trainer, observer))
    for package in ("lightning.pytorch", "pytorch_lightning"):
        after_import(
            f"{package}.loggers.csv_logs", lambda module: _hook_logger(module.CSVLogger, "log_metrics", observer)
        )
    after_import("wandb.sdk.wandb_run", lambda module: _hook_logger(module.Run, "log", observer))
    for stream in {sys.stdout, sys.stderr}:
        _hook_stream(stream, observer)


def _before(function: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        tell()
        return function(*arguments, **named)

    return wrapped


def _after(function: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that calls ``tell`` with its result and its arguments."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        tell(result, *arguments, *named.values())
        return result

    return wrapped


def _hook_writer(writer: Any, observer: Observer) -> None:
    def tell(_: Any, _self: Any, tag: str, value: Any, step: Any = None, *_rest: Any) -> None:
        if (column := column_of(str(tag))) in ("loss", "grad_norm"):
            observer.say_scalar("its logger", column, value, step)

    writer.add_scalar = _after(writer.add_scalar, tell)


def _hook_logger(logger: Any, method: str, observer: Observer) -> None:
    """Observe a method of ``logger`` that takes a mapping of metrics, and perhaps their step."""

    def tell(_: Any, _self: Any, metrics: Mapping[str, Any], step: Any = None, *_rest: Any) -> None:
        observer.say("its logger", {**metrics, **({} if step is None else {"step": step})})

    setattr(logger, method, _after(getattr(logger, method), tell))


def _hook_trainer(trainer: Any, observer: Observer) -> None:
    """Observe each micro-batch's loss before the Trainer rounds their sum to four decimals."""
    trainer.training_step = _after(trainer.training_step, lambda loss, *_: observer.take_own("loss", loss, to_sum=True))


def _hook_stream(stream: Any, observer: Observer) -> None:
    """Read the lines that the program prints from Python. The stream itself stays the same object."""
    write, rest = stream.write, [""]

    def read(text: str) -> Any:
        written = write(text)
        if observer.reads:
            observer.read(text, rest)
        return written

    stream.write = read
