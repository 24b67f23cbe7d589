"""One rank of one run: ``python -m launch.train.worker ATTEMPT_FOLDER``.

launch.train.torchrun_agent or launch.supervise.slurm_rank starts it.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from launch.checkpoints.checkpoint import open_checkpoint
from launch.common.atomic_files import write_json
from launch.common.parent_death import die_with_parent
from launch.contract.errors import EnvironmentFault
from launch.contract.paths import AttemptPaths
from launch.contract.spec import EngineName, Model, RunSpec, read_spec
from launch.engines.protocol import Build, RankPlace
from launch.support import known_faults
from launch.train.data_loader import open_source
from launch.train.fault_injection import FaultyEngine
from launch.train.loop import train
from launch.train.telemetry.event_log import Recorder
from launch.train.telemetry.provenance import describe
from launch.train.telemetry.step_metrics import Metrics

ENGINES: dict[EngineName, str] = {
    "torch_native": "launch.engines.torch_native.engine",
    "megatron": "launch.engines.megatron.build",
}
"""The module of each engine's ``build``, imported only when a run needs it."""


def main(arguments: list[str]) -> None:
    attempt = AttemptPaths(Path(arguments[0]))
    rank = int(os.environ["RANK"])
    _redirect_output(attempt.log(rank))
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
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    if mesh.rank == 0:
        write_json(attempt.environment, describe(mesh.device, source.digest, _weights_digest(spec.model, recorder)))
    recorder.enter("build")
    engine = _build_of(spec.engine)(spec, mesh)
    if spec.fault.is_set:
        recorder.note(f"injected fault: fault.kind={spec.fault.kind}, fault.step={spec.fault.step}")
        engine = FaultyEngine(engine, spec.fault, mesh.device)
    for fault in known_faults(spec):
        recorder.note(fault.text)
    recorder.choices(engine.choices)
    train(spec, mesh, source, engine, recorder, Metrics(attempt, mesh.rank))
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
            "model.weights has no config.json: heads, rotary positions, windows and epsilon come from the recipe alone"
        )
    return checkpoint.digest


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    # The supervisor asks for stacks before it ends ranks that hang.
    faulthandler.register(signal.SIGUSR1)


def _device(spec: RunSpec) -> torch.device:
    if spec.placement.device == "cpu":
        return torch.device("cpu")
    if spec.parallelism.world_size > 1:
        # Loading a kernel waits for all running transfers, and one of them may wait for this rank.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    local_rank = int(os.environ["LOCAL_RANK"])
    # A site may show each task only its own GPU.
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)


def _set_up(spec: RunSpec, mesh: RankPlace) -> None:
    if mesh.world_size != spec.parallelism.world_size:
        raise EnvironmentFault(
            f"{mesh.world_size} ranks were started, but the layout needs {spec.parallelism.world_size}"
        )
    torch.set_num_threads(spec.placement.threads_per_rank)
    if mesh.device.type == "cuda":
        if not torch.cuda.is_available():
            raise EnvironmentFault("placement.device is 'cuda', but PyTorch finds no usable GPU here")
        check_devices(int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count())
        torch.cuda.set_device(mesh.device)
    if mesh.world_size > 1:
        dist.init_process_group("nccl" if mesh.device.type == "cuda" else "gloo")


def check_devices(ranks: int, visible: int) -> None:
    """Check that each of a node's ``ranks`` sees either all their GPUs or only its own.

    Raises:
        EnvironmentFault: it sees another number of GPUs.
    """
    if visible < ranks and visible != 1:
        raise EnvironmentFault(
            f"{ranks} ranks run on this node, and each sees {visible} GPUs: it must see {ranks}, or only its own"
        )


def _build_of(engine: EngineName) -> Build:
    build: Build = importlib.import_module(ENGINES[engine]).build
    return build


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1:])
