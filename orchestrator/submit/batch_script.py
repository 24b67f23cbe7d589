"""The batch scripts that `plan` shows, with the command that starts the ranks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan

if TYPE_CHECKING:
    from orchestrator.targets.slurm_cluster import Cluster

TOKEN, CHAIN, RUN, BUNDLES = "TOKEN", "CHAIN", "RUN", "BUNDLES"
"""Placeholders for a submission's token, a chain's number, a run's id, and the ids of a submission's bundles."""


@dataclass(frozen=True)
class BatchScript:
    text: str
    bundles: tuple[str, ...]
    """The ids of all bundles that the script submits."""
    calls: int
    """The number of sbatch calls with this script. There may be several: array lengths are limited, and each chain has
    arrays."""
    srun: str
    """The command that starts the ranks of each run in the job."""


def batch_scripts(sweep: SweepPaths, plan: Plan, cluster: Cluster) -> tuple[BatchScript, ...]:
    """Return the scripts that submit all of ``plan``. Equal scripts are merged."""
    scripts: dict[str, BatchScript] = {}
    for script in _submissions(sweep, plan, cluster):
        there = scripts.get(script.text, replace(script, bundles=(), calls=0))
        scripts[script.text] = replace(there, bundles=there.bundles + script.bundles, calls=there.calls + 1)
    return tuple(scripts.values())


def _submissions(sweep: SweepPaths, plan: Plan, cluster: Cluster) -> Iterator[BatchScript]:
    # Imported here because submitit takes long to load, and a plan for this host does not need it.
    from launch.supervise.profiled_rank import profiled
    from launch.supervise.slurm_step import srun_command
    from orchestrator.submit.job_arrays import count_chains, form_arrays
    from orchestrator.submit.sbatch import BatchJob, batch_script
    from orchestrator.submit.slurm_queue import chain_name
    from orchestrator.targets.job_request import bundle_request

    profile = cluster.profile
    first_run = {bundle.bundle_id: bundle.run_ids[0] for bundle in plan.bundles}
    requests = {
        bundle.bundle_id: bundle_request(plan, [(run_id, 1) for run_id in bundle.run_ids], profile)
        for bundle in plan.bundles
    }
    chains = count_chains(max((r.nodes for r in requests.values()), default=1), profile.max_nodes, profile.max_jobs)
    folder, attempt = sweep.root.absolute().joinpath("submitit", TOKEN), SweepPaths(sweep.root.absolute()).run(RUN)
    loads = None if chains is None else [0.0] * chains
    for array in form_arrays(requests, loads, cluster.configuration.max_array_size):
        name = TOKEN if array.chain is None else chain_name(sweep, plan, CHAIN)
        text = batch_script(BatchJob(sweep, folder, array, profile, name)).replace(shlex.join(array.bundles), BUNDLES)
        spec = plan.cell_of_run()[first_run[array.bundles[0]]].run_spec
        step = cluster.start_settings(spec).step
        if step is not None:
            started = shlex.join(srun_command(step, attempt.attempt(1)))
            if spec.profile == "nsys":
                nsys = profiled([step.python, "-m", "launch.train.worker"], attempt.attempt(1).profile("%q{RANK}"))
                started += f"\n# and each rank by: {shlex.join(nsys)}"
            yield BatchScript(text, array.bundles, 1, started)
