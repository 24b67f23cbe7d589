"""How often verdicts err: curves with known truth, judged by analysis.verdict.ladder; prints the tables of
docs/verdicts.md.

    python benchmarks/verdicts.py            print them (about a minute)
    python benchmarks/verdicts.py --write    and put them into docs/verdicts.md

Runs share a falling loss and gradient norm, and have noise of their own: an autoregressive process of order one on either
metric, such that the difference of two runs has a standard deviation of ``noise`` margins. A defect of ``size`` margins is
added to graphed runs after the capture. Every row has a seed of its own, so that one can be made again by itself.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from analysis.records.steps import Floats, Metric, Steps
from analysis.verdict.ladder import judge_curves
from analysis.verdict.verdict import PASSES, VerdictName
from launch.contract.plan import Margins

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "verdicts.md"
BEGIN, END = "<!-- written by benchmarks/verdicts.py -->", "<!-- end -->"

CAPTURE, COMPARED = 3, 100
"""The capture step, and how many steps come after it."""
STEPS = CAPTURE + 1 + COMPARED
MARGINS = Margins()
TRIALS, TRIALS_WITHOUT_DEFECT = 150, 400
"""Judgements for each setting."""
CORRELATIONS = (0.0, 0.5, 0.9)
NOISE = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0)
NOISE_WITH_DEFECT = (0.1, 0.3, 0.5, 1.0)
SIZE = 2.0


@dataclass(frozen=True)
class Setting:
    """``noise`` and ``size`` are in margins. ``hit`` is how many of the ``graphed`` runs have the defect."""

    kind: str = "none"
    noise: float = 0.1
    correlation: float = 0.9
    size: float = SIZE
    eager: int = 2
    graphed: int = 2
    hit: int = 2


# --- curves ---------------------------------------------------------------------------------------------------------


def noise_of(random: np.random.Generator, setting: Setting) -> Floats:
    """Shape (2 metrics, runs, steps), eager runs first, in margins; stationary from the first step on."""
    values = random.normal(0, setting.noise / math.sqrt(2), (2, setting.eager + setting.graphed, STEPS))
    values[..., 1:] *= math.sqrt(1 - setting.correlation**2)
    for step in range(1, STEPS):
        values[..., step] += setting.correlation * values[..., step - 1]
    return values


def curve(noise: Floats) -> Steps:
    """A run with ``noise`` of shape (2 metrics, steps), in margins."""
    step = np.arange(STEPS)
    loss = 1.5 + 4 * np.exp(-step / 40) + noise[0] * MARGINS.loss
    norm = (0.8 + 2 * np.exp(-step / 30)) * (1 + noise[1] * MARGINS.grad_norm)
    return Steps(step, loss, norm, np.ones(STEPS), np.full(STEPS, 8), np.full(STEPS, "measure", dtype="U8"))


Defect = Callable[[np.random.Generator, float, Steps], Steps]


def _added(shape: Callable[[np.random.Generator], Floats], metric: Metric = "loss", before: bool = False) -> Defect:
    """A defect of ``shape`` (compared steps,) times its size; ``before``: the steps up to the capture have it too."""

    def defect(random: np.random.Generator, size: float, steps: Steps) -> Steps:
        offset = np.zeros(STEPS)
        offset[CAPTURE + 1 :] = shape(random) * size
        offset[: CAPTURE + 1] = offset[CAPTURE + 1] if before else 0
        if metric == "loss":
            return replace(steps, loss=steps.loss + offset * MARGINS.loss)
        return replace(steps, grad_norm=steps.grad_norm * (1 + offset * MARGINS.grad_norm))

    return defect


def _one_step(random: np.random.Generator) -> Floats:
    shape = np.zeros(COMPARED)
    shape[random.integers(COMPARED)] = 1
    return shape


def _swapped(random: np.random.Generator) -> Floats:
    """Two neighbouring steps whose losses lie so far apart."""
    shape, at = np.zeros(COMPARED), random.integers(COMPARED - 1)
    shape[at], shape[at + 1] = 1, -1
    return shape


def _exploding(random: np.random.Generator) -> Floats:
    """Nothing for 80 steps, then twice as much every other step."""
    return np.where(np.arange(COMPARED) < 80, 0.0, np.exp2((np.arange(COMPARED) - (COMPARED - 1)) / 2))


def _not_finite(value: float) -> Defect:
    def defect(random: np.random.Generator, size: float, steps: Steps) -> Steps:
        loss = steps.loss.copy()
        loss[CAPTURE + 1 + random.integers(COMPARED)] = value
        return replace(steps, loss=loss)

    return defect


def _truncated(random: np.random.Generator, size: float, steps: Steps) -> Steps:
    return steps.take(slice(int(random.integers(STEPS))))


def _renumbered(random: np.random.Generator, size: float, steps: Steps) -> Steps:
    return replace(steps, step=steps.step + 1)


DEFECTS: dict[str, Defect] = {
    "constant bias": _added(lambda random: np.ones(COMPARED), before=True),
    "bias after the capture": _added(lambda random: np.ones(COMPARED)),
    "slow drift (size: its mean)": _added(lambda random: np.linspace(0, 2, COMPARED)),
    "late explosion": _added(_exploding),
    "one bad micro-batch": _added(_one_step),
    "alternating sign": _added(lambda random: np.where(np.arange(COMPARED) % 2, -1.0, 1.0)),
    "swapped steps": _added(_swapped),
    "gradient norm alone": _added(lambda random: np.ones(COMPARED), "grad_norm"),
    "gradient norm alone, one step": _added(_one_step, "grad_norm"),
    "NaN": _not_finite(float("nan")),
    "Inf": _not_finite(float("inf")),
    "truncation": _truncated,
    "renumbered steps": _renumbered,
}


# --- verdicts -------------------------------------------------------------------------------------------------------


def words(setting: Setting, trials: int) -> Counter[VerdictName]:
    """How often each verdict was given."""
    random = np.random.default_rng(list(repr(setting).encode()))
    return Counter(_judged(random, setting) for _ in range(trials))


def _judged(random: np.random.Generator, setting: Setting) -> VerdictName:
    noise = noise_of(random, setting)
    runs = [curve(noise[:, run]) for run in range(setting.eager + setting.graphed)]
    defect, state = DEFECTS.get(setting.kind), random.bit_generator.state
    for run in range(setting.eager, setting.eager + (setting.hit if defect else 0)):
        random.bit_generator.state = state  # a defect of graphs is the same in every run that has it
        runs[run] = defect(random, setting.size, runs[run]) if defect else runs[run]
    eager = {f"eager {run}": steps for run, steps in enumerate(runs[: setting.eager])}
    graphed = {f"graphed {run}": steps for run, steps in enumerate(runs[setting.eager :])}
    return judge_curves(eager, graphed, np.arange(STEPS), CAPTURE + 1, MARGINS).verdict


def passed(found: Counter[VerdictName]) -> float:
    return sum(found[word] for word in PASSES) / found.total()


# --- tables ---------------------------------------------------------------------------------------------------------


def power_row(noise: float) -> str:
    """No defect: how often it passes, by correlation and with one graphed run; how often it is called diverged."""
    settings = [Setting(noise=noise, correlation=correlation) for correlation in CORRELATIONS]
    settings.append(Setting(noise=noise, graphed=1, hit=1))
    found = [words(setting, TRIALS_WITHOUT_DEFECT) for setting in settings]
    diverged = sum(one["DIVERGED"] for one in found)
    cells = [f"{noise:g}", *(f"{passed(one):.1%}" for one in found), f"{diverged} of {sum(map(Counter.total, found))}"]
    return _row(cells)


def defect_row(kind: str) -> str:
    """How often it passes where it must not, over all noise; and what is said of it where noise is a tenth."""
    settings = [
        Setting(kind, noise, correlation, hit=hit)
        for noise in NOISE_WITH_DEFECT
        for correlation in (CORRELATIONS[0], CORRELATIONS[-1])
        for hit in (1, 2)
    ]
    found = [words(setting, TRIALS) for setting in settings]
    wrong = sum(sum(one[word] for word in PASSES) for one in found)
    little = words(Setting(kind), TRIALS)
    larger = words(Setting(kind, size=2 * SIZE), TRIALS)
    said = [f"{_most(one)}" for one in (little, larger)]
    return _row([kind, f"{wrong} of {sum(map(Counter.total, found))}", f"{max(map(passed, found)):.1%}", *said])


def _most(found: Counter[VerdictName]) -> str:
    return ", ".join(f"{count / found.total():.0%} {word}" for word, count in found.most_common())


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables() -> str:
    power = ["noise, in margins", *(f"EQUIVALENT, correlation {c:g}" for c in CORRELATIONS)]
    power += ["EQUIVALENT, one graphed run, 0.9", "wrong DIVERGED"]
    defects = ["defect", "wrong EQUIVALENT", "most for one noise", "noise 0.1", "noise 0.1, twice the size"]
    return "\n".join(
        [
            f"Parameters {digest()}.",
            "",
            _row(power),
            _row(["---"] * len(power)),
            *map(power_row, NOISE),
            "",
            _row(defects),
            _row(["---"] * len(defects)),
            *map(defect_row, DEFECTS),
        ]
    )


def digest() -> str:
    """Of all that the tables depend on beside the rules themselves."""
    parameters = (STEPS, CAPTURE, MARGINS, TRIALS, TRIALS_WITHOUT_DEFECT, CORRELATIONS, NOISE, NOISE_WITH_DEFECT, SIZE)
    return hashlib.sha256(repr((parameters, list(DEFECTS))).encode()).hexdigest()[:10]


def main() -> None:
    parser = argparse.ArgumentParser(description="How often verdicts err, by simulation.")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {DOCUMENT.name}")
    write = parser.parse_args().write
    text = tables()
    print(text)
    if write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
