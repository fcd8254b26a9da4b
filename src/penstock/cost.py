"""The one cost function: how long an op takes, and how long its result takes to another rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from penstock.errors import InputError
from penstock.schedule.op import Kind, Op

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) that each kind of op takes. A number holds for every stage; a sequence
    gives one number per stage.

    Attributes:
        forward: F.
        backward_input: I; a full backward B takes ``backward_input + backward_weight``.
        backward_weight: W.
        hop: from the end of an op until its result is usable on another rank; entry s is the edge
            between stages s and s+1, in both directions.
        update: the optimizer's step of a stage, once per minibatch.

    Raises:
        InputError: a cost is negative or not finite.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    hop: PerStage = 0.0
    update: PerStage = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = [value] if isinstance(value, int | float) else list(value)
            for number in numbers:
                if not 0 <= number < float("inf"):
                    raise InputError(f"costs: {field.name} is {number}, but must be ≥ 0")
            if not isinstance(value, int | float):
                object.__setattr__(self, field.name, tuple(numbers))

    def check_stages(self, num_stages: int) -> None:
        """Raise ``InputError`` if a per-stage cost does not give ``num_stages`` numbers."""
        for field in fields(self):
            value = getattr(self, field.name)
            # The last stage has no edge behind it, so its hop may be left out.
            enough = {num_stages, num_stages - 1} if field.name == "hop" else {num_stages}
            if not isinstance(value, int | float) and len(value) not in enough:
                raise InputError(
                    f"costs: {field.name} has {len(value)} numbers, but the schedule has "
                    f"{num_stages} stages; give one number, or one per stage"
                )

    def duration(self, op: Op) -> float:
        """How long ``op`` keeps its rank busy. Communication takes none of the rank's time."""
        match op.kind:
            case Kind.FORWARD:
                return _at(self.forward, op.stage)
            case Kind.BACKWARD_INPUT:
                return _at(self.backward_input, op.stage)
            case Kind.BACKWARD_WEIGHT:
                return _at(self.backward_weight, op.stage)
            case Kind.BACKWARD:
                return _at(self.backward_input, op.stage) + _at(self.backward_weight, op.stage)
            case Kind.UPDATE:
                return _at(self.update, op.stage)
            case _:
                return 0.0

    def hop_between(self, stage: int, other: int) -> float:
        """How long a result of ``stage`` takes to reach ``other``, its neighbour, elsewhere."""
        return _at(self.hop, min(stage, other))


def _at(value: PerStage, stage: int) -> float:
    return value if isinstance(value, int | float) else value[stage]
