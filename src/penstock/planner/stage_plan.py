"""``StagePlan``: one stage of a plan, and the sums that only need stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from penstock.cost import Costs
from penstock.errors import InputError
from penstock.schedule import Schedule
from penstock.schedule.memory import Sizes
from penstock.values import Value

Recompute = Literal["none", "stage", "layers"]


class StagePlan(Value, frozen=True, kw_only=True):
    """One stage: which layers, on which rank, and what they are predicted to cost.

    Attributes:
        layers: qualified names, consecutive in the model's order, at least one.
        rank: the rank that runs the stage; the first of them where it has replicas.
        forward_seconds: one microbatch; likewise the other times.
        update_seconds: once per minibatch.
        hop_seconds: from this stage's output until the next stage can use it.
        parameter_bytes: weights; gradients take as much again.
        optimizer_bytes: optimizer state.
        activation_bytes: kept from forward to backward, per microbatch in flight.
        weight_kept_bytes: kept between the two halves of a split backward.
        input_bytes: of the stage's input: all that is kept where the whole stage runs again.
        layer_input_bytes: of the inputs of all its layers: what is kept where layers run again.
        peak_activations: microbatches in flight at the worst moment.
        weight_versions: copies of the weights that are alive at once, and buffers as large that
            corrections for delay need; 1 in a synchronous pipeline.
        recompute: what runs again before its backward, so that less is kept: ``"stage"`` all of it
            at once, ``"layers"`` layer by layer; ``"none"`` by default.
    """

    layers: tuple[str, ...]
    rank: int
    forward_seconds: float = 0.0
    backward_input_seconds: float = 0.0
    backward_weight_seconds: float = 0.0
    update_seconds: float = 0.0
    hop_seconds: float = 0.0
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    weight_kept_bytes: int = 0
    input_bytes: int = 0
    layer_input_bytes: int = 0
    peak_activations: float = 0.0
    weight_versions: int = 1
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        for name in self.__struct_fields__[1:-1]:
            value = getattr(self, name)
            if not value >= 0:
                raise InputError(f"{name} is {value}, but must be ≥ 0")

    @property
    def compute_seconds(self) -> float:
        """Forward and full backward of one microbatch."""
        return self.forward_seconds + self.backward_input_seconds + self.backward_weight_seconds

    @property
    def kept_bytes(self) -> int:
        """What a microbatch keeps from its forward, or its recompute, until its backward."""
        return self.layer_input_bytes if self.recompute == "layers" else self.activation_bytes

    @property
    def memory_bytes(self) -> int:
        """Weights, gradients, optimizer state and the activations in flight."""
        return stage_bytes(
            self.parameter_bytes,
            self.optimizer_bytes,
            self.kept_bytes,
            self.peak_activations,
            self.weight_versions,
        )


def stage_bytes(
    parameters: int, optimizer: int, activations: int, in_flight: float, versions: int = 1
) -> int:
    """Memory of a stage: weights in all their versions, gradients of one, optimizer state,
    activations in flight."""
    return (versions + 1) * parameters + optimizer + round(in_flight * activations)


def costs_of(stages: Sequence[StagePlan]) -> Costs:
    """What the simulator needs to know of ``stages``."""
    return Costs(
        forward=[stage.forward_seconds for stage in stages],
        backward_input=[
            stage.backward_input_seconds
            + (stage.forward_seconds if stage.recompute == "layers" else 0.0)
            for stage in stages
        ],
        backward_weight=[stage.backward_weight_seconds for stage in stages],
        update=[stage.update_seconds for stage in stages],
        hop=[stage.hop_seconds for stage in stages],
    )


def sizes_of(stages: Sequence[StagePlan]) -> Sizes:
    """What one microbatch keeps at each stage, in bytes."""
    return Sizes(
        activation=[stage.kept_bytes for stage in stages],
        kept_for_weight=[stage.weight_kept_bytes for stage in stages],
        stage_input=[stage.input_bytes for stage in stages],
    )


def bytes_of_ranks(stages: Sequence[StagePlan], schedule: Schedule) -> tuple[int, ...]:
    """Predicted memory of each rank: ``StagePlan.memory_bytes`` of its stages."""
    return tuple(sum(stages[stage].memory_bytes for stage in own) for own in schedule.stages_of)
