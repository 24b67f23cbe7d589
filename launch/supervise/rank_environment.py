"""The environment variables of a run's ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from launch.common.parent_death import PARENT
from launch.contract.spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]

_NOT_INHERITED = ("SLURM", "SUBMITIT_", "SRUN_", "PMI_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER", PARENT)
"""Beginnings of names that speak of the process that the supervisor is, and not of ranks. srun takes most of SLURM_* for
its options: SLURM_DISTRIBUTION=cyclic, which the step around a supervisor has, would deal ranks out to nodes in turn."""


def rank_variables(
    spec: RunSpec, cluster: Mapping[str, str], placing: Mapping[str, str], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What is inherited, less its scheduler's; then ``placing`` (where ranks are, and meet), then what the cluster's
    profile sets, then what the run itself does."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(_NOT_INHERITED)}
    threads = {"OMP_NUM_THREADS": str(spec.placement.threads_per_rank)}
    variables = {**kept, **threads, **placing, **cluster, **spec.environment}
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))}
