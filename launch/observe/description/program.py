"""Describe the program: its command, its code and its packages, in addition to what every run describes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from launch.common.checkout import describe_code
from launch.common.redact import redact
from launch.contract.spec import RunSpec
from launch.contract.spec_ids import digest
from launch.frameworks.command_line import command_words, shared_words
from launch.observe.description.torch_settings import torch_settings
from launch.train.telemetry.provenance import describe


def describe_program(device: torch.device, spec: RunSpec, folders: Sequence[str]) -> dict[str, Any]:
    """Return the content of environment.json. The command's words identify the data, about which nothing else is known.

    Args:
        folders: the folders in which to look for packages. Libraries may add folders to sys.path later.
    """
    shared = digest([*spec.command.flags, spec.command.run])
    described = describe(device, shared, None)
    # ``name`` and ``version`` of a distribution would each parse its metadata again.
    found = (one.metadata for one in metadata.distributions(path=list(folders)))
    packages = dict(sorted((each["Name"], each["Version"]) for each in found if each["Name"]))
    code = describe_code(Path(spec.command.workdir), shared_words(spec.command))
    words = [redact(word) for word in command_words(spec, {})]
    return {
        **described,
        "program": {"framework": spec.command.framework, "command": " ".join(words), "python": redact(sys.executable)},
        "torch": torch_settings(),
        "code": code,
        "digests": {"code": code["digest"], "libraries": digest([described["versions"], packages])},
        "packages": packages,
    }
