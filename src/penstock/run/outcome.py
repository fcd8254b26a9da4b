"""What a driver gives back after a step, put together from what the ranks harvested."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.run.counting import Peak
from penstock.run.journal import Record
from penstock.timeline import Row, Timeline


class Part(Protocol):
    """What one rank has of a minibatch: a worker's harvest, or what another process reported."""

    @property
    def losses(self) -> Mapping[int, Tensor]:
        """Unweighted, by microbatch."""

    @property
    def outputs(self) -> Mapping[int, Any]:
        """By microbatch, where there are no targets."""

    @property
    def metrics(self) -> Mapping[str, Mapping[int, Tensor]]:
        """By name and microbatch, unweighted."""

    @property
    def peak(self) -> Peak | None:
        """Where memory is counted."""


class Outcome(NamedTuple):
    """The result of one minibatch.

    Attributes:
        loss: weighted as on one device; ``None`` without targets.
        outputs: of every microbatch in order; empty with targets.
        metrics: weighted like the loss.
        timeline: measured; ``None`` where recording is off.
        norm: of all gradients before clipping, where ranks agree on it.
        peaks: of every rank, where memory is counted and told.
    """

    loss: Tensor | None
    outputs: Sequence[Any]
    metrics: dict[str, Tensor]
    timeline: Timeline | None
    norm: Tensor | None
    peaks: tuple[Peak, ...]

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        weights: Sequence[float],
        timeline: Timeline | None,
        norm: Tensor | None,
    ) -> Outcome:
        """Put together what the ranks have.

        Args:
            parts: of the ranks, in any order; no two have the same microbatch.
            weights: the factor on each microbatch's loss.
            timeline: of all ranks, if it was recorded.
            norm: of all gradients, if ranks agree on it.
        """
        losses = {k: loss for part in parts for k, loss in part.losses.items()}
        outputs = {k: value for part in parts for k, value in part.outputs.items()}
        metrics: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for part in parts:
            for name, values in part.metrics.items():
                metrics[name] |= values
        sums = {name: weighted_sum(values, weights) for name, values in metrics.items()}
        return cls(
            weighted_sum(losses, weights),
            [outputs[k] for k in sorted(outputs)],
            {name: value for name, value in sums.items() if value is not None},
            timeline,
            norm,
            tuple(part.peak for part in parts if part.peak is not None),
        )


def weighted_sum(losses: Mapping[int, Tensor], weights: Sequence[float]) -> Tensor | None:
    """The minibatch's loss, summed in the order of the microbatches."""
    total = None
    for microbatch in sorted(losses):
        if not weights[microbatch]:
            continue  # the mean of no terms is NaN, and NaN · 0 as well
        term = losses[microbatch] * weights[microbatch]
        total = term if total is None else total + term
    return total


def timeline(
    records: Sequence[Sequence[Record]], name: str, clock_offsets: Sequence[float] | None = None
) -> Timeline:
    """The measured timeline from every rank's records.

    Args:
        records: of every rank, in seconds of its own clock.
        name: of the schedule.
        clock_offsets: by how many seconds each rank's clock is ahead of rank 0's, as
            ``run.clocks.clock_offsets`` finds; by default all read the same clock.
    """
    ahead = [0.0] * len(records) if clock_offsets is None else clock_offsets
    begins = [own[0].start - offset for own, offset in zip(records, ahead, strict=True) if own]
    zero = min(begins, default=0.0)
    # Once per step, so column by column: several times as fast as span by span.
    rows = (_row(own, zero + offset) for own, offset in zip(records, ahead, strict=True))
    return Timeline(tuple(rows), name, "measured")


def _row(records: Sequence[Record], zero: float) -> Row:
    """A rank's records, which are in order, as a row that counts from ``zero``."""
    ops, starts, ends = zip(*records, strict=True) if records else ((), (), ())
    return Row(
        ops,
        array("d", [start - zero for start in starts]),
        array("d", [end - zero for end in ends]),
    )
