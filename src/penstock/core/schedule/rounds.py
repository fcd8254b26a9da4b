"""Rounds and segments: when the stages of a stream update, and what ranks do for each minibatch.

A round is an update: which one of its stage each microbatch's gradient is part of. A synchronous
pipeline has one round per minibatch. An asynchronous one goes on without a flush, and each of its
stages updates at its own pace: after every microbatch (or, where a stage has r replicas, after r of
them), or once per minibatch.

A pipeline without a flush has no steps, but it is fed step by step. The segment of a minibatch is,
on each rank, what stands between the first forward of this minibatch and the first forward of the
next: its own forwards, and backwards of microbatches before it. Segments one after the other are
the schedule of the whole stream; ranks go through them without waiting for each other.

In the steady state all segments are alike but for the numbers of their microbatches, so those count
from the beginning of a window: a few minibatches back, as many as are still in flight.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING

from penstock.core.schedule.op import Kind, Op


@dataclass(frozen=True)
class Rounds:
    """Which round of each stage a microbatch belongs to. Both count from 0.

    Attributes:
        replicas: how many each stage has.
        ends: how many microbatches there are up to the end of each minibatch, where minibatches are
            rounds; ``None`` where each microbatch (of every replica) is one.
    """

    replicas: tuple[int, ...]
    ends: Sequence[int] | None = None

    @classmethod
    def of_minibatches(cls, replicas: Sequence[int], size: int, num_microbatches: int) -> Rounds:
        """Minibatches of one size; the last one may be shorter."""
        whole = range(size, num_microbatches + size, size)
        return cls(tuple(replicas), tuple(min(end, num_microbatches) for end in whole))

    def of(self, stage: int, microbatch: int) -> int:
        """The round of a microbatch; behind the last minibatch, one further."""
        if self.ends is None:
            return microbatch // self.replicas[stage]
        return bisect_right(self.ends, microbatch)


def warm_up(replicas: Sequence[int], stage: int, ahead: int = 1) -> int:
    """How many forwards each replica of a stage runs before its first backward, so that every rank
    is busy from then on: ⌊(N−1−Σ_{i<s} r_i)/r_s⌋ with N ranks; p−1−s without replicas.

    Narayanan et al., "PipeDream", SOSP 2019, section 3.2. The input stage then has ⌈N/r_0⌉
    microbatches in flight (the paper's NOAM).

    Args:
        replicas: of each stage.
        ahead: so many times as many forwards; 2 where results have a beat to cross in.

    >>> [warm_up((2, 1, 1), stage) for stage in range(3)]
    [1, 1, 0]
    >>> [warm_up((1, 1, 1), stage, ahead=2) for stage in range(3)]
    [4, 2, 0]
    """
    return ahead * ((sum(replicas[stage:]) - 1) // replicas[stage])


def filling(replicas: Sequence[int], ahead: int = 1) -> int:
    """The fewest microbatches with which every replica of every stage has as many in flight as it
    ever has.

    Args:
        replicas, ahead: as for ``warm_up``.
    """
    return max(
        (warm_up(replicas, stage, ahead) + 1) * count for stage, count in enumerate(replicas)
    )


def fewest_per_update(replicas: Sequence[int]) -> int:
    """The fewest microbatches of a minibatch whose gradient is at most one update late: as many as
    may be in flight behind it, p−1 without replicas."""
    return max(warm_up(replicas, stage) * count for stage, count in enumerate(replicas))


if TYPE_CHECKING:
    from penstock.core.schedule.schedule import Schedule

_ENTRANCES = frozenset({Kind.FORWARD, Kind.RECV_FORWARD})

Lower = Callable[[int, Rounds], "Schedule"]
"""From the length of a stream and its rounds to its lowered schedule."""


@dataclass(frozen=True, eq=False)
class Segment:
    """The ops that ranks perform for one minibatch.

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
