"""The notes of a summary: a few sentences with what the headline does not say, the worst news first."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from analysis.graphs.replay_check import describe_launches
from analysis.limits.speedup_bound import NEAR, QUICKER_IN_A_GRAPH, Bound
from analysis.pairing.pair import Pair
from analysis.report.headline import called
from analysis.speed.confidence_interval import ALPHA
from analysis.speed.speedup import Speed
from analysis.sweep.cell_results import CellResult
from analysis.sweep.ranking import diverging_cells, rank
from analysis.verdict.verdict import VerdictName
from launch.common.flag_difference import flag_differences
from launch.common.grouped import grouped
from launch.common.text import count, first_names, listed, one_line
from launch.contract.outcomes import DAMAGED_OUTCOME_REMEDY, RESULTS_INTACT
from launch.contract.plan import CellState, Margins
from launch.contract.records.step_metrics import METRICS
from launch.contract.spec import RunSpec

DEFAULT_MARGINS = Margins()
MAXIMUM_NAMES = 3
"""The number of cells that a sentence names before it counts the rest."""
MORE_WAITS = 0.5
"""How many more waits a step eager runs must have than graphed ones to be named. One at the end of each of three traced steps is
counted in two of them."""
MESSAGE_LENGTH = 200
"""The most characters of a failed run's message in a sentence."""
BOTTLENECKS: dict[Bound, str] = {
    "device": "The GPU",
    "communication": "Communication, or a wait for another rank,",
    "host": "The host",
    "host in part": "In part the host",
    "gaps": "The time between kernels",
}
NOT_RUN: dict[CellState, str] = {
    "rejected": "rejected by a rule", "not_runnable": "not runnable on this host or cluster"
}  # fmt: skip
_NO_DRIFT = " Eager runs end with equal parameters, so nothing shows how far rounding alone takes them."
_UNCOMPARED = " Only the curves judge them: give both programs the same names of modules."
Detail = Callable[[CellResult], str]


def make_notes(results: Sequence[CellResult], decision: str, margins: Margins) -> Iterator[str]:
    """Yield the notes below the ``decision`` of the headline, the worst news first. Some are empty."""
    ran = [result for result in results if result.cell.state == "run"]
    if not ran:
        yield f"No cell ran: {_count_not_run(results)}."
        return
    yield from _loosened(margins)
    yield _graph_words(ran)
    yield _few_from_graphs(ran)
    yield _compiled_alone(ran)
    yield _other_kernels(ran)
    yield _eager_waits(ran)
    yield from (_bad_news(ran, *problem) for problem in PROBLEMS)
    yield _expected_failures(ran)
    yield from (_bad_news(ran, *doubt) for doubt in DOUBTS)
    yield _name_parameters(
        ran, lambda pair: pair.unjudged_ends, "**Parameters that end far from those of eager runs**", _NO_DRIFT
    )
    yield _name_parameters(
        ran, lambda pair: pair.uncompared, "**Parameters that eager runs do not have by this name**", _UNCOMPARED
    )
    yield _repaired(ran, decision)
    yield _may_be_copies(ran)
    # In mode quick a sweep has too few steps to judge speed.
    if margins.mode != "quick" and (undecided := _undecided(ran)):
        yield _speed_undecided(*undecided)
    yield from _stopped(ran)
    yield _not_ranked(ran)
    yield _fastest(ran, decision)
    yield _nearest(ran)
    yield f"Not run: {left}." if (left := _count_not_run(results)) else ""


def _loosened(margins: Margins) -> Iterator[str]:
    """Say what passes here and would not pass by the usual margins."""
    shown = (f"{margins.loss:g} nats in the loss", f"{margins.grad_norm:.3g} of the gradient norm")
    pairs = zip(METRICS, shown, strict=True)
    wide = [text for metric, text in pairs if margins.of(metric) > DEFAULT_MARGINS.of(metric)]
    yield f"**Wider margins than usual**: {' and '.join(wide)}." if wide else ""
    allowed = listed([f"`{name}`" for name in margins.allow_differences])
    yield f"**Allowed to differ besides graphs**: {allowed}." if allowed else ""


def _bad_news(ran: Sequence[CellResult], noun: str, predicate: str, detail: Detail) -> str:
    """Return "**3 cells PREDICATE**: A1, A2 (detail); B2 (detail).", or "" if no cell has a detail."""
    found = [(text, called(result)) for result in ran if (text := detail(result))]
    names = [f"{listed(cells, MAXIMUM_NAMES)} ({text})" for text, cells in grouped(found).items()]
    return f"**{count(noun, len(found))} {predicate}**: {first_names(names, MAXIMUM_NAMES)}." if found else ""


