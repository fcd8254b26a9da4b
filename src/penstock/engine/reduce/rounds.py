"""A round of sums by owners, as far as one rank has come: its buckets, on their way up the tree and
back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.engine.reduce.buckets import Bucket, ShardValues


@dataclass
class BucketSum:
    """A bucket on its way up the tree of holders and back, as one rank takes part in it.

    Attributes:
        index: its number in the round.
        number: that of its messages.
        stage: how many of the rank's stages are done: one for each level on the way up, and one for
            each on the way back.
        partial: by owner, what this rank has of that share, up to where it hands it on: its own
            gradients, then partial sums.
        sums: by owner, what has come of the sum, or what it has made.
    """

    index: int
    number: int
    stage: int = 0
    partial: dict[int, ShardValues] = field(default_factory=dict)
    sums: dict[int, ShardValues] = field(default_factory=dict)


@dataclass
class SumRound:
    """A round of sums, as far as one rank has come.

    Attributes:
        number: tells the round's messages from others.
        frozen: places of the parameters that are not trained.
        buckets: those of the others.
        under_way: by number, buckets that have left.
        repeated: those that are summed once more, by number.
        counts: of each holder that this rank knows of, of how many microbatches its gradients are.
        left: when each bucket left, on this host's clock.
        again: buckets that are summed once more, as far as this rank knows.
        averages: whether sums are divided by the number of microbatches.
    """

    number: int
    frozen: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    under_way: dict[int, BucketSum] = field(default_factory=dict)
    repeated: dict[int, BucketSum] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    averages: bool = False

    @property
    def last(self) -> int:
        """The bucket that leaves when all gradients are there."""
        return len(self.buckets) - 1

    def has_numbers(self, index: int, owners: Iterable[int]) -> bool:
        """Whether there is anything of some owners' shares in a bucket."""
        return any(self.buckets[index].ranges_of(owner) for owner in owners)

    def tells(self, index: int, owners: Iterable[int]) -> bool:
        """Whether holders send each other something on the way up: numbers of some owners' shares
        or, with the first bucket and the last, what all must know."""
        return index in (0, self.last) or self.has_numbers(index, owners)

    def split(
        self, index: int, owners: Iterable[int], values: ShardValues
    ) -> dict[int, ShardValues]:
        """The values of a message by the owner whose share they are of."""
        rest = iter(values)
        ranges_of = self.buckets[index].ranges_of
        return {owner: [next(rest) for _ in ranges_of(owner)] for owner in owners}

    def final(self, index: int) -> BucketSum:
        """The sum of a bucket that counts."""
        return self.repeated.get(index) or self.under_way[index]
