"""From what a caller gives to a minibatch cut into microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock import microbatches
from penstock.errors import InputError
from penstock.microbatches import Microbatches, Weighting
from penstock.run.minibatch import Minibatch


@dataclass(frozen=True)
class Cutter:
    """Cuts minibatches.

    Attributes:
        num_microbatches: of a plan; with fewer rows there are fewer.
        weighting: how much each microbatch counts.
        fills_up: whether there must be as many all the same, because every copy of a stage must
            have something to do, or it would not be updated.
    """

    num_microbatches: int
    weighting: Weighting
    fills_up: bool

    def to_train(
        self,
        inputs: Any,
        targets: Any,
        *,
        step: int,
        share: float = 1.0,
        more_follow: bool = False,
    ) -> Minibatch:
        """A minibatch to train on.

        Raises:
            InputError: inputs and targets do not fit together.
        """
        if isinstance(inputs, Microbatches) != isinstance(targets, Microbatches):
            raise InputError("give both inputs and targets as penstock.Microbatches, or neither")
        if not isinstance(inputs, Microbatches):
            rows, others = (
                microbatches.num_rows(value, what)
                for value, what in ((inputs, "inputs"), (targets, "targets"))
            )
            if rows != others:
                raise InputError(f"inputs have {rows} rows, but targets have {others}")
        count = self._count(inputs)
        cut_inputs, cut_targets = _cut(inputs, "inputs", count), _cut(targets, "targets", count)
        weights = self.weighting.of(cut_targets)
        if self.fills_up:
            missing = max(0, self.num_microbatches - count)
            cut_inputs += [_own(cut_inputs[0]) for _ in range(missing)]
            cut_targets += cut_targets[:1] * missing
            weights += [0.0] * missing  # they count for nothing
        return Minibatch(step, cut_inputs, cut_targets, weights, share, more_follow)

    def to_evaluate(self, inputs: Any, *, step: int) -> Minibatch:
        """A minibatch of which only outputs are wanted."""
        return Minibatch(step, _cut(inputs, "inputs", self._count(inputs)))

    def _count(self, inputs: Any) -> int:
        """How many microbatches these inputs make."""
        if isinstance(inputs, Microbatches):
            if not inputs:
                raise InputError("inputs hold no microbatch")
            return len(inputs)
        return min(self.num_microbatches, microbatches.num_rows(inputs, "inputs"))


def _cut(value: Any, what: str, count: int) -> list[Any]:
    if not isinstance(value, Microbatches):
        return microbatches.split(value, count)
    if len(value) != count:
        raise InputError(f"there are {count} microbatches of inputs, but {len(value)} of {what}")
    return [_own(part) for part in value]


def _own(part: Any) -> Any:
    """A microbatch with memory of its own; a first layer may work in place."""
    (copied,) = microbatches.split(part, 1)
    return copied