def _reason_of(word: VerdictName) -> Detail:
    return lambda result: result.verdict.reason if result.verdict and result.verdict.verdict == word else ""


def _doubt(result: CellResult) -> str:
    """Return why an INCONCLUSIVE cell is undecided, what its step checks found, and the cheapest way to decide."""
    reason, checks = _reason_of("INCONCLUSIVE")(result), result.graphs.step_checks
    if not reason or not result.verdict:
        return ""
    if checks and not (checks.fault or checks.undecided):
        reason += "; its step checks found no difference beyond noise"
    fix = next(filter(None, (result.verdict.fix, *result.verdict.alternatives)), "")
    return f"{reason}; fix: {fix}" if fix else reason


def _flaky(result: CellResult) -> str:
    known = result.verdict.reason if result.verdict else ""
    return next((why for why in result.integrity.flaky_attempts[:1] if why not in known), "")


def _unsound(result: CellResult) -> str:
    text = next(iter(result.integrity.unsound_records), "")
    # The text of a damaged outcome has its fix.
    known = not text or "fix: " in text or result.spec.made_elsewhere
    return text if known else f"{text}; fix: {DAMAGED_OUTCOME_REMEDY}"


def _cause(result: CellResult) -> str:
    """Return the message of the first run that did not end as expected, after a colon, shortened; "" without one."""
    ends = (run.attempt.outcome for run in result.runs if run.attempt)
    message = next((end.message for end in ends if end.message and not end.matches(result.cell.expect)), "")
    return f": {textwrap.shorten(one_line(message), MESSAGE_LENGTH)}" if message else ""


def _slowed(result: CellResult) -> str:
    throttling = result.speed.throttling
    return f"by {throttling.own.slowed}" if throttling and throttling.own.slowed else ""


PROBLEMS: tuple[tuple[str, str, Detail], ...] = (
    ("graphed cell", "DIVERGED", _reason_of("DIVERGED")),
    ("graphed cell", "INCOMPARABLE", _reason_of("INCOMPARABLE")),
    (
        "cell",
        "did not end as expected",
        lambda r: f"ended {r.outcome}, expected {r.cell.expect.text}{_cause(r)}" if r.unexpected else "",
    ),
    ("cell", "left unsound records", _unsound),
    ("cell", "ended differently in another attempt", _flaky),
    (
        "cell",
        "left an attempt that is not compared, or has no outcome",
        lambda r: next(iter(r.integrity.uncompared_attempts), ""),
    ),
    ("graphed cell", "UNFINISHED", _reason_of("UNFINISHED")),
    ("graphed cell", "INCONCLUSIVE", _doubt),
)
"""Problems that keep cells from passing, the worst first: noun, predicate, and a function of a cell that returns the detail or
""."""
# Only a passing graphed cell has a speed that may be doubtful. A slow eager cell makes its graphed cells look fast.
DOUBTS: tuple[tuple[str, str, Detail], ...] = (
    ("eager cell", "cannot be as fast as timed", lambda r: "" if r.cell.graphed else r.speed.timing_doubt),
    ("graphed cell", "cannot be as fast as timed", lambda r: r.speed.timing_doubt if r.passes else ""),
    ("cell", "ran on GPUs that were slowed down", _slowed),
)


def _graph_words(ran: Sequence[CellResult]) -> str:
    """Name the words of a user's commands that count as graph settings, because nobody else knows what they do."""
    specs = [(result, result.spec) for result in ran if result.spec.cuda_graph.impl == "command"]
    found = [(result, flag_differences(*_command_words(spec))) for result, spec in specs if not spec.made_elsewhere]
    names = [
        f"{called(result)} ({'; '.join(one.text for one in differing)})" for result, differing in found if differing
    ]
    return _sentence("Counted as graph settings", names)


def _sentence(lead: str, names: Sequence[str], rest: str = "") -> str:
    """Return "LEAD: A1; A2. REST", or "" if there are no names."""
    return f"{lead}: {first_names(names, MAXIMUM_NAMES)}.{rest}" if names else ""


def _few_from_graphs(ran: Sequence[CellResult]) -> str:
    """Name the cells of a user's program whose own graphs launch less than half of a step's kernels. Nobody said how many they should."""
    replays = [(result, result.graphs.replay) for result in ran if result.spec.cuda_graph.impl == "command"]
    names = [
        f"{called(result)} ({describe_launches(replay.launches)})"
        for result, replay in replays
        if replay and replay.launches and replay.launches.mostly_one_by_one
    ]
    why = " The host launches the others one by one, as in eager runs, so the cell says little about graphs of the whole step."
    return _sentence("**Few kernels in graphs**", names, why)


