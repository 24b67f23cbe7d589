"""Measure the GPU seconds of a sweep over all its ranks, which its verdicts cost. Compare them with another version of this
repository, in alternating turns.

    python -m benchmarks.cost recipes/qwen3_8l.yaml --against CHECKOUT repeats=2
    python -m benchmarks.cost benchmarks/olmoe_12l.yaml --against CHECKOUT --turns 2 --store FOLDER

``CHECKOUT`` is a folder with the other version (``git worktree add CHECKOUT 4b20bb4``). Both versions get the same recipe and
settings, and each has its own compile caches in the store. With the same store, another call continues where this one was
interrupted.
The exit code is 1 if a verdict differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.contract.paths import SweepPaths

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Cost:
    """The cost of one sweep.

    Attributes:
        seconds: the seconds of all attempts, times their ranks. step_times: by cell label, the median of its runs'
            median steps, in ms. verdicts: by cell label. settings: by cell label, the fields of its spec, each value as
            JSON.
    """

    seconds: float
    step_times: dict[str, float]
    verdicts: dict[str, str]
    settings: dict[str, dict[str, str]]


def run_sweep(checkout: Path, recipe: Path, settings: Sequence[str], store: Path, name: str, caches: Path) -> Cost:
    """Run the sweep ``name`` with the code of ``checkout``, or the rest of it after an interruption."""
    begun = (store / name / "plan.json").exists()
    words = ["resume", name] if begun else ["sweep", str(recipe), f"name={name}", *settings]
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [str(checkout), inherited]))
    command = [sys.executable, "-m", "orchestrator", *words, "--store", str(store)]
    own = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    subprocess.run(command, cwd=checkout, env={**os.environ, **own, "PYTHONPATH": path}, check=False)
    return read_cost(SweepPaths(store / name))


def read_cost(sweep: SweepPaths) -> Cost:
    """Read the cost of a complete sweep, whichever version has run it.

    Raises:
        SystemExit: a run has not ended, so call again.
    """
    cells = json.loads(sweep.plan.read_text())["cells"]
    reported = json.loads((sweep.root / "report" / "report.json").read_text())["cells"]
    names = {cell["cell_id"]: cell["label"] for cell in reported}
    runs = {run_id: names[cell["cell_id"]] for cell in cells if cell["cell_id"] in names for run_id in cell["run_ids"]}
    attempts = [attempt for run_id in runs for attempt in sorted((sweep.root / "runs" / run_id).glob("attempts/*"))]
    ended = {attempt.parent.parent.name for attempt in attempts if (attempt / "outcome.json").exists()}
    # A perturbed run is made only if a verdict needs it.
    specs = {run_id: json.loads(sweep.run(run_id).spec.read_text()) for run_id in runs}
    missing = [run_id for run_id, spec in specs.items() if run_id not in ended and not spec.get("perturbed")]
    if missing:
        raise SystemExit(f"{sweep.root.name}: {len(missing)} runs have not ended: call again to continue")
    seconds = sum(_seconds(attempt) * _ranks(specs[attempt.parent.parent.name]) for attempt in attempts)
    times: dict[str, list[float]] = {}
    for attempt in attempts:
        times.setdefault(runs[attempt.parent.parent.name], []).extend(_median_step(attempt))
    medians = {name: statistics.median(found) for name, found in times.items() if found}
    settings = {name: _settings(specs[run_id]) for run_id, name in runs.items()}
    return Cost(seconds, medians, {cell["label"]: _verdict(cell["verdict"]) for cell in reported}, settings)


def _settings(spec: Mapping[str, Any]) -> dict[str, str]:
    leaves = (
        (name, value if isinstance(value, dict) else {"": value}) for name, value in spec.items() if name != "repeat"
    )
    return {f"{name}.{field}": json.dumps(value) for name, fields in leaves for field, value in fields.items()}


def _ranks(spec: Mapping[str, Any]) -> int:
    return int(spec["placement"]["nodes"] * spec["placement"]["ranks_per_node"])


def _seconds(attempt: Path) -> float:
    outcome = json.loads((attempt / "outcome.json").read_text())
    return float(outcome["ended"] - outcome["started"])


def _median_step(attempt: Path) -> list[float]:
    """Return the median measured step, in ms; nothing if no step was measured."""
    lines = (attempt / "metrics.jsonl").read_text().splitlines() if (attempt / "metrics.jsonl").exists() else []
    measured = [line["step_time_ms"] for line in map(json.loads, lines) if line["phase"] == "measure"]
    return [statistics.median(measured)] if measured else []


def _verdict(verdict: dict[str, Any] | None) -> str:
    """Return the verdict's name. Earlier versions call it the verdict's word."""
    return verdict.get("verdict") or verdict["word"] if verdict else "reference"


def compare(before: Sequence[Cost], now: Sequence[Cost]) -> tuple[str, bool]:
    """Return the comparison as text, and whether all verdicts are equal."""
    pairs = list(zip(before, now, strict=True))
    saved = [new.seconds / old.seconds for old, new in pairs]
    lines = [
        f"seconds of all ranks: {', '.join(f'{old.seconds:.0f} to {new.seconds:.0f}' for old, new in pairs)}",
        f"ratio: {statistics.median(saved):.2f} ({min(saved):.2f} to {max(saved):.2f} in {len(saved)} turns)",
    ]
    same = [(old, new, *names) for old, new in pairs for names in _same_cells(old, new).items()]
    steps = [
        new.step_times[after] / old.step_times[before]
        for old, new, before, after in same
        if before in old.step_times and after in new.step_times
    ]
    if steps:
        lines.append(f"median step: {statistics.median(steps):.3f} ({min(steps):.3f} to {max(steps):.3f} over cells)")
    differing = sorted(
        {
            f"{before}: {old.verdicts[before]} to {new.verdicts.get(after, 'not there')}"
            for old, new, before, after in same
            if old.verdicts[before] != new.verdicts.get(after)
        }
    )
    lines.append(f"verdicts: {'; '.join(differing) or 'unchanged'}")
    return "\n".join(lines), not differing


def _same_cells(old: Cost, new: Cost) -> dict[str, str]:
    """Return the label of each of ``old``'s cells in ``new``, or "" if ``new`` lacks it.

    Versions may spell labels in different ways, and add fields to specs. So cells are the same if they agree in all fields that
    both versions have and that differ between cells.
    """
    known = [set.intersection(*map(set, side.settings.values())) for side in (old, new)]
    varying = sorted(
        field
        for field in known[0] & known[1]
        if any(len({cell[field] for cell in side.settings.values()}) > 1 for side in (old, new))
    )
    labels = {tuple(cell[field] for field in varying): name for name, cell in new.settings.items()}
    return {name: labels.get(tuple(cell[field] for field in varying), "") for name, cell in old.settings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("settings", nargs="*", help="overrides of the recipe, such as repeats=2")
    parser.add_argument("--against", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--store", type=Path, default=Path("cost"))
    arguments = parser.parse_intermixed_args()
    versions, store = {"before": arguments.against.resolve(), "now": ROOT}, arguments.store.resolve()
    costs: dict[str, list[Cost]] = {"before": [], "now": []}
    for turn in range(arguments.turns):
        for version in list(versions)[:: -1 if turn % 2 else 1]:
            name = f"{arguments.recipe.stem}-{version}-{turn}"
            caches = store / "caches" / version
            costs[version].append(
                run_sweep(versions[version], arguments.recipe.resolve(), arguments.settings, store, name, caches)
            )
    text, equal = compare(costs["before"], costs["now"])
    print(text)
    raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
