"""Check that this host, or a Slurm cluster and one of its nodes, has what sweeps need. Each check says what to do."""

from __future__ import annotations

import json
import math
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.common.checkout import add_to_python_path
from launch.common.text import count, first_names, one_line, size
from launch.contract.spec import Placement, RunSpec
from launch.track.weights_and_biases import why_offline
from orchestrator.errors import InputError, SystemFault
from orchestrator.submit.executor import outage, resolve_executor, silence
from orchestrator.submit.sbatch import gpu_options
from orchestrator.targets.host import Host, this_host
from orchestrator.targets.job_request import placement_request
from orchestrator.targets.partition import Partition
from orchestrator.targets.profile import load_profile, sbatch_options
from orchestrator.targets.slurm_cluster import Cluster, find_cluster

NODE_SECONDS = 300.0
"""Seconds that the node's job may wait and run."""
MOST_SKEW_SECONDS = 5.0
_PROBE = "launch.train.describe_node"


State = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One check. ``found`` is what it found. ``fix`` says what to do, and is empty if nothing is to be done."""

    name: str
    state: State
    found: str
    fix: str = ""


def _check(name: str, good: bool, found: str, fix: str, otherwise: State = "fail") -> Check:
    """Return a check that passes if ``good``, and else has a fix."""
    return Check(name, "pass", found) if good else Check(name, otherwise, found, fix)


def check_host(store: Path) -> list[Check]:
    """Check this host: Slurm, compiler, software, GPUs, the store and W&B."""
    host = this_host()
    return [
        _check_slurm(),
        _check_compiler(host),
        *_check_node([sys.executable], os.environ, store, bool(host.gpus)),
        _check_wandb(),
    ]


def check_cluster(name: str, store: Path) -> list[Check]:
    """Check the cluster of profile ``name``: Slurm, its partitions and, with a one-minute job, one node.

    Raises:
        InputError: there is no such profile, or it has problems; the error lists all.
    """
    profile = load_profile(name)
    if reason := silence():
        return [Check("Slurm", "fail", reason, "run doctor where sbatch works")]
    try:
        cluster = find_cluster(profile, store)
    except InputError as error:
        return [Check("Slurm", "fail", f"{one.place}: {one.message}", one.fix) for one in error.problems]
    except SystemFault as error:
        return [Check("Slurm", "fail", one_line(str(error)), "run doctor again when Slurm answers")]
    environment = {**os.environ, **profile.environment}
    node = _check_node(_job_command(cluster), environment, store, cluster.device == "cuda")
    return [Check("Slurm", "pass", "answers"), *map(_check_partition, cluster.partitions), *node, _check_wandb()]


def _check_slurm() -> Check:
    if reason := outage():
        return Check("Slurm", "fail", reason, "ask the site, or run with --executor local")
    if resolve_executor("auto") == "slurm":
        return Check("Slurm", "pass", "answers; doctor --cluster NAME checks a node")
    return Check("Slurm", "warn", "none here", "runs start on this host; to use a cluster, log in to a host of it")


def _check_compiler(host: Host) -> Check:
    found, fix = "found" if host.has_compiler else "none (CXX, g++ or clang++)", "apt-get install g++"
    return _check("C++ compiler", host.has_compiler, found, f"torch.compile on a CPU needs it: {fix}", "warn")


def _check_partition(partition: Partition) -> Check:
    nodes = sum(equal.count for equal in partition.nodes)
    gpus = max((equal.count_gpus(None) for equal in partition.nodes), default=0)
    limit = f"{partition.max_minutes:g} minutes at most" if partition.max_minutes < math.inf else "no time limit"
    found = f"{partition.state}, {count('node', nodes)}, {count('GPU', gpus)} on a node, {limit}"
    is_up, fix = partition.state == "UP" and nodes > 0, "wait until it is UP, or name another one in the profile"
    return _check(f"partition {partition.name}", is_up, found, fix)


def _check_wandb() -> Check:
    base_url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    reason, fix = why_offline(base_url), "run wandb login; without it runs are logged offline, for wandb sync"
    return _check("W&B", reason is None, reason or f"{base_url} answers, and a key is configured", fix, "warn")


def _job_command(cluster: Cluster) -> list[str]:
    """Return the command that describes one node, by a job that starts a task as ranks start."""
    profile, spec = cluster.profile, RunSpec(placement=Placement(device=cluster.device))
    options = {**gpu_options(placement_request(vars(spec.placement), 0, profile), profile), **sbatch_options(profile)}
    words = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in options.items()]
    step = cluster.start_settings(spec).step
    assert step is not None, "a cluster starts ranks by srun"
    srun = ["srun", "--job-name=doctor", "--nodes=1", "--ntasks=1", "--time=2", *words, *step.arguments, step.python]
    return ["bash", "-c", "\n".join([*profile.setup, f'exec {shlex.join(srun)} "$@"']), "bash"]


def _check_node(command: Sequence[str], environment: Mapping[str, str], store: Path, wants_gpu: bool) -> list[Check]:
    """Run ``command``, which starts Python on a node and describes the node. Judge what it finds."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        file = store.absolute() / f".doctor-{secrets.token_hex(4)}"
        file.touch()
    except OSError as error:
        return [Check("store", "fail", f"{store}: {error.strerror}", "name a folder that you may write to: --store")]
    try:
        begun = time.time()
        done = subprocess.run([*command, "-m", _PROBE, str(file)], env=add_to_python_path(environment),
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                              timeout=NODE_SECONDS)  # fmt: skip
        # Setup lines and the site's prolog may print something first.
        found, ended = json.loads(done.stdout.splitlines()[-1]), time.time()
        return list(judge_node(found | {"came_back": file.read_text() == found["host"]}, wants_gpu, begun, ended))
    except subprocess.TimeoutExpired:
        return [
            Check("node", "fail", f"no answer within {NODE_SECONDS:g} s", "squeue --me says what the job waits for")
        ]
    except (IndexError, ValueError):
        said = one_line(done.stderr)[-300:] or "it printed nothing"
        return [Check("node", "fail", said, f"make this work there: python -m {_PROBE} {shlex.quote(str(store))}")]
    finally:
        file.unlink(missing_ok=True)


