"""Check what a pair does to parameters and other state after the capture, by digests that each rank recorded.

At a low learning rate, the loss does not show that a graphed optimizer never steps, because losses vary more from batch to
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from analysis.pairing.other_values import doubt_values
from analysis.records.run import Attempt
from analysis.verdict.verdict import Verdict
from launch.common.grouped import grouped
from launch.common.text import count, listed, numbered
from launch.contract.records.state_changes import NOT_STEPPED, StateChanges

_OTHER_STATE = "buffers, or weights that no optimizer steps,"
_CAPTURE = "capture without the optimizer, and check whether a replay updates the parameters that it captured"
_LONGER = "train for more steps, so that losses show what differs, or capture without the optimizer if it is captured"
_REDUCE = "check that each replay reduces gradients over these ranks, or capture without the communication"
_KEEP = (
    "check that each replay updates buffers and averaged weights as eager steps do, and that the warm-up of the capture leaves "
    "them as they were; or update them outside the graph"
)
_AGAIN = "run the pair again, since records of a run are incomplete (its notes may say why)"
_MOST_NAMED = 3
_TRAIN = "set a learning rate above 0 for the steps after the capture (training.learning_rate), or train for more steps"


def check_updates(eager: Attempt, graphed: Attempt, repeats: Sequence[Attempt]) -> Verdict | None:
    """Return DIVERGED if a rank's parameters change only in the eager run, INCOMPARABLE if no rank's parameters change.

    ``repeats`` are all comparable eager runs. Return DIVERGED too if ranks are replicas of each other in eager runs, but not in
    the graphed run, or if other state of a rank changes in all eager runs, but not in the graphed one.
    """
    unchanged = [rank for rank, changes in sorted(graphed.updates.items()) if not changes]
    if stuck := [rank for rank in unchanged if eager.updates.get(rank)]:
        ranks = numbered("rank", stuck)
        reason = f"the graphed optimizer does not step: the parameters of {ranks} are the same after the capture and at the end"
        return Verdict("DIVERGED", f"{reason}, but the eager ones change", _CAPTURE)
    if unchanged and not any((*eager.updates.values(), *graphed.updates.values())):
        return Verdict(
            "INCOMPARABLE", "neither run changes any parameter after the capture, so nothing is learnt", _TRAIN
        )
    return _check_replicas([eager, *repeats], graphed) or _check_other_state([eager, *repeats], graphed)


def _check_replicas(eager: Sequence[Attempt], graphed: Attempt) -> Verdict | None:
    """Return DIVERGED if ranks end with the same parameters in each ``eager`` run, but not in the ``graphed`` one.

    Data-parallel ranks stay equal because they reduce their gradients. Their mean loss hardly shows a replay that does not.
    """
    ranks = sorted(set(graphed.parameters).intersection(*(one.parameters for one in eager)))
    replicas = grouped((tuple(one.parameters[rank][1] for one in eager), rank) for rank in ranks)
    apart = next(
        (ranks for ranks in replicas.values() if len({graphed.parameters[rank][1] for rank in ranks}) > 1), None
    )
    if apart is None:
        return None
    reason = f"{numbered('rank', apart)} end with the same parameters in eager runs, but not in the graphed run"
    return Verdict("DIVERGED", reason, _REDUCE)


def _check_other_state(eager: Sequence[Attempt], graphed: Attempt) -> Verdict | None:
    known = _known_changes(eager, graphed)
    if frozen := [
        rank for rank, (own, found) in known.items() if not own.tensors and all(one.tensors for one in found)
    ]:
        reason = f"{_OTHER_STATE} of {numbered('rank', frozen)} change after the capture in eager runs, but not in the graphed run"
        return Verdict("DIVERGED", reason, _KEEP)
    return None


def _known_changes(
    eager: Sequence[Attempt], graphed: Attempt
) -> dict[int, tuple[StateChanges, tuple[StateChanges, ...]]]:
    """Return the changes of each rank in the graphed run and in all eager runs, where all are known."""
    return {
        rank: (own, tuple(one.other_state[rank] for one in eager))
        for rank, own in sorted(graphed.other_state.items())
        if all(rank in one.other_state for one in eager)
    }


def doubt_updates(eager: Attempt, graphed: Attempt, repeats: Sequence[Attempt]) -> Verdict | None:
    """Return INCONCLUSIVE if fewer tensors change than in any eager run, or if other state ends far from where eager runs end.

    Return it too if only some runs have the records of a rank that show this. Only a verdict that passes may be doubted.
    ``repeats`` are the other comparable eager runs.
    """
    complete = (one for one in repeats if one.outcome.results_intact)
    runs = [("graphed run", graphed), ("eager run", eager), *(("eager run of another repeat", one) for one in complete)]
    ranks_of: Mapping[str, Callable[[Attempt], Set[int]]] = {
        "digests of the parameters": lambda one: one.parameters.keys(),
        f"record of {_OTHER_STATE}": lambda one: one.other_state.keys(),
    }
    for what, known in ranks_of.items():
        ranks = {rank for _, one in runs for rank in known(one)}
        for name, one in runs:
            if lost := sorted(ranks - known(one)):
                reason = f"the {name} has no {what} of {numbered('rank', lost)}, but other runs have"
                return Verdict("INCONCLUSIVE", f"{reason}, so nothing shows that all end with equal ones", _AGAIN)
    for rank, (own, found) in _known_changes([eager, *repeats], graphed).items():
        doubt = _doubt_unchanged(rank, own, found) or _doubt_tensors(rank, own, found) or doubt_values(rank, own, found)
        if doubt:
            return doubt
    return None


def _doubt_unchanged(rank: int, own: StateChanges, eager: Sequence[StateChanges]) -> Verdict | None:
    if len(own.unchanged) <= max(len(one.unchanged) for one in eager):
        return None
    # Names may differ if only one side wraps its modules, so numbers decide.
    names = sorted({*own.unchanged}.difference(*(one.unchanged for one in eager))) or own.unchanged
    reason = (
        f"from the middle of the run on, tensors of rank {rank} stay as they were, but change in eager runs: "
        f"{listed(names, _MOST_NAMED)}. Losses hardly depend on them, so agreeing curves prove little"
    )
    return Verdict("INCONCLUSIVE", reason, _KEEP if all(name.endswith(NOT_STEPPED) for name in names) else _CAPTURE)


def _doubt_tensors(rank: int, own: StateChanges, eager: Sequence[StateChanges]) -> Verdict | None:
    least = min(one.tensors for one in eager)
    if own.tensors >= least:
        return None
    # Which ones change may depend on the data and on rounding, for example in experts that few tokens reach.
    reason = (
        f"{_OTHER_STATE} of rank {rank} change in {count('tensor', least)} or more in eager runs after the "
        f"capture, but in {own.tensors} in the graphed run"
    )
    return Verdict("INCONCLUSIVE", reason, _KEEP)


def check_end(exact: Verdict | None, eager: Attempt, graphed: Attempt, repeats: Sequence[Attempt]) -> Verdict | None:
    """Return ``exact``, or INCONCLUSIVE instead of BITWISE if parameters or other state differ at the end of equal curves.

    A curve does not show the last update, or a parameter that no later loss depends on. If the eager ``repeats`` end with
    different parameters themselves, nothing follows.
    """
    if exact is None or exact.verdict != "BITWISE":
        return exact
    # It says more than that something differs.
    if doubt := doubt_updates(eager, graphed, repeats):
        return replace(doubt, evidence=exact.evidence)
    runs = (graphed, eager, *repeats)
    for what, fix, (own, *others) in (
        ("the parameters", _LONGER, [{rank: last for rank, (_, last) in one.parameters.items()} for one in runs]),
        (_OTHER_STATE, _KEEP, [{rank: changes.digest for rank, changes in one.other_state.items()} for one in runs]),
    ):
        if differing := [
            rank for rank in sorted(own) if _differs(own[rank], {one[rank] for one in others if rank in one})
        ]:
            reason = f"losses and gradient norms are equal bit for bit, but {what} of {numbered('rank', differing)}"
            return Verdict("INCONCLUSIVE", f"{reason} differ after the last step", fix, exact.evidence)
    return exact


def _differs(own: str, eager: Set[str]) -> bool:
    return len(eager) == 1 and own not in eager


def describe_unequal_ends(eager: Sequence[Attempt], graphed: Sequence[Attempt]) -> str:
    """Describe repeats of one side that end with different parameters on some rank; return "" if none do."""
    if _end_apart(eager):
        return "eager repeats end with different parameters, so a kernel is not deterministic, and may cause this"
    if _end_apart(graphed):
        return (
            "graphed repeats end with different parameters, so either a kernel is not deterministic, or the graph races"
        )
    return ""


def _end_apart(repeats: Sequence[Attempt]) -> bool:
    ends = {(rank, last) for one in repeats for rank, (_, last) in one.parameters.items()}
    return len(ends) > len({rank for rank, _ in ends})


def both_update(eager: Attempt, graphed: Attempt, is_checked: bool) -> bool:
    """Return whether both runs are known to change parameters after the capture, and in the same way.

    A captured optimizer may change parameters in a wrong way. Step checks compare what it writes: ``is_checked`` says whether
    those of ``graphed`` took place and found no fault. Without them, only a loss that falls shows that updates are right.
    """
    known = eager.updates.keys() == graphed.updates.keys() != set()
    captured = any("optimizer" in stats.effective_scope for stats in graphed.proofs.values())
    return known and (is_checked or not captured) and all((*eager.updates.values(), *graphed.updates.values()))
