"""Simulate how often verdicts err. analysis.verdict.judge_curves judges curves of known truth, and analysis.speed judges step times
of known truth. Print the tables of docs/verdicts.md, and those on ``repeats: auto`` of docs/speed.md.

    python benchmarks/verdicts.py            print them (some minutes)
    python benchmarks/verdicts.py --write    and put them into these documents

Runs share a falling loss and gradient norm. Each has its own noise on both metrics, an autoregressive process of order one. The
difference of two runs has a standard deviation of ``noise`` margins. A defect of ``size`` margins is
added to graphed runs after the capture. Every row has its own seed, so that it can be made again alone.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product, starmap
from pathlib import Path

import numpy as np

from analysis.records.steps import Floats, Steps
from analysis.speed.confidence_interval import EvenSplit, families, interval_of
from analysis.speed.pair_speed import PairSpeed, Timed, pool_pairs
from analysis.speed.speed_verdict import BAND, MINIMUM_STEPS, SpeedVerdict, speed_verdict
from analysis.speed.speedup import cell_speed
from analysis.speed.steady_window import Window, window_of
from analysis.verdict.curve_tests.step_test import TOLERATED
from analysis.verdict.judge_curves import judge_curves
from analysis.verdict.verdict import PASSES, VerdictName
from launch.contract.plan import Margins
from launch.contract.records.step_metrics import Metric
from launch.contract.spec import RunSpec
from orchestrator.recipe.fields import AUTO_LOOKS

DOCS = Path(__file__).resolve().parent.parent / "docs"
DOCUMENT, SPEED_DOCUMENT = DOCS / "verdicts.md", DOCS / "speed.md"
BEGIN, END = "<!-- written by benchmarks/verdicts.py -->", "<!-- end -->"

CAPTURE, COMPARED, LONG = 3, 100, 1000
"""The capture step, the number of compared steps after it, and their number in long runs."""
MARGINS = Margins()
TRIALS, TRIALS_WITHOUT_DEFECT = 30, 100
"""The number of judgements for each setting, with and without a defect."""
CORRELATIONS = (0.0, 0.5, 0.9)
NOISE = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0, 10.0)
NOISE_WITH_DEFECT = (0.1, 0.2, 0.25, 0.3, 0.5)
SIZE = TOLERATED
NOISE_WITH_GROWTH, GROWN = (0.01, 0.05, 0.1), 0.8
"""For defects that grow: the noise, and the size that they reach in the window. They leave the margin soon after it."""
QUANTILE = 0.5
"""The 99.9% quantile of the difference of two runs, in margins, for noise of other shapes."""
SPIKES = (0.002, 0.005, 0.01, 0.02)
"""The probability of a spike of 2 to 20 margins, at each step of each run."""


@dataclass(frozen=True)
class Setting:
    """``noise`` and ``size`` are in margins. ``hit`` is the number of ``graphed`` runs that have the defect. If
    ``shape`` is a number, it is the probability of a spike, in addition to noise without correlation.

    ``noise`` is the standard deviation of the difference of two runs. For noise of a ``shape`` other than normal, it is
    the 99.9% quantile.
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
    """Return noise of shape (2 metrics, runs, steps) in margins, eager runs first."""
    shape = (2, setting.eager + setting.graphed, setting.steps)
    if isinstance(setting.shape, float):
        spikes = random.uniform(2, 20, shape) * random.choice([-1, 1], shape) * (random.random(shape) < setting.shape)
        return spikes + random.normal(0, setting.noise / math.sqrt(2), shape)
    if setting.shape != "normal":
        return SHAPES[setting.shape](random, shape) * (setting.noise / _quantile_of(setting.shape))
    return _correlated(random, shape, setting.correlation) * (setting.noise / math.sqrt(2))


Shape = tuple[int, int, int]


def _correlated(random: np.random.Generator, shape: Shape, correlation: float) -> Floats:
    """Return noise of variance 1, stationary from the first step on."""
    values = random.normal(size=shape)
    values[..., 1:] *= math.sqrt(1 - correlation**2)
    rows = values.reshape(-1, shape[-1]).tolist()  # A loop over NumPy's columns takes eight times as long.
    return np.array([list(accumulate(row, lambda last, new: new + correlation * last)) for row in rows]).reshape(shape)