def judge_node(found: Mapping[str, Any], wants_gpu: bool, begun: float, ended: float) -> Iterator[Check]:
    """Judge what launch.train.describe_node found between ``begun`` and ``ended``, in seconds of this host's clock."""
    yield _check_software(found, wants_gpu)
    yield _check_store(found)
    skew = max(begun - found["time"], found["time"] - ended, 0.0)
    fix = "ask the site to synchronize clocks (chrony), since times of records are compared"
    yield _check("clock", skew <= MOST_SKEW_SECONDS, f"{skew:.1f} s from this host's", fix, "warn")
    yield from _judge_gpus(found, wants_gpu)


def _check_software(found: Mapping[str, Any], wants_gpu: bool) -> Check:
    versions = found["versions"]
    seen = first_names([f"{name} {version}" for name, version in versions.items()], 12)
    if missing := found["missing"]:
        fix = f"install it where ranks run: {found['python']} -m pip install {shlex.join(missing)}"
        return Check("software", "fail", f"no {', '.join(missing)}; {seen}", fix)
    if wants_gpu and (missing := [name for name in ("transformer-engine", "megatron-core") if name not in versions]):
        fix = "engine megatron and cuda_graph.impl=transformer_engine need it: pip install '.[gpu]' in a checkout"
        return Check("software", "warn", f"no {', '.join(missing)}; {seen}", fix)
    return Check("software", "pass", seen)


def _check_store(found: Mapping[str, Any]) -> Check:
    host, fix = found["host"], "name a folder that all nodes share: --store, or mount it"
    if not found["sees_file"]:
        return Check("store", "fail", f"{host} does not see it", fix)
    if found["write_error"]:
        return Check("store", "fail", f"{host} cannot write to it: {found['write_error']}", "mount it for writing")
    if not found["came_back"]:
        return Check("store", "fail", f"this host does not see the files that {host} writes", fix)
    return Check("store", "pass", f"{host} reads and writes it")


def _judge_gpus(found: Mapping[str, Any], wants_gpu: bool) -> Iterator[Check]:
    gpus, driver = found["hardware"]["gpus"], f"driver {found['driver'] or 'unknown'}"
    if not gpus:
        cuda = found["versions"].get("cuda")
        seen = f"PyTorch finds none; {driver}, {f'CUDA {cuda}' if cuda else 'no CUDA in this PyTorch'}"
        fix = "install a PyTorch with a CUDA that the driver supports (nvidia-smi prints it)" if wants_gpu else ""
        yield Check("GPUs", "fail" if wants_gpu else "warn", seen, fix or "graphs need a GPU; runs here use the CPU")
        return
    yield Check(
        "GPUs",
        "pass",
        f"{count('GPU', len(gpus))} ({gpus[0]}, {size(found['hardware']['gpu_memory_bytes'][0])}), {driver}, "
        f"CUDA {found['versions'].get('cuda')}",
    )
    if any(found["foreign_bytes"]):
        used = [f"{size(held)} of GPU {number}" for number, held in enumerate(found["foreign_bytes"]) if held]
        fix = "end them (nvidia-smi lists them), or leave those GPUs out of CUDA_VISIBLE_DEVICES"
        yield Check("GPU memory", "warn", f"other processes hold about {first_names(used)}", fix)
    if found["other_cudnn"]:
        where = first_names(found["other_cudnn"])
        fix = "take its folder out of LD_LIBRARY_PATH: the loader prefers it to PyTorch's own"
        yield Check("cuDNN", "warn", f"{found['cudnn']}; a second one: {where}", fix)
    else:
        yield _check("cuDNN", found["cudnn"] is not None, str(found["cudnn"]), "install PyTorch with cuDNN")
    yield _check("NCCL", bool(found["nccl"]), found["nccl"] or "none", "install a PyTorch with NCCL")
