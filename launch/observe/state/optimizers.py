"""The program's optimizers, with sketches of their gradients and digests of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from launch.common.text import first_names
from launch.contract.records.sketch import Sketch
from launch.contract.spec_ids import digest
from launch.observe.construction import text_of
from launch.observe.state.model_settings import model_settings
from launch.observe.state.other_state import OtherState
from launch.observe.state.parameters import describe_weights, gradient_of, own_part, parameter_names
from launch.train.telemetry.event_log import Recorder
from launch.train.telemetry.parameter_digest import sketch_tensors, write_parameters

_SETTINGS = ("lr", "weight_decay", "momentum", "betas", "eps")
"""The settings of an optimizer that are no choice of its implementation. A graph may need a learning rate that is a tensor."""
_SWITCHES = ("amsgrad", "maximize", "nesterov")


class Optimizers:
    def __init__(self) -> None:
        self.seen: dict[int, torch.optim.Optimizer] = {}
        self._names: dict[int, str] = {}
        """The names of parameters by their ids."""
        self._captured: tuple[Sketch, ...] = ()
        """The parameters after the last capture."""
        self._norm: torch.Tensor | None = None
        """The gradient norm of the optimizers that have stepped in this training step."""
        self._normed: set[int] = set()
        """Their parameters, by id."""
        self._other_state: OtherState | None = None
        self._since = 0
        """The number of steps before it."""
        self._begun: str | None = None
        """The settings with which the optimizers of the first step begin."""
        self._weights: dict[int, str] = {}
        """The parameters with which each optimizer of the first step begins, by its id."""
        self._models: dict[str, str] = {}
        """The settings of the modules after the first step."""

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen[id(optimizer)] = optimizer

    def note_settings(self) -> None:
        """Note the settings with which the optimizers begin, after the first step, before a schedule changes them.

        The modules then still train, and are not evaluated.
        """
        if self._begun is None:
            self._models = model_settings([*_parameters(self.seen.values())])
            groups = (group for optimizer in self.seen.values() for group in optimizer.param_groups)
            self._begun = _each_once(map(_describe_group, groups))

    def describe(self) -> dict[str, str]:
        """Return the settings with which optimizers and modules of the first step begin, and of all optimizers so far the kinds and the
        types of parameters. What is unknown is left out.
        """
        kinds = _each_once(_kind(one, group) for one in self.seen.values() for group in one.param_groups)
        types = _each_once(sorted({str(one.dtype) for one in _parameters(self.seen.values())}))
        weights = _each_once(self._weights.values())
        found = {
            "optimizers": self._begun,
            "optimizer_kinds": kinds,
            "parameters": types,
            "weights": weights,
            **self._models,
        }
        return {name: text for name, text in found.items() if text}

    def sketch(self, optimizer: torch.optim.Optimizer) -> tuple[Sketch, ...]:
        """Return sketches of the gradients of ``optimizer``, before its step. The host waits."""
        parameters = [*_parameters([optimizer])]
        self._name(parameters)
        found = ((self._names[id(one)], gradient_of(one)) for one in parameters)
        gradients = sketch_tensors(
            (name, own_part(one)) for name, one in found if one is not None and not one.is_sparse
        )
        if self._begun is None and id(optimizer) not in self._weights:
            self._weights[id(optimizer)] = describe_weights(parameters)
        return gradients

    def _name(self, parameters: Iterable[torch.Tensor]) -> None:
        if unnamed := [one for one in parameters if id(one) not in self._names]:
            self._names |= parameter_names(unnamed, {*self._names.values()})

    def norm(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return the norm of this rank's own parts of all gradients in this training step, or None if ``optimizer`` has none.

        It steps next. The gradients of others count as they were when these stepped: a program may free them then, or let
        another backward pass change them.
        """
        parameters = [*_parameters([optimizer])]
        ids = {*map(id, parameters)}
        if not ids.isdisjoint(self._normed):
            # It, or one that it replaces, stepped in the training step before.
            self._norm, self._normed = None, set()
        self._normed |= ids
        found = (gradient_of(one) for one in parameters)
        gradients = [own_part(one.coalesce().values() if one.is_sparse else one) for one in found if one is not None]
        if not gradients:
            return None
        norm, scale = torch.nn.utils.get_total_norm(gradients), getattr(optimizer, "grad_scale", None)
        # A fused optimizer divides by the scale of a gradient scaler only in its step.
        norm = total = norm if scale is None else norm / scale
        if self._norm is not None:
            # In float64, so that the order of optimizers shows in no bit of float32.
            total = torch.hypot(self._norm.to(norm.device, torch.float64), norm.double())
        self._norm = total
        return total.to(norm.dtype)

    def own_parameters(self) -> list[torch.Tensor]:
        """Return this rank's own parts of the parameters, which share their memory."""
        return [own_part(one.detach()) for one in _parameters(self.seen.values())]

    def write_parameters(self, recorder: Recorder, *, at_end: bool = False) -> None:
        """Write a digest of this rank's own parts of the parameters, and ``at_end`` how they have changed since the last call."""
        stepped = [*_parameters(self.seen.values())]
        if not stepped:
            recorder.note("no optimizer was seen, so it is unknown whether parameters change")
            return
        self._name(stepped)
        # Optimizers that step in the backward pass may do so in another order if it is captured or compiled.
        optimizers = sorted(self.seen.values(), key=lambda one: self._names.get(identity(one), ""))
        named = [(self._names[id(one)], own_part(one.detach())) for one in _parameters(optimizers)]
        with _noting(recorder, "parameters"):
            self._captured = write_parameters(recorder, named, self._captured if at_end else ())

    def digest_other_state(self, recorder: Recorder, step: int) -> None:
        """Remember the parameters, and the state that no optimizer steps, after ``step`` steps."""
        # A step without a known optimizer may step any parameter.
        if stepped := [*_parameters(self.seen.values())]:
            with _noting(recorder, "buffers"):
                self._other_state, self._since = OtherState(stepped), step

    def digest_middle(self, recorder: Recorder) -> None:
        """Remember which of it has changed until now."""
        if self._other_state:
            with _noting(recorder, "buffers"):
                self._other_state.digest_middle([*_parameters(self.seen.values())])

    def write_changes(self, recorder: Recorder, step: int) -> None:
        """Write what of it has changed."""
        if self._other_state:
            with _noting(recorder, "buffers"):
                self._name(stepped := [*_parameters(self.seen.values())])
                changes = self._other_state.changes(stepped, self._names, step - self._since)
                recorder.write("other_state", changes=changes)


