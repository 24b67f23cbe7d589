"""Compare two runs of a user's program: their settings, and where their metrics come from.

Settings may differ in graph settings and in names the recipe allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from analysis.curves.curve import curve_of_record
from analysis.pairing.precapture_check import START_ALIKE, unlike_losses
from analysis.records.provenance import differences
from analysis.records.run import Attempt
from analysis.verdict.completeness import Curves
from analysis.verdict.constant_norm import SHOWS_NOTHING, describe_constant
from analysis.verdict.rounding import Units, rounding_of, widen
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins
from launch.contract.records.step_metrics import METRICS, Metric

SOURCES = ("loss", "grad_norm", "steps", "metrics")
"""The observer's records of where a run's steps come from."""
_DECIDED_ELSEWHERE = ("program.command:", "digests.", "choices.first_number:", *(f"choices.{one}:" for one in SOURCES))
"""Other modules decide on these. The command contains the graph settings, :func:`check_sources` judges sources, and a digest
differs only if something else differs."""
_OF_DATA = ("choices.batches:", "choices.samplers:")
"""These count together."""
_FLAGS_OF = {
    f"choices.{name}": re.compile(rf"(?<![a-z])({flags})", re.IGNORECASE)
    for name, flags in {
        "optimizers": "lr|learning|decay|momentum|beta|eps|optim",
        "optimizer_kinds": "optim|fused|foreach",
        "parameters": "dtype|precision|fp|bf|half",
        "mixed_precision": "amp|autocast|dtype|precision|fp|bf|half",
        "data_loaders": "batch|workers|pin|loader",
        "clipping": "clip|grad|norm",
        "recomputation": "checkpoint|ckpt|recompute|activation",
        "schedulers": "lr|learning|schedul|warmup",
        **dict.fromkeys(("batches", "samplers"), "seed|data|shuffl|sampl|skip|epoch|batch|loader"),
        "backward_passes": "batch|micro|accum|grad",
        "gradient_sync": "sync|accum|micro",
        "weights": "seed|init|load|weight",
        "modules": "drop|eval|train",
        "data_parallel": "ddp|bucket|unused|static|broadcast|parallel",
        "trained": "freeze|frozen|train|lora|adapter|channels",
    }.items()
}
"""What the observer sees of a program's settings, with names of flags that set it: ``wrap --allow-difference lr``."""
_MAY_ROUND = ("printed", "its logger")
"""The sources of a metric that may round it."""
_FIX = "print the loss and gradient norm with nine digits in JSON lines, or call launch.observe.step(loss=..., grad_norm=...)"
_SHOW_NORM = "show the gradient norm before it is clipped, or none, so that the observer computes it"


def check_settings(eager: Attempt, graphed: Attempt, margins: Margins) -> Verdict | None:
    """Return INCOMPARABLE if the runs of a program differ in more than graph settings and ``allow_differences``."""
    ignored = _DECIDED_ELSEWHERE + (() if _starts_with_other_data(eager, graphed, margins) else _OF_DATA)
    found = (text for text in differences(eager.environment, graphed.environment) if not is_allowed(text, margins))
    differing = [text for text in found if not text.startswith(ignored) and not _is_unknown_or_set(text, margins)]
    return refuse(differing) if differing else None


def _starts_with_other_data(eager: Attempt, graphed: Attempt, margins: Margins) -> bool:
    """Return whether data loaders of the runs share no batch of the first step. No graph has run before these batches.

    Samplers or losses must differ too, because one side alone may fetch batches ahead of their steps.
    """
    if _first_other_batch(eager, graphed) != 0:
        return False
    before, after = (_choices(attempt).get("samplers") for attempt in (eager, graphed))
    return before != after or bool(unlike_losses(eager, graphed, margins))


def name_other_batches(verdict: Verdict, pairs: Iterable[tuple[Attempt, Attempt]]) -> Verdict:
    """Return ``verdict``, with the first step in which the loaders of an eager and a graphed run share no batch if it does not pass.

    Such batches may explain losses that differ. They may also follow from a graph that draws other random numbers.
    """
    steps = [step for eager, graphed in pairs if (step := _first_other_batch(eager, graphed)) is not None]
    if verdict.verdict not in ("DIVERGED", "INCONCLUSIVE") or not steps:
        return verdict
    said = f"in step {min(steps)}, data loaders also give the runs other batches (choices.batches)"
    return replace(verdict, reason=f"{verdict.reason}; {said}")