def _larger_at_the_start(random: np.random.Generator, shape: Shape) -> Floats:
    return random.normal(size=shape) * (0.1 + np.exp(-np.arange(shape[-1]) / 10))


def _bursts(random: np.random.Generator, shape: Shape) -> Floats:
    """Return noise in which sometimes ten steps are five times as large."""
    loud = np.repeat(random.random((*shape[:-1], shape[-1] // 10 + 1)) < 0.1, 10, axis=-1)[..., : shape[-1]]
    return random.normal(size=shape) * np.where(loud, 5.0, 1.0)


def _chaos(random: np.random.Generator, shape: Shape) -> Floats:
    """Return runs that diverge from each other at one rate: their differences double every eight steps, up to the end
    of the window."""
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
    """Return the 99.9% quantile of the size of the difference of two runs, over the steps of a window."""
    drawn = SHAPES[shape](np.random.default_rng(1), (2, 1000, COMPARED))
    return float(np.quantile(np.abs(drawn[0] - drawn[1]), 0.999))


def curve(noise: Floats) -> Steps:
    """Return a run with ``noise`` of shape (2 metrics, steps), in margins."""
    steps = noise.shape[1]
    step = np.arange(steps)
    loss = 1.5 + 4 * np.exp(-step / 40) + noise[0] * MARGINS.loss
    norm = (0.8 + 2 * np.exp(-step / 30)) * (1 + noise[1] * MARGINS.grad_norm)
    return Steps(step, loss, norm, np.ones(steps), np.full(steps, 8), np.full(steps, "measure", dtype="U8"))


Defect = Callable[[np.random.Generator, float, Steps], Steps]


def _added(shape: Callable[[np.random.Generator], Floats], metric: Metric = "loss", before: bool = False) -> Defect:
    """Return a defect that is its size times ``shape``, of shape (compared steps,). With ``before``, the steps up to
    the capture have it too."""

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
    """Return a defect at two neighbouring steps, in opposite directions."""
    shape, at = np.zeros(COMPARED), random.integers(COMPARED - 1)
    shape[at], shape[at + 1] = 1, -1
    return shape


def _onset(random: np.random.Generator) -> Floats:
    """Return a defect that is zero, and constant from some step in the last half on."""
    return np.where(np.arange(COMPARED) < random.integers(COMPARED // 2, COMPARED), 0.0, 1.0)


def _late_ramp(random: np.random.Generator) -> Floats:
    return np.maximum(0.0, np.linspace(1 - COMPARED / random.integers(2, COMPARED), 1, COMPARED))


def _oscillation(random: np.random.Generator) -> Floats:
    return np.sin(2 * np.pi * (np.arange(COMPARED) / random.integers(3, COMPARED) + random.random()))


def _exploding(random: np.random.Generator) -> Floats:
    """Return a defect that is zero for 80 steps, and then doubles every other step."""
    return np.where(np.arange(COMPARED) < 80, 0.0, np.exp2((np.arange(COMPARED) - (COMPARED - 1)) / 2))


def _growing_at_the_end(random: np.random.Generator) -> Floats:
    """Return a defect that grows by a constant factor in each step."""
    return np.asarray(random.uniform(1.9, 10) ** -np.arange(COMPARED - 1.0, -1, -1))


def _growing_oscillation(random: np.random.Generator) -> Floats:
    """Return an oscillation of 2 to 50 steps, whose amplitude grows linearly from 0."""
    wave = np.sin(2 * np.pi * (np.arange(COMPARED) / random.integers(2, 50) + random.random()))
    return wave / np.abs(wave).max() * np.linspace(0, 1, COMPARED)


def _not_finite(value: float) -> Defect:
    def defect(random: np.random.Generator, size: float, steps: Steps) -> Steps:
        loss = steps.loss.copy()
        loss[CAPTURE + 1 + random.integers(COMPARED)] = value
        return replace(steps, loss=loss)

    return defect


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
    "truncation": lambda random, size, steps: steps.take(slice(int(random.integers(len(steps))))),
    "renumbered steps": lambda random, size, steps: replace(steps, step=steps.step + 1),
}


GROWING: dict[str, Defect] = {
    "growth in each step": _added(_growing_at_the_end),
    "oscillation that grows": _added(_growing_oscillation),
    "drift towards the margin": DEFECTS["drift from the capture on"],
}
"""Defects that leave the margin only after the window."""


# --- verdicts -------------------------------------------------------------------------------------------------------


def words(setting: Setting, trials: int) -> Counter[VerdictName]:
    """Return how often each verdict was given."""
    random = np.random.default_rng(list(repr(setting).encode()))
    return Counter(_judge(setting, *_sides(random, setting)) for _ in range(trials))


def _judge(setting: Setting, eager: Sequence[Steps], graphed: Sequence[Steps], looks: int = 1) -> VerdictName:
    named = (
        {f"{side} {run}": steps for run, steps in enumerate(runs)}
        for side, runs in (("eager", eager), ("graphed", graphed))
    )
    return judge_curves(*named, np.arange(setting.steps), CAPTURE + 1, MARGINS, looks=looks).verdict


def _sides(random: np.random.Generator, setting: Setting) -> tuple[list[Steps], list[Steps]]:
    noise = noise_of(random, setting)
    runs = [curve(noise[:, run]) for run in range(setting.eager + setting.graphed)]
    defect, state = (DEFECTS | GROWING).get(setting.kind), random.bit_generator.state
    for run in range(setting.eager, setting.eager + (setting.hit if defect else 0)):
        random.bit_generator.state = state  # A defect of graphs is the same in all runs that have it.
        runs[run] = defect(random, setting.size, runs[run]) if defect else runs[run]
    return runs[: setting.eager], runs[setting.eager :]


def passed(found: Counter[VerdictName]) -> float:
    return sum(found[word] for word in PASSES) / found.total()


# --- tables ---------------------------------------------------------------------------------------------------------


def power_row(noise: float) -> str:
    """Return a row without a defect: how often cells pass by correlation, with one graphed run, and in more steps; and
    how often they are DIVERGED."""
    settings = [Setting(noise=noise, correlation=correlation) for correlation in CORRELATIONS]
    settings.append(Setting(noise=noise, correlation=0.0, graphed=1, hit=1))
    settings.append(Setting(noise=noise, correlation=0.0, compared=LONG))
    found = [words(setting, TRIALS_WITHOUT_DEFECT) for setting in settings]
    diverged = sum(one["DIVERGED"] for one in found)
    cells = [f"{noise:g}", *(f"{passed(one):.1%}" for one in found), f"{diverged} of {sum(map(Counter.total, found))}"]
    return _row(cells)


def shape_row(shape: str) -> str:
    """Return a row without a defect, for noise of another shape: how often cells pass, also with one graphed run and in
    more steps."""
    settings = [Setting(shape=shape, noise=QUANTILE, graphed=graphed) for graphed in (2, 1)]
    settings.append(Setting(shape=shape, noise=QUANTILE, compared=LONG))
    return _row([shape, *(f"{passed(words(setting, TRIALS_WITHOUT_DEFECT)):.1%}" for setting in settings)])


def defect_row(kind: str) -> str:
    """Return a row with a defect: how often cells wrongly pass, over all noise, and the most frequent verdict if noise
    is a tenth."""
    found = {
        noise: sum((words(setting, TRIALS) for setting in with_defect(kind, noise)), Counter[VerdictName]())
        for noise in NOISE_WITH_DEFECT
    }
    wrong = [sum(one[word] for word in PASSES) for one in found.values()]
    said = [_most(words(Setting(kind, size=size), TRIALS)) for size in (2.0, 4.0)]
    share = f"{max(map(passed, found.values())):.1%}"
    return _row([kind, f"{sum(wrong)} of {sum(map(Counter.total, found.values()))}", share, *said])


def with_defect(kind: str, noise: float) -> list[Setting]:
    """Return settings with a defect in one of two graphed runs, in both, and in a single one."""
    runs = ((2, 1), (2, 2), (1, 1))
    return [
        Setting(kind, noise, correlation, graphed=graphed, hit=hit)
        for correlation in (CORRELATIONS[0], CORRELATIONS[-1])
        for graphed, hit in runs
    ]


def growing_row(kind: str) -> str:
    """Return a row with a defect that will leave the margin: how often cells pass if both graphed runs have it, one of
    two, a single one, or one of ten."""
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
    """Return a row with spikes on both sides: how often cells are DIVERGED, by the number of graphed runs, and how
    often cells with two of them pass."""
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
        f"Digest of the simulations' settings: {digest()}.",
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
    """Return a digest of all that the tables depend on, apart from the rules themselves."""
    margins = MARGINS.loss, MARGINS.grad_norm, MARGINS.mode
    drawn = CORRELATIONS, NOISE, NOISE_WITH_DEFECT, NOISE_WITH_GROWTH, GROWN, SPIKES
    parameters = (CAPTURE, COMPARED, LONG, margins, TRIALS, TRIALS_WITHOUT_DEFECT, *drawn)
    return hashlib.sha256(repr((parameters, SIZE, QUANTILE, [*DEFECTS, *GROWING, *SHAPES])).encode()).hexdigest()[:10]


# --- repeats: auto ----------------------------------------------------------------------------------------------------
# Each table judges the same runs with 2 repeats, with all of AUTO_LOOKS' last, and at each look of ``repeats: auto``. A verdict is
# wrong there if it is at any look, whichever ends the bundle.

SWEEPS = 400
STEPS = 100
RUN_SPREAD = 0.005
"""The spread of the runs of one cell: half a percent, as on a GPU host. The steps of a run have a spread of a fifth of
a percent."""
LOOKS_OF = {"2 repeats": (AUTO_LOOKS[0],), "6 repeats": (AUTO_LOOKS[-1],), "auto": AUTO_LOOKS}
TRUE = 20.0
"""The milliseconds of a graphed step."""


def _noise_of_host(random: np.random.Generator) -> Floats:
    """Return numbers of standard deviation 0.1, neighbours with a correlation of 0.8, shape (STEPS,)."""
    noise: Floats = random.normal(0, 0.06, STEPS)
    for place in range(1, STEPS):
        noise[place] += 0.8 * noise[place - 1]
    return noise


def run_of(random: np.random.Generator, mean_ms: float, kind: str, graphed: bool, spread: float = RUN_SPREAD) -> Steps:
    """Return a run whose measured steps take ``mean_ms`` on average. ``kind`` names a change of some of them."""
    level = np.exp(random.normal(0, spread))
    times: Floats = mean_ms * level * (1 + random.normal(0, 0.05 if "uneven" in kind else 0.002, STEPS))
    if kind == "hiccups":
        hit = random.random(STEPS) < 0.01
        times[hit] *= random.uniform(1.5, 10, int(hit.sum()))
    elif kind == "noisy":
        times *= np.exp(random.normal(0, 0.1, STEPS))
    elif kind == "busy host":
        times *= np.exp(_noise_of_host(random) * (0.2 if graphed else 1.0))
    elif kind == "drift":
        times *= 1 + np.linspace(0, 0.03, STEPS)
    elif kind.startswith("cools over ") and not graphed:
        times *= 1 + 0.3 * np.exp(-np.arange(STEPS) / int(kind.rsplit(" ", 1)[1]))
    elif kind == "settling" and not graphed:
        times[:15] *= 1.3
    elif kind.startswith("slow ") and " half" in kind and not graphed:
        share = {"first": 0, "middle": 0.25, "last": 0.5, "any": random.uniform(0, 0.5)}[kind.split(" ")[1]]
        times[int(share * STEPS) : int((share + 0.5) * STEPS)] *= 1.1
    elif kind.startswith("slow but for the last ") and not graphed:
        times[: -STEPS // {"tenth": 10, "twentieth": 20}[kind.split()[5].rstrip(",")]] *= 1.1
    elif kind == "stalls" and graphed:
        times[24::25] *= 3
    zeros = np.zeros(STEPS)
    return Steps(np.arange(STEPS), zeros, zeros, times, np.full(STEPS, 8), np.full(STEPS, "measure"))


def pair_of(
    random: np.random.Generator,
    eager: tuple[float, float],
    graphed: tuple[float, float],
    kind: str = "clean",
    spread: float = RUN_SPREAD,
) -> PairSpeed:
    """Return a pair of runs. Each side is given by the mean of its steps in milliseconds, and by the time at which it
    began."""
    window = window_of(run_of(random, eager[0], kind, False, spread), run_of(random, graphed[0], kind, True, spread))
    assert isinstance(window, Window)
    timed = Timed(window, 8.0, np.zeros(0), 0.0)
    return PairSpeed(eager_began=eager[1], graphed_began=graphed[1], timed=timed)


def pairs_of(
    random: np.random.Generator, true: float, repeats: int, kind: str, spread: float = RUN_SPREAD
) -> list[PairSpeed]:
    """Return pairs in alternating order whose graphed steps are ``true`` times as fast."""
    other = 1.01 if kind == IN_STEP else 1.0
    pairs = []
    for repeat in range(repeats):
        # The machine is slower in every second run, and every other repeat runs backwards.
        slower = (1.0, other)[:: (-1) ** repeat]
        eager = (TRUE * true * slower[0], 100.0 * repeat)
        pairs.append(pair_of(random, eager, (TRUE * slower[1], 100.0 * repeat + 50 * (-1) ** repeat), kind, spread))
    return pairs


def speed_of(pairs: Sequence[PairSpeed], looks: int = 1) -> SpeedVerdict:
    speed = cell_speed(pool_pairs(pairs), RunSpec(), EvenSplit(1, looks))
    assert speed is not None
    return speed.verdict


IN_STEP = "every second run of the machine is 1% slower"
SPEED_KINDS = {
    "nothing": "clean",
    "hiccups": "hiccups",
    "steps 10% apart": "noisy",
    "30% slower at first, recovering with a time constant of 5 steps": "cools over 5",
    "the same with a time constant of 50 steps": "cools over 50",
    "10% slower in the first half of the window": "slow first half",
    "10% slower in the last half": "slow last half",
    "10% slower in a half that begins anywhere, steps 5% apart": "slow any half, uneven",
    IN_STEP: IN_STEP,
}
SPEED_TRUTHS = (*((true, RUN_SPREAD) for true in (1.02, 1.05, 1.1, 1.25, 2.0)), (1.0, 0.001))
"""True speed-ups, and the spread of runs. A step as fast as the eager one should be NEUTRAL."""
FAMILIES = ((12, 0.0), (12, 2.0), (40, 0.0))
"""The numbers of cells that are not faster, and the lognormal sigma of their spreads."""
TWO_SPEEDS = ((1, 1), (2, 1), (3, 1), (6, 1), (12, 1), (60, 1), (1, 4), (1, 12))
"""Numbers of workloads, and of cells in each, whose runs are either fast or slow."""
TWO_SPEED_GAP, TWO_SPEED_CHANCES, TWO_SPEED_SPREADS = 0.05, (0.1, 0.3, 0.5), (0.0002, 0.001, 0.003)
TWO_SPEED_LOOKS = {**{f"{repeats} repeats": (repeats,) for repeats in (2, 3, 4, 5)}, "auto": AUTO_LOOKS}
AUTO_DEFECTS = tuple(kind for kind in DEFECTS if kind not in ("NaN", "Inf", "truncation", "renumbered steps"))
AUTO_NOISE = (0.1, 0.25, 0.5)
AUTO_TRIALS = 12


def seeded(*parts: object) -> np.random.Generator:
    return np.random.default_rng(list(repr(parts).encode()))


def speed_words(true: float, kind: str, spread: float, sweeps: int = SWEEPS) -> dict[str, list[list[str]]]:
    """Return the verdicts at the looks of many sweeps, for each entry of LOOKS_OF."""
    random, found = seeded(true, kind, spread), {name: [] for name in LOOKS_OF}
    for _ in range(sweeps):
        pairs = pairs_of(random, true, AUTO_LOOKS[-1], kind, spread)
        for name, looks in LOOKS_OF.items():
            found[name].append([speed_of(pairs[:repeats], len(looks)) for repeats in looks])
    return found


def share(sweeps: Sequence[Sequence[str]], *wanted: str) -> float:
    """Return the share of sweeps that have one of the ``wanted`` verdicts at any look."""
    return sum(not set(wanted).isdisjoint(each) for each in sweeps) / len(sweeps)


def mean_repeats(sweeps: Sequence[Sequence[str]]) -> float:
    """Return the mean number of repeats with ``auto``, if the first verdict other than INCONCLUSIVE ends the bundle."""
    stops = [next((place for place, word in enumerate(each) if word != "INCONCLUSIVE"), -1) for each in sweeps]
    return sum(AUTO_LOOKS[stop] for stop in stops) / len(stops)


def speed_row(name: str) -> str:
    found = speed_words(1.0, SPEED_KINDS[name], RUN_SPREAD)
    return _row([name, *(f"{share(each, 'FASTER', 'SLOWER'):.1%}" for each in found.values())])


def truth_row(true: float, spread: float) -> str:
    found, right = speed_words(true, "clean", spread), "NEUTRAL" if true == 1 else "FASTER"
    cells = [f"{true:g} times, {spread:.1%} apart", right, *(f"{share(each, right):.0%}" for each in found.values())]
    return _row([*cells, f"{mean_repeats(found['auto']):.1f}"])


def band_row() -> str:
    """Return a row for a step at the edge of NEUTRAL's band, in runs that hardly differ."""
    found = speed_words(1 + BAND, "clean", 0.001).values()
    return _row(
        [f"NEUTRAL, though steps are {1 + BAND:g} times as fast", *(f"{share(each, 'NEUTRAL'):.1%}" for each in found)]
    )


def family_row(cells: int, sigma: float) -> str:
    """Return how often any of this number of cells is wrongly FASTER or SLOWER."""
    random, wrong = seeded(cells, sigma), Counter[str]()
    for _ in range(SWEEPS):
        spreads = RUN_SPREAD * np.exp(random.normal(0, sigma, (cells, 1)))
        drawn = np.exp(random.normal(0, 1, (cells, 1, AUTO_LOOKS[-1])) * spreads[:, None])
        wrong.update(_wrong_looks(drawn, LOOKS_OF))
    alike = "alike" if not sigma else f"whose spreads vary by a lognormal factor, sigma {sigma:g}"
    return _row([f"{cells} cells, {alike}", *(f"{wrong[name] / SWEEPS:.1%}" for name in LOOKS_OF)])


def two_speed_words(workloads: int, cells: int, chance: float, spread: float, sweeps: int = SWEEPS) -> Counter[str]:
    """Return in how many sweeps any cell is wrongly FASTER or SLOWER, if runs are slow with this ``chance``."""
    random, wrong, runs = seeded(workloads, cells, chance, spread), Counter[str](), AUTO_LOOKS[-1]

    def drawn(sides: int) -> Floats:
        slow = TWO_SPEED_GAP * (random.random((workloads, sides, runs)) < chance)
        return np.asarray(slow + random.normal(0, spread, slow.shape))

    for _ in range(sweeps):
        wrong.update(_wrong_looks(np.exp(drawn(1) - drawn(cells)), TWO_SPEED_LOOKS))
    return wrong


def two_speed_row(workloads: int, cells: int) -> str:
    """Return the largest share of wrong sweeps over all chances and spreads."""
    found = [two_speed_words(workloads, cells, *each) for each in product(TWO_SPEED_CHANCES, TWO_SPEED_SPREADS)]
    many = f"{workloads} cells, one workload each" if cells == 1 else f"{cells} cells of one workload"
    most = (max(wrong[name] for wrong in found) / SWEEPS for name in TWO_SPEED_LOOKS)
    return _row(["one cell" if workloads == cells == 1 else many, *(f"{share:.1%}" for share in most)])


def _wrong_looks(drawn: Floats, looks_of: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names in ``looks_of`` with a claim at any look on ratios of shape (workloads, cells, repeats)."""
    cells = [(str(place), ratios) for place, each in enumerate(drawn.tolist()) for ratios in each]
    return [name for name, looks in looks_of.items() if any(_claims(cells, repeats, len(looks)) for repeats in looks)]


def _claims(drawn: Sequence[tuple[str, Sequence[float]]], repeats: int, looks: int) -> bool:
    cells = [(name, ratios[:repeats]) for name, ratios in drawn]
    corrections = families(cells) if looks == 1 else [EvenSplit(len(cells), looks)] * len(cells)
    intervals = [interval_of(one, family) for (_, one), family in zip(cells, corrections, strict=True)]
    return not {"FASTER", "SLOWER"}.isdisjoint(speed_verdict(interval, MINIMUM_STEPS)[0] for interval in intervals)


def loss_words(setting: Setting, trials: int = AUTO_TRIALS) -> dict[str, list[list[str]]]:
    """Return loss verdicts, as speed_words does for speed. With a ``hit`` of 1, every other graphed run has the defect."""
    random, found = seeded(setting), {name: [] for name in LOOKS_OF}
    runs = AUTO_LOOKS[-1]
    whole = replace(setting, eager=runs, graphed=runs, hit=runs if setting.hit > 1 else runs // 2)
    for _ in range(trials):
        eager, graphed = _sides(random, whole)
        if setting.hit == 1:
            graphed = [run for both in zip(graphed[runs // 2 :], graphed[: runs // 2], strict=True) for run in both]
        for name, looks in LOOKS_OF.items():
            found[name].append([_judge(setting, eager[:n], graphed[:n], len(looks)) for n in looks])
    return found


def loss_row(kind: str) -> str:
    """Return a row: how often a defect passes, over all noise, in all graphed runs and in every other one."""
    size, levels = (GROWN, NOISE_WITH_GROWTH) if kind in GROWING else (SIZE, AUTO_NOISE)
    found = {name: [] for name in LOOKS_OF}
    for noise in levels:
        for correlation in (CORRELATIONS[0], CORRELATIONS[-1]):
            for hit in (1, 2):
                for name, each in loss_words(Setting(kind, noise, correlation, size, hit=hit)).items():
                    found[name] += each
    return _row([kind, *(f"{share(each, *PASSES):.1%}" for each in found.values())])


def harmless_row(noise: float, shape: str | float = "normal") -> str:
    """Return a row without a defect: how often cells pass, and how often they are DIVERGED."""
    found = loss_words(Setting(noise=noise, correlation=0.0, shape=shape), 4 * AUTO_TRIALS)
    name = f"noise of {noise:g} margins" + (f", spikes at {shape:.1%} of steps" if isinstance(shape, float) else "")
    passes = [f"{share(each, *PASSES):.0%}" for each in found.values()]
    diverged = [f"{share(each, 'DIVERGED'):.1%}" for each in found.values()]
    return _row([name, *passes, f"{mean_repeats(found['auto']):.1f}", *diverged])


def auto_tables() -> str:
    names = list(LOOKS_OF)
    passes, diverged = ([f"{word}, {name}" for name in names] for word in ("passes", "DIVERGED"))
    harmless = [*map(harmless_row, (0.1, 0.2, 0.25, 1.0)), *(harmless_row(0.1, spikes) for spikes in SPIKES)]
    parts = [
        f"Digest of the simulations' settings: {auto_digest()}.",
        _table(["wrong FASTER or SLOWER: what happens to eager steps", *names], map(speed_row, SPEED_KINDS)),
        _table(["wrong verdict", *names], [band_row(), *starmap(family_row, FAMILIES)]),
        _table(["runs have two speeds", *TWO_SPEED_LOOKS], starmap(two_speed_row, TWO_SPEEDS)),
        _table(["graphed steps, runs", "verdict", *names, "repeats of auto"], starmap(truth_row, SPEED_TRUTHS)),
        _table(["loss that wrongly passes: defect", *names], map(loss_row, (*AUTO_DEFECTS, *GROWING))),
        _table(["no defect", *passes, "repeats of auto", *diverged], harmless),
    ]
    return "\n\n".join(parts)


def auto_digest() -> str:
    """Return a digest of all that these tables depend on, apart from the rules themselves."""
    parameters = (
        (SWEEPS, STEPS, RUN_SPREAD, LOOKS_OF, SPEED_KINDS, SPEED_TRUTHS, FAMILIES),
        (TWO_SPEEDS, TWO_SPEED_GAP, TWO_SPEED_CHANCES, TWO_SPEED_SPREADS, TWO_SPEED_LOOKS),
        (AUTO_DEFECTS, AUTO_NOISE, AUTO_TRIALS, SIZE, [*GROWING], NOISE_WITH_GROWTH, GROWN, CAPTURE, COMPARED),
    )
    return hashlib.sha256(repr(parameters).encode()).hexdigest()[:10]


def write(document: Path, text: str) -> None:
    """Put ``text`` between the marks of ``document``."""
    before, _, rest = document.read_text().partition(BEGIN)
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate how often verdicts err.")
    parser.add_argument(
        "--write", action="store_true", help=f"put the tables into {DOCUMENT.name} and {SPEED_DOCUMENT.name}"
    )
    keep = parser.parse_args().write
    for document, make in ((DOCUMENT, tables), (SPEED_DOCUMENT, auto_tables)):
        text = make()
        print(text)
        if keep:
            write(document, text)


if __name__ == "__main__":
    main()
