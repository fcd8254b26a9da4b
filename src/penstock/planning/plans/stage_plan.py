"""``StagePlan``: one stage of a plan, and the sums that only need stages."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Annotated, Literal

from msgspec import Meta, field

from penstock.base.errors import InputError
from penstock.base.values import Value, number, whole
from penstock.core.cluster.parts import MOST_DEVICES
from penstock.core.schedule import Schedule
from penstock.core.schedule.memory import Sizes, peaks
from penstock.core.timing.costs import Costs, Exchange

RecomputeWay = Literal["none", "stage", "layers"]
Split = Annotated[
    str,
    Meta(
        pattern="^(data|sequence|context|column(/[1-9][0-9]?)?|row|any|whole|features|heads"
        "|vocabulary)$"
    ),
]
"""How tensor ranks share a layer, or a module inside it."""


_MOST_PARTS = 10_000
"""Of the gradients of a stage: each costs a message."""


class StagePlan(Value, frozen=True, kw_only=True):
    """One stage: which layers, on which rank, and what they are predicted to cost.

    Attributes:
        layers: qualified names, consecutive in the model's order, at least one.
        rank: the rank that runs the stage; where it has replicas, the first of their ranks.
        forward_seconds: of one microbatch, as are the times below that do not say otherwise.
        split_seconds: what a backward in two halves takes longer than a whole one.
        recompute_seconds: a forward that runs again; as long as the first by default.
        launch_seconds: of each pass of a microbatch, the part that its layers do not account for.
        collective_seconds: of forward and backward, what its tensor ranks exchange inside layers.
        update_seconds: once per minibatch.
        reduce_seconds: until the sum of its replicas' gradients is there, once per update, if
            nothing of it hides behind backwards.
        reduce_parts: in how many parts gradients leave while the last backward makes them.
        reduce_steps: where they leave in parts, the seconds that all of them take on each thing
            that they pass: the links, and whoever adds.
        hop_seconds: from this stage's output until the next stage can use it.
        link_seconds: of the hop, how long it keeps the link busy.
        transfer_bytes: what goes to the next stage for a microbatch, and as gradients comes back.
        parameter_bytes: weights.
        weight_bytes: of them, what a rank has of one version; all by default. Fully sharded, its
            rows and what it gathers.
        gradient_bytes: their gradients; as many as ``parameter_bytes`` by default.
        optimizer_bytes: optimizer state, masters included.
        buffer_bytes: the model's state that is no weight.
        sum_bytes: what a rank keeps besides while gradients of weights with several holders are
            summed: those that it gets and the sum, together as much as these weights. Where stages
            come and go, what stays of weights that several of them use.
        workspace_bytes: what the hungriest of its layers needs for itself while it runs.
        activation_bytes: kept from forward to backward, per microbatch in flight.
        weight_kept_bytes: kept between the two halves of a split backward.
        input_bytes: of the stage's input: all that is kept where the whole stage runs again.
        layer_input_bytes: of the inputs of all its layers, or of what runs again together: what is
            kept where layers run again.
        peak_activations: microbatches in flight at the worst moment.
        weight_versions: copies of the weights that are alive at once, and buffers as large that
            corrections for delay need; 1 in a synchronous pipeline.
        recompute: what runs again before its backward, so that less is kept: ``"stage"`` all of it
            at once, ``"layers"`` layer by layer; ``"none"`` by default.
        tensor_ranks: devices that share every layer of the stage.
        expert_ranks: copies of the stage that divide the experts of its mixtures among themselves,
            as many as all of them or a divisor of that; 1: each has all experts. Bytes are those of
            one copy.
        expert_loads: the share of tokens that comes to each of the copies that together have all
            experts, as the profile has it, so that a stage that has experts has some; none where
            nobody says.
        splits: how they share each layer, by its name: ``"data"`` (each takes its part of the
            rows), ``"sequence"`` (of the second dimension), ``"context"`` (of the positions, in all
            layers, while keys and values of attention go round), ``"column"`` (of the outputs; of
            three pieces that lie one behind another ``"column/3"``), ``"row"`` (of the inputs) or
            ``"any"`` (whatever its neighbours do), or repeat it, each all of it (``"whole"``, as
            what is not named). Modules inside a layer are named by patterns, in which ``*`` stands
            for anything between two dots: ``"blocks.*.mlp.0": "column"``; between a ``"column"``
            and its ``"row"`` also as ``"features"`` or ``"heads"``; a head is a ``"vocabulary"``
            where the loss is computed on its parts. Times are those of the group, bytes
            those of each of its devices.
    """

    layers: tuple[str, ...]
    rank: int
    forward_seconds: float = 0.0
    backward_input_seconds: float = 0.0
    backward_weight_seconds: float = 0.0
    split_seconds: float = 0.0
    recompute_seconds: float | None = None
    launch_seconds: float = 0.0
    collective_seconds: float = 0.0
    update_seconds: float = 0.0
    reduce_seconds: float = 0.0
    reduce_parts: int = 1
    reduce_steps: tuple[float, ...] = ()
    hop_seconds: float = 0.0
    link_seconds: float = 0.0
    transfer_bytes: int = 0
    parameter_bytes: int = 0
    weight_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    sum_bytes: int = 0
    workspace_bytes: int = 0
    activation_bytes: int = 0
    weight_kept_bytes: int = 0
    input_bytes: int = 0
    layer_input_bytes: int = 0
    peak_activations: float = 0.0
    weight_versions: int = 1
    recompute: RecomputeWay = "none"
    tensor_ranks: int = 1
    expert_ranks: int = 1
    expert_loads: tuple[float, ...] = ()
    splits: dict[str, Split] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_fields()
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and value < 0:
                raise InputError(f"{name} is {value}, but must be ≥ 0")
        whole("reduce_parts", self.reduce_parts, 1, _MOST_PARTS)
        whole("tensor_ranks", self.tensor_ranks, 1, MOST_DEVICES)
        whole("expert_ranks", self.expert_ranks, 1, MOST_DEVICES)
        if self.expert_loads and len(self.expert_loads) != self.expert_ranks:
            raise InputError(
                f"expert_loads has {len(self.expert_loads)} shares of {self.expert_ranks} copies "
                "that divide experts; give one for each, or none"
            )
        for share in self.expert_loads:
            number("expert_loads", share)

    @property
    def compute_seconds(self) -> float:
        """Seconds of forward and full backward of one microbatch."""
        return self.forward_seconds + self.backward_input_seconds + self.backward_weight_seconds

    @property
    def exchange(self) -> Exchange | None:
        """How its replicas sum part by part; ``None`` where they sum when backwards are done."""
        if not self.reduce_steps:
            return None
        each = tuple(seconds / self.reduce_parts for seconds in self.reduce_steps)
        once = max(self.reduce_seconds - sum(self.reduce_steps), 0.0)
        return Exchange(self.reduce_parts, each, once)

    @property
    def kept_bytes(self) -> int:
        """Bytes that a microbatch keeps from its forward, or its recompute, until its backward."""
        return self.layer_input_bytes if self.recompute == "layers" else self.activation_bytes

    @property
    def again_seconds(self) -> float:
        """Seconds of the forward when it runs a second time."""
        return self.forward_seconds if self.recompute_seconds is None else self.recompute_seconds

    @property
    def busy_seconds(self) -> float:
        """Seconds that a microbatch takes on one of the stage's ranks, with a second forward if
        there is one."""
        return self.compute_seconds + (self.again_seconds if self.recompute != "none" else 0.0)

    @property
    def held_bytes(self) -> int:
        """Bytes of weights that a rank has, of one version."""
        return self.parameter_bytes if self.weight_bytes is None else self.weight_bytes

    @property
    def summed_bytes(self) -> int:
        """Bytes of the gradients in which those of microbatches are summed."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes that a rank of the stage needs before the first microbatch comes: weights in all
        their versions, gradients of one, optimizer state, buffers, room to work, and room to sum
        gradients."""
        weights = self.weight_versions * self.held_bytes + self.summed_bytes
        room = self.workspace_bytes + self.sum_bytes
        return weights + self.optimizer_bytes + self.buffer_bytes + room

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that microbatches in flight keep at the worst moment."""
        return self.bytes_in_flight(self.peak_activations)

    def bytes_in_flight(self, count: float) -> int:
        """Bytes that so many microbatches in flight keep."""
        if self.recompute == "stage" and count:
            # All but the one that runs again keep their input only.
            return round(count * self.input_bytes) + self.activation_bytes
        return round(count * self.kept_bytes)

    @property
    def memory_bytes(self) -> int:
        """``state_bytes`` and ``in_flight_bytes``."""
        return self.state_bytes + self.in_flight_bytes


