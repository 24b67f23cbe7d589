"""Set aside cells that need more memory than a GPU has, by the forecast from their recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from analysis.memory.extrapolation import ProgramRuns
from analysis.memory.forecast import RankForecast, fullest_rank
from analysis.memory.measured_constants import ERROR, MEASURED, Constants, is_certain
from analysis.memory.static_memory import state_bytes
from launch.common.text import listed, size
from launch.contract.plan import Cell, Plan, Reason
from launch.contract.spec import RunSpec
from orchestrator.plan.sound_fixes import apply, keep_sound_fixes
from orchestrator.targets.slurm_cluster import Target

FORCE = "--even-if-oom runs it anyway, and so does an expect of CUDA_OOM"
EXPLAIN = "plan --explain memory CELL prints the terms"
STATE_SETTINGS = (
    "parallelism.distributed_optimizer=true", "training.gradient_precision=bf16", "training.optimizer_precision=lean",
)  # fmt: skip
"""The settings that shrink the state of a rank."""


@dataclass(frozen=True)
class MemoryCheck:
    """The forecasts of a plan's cells, each computed once, against the memory of a target's GPUs."""

    target: Target
    constants: Constants = MEASURED
    program_runs: ProgramRuns | None = None
    _found: dict[str, RankForecast | None] = field(default_factory=dict)

    def forecasts(self, plan: Plan) -> dict[str, RankForecast]:
        """Return the fullest rank of each cell on GPUs, by the cell's id. Leave out cells that cannot work anywhere."""
        cells = (cell for cell in plan.cells if cell.state != "rejected")
        return {cell.cell_id: rank for cell in cells if (rank := self._fullest(cell))}

    def set_aside(self, cells: Sequence[Cell]) -> list[Cell]:
        """Make cells that do not fit not runnable, with the graphed cells of their workload if they are eager.

        Without its eager baseline, a graphed cell gets no verdict. A cell that is expected to run out of memory stays.
        """
        found = {cell.cell_id: reason for cell in cells if cell.state == "run" for reason in self._reasons(cell)}
        eager = {cell.workload_id: found.get(cell.cell_id) for cell in cells if not cell.graphed}
        reasons = [found.get(cell.cell_id) or _of_baseline(cell, eager.get(cell.workload_id)) for cell in cells]
        return [
            replace(cell, state="not_runnable", reasons=keep_sound_fixes(cell.run_spec, (reason,)), run_ids=())
            if reason
            else cell
            for cell, reason in zip(cells, reasons, strict=True)
        ]

    def warning(self, cell: Cell) -> str:
        """Return the warning that ``cell`` will run, and that it or its step checks may lack memory; "" if all fits.

        A cell that is expected to lack memory gets none.
        """
        gib, rank = self.target.gpu_memory_gib, self._fullest(cell)
        if gib is None or rank is None or cell.state != "run" or _is_expected(cell):
            return ""
        remark = f", {rank.remark}" if rank.remark else ""
        if rank.needed > gib * 2**30:
            return f"may run out of memory: it needs at least {size(rank.needed)}{remark}, and {self._limit}"
        if rank.checked > gib * 2**30:
            needs = f"they need at least {size(rank.checked)}{remark}, and {self._limit}"
            return f"may lack memory for its step checks: {needs}. Without them, only curves decide"
        return ""

    @property
    def _rule(self) -> str:
        return f"{'host' if self.target.scheduler == 'host' else 'cluster'}.gpu_memory"

    @property
    def _limit(self) -> str:
        gib = self.target.gpu_memory_gib
        if self.target.scheduler == "host":
            return f"no GPU of this host has more than {gib:.1f} GiB"
        return f"gpu_memory_gib of the profile is {gib:g}"

    def _fullest(self, cell: Cell) -> RankForecast | None:
        if cell.cell_id not in self._found:
            spec, runs = cell.run_spec, self.program_runs
            self._found[cell.cell_id] = fullest_rank(spec, self.constants) or (runs.extrapolate(spec) if runs else None)
        return self._found[cell.cell_id]

    def _reasons(self, cell: Cell) -> Iterator[Reason]:
        """Yield why ``cell`` does not fit. The forecast of an uncertain configuration only warns."""
        gib = self.target.gpu_memory_gib
        if gib is None or _is_expected(cell) or (spec := cell.run_spec).placement.device != "cuda":
            return
        most = gib * 2**30
        if (state := state_bytes(spec)) > most:
            message = f"weights, gradients and optimizer state of a rank take {state / 2**30:.1f} GiB before the first step, and "
            yield Reason(self._rule, f"{message}{self._limit}", _state_fix(spec, most))
        elif is_certain(spec) and (rank := self._fullest(cell)) and rank.needed > most * (1 + ERROR):
            message = f"a rank needs at least {size(rank.needed)} by forecast, which may be off by {ERROR:.0%}, and "
            yield Reason(self._rule, f"{message}{self._limit}", _fix(spec))


def _state_fix(spec: RunSpec, most: float) -> str:
    """Return the sets of settings, the small ones first, with which the state fits into ``most`` bytes, and the layouts."""
    sets = (list(some) for number in range(1, len(STATE_SETTINGS) + 1) for some in combinations(STATE_SETTINGS, number))
    fitting = [" and ".join(some) for some in sets if state_bytes(apply(spec, some)) <= most]
    return f"{', or '.join([*(fitting and ['set ' + fitting[0]]), *fitting[1:], _split(spec)])}. {FORCE}"


def _fix(spec: RunSpec) -> str:
    batch = "training.micro_batch_size or " * (spec.training.micro_batch_size > 1)
    return f"{_split(spec)}, or lower {batch}training.sequence_length; {EXPLAIN}. {FORCE}"


def _split(spec: RunSpec) -> str:
    return f"raise {listed(['parallelism.tp', 'pp', *(['ep'] if spec.model.is_moe else [])], separator=' or ')}"


def _of_baseline(cell: Cell, reason: Reason | None) -> Reason | None:
    if reason is None or cell.state != "run" or _is_expected(cell):
        return None
    return replace(reason, message=f"its eager baseline does not fit: {reason.message}")


def _is_expected(cell: Cell) -> bool:
    return cell.expect.outcome == "CUDA_OOM"
