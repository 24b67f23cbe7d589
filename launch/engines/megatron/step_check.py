"""The next step of the megatron engine, by replay and by the same code uncaptured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from launch.contract.records.step_check import LayerResult
from launch.engines.fp8_scales import fp8_scales
from launch.engines.graph_protocol import GraphedStep
from launch.engines.megatron.observed_layers import ObservedLayers
from launch.engines.megatron.observed_router import ObservedRouter
from launch.engines.megatron.random_tracker import generators_of_steps
from launch.engines.megatron.schedule import Schedule, to_scalar
from launch.engines.perturbation import outputs_perturbed
from launch.engines.torch_native.moe.router import RepeatedChoice


@dataclass(eq=False)
class MegatronStep:
    """The next step of the engine.

    ``updates`` is whether a graph contains the optimizer. ``clear_gradients`` prepares the step's passes. ``routers`` is None if
    some choices are hidden.
    """

    schedule: Schedule
    runner: GraphedStep
    optimizer: Any
    updates: bool
    clear_gradients: Callable[[], None]
    routers: Mapping[str, ObservedRouter] | None
    observed_layers: ObservedLayers
    _norm: torch.Tensor = field(init=False, default_factory=lambda: torch.zeros(()))
    _replayed: Mapping[str, tuple[int, ...]] = field(init=False, default_factory=dict)
    """The number of choices of each kind and router in the replay."""
    _counts: Mapping[str, Sequence[torch.Tensor]] = field(init=False, default_factory=dict)
    """The choices that balancing losses counted in the replay."""
    _hides_choices: bool = field(init=False)
    _repeated: Mapping[str, RepeatedChoice] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._hides_choices = self.routers is None

    def state(self) -> list[torch.Tensor]:
        """Return statistics and biases of routers, scales of fp8, and what a captured optimizer updates.

        Gradients are left out, because each pass clears them.
        """
        chunks = self.schedule.chunks
        buffers = [buffer for chunk in chunks for buffer in chunk.module.buffers()]
        scales = fp8_scales(module for chunk in chunks for module in chunk.modules())
        return buffers + scales + (self._optimizer_state() if self.updates else [])

    def generators(self) -> Sequence[torch.Generator]:
        return generators_of_steps(self.schedule.device)

    def replay(self, batch: torch.Tensor) -> None:
        self._run(lambda: self.runner.counted_replay(batch).grad_norm)
        self._replayed = self._count_choices()
        self._counts = {name: tuple(router.counted.made) for name, router in self._observed().items()}

    def recompute(self, batch: torch.Tensor, repeated: Mapping[str, torch.Tensor]) -> None:
        def compute() -> torch.Tensor | None:
            self.schedule.run(batch)
            return self.optimizer.step()[1] if self.updates else None

        with self.runner.uncaptured(), self._repeating(repeated):
            self._run(compute)
        self._hides_choices = self._hides_choices or self._count_choices() != self._replayed

    @contextmanager
    def perturbed(self, toward: float, embedding: bool) -> Iterator[bool]:
        """Perturb the first layer, which only the first pipeline stage has. Yield False if routers hide choices.

        Hidden choices may jump, so no scale of rounding fits them.
        """
        models = (get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in self.schedule.chunks)
        first = [model for model in models if model.pre_process]
        embeddings = [model.embedding for model in first if embedding]
        with outputs_perturbed([*embeddings, *(model.decoder.layers[0] for model in first)], toward):
            yield not self._hides_choices

    def results(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, loss in enumerate(self.schedule.losses):
            yield f"loss of micro-batch {number}", loss
        yield "gradient norm", self._norm
        owned = self._owned_ranges()
        for chunk, model in enumerate(self.schedule.chunks):
            for name, parameter in model.named_parameters():
                if parameter in owned:
                    yield f"gradient of {_label(chunk, name)}", parameter.main_grad.view(-1)[owned[parameter]]
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point():
                    yield f"buffer {_label(chunk, name)}", buffer
        for layer, kept in self.observed_layers.kept.items():
            yield layer.name, kept

    def layers(self) -> Iterable[LayerResult]:
        return self.observed_layers.kept

    def update(self) -> None:
        self.optimizer.prepare_grads()
        for part in self.optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters and not self._clips_in_place:
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, self._norm.reshape(1))
        self.optimizer.step_with_ready_grads()
        self.optimizer.zero_grad()

    def updated(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self.updates:
            return
        kept = {
            main: state for part in self.optimizer.chained_optimizers for main, state in part.optimizer.state.items()
        }
        for label, parameter, weight in self._weights():
            yield f"weight of {label}", weight
            main = getattr(parameter, "main_param", parameter)
            if main is not None and main is not parameter:
                yield f"master weight of {label}", main
            for key, value in kept.get(main, {}).items():
                yield f"{key} of {label}", value.float()

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(()) if self.updates else ((f"weight of {label}", weight) for label, _, weight in self._weights())

    def _weights(self) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
        """Yield a label of each parameter, the parameter, and its elements that are up to date after a step."""
        owned = self._owned_ranges()
        for number, chunk in enumerate(self.schedule.chunks):
            # The next forward pass gathers the other ranks' parts then.
            is_gathered = not chunk.ddp_config.overlap_param_gather
            for name, parameter in chunk.named_parameters():
                part = parameter if is_gathered else parameter.view(-1)[owned.get(parameter, slice(0))]
                yield _label(number, name), parameter, part

    @property
    def _clips_in_place(self) -> bool:
        """Whether the optimizer's gradients are those that ranks reduce, so that clipping changes them."""
        gradients = (parameter.main_grad for chunk in self.schedule.chunks for parameter in chunk.parameters())
        return all(gradient.dtype == torch.float32 for gradient in gradients)

    def _optimizer_state(self) -> list[torch.Tensor]:
        """Return weights, masters, moments and counts of steps. Parts of a distributed optimizer may repeat weights."""
        groups = self.optimizer.param_groups
        weights = [weight for chunk in self.schedule.chunks for weight in chunk.parameters()]
        masters = [master for group in groups for master in group["params"]]
        kept = [
            value
            for part in self.optimizer.chained_optimizers
            for state in part.optimizer.state.values()
            for value in state.values()
        ]
        steps = [group["step"] for group in groups if "step" in group]
        return weights + masters + kept + steps

    def routing(self) -> Mapping[str, torch.Tensor]:
        """Return no choices if some are hidden, because their effects would look like a fault of later routers."""
        if self._hides_choices or self.routers is None:
            return {}
        return {
            f"{name}, call {number}": experts
            for name, router in self.routers.items()
            for number, experts in enumerate(router.routing())
        }

    def scored_choices(self) -> Mapping[str, RepeatedChoice]:
        return self._repeated

    def _run(self, passes: Callable[[], torch.Tensor | None]) -> None:
        """Run ``passes`` from cleared gradients. They return the gradient norm before clipping if they contain the optimizer.

        Otherwise compute the norm as the optimizer does.
        """
        self.clear_gradients()
        with self._keeping():
            norm = passes()
        if norm is None:
            self.optimizer.prepare_grads()
            norm = self.optimizer.get_grad_norm()
        self._norm = to_scalar(norm)
        self.optimizer.zero_grad()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        observed: list[ObservedRouter | ObservedLayers] = [*self._observed().values(), self.observed_layers]
        for each in observed:
            each.forget()
            each.keeps = True
        try:
            yield
        finally:
            for each in observed:
                each.keeps = False

    def _observed(self) -> Mapping[str, ObservedRouter]:
        return self.routers or {}

    def _count_choices(self) -> Mapping[str, tuple[int, ...]]:
        return {name: router.calls for name, router in self._observed().items()}

    @contextmanager
    def _repeating(self, repeated: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Make routers choose ``repeated``. Balancing losses always count the same choices as in the replay."""
        repeated = {} if self._hides_choices else repeated
        self._repeated = {name: RepeatedChoice.of(routing) for name, routing in repeated.items()}
        for name, router in self._observed().items():
            calls = range(self._replayed[name][0]) if repeated else ()
            router.repeated = [self._repeated[f"{name}, call {number}"] for number in calls]
            router.repeated_counts = self._counts[name]
        try:
            yield
        finally:
            for router in self._observed().values():
                router.repeated = router.repeated_counts = ()

    def _owned_ranges(self) -> Mapping[nn.Parameter, slice]:
        """Return the elements of each flattened parameter that this rank updates. Only these have reduced gradients."""
        owned = {}
        for optimizer in self.optimizer.chained_optimizers:
            if not isinstance(optimizer, DistributedOptimizer):
                return {parameter: slice(None) for chunk in self.schedule.chunks for parameter in chunk.parameters()}
            for parameter in optimizer.model_param_gbuf_map:
                part = optimizer._get_model_param_range_map(parameter)["param"]
                owned[parameter] = slice(part.start, part.end)
        return owned


def _label(chunk: int, name: str) -> str:
    return f"{chunk}.{name.replace('module.', '')}"
