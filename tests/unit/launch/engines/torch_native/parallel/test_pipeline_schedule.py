"""Test pipeline schedules: the order of each rank, all ranks together, and the placement of layers."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.contract.pipeline_stages import layers_of
from launch.engines.torch_native.parallel.pipeline_schedule import (
    SENDS_IN_FLIGHT,
    Action,
    Edge,
    Schedule,
    actions,
    edges,
    in_flight_by_chunk,
)


@dataclass(frozen=True)
class Plan:
    schedule: Schedule
    stages: int
    chunks: int
    micro_batches: int

    def of(self, stage: int) -> tuple[Action, ...]:
        return actions(self.schedule, stage, self.stages, self.chunks, self.micro_batches)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    schedule: Schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    if schedule != "interleaved":
        return Plan(schedule, draw(st.integers(1, 6)), 1, draw(st.integers(1, 12)))
    stages = draw(st.integers(2, 6))
    return Plan(schedule, stages, draw(st.integers(2, 4)), stages * draw(st.integers(1, 4)))


@dataclass
class Simulation:
    """Simulate all ranks of a pipeline. A receive blocks. A send blocks while more than ``window`` tensors on its edge
    have not been taken. Tensors on an edge arrive in the order in which they were sent."""

    plan: Plan
    window: int | None
    seconds: dict[int, int]
    """The duration of a forward pass through each virtual stage. A backward pass takes twice as long."""
    under_way: dict[Edge, deque[tuple[object, int]]] = field(default_factory=lambda: defaultdict(deque))
    taken: dict[Edge, list[int]] = field(default_factory=lambda: defaultdict(list))
    clocks: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    events: int = 0

    def run(self) -> int:
        """Return when the last rank is done."""
        ranks = [self._rank(stage) for stage in range(self.plan.stages)]
        while ranks:
            before = self.events
            ranks = [rank for rank in ranks if next(rank, "done") != "done"]
            assert self.events > before or not ranks, "deadlock"
        assert not any(self.under_way.values()), "sent, and never received"
        return max(self.clocks.values())

    def _rank(self, stage: int) -> Iterator[str]:
        """Run as far as possible, then report that the rank is blocked."""
        sent: Counter[Edge] = Counter()
        own = edges(tuple(range(self.plan.stages)), self.plan.chunks)
        incoming = {edge.kind: edge for edge in own if edge.destination == stage}
        outgoing = {edge.kind: edge for edge in own if edge.source == stage}
        for action in self.plan.of(stage):
            virtual = action.chunk * self.plan.stages + stage
            step = 1 if action.kind == "forward" else -1
            if action.receives:
                edge = incoming[action.kind]
                while not self.under_way[edge]:
                    yield "blocked"
                tensor, at = self.under_way[edge].popleft()
                assert tensor == (virtual, action.microbatch), "not in the order in which they are sent"
                self.clocks[stage] = max(self.clocks[stage], at)
                self.taken[edge].append(self.clocks[stage])
            self.clocks[stage] += self.seconds[virtual] * (1 if action.kind == "forward" else 2)
            self.events += 1
            if action.sends:
                edge = outgoing[action.kind]
                self.under_way[edge].append(((virtual + step, action.microbatch), self.clocks[stage]))
                sent[edge] += 1
                if self.window is not None and sent[edge] > self.window:
                    while len(self.taken[edge]) < sent[edge] - self.window:
                        yield "blocked"
                    self.clocks[stage] = max(self.clocks[stage], self.taken[edge][sent[edge] - self.window - 1])


def simulate(plan: Plan, window: int | None, seconds: list[int] | None = None) -> int:
    return Simulation(plan, window, dict(enumerate(seconds or [1] * (plan.stages * plan.chunks)))).run()


@given(plans())
def test_a_rank_runs_each_forward_once_and_later_its_backward(plan: Plan) -> None:
    every = {(chunk, mb) for chunk in range(plan.chunks) for mb in range(plan.micro_batches)}
    for stage in range(plan.stages):
        order = [(action.kind, action.chunk, action.microbatch) for action in plan.of(stage)]
        assert Counter(order) == Counter((kind, *one) for kind in ("forward", "backward") for one in every)
        assert all(order.index(("forward", *one)) < order.index(("backward", *one)) for one in every)


@given(plans(), st.data())
def test_ranks_never_wait_for_each_other_and_edges_keep_their_order(plan: Plan, data: st.DataObject) -> None:
    stages = plan.stages * plan.chunks
    seconds = data.draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages), label="seconds")
    simulate(plan, None, seconds)
    simulate(plan, SENDS_IN_FLIGHT, seconds)


@given(plans())
def test_an_even_pipeline_loses_nothing_to_the_bound_on_sends(plan: Plan) -> None:
    assert simulate(plan, SENDS_IN_FLIGHT) == simulate(plan, None)


@given(plans())
def test_idle_time_is_that_of_the_papers(plan: Plan) -> None:
    """The papers give (stages - 1) forward and backward passes of a virtual stage: Narayanan et al. 2021, section 2.2."""
    work = plan.chunks * plan.micro_batches
    assert simulate(plan, None) == 3 * (work + plan.stages - 1)


def most_in_flight(order: tuple[Action, ...]) -> int:
    flying = most = 0
    for action in order:
        flying += 1 if action.kind == "forward" else -1
        most = max(most, flying)
    return most


@given(st.integers(1, 6), st.integers(1, 12))
def test_micro_batches_in_flight(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        one_f_one_b = Plan("1f1b", stages, 1, micro_batches).of(stage)
        assert most_in_flight(one_f_one_b) == min(stages - stage, micro_batches)
        gpipe = Plan("gpipe", stages, 1, micro_batches).of(stage)
        assert most_in_flight(gpipe) == (micro_batches if stages > 1 else 1)


def written(order: tuple[Action, ...]) -> str:
    """Return actions as texts: F or B, chunk, micro-batch."""
    return " ".join(f"{action.kind[0].upper()}{action.chunk}{action.microbatch}" for action in order)


@pytest.mark.parametrize(
    ("plan", "stage", "order"),
    [
        (Plan("gpipe", 2, 1, 3), 0, "F00 F01 F02 B00 B01 B02"),
        (Plan("1f1b", 3, 1, 4), 0, "F00 F01 F02 B00 F03 B01 B02 B03"),
        (Plan("1f1b", 3, 1, 4), 2, "F00 B00 F01 B01 F02 B02 F03 B03"),
        (
            Plan("interleaved", 2, 2, 4),
            0,
            "F00 F01 F10 F11 F02 B10 F03 B11 F12 B00 F13 B01 B12 B13 B02 B03",
        ),
        (
            Plan("interleaved", 2, 2, 4),
            1,
            "F00 F01 F10 B10 F11 B11 F02 B00 F03 B01 F12 B12 F13 B13 B02 B03",
        ),
        (
            Plan("interleaved", 4, 2, 4),
            0,
            "F00 F01 F02 F03 F10 F11 F12 F13 B10 B11 B12 B13 B00 B01 B02 B03",
        ),
        (
            Plan("interleaved", 4, 2, 4),
            2,
            "F00 F01 F02 F03 F10 F11 F12 B10 F13 B11 B12 B13 B00 B01 B02 B03",
        ),
    ],
)
def test_orders_written_out(plan: Plan, stage: int, order: str) -> None:
    assert written(plan.of(stage)) == order


def test_interleaved_warm_up_is_megatrons() -> None:
    leading = [written(Plan("interleaved", 4, 2, 8).of(stage)).index("B") // 4 for stage in range(4)]
    assert leading == [10 + 1, 8 + 1, 6 + 1, 4 + 1]  # The steady phase begins with a forward pass.


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "sizes"),
    [
        (8, 4, 1, [2, 2, 2, 2]),
        (5, 1, 1, [5]),
        (3, 2, 1, [2, 1]),
        (9, 4, 1, [2, 2, 3, 2]),
        (10, 4, 1, [2, 3, 3, 2]),
        (11, 4, 1, [3, 3, 3, 2]),
        (6, 2, 2, [1, 2, 2, 1]),
    ],
)
def test_layers_of_stages(layers: int, stages: int, chunks: int, sizes: list[int]) -> None:
    assert [len(held) for held in layers_of(layers, stages, chunks)] == sizes


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40))
def test_layers_are_all_placed_in_order_and_evenly(stages: int, chunks: int, more: int) -> None:
    layers = stages * chunks + more
    held = layers_of(layers, stages, chunks)
    assert [layer for part in held for layer in part] == list(range(layers))
    assert min(map(len, held)) == len(held[-1]) and max(map(len, held)) - len(held[-1]) <= 1
    ranks = [sum(len(part) for part in held[stage::stages]) for stage in range(stages)]
    assert max(ranks) - min(ranks) <= 1
    assert min(ranks) == ranks[-1]


def test_too_few_layers_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"num_layers=7 .* pp=4 \* vpp=2 = 8 virtual stages"):
        layers_of(7, 4, 2)


@given(plans())
def test_as_many_buffers_as_are_in_flight_serve_all_micro_batches_in_turn(plan: Plan) -> None:
    """With n buffers, micro-batch m uses buffer m modulo n, from its forward to its backward pass. One buffer fewer
    would not suffice."""
    for stage in range(plan.stages):
        most = in_flight_by_chunk(plan.of(stage))
        alive: dict[int, set[int]] = defaultdict(set)
        peaks = [0] * len(most)
        for action in plan.of(stage):
            if action.kind == "forward":
                used = {micro_batch % most[action.chunk] for micro_batch in alive[action.chunk]}
                assert action.microbatch % most[action.chunk] not in used
                alive[action.chunk].add(action.microbatch)
                peaks[action.chunk] = max(peaks[action.chunk], len(alive[action.chunk]))
            else:
                alive[action.chunk].remove(action.microbatch)
        assert peaks == most
