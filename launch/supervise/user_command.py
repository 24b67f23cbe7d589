"""Become the user's program: ``python -m launch.supervise.user_command ATTEMPT_FOLDER``.

Engine command starts this module instead of launch.train.worker, once on each node or once for each rank. The program's
processes load launch.observe, because its folder comes first in their PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from launch import ROOT
from launch.common.parent_death import PARENT, die_with_parent
from launch.contract.errors import EnvironmentFault
from launch.contract.paths import OBSERVED, AttemptPaths
from launch.contract.spec import RunSpec, read_spec
from launch.frameworks import FRAMEWORKS
from launch.frameworks.command_line import command_words

END_SECONDS = 0.1
"""The time between two looks for processes that are to end."""
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def main(arguments: list[str]) -> None:
    """Replace this process by the program, which prints to its rank's log. A launcher prints to the log of its first rank."""
    attempt = AttemptPaths(Path(arguments[0]).absolute())
    log = os.open(attempt.log(int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    spec = read_spec(attempt.spec)
    attempt.output.mkdir(exist_ok=True)
    words, variables = command_words(spec, _places(attempt, os.environ)), program_variables(spec, attempt, os.environ)
    try:
        os.chdir(spec.command.workdir)
        os.execvpe(words[0], words, variables)
    except OSError as error:
        raise EnvironmentFault(
            f"command.run cannot start: {words[0]} in {spec.command.workdir}: {error.strerror}"
        ) from None


def program_variables(spec: RunSpec, attempt: AttemptPaths, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the program's environment: the inherited one, the observer's folder, and the folder where it writes.

    A launcher of ranks gets no variables of a single rank, but torchrun's own variables for the rendezvous of its nodes.
    """
    deterministic = FRAMEWORKS[spec.command.framework].deterministic_variables if spec.training.deterministic else {}
    variables = {**deterministic, **{name: value for name, value in inherited.items() if name != PARENT}}
    variables[OBSERVED] = str(attempt.root)
    others = variables.get("PYTHONPATH", "").split(os.pathsep)[1:]
    # Leave out the checkout itself, because a program may have packages with the same names.
    variables["PYTHONPATH"] = os.pathsep.join((str(ROOT / "launch" / "observe" / "path"), *others))
    if spec.command.launcher == "torchrun":
        meeting = {"NNODES": str(spec.placement.nodes), "NODE_RANK": variables.get("SLURM_NODEID", "0")}
        meeting |= {name: variables[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in variables}
        variables |= {f"PET_{name}": value for name, value in meeting.items()}
        variables = {name: value for name, value in variables.items() if name not in _OF_A_RANK}
    return variables


def end_with_supervisor(attempt: AttemptPaths) -> None:
    """Leave a process that ends all processes of the program once the supervisor is gone, which closes their standard input.

    The kernel ends only the process that the supervisor started, and not the ranks of a torchrun.
    """
    if os.fork() != 0:
        os.wait()
        return
    # The program gets no child that it did not start, and a signal to its group leaves this process alone.
    os.setsid()
    if os.fork() == 0:
        while os.read(0, 1):
            pass
        while processes := observed_processes(attempt):
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(END_SECONDS)
    os._exit(0)


def observed_processes(attempt: AttemptPaths) -> set[int]:
    """Return the running processes of the user's program in ``attempt``. Launchers start ranks in sessions of their own."""
    mark, found = f"{OBSERVED}={attempt.root.absolute()}".encode(), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


def _places(attempt: AttemptPaths, environment: Mapping[str, str]) -> dict[str, str]:
    return {
        "output": str(attempt.output),
        "python": sys.executable,
        "node_rank": environment.get("SLURM_NODEID", "0"),
        "master_addr": environment.get("MASTER_ADDR", ""),
        "master_port": environment.get("MASTER_PORT", ""),
    }


if __name__ == "__main__":
    # Slurm ends the processes of a step. A rank there has no pipe as its input, and may end before other ranks of its node.
    if PARENT in os.environ and "SLURM_STEP_ID" not in os.environ:
        end_with_supervisor(AttemptPaths(Path(sys.argv[1])))
    die_with_parent()
    main(sys.argv[1:])
