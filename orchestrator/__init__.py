"""The orchestrator, on the login node: from a recipe to a plan, to jobs, to a report. It never imports torch."""

import sys
from pathlib import Path

__version__ = "0.2.0"

_COMMAND = "cuda-graph-orchestrator"
PROGRAM = _COMMAND if Path(sys.argv[0]).name == _COMMAND else "python -m orchestrator"
"""How the user started this program. Messages name commands in this form."""