def _first_other_batch(eager: Attempt, graphed: Attempt) -> int | None:
    """Return the first of the recorded steps of which data loaders of the runs share no batch; None if there is none."""
    before, after = (_choices(attempt).get("batches", "").split() for attempt in (eager, graphed))
    steps = enumerate(zip(before, after, strict=False))
    given = (
        (step, {*one.split("/")}, {*other.split("/")}) for step, (one, other) in steps if "none" not in (one, other)
    )
    return next((step for step, one, other in given if one.isdisjoint(other)), None)


def _is_unknown_or_set(difference: str, margins: Margins) -> bool:
    """Return whether one side's choice is unknown, as of optimizers in a graph, or a flag that may differ sets it."""
    flags = _FLAGS_OF.get(difference.partition(":")[0])
    if flags is None:
        return False
    return re.search("[:,] unset", difference) is not None or any(map(flags.search, margins.allow_differences))


def refuse(differing: Sequence[str]) -> Verdict:
    """Return INCOMPARABLE for settings that differ: "name: value (eager), value (graphed)"."""
    name = differing[0].partition(":")[0]
    if name.startswith("code."):
        equal = "run the sweep again with one version of the code"
    else:
        equal = START_ALIKE if name in ("choices.weights", "choices.batches") else "make both sides equal"
    fix = f"{equal}, or allow it by name: wrap --allow-difference {name}, equivalence.allow_differences in a recipe"
    return Verdict("INCOMPARABLE", f"the runs differ in more than their graph settings: {'; '.join(differing)}", fix)


def is_allowed(difference: str, margins: Margins) -> bool:
    """Return whether the name of a difference or its section is allowed: ``settings.NCCL_ALGO`` or ``settings``."""
    name = difference.partition(":")[0]
    return any(name == allowed or name.startswith(f"{allowed}.") for allowed in margins.allow_differences)


def check_sources(eager: Attempt, graphed: Attempt) -> Verdict | None:
    """Return INCOMPARABLE if the metrics of a pair come from different sources."""
    before, after = ({name: _choices(attempt).get(name) for name in SOURCES} for attempt in (eager, graphed))
    if differing := [name for name in SOURCES if before[name] != after[name]]:
        told = "; ".join(f"{name}: {before[name]} (eager), {after[name]} (graphed)" for name in differing)
        return Verdict("INCOMPARABLE", f"the metrics of the runs come from different sources: {told}", _FIX)
    return None


def check_shown_norm(graphed: Attempt, first: int) -> Verdict | None:
    """Return INCONCLUSIVE if the gradient norm of ``graphed`` is constant from index ``first`` on. It takes the place of a pass."""
    if not (constant := describe_constant(graphed.steps.grad_norm[first:])):
        return None
    source = _choices(graphed).get("grad_norm", "the program")
    reason = f"the gradient norm of the graphed run, as shown by {source}, {constant}: {SHOWS_NOTHING}"
    return Verdict("INCONCLUSIVE", reason, _SHOW_NORM)


def rounded_metrics(attempt: Attempt) -> list[Metric]:
    """Return the metrics that their source may have rounded."""
    return [metric for metric in METRICS if _choices(attempt).get(metric) in _MAY_ROUND]


def units_of_runs(attempt: Attempt, runs: Curves) -> dict[str, Units]:
    """Return the units of each run's metrics that may be rounded. Their sources are those of ``attempt``."""
    metrics = rounded_metrics(attempt)
    return {name: curve_of_record(steps, metrics).rounded for name, steps in runs.items()}


def all_rounded(eager: Attempt, graphed: Attempt) -> bool:
    """Return whether each metric lacks bits in one of the runs."""
    units = units_of_runs(graphed, {"eager run": eager.steps, "graphed run": graphed.steps}).values()
    return all(any(of_run[metric].any() for of_run in units if metric in of_run) for metric in METRICS)


def widen_by_rounding(margins: Margins, attempt: Attempt, eager: Curves, graphed: Curves, window: slice) -> Margins:
    """Return margins that differences in ``window`` do not exceed by rounding alone."""
    return widen(margins, rounding_of(eager, units_of_runs(attempt, {**eager, **graphed}), window))


def _choices(attempt: Attempt) -> dict[str, str]:
    choices = attempt.environment.get("choices")
    return dict(choices) if isinstance(choices, dict) else {}
