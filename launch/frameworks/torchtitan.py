"""torchtitan (``torchrun ... -m torchtitan.train --module llama3 --config llama3_8b``), whose trainer graphs a step by default.

Since 13 August 2026 (pytorch/torchtitan f84224af0, release 0.3.0) it captures forward and backward passes in one graph. Its graphs
have not been run here, because they need a newer PyTorch.
"""

from __future__ import annotations

from launch.contract.spec import RunSpec
from launch.frameworks.framework import Flags, Framework


def _graph_flags(spec: RunSpec) -> Flags:
    # Some configs turn graphs off, so turn them on explicitly.
    return {"--training.no_disable_cuda_graphs": ()} if spec.cuda_graph.impl == "full_iteration" else {}


def _own_flags(spec: RunSpec) -> Flags:
    flags: dict[str, tuple[str, ...]] = {
        "--training.steps": ("{steps}",),
        "--dump_folder": ("{output}",),
        # The log has only five digits of the loss. TensorBoard has all.
        "--metrics.log_freq": ("1",),
        "--metrics.enable_tensorboard": (),
        # Without a seed, each run draws different initial weights.
        "--debug.seed": ("{seed}",),
    }
    flags |= {} if spec.graphed else {"--training.disable_cuda_graphs": ()}
    return flags | ({"--debug.deterministic": ()} if spec.training.deterministic else {})


FRAMEWORK = Framework(("command", "full_iteration"), _graph_flags, _own_flags, untried="on any GPU")
