"""The states of a sweep's runs, and what ``--json`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.output.print_json import print_json
from orchestrator.output.states import states_to_json
from orchestrator.sweeps.report_process import read_needed_runs
from orchestrator.sweeps.run_state import open_submissions, read_states
from orchestrator.sweeps.slot_holders import slot_holders
from orchestrator.sweeps.slurm_jobs import JobMonitor, Jobs
from orchestrator.sweeps.submissions import Submission


def print_sweep_json(paths: SweepPaths, plan: Plan, *, has_report: bool) -> None:
    """Print the report as JSON, or the states of the runs if the command did not wait for a report."""
    if has_report:
        print((paths.report / "report.json").read_text(), end="")
    else:
        print_states_json(paths, plan)


def print_states_json(paths: SweepPaths, plan: Plan) -> None:
    jobs = query_jobs(open_submissions(paths))
    states = read_states(paths, plan, jobs)
    needed = read_needed_runs(paths, plan, states)
    print_json(states_to_json(plan, states, jobs, slot_holders(paths, plan, states), needed))


def query_jobs(submissions: Sequence[Submission]) -> Jobs | None:
    """Ask Slurm for the jobs of ``submissions``. Return None, and ask nothing, if there are none."""
    return JobMonitor().look(submissions) if submissions else None
