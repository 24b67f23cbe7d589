"""`python -m analysis.loss`: the same verdict on curves of any framework, from files.

    python -m analysis.loss --eager e1.csv e2.csv --graphed g1.csv --capture-step 4

The files hold steps and metrics alone, so the user must know that the runs share workload, data, code and libraries.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis.curves.curve_files import CurveError, CurveFiles, read_curves
from analysis.curves.print_precision import (
    differences_below_precision,
    drop_below_precision,
    insufficient_precision,
    widen_margins,
)
from analysis.records.steps import Metric
from analysis.verdict.curve_difference import METRIC_NAMES, CurveEvidence
from analysis.verdict.ladder import judge_curves
from analysis.verdict.verdict import Verdict, VerdictName
from launch.contract.plan import Margins

_UNCHECKED = "provenance unchecked: the files do not show whether the runs share workload, data, code and libraries"
EXIT_CODES: Mapping[VerdictName, int] = {
    "BITWISE": 0,
    "EQUIVALENT": 0,
    "INCOMPARABLE": 1,
    "DIVERGED": 3,
    "INCONCLUSIVE": 4,
}
NOT_WRITTEN = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    margins = Margins(loss=options.loss_margin, grad_norm=options.grad_norm_margin)
    evidence: list[str] = []
    try:
        files = read_curves(options.eager, options.graphed)
        verdict = _judge(files, options.capture_step, margins)
    except CurveError as error:
        verdict = Verdict("INCOMPARABLE", str(error))
    else:
        evidence = _evidence_lines(verdict.evidence, files, margins) if verdict.evidence else []
        evidence += [f"{copy}: the same bytes as {original}; a copy proves nothing" for copy, original in files.copies]
    answer = [verdict.verdict, verdict.reason, f"Fix: {verdict.fix}." if verdict.fix else ""]
    text = "\n".join([*filter(None, answer), *evidence, "", _UNCHECKED]) + "\n"
    return EXIT_CODES[verdict.verdict] if _print(text) else NOT_WRITTEN


def _print(text: str) -> bool:
    """Return whether ``text`` reached standard output; if not, print the reason on standard error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # The rest of the buffer would fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"the verdict could not be written: {error.strerror}\n")
        return False
    return True


def _judge(files: CurveFiles, capture_step: int | None, margins: Margins) -> Verdict:
    steps = files.steps
    first = 0 if capture_step is None else int(np.searchsorted(steps, capture_step, side="right"))
    verdict = judge_curves(files.eager, files.graphed, steps, first, margins, files.metrics)
    coarse = insufficient_precision(files, first, margins) if verdict.verdict != "INCOMPARABLE" else {}
    if not coarse:
        return verdict
    sure = drop_below_precision(files, coarse)
    surely = judge_curves(sure.eager, sure.graphed, steps, first, widen_margins(margins, coarse), files.metrics)
    if verdict.verdict == surely.verdict == "DIVERGED":
        same = verdict.deviation and surely.deviation and verdict.deviation.step == surely.deviation.step
        return verdict if same else replace(surely, evidence=verdict.evidence)
    return differences_below_precision(verdict, coarse, margins)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.loss",
        description="Compare graphed loss curves with eager ones. Files are CSV or JSON lines with step, loss and optionally "
        "grad_norm. Several files of one side are repeats of one configuration. docs/verdicts.md has the rules.",
        epilog="Exit codes: 0 BITWISE or EQUIVALENT, 3 DIVERGED, 4 INCONCLUSIVE, 1 INCOMPARABLE, 2 wrong usage or the output "
        "cannot be written.",
    )
    parser.add_argument(
        "--eager", nargs="+", type=Path, required=True, metavar="FILE", help="two or more give a noise floor"
    )
    parser.add_argument("--graphed", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--capture-step", type=int, metavar="K", help="compare the steps after K; by default all steps are compared"
    )
    parser.add_argument(
        "--loss-margin", type=_margin, default=Margins.loss, metavar="NATS", help="absolute (default: %(default)s)"
    )
    parser.add_argument(
        "--grad-norm-margin", type=_margin, default=Margins.grad_norm, metavar="SHARE",
        help="relative to eager (default: %(default)s)",
    )  # fmt: skip
    return parser


def _margin(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"a margin is a finite number, 0 or larger, not {text}")
    return value


def _evidence_lines(evidence: CurveEvidence, files: CurveFiles, margins: Margins) -> list[str]:
    runs = f"{evidence.eager_runs} eager, {evidence.graphed_runs} graphed"
    eager_differ = evidence.eager_prefix < evidence.steps
    lines = [
        "",
        f"window         steps {evidence.first_step} to {evidence.last_step} ({evidence.steps}); {runs}",
        f"1 bitwise      the first {evidence.bitwise_prefix} of {evidence.steps} steps"
        + (f"; eager runs among themselves {evidence.eager_prefix}" if eager_differ else ""),
    ]
    for metric in files.metrics:
        lines += ["", *_metric_lines(evidence, metric, margins.of(metric))]
    return lines if len(files.metrics) > 1 else [*lines, "", "gradient norm: not in the files"]


def _metric_lines(evidence: CurveEvidence, metric: Metric, margin: float) -> list[str]:
    size, step = evidence.largest(metric)
    floor = evidence.noise_floor
    lines = [
        f"{METRIC_NAMES[metric]}, margin {margin:g}{'' if metric == 'loss' else ' of it'}",
        f"2 noise floor  {f'{floor.of(metric):.3g} over {floor.repeats} eager runs' if floor else 'unknown'}",
        f"3 largest      {size:.3g} at step {step}",
    ]
    for tested in evidence.tested:
        if tested.metric == metric:
            lines += [
                f"3 mean         {tested.mean.value:.3g} +- {tested.mean.half_width:.3g} (p {tested.p:.2g})",
                f"4 drift        {tested.rise.value:.3g} +- {tested.rise.half_width:.3g} over the window",
                f"4 late         {'a blow-up' if tested.late else 'no blow-up'}",
            ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
