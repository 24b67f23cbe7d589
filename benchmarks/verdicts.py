"""How often verdicts err: curves with known truth, judged by analysis.verdict.ladder; prints the tables of
docs/verdicts.md.

    python benchmarks/verdicts.py            print them (some minutes)
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from analysis.records.steps import Floats, Metric, Steps
from analysis.verdict.ladder import judge_curves
from analysis.verdict.step_test import TOLERATED
from analysis.verdict.verdict import PASSES, VerdictName
from launch.contract.plan import Margins

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "verdicts.md"
BEGIN, END = "<!-- written by benchmarks/verdicts.py -->", "<!-- end -->"

CAPTURE, COMPARED, LONG = 3, 100, 1000
"""The capture step, and how many steps come after it."""
MARGINS = Margins()
TRIALS, TRIALS_WITHOUT_DEFECT = 30, 100
"""Judgements for each setting."""
CORRELATIONS = (0.0, 0.5, 0.9)
NOISE = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0, 10.0)
NOISE_WITH_DEFECT = (0.1, 0.2, 0.25, 0.3, 0.5)
SIZE = TOLERATED
NOISE_WITH_GROWTH, GROWN = (0.01, 0.05, 0.1), 0.8
"""For defects that grow: the noise, and the size that they reach in the window. They leave the margin soon after it."""
QUANTILE = 0.5
"""The 99.9% quantile of the difference of two runs, in margins, for noise of other shapes."""
SPIKES = (0.002, 0.005, 0.01, 0.02)
"""How probable a spike of 2 to 20 margins is, at each step of each run."""


@dataclass(frozen=True)
class Setting:
    """``noise`` and ``size`` are in margins. ``hit`` is how many of the ``graphed`` runs have the defect. A number as
    ``shape`` is the probability of a spike, beside noise without correlation.

    ``noise`` is the standard deviation of the difference of two runs; for noise of a ``shape`` other than normal, its 99.9%
    quantile.
    """

    kind: str = "none"
    noise: float = 0.1
    correlation: float = 0.9
    size: float = SIZE
    eager: int = 2
    graphed: int = 2
    hit: int = 2
    compared: int = COMPARED
    shape: str | float = "normal"

    @property
    def steps(self) -> int:
        return CAPTURE + 1 + self.compared


# --- curves ---------------------------------------------------------------------------------------------------------


def noise_of(random: np.random.Generator, setting: Setting) -> Floats:
    """Shape (2 metrics, runs, steps), eager runs first, in margins."""
    shape = (2, setting.eager + setting.graphed, setting.steps)
    if isinstance(setting.shape, float):
        spikes = random.uniform(2, 20, shape) * random.choice([-1, 1], shape) * (random.random(shape) < setting.shape)
        return spikes + random.normal(0, setting.noise / math.sqrt(2), shape)
    if setting.shape != "normal":
        return SHAPES[setting.shape](random, shape) * (setting.noise / _quantile_of(setting.shape))
    return _correlated(random, shape, setting.correlation) * (setting.noise / math.sqrt(2))


Shape = tuple[int, int, int]


def _correlated(random: np.random.Generator, shape: Shape, correlation: float) -> Floats:
    """Of variance 1; stationary from the first step on."""
    values = random.normal(size=shape)
    values[..., 1:] *= math.sqrt(1 - correlation**2)
    for step in range(1, shape[-1]):
        values[..., step] += correlation * values[..., step - 1]
    return values


def _larger_at_the_start(random: np.random.Generator, shape: Shape) -> Floats:
    return random.normal(size=shape) * (0.1 + np.exp(-np.arange(shape[-1]) / 10))


def _bursts(random: np.random.Generator, shape: Shape) -> Floats:
    """Ten steps of noise, five times as large, now and then."""
    loud = np.repeat(random.random((*shape[:-1], shape[-1] // 10 + 1)) < 0.1, 10, axis=-1)[..., : shape[-1]]
    return random.normal(size=shape) * np.where(loud, 5.0, 1.0)


def _chaos(random: np.random.Generator, shape: Shape) -> Floats:
    """Runs that leave each other at one rate: their differences double every eight steps, up to the end of the window."""
    left = np.arange(shape[-1])[::-1]
    return random.normal(size=(*shape[:-1], 1)) * np.exp2(-left / 8) + random.normal(0, 0.01, shape)


SHAPES: dict[str, Callable[[np.random.Generator, Shape], Floats]] = {
    "normal, correlation 0.9": lambda random, shape: _correlated(random, shape, 0.9),
    "normal, correlation 0.98": lambda random, shape: _correlated(random, shape, 0.98),
    "uniform": lambda random, shape: random.uniform(-1, 1, shape),
    "Laplace": lambda random, shape: random.laplace(size=shape),
    "Student's t, 3 degrees": lambda random, shape: random.standard_t(3, size=shape),
    "two values": lambda random, shape: random.choice([-1.0, 1.0], shape),
    "bursts": _bursts,
    "larger at the start": _larger_at_the_start,
    "chaos of all runs": _chaos,
}


@lru_cache
def _quantile_of(shape: str) -> float:
    """The 99.9% quantile of the size of the difference of two runs, over the steps of a window."""
    drawn = SHAPES[shape](np.random.default_rng(1), (2, 1000, COMPARED))
    return float(np.quantile(np.abs(drawn[0] - drawn[1]), 0.999))


def curve(noise: Floats) -> Steps:
    """A run with ``noise`` of shape (2 metrics, steps), in margins."""
    steps = noise.shape[1]
    step = np.arange(steps)
    loss = 1.5 + 4 * np.exp(-step / 40) + noise[0] * MARGINS.loss
    norm = (0.8 + 2 * np.exp(-step / 30)) * (1 + noise[1] * MARGINS.grad_norm)
    return Steps(step, loss, norm, np.ones(steps), np.full(steps, 8), np.full(steps, "measure", dtype="U8"))


Defect = Callable[[np.random.Generator, float, Steps], Steps]


def _added(shape: Callable[[np.random.Generator], Floats], metric: Metric = "loss", before: bool = False) -> Defect:
    """A defect of ``shape`` (compared steps,) times its size; ``before``: the steps up to the capture have it too."""

    def defect(random: np.random.Generator, size: float, steps: Steps) -> Steps:
        offset = np.zeros(len(steps))
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


def _onset(random: np.random.Generator) -> Floats:
    """Nothing, and from some step in the last half on a constant."""
    return np.where(np.arange(COMPARED) < random.integers(COMPARED // 2, COMPARED), 0.0, 1.0)


def _late_ramp(random: np.random.Generator) -> Floats:
    return np.maximum(0.0, np.linspace(1 - COMPARED / random.integers(2, COMPARED), 1, COMPARED))


def _oscillation(random: np.random.Generator) -> Floats:
    return np.sin(2 * np.pi * (np.arange(COMPARED) / random.integers(3, COMPARED) + random.random()))


def _exploding(random: np.random.Generator) -> Floats:
    """Nothing for 80 steps, then twice as much every other step."""
    return np.where(np.arange(COMPARED) < 80, 0.0, np.exp2((np.arange(COMPARED) - (COMPARED - 1)) / 2))


def _growing_at_the_end(random: np.random.Generator) -> Floats:
    """In each step so many times the size of the step before."""
    return np.asarray(random.uniform(1.9, 10) ** -np.arange(COMPARED - 1.0, -1, -1))


def _growing_oscillation(random: np.random.Generator) -> Floats:
    """With an amplitude that grows linearly from 0, and a period of 2 to 50 steps."""
    wave = np.sin(2 * np.pi * (np.arange(COMPARED) / random.integers(2, 50) + random.random()))
    return wave / np.abs(wave).max() * np.linspace(0, 1, COMPARED)


def _not_finite(value: float) -> Defect:
    def defect(random: np.random.Generator, size: float, steps: Steps) -> Steps:
        loss = steps.loss.copy()
        loss[CAPTURE + 1 + random.integers(COMPARED)] = value
        return replace(steps, loss=loss)

    return defect


def _truncated(random: np.random.Generator, size: float, steps: Steps) -> Steps:
    return steps.take(slice(int(random.integers(len(steps)))))


def _renumbered(random: np.random.Generator, size: float, steps: Steps) -> Steps:
    return replace(steps, step=steps.step + 1)


DEFECTS: dict[str, Defect] = {
    "constant bias": _added(lambda random: np.ones(COMPARED), before=True),
    "bias after the capture": _added(lambda random: np.ones(COMPARED)),
    "drift from the capture on": _added(lambda random: np.linspace(0, 1, COMPARED)),
    "ramp at the end": _added(_late_ramp),
    "late onset": _added(_onset),
    "late explosion": _added(_exploding),
    "oscillation": _added(_oscillation),
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


GROWING: dict[str, Defect] = {
    "growth in each step": _added(_growing_at_the_end),
    "oscillation that grows": _added(_growing_oscillation),
    "drift towards the margin": DEFECTS["drift from the capture on"],
}
"""Defects that leave the margin only after the window."""


# --- verdicts -------------------------------------------------------------------------------------------------------


def words(setting: Setting, trials: int) -> Counter[VerdictName]:
    """How often each verdict was given."""
    random = np.random.default_rng(list(repr(setting).encode()))
    return Counter(_judged(random, setting) for _ in range(trials))


def _judged(random: np.random.Generator, setting: Setting) -> VerdictName:
    noise = noise_of(random, setting)
    runs = [curve(noise[:, run]) for run in range(setting.eager + setting.graphed)]
    defect, state = (DEFECTS | GROWING).get(setting.kind), random.bit_generator.state
    for run in range(setting.eager, setting.eager + (setting.hit if defect else 0)):
        random.bit_generator.state = state  # a defect of graphs is the same in every run that has it
        runs[run] = defect(random, setting.size, runs[run]) if defect else runs[run]
    eager = {f"eager {run}": steps for run, steps in enumerate(runs[: setting.eager])}
    graphed = {f"graphed {run}": steps for run, steps in enumerate(runs[setting.eager :])}
    return judge_curves(eager, graphed, np.arange(setting.steps), CAPTURE + 1, MARGINS).verdict


def passed(found: Counter[VerdictName]) -> float:
    return sum(found[word] for word in PASSES) / found.total()


# --- tables ---------------------------------------------------------------------------------------------------------


def power_row(noise: float) -> str:
    """No defect: how often it passes, by correlation, with one graphed run, in more steps; how often it is called diverged."""
    settings = [Setting(noise=noise, correlation=correlation) for correlation in CORRELATIONS]
    settings.append(Setting(noise=noise, correlation=0.0, graphed=1, hit=1))
    settings.append(Setting(noise=noise, correlation=0.0, compared=LONG))
    found = [words(setting, TRIALS_WITHOUT_DEFECT) for setting in settings]
    diverged = sum(one["DIVERGED"] for one in found)
    cells = [f"{noise:g}", *(f"{passed(one):.1%}" for one in found), f"{diverged} of {sum(map(Counter.total, found))}"]
    return _row(cells)


def shape_row(shape: str) -> str:
    """No defect, and noise of another shape: how often it passes, with one graphed run, in more steps."""
    settings = [Setting(shape=shape, noise=QUANTILE, graphed=graphed) for graphed in (2, 1)]
    settings.append(Setting(shape=shape, noise=QUANTILE, compared=LONG))
    return _row([shape, *(f"{passed(words(setting, TRIALS_WITHOUT_DEFECT)):.1%}" for setting in settings)])


def defect_row(kind: str) -> str:
    """How often it passes where it must not, over all noise; and what is said of it where noise is a tenth."""
    found = {
        noise: sum((words(setting, TRIALS) for setting in with_defect(kind, noise)), Counter[VerdictName]())
        for noise in NOISE_WITH_DEFECT
    }
    wrong = [sum(one[word] for word in PASSES) for one in found.values()]
    said = [_most(words(Setting(kind, size=size), TRIALS)) for size in (2.0, 4.0)]
    share = f"{max(map(passed, found.values())):.1%}"
    return _row([kind, f"{sum(wrong)} of {sum(map(Counter.total, found.values()))}", share, *said])


def with_defect(kind: str, noise: float) -> list[Setting]:
    """A defect in one of two graphed runs, in both, and in a single one."""
    runs = ((2, 1), (2, 2), (1, 1))
    return [
        Setting(kind, noise, correlation, graphed=graphed, hit=hit)
        for correlation in (CORRELATIONS[0], CORRELATIONS[-1])
        for graphed, hit in runs
    ]


def growing_row(kind: str) -> str:
    """How often it passes, though it will leave the margin: in both graphed runs, one of two, a single one, one of ten."""
    cells = [kind]
    for graphed, hit in ((2, 2), (2, 1), (1, 1), (10, 1)):
        settings = [
            Setting(kind, noise, correlation, GROWN, graphed=graphed, hit=hit)
            for noise in NOISE_WITH_GROWTH
            for correlation in (CORRELATIONS[0], CORRELATIONS[-1])
        ]
        found = sum((words(setting, TRIALS) for setting in settings), Counter[VerdictName]())
        cells.append(f"{sum(found[word] for word in PASSES)} of {found.total()}")
    return _row(cells)


def spike_row(probability: float) -> str:
    """Spikes on both sides: how often it is called diverged, by the number of graphed runs; how often two of them pass."""
    found = [
        words(Setting(noise=0.1, graphed=graphed, shape=probability), 2 * TRIALS_WITHOUT_DEFECT)
        for graphed in (2, 1, 4)
    ]
    return _row(
        [f"{probability:.1%}", *(f"{one['DIVERGED']} of {one.total()}" for one in found), f"{passed(found[0]):.0%}"]
    )


def _most(found: Counter[VerdictName]) -> str:
    return ", ".join(f"{count / found.total():.0%} {word}" for word, count in found.most_common())


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables() -> str:
    power = ["noise, in margins", *(f"EQUIVALENT, correlation {c:g}" for c in CORRELATIONS)]
    power += ["one graphed run", f"{LONG} steps", "wrong DIVERGED"]
    shapes = ["shape of the noise", "EQUIVALENT", "one graphed run", f"{LONG} steps"]
    defects = ["defect", "wrong EQUIVALENT", "most for one noise", "noise 0.1, 2 margins", "noise 0.1, 4 margins"]
    growing = ["defect", "both runs", "one of two", "a single run", "one of ten"]
    spikes = ["spikes at each step", "wrong DIVERGED, two graphed runs", "one graphed run", "four", "EQUIVALENT, two"]
    parts = [
        f"Parameters {digest()}.",
        _table(power, map(power_row, NOISE)),
        _table(shapes, map(shape_row, SHAPES)),
        _table(defects, map(defect_row, DEFECTS)),
        _table(growing, map(growing_row, GROWING)),
        _table(spikes, map(spike_row, SPIKES)),
    ]
    return "\n\n".join(parts)


def _table(header: Sequence[str], rows: Iterable[str]) -> str:
    return "\n".join([_row(header), _row(["---"] * len(header)), *rows])


def digest() -> str:
    """Of all that the tables depend on beside the rules themselves."""
    parameters = (
        CAPTURE,
        COMPARED,
        LONG,
        (MARGINS.loss, MARGINS.grad_norm, MARGINS.mode),
        TRIALS,
        TRIALS_WITHOUT_DEFECT,
        CORRELATIONS,
        NOISE,
        NOISE_WITH_DEFECT,
        NOISE_WITH_GROWTH,
        GROWN,
        SPIKES,
    )
    return hashlib.sha256(repr((parameters, SIZE, QUANTILE, [*DEFECTS, *GROWING, *SHAPES])).encode()).hexdigest()[:10]


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
