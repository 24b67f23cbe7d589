"""What this host has, found without importing torch."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import ClassVar, Literal

from launch.common.text import count
from launch.contract.bundle import Step
from launch.contract.plan import Cell, Reason
from launch.contract.spec import Device, RunSpec
from launch.megatron_config.graph_config import INSTALLED, is_installed_release
from launch.support import unsupported

_ENGINE_PACKAGES = {"torch_native": (), "megatron": ("megatron-core", "transformer-engine")}


@dataclass(frozen=True)
class Placing:
    """How ranks are placed: what of launch.contract.bundle.BundleOrder the target of a plan decides, and the run does
    not."""

    slots: int
    slot_names: tuple[str, ...]
    step: Step | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """One host's devices and software."""

    gpus: tuple[str, ...]
    """Identifiers of the visible GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    cpus: int
    packages: frozenset[str]
    has_compiler: bool
    scheduler: ClassVar[Literal["host"]] = "host"
    cluster_name: ClassVar[str] = ""

    @property
    def device(self) -> Device:
        return "cuda" if self.gpus else "cpu"

    def placing(self, spec: RunSpec) -> Placing:
        """The slots that bundles queue for. A CPU host is one slot: runs timed side by side would time each other."""
        on_gpus = spec.placement.device == "cuda"
        return Placing(spec.placement.ranks_per_node, self.gpus) if on_gpus else Placing(1, ("cpu",))

    def lacks(self, spec: RunSpec) -> tuple[Reason, ...]:
        """Why this host cannot run ``spec`` itself, none where it can."""
        software = (*lacks_packages(spec, self.packages), *self._lacks_compiler(spec))
        return (*self._lacks_devices(spec), *lacks_gpu_for_graphs(spec), *software, *unsupported(spec))

    def lacks_time(self, runs: Sequence[Cell]) -> tuple[Reason, ...]:
        """A host gives a bundle as long as its runs may take."""
        return ()

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
            message = (
                f"the run needs {count('GPU', placement.ranks_per_node)} on a node, and this host has {len(self.gpus)}"
            )
            reasons.append(Reason("host.gpus", message, "run it on a host with so many, or lower the layout's degrees"))
        return tuple(reasons)

    def _lacks_compiler(self, spec: RunSpec) -> tuple[Reason, ...]:
        if self.has_compiler or spec.placement.device != "cpu" or not spec.compiles:
            return ()
        message = "torch.compile on a CPU needs a C++ compiler, and none is found (CXX, g++ or clang++)"
        return (Reason("host.compiler", message, "Debian: apt-get install g++"),)


def lacks_gpu_for_graphs(spec: RunSpec) -> tuple[Reason, ...]:
    """Why graphs are not captured in ``spec``, wherever it runs: it runs on a CPU."""
    if spec.placement.device != "cpu" or not spec.cuda_graph.implementation.needs_cuda:
        return ()
    message = f"cuda_graph.impl={spec.cuda_graph.impl} captures CUDA graphs, and this run is on a CPU"
    return (Reason("host.cuda", message, "run it on a host with a GPU"),)


def lacks_packages(spec: RunSpec, installed: frozenset[str]) -> tuple[Reason, ...]:
    """What ``spec`` imports beyond this project's own requirements and is not ``installed``."""
    backend = spec.training.attention_backend
    needed = {*_ENGINE_PACKAGES[spec.engine], *(("transformer-engine",) if backend == "transformer_engine" else ())}
    missing = " and ".join(
        f"{name} {INSTALLED}" if name == "megatron-core" else name for name in sorted(needed - installed)
    )
    if not missing:
        return ()
    message = f"engine {spec.engine} with training.attention_backend={backend} needs {missing}, not installed here"
    return (Reason("host.packages", message, "pip install '.[gpu]' in a checkout, on a GPU host"),)


def this_host() -> Host:
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    return Host(
        _visible_gpus(),
        len(os.sched_getaffinity(0)),
        installed_packages(),
        any(shutil.which(compiler) for compiler in compilers),
    )


def installed_packages() -> frozenset[str]:
    """Of those that only some runs need, the ones that this interpreter finds, in releases that will do."""
    return frozenset(name for name in ("megatron-core", "transformer-engine") if _is_installed(name))


def _visible_gpus() -> tuple[str, ...]:
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible: str | None = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not devices:  # the variable may be set on a host that has no GPU
        return tuple(str(index) for index in range(len(devices)))
    names = (part.strip() for part in visible.split(","))
    return tuple(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA reads it


def _is_installed(package: str) -> bool:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return package != "megatron-core" or is_installed_release(version)
