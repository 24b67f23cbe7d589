"""Routers of Megatron-Core whose choices a step check observes, and can make them repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from launch.engines.torch_native.moe.router import RepeatedChoice


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

    def keep_captured(self, number: int) -> None:
        """Keep the choice that graph ``number`` has just written, if the graph contains the router."""
        self.made += [choice.clone() for choice in self.captured[number : number + 1]]


@dataclass(eq=False)
class ObservedRouter:
    """Replaces Megatron-Core's RouterReplay of one router.

    Attributes:
        keeps: whether passes keep their choices.
        experts: the experts of tokens, each int64 (T, topk).
        counted: the choices that the balancing loss counts, each bool (T, experts). They may differ from ``experts``, because
            they are made from rounded scores.
        repeated, repeated_counts: the choices and counts of the next calls; if empty, the router makes its own.
    """

    keeps: bool = False
    experts: KeptChoices = field(default_factory=KeptChoices)
    counted: KeptChoices = field(default_factory=KeptChoices)
    repeated: Sequence[RepeatedChoice] = ()
    repeated_counts: Sequence[torch.Tensor] = ()

    @property
    def calls(self) -> tuple[int, int]:
        """The number of choices and counts that the last passes kept."""
        return len(self.experts.made), len(self.counted.made)

    def forget(self) -> None:
        self.experts.made.clear()
        self.counted.made.clear()

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

    def keeping_counts(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``apply``, which adds the balancing loss, that keeps and repeats its counts."""

        def kept(weights: torch.Tensor, scores: torch.Tensor, counted: torch.Tensor, **named: Any) -> Any:
            number = len(self.counted.made)
            counted = self.repeated_counts[number] if number < len(self.repeated_counts) else counted
            self.counted.keep(counted, self.keeps)
            return apply(weights, scores, counted, **named)

        return kept

    def keeping_captured(self, number: int, replay: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``replay``, of a layer's graph ``number``, that keeps the graph's choices. Attributes stay."""

        @wraps(replay)
        def kept(*inputs: Any, **named: Any) -> Any:
            outputs = replay(*inputs, **named)
            if self.keeps:
                self.experts.keep_captured(number)
                self.counted.keep_captured(number)
            return outputs

        return kept


def observe_routers(chunks: Iterable[Any], config: Any) -> Mapping[str, ObservedRouter] | None:
    """Observe the routers of ``chunks``, by name.

    Return None if some of their choices are hidden: those in a fused kernel, and which tokens exceed the capacity.
    """
    modules = (module for chunk in chunks for module in chunk.modules())
    routers = {f"router of layer {each.layer_number}": each for each in modules if isinstance(each, TopKRouter)}
    if routers and (config.moe_router_fusion or config.moe_expert_capacity_factor is not None):
        return None
    observed = {name: ObservedRouter() for name in routers}
    for name, router in routers.items():
        router.router_replay = observed[name]
        router._apply_aux_loss = observed[name].keeping_counts(router._apply_aux_loss)
    return observed


def routers_of(layer: torch.nn.Module) -> list[ObservedRouter]:
    replays = (getattr(module, "router_replay", None) for module in layer.modules())
    return [replay for replay in replays if isinstance(replay, ObservedRouter)]