def _compiled_alone(ran: Sequence[CellResult]) -> str:
    """Name the cells of a user's program whose speed-up is also that of compiled code, because eager runs compile nothing."""
    on_gpus = [result for result in ran if result.on_gpu]
    names = [called(result) for result in on_gpus if any(pair.compiled_alone for pair in result.pairs)]
    return _sentence("Compiled (torch.compile) only in graphed runs", names, " Speed-ups are those of both.")


def _other_kernels(ran: Sequence[CellResult]) -> str:
    """Name the cells of a user's program whose kernels take less time than those of eager runs, although none is compiled."""
    own = [r for r in ran if r.spec.engine == "command" and not any(pair.compiled_alone for pair in r.pairs)]
    steps = [(result, result.speed.bound.eager, result.speed.bound.graphed) for result in own if result.speed.bound]
    names = [
        f"{called(result)} ({graphed.computing_ms:.2f} ms a step, {eager.computing_ms:.2f} ms in eager runs)"
        for result, eager, graphed in steps
        if eager and graphed and graphed.computing_ms < eager.computing_ms * (1 - QUICKER_IN_A_GRAPH)
    ]
    why = (
        " Graphs run the same kernels as eager code, so another setting, such as another optimizer, precision or recomputation, "
        "explains that part of the speed-up: make both sides equal."
    )
    return _sentence("**Other kernels in graphed runs**", names, why)


def _eager_waits(ran: Sequence[CellResult]) -> str:
    """Name the cells of a user's program whose host waits for the GPU more often in eager runs, in each pair."""
    own = [result for result in ran if result.spec.engine == "command" and result.on_gpu and result.passes]
    pairs = [(result, [pair.host_waits or (0.0, 0.0) for pair in result.pairs]) for result in own]
    found = [
        (result, min(eager for eager, _ in waits), max(graphed for _, graphed in waits))
        for result, waits in pairs
        if waits
    ]
    # Waits after the last launch of the traced steps are not counted.
    names = [
        f"{called(result)} ({math.ceil(eager)} a step, {math.ceil(graphed)} in graphed runs)"
        for result, eager, graphed in found
        if eager >= graphed + MORE_WAITS
    ]
    why = (
        " Code that waits cannot be captured, so the two sides run other code, such as a `loss.item()` in eager steps alone. That "
        "may explain part of the speed-up: make both sides equal."
    )
    return _sentence("**More waits for the GPU in eager runs**", names, why)


def _command_words(spec: RunSpec) -> tuple[list[str], list[str]]:
    """Return the words of the eager and of the graphed command."""
    shared = [*shlex.split(spec.command.run), *spec.command.flags]
    return [*shared, *spec.command.eager], [*shared, *spec.cuda_graph.arguments]


def _expected_failures(ran: Sequence[CellResult]) -> str:
    met = [r for r in ran if r.cell.expect.outcome not in RESULTS_INTACT and not r.unexpected and not r.unfinished]
    eager = sum(not result.cell.graphed for result in met)
    return f"{count('cell', len(met))} failed as expected{f', {eager} of them eager' * bool(eager)}." if met else ""


def _name_parameters(ran: Sequence[CellResult], parameters_of: Callable[[Pair], str], lead: str, why: str) -> str:
    """Name passing cells, each with the ``parameters_of`` its last pair that has any."""
    passing = [(called(result), parameters_of(pair)) for result in ran if result.passes for pair in result.pairs]
    names = {name: f"{name} ({parameters})" for name, parameters in passing if parameters}
    return _sentence(lead, [*names.values()], why)


def _repaired(ran: Sequence[CellResult], decision: str) -> str:
    """Name the passing cells with a repair, except those of which the ``decision`` says so."""
    repaired = [result for result in ran if result.passes and result.spec.cuda_graph.mend]
    names = [
        f"{called(result)} ({listed(result.spec.cuda_graph.mend)})"
        for result in repaired
        if called(result) not in _named(decision)
    ]
    return _sentence("With a repair that your own job lacks", names)


def _may_be_copies(ran: Sequence[CellResult]) -> str:
    """Name the passing cells with a graphed log that may be a copy of an eager one."""
    verdicts = [(called(result), result.verdict) for result in ran if result.verdict and result.passes]
    copies = [f"{name} ({copied})" for name, verdict in verdicts for copied in verdict.copied_logs]
    return _sentence("Perhaps a copied log instead of a graphed run", copies)


def _named(decision: str) -> set[str]:
    """Return the words of a decision, among them the names of its cells."""
    return set(re.findall(r"`.*?`|\w+", decision))


