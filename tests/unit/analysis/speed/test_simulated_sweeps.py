"""Test the speed verdict on simulated sweeps of known truth, from step times to the verdict."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from analysis.speed.confidence_interval import EvenSplit, families, interval_of
from analysis.speed.speed_verdict import MINIMUM_STEPS, speed_verdict
from benchmarks.verdicts import (
    AUTO_LOOKS,
    BEGIN,
    END,
    FAMILIES,
    RUN_SPREAD,
    SPEED_DOCUMENT,
    SPEED_KINDS,
    TWO_SPEED_LOOKS,
    TWO_SPEEDS,
    auto_digest,
    family_row,
    mean_repeats,
    pair_of,
    pairs_of,
    share,
    speed_of,
    speed_words,
    two_speed_row,
    two_speed_words,
)

SWEEPS = 300
EXHAUSTIVE = pytest.mark.exhaustive


def last_of_ten(true: float, slot: float) -> Counter[str]:
    """Return the verdicts of a graphed cell that runs ten places after the eager run of its repeat. The machine's steps
    take the share ``slot`` longer with each run. Every other repeat runs backwards."""
    random = np.random.default_rng(5)
    found: Counter[str] = Counter()
    for _ in range(SWEEPS):
        pairs = []
        for repeat in range(5):
            eager, graphed = (11 * repeat, 11 * repeat + 10)[:: (-1) ** repeat]
            sides = [(20 * faster * (1 + slot * at), 60.0 * at) for faster, at in ((true, eager), (1, graphed))]
            pairs.append(pair_of(random, sides[0], sides[1]))
        found[speed_of(pairs)] += 1
    return found


def test_a_machine_that_slows_down_steadily_does_not_make_graphs_slow() -> None:
    """Every pair differs by 2%, and so do consecutive eager runs."""
    assert last_of_ten(1.0, slot=0.002)["SLOWER"] <= 0.05 * SWEEPS


def test_drift_that_is_not_there_costs_no_verdict() -> None:
    assert last_of_ten(1.02, slot=0.0)["FASTER"] >= 0.9 * SWEEPS


def verdicts(true: float, repeats: int, kind: str) -> Counter[str]:
    """Return the verdicts of sweeps whose graphed steps are ``true`` times as fast."""
    random = np.random.default_rng(11)
    found: Counter[str] = Counter()
    for _ in range(SWEEPS):
        found[speed_of(pairs_of(random, true, repeats, kind))] += 1
    return found


@pytest.mark.parametrize(
    ("kind", "repeats"),
    [
        *zip(["clean", "hiccups", "noisy", "drift", "settling"], itertools.cycle([2, 4])),
        ("cools over 15", 3),
        ("slow first half", 2),
        ("slow last half", 5),
        ("slow any half, uneven", 3),
        ("slow but for the last tenth, uneven", 2),
        ("busy host", 3),
        *(pytest.param(kind, 4, marks=EXHAUSTIVE) for kind in ("clean", "noisy", "settling")),
        *(pytest.param(kind, 2, marks=EXHAUSTIVE) for kind in ("hiccups", "drift", "cools over 5", "slow any half")),
        pytest.param("cools over 200", 5, marks=EXHAUSTIVE),
        pytest.param("slow middle half", 3, marks=EXHAUSTIVE),
    ],
)
def test_a_step_that_is_not_faster_is_called_faster_as_rarely_as_the_interval_promises(kind: str, repeats: int) -> None:
    """The bound is 2.5% on either side. By chance, 300 sweeps show 5% once in a hundred times."""
    found = verdicts(1.0, repeats, kind)
    assert found["FASTER"] <= 0.05 * SWEEPS
    assert found["SLOWER"] <= 0.05 * SWEEPS


def test_a_slow_state_of_nearly_the_whole_window_is_seldom_called_faster() -> None:
    """Only five of 100 steps are not slow, and the noise is half as large as the slowdown. docs/speed.md has the error
    rates, and what no test can detect."""
    assert verdicts(1.0, 3, "slow but for the last twentieth, uneven")["FASTER"] <= 0.08 * SWEEPS


def test_a_transient_does_not_hide_a_large_speed_up() -> None:
    assert verdicts(1.5, 3, "cools over 15")["FASTER"] >= 0.95 * SWEEPS


def test_a_busy_host_does_not_hide_a_large_speed_up() -> None:
    """Eager steps have a standard deviation of 10%, and neighbours are alike. The line through half a window then says nothing."""
    assert verdicts(2.8, 3, "busy host")["FASTER"] >= 0.95 * SWEEPS


@pytest.mark.parametrize(
    ("cells", "repeats", "lost"),
    [(1, 2, ()), (1, 3, ()), (2, 4, ()), (1, 4, (1, 3)), (1, 10, (3, 5, 7, 9))],
    ids=["2 repeats", "3 repeats", "2 cells", "every reversed pair is lost", "one reversed pair is left"],
)
def test_a_machine_that_is_slower_in_every_other_run_makes_no_cell_slow(
    cells: int, repeats: int, lost: tuple[int, ...]
) -> None:
    """Every other run is 1% slower, while runs differ by half a percent. The pairs of ``lost`` repeats have no speed."""
    found = in_step(cells, repeats, lost)
    assert found["FASTER"] + found["SLOWER"] <= 0.05 * SWEEPS


def in_step(cells: int, repeats: int, lost: tuple[int, ...]) -> Counter[str]:
    random = np.random.default_rng(3)
    names = [(cell, repeat) for repeat in range(repeats) for cell in range(cells + 1)[:: (-1) ** repeat]]
    sides = {name: (20 * (1 + 0.01 * (place % 2)), 60.0 * place) for place, name in enumerate(names)}
    return Counter(
        speed_of([pair_of(random, sides[0, r], sides[1, r]) for r in range(repeats) if r not in lost])
        for _ in range(SWEEPS)
    )


@pytest.mark.parametrize(
    ("true", "repeats", "share"), [(1.1, 3, 0.95), (1.3, 2, 0.95), (1.02, 5, 0.9), (1 / 1.1, 3, 0.95)]
)
def test_a_difference_is_found_the_sooner_the_more_repeats(true: float, repeats: int, share: float) -> None:
    assert verdicts(true, repeats, "clean")["FASTER" if true > 1 else "SLOWER"] >= share * SWEEPS


@pytest.mark.parametrize("true", [1.0, 1.05])
def test_stalls_of_graphed_runs_alone_are_never_taken_for_outliers(true: float) -> None:
    """Every 25th step takes three times as long. This costs 8% in all, more than the 5% that the other steps gain."""
    assert verdicts(true, 3, "stalls")["FASTER"] == 0


# --- all cells of a sweep at once -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """How far eager and graphed runs differ, in units of ``RUN_SPREAD``. In every n-th cell (``every``), ``unsteady``
    replaces ``graphed``."""

    eager: float = 1.0
    graphed: float = 1.0
    unsteady: float = 1.0
    every: int = 1000

    def of(self, cell: int) -> float:
        return RUN_SPREAD * (self.unsteady if cell % self.every == 0 else self.graphed)


def swept(
    noise: Noise, workloads: int, cells: int, repeats: int, true: float = 1.0
) -> list[tuple[list[str], list[str]]]:
    """Return the verdicts on the cells of many sweeps, each cell by itself and all together."""
    random = np.random.default_rng(23)
    spreads = np.array([noise.of(cell) for cell in range(workloads * cells)]).reshape(workloads, cells, 1)
    found = []
    for _ in range(SWEEPS):
        eager = random.normal(0, RUN_SPREAD * noise.eager, (workloads, 1, repeats))
        ratios = true * np.exp(eager - random.normal(0, 1, (workloads, cells, repeats)) * spreads)
        sweep = [(str(place // cells), one) for place, one in enumerate(ratios.reshape(-1, repeats).tolist())]
        alone = [speed_verdict(interval_of(one), MINIMUM_STEPS)[0] for _, one in sweep]
        of_all = [
            speed_verdict(interval_of(one, family), MINIMUM_STEPS)[0]
            for (_, one), family in zip(sweep, families(sweep), strict=True)
        ]
        found.append((alone, of_all))
    return found


def claims(words: list[str]) -> bool:
    return "FASTER" in words or "SLOWER" in words


@pytest.mark.parametrize(
    "noise",
    [Noise(), Noise(eager=10), Noise(unsteady=5), Noise(unsteady=5, every=4), Noise(eager=0.3, unsteady=5, every=2)],
    ids=["alike", "eager runs are less steady", "one cell is", "a fourth of the cells is", "half of them are"],
)
@pytest.mark.parametrize("repeats", [2, 3])
@pytest.mark.parametrize(("workloads", "cells"), [(12, 1), (1, 12)])
def test_a_sweep_of_cells_that_are_not_faster_rarely_calls_one_so(
    noise: Noise, repeats: int, workloads: int, cells: int
) -> None:
    """At most 5% of sweeps do, plus what chance adds once in a hundred times. If cells are judged by themselves, up to
    half do. Two pairs by themselves claim nothing below 1.25."""
    found = swept(noise, workloads, cells, repeats)
    most = 0.05 * SWEEPS + 2.33 * (0.05 * 0.95 * SWEEPS) ** 0.5
    assert repeats == 2 or sum(claims(alone) for alone, _ in found) > most
    assert sum(claims(of_all) for _, of_all in found) <= most


@pytest.mark.parametrize(
    ("true", "repeats", "share"), [(4.0, 2, 1.0), (1.25, 2, 0.95), (1.1, 2, 0.65), (1.05, 3, 0.95)]
)
@pytest.mark.parametrize(("workloads", "cells"), [(20, 1), (1, 20)])
def test_what_is_clearly_faster_stays_so_among_twenty_cells(
    true: float, repeats: int, share: float, workloads: int, cells: int
) -> None:
    found = Counter(word for _, of_all in swept(Noise(), workloads, cells, repeats, true) for word in of_all)
    assert found["FASTER"] >= share * found.total()


def test_one_unsteady_cell_does_not_hide_what_is_obvious() -> None:
    """The runs of the unsteady cell differ by a tenth, twenty times as much as all others."""
    found = Counter(word for _, of_all in swept(Noise(unsteady=20), 20, 1, 2, 4.0) for word in of_all[1:])
    assert found["FASTER"] == found.total()


@pytest.mark.parametrize("chance", [0.1, 0.5])
@pytest.mark.parametrize(
    ("workloads", "cells"),
    [(1, 1), (4, 1), (40, 1), (1, 4), *(pytest.param(*each, marks=EXHAUSTIVE) for each in ((2, 1), (7, 1), (1, 12)))],
)
def test_runs_that_are_either_fast_or_slow_rarely_make_a_cell_faster(workloads: int, cells: int, chance: float) -> None:
    """Some runs are 5% slower. Both of two pairs then agree by chance in up to one of eight cells."""
    wrong = two_speed_words(workloads, cells, chance, RUN_SPREAD / 10, SWEEPS)
    most = 0.05 * SWEEPS + 2.33 * (0.05 * 0.95 * SWEEPS) ** 0.5
    assert all(wrong[name] <= most for name in TWO_SPEED_LOOKS), wrong


def test_what_few_repeats_must_still_find() -> None:
    """Runs differ by 0.3%. One cell needs three repeats below 1.25, and four cells show that runs have one speed."""
    for true, repeats, workloads in ((1.3, 2, 1), (1.05, 3, 1), (1.1, 3, 20), (1.1, 2, 4)):
        words = Counter(
            word for _, of_all in swept(Noise(0.6, 0.6, 0.6), workloads, 1, repeats, true) for word in of_all
        )
        assert words["FASTER"] >= 0.9 * words.total(), (true, repeats, workloads, words)


# --- repeats: auto ----------------------------------------------------------------------------------------------------


def test_the_intervals_of_all_looks_hold_together_as_often_as_one_of_95_percent() -> None:
    """If the looks did not share the error, one of twelve bundles would have a wrong interval."""
    random, missed = np.random.default_rng(0), Counter[int]()
    for _ in range(1000):
        ratios = np.exp(random.normal(0, 0.01, AUTO_LOOKS[-1])).tolist()
        for looks in (1, len(AUTO_LOOKS)):
            intervals = [interval_of(ratios[:repeats], EvenSplit(1, looks)) or (1, 1) for repeats in AUTO_LOOKS]
            missed[looks] += not all(low <= 1 <= high for low, high in intervals)
    assert missed[len(AUTO_LOOKS)] <= 50 < missed[1]


@pytest.mark.parametrize("kind", ["noisy", "slow last half"])
def test_a_sweep_that_is_looked_at_thrice_is_wrongly_decided_no_oftener_than_the_interval_promises(kind: str) -> None:
    """This holds for a wrong verdict at any look, whichever look ends the bundle."""
    assert share(speed_words(1.0, kind, RUN_SPREAD, 150)["auto"], "FASTER", "SLOWER") <= 0.05


def test_what_is_clearly_faster_needs_few_of_the_repeats_and_is_found_as_surely() -> None:
    found = speed_words(1.1, "clean", RUN_SPREAD, 100)
    assert share(found["auto"], "FASTER") >= share(found["6 repeats"], "FASTER") - 0.02
    assert mean_repeats(found["auto"]) <= AUTO_LOOKS[1] + 0.1


def test_the_document_holds_what_the_simulation_of_looks_prints() -> None:
    written = SPEED_DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    assert f"Digest of the simulations' settings: {auto_digest()}.\n" in written, (
        "run python benchmarks/verdicts.py --write"
    )
    for row in (family_row(*FAMILIES[0]), two_speed_row(*TWO_SPEEDS[0])):
        assert f"{row}\n" in written, "run python benchmarks/verdicts.py --write"
    assert all(f"\n| {name} |" in written for name in SPEED_KINDS)
