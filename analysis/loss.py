"""`python -m analysis.loss`: the same verdict on curves of any framework, from files.

    python -m analysis.loss --eager e1.csv e2.csv --graphed g1.csv --capture-step 4

Files hold nothing of what runs have to share beside their steps, so that this is left to who made them.
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
from analysis.verdict.curve_difference import METRIC_NAMES, Evidence
from analysis.verdict.ladder import judge_curves
from analysis.verdict.rungs import margin_of
from analysis.verdict.verdict import Verdict, Word
from launch.contract.plan import Margins

_UNCHECKED = "provenance unchecked: that the runs share workload, data, code and libraries is not in the files"
EXIT_CODES: Mapping[Word, int] = {"BITWISE": 0, "EQUIVALENT": 0, "INCOMPARABLE": 1, "DIVERGED": 3, "INCONCLUSIVE": 4}
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
        evidence = _rungs(verdict.evidence, files, margins) if verdict.evidence else []
        evidence += [f"{copy}: the same bytes as {of}; a copy proves nothing" for copy, of in files.copies]
    said = [verdict.word, verdict.reason, f"To settle it: {verdict.remedy}." if verdict.remedy else ""]
    lines = [*filter(None, said), *evidence, "", _UNCHECKED]
    return EXIT_CODES[verdict.word] if _written("\n".join(lines) + "\n") else NOT_WRITTEN


def _written(text: str) -> bool:
    """Whether ``text`` reached standard output; if not, why is on standard error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"the verdict could not be written: {error.strerror}\n")
        return False
    return True


def _judge(files: CurveFiles, capture_step: int | None, margins: Margins) -> Verdict:
    expected = files.steps
    first = 0 if capture_step is None else int(np.searchsorted(expected, capture_step, side="right"))
    verdict = judge_curves(files.eager, files.graphed, expected, first, margins, files.metrics)
    coarse = insufficient_precision(files, first, margins) if verdict.word != "INCOMPARABLE" else {}
    if not coarse:
        return verdict
    sure = drop_below_precision(files, coarse)
    surely = judge_curves(sure.eager, sure.graphed, expected, first, widen_margins(margins, coarse), files.metrics)
    if verdict.word == surely.word == "DIVERGED":
        same = verdict.deviation and surely.deviation and verdict.deviation.step == surely.deviation.step
        return verdict if same else replace(surely, evidence=verdict.evidence)
    return differences_below_precision(verdict, coarse, margins)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.loss",
        description="Are the graphed curves the eager ones? Files are CSV or JSON lines with step, loss and optionally "
        "grad_norm; several of a side are repeats of one configuration. docs/verdicts.md has the rules.",
        epilog="Exit codes: 0 BITWISE or EQUIVALENT, 3 DIVERGED, 4 INCONCLUSIVE, 1 INCOMPARABLE, 2 wrong usage or the output "
        "cannot be written.",
    )
    parser.add_argument("--eager", nargs="+", type=Path, required=True, metavar="FILE", help="two or more give a floor")
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
        raise argparse.ArgumentTypeError(f"a margin is a number from 0 on, not {text}")
    return value


def _rungs(found: Evidence, files: CurveFiles, margins: Margins) -> list[str]:
    runs = f"{found.eager_runs} eager, {found.graphed_runs} graphed"
    lines = [
        "",
        f"window         steps {found.first_step} to {found.last_step} ({found.steps}); {runs}",
        f"1 bitwise      the first {found.bitwise_prefix} of {found.steps} steps{_eager_prefix(found)}",
    ]
    for metric in files.metrics:
        lines += ["", *_rungs_of(found, metric, margin_of(margins, metric))]
    return lines if len(files.metrics) > 1 else [*lines, "", "gradient norm: not in the files"]


def _eager_prefix(found: Evidence) -> str:
    return f"; eager runs among themselves {found.eager_prefix}" if found.eager_prefix < found.steps else ""


def _rungs_of(found: Evidence, metric: Metric, margin: float) -> list[str]:
    size, step = found.largest(metric)
    floor = found.floor
    lines = [f"{METRIC_NAMES[metric]}, margin {margin:g}{'' if metric == 'loss' else ' of it'}"]
    lines += [
        f"2 floor        {floor.of(metric):.3g} over {floor.repeats} eager runs" if floor else "2 floor        unknown"
    ]
    lines += [f"3 largest      {size:.3g} at step {step}"]
    for tested in found.tested:
        if tested.metric == metric:
            lines += [
                f"3 mean         {tested.mean.value:.3g} +- {tested.mean.half_width:.3g} (p {tested.p:.2g})",
                f"4 drift        {tested.rise.value:.3g} +- {tested.rise.half_width:.3g} over the window",
                f"4 late         {'a blow-up' if tested.late else 'no blow-up'}",
            ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
