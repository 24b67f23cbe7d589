"""The next step of the torch_native engine, by replay and by the same code uncaptured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from launch.contract.records.step_check import LayerResult
from launch.engines.graph_protocol import GraphedStep, replaced
from launch.engines.perturbation import outputs_perturbed
from launch.engines.random_states import default_generators
from launch.engines.torch_native.compiled_model import CompiledModel
from launch.engines.torch_native.moe.router import RepeatedChoice
from launch.engines.torch_native.optim.piece import Piece
from launch.engines.torch_native.train_step import TrainStep

COMPARED_BYTES = 2**34
"""If the state of a captured optimizer has more bytes than this, each check of a run compares another share of it."""


def share_of(pieces: Sequence[Piece], number: int, checks: int) -> Sequence[Piece]:
    """Return the pieces that check ``number`` compares, counted from 0. The ``checks`` of a run together compare all pieces."""
    size = sum(tensor.nbytes for piece in pieces for tensor in piece.state())
    shares = max(min(checks, math.ceil(size / COMPARED_BYTES)), 1)
    return pieces[number % shares :: shares]


@dataclass(eq=False)
class TorchNativeStep:
    """The next step of the engine.

    ``compared`` is the part of the optimizer that the check compares; None if the graph does not contain the optimizer. Passes
    and replays update no other part, so the check does not have to copy it.
    """

    train_step: TrainStep
    runner: GraphedStep
    compared: Sequence[Piece] | None
    _is_compiled: bool = field(init=False)
    """Whether the uncaptured code is compiled as a whole, so that hooks and repeated choices cannot reach into it."""
    _norm: torch.Tensor = field(init=False, default_factory=lambda: torch.zeros(()))
    _repeated: Mapping[str, RepeatedChoice] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        with self.runner.uncaptured():
            self._is_compiled = isinstance(self.train_step.model, CompiledModel)

    def state(self) -> list[torch.Tensor]:
        """Return scales of fp8, and weights, moments and expert biases if the graph updates them.

        Each step clears its gradients itself.
        """
        step = self.train_step
        modules = [module for chunk in step.chunks for module in chunk.modules()]
        scales = step.chunks[0].context.products.state(modules)
        if self.compared is None:
            return scales
        routers = (router for chunk in step.chunks for router in chunk.routers())
        biases = [router.expert_bias for router in routers if router.expert_bias is not None]
        compared = [tensor for piece in self.compared for tensor in piece.state()]
        return [*scales, *compared, *step.main.gathered_weights(), *step.optimizer.step_counts(), *biases]

    def generators(self) -> Sequence[torch.Generator]:
        return default_generators(self.train_step.mesh.device)

    def replay(self, batch: torch.Tensor) -> None:
        with self._holding_others(), self._keeping_routing():
            norm = self.runner.counted_replay(batch).grad_norm
        self._norm = self.train_step.optimizer.norm() if norm is None else norm

    def recompute(self, batch: torch.Tensor, repeated: Mapping[str, torch.Tensor]) -> None:
        step = self.train_step
        with self.runner.uncaptured(), self._holding_others(), self._keeping_routing(), self._repeating(repeated):
            step.forward_backward(batch)
            self._norm = step.optimizer.norm() if self.compared is None else step.update()

    @contextmanager
    def perturbed(self, toward: float, embedding: bool) -> Iterator[bool]:
        """Perturb the first layer, which only the first pipeline stage has.

        Yield False if the uncaptured code is compiled whole, because it then runs no hooks, or if routers hide choices.
        """
        first = [chunk for chunk in self.train_step.chunks if chunk.is_first]
        embeddings = [chunk.embedding for chunk in first if embedding]
        with outputs_perturbed([*embeddings, *(chunk.named_layers()["0"] for chunk in first)], toward):
            yield not self._is_compiled and not self._hides_choices

    def results(self) -> Iterator[tuple[str, torch.Tensor]]:
        step = self.train_step
        for number, loss in enumerate(step.microbatches.losses):
            yield f"loss of micro-batch {number}", loss
        yield "gradient norm", self._norm
        for name, gradient in self._gradients():
            yield f"gradient of {name}", gradient
        if step.chunks[0].context.model.moe_router_enable_expert_bias:
            for chunk, tokens in step.microbatches.tokens_per_expert.items():
                yield f"tokens of each expert, chunk {chunk}", tokens.to(step.main.precision)
        for layer, kept in step.microbatches.layers.kept.items():
            yield layer.name, kept

    def layers(self) -> Iterable[LayerResult]:
        return self.train_step.microbatches.layers.kept

    def update(self) -> None:
        with self._holding_others():
            self.train_step.optimizer.update_again(self._norm)

    def updated(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.compared is not None:
            for number, steps in enumerate(self.train_step.optimizer.step_counts()):
                yield f"step count {number}", steps
            for piece in self.compared:
                yield from piece.named_state()

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.compared is None:
            parameters = nn.ModuleList(self.train_step.chunks).named_parameters()
            yield from ((f"weight of {name}", parameter) for name, parameter in parameters)
        else:
            others = (piece for piece in self.train_step.optimizer.pieces if piece not in self.compared)
            yield from (named for piece in others for named in piece.named_state())

    def routing(self) -> Mapping[str, torch.Tensor]:
        routing = self.train_step.microbatches.routing
        return {
            name: experts
            for place in routing
            for name, experts in zip(self._names(*place), routing[place], strict=True)
        }

    def scored_choices(self) -> Mapping[str, RepeatedChoice]:
        return self._repeated

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, shard.gradients[place]) for name, shard, place in self.train_step.main.owned())

    def _names(self, chunk: int, microbatch: int) -> list[str]:
        """Return a name for each router of ``chunk`` in ``microbatch``."""
        layers = self.train_step.chunks[chunk].named_layers()
        return [
            f"router of layer {name}, micro-batch {microbatch}" for name, layer in layers.items() if layer.has_experts
        ]

    @property
    def _hides_choices(self) -> bool:
        """Whether rounding may change choices other than those that are kept and repeated.

        Two choices are hidden: which tokens exceed the capacity if all ranks gather all tokens, and the choice without expert
        bias that a balancing loss counts.
        """
        context = self.train_step.chunks[0].context
        model, ep = context.model, context.ep
        biased = model.moe_router_enable_expert_bias and model.moe_aux_loss_coeff != 0
        gathers = context.dispatcher == "allgather" and ep.size > 1
        return biased or (gathers and model.moe_expert_capacity_factor is not None)

    def _holding_others(self) -> AbstractContextManager[None]:
        return nullcontext() if self.compared is None else self.train_step.optimizer.updating_only(self.compared)

    def _keeping_routing(self) -> AbstractContextManager[None]:
        return replaced(self.train_step, "keep_routing", True)

    @contextmanager
    def _repeating(self, repeated: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Make routers choose ``repeated``. Compiled code cannot repeat choices and makes its own."""
        step = self.train_step
        self._repeated = {} if self._is_compiled else {name: RepeatedChoice.of(each) for name, each in repeated.items()}
        if self._repeated:
            places = step.microbatches.routing
            step.repeated = {place: [self._repeated[name] for name in self._names(*place)] for place in places}
        try:
            yield
        finally:
            step.repeated = {}
            for chunk in step.chunks:
                for router in chunk.routers():
                    router.repeated = None
