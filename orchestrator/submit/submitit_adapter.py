"""The only module that knows submitit.

submitit starts supervisors and is asked nothing about how they end: it reports every ending as FINISHED, and of several
tasks it knows one. What became of a bundle is read from its records, and from Slurm.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError, JobPaths

from launch.contract.paths import BundlePaths
from launch.supervise.supervisor import supervise
from orchestrator.errors import SystemFault
from orchestrator.targets.job_request import JobRequest
from orchestrator.targets.profile import SHELL_DEFAULTS, Profile, sbatch_options

NO_TIMEOUT = 60 * 24 * 365
"""Minutes. submitit would end a supervisor that waits for slots; launch.supervise.supervisor times each run itself."""
SIGNAL_SECONDS = 60
"""How long before its time limit a job is sent SIGUSR2."""
SOURCE = Path(__file__).resolve().parents[2]

_SUPERVISOR_STEP = (
    "--nodes=1", "--relative=0", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--overlap", "--mpi=none",
    "--export=ALL",
)  # fmt: skip
"""srun's options for the supervisor: one process on the job's first node, beside which the steps of runs start."""


_UNSURE = re.compile(
    "timed out|zero (bytes|length)|missing socket|(send|receive|shutdown) failure|unexpected message|message length"
    "|header lengths|entire message|authentication|connection reset|broken pipe", re.IGNORECASE,
)  # fmt: skip
"""sbatch's words where its request may have been sent and no answer came, or none that can be read (slurm_strerror, 1000 to
1013, 1801 to 1803 and 5000 to 5005)."""


class Refused(Exception):
    """sbatch did not submit. The text is its own words; ``certain`` is whether there is no job then."""

    def __init__(self, words: str, *, certain: bool) -> None:
        super().__init__(words)
        self.certain = certain


@dataclass(frozen=True)
class BatchJob:
    """What one call of sbatch is to submit: the supervisors of ``count`` bundles, as an array where there are several."""

    folder: Path
    """Its own: submitit's files, and what the job prints."""
    request: JobRequest
    profile: Profile
    name: str
    count: int
    in_lane: bool = False
    """One element at a time, and none beside another job of this name."""
    exclude: Sequence[str] = ()
    """Nodes that are left aside, beside those of the profile."""


class LocalJob:
    """A supervisor that was started on this host."""

    def __init__(self, job: submitit.Job[Any]) -> None:
        self._job = job
        self.job_id = str(job.job_id)

    def is_starting(self) -> bool:
        """Whether the process that was started is still there."""
        return not self._job.done()


def start_here(bundle: BundlePaths, token: str) -> LocalJob:
    """Start the bundle's supervisor on this host."""
    # A folder for each start: submitit names files by process id, and would hand a job that of an earlier process.
    executor = submitit.LocalExecutor(folder=bundle.sweep.root / "submitit" / token)
    executor.update_parameters(timeout_min=NO_TIMEOUT, name=bundle.root.name)
    return LocalJob(executor.submit(supervise, str(bundle.root)))


def batch_script(job: BatchJob) -> str:
    """The text that sbatch is given. It touches no disk."""
    executor = _executor(job)
    if job.count > 1:
        executor.parameters["map_count"] = job.count
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def submit_bundles(job: BatchJob, bundles: Sequence[BundlePaths]) -> str:
    """Have Slurm start the supervisors of ``bundles`` by one call of sbatch; the value is the job's id.

    Raises:
        Refused: sbatch said no, or did not say what became of it.
    """
    executor = _executor(job)
    try:
        # submitit prints what sbatch said, and raises it as well.
        with _undisturbed(job.profile), contextlib.redirect_stderr(io.StringIO()), executor.batch():
            jobs = [executor.submit(supervise, str(bundle.root.absolute())) for bundle in bundles]
    except (FailedJobError, FailedSubmissionError) as error:
        raise _refused(error) from error
    return str(jobs[0].job_id).partition("_")[0]


def _refused(error: Exception) -> Refused:
    lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in str(error).splitlines())
    words = "; ".join(line for line in lines if line)
    ended = error.__cause__
    by_itself = isinstance(ended, subprocess.CalledProcessError) and ended.returncode > 0
    return Refused(words or f"no word ({ended})", certain=by_itself and not _UNSURE.search(words))


def put_in_place(folder: Path, bundles: Sequence[BundlePaths], job_id: str) -> None:
    """What submitit does once sbatch has answered, for a job whose submitter died before: the files that supervisors
    wait for (a minute at most) get the names by which they are looked for."""
    for index, bundle in enumerate(bundles):
        path = JobPaths(folder, job_id if len(bundles) == 1 else f"{job_id}_{index}").submitted_pickle
        if not path.exists():
            start = DelayedSubmission(supervise, str(bundle.root.absolute()))
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            start.dump(beside)
            beside.replace(path)


def _executor(job: BatchJob) -> submitit.SlurmExecutor:
    try:
        executor = submitit.SlurmExecutor(job.folder)
    except RuntimeError as error:  # its only complaint
        raise SystemFault("srun is not on PATH here, while jobs are started by it; load Slurm's commands") from error
    request, profile = job.request, job.profile
    options = sbatch_options(profile)
    site_exclude = options.pop("exclude", "")
    executor.update_parameters(
        job_name=job.name,
        nodes=request.nodes,
        ntasks_per_node=request.ranks_per_node,
        cpus_per_task=request.cpus_per_rank,
        time=request.minutes,
        exclude=",".join(filter(None, [*job.exclude, site_exclude])) or None,
        dependency="singleton" if job.in_lane else None,
        array_parallelism=1 if job.in_lane else job.count,
        signal_delay_s=SIGNAL_SECONDS,
        # submitit's own default is a key that a site may not know.
        wckey=None,
        # After the site's own lines, which may load another Python's modules.
        setup=[*profile.setup, f'export PYTHONPATH={shlex.quote(str(SOURCE))}"${{PYTHONPATH:+:$PYTHONPATH}}"'],
        srun_args=_SUPERVISOR_STEP,
        # Attempts are this program's own: a job that Slurm requeues would find its runs begun, and start none.
        additional_parameters={"no_requeue": True, **_gpus(request, profile), **options},
    )
    return executor


def _gpus(request: JobRequest, profile: Profile) -> dict[str, str]:
    if not request.gpus_per_node or profile.gpus == "none":
        return {}
    kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
    if profile.gpus == "gres":
        return {"gres": f"gpu:{kind}{request.gpus_per_node}"}
    return {"gpus_per_node": f"{kind}{request.gpus_per_node}"}


@contextlib.contextmanager
def _undisturbed(profile: Profile) -> Iterator[None]:
    """What the shell sets for sbatch (SBATCH_TIMELIMIT, SBATCH_JOB_NAME) would go before the script: it is taken away,
    but for choices that ``profile`` leaves open. Where this command itself runs in a job of Slurm's, sbatch and the new
    job are not told of that one's size, its step and its devices."""
    kept = {"SLURM_CONF", *(f"SBATCH_{name.upper()}" for name in SHELL_DEFAULTS if getattr(profile, name) is None)}
    others = _OF_A_JOB if "SLURM_JOB_ID" in os.environ else ("SBATCH_",)
    hidden = {name: value for name, value in os.environ.items() if name.startswith(others) and name not in kept}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_", "PMI_", "PMIX_", "CUDA_VISIBLE_DEVICES")
