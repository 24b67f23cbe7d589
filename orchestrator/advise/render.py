"""Advice as Markdown, for the terminal and for advice.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise, starmap

import yaml

from analysis.limits.speedup_bound import EagerStep
from analysis.report.sections.tables import table
from launch.common.text import listed
from launch.contract.plan import Plan, Reason
from launch.contract.records.inspection import Finding, FindingKind
from launch.contract.records.kernels import BOUNDS_US, Kernels
from launch.support import is_known_fault
from orchestrator.advise.advice import SHORT_US, Advice, Worth, recipe_point

MOST_LABELS = 4
"""How many rejected configurations the text names; the JSON has all."""
VERDICTS: Mapping[Worth, str] = {
    "much": "Graphs can help.",
    "some": "Graphs may help a little.",
    "little": "Graphs will not help much.",
    "unknown": "Not measured:",
}
VERDICT_OF_WAITING_RANKS = "Graphs may help."
"""Instead of "some" if ranks wait for each other's hosts, since the gain is then unknown."""
ON_CPU = (
    "There are no CUDA graphs on a CPU, where torch_compile only compiles. What graphs could save, and where the host waits, "
    "can be measured only on a GPU."
)
FINDINGS: Mapping[FindingKind, str] = {
    "synchronisation": "the host waits for the device",
    "shape": "a shape depends on the data",
    "operators": "the operators change from step to step",
    "generator": "random numbers come from a generator that a capture does not know",
    "host generator": "random numbers come from a generator of the host",
    "default generator": "random numbers come from the default generator",
    "kernels": "the kernels change from step to step",
    "allocation": "PyTorch takes memory from the driver",
}
FIXES: Mapping[FindingKind, str] = {
    "synchronisation": "leave the value on the device, read it after the step, or capture a scope without this line",
    "shape": "pad to a fixed size, or capture a scope without this line",
    "operators": "choose on the device (torch.where), or capture a scope without this line",
    "generator": "register it with the graph (CUDAGraph.register_generator_state), or draw from the default one",
    "host generator": "draw on the device, or before the step: a replay repeats the numbers of the capture",
    "default generator": "none needed: a capture registers it",
    "kernels": "give all steps the same shapes and branches, or capture a part that has them",
    "allocation": "give all steps the same shapes, so that the allocator reuses its memory",
}
NOTHING_BREAKS = (
    "shapes and operators stayed the same from step to step, and no generator unknown to a capture was used."
)
NOTHING_SEEN: Mapping[FindingKind, str] = {
    "synchronisation": "no line made the host wait",
    "shape": "shapes and operators stayed the same",
    "generator": "no generator unknown to a capture was used",
    "kernels": "the kernels stayed the same from step to step, as far as the profiler shows them",
    "allocation": "PyTorch took no memory from the driver",
}
"""What the observer of a user's program can say if it finds nothing of a kind."""
OF_ANY_PART = (
    "The observer does not know which part of the step you capture: a line outside of it breaks nothing, but a wait there still "
    "holds the host up. It saw a few steps: work of rare steps, such as an evaluation, is not listed."
)
UNKNOWN_KERNELS = "Whether the kernels change is unknown, because the profiler missed a launch."
UNKNOWN_OPERATORS = "Shapes, operators and generators are unknown, because a step ended on another thread, or within a dispatch mode of the program."
UNKNOWN_WAITS = "Where the host waits shows only on a GPU."
LEFT_OUT: Mapping[bool, str] = {
    False: "Left out, because they cannot work with this workload:",
    True: "Left out, because they run but are known to compute wrong results:",
}
"""Headings by whether the reason is a known fault."""
NOT_INSPECTED = "Unknown: the run on disk was not inspected. Delete its folder and run advise again."


def describe_limits(plan: Plan) -> str:
    """Return what the advice on ``plan`` will not say because its runs are on a CPU, with the fix, or ""."""
    specs = [cell.run_spec for cell in plan.cells if cell.state == "run" and cell.run_spec.placement.device == "cpu"]
    if not specs:
        return ""
    return "on a CPU the advice will not say whether graphs help. Fix: run it on a host with a GPU, or submit it with --executor slurm"


def render(plan: Plan, advice: Sequence[Advice]) -> str:
    """Return the whole text, with a line break at its end."""
    blocks = [f"# Advice on {plan.recipe_file}"]
    for one in advice:
        blocks += [f"## `{one.cell.label}`", *_worth(one), *_capture_blockers(one), *_sweep(one), *_rejections(one)]
    return "\n\n".join(blocks) + "\n"


