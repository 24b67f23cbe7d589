"""Import the release of Megatron-Core that PYTHONPATH chooses. 0.19.2 is installed next to the virtual environment.

Importing 0.19.2 requires triton, which only CUDA builds of PyTorch bring. Nothing on a CPU calls triton, so an empty
module replaces it during the import.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from launch.contract.spec import MegatronCore
from launch.megatron_config.graph_config import is_release

RELEASE: MegatronCore = next(each for each in get_args(MegatronCore) if is_release(version("megatron-core"), each))
FOLDER_0_19 = Path(sys.prefix) / "megatron-core-0.19.2"
"""``make .venv/megatron-core-0.19.2`` fills it."""


class Absent(ModuleType):
    """A module in which every name is a decorator, with or without arguments, that returns functions unchanged."""

    constexpr = object

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **settings: given[0] if given and callable(given[0]) else lambda function: function


def import_megatron_core() -> None:
    """Import modules that need triton, while a stand-in replaces it."""
    language = Absent("triton.language")
    triton = Absent("triton")
    triton.language, triton.__path__, triton.__version__ = language, [], "0"  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # It looks for triton only once, and would find the stand-in.
        importlib.import_module("torch._inductor.compile_fx")
        sys.modules |= {"triton": triton, "triton.language": language}
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        del sys.modules["triton"], sys.modules["triton.language"]


if RELEASE == "0.19" and find_spec("triton") is None:
    import_megatron_core()
