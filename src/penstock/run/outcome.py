"""What a driver gives back after a step, put together from what the ranks harvested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from penstock import microbatches
from penstock.run.interpreter import Record
from penstock.timeline import Span, Timeline


class Outcome(NamedTuple):
    """The result of one minibatch.

    Attributes:
        loss: weighted as on one device; ``None`` without targets.
        outputs: of all rows in order; ``None`` with targets.
        timeline: measured; ``None`` where recording is off.
    """

    loss: Tensor | None
    outputs: Any
    timeline: Timeline | None


def weighted_sum(losses: Mapping[int, Tensor], weights: Sequence[float]) -> Tensor | None:
    """The minibatch's loss, summed in the order of the microbatches."""
    total = None
    for microbatch in sorted(losses):
        if not weights[microbatch]:
            continue  # the mean of no terms is NaN, and NaN · 0 as well
        term = losses[microbatch] * weights[microbatch]
        total = term if total is None else total + term
    return total


def joined(outputs: Mapping[int, Any]) -> Any:
    """All outputs in the order of the microbatches."""
    return microbatches.join([outputs[k] for k in sorted(outputs)]) if outputs else None


def timeline(records: Sequence[Sequence[Record]], name: str) -> Timeline:
    """The measured timeline from every rank's records."""
    spans = [
        Span(op, rank, start, end) for rank, ops in enumerate(records) for op, start, end in ops
    ]
    return Timeline.of(spans, len(records), name, "measured")