def _undecided(ran: Sequence[CellResult]) -> tuple[Speed, CellResult, int] | None:
    """Return the undecided cell with the largest measured speed-up, and how many others there are.

    Beside a FASTER cell of the same workload, only those count whose interval excludes 1, because the table does not show why.
    """
    timed = [(result.speed.speedup, result) for result in ran if result.passes and not result.speed.timing_doubt]
    decided = {result.cell.workload_id for speed, result in timed if speed and speed.verdict == "FASTER"}
    unsure = [
        (speed, result)
        for speed, result in timed
        if speed
        and speed.verdict == "INCONCLUSIVE"
        and (result.cell.workload_id not in decided or not (speed.low or 0.0) <= 1.0 <= (speed.high or math.inf))
    ]
    if not unsure:
        return None
    return *max(unsure, key=lambda item: item[0].ratio), len(unsure) - 1


def _speed_undecided(speed: Speed, result: CellResult, others: int) -> str:
    rest = f", and {count('other cell', others)} (section Speed)" if others else ""
    return f"Speed undecided: {called(result)} ({speed.reason}){rest}."


def _stopped(ran: Sequence[CellResult]) -> Iterator[str]:
    """Say where ``repeats: auto`` stopped, by the number of pairs."""
    early = [result for result in ran if result.looks and len(result.cell.repeat_ids) < result.looks[-1]]
    cells = grouped((len(result.cell.repeat_ids), called(result)) for result in early)
    for pairs, names in sorted(cells.items()):
        looks = next(result.looks for result in ran if result.looks)
        yield (
            f"Stopped after {pairs} of up to {looks[-1]} pairs: speed and loss verdicts of {first_names(names, MAXIMUM_NAMES)} "
            f"are settled (sequential rule, error at most {ALPHA:.0%} over {len(looks)} looks)."
        )


def _not_ranked(ran: Sequence[CellResult]) -> str:
    # A graphed cell that passes trains the same model as its eager baseline.
    reasons = {result.cell.cell_id: why for result, why in diverging_cells(ran) if not result.cell.graphed}
    return _bad_news(ran, "eager cell", "left out of the ranking", lambda r: reasons.get(r.cell.cell_id, ""))


def _fastest(ran: Sequence[CellResult], decision: str) -> str:
    """Name the fastest cell of each task with more than two ranked cells, unless the ``decision`` names all of them."""
    rankings, names = [ranking for ranking in rank(ran) if len(ranking.cells) > 2], []
    cells = {result.cell.label: called(result) for result in ran}
    if {cells[ranking.best.label] for ranking in rankings} <= _named(decision):
        return ""
    for ranking in rankings:
        doubt = f", {ranking.not_slower}" if ranking.not_slower else ""
        names.append(f"{cells[ranking.best.label]} (of {len(ranking.cells)} cells{doubt})")
    of = "its task" if len(rankings) == 1 else "their tasks"
    return _sentence(f"Fastest of {of}", names)


def _nearest(ran: Sequence[CellResult]) -> str:
    """Compare the best passing cell with its baseline's computing time, which no graph of the same kernels can beat.

    Communication kernels also wait, so their time is not a bound.
    """
    bounds = [(r.speed.bound, called(r), _of_hardware(r)) for r in ran if r.passes and not _either_slowed(r)]
    cells = [
        (bound.graphed.step_ms / bound.eager.computing_ms, bound.graphed, bound.eager, name, bound.bound, hardware)
        for bound, name, hardware in bounds
        if bound and bound.eager and bound.graphed and bound.bound != "other kernels"
    ]
    if not cells:
        return ""
    times, graphed, eager, name, bottleneck, hardware = min(cells, key=itemgetter(0))
    if times <= 1 + NEAR and bottleneck == "device":
        saved = "Its step time equals the baseline's GPU-busy time, so graphs can save nothing more."
        return f"At the upper bound: {name}. {saved}{hardware}"
    limit = BOTTLENECKS[bottleneck] if bottleneck else "Something unknown"
    return (
        f"Nearest to the upper bound: {name}. Its step takes {graphed.step_ms:.2f} ms, and the GPU computes for "
        f"{eager.computing_ms:.2f} ms of an eager step. {limit} limits it.{hardware}"
    )


def _of_hardware(result: CellResult) -> str:
    share = result.speed.of_hardware
    return "" if share is None else f" The hardware needs {share:.0%} of its step (section The hardware's limit)."


def _either_slowed(result: CellResult) -> bool:
    sides = (result.speed.throttling.own, result.speed.throttling.eager) if result.speed.throttling else ()
    return any(side and side.slowed for side in sides)


def _count_not_run(results: Sequence[CellResult]) -> str:
    counts = Counter(result.cell.state for result in results)
    return " and ".join(f"{count('cell', counts[state])} {why}" for state, why in NOT_RUN.items() if counts[state])
