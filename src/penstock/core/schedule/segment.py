"""Segments: a stream of minibatches, one at a time, in the order of the endless schedule.

A pipeline without a flush has no steps, but it is fed step by step. The segment of a minibatch is,
on each rank, what stands between the first forward of this minibatch and the first forward of the
next: its own forwards, and backwards of microbatches before it. Segments one after the other are
the schedule of the whole stream; ranks go through them without waiting for each other.

In the steady state all segments are alike but for the numbers of their microbatches, so those count
from the beginning of a window: a few minibatches back, as many as are still in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from penstock.core.schedule.op import Kind, Op
from penstock.core.schedule.rounds import Rounds, filling
from penstock.core.schedule.schedule import Schedule

_ENTRANCES = frozenset({Kind.FORWARD, Kind.RECV_FORWARD})

Lower = Callable[[int, Rounds], Schedule]
"""From the length of a stream and its rounds to its lowered schedule."""


@dataclass(frozen=True, eq=False)
class Segment:
    """What the ranks do for one minibatch.

    Attributes:
        schedule: the whole window's; for a synchronous minibatch, all there is.
        ranks: the ops of each rank, from ``schedule``.
        begins: nothing is in flight before it.
        ends: nothing is in flight after it.
    """

    schedule: Schedule
    ranks: tuple[tuple[Op, ...], ...]
    begins: bool = True
    ends: bool = True

    @classmethod
    def whole(cls, schedule: Schedule) -> Segment:
        """The segment of a minibatch for which all of a schedule is performed."""
        return cls(schedule, schedule.ranks)


class Windows:
    """Makes segments.

    Args:
        lower: builds and lowers a stream.
        replicas: how many every stage has.
        by_minibatch: whether minibatches are rounds; otherwise microbatches are.
        ahead: how far forwards run ahead in the order of the stream, as for ``rounds.warm_up``.
    """

    def __init__(
        self, lower: Lower, replicas: Sequence[int], *, by_minibatch: bool, ahead: int = 1
    ) -> None:
        self._replicas = tuple(replicas)
        self._by_minibatch = by_minibatch
        self._needed = filling(replicas, ahead)
        self._lower = lower
        self._stream = lru_cache(maxsize=64)(self._lowered)
        self._cut = lru_cache(maxsize=64)(self._boundary)
        self._segment = lru_cache(maxsize=64)(self._made)

    @property
    def num_in_flight(self) -> int:
        """Microbatches that may be in flight when a minibatch begins."""
        return self._needed

    def segment(self, sizes: Sequence[int], *, num_before: int, last: bool) -> tuple[Segment, int]:
        """The segment of a minibatch, and at which minibatch its window begins; no later one needs
        those before.

        Args:
            sizes: microbatches of each minibatch of the stream so far, the one that is asked for
                included.
            num_before: how many of these minibatches came before. All of them: there is no further
                one, and the segment is what is still in flight.
            last: whether none follows, so that the pipeline drains.
        """
        start = num_before
        period = lcm(*self._replicas)
        while start > 0:
            base = sum(sizes[:start])
            if sum(sizes[start:num_before]) >= self._needed and base % period == 0:
                break
            start -= 1
        window = tuple(sizes[start:])
        return self._segment(window, num_before - start, num_before == 0, last), start

    def _made(self, sizes: tuple[int, ...], num_before: int, begins: bool, last: bool) -> Segment:
        schedule = self._stream(sizes if last else (*sizes, self._more))
        starts = self._cut(sizes[:num_before]) if num_before else (0,) * schedule.num_ranks
        stops = map(len, schedule.ranks) if last else self._cut(sizes)
        spans = zip(schedule.ranks, starts, stops, strict=True)
        return Segment(schedule, tuple(ops[a:b] for ops, a, b in spans), begins, last)

    @property
    def _more(self) -> int:
        """A minibatch in which every replica has something to do."""
        return max(self._needed, *self._replicas)

    def _lowered(self, sizes: tuple[int, ...]) -> Schedule:
        ends = tuple(sum(sizes[: index + 1]) for index in range(len(sizes)))
        return self._lower(ends[-1], Rounds(self._replicas, ends if self._by_minibatch else None))

    def _boundary(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """How many ops each rank performs before the first forward behind these minibatches; the
        same whatever follows."""
        count = sum(sizes)
        schedule = self._stream((*sizes, self._more))
        return tuple(
            next(
                position
                for position, op in enumerate(ops)
                if op.kind in _ENTRANCES and op.microbatch >= count
            )
            for ops in schedule.ranks
        )
