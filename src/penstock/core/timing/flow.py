"""Flow through a pipeline: when microbatches enter and leave it, how fast, and how late."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from penstock.core.schedule.op import Kind, Op
from penstock.core.timing.spans import Row

_SAME = 1e-9
"""Relative: what additions in another order change."""


def entries(rows: Sequence[Row]) -> dict[int, float]:
    """When the first stage begins with each microbatch."""
    first: dict[int, float] = {}
    for op, start, _ in _forwards(rows):
        if not op.stage:
            first[op.microbatch] = min(start, first.get(op.microbatch, start))
    return dict(sorted(first.items()))


def outputs(rows: Sequence[Row]) -> dict[int, float]:
    """When the last stage has the output of each microbatch."""
    by_stage = outputs_by_stage(rows)
    return by_stage[max(by_stage)] if by_stage else {}


def outputs_by_stage(rows: Sequence[Row]) -> dict[int, dict[int, float]]:
    """When each stage has its output of each microbatch."""
    last: dict[int, dict[int, float]] = {}
    for op, _, end in _forwards(rows):
        ends = last.setdefault(op.stage, {})
        ends[op.microbatch] = max(end, ends.get(op.microbatch, end))
    return {stage: dict(sorted(ends.items())) for stage, ends in last.items()}


def _forwards(rows: Sequence[Row]) -> Iterator[tuple[Op, float, float]]:
    for row in rows:
        for op, start, end in zip(row.ops, row.starts, row.ends, strict=True):
            if op.kind is Kind.FORWARD:
                yield op, start, end


def slowest_beat(rows: Sequence[Row]) -> tuple[float, bool]:
    """(the beat that a stream comes to, whether it has come to it by now): that of the stage which
    is slowest. The others go faster only until they have worked off what lies between them."""
    stages = [list(ends.values()) for ends in outputs_by_stage(rows).values()]
    regular = [regular_beat(times) for times in stages]
    beats = (
        _mean_beat(times) if same is None else same
        for times, same in zip(stages, regular, strict=True)
    )
    return max(beats, default=0.0), None not in regular


def window(rows: Sequence[Row], begins: float, ends: float) -> Iterator[Row]:
    """The part of rows that starts between two times, so that the first of them is 0."""
    for row in rows:
        first, last = (bisect_left(row.starts, time * (1 - _SAME)) for time in (begins, ends))
        yield Row(
            row.ops[first:last],
            array("d", [time - begins for time in row.starts[first:last]]),
            array("d", [time - begins for time in row.ends[first:last]]),
            row.versions[first:last] if row.versions else None,
        )


def beat(times: Sequence[float]) -> float:
    """From one of many regular events to the next, in the second half of them: ``regular_beat``, or
    the mean where no period shows.

    Args:
        times: of events, ascending.

    Returns:
        Seconds, or whatever the times are in; 0 of fewer than two events.
    """
    regular = regular_beat(times)
    return _mean_beat(times) if regular is None else regular


def _mean_beat(times: Sequence[float]) -> float:
    half = len(times) // 2
    later = times[half if half + 1 < len(times) else 0 :]
    return (later[-1] - later[0]) / (len(later) - 1) if len(later) > 1 else 0.0


def regular_beat(times: Sequence[float]) -> float | None:
    """The mean of events over whole periods, and so exact; ``None`` where no period shows in the
    second half of them.

    A pipeline repeats itself after as many microbatches as fit into the loop that holds it up, with
    any rhythm in between.
    """
    half = len(times) // 2
    same = _SAME * max(map(abs, times), default=0.0)
    for period in range(1, len(times) // 4 + 1):
        whole = times[half + period] - times[half]
        if all(
            abs(times[place + period] - times[place] - whole) <= same
            for place in range(half, len(times) - period)
        ):
            return whole / period
    return None
