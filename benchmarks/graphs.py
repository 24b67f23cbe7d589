"""Compare the CUDA graphs of the torch_native engine with their promises for an H200, by whole sweeps.

    python -m benchmarks.graphs --store FOLDER                    sweep what fits this host, then the table
    python -m benchmarks.graphs --store FOLDER --only qwen3_8l    one recipe
    python -m benchmarks.graphs --store FOLDER --read             the table of what the store holds

The command sweeps each recipe, and continues where an earlier call ended. Figures are those of report.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PASSES = ("BITWISE", "EQUIVALENT")

Cell = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One promise on the cells of a recipe. ``value`` returns the figure, or None if no cell shows it. ``holds`` judges
    the figure."""

    recipe: str
    name: str
    promise: str
    value: Callable[[Sequence[Cell]], float | None]
    holds: Callable[[float], bool]


def passing(cells: Iterable[Cell], **fields: Any) -> list[Cell]:
    """Return the graphed cells with these fields that have a passing verdict, a speed and an upper bound."""
    return [
        cell
        for cell in cells
        if cell["verdict"] and cell["verdict"]["verdict"] in PASSES and cell["speed"] and cell.get("speedup_bound")
        if all(cell[name] == value for name, value in fields.items())
    ]


def whole(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells that capture the whole step, with the optimizer."""
    return [c for c in passing(cells, impl="full_iteration") if "optimizer" in c["effective_scope"]]


def least(figures: Iterable[float | None]) -> float | None:
    return min((figure for figure in figures if figure is not None), default=None)


def fastest(cells: Iterable[Cell], side: str) -> float | None:
    return least(cell["speed"][side] for cell in cells)


def best(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell["speed"]["graphed_ms"] == fastest(cells, "graphed_ms")]


def over_fastest_eager(cells: Sequence[Cell]) -> float | None:
    """Return the ratio of the fastest eager step to the fastest whole step, over all workloads of the recipe. They are
    of one task."""
    eager, graphed = fastest(passing(cells), "eager_ms"), fastest(whole(cells), "graphed_ms")
    return eager / graphed if eager and graphed else None


def gibibytes_added(cells: Sequence[Cell]) -> float | None:
    return least(cell["memory"]["added"] / 2**30 for cell in best(whole(cells)))


def capture_seconds(cells: Sequence[Cell]) -> float | None:
    return least(cell["capture_cost"]["seconds"] for cell in best(whole(cells)))


def times_busy(cells: Sequence[Cell]) -> float | None:
    return least(cell["speedup_bound"]["times_busy"] for cell in best(whole(cells)))


def times_own_busy(cells: Sequence[Cell]) -> float | None:
    """Return the largest ratio of all layouts. Ranks of an eager baseline are busy while they wait for each other's
    hosts, so their own busy time is no measure."""
    found = [cell["speedup_bound"]["graphed"] for cell in whole(cells) if cell["speedup_bound"]["graphed"]]
    return max((graphed["step_ms"] / graphed["busy_ms"] for graphed in found), default=None)


FIGURES = (
    Figure("qwen3_8l", "full_iteration over the baseline's busy time", "<= 1.02", times_busy, lambda v: v <= 1.02),
    Figure("qwen3_8l", "fastest step, ms", "<= 135", lambda c: fastest(passing(c), "graphed_ms"), lambda v: v <= 135),
    Figure("qwen3_8l", "its capture, s", "< 1", capture_seconds, lambda v: v < 1),
    Figure("qwen3_8l", "its memory above eager, GiB", "<= 3", gibibytes_added, lambda v: v <= 3),
    Figure("launch_bound", "full_iteration, times the fastest eager", ">= 4", over_fastest_eager, lambda v: v >= 4),
    Figure(
        "qwen3_8l_parallel", "full_iteration over its own busy time", "<= 1.05", times_own_busy, lambda v: v <= 1.05
    ),
)


def sweep(recipe: str, store: Path) -> int:
    """Run the rest of the recipe's sweep, and return its exit code."""
    path = ROOT / "recipes" / f"{recipe}.yaml"
    command = [sys.executable, "-m", "orchestrator", "sweep", str(path), "--store", str(store), "--executor", "local"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def cells_of(recipe: str, store: Path) -> list[Cell]:
    report = store / recipe / "report" / "report.json"
    if not report.exists():
        return []
    cells: list[Cell] = json.loads(report.read_text())["cells"]
    return cells


def told(figure: Figure, value: float | None, ran: bool) -> str:
    if value is None:
        return "MISSED: no cell that passes tells" if ran else "not run"
    return f"{value:8.3g}  {'holds' if figure.holds(value) else 'MISSED'}"


def main(arguments: Sequence[str]) -> int:
    """Return 0 if every figure of the recipes that ran holds, else 3."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    recipes = sorted({figure.recipe for figure in FIGURES})
    parser.add_argument("--only", choices=recipes, action="append")
    parser.add_argument("--read", action="store_true")
    options = parser.parse_args(arguments)
    chosen = options.only or recipes
    if not options.read:
        for recipe in chosen:
            print(f"{recipe}: exit code {sweep(recipe, options.store)}", flush=True)
    missed = False
    for figure in FIGURES:
        if figure.recipe in chosen:
            cells = cells_of(figure.recipe, options.store)
            value, ran = figure.value(cells), bool(cells)
            missed |= not figure.holds(value) if value is not None else ran
            print(f"{figure.recipe:20} {figure.name:44} {figure.promise:8} {told(figure, value, ran)}")
    return 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
