"""What makes the runs of a sweep: Slurm's jobs, or this host."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from typing import Literal

from launch.contract.plan import Plan
from launch.slurm.command import Unanswered, run
from orchestrator.errors import input_error

ExecutorName = Literal["auto", "slurm", "local", "debug"]
Executor = Literal["slurm", "local", "debug"]

ANSWER_SECONDS = 30.0
_UNCONFIGURED = "Could not establish a configuration source"
"""What Slurm's commands say (20.02 and later) where they are installed and belong to no cluster."""


def resolve_executor(name: ExecutorName) -> Executor:
    """The executor that ``name`` stands for here: "auto" is Slurm where it answers, else this host.

    Raises:
        InputError: it is Slurm, which does not answer.
    """
    if name in ("local", "debug"):
        return name
    silence = _listen()
    if silence is None:
        return "slurm"
    if name == "slurm":
        raise input_error("--executor", f"slurm: {silence.words}", "--executor local runs the sweep on this host")
    return "local"


def outage() -> str:
    """Why Slurm does not answer, where this host is set up for it; empty where it answers, or is none of this host's."""
    silence = _listen()
    return silence.words if silence is not None and silence.is_outage else ""


def check_executor(plan: Plan, executor: Executor) -> None:
    """A plan is resumed where its cells were judged.

    Raises:
        InputError: it was made for a host and would go on under Slurm, or the other way round.
    """
    where = {"slurm": "a Slurm cluster", "host": "a host"}
    now: Literal["host", "slurm"] = "slurm" if executor == "slurm" else "host"
    if plan.scheduler != now:
        message = f"sweep {plan.name!r} was planned for {where[plan.scheduler]}, and would be resumed on {where[now]}"
        other = "slurm" if plan.scheduler == "slurm" else "local"
        remedy = f"resume it with --executor {other}, or plan it anew: sweep {plan.recipe_file} --executor {executor}"
        raise input_error("--executor", message, remedy)


@dataclass(frozen=True)
class _Silence:
    words: str
    is_outage: bool = False


@cache
def _listen() -> _Silence | None:
    """Whether Slurm answers on this host, asked once; None where it does."""
    if shutil.which("sbatch") is None:
        return _Silence("there is no sbatch on PATH")
    try:
        run("sinfo", "--noheader", seconds=ANSWER_SECONDS)
    except Unanswered as error:
        if error.for_good:
            return _Silence("there is no sinfo on PATH")
        if _UNCONFIGURED in error.stderr:
            return _Silence("Slurm is not configured on this host (SLURM_CONF, /etc/slurm/slurm.conf)")
        return _Silence(f"Slurm does not answer ({error})", is_outage=True)
    return None
