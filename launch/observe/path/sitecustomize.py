"""Load the observer into the user's program, then any ``sitecustomize`` that this one hides.

Python imports this file by itself, because its folder is the first in PYTHONPATH. A failure here must not fail the program.
"""

import importlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (this file must run on any Python)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))  # noqa: PTH120


def _observe() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (the program's Python is not ours)
        raise RuntimeError("it needs Python 3.11 or later")
    # Append, so that the program's own modules come first.
    sys.path.append(_ROOT)
    importlib.import_module("launch.observe.start").start()


def _run_hidden() -> None:
    here = [place for place in sys.path if os.path.abspath(place) == _HERE]  # noqa: PTH100
    sys.path[:] = [place for place in sys.path if place not in here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


try:
    _observe()
except Exception as error:
    sys.stderr.write(f"launch.observe: this process is not observed: {type(error).__name__}: {error}\n")
_run_hidden()