# --- can graphs help ------------------------------------------------------------------------------------------------


def _worth(advice: Advice) -> list[str]:
    if advice.step is None and not advice.unmeasured:
        return [ON_CPU]
    if advice.step is None:
        return [f"**{VERDICTS['unknown']}** {advice.unmeasured}."]
    verdict = VERDICT_OF_WAITING_RANKS if advice.worth == "some" and advice.waits_for_hosts else VERDICTS[advice.worth]
    sentences = [f"**{verdict}** {_upper_bound(advice, advice.step)}", *_caveats(advice, advice.step)]
    return [" ".join(sentences), *(_kernels(advice.kernels) if advice.kernels else [])]


def _upper_bound(advice: Advice, step: EagerStep) -> str:
    host = "The host waits for the device within a step, so the time to enqueue a step is unknown."
    if step.host_ms is not None:
        who = "The slowest host" if step.communicates else "The host"
        host = f"{who} takes {step.host_ms:.2f} ms to enqueue a step."
    if step.communicates:
        return f"{_upper_bound_of_ranks(step, advice.waits_for_hosts)} {host}"
    if step.launch_bound <= 0:
        return f"The device is busy throughout a step of {step.step_ms:.2f} ms: there is nothing to gain."
    return (
        f"The device is idle for {step.launch_bound:.0%} of a step of {step.step_ms:.2f} ms. The same kernels can run "
        f"at most {step.largest_speedup:.2f}x as fast. {host}"
    )


def _upper_bound_of_ranks(step: EagerStep, waits_for_hosts: bool) -> str:
    if step.not_computing <= 0:
        return f"A device computes throughout a step of {step.step_ms:.2f} ms: there is nothing to gain."
    idle = "no device is idle"
    if step.launch_bound > 0:
        idle = f"the least busy device is idle for {step.launch_bound:.0%}"
    shares = f"In a step of {step.step_ms:.2f} ms {idle}, and none computes for more than {1 - step.not_computing:.0%}"
    if not waits_for_hosts:
        return f"{shares}. In the rest, ranks transfer data or wait for computation on other ranks. Graphs do not shorten that."
    return (
        f"{shares}. In the rest, ranks transfer data, or wait for computation on other ranks or for their hosts. Graphs "
        f"shorten only the wait for hosts. The same kernels can run at most {step.largest_speedup:.2f}x as fast; "
        "only a graphed run shows how much of that is reached."
    )


def _caveats(advice: Advice, step: EagerStep) -> list[str]:
    caveats = []
    if advice.has_waits and step.host_ms is not None:
        caveats.append("It waits for the device within a step (see below), so this time says little about launches.")
    elif advice.worth == "some" and not advice.host_is_slow:
        caveats.append(
            "The device does not wait for the host, but for other ranks, transfers, or gaps between kernels."
        )
    same_kernels = advice.cell.spec["training"]["compile"] == "whole"
    if any(graph.implementation.compiles for graph in advice.points) and not same_kernels:
        compiled = (
            "If the eager command compiles too, it"
            if advice.of_program
            else "With training.compile=whole its eager baseline"
        )
        caveats.append(
            f"torch_compile runs other kernels, so the upper bound does not hold for it. {compiled} runs the same kernels."
        )
    if advice.recompilations:
        caveats.append(f"{advice.recompilations} functions were recompiled in the inspected steps.")
    if advice.own_graphs:
        caveats.append(
            f"The eager command captured {advice.own_graphs} graphs itself, so these are not the times of an eager step. Turn them "
            "off by the arguments under command.graphs.none."
        )
    return caveats


def _kernels(kernels: Kernels) -> list[str]:
    total = sum(one.milliseconds for one in kernels.longest)
    rows = [(f"`{one.name}`", f"{one.count:g}", f"{one.milliseconds:.3f} ms") for one in kernels.longest]
    return [
        f"{kernels.number:,.0f} kernels per step, {kernels.share_below(SHORT_US):.0%} of them under {SHORT_US:g} us; their "
        f"median is {kernels.median_us:.1f} us. By duration: {_histogram(kernels)}.",
        *([f"The longest kernels by name, {total:.2f} ms per step:", table(("kernel", "per step", "time"), rows)] if rows else []),
    ]  # fmt: skip


