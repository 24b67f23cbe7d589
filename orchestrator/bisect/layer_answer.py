"""The answer of `bisect --layers`: the first layer that differs, or why none can be named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.graphs.layer_divergence import DigestDifference, DivergenceLocation
from launch.contract.spec import AXES, RunSpec
from orchestrator.bisect.failure_status import FailureStatus
from orchestrator.bisect.search import Answer, Search, join_names

MOST_NAMED = 4
"""How many layers or ranks a sentence names."""


@dataclass(frozen=True)
class LayerSearch(Search):
    """A search for the first layer that differs. ``trials`` are specs with digests, in the order in which they run."""

    trials: tuple[RunSpec, ...]

    purpose = "layers"
    specs = "runs with digested layers"
    # Digests take time, so a report would show misleading speeds.
    has_report = False


@dataclass(frozen=True)
class Finding:
    """The result of one trial. ``problem`` is why ``location`` is unknown."""

    spec: RunSpec
    status: FailureStatus
    location: DivergenceLocation | None = None
    problem: str = ""

    @property
    def occurred_again(self) -> bool:
        return self.status.status == "fails"

    @property
    def is_deterministic(self) -> bool:
        return self.spec.training.deterministic

    @property
    def first_difference(self) -> DigestDifference | None:
        """The first difference, if the failure occurred again and the difference can be attributed to graphs."""
        return self.location.first if self.occurred_again and self.location and self.location.attributable else None

    @property
    def text(self) -> str:
        mode = "In deterministic mode" if self.is_deterministic else "Without deterministic mode"
        occurred = "it is unknown whether the failure occurred again"
        if self.status.status in ("fails", "passes"):
            occurred = "the failure occurred again" if self.occurred_again else "the failure did not occur again"
        return f"{mode} {occurred} ({self.status.description}). {' '.join(_describe_location(self))}"


@dataclass(frozen=True)
class LayerAnswer(Answer):
    search: LayerSearch
    findings: tuple[Finding, ...]

    @property
    def first_difference(self) -> DigestDifference | None:
        return self.findings[-1].first_difference if self.findings else None

    @property
    def is_found(self) -> bool:
        return self.first_difference is not None

    @property
    def evidence(self) -> Sequence[str]:
        return [finding.text for finding in self.findings]

    @property
    def sentences(self) -> Sequence[str]:
        if first := self.first_difference:
            return [f"First to differ: {_describe_place(first)}{_ranks(first, self.findings[-1].spec)}."]
        return ["No layer can be named.", _explain_no_layer(self.findings)]

    @property
    def json_fields(self) -> Mapping[str, Any]:
        return {
            "first": self.first_difference,
            "trials": [_finding_to_json(finding) for finding in self.findings],
        }


def _explain_no_layer(findings: Sequence[Finding]) -> str:
    for finding in findings:
        if finding.occurred_again and finding.problem:
            return (
                f"Digests are incomplete: {finding.problem}. Delete the folders of the runs named, and the same command "
                "runs them again."
            )
    hidden = [finding for finding in findings if finding.location and finding.location.hidden]
    if any(finding.is_deterministic for finding in hidden):
        return "Eager runs differ as early, in deterministic mode too."
    if hidden:
        passes = any(finding.is_deterministic and finding.status.status == "passes" for finding in findings)
        deterministic = ". In deterministic mode they agree, but the failure does not occur there" if passes else ""
        return f"Eager runs differ as early{deterministic}."
    if any(finding.occurred_again for finding in findings):
        return "The difference is not in what was captured, or it was not digested."
    return "Digests add work to a step, which may hide a failure that depends on timing or memory."


def _describe_location(finding: Finding) -> list[str]:
    """Return where the runs of a trial first differ, and what this means."""
    location = finding.location
    if location is None:
        return [f"The first difference is unknown: {finding.problem}."]
    first, eager = location.first, location.eager
    among_eager = (
        f"The {location.repeats} eager repeats agree bit for bit in the first {location.steps} steps."
        if eager is None
        else f"Two eager repeats differ, first in {_describe_place(eager)}."
    )
    if first is None:
        later = "; the failure begins later" if finding.occurred_again else ""
        return [f"Graphed and eager runs agree bit for bit in the first {location.steps} steps{later}.", among_eager]
    begins = f"Graphed runs differ from eager runs first in {_describe_place(first)}{_ranks(first, finding.spec)}."
    if location.attributable:
        return [begins, _explain(first, location.names), among_eager, _compare_repeats(location)]
    if location.hidden:
        return [begins, among_eager, "Differences from there on cannot be attributed to graphs."]
    early = f"Nothing is captured before step {location.capture_step}, so graphs are not the cause."
    return [begins, early, among_eager]


def _describe_place(found: DigestDifference) -> str:
    step, layers, micro_batch = f"step {found.step}", _layers(found), f"micro-batch {found.micro_batch}"
    if found.what == "outputs":
        return f"{step}, the output of {layers} in the forward pass of {micro_batch}"
    if found.what == "gradients":
        return f"{step}, the gradient of the output of {layers} in the backward pass of {micro_batch}"
    if found.what == "parameter_gradients":
        return f"{step}, the gradients of the parameters of {layers}"
    return f"{step}, the parameters of {layers} after the update"


def _layers(found: DigestDifference) -> str:
    return _join_some([_with_article(layer) for layer in found.layers], "layers")


def _with_article(layer: str) -> str:
    return layer if layer.startswith("decoder layer") else f"the {layer}"


def _join_some(names: Sequence[str], noun: str) -> str:
    if len(names) > MOST_NAMED:
        return f"{len(names)} {noun} (the first is {names[0]})"
    return join_names(names)


def _ranks(found: DigestDifference, spec: RunSpec) -> str:
    layout, world = spec.parallelism, spec.parallelism.world_size
    if world == 1:
        return ""
    if len(found.ranks) == world:
        return f", on all {world} ranks"
    axes = [axis for axis in AXES if axis != "expert_dp" and layout.size(axis) > 1]
    names = [
        f"rank {rank} ({', '.join(f'{axis} {layout.rank_in(axis, rank)}' for axis in axes)})" for rank in found.ranks
    ]
    return f", on {_join_some(names, 'ranks')}"


def _explain(found: DigestDifference, names: Sequence[str]) -> str:
    """Return what is at fault if everything before ``found`` agrees."""
    if found.what == "outputs":
        return f"Everything before agrees, parameters included: {_layers(found)} computes another result from the same input."
    if found.what == "gradients":
        later = names[names.index(found.layers[0]) + 1 :]
        culprit = f"the backward pass of {_with_article(later[0])}" if later else "the start of the backward pass"
        return f"All outputs of the step and the gradients of later layers agree: {culprit} computes another result."
    if found.what == "parameter_gradients":
        return (
            "All outputs of the step and the gradients between layers agree: the sum over micro-batches or ranks differs, "
            "or what a layer adds to it."
        )
    return "All gradients of the step agree: the update computes another result."


def _compare_repeats(location: DivergenceLocation) -> str:
    """Return whether all graphed repeats differ at the same place."""
    if set(location.graphed.values()) == {location.first}:
        return f"Each of the {len(location.graphed)} graphed repeats differs there."
    repeats = [
        f"graphed repeat {repeat} {f'differs first in {_describe_place(found)}' if found else 'agrees'}"
        for repeat, found in sorted(location.graphed.items())
    ]
    return f"Graphed repeats do not all differ there: {'; '.join(repeats)}."


def _finding_to_json(finding: Finding) -> dict[str, Any]:
    location = finding.location
    return {
        "deterministic": finding.is_deterministic,
        "status": finding.status.status,
        "words": finding.text,
        "problem": finding.problem,
        "steps": location and location.steps,
        "eager": location and location.eager,
        "graphed": location and dict(sorted(location.graphed.items())),
    }
