"""A process that must not outlive its parent, so that a dead supervisor leaves no rank behind."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


PARENT = "LAUNCH_PARENT_PID"
"""The variable that tells a process whose child it is to be. A task of a Slurm step has none: Slurm ends it."""


def die_with_parent() -> None:
    """Have the kernel end this process with SIGKILL when the parent that started it ends, however that ends.

    The kernel needs neither the interpreter's lock nor a thread of ours for it: a rank that hangs inside a collective
    dies all the same.
    """
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)  # it ended before the kernel was asked
