"""The hardware's limit of a step: its work at the rates that its own GPUs reached (a roofline; Williams et al. 2009,
10.1145/1498765.1498785).

The upper bound of a speed-up is the baseline's own GPU-busy time, which a slow kernel lengthens. This limit does not depend on
kernels. Each kind of work (step_work.py) takes the longer of two times: its operations at the rate of a large matrix product,
and its bytes at the bandwidth of a large copy. The limit is the sum over kinds, for the pipeline stage with the most.
Communication, waiting and the bubble of a pipeline take no time in it. A step that overlaps one kind of work with another can
be shorter.

Rates are the best over all ranks of all runs of the cell. Ranks measure them after their last step, in a burst of a few
milliseconds, in which clocks are higher than in a long step under a power cap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.limits.step_work import Kind, StepWork, Work, work_of_stages
from analysis.records.run import Attempt
from launch.contract.records.gpu_rates import GpuRates
from launch.contract.records.kernels import Kernels
from launch.contract.spec import RunSpec


@dataclass(frozen=True)
class Roofline:
    """The work of the rank with the longest limit, in the order of KINDS, and the rates of its GPU.

    ``stage`` is its pipeline stage. ``rates`` is None if they are unknown, and ``reason`` says why. ``kernels`` are those of rank 0
    in the first run that recorded them.
    """

    stage: int
    work: StepWork
    rates: GpuRates | None = None
    reason: str = ""
    kernels: Kernels | None = None

    @property
    def milliseconds(self) -> Mapping[Kind, float]:
        """The time of each kind of work; empty without rates."""
        rates = self.rates
        return {kind: milliseconds(work, rates) for kind, work in self.work.items()} if rates else {}

    @property
    def limit_ms(self) -> float | None:
        return sum(self.milliseconds.values()) if self.rates else None

    def share(self, step_ms: float) -> float | None:
        """Return the share of a step of ``step_ms`` that the hardware needs, or None if it is unknown."""
        return None if self.limit_ms is None else self.limit_ms / step_ms


def milliseconds(work: Work, rates: GpuRates) -> float:
    """Return the longer of the time for operations and the time for bytes."""
    return max(work.operations / rates.flops, work.bytes / rates.bandwidth) * 1e3


def cell_roofline(spec: RunSpec, attempts: Sequence[Attempt]) -> Roofline | None:
    """Return the limit of a cell on GPUs, or None if its model is unknown or no run has intact results."""
    sound = [attempt for attempt in attempts if attempt.outcome.results_intact]
    stages = work_of_stages(spec)
    if spec.placement.device != "cuda" or not stages or not sound:
        return None
    reason = _unmeasured(spec, sound)
    rates = None if reason else _best([rates for attempt in sound for rates in attempt.rates.values()])
    # Without rates, the stage with the most operations.
    longest = max(range(len(stages)), key=lambda stage: _length(stages[stage], rates))
    kernels = next((attempt.kernels[0] for attempt in sound if 0 in attempt.kernels), None)
    return Roofline(longest, stages[longest], rates, reason, kernels)


def _length(work: StepWork, rates: GpuRates | None) -> float:
    return sum(milliseconds(each, rates) if rates else each.operations for each in work.values())


def _unmeasured(spec: RunSpec, attempts: Sequence[Attempt]) -> str:
    """Return why the rates of these runs are unknown, or an empty text."""
    if spec.training.fp8 != "none":
        return "the rate of products in FP8 is not measured"
    if any(not (rates.flops > 0 and rates.bandwidth > 0) for attempt in attempts for rates in attempt.rates.values()):
        return "a rate that a run recorded is not positive"
    if not any(attempt.rates for attempt in attempts):
        return "no run measured the rates of its GPU"
    return ""


def _best(found: Sequence[GpuRates]) -> GpuRates:
    return GpuRates(found[0].precision, max(one.flops for one in found), max(one.bandwidth for one in found))
