"""Read a cluster's profile: clusters/NAME.yaml here, or in the user's own folder.

Every problem is reported at once, with line and fix. Interpolations stay as they are: ``${NAME}`` in a line of shell is
for the shell.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from orchestrator.errors import input_error, suggestion
from orchestrator.recipe.field_check import FileSchema, Flaw, Schema, check_fields, check_variable
from orchestrator.recipe.source_fields import SourceFields, Tree, read_fields
from orchestrator.recipe.yaml_reader import find_yaml, list_yaml
from orchestrator.targets.profile import Profile, check_option

DEFAULT = "default"
"""The profile of the user's own folder that applies where none is named."""

# A line of shell contains commas.
SCHEMA = Schema(Profile, comma_lists=False)
_FILE = FileSchema(
    SCHEMA,
    mappings={"sbatch": partial(check_option, "sbatch"), "environment": check_variable},
    rejections={"name": Flaw("no such field", "leave it out: the name of a profile is the name of its file")},
)


def load_profile(name: str = "") -> Profile:
    """Load the profile ``name``: the user's own, else one that ships.

    Without a name it is the user's ``default``. Without that it leaves every choice to Slurm.

    Raises:
        InputError: there is no such profile, or with every problem of it.
    """
    folders = _folders()
    if not name and find_yaml(DEFAULT, folders[:1]) is None:
        return Profile()
    path = find_yaml(name or DEFAULT, folders)
    if path is None:
        known = list_yaml(folders)
        otherwise = f"known: {', '.join(known)}; put your own into {folders[0]}"
        raise input_error("cluster", f"no profile {name!r}", suggestion(name, known, otherwise))
    source = read_fields(path, interpolate=False)
    values = check_fields(source, _FILE)
    _check_combinations(values, source)
    source.raise_problems()
    return Profile(name=path.stem, **values)


def _folders() -> tuple[Path, Path]:
    """Return the folders of profiles, the user's own first."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return home / "cuda-graph-orchestrator" / "clusters", Path(__file__).resolve().parents[2] / "clusters"


def _check_combinations(values: Tree, source: SourceFields) -> None:
    """Reject fields that have no effect without another."""
    if values.get("gpus") == "none" and values.get("gpu_type") is not None:
        fix = "leave gpu_type out, or set gpus to gres or gpus_per_node"
        source.problem("gpu_type", values["gpu_type"], "no job asks for GPUs where gpus is none", fix)
    if values.get("container_mounts") and values.get("container_image") is None:
        fix = "name a container_image, or leave container_mounts out"
        source.problem("container_mounts", list(values["container_mounts"]), "there is no container", fix)
