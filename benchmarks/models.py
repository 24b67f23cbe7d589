"""Measure how fast the torch_native engine trains. Compare it with Hugging Face transformers' implementation of the same layers.

    python -m benchmarks.models                      on a GPU: both stacks
    python -m benchmarks.models --only qwen          one of them
    python -m benchmarks.models --tiny               toy sizes on a CPU: does it run; no claim about speed

A stack is eight layers (stacks.py). Contestants differ only in the model's forward and backward pass. All compute in bfloat16,
accumulate the same micro-batches of the same tokens into float32 gradients, clip, and update float32 masters with the engine's
own optimizer. The router's losses are off for all.

Eight layers of Qwen3 fill most of a GPU. So contestants are built, warmed up and measured one after another, in several rounds.
The median, minimum and maximum of a row are over all its steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.stacks import STACKS, Step, our_step, stack, their_step
from launch.contract.model_flops import model_flops, tokens_per_step
from launch.contract.spec import RunSpec

WARMUP_STEPS = 5


@dataclass
class Contestant:
    """One row of the table: how its model is built, and its measurements in all rounds together."""

    name: str
    build: Callable[[], Step]
    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    """The time until Python has launched the last kernel, for steps that begin on an idle device."""
    peak_bytes: int = 0
    losses: tuple[float, float] = (math.nan, math.nan)
    """The loss of the first step and of the last measured one."""
    error: str = ""

    @property
    def ours(self) -> bool:
        return self.name.startswith("ours")


def contestants(spec: RunSpec, device: torch.device) -> list[Contestant]:
    compiled = dataclasses.replace(spec, training=dataclasses.replace(spec.training, compile="elementwise"))
    entries = [
        Contestant("ours, eager", partial(our_step, spec, device)),
        Contestant("ours, compile: elementwise", partial(our_step, compiled, device)),
    ]
    if transformers_version() is None:
        return entries
    entries += [
        Contestant("transformers", partial(their_step, spec, device)),
        Contestant("transformers, torch.compile", partial(their_step, spec, device, compiled=True)),
    ]
    if spec.model.is_moe:
        entries.append(
            Contestant("transformers, loop over experts", partial(their_step, spec, device, experts="eager"))
        )
    return entries


def transformers_version() -> str | None:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def matrix_rate(device: torch.device, size: int = 8192) -> float:
    """Return the FLOP/s of a bfloat16 product of two square matrices of random numbers: the median of 50 products after
    20 others."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    milliseconds = time_calls([partial(torch.mm, a, b, out=out)] * 70, device)[20:]
    return float(2 * size**3 / (statistics.median(milliseconds) / 1e3))


def time_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the milliseconds of each call, by the device's clock on a GPU. The host never waits between calls."""
    if device.type == "cpu":
        return [host_ms(call) for call in calls]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def host_ms(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begun)


def measure(entry: Contestant, step: Step, batches: torch.Tensor, device: torch.device) -> None:
    """Warm up ``step``, run it once per batch, and add the times to ``entry``."""
    losses = [step(batch) for batch in batches[:WARMUP_STEPS]]
    losses[-1].item()  # This waits for the device. Compilation is over afterwards.
    entry.step_ms += time_calls([partial(lambda b: losses.append(step(b)), b) for b in batches[WARMUP_STEPS:]], device)
    for batch in batches[:3]:
        entry.host_ms.append(host_ms(partial(step, batch)))
        losses[-1].item()
    entry.losses = (losses[0].item(), losses[-1].item())


def measure_afresh(entry: Contestant, batches: torch.Tensor, device: torch.device, profile: bool) -> None:
    """Build ``entry`` and measure it. If transformers fails, keep its error."""
    print(f"  {entry.name} ...", file=sys.stderr, flush=True)
    try:
        step = entry.build()
        measure(entry, step, batches, device)
        if profile and entry.ours:
            print_kernels(entry.name, partial(step, batches[0]))
    except RuntimeError as error:  # Errors of Dynamo, Inductor and the allocator are subclasses of it.
        if entry.ours:
            raise
        entry.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    if device.type == "cuda":
        entry.peak_bytes = max(entry.peak_bytes, torch.cuda.max_memory_allocated())


