"""Routers of Megatron-Core whose choices a step check observes, and can make them repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_utils import get_capacity

from launch.engines.graph_protocol import replaced
from launch.engines.torch_native.moe.router import RepeatedChoice

DROP_TOKENS = megatron_router.apply_router_token_dropping


@dataclass(eq=False)
class KeptChoices:
    """The choices of a router.

    Attributes:
        made: the choices of the last passes, in the order of calls.
        captured: the choices that graphs write, in the order of capture. A replay overwrites them.
    """

    made: list[torch.Tensor] = field(default_factory=list)
    captured: list[torch.Tensor] = field(default_factory=list)

    def keep(self, choice: torch.Tensor, keeps: bool) -> None:
        if torch.cuda.is_current_stream_capturing():
            self.captured.append(choice)
        elif keeps:
            self.made.append(choice)

    def keep_captured(self, numbers: slice) -> None:
        """Keep the choices ``numbers``, which a graph has just written, if it contains the router."""
        self.made += [choice.clone() for choice in self.captured[numbers]]


@dataclass(eq=False)
class ObservedRouter:
    """Replaces Megatron-Core's RouterReplay of one router.

    Attributes:
        keeps: whether passes keep their choices.
        experts: the experts of tokens, each int64 (T, topk).
        kept: which experts keep which tokens, each bool (T, experts). Empty if the router drops none. Experts may be padded with
            tokens that did not choose them.
        counted: the choices that the balancing loss counts, each bool (T, experts). They may differ from ``experts``, because
            they are made from rounded scores.
        repeated, repeated_counts: the choices and counts of the next calls; if empty, the router makes its own.
    """

    keeps: bool = False
    experts: KeptChoices = field(default_factory=KeptChoices)
    kept: KeptChoices = field(default_factory=KeptChoices)
    counted: KeptChoices = field(default_factory=KeptChoices)
    repeated: Sequence[RepeatedChoice] = ()
    repeated_counts: Sequence[torch.Tensor] = ()

    @property
    def calls(self) -> tuple[int, ...]:
        """The number of choices of each kind that the last passes kept."""
        return tuple(len(choices.made) for choices in self._choices)

    @property
    def _choices(self) -> tuple[KeptChoices, ...]:
        return self.experts, self.kept, self.counted

    def routing(self) -> list[torch.Tensor]:
        """Return the experts of tokens in the last passes, each int64 (T, topk). ``~expert`` is an expert that dropped the token."""
        if not self.kept.made:
            return self.experts.made
        both = zip(self.experts.made, self.kept.made, strict=True)
        return [torch.where(kept.gather(1, experts), experts, ~experts) for experts, kept in both]

    def forget(self) -> None:
        for choices in self._choices:
            choices.made.clear()

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen scores and experts, each (T, topk), for ``scores`` (T, experts). The router calls this."""
        if self.repeated:
            choice = self.repeated[len(self.experts.made)]
            choice.score(scores)
            chosen, experts = scores.gather(1, choice.experts), choice.experts
        else:
            chosen, experts = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.experts.keep(experts, self.keeps)
        return chosen, experts

    def keeping_tokens(self, route: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``route``, the router's choice, that keeps and repeats which tokens experts drop."""

        @wraps(route)
        def kept(*inputs: Any, **named: Any) -> Any:
            with replaced(megatron_router, "apply_router_token_dropping", self._drop):
                return route(*inputs, **named)

        return kept

    def _drop(self, weights: torch.Tensor, chosen: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Drop tokens as Megatron-Core does: weights and chosen experts, each (T, experts), before and after."""
        number = len(self.kept.made)
        if self.repeated:
            routing = self.repeated[number]
            routing.score_dropping(weights, _capacity(weights, settings))
            kept = routing.kept(weights)
            weights, chosen = weights * kept, chosen & kept
        weights, kept = DROP_TOKENS(weights, chosen, **settings)
        self.kept.keep(kept, self.keeps)
        return weights, kept

    def keeping_counts(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``apply``, which adds the balancing loss, that keeps and repeats its counts."""

        def kept(weights: torch.Tensor, scores: torch.Tensor, counted: torch.Tensor, **named: Any) -> Any:
            number = len(self.counted.made)
            counted = self.repeated_counts[number] if number < len(self.repeated_counts) else counted
            self.counted.keep(counted, self.keeps)
            return apply(weights, scores, counted, **named)

        return kept

    def keeping_captured(self, numbers: slice, replay: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``replay`` that keeps the choices ``numbers``, those of its graph. Attributes stay."""

        @wraps(replay)
        def kept(*inputs: Any, **named: Any) -> Any:
            outputs = replay(*inputs, **named)
            if self.keeps:
                for choices in self._choices:
                    choices.keep_captured(numbers)
            return outputs

        return kept


def _capacity(weights: torch.Tensor, settings: Mapping[str, Any]) -> int:
    """Return how many tokens an expert keeps at most, for ``weights`` (T, experts)."""
    tokens, experts = weights.shape
    capacity: int = get_capacity(tokens * settings["router_topk"], experts, settings["capacity_factor"])
    return capacity


def observe_routers(chunks: Iterable[Any], config: Any) -> Mapping[str, ObservedRouter] | None:
    """Observe the routers of ``chunks``, by name.

    Return None if their choices are hidden in a fused kernel.
    """
    modules = (module for chunk in chunks for module in chunk.modules())
    routers = {
        f"router of layer {each.layer_number}": each for each in modules if isinstance(each, megatron_router.TopKRouter)
    }
    if routers and config.moe_router_fusion:
        return None
    observed = {name: ObservedRouter() for name in routers}
    for name, router in routers.items():
        router.router_replay = observed[name]
        router.routing = observed[name].keeping_tokens(router.routing)
        router._apply_aux_loss = observed[name].keeping_counts(router._apply_aux_loss)
    return observed


def routers_of(layer: torch.nn.Module) -> list[ObservedRouter]:
    replays = (getattr(module, "router_replay", None) for module in layer.modules())
    return [replay for replay in replays if isinstance(replay, ObservedRouter)]
