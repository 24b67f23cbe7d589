"""Run sbatch, and end it where it would ask again: ``python sbatch_once.py SCRIPT``.

If Slurm's queue is full (MaxJobCount), sbatch asks again for two minutes. The caller waits better: it says what it waits for, and
keeps no other command waiting.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

ASKS_AGAIN = "sleeping and retrying"
"""What sbatch prints before it sleeps for a second and asks again. Its request was refused."""


def main() -> int:
    # In a group of its own, because sbatch may be a site's script that calls Slurm's.
    with subprocess.Popen(
        ["sbatch", *sys.argv[1:]], stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as sbatch:
        assert sbatch.stderr is not None
        for line in sbatch.stderr:
            sys.stderr.write(line)
            if ASKS_AGAIN in line:
                os.killpg(sbatch.pid, signal.SIGKILL)
                return 1
    if sbatch.returncode < 0:
        # The caller must see the signal: nobody knows whether the request arrived.
        os.kill(os.getpid(), -sbatch.returncode)
    return sbatch.returncode


if __name__ == "__main__":
    sys.exit(main())
