"""The environment variables of a run's ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

from launch.common.checkout import add_to_python_path
from launch.common.parent_death import PARENT
from launch.contract.spec import RunSpec

_NOT_INHERITED = ("SLURM", "SUBMITIT_", "SRUN_", "PMI_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER", PARENT)
"""Prefixes of variables that describe the supervisor's own process. srun reads most SLURM_* variables as options. For example,
the supervisor's SLURM_DISTRIBUTION=cyclic would distribute ranks cyclically over nodes."""

_SHARED_TIMINGS = {"TRITON_CACHE_AUTOTUNING": "1"}
"""Triton then keeps what its autotuner timed beside the compiled kernels. Otherwise each process times Transformer Engine's
permutations of experts again, in seven block sizes each."""


def rank_variables(
    spec: RunSpec, cluster: Mapping[str, str], placing: Mapping[str, str], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a run's ranks.

    Later sources override earlier ones: what our own engines share, ``inherited`` without the scheduler's variables, ``placing``
    (devices and rendezvous), the cluster's profile, the run's spec.
    """
    kept = {name: value for name, value in inherited.items() if not name.startswith(_NOT_INHERITED)}
    threads = {"OMP_NUM_THREADS": str(spec.placement.threads_per_rank)}
    shared = {} if spec.engine == "command" else _SHARED_TIMINGS
    return add_to_python_path({**shared, **kept, **threads, **placing, **cluster, **spec.environment})
