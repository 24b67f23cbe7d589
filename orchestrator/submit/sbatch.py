"""Call sbatch, by submitit. No other module imports submitit.

submitit writes the batch script and calls sbatch. By default, it pickles a function and loads it in the job. Here the script
starts the supervisor on a bundle.json instead, so nothing is pickled. submitit is not asked how a job ended either, because
records and Slurm show this.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from launch import ROOT
from launch.contract.paths import SweepPaths
from orchestrator.errors import SystemFault
from orchestrator.submit import sbatch_once
from orchestrator.submit.job_arrays import Array
from orchestrator.targets.job_request import JobRequest
from orchestrator.targets.profile import SHELL_DEFAULTS, Profile, sbatch_options

SIGNAL_SECONDS = 60
"""How long before a job's time limit Slurm sends SIGUSR2."""

_SUPERVISOR_STEP = (
    "--nodes=1", "--relative=0", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--overlap", "--mpi=none",
    "--export=ALL",
)  # fmt: skip
"""srun's options for the supervisor: one process on the job's first node that leaves room for the steps of runs."""


_SOCKET_ERRORS = (
    errno.EPIPE, errno.ECONNABORTED, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENETRESET, errno.ENETUNREACH, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT,
)  # fmt: skip
_UNSURE = re.compile(
    "timed out|zero (bytes|length)|missing socket|(send|receive|shutdown) failure|unexpected message|message length"
    f"|header lengths|entire message|authentication|{'|'.join(map(os.strerror, _SOCKET_ERRORS))}", re.IGNORECASE,
)  # fmt: skip
"""The messages of sbatch if its request may have arrived but no readable answer came (slurm_strerror, 1000 to 1013, 1801 to
1803 and 5000 to 5005), and the system's messages for a broken connection."""


class Refused(Exception):
    """sbatch failed, with this message. ``certain`` is False while a request of it may still be on its way.

    Slurm may have the job nevertheless, because sbatch may be a site's own program that fails afterwards.
    """

    def __init__(self, words: str, *, certain: bool) -> None:
        super().__init__(words)
        self.certain = certain


@dataclass(frozen=True)
class BatchJob:
    """One call of sbatch: the supervisors of ``array``'s bundles, as a job array if there are several."""

    sweep: SweepPaths
    folder: Path
    """The folder for submitit's files and the job's output, only for this call."""
    array: Array
    profile: Profile
    name: str
    exclude: Sequence[str] = ()
    """The nodes to avoid in addition to those in the profile."""


def batch_script(job: BatchJob) -> str:
    """Return the batch script. Nothing is written to disk."""
    executor = _executor(job)
    return executor._make_submission_file_text(_supervisor_command(job, executor.python), "")


def submit_bundles(job: BatchJob) -> str:
    """Submit the supervisors of the job's bundles by one call of sbatch. Return the job's id.

    Raises:
        Refused: sbatch failed, or its answer names no job.
    """
    if shutil.which("srun") is None:
        raise SystemFault("srun is not on PATH here, but ranks are started by it; load Slurm's commands")
    executor = _executor(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    try:
        # submitit prints sbatch's message in addition to raising it.
        with _hidden_variables(job.profile), contextlib.redirect_stderr(io.StringIO()):
            return executor._submit_command(_supervisor_command(job, executor.python)).job_id
    except (FailedJobError, FailedSubmissionError) as error:
        raise _refused(error) from error


def _refused(error: Exception) -> Refused:
    lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in str(error).splitlines())
    message = "; ".join(line for line in lines if line)
    cause = error.__cause__
    exited = isinstance(cause, subprocess.CalledProcessError) and cause.returncode > 0
    return Refused(message or f"no message ({cause})", certain=exited and not _UNSURE.search(message))


def _supervisor_command(job: BatchJob, python: str) -> str:
    """Return the command that supervises one bundle; in a job array, the bundle of the element."""
    folder = shlex.quote(str(job.sweep.bundles.absolute()))
    return f'{python} -u -m launch.supervise.supervisor {folder}/"${{bundles[${{SLURM_ARRAY_TASK_ID:-0}}]}}"'


class _Executor(submitit.SlurmExecutor):
    @classmethod
    def affinity(cls) -> int:
        """Claim that Slurm is available, because a batch script is also written on hosts without Slurm."""
        return 2

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [sys.executable, "-IS", sbatch_once.__file__, str(submission_file_path)]


def _executor(job: BatchJob) -> submitit.SlurmExecutor:
    executor = _Executor(job.folder)
    request, profile, in_chain = job.array.request, job.profile, job.array.chain is not None
    options = sbatch_options(profile)
    site_exclude = options.pop("exclude", "")
    executor.update_parameters(
        job_name=job.name,
        nodes=request.nodes,
        ntasks_per_node=request.ranks_per_node,
        cpus_per_task=request.cpus_per_rank,
        time=request.minutes,
        exclude=",".join(filter(None, [*job.exclude, site_exclude])) or None,
        dependency="singleton" if in_chain else None,
        array_parallelism=1 if in_chain else len(job.array.bundles),
        signal_delay_s=SIGNAL_SECONDS,
        # submitit's default is a key that a site may not know.
        wckey=None,
        # Set PYTHONPATH after the site's own lines, which may load another Python's modules.
        setup=[
            *profile.setup,
            f'export PYTHONPATH={shlex.quote(str(ROOT))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
            f"bundles=({shlex.join(job.array.bundles)})",
        ],
        srun_args=_SUPERVISOR_STEP,
        # This program makes its own attempts. A job that Slurm requeues would find all its runs started, and start none.
        additional_parameters={"no_requeue": True, **gpu_options(request, profile), **options},
    )
    if len(job.array.bundles) > 1:
        executor.parameters["map_count"] = len(job.array.bundles)
    return executor


def gpu_options(request: JobRequest, profile: Profile) -> dict[str, str]:
    if not request.gpus_per_node or profile.gpus == "none":
        return {}
    kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
    if profile.gpus == "gres":
        return {"gres": f"gpu:{kind}{request.gpus_per_node}"}
    return {"gpus_per_node": f"{kind}{request.gpus_per_node}"}


@contextlib.contextmanager
def _hidden_variables(profile: Profile) -> Iterator[None]:
    """Hide the shell's variables that would override the batch script (SBATCH_TIMELIMIT) or the options of its srun, since a job
    inherits them (SLURM_TIMELIMIT). Inside a Slurm job, they also describe that job's size, step and devices.

    Variables for settings that ``profile`` leaves open stay.
    """
    kept = {*_TO_REACH_SLURM, *(f"SBATCH_{name.upper()}" for name in SHELL_DEFAULTS if getattr(profile, name) is None)}
    hidden = {name: value for name, value in os.environ.items() if name.startswith(_HIDDEN) and name not in kept}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


_TO_REACH_SLURM = ("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_JWT")
_HIDDEN = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "PMI_", "PMIX_", "CUDA_VISIBLE_DEVICES")
