"""Rounds: which update of its stage each microbatch's gradient is part of.

A synchronous pipeline has one round per minibatch. An asynchronous one goes on without a flush, and
each of its stages updates at its own pace: after every microbatch (or, where a stage has r
replicas, after r of them), or once per minibatch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


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