@contextmanager
def _noting(recorder: Recorder, tensors: str) -> Iterator[None]:
    """Note that ``tensors`` have no digest."""
    try:
        yield
    except (RuntimeError, TypeError, NotImplementedError) as error:
        recorder.note(f"{tensors} have no digest, so it is unknown whether they change: {error}")


def identity(optimizer: torch.optim.Optimizer) -> int:
    """Return the id of the first parameter, which an optimizer shares with one that it replaces."""
    for group in optimizer.param_groups:
        if parameters := group["params"]:
            return id(parameters[0])
    return id(optimizer)


def _each_once(texts: Iterable[str]) -> str:
    """Return the first few of different texts, and a digest of all if there are more.

    Their order says nothing: optimizers that step in the backward pass do so in another order if it is captured or compiled.
    """
    found = sorted({*filter(None, texts)})
    shown = first_names(found)
    return shown if shown == "; ".join(found) else f"{shown} ({digest(found)})"


def _kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return the class and the implementation. A graph may need a capturable one, and on GPUs foreach is the default."""
    implementation = (
        "fused" if group.get("fused") else "one parameter at a time" if group.get("foreach") is False else ""
    )
    choices = [name for name in _SWITCHES if group.get(name)]
    return " ".join(filter(None, [type(optimizer).__name__, implementation, *choices]))


def _describe_group(group: Mapping[str, Any]) -> str:
    begun = {**group, "lr": group.get("initial_lr", group.get("lr"))}
    return ", ".join(f"{name} {text}" for name in _SETTINGS if (text := text_of(begun.get(name))))


def _parameters(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Yield each parameter once. An optimizer that replaces another one has parameters of it."""
    every = (one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"])
    return iter({id(one): one for one in every}.values())
