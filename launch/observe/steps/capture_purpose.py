"""Whether a program captures a graph, or compiles a function, to train or to evaluate."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

_OPTIMIZERS = f"{Path(torch.__file__).parent / 'optim'}/"


class CapturePurpose:
    """Tells what a graph is for while it is captured."""

    def __init__(self) -> None:
        self._inductor_trains = False
        """Whether Inductor records a function that trains."""

    @property
    def may_train(self) -> bool:
        """Whether a graph that is captured now may train."""
        return self._inductor_trains or may_train()

    def hook_recordings(self, trees: ModuleType) -> None:
        """Note what Inductor records. It turns gradients off in training too, so ask what the function is for."""
        manager, inference = trees.CUDAGraphTreeManager, trees.CompilationMode.INFERENCE
        record = manager.record_function

        @functools.wraps(record)
        def record_function(self_: Any, inputs: Any, function: Any) -> Any:
            self._inductor_trains = self_.id_to_mode[function] is not inference
            try:
                return record(self_, inputs, function)
            finally:
                self._inductor_trains = False

        manager.record_function = record_function


def may_train() -> bool:
    """Return whether what runs now computes gradients, or uses them in an optimizer's step."""
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return True
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(_OPTIMIZERS):
        frame = frame.f_back
    return frame is not None
