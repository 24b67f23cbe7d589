"""`python -m analysis.loss`: give the same verdict on curves of any framework, from files.

    python -m analysis.loss --eager e1.csv e2.csv --graphed g1.csv --capture-step 4

The files hold only steps and metrics, so the user must know that the runs share workload, data, code and libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from analysis.curves.curve import CurveError
from analysis.curves.curve_files import CurveFiles, read_curves
from analysis.curves.judge_files import judge_files
from analysis.verdict.curve_difference import METRIC_NAMES
from analysis.verdict.curve_evidence import CurveEvidence
from analysis.verdict.curve_tests.growth import Growth
from analysis.verdict.verdict import Verdict, VerdictName
from launch.common.command_line import Parser
from launch.common.grouped import grouped
from launch.contract.exit_codes import LOSS, ExitCode, help_lines
from launch.contract.plan import Margins
from launch.contract.records.step_metrics import Metric

_UNCHECKED = (
    "provenance unchecked, replay unproven: the files do not show whether the runs share workload, data, code and libraries, "
    "or whether graphs were replayed"
)
_COPY = "the same numbers as {}, or those numbers rounded; a copy proves nothing"
_EXIT_CODES: Mapping[VerdictName, ExitCode] = {
    "BITWISE": ExitCode.PASS,
    "EQUIVALENT": ExitCode.PASS,
    "INCOMPARABLE": ExitCode.FAILED,
    "DIVERGED": ExitCode.FAILED,
    "INCONCLUSIVE": ExitCode.INCONCLUSIVE,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    margins = Margins(loss=options.loss_margin, grad_norm=options.grad_norm_margin)
    evidence: list[str] = []
    try:
        files = read_curves(options.eager, options.graphed, options.perturbed)
        verdict = judge_files(files, options.capture_step, margins)
    except CurveError as error:
        verdict = Verdict("INCOMPARABLE", str(error))
    else:
        evidence = ["", *_column_lines(files)]
        evidence += _evidence_lines(verdict.evidence, files, margins) if verdict.evidence else []
        evidence += [f"{copy}: {_COPY.format(original)}" for copy, original in files.copies.items()]
    answer = [verdict.verdict, verdict.reason, f"Fix: {verdict.advice}." if verdict.advice else ""]
    text = "\n".join([*filter(None, answer), *evidence, "", _UNCHECKED]) + "\n"
    return _EXIT_CODES[verdict.verdict] if _print(text) else ExitCode.UNFINISHED


def _print(text: str) -> bool:
    """Return whether ``text`` reached standard output; if not, print the reason on standard error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Without this, flushing the rest of the buffer at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"the verdict could not be written: {error.strerror}\n")
        return False
    return True


def _parser() -> Parser:
    parser = Parser(
        prog="python -m analysis.loss",
        description="Compare graphed loss curves with eager ones. Files are CSV, JSON lines, logs, event files of TensorBoard,\n"
        "*.wandb or trainer_state.json, with loss and optionally grad_norm. Several files given for one side count as repeats "
        "of one configuration. docs/verdicts.md has the rules.",
        epilog=help_lines(LOSS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--eager", nargs="+", type=Path, required=True, metavar="FILE", help="two or more give a noise floor"
    )
    parser.add_argument("--graphed", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--perturbed", nargs=1, type=Path, default=(), metavar="FILE",
        help="perturbed eager run: after the capture, its first layer's output was moved by one unit in the last place; DIVERGED "
        "needs a larger difference than this run has",
    )  # fmt: skip
    parser.add_argument(
        "--capture-step",
        type=whole_number,
        metavar="K",
        help="compare the steps after K; by default all steps are compared",
    )
    add_margins(parser)
    return parser


def add_margins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--loss-margin", type=_margin, default=Margins.loss, metavar="NATS",
        help="largest difference of the loss that counts as equal (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--grad-norm-margin", type=_margin, default=Margins.grad_norm, metavar="SHARE",
        help="largest difference of the gradient norm that counts as equal, relative to the eager norm (default: %(default)s)",
    )  # fmt: skip


def whole_number(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"a step is a whole number, 0 or larger, not {text}")
    return int(text)


def _margin(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"a margin is a finite number, 0 or larger, not {text}")


def _column_lines(files: CurveFiles) -> list[str]:
    """Say which columns were read, by file where files differ."""
    readers = grouped((curve.columns, name) for name, curve in files.curves.items())
    return [
        f"columns        {', '.join(columns)}" + (f" ({', '.join(names)})" if len(readers) > 1 else "")
        for columns, names in readers.items()
    ]


def _evidence_lines(evidence: CurveEvidence, files: CurveFiles, margins: Margins) -> list[str]:
    runs = f"{evidence.eager_runs} eager, {evidence.graphed_runs} graphed"
    eager_differ = evidence.eager_prefix < evidence.steps
    lines = [
        f"window         steps {evidence.first_step} to {evidence.last_step} ({evidence.steps}); {runs}",
        f"1 bitwise      the first {evidence.bitwise_prefix} of {evidence.steps} steps"
        + (f"; eager repeats: the first {evidence.eager_prefix}" if eager_differ else ""),
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
                f"4 growth       {_growth(tested.growth)}",
            ]
    return lines


def _growth(growth: Growth | None) -> str:
    if growth is None:
        return "none at the end of the window"
    return f"from {growth.before:.3g} to {growth.after:.3g} in the last {growth.steps} steps (leaves the margin)"


if __name__ == "__main__":
    sys.exit(main())
