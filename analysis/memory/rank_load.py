"""What a rank computes and holds: layers, micro-batches in flight, and activations and weights of each part of a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from analysis.memory.activations import Rows, expert_rows, layer_bytes, recomputed_bytes, sharded_tokens
from analysis.memory.measured_constants import MEASURED, Constants
from analysis.memory.static_memory import BYTES, Part, State, layer_parameters
from launch.contract.pipeline_stages import layers_of_stages
from launch.contract.spec import LayerPart, Model, Parallelism, RunSpec

LayerKind = tuple[LayerPart, ...]


def passes_in_flight(layout: Parallelism, stage: int, microbatches: int) -> int:
    """Return how many passes are in flight at once, over all chunks of the stage: forward done, backward not.

    The schedules of torch_native (parallel/pipeline_schedule.py) and Megatron-Core are those of Narayanan et al. 2021,
    arXiv:2104.04473.
    """
    if layout.schedule == "interleaved":
        return min((layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1, microbatches * layout.vpp)
    return microbatches if layout.schedule == "gpipe" and layout.pp > 1 else min(layout.pp - stage, microbatches)


@dataclass(frozen=True, eq=False)
class CellLoad:
    """What the ranks of all pipeline stages share."""

    spec: RunSpec
    constants: Constants = MEASURED

    @cached_property
    def element(self) -> int:
        """Bytes of an activation or a weight."""
        return BYTES[self.spec.training.precision]

    @cached_property
    def is_native(self) -> bool:
        return self.spec.engine == "torch_native"

    @cached_property
    def rows(self) -> Rows:
        return expert_rows(self.spec)

    @cached_property
    def layer_input(self) -> int:
        """Bytes of a layer's input, or of its output."""
        return sharded_tokens(self.spec) * self.spec.model.hidden_size * self.element

    @cached_property
    def kept_by_layer(self) -> Mapping[LayerKind, Mapping[Part, int]]:
        """Bytes of activations per layer and micro-batch, by the layer's parts."""
        model = self.spec.model
        kinds = dict.fromkeys(map(model.parts_of_layer, range(model.num_layers)))
        return {kind: layer_bytes(self.spec, kind) for kind in kinds}

    @cached_property
    def recomputed_by_layer(self) -> Mapping[LayerKind, Mapping[Part, int]]:
        """Bytes that selective recomputation saves in a layer, by its parts."""
        if not self.spec.training.recomputed:
            return {}
        return {kind: recomputed_bytes(self.spec, kind) for kind in self.kept_by_layer}

    @cached_property
    def captured(self) -> frozenset[Part]:
        parts = {part for kept in self.kept_by_layer.values() for part in kept}
        return frozenset(parts & self.spec.captured_parts)

    def layer_weights(self, part: Part) -> int:
        """Bytes of the weights of a layer's part."""
        for kind in self.kept_by_layer:
            if held := layer_parameters(self.spec.model, self.spec.parallelism, kind).get(part):
                return self.element * (held.dense + held.experts)
        return 0


@dataclass(frozen=True, eq=False)
class RankLoad:
    """A rank of stage ``stage``. A pass runs one micro-batch through one chunk of its layers."""

    cell: CellLoad
    stage: int
    state: State

    @property
    def spec(self) -> RunSpec:
        return self.cell.spec

    @cached_property
    def between_steps(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.state.weights + self.state.gradients + self.state.optimizer

    @cached_property
    def is_last(self) -> bool:
        return self.stage == self.spec.parallelism.pp - 1

    @cached_property
    def passes(self) -> int:
        return passes_in_flight(self.spec.parallelism, self.stage, self.spec.num_microbatches)

    @cached_property
    def layers(self) -> float:
        """The mean number of layers of a chunk."""
        return sum(self._layers_by_kind.values()) / self.spec.parallelism.vpp

    @cached_property
    def layers_with(self) -> Mapping[Part, float]:
        """The mean number of layers of a chunk with each part."""
        found: dict[Part, float] = {}
        for kind, kept in self.cell.kept_by_layer.items():
            if layers := self._layers_by_kind[kind]:
                for part in kept:
                    found[part] = found.get(part, 0) + layers / self.spec.parallelism.vpp
        return found

    @cached_property
    def kept(self) -> Mapping[Part, int]:
        """Activations of a pass, by part, without recomputation."""
        return self._of_pass(self.cell.kept_by_layer)

    @cached_property
    def recomputed(self) -> Mapping[Part, int]:
        """Bytes that selective recomputation saves in a pass, by part."""
        return self._of_pass(self.cell.recomputed_by_layer)

    def _of_pass(self, by_layer: Mapping[LayerKind, Mapping[Part, int]]) -> Mapping[Part, int]:
        total: dict[Part, int] = {}
        for kind, parts in by_layer.items():
            if layers := self._layers_by_kind[kind]:
                for part, of_layer in parts.items():
                    total[part] = total.get(part, 0) + of_layer * layers // self.spec.parallelism.vpp
        return total

    @cached_property
    def captured_kept(self) -> int:
        """Bytes of a pass's activations that graphs hold."""
        return sum(self.kept[part] - self.recomputed.get(part, 0) for part in self.kept if part in self.cell.captured)

    @cached_property
    def captured_weights(self) -> int:
        """Bytes of a chunk's weights that graphs use."""
        parts = (part for part in self.layers_with if part in self.cell.captured)
        return round(sum(self.cell.layer_weights(part) * self.layers_with[part] for part in parts))

    @cached_property
    def held_by_experts(self) -> int:
        """Bytes of experts' activations that all passes keep with an even load. Of what is recomputed, one layer's count."""
        if "experts" not in self.kept:
            return 0
        again = self.recomputed.get("experts", 0)
        return self.passes * (self.kept["experts"] - again) + round(again / self.layers_with["experts"])

    @cached_property
    def expected_imbalance(self) -> int:
        """Bytes that all passes are expected to keep beyond those of an even load of experts."""
        return min(round(self.held_by_experts * (self.cell.constants.imbalance.value - 1)), self._most_imbalance)

    @cached_property
    def worst_imbalance(self) -> int:
        """The additional memory over the expected if every token of the group chooses experts of this rank, in bytes."""
        return self._most_imbalance - self.expected_imbalance

    @cached_property
    def _most_imbalance(self) -> int:
        rows = self.cell.rows
        if rows.fixed or "experts" not in self.kept:
            return 0
        # With full recomputation, one layer's experts keep activations.
        passes = self.passes * self.layers_with["experts"] if self.spec.training.recompute == "full" else 1
        return round(max(0, rows.worst / rows.mean - 1) * self.held_by_experts / passes)

    @cached_property
    def _layers_by_kind(self) -> Mapping[LayerKind, int]:
        return _layers_by_kind(self.spec.model, self.spec.parallelism, self.stage)


@lru_cache(maxsize=256)
def _layers_by_kind(model: Model, layout: Parallelism, stage: int) -> Mapping[LayerKind, int]:
    """Return the number of a stage's layers, by their parts. It is 0 for other parts."""
    return Counter(map(model.parts_of_layer, layers_of_stages(model.num_layers, layout.pp, layout.vpp)[stage]))
