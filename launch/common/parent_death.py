"""End a process with its parent, so that a dead supervisor leaves no rank behind."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


PARENT = "LAUNCH_PARENT_PID"
"""The environment variable with the expected parent's pid. A task of a Slurm step has none, because Slurm ends it."""


def die_with_parent() -> None:
    """Ask the kernel to send this process SIGKILL when its parent ends.

    The kernel needs neither the interpreter's lock nor a thread, so even a rank that hangs in a collective dies.
    """
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        # The parent ended before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)
