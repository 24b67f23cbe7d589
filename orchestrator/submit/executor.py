"""Where a sweep runs: in Slurm jobs, or on this host."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Literal

from launch.contract.plan import Plan
from launch.slurm.command import Unanswered, run
from orchestrator.errors import SystemFault, input_error

ExecutorName = Literal["auto", "slurm", "local", "debug"]
Executor = Literal["slurm", "local", "debug"]

ANSWER_SECONDS = 30.0
_UNCONFIGURED = "Could not establish a configuration source"
"""The message of Slurm's commands (20.02 and later) if they are installed but no cluster is configured."""
_WITHOUT_SLURM = "run on this host: --executor local; plan --cluster NAME needs no Slurm"


def resolve_executor(name: ExecutorName) -> Executor:
    """Return the executor for ``name``: "auto" is Slurm if this host is set up for it, otherwise this host.

    Raises:
        InputError: ``name`` is "slurm", but this host is not set up for Slurm.
        SystemFault: this host is set up for Slurm, but Slurm does not answer. "auto" does not fall back to this host then,
            because it may be a login node.
    """
    if name in ("local", "debug"):
        return name
    unanswered = _check_slurm()
    if unanswered is None:
        return "slurm"
    if not unanswered.for_good:
        raise SystemFault(f"{unanswered}\n    try again when `scontrol ping` prints UP, or {_WITHOUT_SLURM}")
    if name == "slurm":
        raise input_error("--executor", f"slurm: {unanswered}", _WITHOUT_SLURM)
    return "local"


def silence() -> str:
    """Return why Slurm does not answer; empty if it does."""
    return str(_check_slurm() or "")


def outage() -> str:
    """Return why Slurm does not answer; empty if it does, or if this host is not set up for Slurm."""
    unanswered = _check_slurm()
    return "" if unanswered is None or unanswered.for_good else str(unanswered)


def check_executor(plan: Plan, executor: Executor) -> None:
    """Check that a plan continues on the kind of target for which it was made.

    Raises:
        InputError: it was made for a host and would continue under Slurm, or the other way round.
    """
    where = {"slurm": "a Slurm cluster", "host": "a host"}
    now: Literal["host", "slurm"] = "slurm" if executor == "slurm" else "host"
    if plan.scheduler != now:
        message = f"sweep {plan.name!r} was planned for {where[plan.scheduler]}, but would be resumed on {where[now]}"
        other = "slurm" if plan.scheduler == "slurm" else "local"
        resume = f"resume it with --executor {other}"
        if plan.scheduler == "slurm" and (reason := outage()):
            message, resume = f"{message}: {reason}", "resume it once Slurm answers"
        fix = f"{resume}, or plan it again, with --executor {executor} and the command that made it"
        raise input_error("--executor", message, fix)


@cache
def _check_slurm() -> Unanswered | None:
    """Return why Slurm does not answer on this host, or None if it does. Slurm is asked only once.

    ``for_good`` is set if this host is not set up for Slurm.
    """
    if shutil.which("sbatch") is None:
        return Unanswered("there is no sbatch on PATH", for_good=True)
    try:
        run("sinfo", "--noheader", seconds=ANSWER_SECONDS)
    except Unanswered as error:
        if error.for_good:
            return Unanswered("there is an sbatch on PATH, but no sinfo")
        if _UNCONFIGURED in error.stderr:
            return Unanswered("Slurm is not configured on this host (SLURM_CONF, /etc/slurm/slurm.conf)", for_good=True)
        return Unanswered(f"Slurm is installed here, but does not answer ({error})")
    return None