def release(device: torch.device) -> None:
    torch.compiler.reset()  # Otherwise graphs of deleted models count towards Dynamo's limit of recompilations.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def print_kernels(name: str, step: Callable[[], object], limit: int = 25) -> None:
    """Print the kernels of one step that took most GPU time."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    # An annotation, such as the optimizer's, spans kernels that are in the list already.
    events = [e for e in profile.key_averages() if not e.is_user_annotation]
    kernels = [e for e in events if e.device_type.name == "CUDA"]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    print(f"\n{name}: {sum(e.count for e in kernels)} kernels, {total / 1e3:.2f} ms of the GPU in one step")
    for event in kernels[:limit]:
        spent = event.self_device_time_total
        print(f"{spent / 1e3:9.3f} ms {spent / total:6.1%} {event.count:6} x  {event.key[:120]}")


def table(spec: RunSpec, entries: Sequence[Contestant], rate: float | None) -> str:
    """Return the table. ``speed`` is relative to uncompiled transformers, ``share`` is the share of the measured matrix
    rate, and ``host`` is the share of a step's time in which Python launches it. If ``host`` is near 1, the host limits
    the step."""
    theirs = next((statistics.median(e.step_ms) for e in entries if e.name == "transformers" and not e.error), None)
    lines = [f"{'':32}{'ms a step':>10}{'min':>9}{'max':>9}{'tokens/s':>11}{'TFLOP/s':>9}{'share':>7}"
             f"{'speed':>7}{'GiB':>7}{'host':>6}   first and last loss"]  # fmt: skip
    for entry in entries:
        if entry.error:
            lines.append(f"{entry.name:32} did not run: {entry.error}")
            continue
        milliseconds = statistics.median(entry.step_ms)
        flops = model_flops(spec) / milliseconds * 1e3
        lines.append(
            f"{entry.name:32}{milliseconds:10.2f}{min(entry.step_ms):9.2f}{max(entry.step_ms):9.2f}"
            f"{tokens_per_step(spec) / milliseconds * 1e3:11,.0f}{flops / 1e12:9.3g}"
            f"{f'{flops / rate:.1%}' if rate else '-':>7}{f'{theirs / milliseconds:.2f}' if theirs else '-':>7}"
            f"{entry.peak_bytes / 2**30:7.1f}{statistics.median(entry.host_ms) / milliseconds:6.2f}"
            f"   {entry.losses[0]:.3f} {entry.losses[1]:.3f}"
        )
    return "\n".join(lines)


def run(name: str, options: argparse.Namespace, device: torch.device, rate: float | None) -> dict[str, Any]:
    """Measure one stack, print its table, and return it as JSON values."""
    spec = stack(STACKS[name], device, options.tiny)
    model, training = spec.model, spec.training
    entries = [entry for entry in contestants(spec, device) if entry.name.startswith(options.rows)]
    sizes = (spec.num_microbatches, training.micro_batch_size, training.sequence_length + 1)
    generator = torch.Generator(device).manual_seed(training.seed)
    batches = torch.randint(
        model.vocab_size, (WARMUP_STEPS + options.steps, *sizes), device=device, generator=generator
    )
    for number in range(options.rounds):
        for entry in (entry for entry in entries if not entry.error):
            measure_afresh(entry, batches, device, options.profile and number == 0)
            release(device)
    flops = model_flops(spec)
    print(f"\n{model.num_layers} layers of {STACKS[name]}, vocabulary {model.vocab_size:,}: {sizes[0]} micro-batches of "
          f"{sizes[1]} x {training.sequence_length} tokens a step, {flops / 1e12:.3g} TFLOP; ln(vocabulary) = "
          f"{math.log(model.vocab_size):.3f}\n{table(spec, entries, rate)}")  # fmt: skip
    for entry in entries:
        # This form does not let NaN pass.
        if not entry.error and not abs(entry.losses[0] - math.log(model.vocab_size)) < 1.5:
            raise RuntimeError(f"{entry.name}: the first loss, {entry.losses[0]}, is not that of random weights")
    rows = [{k: v for k, v in vars(entry).items() if k != "build"} for entry in entries]
    return {"stack": name, "flops_per_step": flops, "tokens_per_step": tokens_per_step(spec), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=STACKS, help="one stack")
    parser.add_argument("--steps", type=int, default=20, help="measured steps per implementation and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rows", default="", help="only rows whose name begins with this, such as ours or transformers"
    )
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU")
    parser.add_argument("--profile", action="store_true", help="also print the 25 longest kernels of our steps")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device: --tiny runs toy sizes on a CPU")
    if options.tiny and options.profile:
        parser.error("--profile reads the kernels of a GPU: leave --tiny out")
    if options.tiny:
        # Some virtual machines advertise AMX but forbid it. oneDNN's bfloat16 products then die of an illegal
        # instruction.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    rate = None if options.tiny else matrix_rate(device)
    where = "CPU" if rate is None else f"{torch.cuda.get_device_name()}, bfloat16 8192^3 at {rate / 1e12:.0f} TFLOP/s"
    theirs = transformers_version()
    print(f"PyTorch {torch.__version__}, transformers {theirs or 'not installed: its rows are left out'}, {where}")
    results = [run(name, options, device, rate) for name in STACKS if options.only in (None, name)]
    if options.json:
        content = {
            "torch": torch.__version__,
            "transformers": theirs,
            "device": where,
            "matrix_rate": rate,
            "stacks": results,
        }
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
