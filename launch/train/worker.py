"""One rank of one run: ``python -m launch.train.worker ATTEMPT_FOLDER``.

launch.supervise.local_ranks or launch.supervise.slurm_rank starts it, or launch.train.fork_server forks it.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # Imported modules are never freed. Searching them for reference cycles would take a seventh of the imports' time.
    gc.disable()

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from launch.checkpoints.checkpoint import open_checkpoint
from launch.common.atomic_files import write_json
from launch.common.parent_death import die_with_parent
from launch.common.redact import print_exception
from launch.common.text import size
from launch.contract.errors import EnvironmentFault
from launch.contract.paths import UNCHECKED, AttemptPaths
from launch.contract.records.identity import identity_of
from launch.contract.records.memory import foreign_bytes
from launch.contract.spec import EngineName, Model, RunSpec, read_spec
from launch.engines.profile_ranges import RANGES
from launch.engines.protocol import Engine, RankPlace
from launch.slurm.allocation import LOOPBACK
from launch.train.data_loader import check_documents, open_source
from launch.train.fault_injection import KINDS, FaultyStep
from launch.train.loop import train
from launch.train.perturbation import perturb, perturb_weight
from launch.train.telemetry import memory
from launch.train.telemetry.event_log import Recorder, broken_by
from launch.train.telemetry.imported_code import ImportedCode
from launch.train.telemetry.provenance import describe
from launch.train.telemetry.step_metrics import Metrics

ENGINES: dict[EngineName, str] = {
    "torch_native": "launch.engines.torch_native.engine",
    "megatron": "launch.engines.megatron.build",
}
"""The module of each engine's ``build``, imported only when a run needs it."""
MEET_WITHIN = timedelta(minutes=30)
"""How long a rank waits for the others: torch's default limit for its stores."""


def main(arguments: list[str]) -> None:
    attempt = AttemptPaths(Path(arguments[0]))
    rank = int(os.environ["RANK"])
    _redirect_output(attempt.log(rank))
    sys.excepthook = print_exception
    spec = read_spec(attempt.spec)
    mesh = RankPlace(rank, int(os.environ["WORLD_SIZE"]), _device(spec))
    recorder = Recorder(attempt, rank, mesh.device)
    try:
        run(spec, mesh, attempt, recorder)
    except BaseException as error:
        recorder.exception(error)
        raise


def run(spec: RunSpec, mesh: RankPlace, attempt: AttemptPaths, recorder: Recorder) -> None:
    """Set up, train and tear down. Results are on disk before the teardown begins."""
    _set_up(spec, mesh)
    neighbours = ""
    if foreign := foreign_bytes(memory.sample(mesh.device)):
        neighbours = f"other processes held about {size(foreign)} of rank {mesh.rank}'s GPU when the run began"
        recorder.note(neighbours)
    try:
        _train(spec, mesh, attempt, recorder)
    except Exception as error:
        if neighbours and isinstance(broken_by(error), torch.OutOfMemoryError):
            raise EnvironmentFault(f"{neighbours}, and now its memory is full") from error
        raise


def _train(spec: RunSpec, mesh: RankPlace, attempt: AttemptPaths, recorder: Recorder) -> None:
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    check_documents(source, spec, spec.parallelism.rank_in("dp", mesh.rank))
    if mesh.rank == 0:
        environment = describe(mesh.device, source.digest, _weights_digest(spec.model, recorder))
        write_json(attempt.environment, identity_of(attempt) | environment)
    recorder.enter("build")
    build = importlib.import_module(ENGINES[spec.engine]).build
    gc.freeze()
    gc.enable()
    engine: Engine = build(spec, mesh)
    if spec.fault.is_set:
        recorder.note(f"injected fault: fault.kind={spec.fault.kind}, fault.step={spec.fault.step}")
        FaultyStep(engine, KINDS[spec.fault.kind], spec.fault.step, mesh.device)
    if spec.perturbed:
        moved = "the weight of the first norm" if spec.compiles_whole else "the first layer's output"
        recorder.note(f"perturbed: {moved} is moved by one unit in the last place in step {spec.first_compared}")
        move_weight = partial(perturb_weight, lean=spec.training.optimizer_precision == "lean")
        inject = move_weight if spec.compiles_whole else perturb
        FaultyStep(engine, inject, spec.first_compared, mesh.device)
    recorder.write("choices", choices=engine.choices)
    if mesh.rank == 0 and (modules := ImportedCode().digest_new()):
        recorder.write("imports", modules=modules)
    missing = int(os.environ.get(UNCHECKED, "0"))
    train(spec, mesh, source, engine, recorder, Metrics(attempt, mesh.rank), missing)
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    recorder.leave()


def _weights_digest(model: Model, recorder: Recorder) -> str | None:
    """Return the digest of a checkpoint, or None for random weights."""
    if model.weights == "random":
        return None
    checkpoint = open_checkpoint(model)
    if not checkpoint.has_config:
        recorder.note(
            "model.weights has no config.json: heads, rotary embeddings, windows and epsilon come from the recipe alone"
        )
    return checkpoint.digest


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    # The supervisor requests stacks with this signal before it ends ranks that hang.
    faulthandler.register(signal.SIGUSR1)


def _device(spec: RunSpec) -> torch.device:
    if spec.placement.device == "cpu":
        return torch.device("cpu")
    if spec.parallelism.world_size > 1:
        # To load a kernel, CUDA waits for all running transfers, and one of these may wait for this rank.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    local_rank = int(os.environ["LOCAL_RANK"])
    # A site may show each task only its own GPU.
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)


def _set_up(spec: RunSpec, mesh: RankPlace) -> None:
    if mesh.world_size != spec.parallelism.world_size:
        raise EnvironmentFault(
            f"{mesh.world_size} ranks were started, but the layout needs {spec.parallelism.world_size}"
        )
    if spec.profile == "nsys" and shutil.which("nsys") is None:
        raise EnvironmentFault(
            "profile=nsys, but no nsys is on PATH: install Nsight Systems there, or set profile=none"
        )
    RANGES.are_named = spec.profile == "nsys" and mesh.device.type == "cuda"
    torch.set_num_threads(spec.placement.threads_per_rank)
    if mesh.device.type == "cuda":
        if not torch.cuda.is_available():
            raise EnvironmentFault("placement.device is 'cuda', but PyTorch finds no usable GPU here")
        check_devices(int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count())
        torch.cuda.set_device(mesh.device)
    if mesh.world_size > 1:
        backend = "nccl" if mesh.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=_loopback_store(mesh), rank=mesh.rank, world_size=mesh.world_size)


def _loopback_store(mesh: RankPlace) -> TCPStore | None:
    """Return the rendezvous store for the ranks of one host, or None if they are on several hosts.

    A store that torch opens by itself listens on all interfaces, and accepts commands from anyone.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if host != LOOPBACK:
        return None
    if mesh.rank > 0:
        return TCPStore(host, port, mesh.world_size, timeout=MEET_WITHIN)
    listener = socket.create_server((host, port)).detach()
    return TCPStore(host, port, mesh.world_size, is_master=True, timeout=MEET_WITHIN, master_listen_fd=listener)


def check_devices(ranks: int, visible: int) -> None:
    """Check that each of a node's ``ranks`` sees either at least as many GPUs as there are ranks, or only its own.

    Raises:
        EnvironmentFault: a rank sees another number of GPUs.
    """
    if visible < ranks and visible != 1:
        raise EnvironmentFault(
            f"{ranks} ranks run on this node, but each sees {visible} GPUs: it must see at least {ranks}, or only its own"
        )


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1:])
