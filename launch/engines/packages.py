"""Packages that only some settings need."""

from __future__ import annotations

import importlib
from typing import Any

from launch.contract.errors import EnvironmentFault


def import_package(module: str, package: str, needed_by: str, fix: str) -> Any:
    """Import ``module`` of ``package``.

    Raises:
        EnvironmentFault: the import failed. The message names the setting that needs the package, and the fix.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentFault(
            f"{needed_by} needs the package {package}, which cannot be imported here: {error}; {fix}"
        ) from error
