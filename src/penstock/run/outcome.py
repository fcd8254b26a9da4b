"""What a driver gives back after a step, put together from what the ranks harvested."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.run.counting import Peak
from penstock.run.rank.journal import Record
from penstock.timing.spans import Row
from penstock.timing.timeline import Timeline
from penstock.weights.store import Held


class Part(Protocol):
    """What one rank has of a minibatch: a worker's harvest, or what another process reported."""

    @property
    def losses(self) -> Mapping[int, Tensor]:
        """Unweighted losses, by microbatch."""

    @property
    def outputs(self) -> Mapping[int, Any]:
        """Outputs by microbatch, where there are no targets."""

    @property
    def metrics(self) -> Mapping[str, Mapping[int, Tensor]]:
        """Unweighted metrics, by name and microbatch."""

    @property
    def peak(self) -> Peak | None:
        """The most that the rank held at once, where memory is counted."""

    @property
    def held(self) -> Held | None:
        """What the rank keeps of its weights, where these have versions."""


class MinibatchOutcome(NamedTuple):
    """The result of one minibatch.

    Attributes:
        loss: weighted as on one device; ``None`` without targets.
        outputs: those of every microbatch in order; empty with targets.
        metrics: weighted like the loss.
        rows: what each rank did; ``None`` where recording is off.
        norm: that of all gradients before clipping, where ranks agree on it.
        peaks: the most that every rank held, where memory is counted and told.
        held: the versions of its weights that every rank held, where there are several.
        begins: whether nothing was in flight before it.
    """

    loss: Tensor | None
    outputs: Sequence[Any]
    metrics: dict[str, Tensor]
    rows: Sequence[Row] | None
    norm: Tensor | None
    peaks: tuple[Peak, ...]
    held: tuple[Held, ...]
    begins: bool

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        weights: Sequence[float],
        rows: Sequence[Row] | None,
        norm: Tensor | None,
        *,
        begins: bool = True,
    ) -> MinibatchOutcome:
        """Put together what the ranks have.

        Args:
            parts: what each rank has, in any order; no two have the same microbatch.
            weights: the factor on each microbatch's loss.
            rows: what each rank did, if it was recorded.
            norm: that of all gradients, if ranks agree on it.
            begins: whether nothing was in flight before.
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
            rows,
            norm,
            tuple(part.peak for part in parts if part.peak is not None),
            tuple(part.held for part in parts if part.held is not None),
            begins,
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


def row(
    records: Sequence[Record],
    versions: Sequence[int] = (),
    base: int = 0,
    clock_offset: float = 0.0,
) -> Row:
    """What a rank did, in seconds of rank 0's clock.

    Args:
        records: in order.
        versions: which version of the weights each op read, if there are several.
        base: how many microbatches of the stream come before those of the records.
        clock_offset: by how many seconds the rank's clock is ahead of rank 0's.
    """
    # Once per step, so column by column: several times as fast as span by span.
    ops, starts, ends = zip(*records, strict=True) if records else ((), (), ())
    if base:
        ops = tuple([op._replace(microbatch=op.microbatch + base) for op in ops])
    return Row(
        ops,
        array("d", [start - clock_offset for start in starts]),
        array("d", [end - clock_offset for end in ends]),
        tuple(versions) or None,
    )


def timeline(steps: Sequence[Sequence[Row]], name: str) -> Timeline:
    """The measured timeline of one minibatch, or of several that belong together.

    Args:
        steps: every rank's row, for each minibatch.
    """
    columns = [_joined(rows) for rows in zip(*steps, strict=True)]
    zero = min((row.starts[0] for row in columns if row.ops), default=0.0)
    moved = (
        row._replace(
            starts=array("d", [start - zero for start in row.starts]),
            ends=array("d", [end - zero for end in row.ends]),
        )
        for row in columns
    )
    return Timeline(tuple(moved), name, "measured")


def _joined(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    known = all(row.versions is not None or not row.ops for row in rows)
    return Row(
        tuple(op for row in rows for op in row.ops),
        array("d", [start for row in rows for start in row.starts]),
        array("d", [end for row in rows for end in row.ends]),
        tuple(version for row in rows for version in row.versions or ()) if known else None,
    )