def costs_of(stages: Sequence[StagePlan]) -> Costs:
    """The durations of the ops of ``stages``, for the simulator."""
    again = [stage.again_seconds if stage.recompute == "layers" else 0.0 for stage in stages]
    inputs = [
        stage.backward_input_seconds + more for stage, more in zip(stages, again, strict=True)
    ]
    whole = [
        first + stage.backward_weight_seconds for stage, first in zip(stages, inputs, strict=True)
    ]
    exchanges = [stage.exchange for stage in stages]
    return Costs(
        forward=[stage.forward_seconds for stage in stages],
        backward_input=inputs,
        backward_weight=[stage.backward_weight_seconds + stage.split_seconds for stage in stages],
        backward=whole if any(stage.split_seconds for stage in stages) else None,
        recompute=[stage.again_seconds for stage in stages],
        update=[stage.update_seconds for stage in stages],
        reduce=[stage.reduce_seconds for stage in stages],
        exchanges=exchanges if any(exchanges) else (),
        hop=[stage.hop_seconds for stage in stages],
        link=[stage.link_seconds for stage in stages],
    )


def sizes_of(stages: Sequence[StagePlan]) -> Sizes:
    """Bytes that one microbatch keeps at each stage."""
    return Sizes(
        activation=[stage.kept_bytes for stage in stages],
        kept_for_weight=[stage.weight_kept_bytes for stage in stages],
        stage_input=[stage.input_bytes for stage in stages],
    )


def bytes_of_ranks(stages: Sequence[StagePlan], schedule: Schedule) -> tuple[int, ...]:
    """Predicted memory of each rank: the state of its stages, and what the order of its ops keeps.

    Args:
        schedule: with the recomputes that the stages want.
    """
    in_flight = peaks(
        schedule.rank_ops, sizes_of(stages), schedule.num_slices, schedule.activations
    )
    return tuple(
        sum(stages[stage].state_bytes for stage in rank_stages) + ceil(held)
        for rank_stages, held in zip(schedule.stages_of, in_flight, strict=True)
    )


def sharing_ranks(stages: Sequence[StagePlan]) -> str:
    """The kind of ranks that share the layers of stages, as plans and errors name it:
    ``"context"``, which have some positions of every sequence each, or ``"tensor"``."""
    by_positions = any("context" in stage.splits.values() for stage in stages)
    return "context" if by_positions else "tensor"
