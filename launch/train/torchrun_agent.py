"""Run the ranks of one run on one host: ``python -m launch.train.torchrun_agent ATTEMPT_FOLDER``.

torchrun's elastic agent ends all ranks when one fails. It is used as a library, because its command line does not record which
rank ended how. This process is the only writer of that record, ``ranks.json``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from launch.common.atomic_files import write_json
from launch.common.parent_death import PARENT, die_with_parent
from launch.contract.paths import AttemptPaths
from launch.contract.spec import read_spec


def main(arguments: list[str]) -> int:
    """Run every rank to its end. Return 0 if all ranks ended with 0."""
    attempt = AttemptPaths(Path(arguments[0]))
    placement = read_spec(attempt.spec).placement
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=placement.ranks_per_node,
        run_id=attempt.root.parent.parent.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(attempt.logs / "elastic")),
    )
    os.environ[PARENT] = str(os.getpid())
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "launch.train.worker", str(attempt.root))
    except ChildFailedError as error:
        by_time = sorted(error.failures.items(), key=lambda failure: failure[1].timestamp)
        write_json(attempt.exits, [{"rank": rank, "code": failure.exitcode} for rank, failure in by_time])
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:]))
