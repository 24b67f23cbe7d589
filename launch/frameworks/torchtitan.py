"""torchtitan (``torchrun ... -m torchtitan.train --module llama3 --config llama3_8b``), whose trainer graphs a step by default.

It holds forward and backward passes in one graph since 13 August 2026 (pytorch/torchtitan f84224af0). Not run here: it needs a PyTorch
that is newer than ours.
"""

from __future__ import annotations

from launch.contract.spec import RunSpec
from launch.frameworks.framework import Flags, Framework


def _graph_flags(spec: RunSpec) -> Flags:
    # Some of its configs turn graphs off.
    return {"--training.no_disable_cuda_graphs": ()} if spec.cuda_graph.impl == "full_iteration" else {}


def _own_flags(spec: RunSpec) -> Flags:
    flags: dict[str, tuple[str, ...]] = {
        "--training.steps": ("{steps}",),
        "--dump_folder": ("{output}",),
        # Its log has five digits of the loss. TensorBoard has all.
        "--metrics.log_freq": ("1",),
        "--metrics.enable_tensorboard": (),
        # Without a seed each run draws its own first weights.
        "--debug.seed": ("{seed}",),
    }
    flags |= {} if spec.graphed else {"--training.disable_cuda_graphs": ()}
    return flags | ({"--debug.deterministic": ()} if spec.training.deterministic else {})


FRAMEWORK = Framework(("command", "full_iteration"), _graph_flags, _own_flags, "on any GPU")
