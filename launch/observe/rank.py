"""This process as a rank of the attempt. If several processes have one number, the first to claim it is the rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from launch.common.atomic_files import write_json
from launch.common.text import count
from launch.contract.errors import EnvironmentFault, ProgramError
from launch.contract.paths import AttemptPaths
from launch.contract.records.events import Phase
from launch.contract.records.identity import identity_of
from launch.contract.spec import RunSpec
from launch.observe.description.program import describe_program
from launch.observe.description.torch_settings import torch_settings
from launch.train.telemetry.event_log import Recorder
from launch.train.telemetry.imported_code import ImportedCode


class Rank:
    """A process that may turn out to be a rank. ``recorder`` is None until then."""

    def __init__(self, attempt: AttemptPaths, spec: RunSpec) -> None:
        self.attempt = attempt
        self.recorder: Recorder | None = None
        self.silent = False
        """Whether another process is this rank."""
        self.begun = self.done = self.failed = False
        """Whether its first step has begun, all its records are written, and it has recorded an exception."""
        self._spec = spec
        self._folders = tuple(sys.path)
        self._reported = False
        self._code = ImportedCode()
        self._torch: dict[str, str] = {}
        """The settings of PyTorch at the first step."""
        if "RANK" in os.environ:
            self.claim()

    @property
    def number(self) -> int:
        if "RANK" in os.environ:
            return int(os.environ["RANK"])
        return dist.get_rank() if _is_distributed() else 0

    def claim(self) -> None:
        """Become this rank unless another process already is: a launcher's children all inherit its variables."""
        if self.recorder is not None or self.silent:
            return
        if create(self.attempt.events(self.number)):
            self.recorder = Recorder(self.attempt, self.number, torch.device(self._spec.placement.device))
        else:
            self.silent = True

    def begin(self, phase: Phase) -> None:
        """Become a rank at the first step.

        Raises:
            EnvironmentFault: the program's PyTorch is too old, or the run needs a GPU and the program's PyTorch has none.
            ProgramError: the program has other ranks than the run.
        """
        if self.begun:
            return
        if (refusal := self._refusal()) is not None:
            # A launcher may catch the exception of a rank that it has forked.
            self.fail(refusal)
            raise refusal
        self.begun = True
        self.claim()
        if self.recorder is None:
            return
        if self.recorder.device.type == "cuda":
            self.recorder.device = torch.device("cuda", torch.cuda.current_device())
        self._torch = torch_settings()
        if self.number == 0:
            environment = describe_program(self.recorder.device, self._spec, self._folders)
            write_json(self.attempt.environment, identity_of(self.attempt) | environment)
        self.write_imports()
        self.recorder.enter(phase, 0)

    def write_imports(self) -> None:
        """Record what the program of rank 0 has imported since the last call."""
        if self.recorder is not None and self.number == 0 and (modules := self._code.digest_new()):
            self.recorder.write("imports", modules=modules)

    def write_changed_settings(self) -> None:
        """Record the settings of PyTorch that the program has changed since its first step."""
        changed = [f"{name} {now}" for name, now in torch_settings().items() if self._torch.get(name) != now]
        if self.recorder is not None and changed:
            self.recorder.write("choices", choices={"torch_at_end": ", ".join(changed)})

    def _refusal(self) -> EnvironmentFault | ProgramError | None:
        """Return why this program cannot be the run's."""
        if not hasattr(torch.nn.utils, "get_total_norm"):
            return EnvironmentFault(f"a program needs PyTorch 2.6 or later, and its Python has {torch.__version__}")
        if self._spec.placement.device == "cuda" and not (torch.cuda.is_initialized() or torch.cuda.is_available()):
            return EnvironmentFault(_no_gpu())
        known, ranks = self._spec.parallelism.world_size, _world_size()
        if ranks == known:
            return None
        # Missing ranks leave no records, and nobody reads those of ranks that the run does not know.
        return ProgramError(
            f"the program trains with {count('rank', ranks)}, and the run has {known} (wrap: --ranks {ranks})"
        )

    def report_second_process(self) -> None:
        """Record that this process trains although another one was the rank. Its steps are not compared."""
        if not self._reported:
            self._reported = True
            recorder = Recorder(self.attempt, self.number, torch.device("cpu"))
            text = f"a second process trains as rank {self.number}: let the command start one training program"
            if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
                text = "torchrun restarted the program after a rank failed: read in its log why, and leave out --max-restarts"
            recorder.exception(ProgramError(text))

    def forget(self) -> None:
        """In a forked child, stop being a rank. If this process was not a rank, the child may become one."""
        self.silent |= self.recorder is not None

    def fail(self, error: BaseException) -> None:
        """Record the error that ends this process before its records are complete."""
        self.claim()
        if self.recorder is not None and not (self.done or self.failed or isinstance(error, SystemExit)):
            self.failed = True
            self.recorder.exception(error)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _world_size() -> int:
    """Return the number of ranks of the program, by PyTorch or by its launcher. A program may leave some out of its group."""
    return max(int(os.environ.get("WORLD_SIZE", "1")), dist.get_world_size() if _is_distributed() else 1)


def _no_gpu() -> str:
    if torch.version.cuda or torch.version.hip:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        why = f"PyTorch {torch.__version__} finds none that it can use (CUDA_VISIBLE_DEVICES is {visible})"
    else:
        why = f"PyTorch {torch.__version__} has no CUDA"
    return f"the run is planned for a GPU, but the program trains without a GPU: {why}"


def create(path: Path) -> bool:
    """Create an empty file. Return False if it already exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(0o644, exist_ok=False)
    except FileExistsError:
        return False
    return True
