"""Observe a program that PYTHONPATH does not reach: ``python -m launch.observe [-m MODULE | FILE] ARGUMENTS``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from launch.observe.start import start

if __name__ == "__main__":
    start()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