def _histogram(kernels: Kernels) -> str:
    names = [f"{low:g} to {high:g} us" for low, high in pairwise((0.0, *BOUNDS_US))]
    names.append(f"{BOUNDS_US[-1]:g} us and more")
    return ", ".join(f"{count:,.0f} of {name}" for count, name in zip(kernels.counts, names, strict=True) if count)


# --- what breaks a capture ------------------------------------------------------------------------------------------


def _capture_blockers(advice: Advice) -> list[str]:
    if advice.findings is None:
        return [] if advice.unmeasured else ["### What breaks a capture", NOT_INSPECTED]
    blocks = ["### What breaks a capture"]
    if advice.capture_blockers:
        blocks.append(table(("where", "what", "per step", "fix"), map(_finding_row, advice.capture_blockers)))
    if advice.unplaced_waits > 0:
        blocks.append(
            f"The host waited another {advice.unplaced_waits:g} times per step in places that PyTorch does not report. Events, "
            "streams or libraries may cause such waits."
        )
    if len(blocks) == 1 and advice.sought:
        blocks.append(f"Nothing was found: {_nothing(advice)}")
    if advice.of_program:
        blocks.append(" ".join([*_unknown(advice), OF_ANY_PART]))
    known = [found for found in advice.findings if found.kind == "default generator"]
    if known:
        lines = ", ".join(_where(found) for found in known)
        blocks.append(f"Random numbers come from the default generator, which a capture registers: {lines}.")
    return blocks


def _unknown(advice: Advice) -> list[str]:
    """Return what the observer could not see of the steps of a user's program."""
    if advice.on_cpu:
        seen = {"shape": UNKNOWN_OPERATORS, "synchronisation": UNKNOWN_WAITS}
    else:
        seen = {"shape": UNKNOWN_OPERATORS, "kernels": UNKNOWN_KERNELS}
    return [text for kind, text in seen.items() if kind not in advice.sought]


def _nothing(advice: Advice) -> str:
    if advice.of_program:
        return f"{', '.join(NOTHING_SEEN[kind] for kind in advice.sought if kind in NOTHING_SEEN)}."
    waits = "" if advice.on_cpu else "no line made the host wait, "
    return f"{waits}{NOTHING_BREAKS}"


def _finding_row(found: Finding) -> tuple[str, ...]:
    what = FINDINGS[found.kind] + (f": {found.detail}" if found.detail else "")
    where = f"{_where(found)} in `{found.function}`: `{found.code}`" if found.file else _where(found)
    return where, what, f"{found.count:g}", FIXES[found.kind]


def _where(found: Finding) -> str:
    return f"`{found.file}:{found.line}`" if found.file else "line unknown"


# --- what to sweep --------------------------------------------------------------------------------------------------


def _sweep(advice: Advice) -> list[str]:
    blocks = ["### What to sweep"]
    if not advice.points:
        return [*blocks, "No implementation and scope can work with this workload, for the reasons below."]
    if any(graph.name for graph in advice.points):
        return [*blocks, "Sweep the recipe. It has these graphs:", _own_graphs(advice)]
    how = "Replace the recipe's `cuda_graph` and the axes over it with this block. The largest captures come first"
    if advice.is_breaking and any(graph.implementation.takes_whole_model for graph in advice.points):
        how += ", but whole steps come last, since they contain every line above"
    as_line = partial(yaml.safe_dump, default_flow_style=True, sort_keys=False, width=math.inf)
    lines = "".join(f"    - {as_line(recipe_point(graph))}" for graph in advice.points)
    return [*blocks, f"{how}:", f"```yaml\nsweep:\n  points:\n{lines}```"]


def _own_graphs(advice: Advice) -> str:
    named = {"none": advice.cell.run_spec.command.eager} | {graph.name: graph.arguments for graph in advice.points}
    graphs = {name: list(words) for name, words in named.items()}
    text = yaml.safe_dump({"command": {"graphs": graphs}}, default_flow_style=None, sort_keys=False, width=math.inf)
    return f"```yaml\n{text}```"


def _rejections(advice: Advice) -> list[str]:
    blocks = []
    for is_fault, heading in LEFT_OUT.items():
        reasons = {reason: labels for reason, labels in advice.rejected.items() if is_known_fault(reason) == is_fault}
        blocks += [heading, "\n".join(starmap(_rejection, reasons.items()))] if reasons else []
    return blocks


def _rejection(reason: Reason, labels: Sequence[str]) -> str:
    named = listed([f"`{label}`" for label in labels], MOST_LABELS)
    return f"- {named}: {reason.message}. Fix: {reason.remedy.rstrip('.')} [{reason.rule}]."
