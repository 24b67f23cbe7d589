"""Advice in words, for a terminal and for advice.md alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.limits.speedup_bound import EagerStep
from analysis.report.sections.tables import table
from launch.contract.plan import Plan
from launch.contract.records.inspection import BOUNDS_US, Finding, FindingKind, Kernels
from orchestrator.advise.advice import SHORT_US, Advice, Rejected, Worth, point

MOST_LABELS = 4
"""Rejected configurations that are named; the JSON has all."""
VERDICTS: Mapping[Worth, str] = {
    "much": "Graphs can help.",
    "some": "Graphs may help a little.",
    "little": "Graphs will not help much.",
    "unknown": "Not measured.",
}
OF_RANKS = "Graphs may help."
"""Where some is all that is known, since ranks wait for each other."""
ON_CPU = (
    "There are no CUDA graphs on a CPU, where torch_compile is compilation without them: what graphs could save, and where "
    "the host waits, is seen on a GPU alone."
)
SAID: Mapping[FindingKind, str] = {
    "synchronisation": "the host waits for the device",
    "shape": "a shape depends on the data",
    "operators": "what runs depends on the data",
    "generator": "numbers from a generator that a capture does not know",
    "host generator": "numbers from a generator of the host",
    "default generator": "numbers from the default generator",
}
WAYS_OUT: Mapping[FindingKind, str] = {
    "synchronisation": "leave the value on the device, read it after the step, or capture a scope without this line",
    "shape": "pad to a size known beforehand, or capture a scope without this line",
    "operators": "choose on the device (torch.where), or capture a scope without this line",
    "generator": "register it with the graph (CUDAGraph.register_generator_state), or draw from the default one",
    "host generator": "a replay repeats what was drawn at the capture: draw on the device, or before the step",
    "default generator": "none is needed: a capture registers it",
}
NOTHING_BREAKS = (
    "Nothing was found: no line made the host wait, shapes and operators stayed the same from step to step, and no number "
    "came from a generator that a capture does not know."
)
NOTHING_BREAKS_ON_CPU = (
    "Nothing was found: shapes and operators stayed the same from step to step, and no number came from a generator that a "
    "capture does not know."
)
NOT_INSPECTED = "That is not known: the run on disk was not told to look. Delete its folder, and ask for advice again."


def render(plan: Plan, advice: Sequence[Advice]) -> str:
    """The whole text, which ends with a line break."""
    blocks = [f"# Advice on {plan.recipe_file}"]
    for one in advice:
        blocks += [f"## `{one.cell.label}`", *_worth(one), *_breaking(one), *_sweep(one), *_rejections(one)]
    return "\n\n".join(blocks) + "\n"


# --- can graphs help ------------------------------------------------------------------------------------------------


def _worth(advice: Advice) -> list[str]:
    if advice.step is None and not advice.unmeasured:
        return [ON_CPU]
    if advice.step is None:
        return [f"**{VERDICTS['unknown']}** {advice.unmeasured[:1].upper()}{advice.unmeasured[1:]}."]
    verdict = OF_RANKS if advice.worth == "some" and advice.waits_for_hosts else VERDICTS[advice.worth]
    said = [f"**{verdict}** {_limit(advice, advice.step)}", *_caveats(advice, advice.step)]
    return [" ".join(said), *(_kernels(advice.kernels) if advice.kernels else [])]


def _limit(advice: Advice, step: EagerStep) -> str:
    host = "The host waits for the device in a step, so that how long it takes to enqueue one is not known."
    if step.host_ms is not None:
        who = "The slowest host" if step.communicates else "The host"
        host = f"{who} takes {step.host_ms:.2f} ms to enqueue a step."
    if step.largest_speedup is None:
        return f"{_of_ranks(step, advice.waits_for_hosts)} {host}"
    if step.launch_bound <= 0:
        return f"The device is busy throughout a step of {step.step_ms:.2f} ms: there is nothing to win."
    return (
        f"The device is idle for {step.launch_bound:.0%} of a step of {step.step_ms:.2f} ms, so that the same kernels can "
        f"run at most {step.largest_speedup:.2f}x as fast. {host}"
    )


def _of_ranks(step: EagerStep, waits_for_hosts: bool) -> str:
    if step.not_computing <= 0:
        return f"A device computes throughout a step of {step.step_ms:.2f} ms: there is nothing to win."
    idle = "no device is idle"
    if step.launch_bound > 0:
        idle = f"the device that is busy for least is idle for {step.launch_bound:.0%}"
    shares = f"In a step of {step.step_ms:.2f} ms {idle}, and none computes for more than {1 - step.not_computing:.0%}"
    if not waits_for_hosts:
        return f"{shares}: else ranks pass data, or wait for what others compute, which graphs do not end."
    return (
        f"{shares}: else ranks pass data, or wait for what others compute or for their hosts, of which graphs end the last "
        f"alone. The same kernels can run at most {step.largest_speedup_computing:.2f}x as fast, less by what the rest of "
        "that takes, which only a graphed run tells."
    )


def _caveats(advice: Advice, step: EagerStep) -> list[str]:
    said = []
    if advice.has_waits and step.host_ms is not None:
        said.append("It waits for the device in a step (below), so that this time says little of launches.")
    elif advice.worth == "some" and not advice.host_is_slow:
        said.append(
            "The device waits for something else than the host: other ranks, transfers, or gaps between kernels."
        )
    compiled_alike = advice.cell.spec["training"]["compile"] == "whole"
    if any(graph.implementation.compiles for graph in advice.points) and not compiled_alike:
        said.append(
            "torch_compile runs other kernels, and this is no limit to it; with training.compile=whole beside it its eager "
            "twin runs the same ones."
        )
    if advice.recompilations:
        said.append(f"In the steps looked at {advice.recompilations} functions were compiled anew.")
    return said


def _kernels(kernels: Kernels) -> list[str]:
    total = sum(one.milliseconds for one in kernels.longest)
    rows = [(f"`{one.name}`", f"{one.count:g}", f"{one.milliseconds:.3f} ms") for one in kernels.longest]
    return [
        f"{kernels.number:,.0f} kernels a step, {kernels.share_below(SHORT_US):.0%} of them under {SHORT_US:g} us; their "
        f"median is {kernels.median_us:.1f} us. By length: {_histogram(kernels)}.",
        *([f"The longest by name, {total:.2f} ms a step together:", table(("kernel", "a step", "time"), rows)] if rows else []),
    ]  # fmt: skip


def _histogram(kernels: Kernels) -> str:
    lower = (0.0, *BOUNDS_US)
    names = [f"{low:g} to {high:g} us" for low, high in zip(lower, BOUNDS_US, strict=False)]
    names.append(f"{BOUNDS_US[-1]:g} us and more")
    return ", ".join(f"{count:,.0f} of {name}" for count, name in zip(kernels.counts, names, strict=True) if count)


# --- what breaks a capture ------------------------------------------------------------------------------------------


def _breaking(advice: Advice) -> list[str]:
    if advice.findings is None:
        return [] if advice.unmeasured else ["### What breaks a capture", NOT_INSPECTED]
    blocks = ["### What breaks a capture"]
    if advice.breaking:
        blocks.append(table(("where", "what", "a step", "way out"), map(_finding_row, advice.breaking)))
    if advice.unplaced_waits > 0:
        blocks.append(
            f"The driver was asked to wait {advice.unplaced_waits:g} times a step more than PyTorch told the lines of: "
            "events, streams and libraries may wait on their own."
        )
    if len(blocks) == 1:
        blocks.append(NOTHING_BREAKS_ON_CPU if advice.on_cpu else NOTHING_BREAKS)
    known = [found for found in advice.findings if found.kind == "default generator"]
    if known:
        lines = ", ".join(_where(found) for found in known)
        blocks.append(f"Numbers are drawn from the default generator, which a capture registers by itself: {lines}.")
    return blocks


def _finding_row(found: Finding) -> tuple[str, ...]:
    said = SAID[found.kind] + (f": {found.detail}" if found.detail else "")
    where = f"{_where(found)} in `{found.function}`: `{found.code}`" if found.file else _where(found)
    return where, said, f"{found.count:g}", WAYS_OUT[found.kind]


def _where(found: Finding) -> str:
    return f"`{found.file}:{found.line}`" if found.file else "on no line known"


# --- what to sweep --------------------------------------------------------------------------------------------------


def _sweep(advice: Advice) -> list[str]:
    blocks = ["### What to sweep"]
    if not advice.points:
        return [*blocks, "No implementation and scope can work with this workload; below is why."]
    how = "In place of the recipe's own `cuda_graph` and axes over it, the most promising first"
    if (advice.breaking or advice.unplaced_waits > 0) and any(
        graph.implementation.takes_whole_model for graph in advice.points
    ):
        how += "; whole steps come last, since they hold every line above"
    points = (", ".join(f"{key}: {_yaml(value)}" for key, value in point(graph).items()) for graph in advice.points)
    lines = "\n".join(f"    - {{{written}}}" for written in points)
    return [*blocks, f"{how}:", f"```yaml\nsweep:\n  points:\n{lines}\n```"]


def _yaml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rejections(advice: Advice) -> list[str]:
    if not advice.rejected:
        return []
    return [
        "Left out, since they cannot work here or are known to compute wrongly:",
        "\n".join(map(_rejection, advice.rejected)),
    ]


def _rejection(rejected: Rejected) -> str:
    named = ", ".join(f"`{label}`" for label in rejected.labels[:MOST_LABELS])
    more = len(rejected.labels) - MOST_LABELS
    reason = rejected.reason
    return f"- {named}{f' and {more} more' if more > 0 else ''}: {reason.message}. Way out: {reason.remedy.rstrip('.')} [{reason.rule}]."
