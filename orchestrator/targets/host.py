"""Find what this host has, without importing torch."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, get_args

from launch.common.checkout import package_versions
from launch.common.text import count
from launch.contract.bundle import Step
from launch.contract.plan import Cell, Reason
from launch.contract.spec import Device, MegatronCore, RunSpec
from launch.megatron_config.graph_config import is_release

_RELEASES = {f"megatron-core {release}": release for release in get_args(MegatronCore)}


@dataclass(frozen=True)
class StartSettings:
    """How a bundle starts on a target: the part of launch.contract.bundle.BundleOrder that depends on the target."""

    slots: int
    slot_names: tuple[str, ...]
    step: Step | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """One host's devices and software."""

    gpus: tuple[str, ...]
    """The visible GPUs, as CUDA_VISIBLE_DEVICES names them."""
    packages: frozenset[str]
    has_compiler: bool
    gpu_memory_gib: float | None = None
    """Memory of the largest GPU, or None if it is unknown."""
    scheduler: ClassVar[Literal["host"]] = "host"
    cluster_name: ClassVar[str] = ""
    not_checked: ClassVar[tuple[str, ...]] = ()

    @property
    def device(self) -> Device:
        return "cuda" if self.gpus else "cpu"

    def start_settings(self, spec: RunSpec) -> StartSettings:
        """Return the slots that bundles queue for. A CPU host is one slot, so that no two timed runs share it."""
        on_gpus = spec.placement.device == "cuda"
        return StartSettings(spec.placement.ranks_per_node, self.gpus) if on_gpus else StartSettings(1, ("cpu",))

    def check_spec(self, spec: RunSpec) -> tuple[Reason, ...]:
        """Return why this host cannot run ``spec``."""
        return (*self._check_devices(spec), *check_software(spec, self.packages))

    def check_time(self, runs: Sequence[Cell]) -> tuple[Reason, ...]:
        """Return no reason: a host has no time limit."""
        return ()

    def _check_devices(self, spec: RunSpec) -> Iterator[Reason]:
        placement, elsewhere = spec.placement, "on a Slurm cluster (plan --cluster NAME shows its jobs from here)"
        if placement.nodes > 1:
            message = f"the run needs {placement.nodes} nodes, and this is one host"
            yield Reason("host.nodes", message, f"run it {elsewhere}")
        if placement.device == "cuda" and placement.ranks_per_node > len(self.gpus):
            gpus = count("GPU", placement.ranks_per_node)
            message = f"the run needs {gpus} on a node, and this host has {len(self.gpus)}"
            fewer = ", or lower the degrees of the layout" if self.gpus and placement.ranks_per_node > 1 else ""
            host = f"on a host with {gpus}, or " if placement.nodes == 1 else ""
            yield Reason("host.gpus", message, f"run it {host}{elsewhere}{fewer}")
        if placement.device == "cpu" and spec.compiles and not self.has_compiler:
            message = "torch.compile on a CPU needs a C++ compiler, and none is found (CXX, g++ or clang++)"
            yield Reason("host.compiler", message, "Debian: apt-get install g++")


def check_software(spec: RunSpec, packages: frozenset[str] | None) -> Iterator[Reason]:
    """Yield why ``spec`` cannot run with ``packages`` on any device. ``packages`` is None if they are unknown."""
    missing = [] if packages is None else sorted(_needed_packages(spec) - packages)
    if missing:
        training = spec.training
        setting = f"attention_backend={training.attention_backend}" if training.fp8 == "none" else f"fp8={training.fp8}"
        # The megatron engine needs its packages with any setting.
        cause = "" if spec.engine == "megatron" else f" with training.{setting}"
        needs = f"engine {spec.engine}{cause} needs {' and '.join(missing)}"
        found = [release for package, release in _RELEASES.items() if package in (packages or ())]
        is_only_release = found and len(missing) == 1 and missing[0] in _RELEASES
        fix = f"set megatron_core={found[0]}, which is installed, or " if is_only_release else ""
        install = "pip install '.[gpu]' in a checkout, on a GPU host"
        yield Reason("host.packages", f"{needs}, not installed here", f"{fix}{install}")


def _needed_packages(spec: RunSpec) -> frozenset[str]:
    if spec.engine == "megatron":
        return frozenset([f"megatron-core {spec.megatron_core}", "transformer-engine"])
    uses_it = spec.training.fp8 != "none" or spec.training.attention_backend == "transformer_engine"
    return frozenset(["transformer-engine"] if uses_it else [])


def this_host() -> Host:
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    gpus = _visible_gpus()
    return Host(gpus, installed_packages(), any(map(shutil.which, compilers)), _largest_gpu_memory() if gpus else None)


def installed_packages() -> frozenset[str]:
    """Return the optional packages that this interpreter finds. A supported Megatron-Core is named with its release."""
    versions = package_versions()
    megatron = (p for p, release in _RELEASES.items() if is_release(versions.get("megatron-core", ""), release))
    return frozenset([*megatron, *(versions.keys() & {"transformer-engine"})])


def _visible_gpus() -> tuple[str, ...]:
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible: str | None = os.environ.get("CUDA_VISIBLE_DEVICES")
    # The variable may be set on a host without a GPU.
    if visible is None or not devices:
        return tuple(str(index) for index in range(len(devices)))
    names = (part.strip() for part in visible.split(","))
    # CUDA ignores what follows an invalid name.
    return tuple(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def _largest_gpu_memory() -> float | None:
    """Return the memory of this host's largest GPU in GiB, or None if nvidia-smi does not tell.

    CUDA_VISIBLE_DEVICES may leave out a small GPU, such as one for a display, and counts GPUs in another order than nvidia-smi.
    """
    command = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return max(int(line) for line in answer.stdout.splitlines()) / 1024 or None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
