"""What this host has, found without importing torch."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, Optional

from launch.record import Reason
from launch.spec import Device, RunSpec
from launch.support import unsupported
from orchestrator.errors import wrong

ExecutorName = Literal["auto", "slurm", "local", "debug"]

_ENGINE_PACKAGES = {"torch_native": (), "megatron": ("megatron-core", "transformer-engine")}


@dataclass(frozen=True)
class Host:
    """One host's devices and software."""

    gpus: tuple[str, ...]
    """Identifiers of the visible GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    cpus: int
    packages: frozenset[str]
    has_compiler: bool

    @property
    def device(self) -> Device:
        return "cuda" if self.gpus else "cpu"

    def slot_names(self, device: Device) -> tuple[str, ...]:
        """The slots that bundles queue for. A CPU host is one slot: runs timed side by side would time each other."""
        return self.gpus if device == "cuda" else ("cpu",)

    def lacks(self, spec: RunSpec) -> tuple[Reason, ...]:
        """Why this host cannot run ``spec`` itself, none where it can."""
        return (*self._lacks_devices(spec), *self._lacks_packages(spec), *unsupported(spec))

    def _lacks_devices(self, spec: RunSpec) -> tuple[Reason, ...]:
        placement = spec.placement
        reasons = []
        if placement.nodes > 1:
            reasons.append(
                Reason(
                    "host.nodes",
                    f"{placement.nodes} nodes are needed, and this is one host",
                    "run it on a Slurm cluster",
                )
            )
        if placement.device == "cuda" and placement.ranks_per_node > len(self.gpus):
            message = f"{placement.ranks_per_node} GPUs are needed, and this host has {len(self.gpus)}"
            reasons.append(Reason("host.gpus", message, "run it on a host with so many, or lower the layout's degrees"))
        if placement.device == "cpu" and spec.cuda_graph.impl not in ("none", "torch_compile"):
            message = f"cuda_graph.impl={spec.cuda_graph.impl} captures CUDA graphs, and this run is on a CPU"
            reasons.append(Reason("host.cuda", message, "run it on a host with a GPU"))
        return tuple(reasons)

    def _lacks_packages(self, spec: RunSpec) -> tuple[Reason, ...]:
        training = spec.training
        needed = set(_ENGINE_PACKAGES[spec.engine])
        if training.attention_backend == "transformer_engine":
            needed.add("transformer-engine")
        missing = sorted(needed - self.packages)
        reasons = []
        if missing:
            message = (
                f"engine {spec.engine} with training.attention_backend={training.attention_backend} needs "
                f"{', '.join(missing)}, not installed here"
            )
            reasons.append(Reason("host.packages", message, "pip install 'cuda-graph-orchestrator[gpu]' on a GPU host"))
        compiles = spec.cuda_graph.impl == "torch_compile" or training.compile == "elementwise"
        if compiles and spec.placement.device == "cpu" and not self.has_compiler:
            message = "torch.compile on a CPU needs a C++ compiler, and none is found (CXX, g++ or clang++)"
            reasons.append(Reason("host.compiler", message, "Debian: apt-get install g++"))
        return tuple(reasons)


def this_host() -> Host:
    packages = {"megatron-core", "transformer-engine"}
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    return Host(
        _visible_gpus(),
        len(os.sched_getaffinity(0)),
        frozenset(name for name in packages if _is_installed(name)),
        any(shutil.which(compiler) for compiler in compilers),
    )


def resolve_executor(name: ExecutorName) -> Literal["local", "debug"]:
    """The executor that ``name`` stands for here.

    Raises:
        InputError: it is Slurm, which this version does not submit to.
    """
    slurm = _slurm_answers()
    if name == "slurm" or (name == "auto" and slurm):
        found = "Slurm answers on this host" if slurm else "no Slurm answers on this host"
        raise wrong("--executor", f"{name}: this version does not submit to Slurm ({found})",
                    "--executor local runs the sweep on this host")  # fmt: skip
    return "debug" if name == "debug" else "local"


def _slurm_answers() -> bool:
    if shutil.which("sbatch") is None:
        return False
    try:
        return subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=10).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def _visible_gpus() -> tuple[str, ...]:
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible: Optional[str] = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not devices:  # the variable may be set on a host that has no GPU
        return tuple(str(index) for index in range(len(devices)))
    names = (part.strip() for part in visible.split(","))
    return tuple(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA reads it


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
