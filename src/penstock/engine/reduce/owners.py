"""Sums of gradients by owners: each holder of the same weights sums one shard, for all of them.

With r holders of M bytes, a shard is M/r, as nearly as numbers can be divided:

1. Each holder sends every owner its own gradients of that owner's shard: (r−1)/r · M in all.
2. The owner adds what it has got in the order of the ranks, so that the sum has the bits of a loop.
3. It sends the sum of its shard to all others: (r−1) · M/r.

That is 2(r−1)/r · M per rank and direction, what a ring of the same ranks moves, in two steps
instead of 2(r−1). If all sent everything to all, it would be (r−1) · M. Until its gradients are the
sums, a rank keeps M besides: in step 2 the r−1 shards that it got and the sum of its own, in step 3
its sum and the r−1 of others.

Gradients are not copied together first: a shard is a list of ranges, each of one gradient.
One that a holder does not have is ``None`` there, which is not the same as zeros.

Between processes the three steps are made of each bucket of the gradients by itself. A bucket is
sent as soon as the last backward has made it, while the backwards of the layers below go on; where
the transport can tell that all others' have come, it is summed and sent on at once, too. The last
bucket waits for ``hand_in``: with it, a holder says how many microbatches it summed. If a gradient
was added to after it had left, the holder says that as well, and all sum its bucket once more.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.engine.reduce.buckets import (
    Bucket,
    ParameterRange,
    ShardValues,
    added,
    buckets_of,
    cut,
    keep,
    room_for,
    vector_of,
)
from penstock.engine.reduce.reducer import (
    GradientWatch,
    Passed,
    Purpose,
    Reducer,
    SharedWeights,
    check_trained_alike,
    frozen_places,
)
from penstock.engine.transport import Edge, Transport

_AGAIN = 1 << 31
"""Added to the number of a round for buckets that are summed once more."""


@dataclass
class _SumRound:
    """A round of sums, as far as this rank has come.

    Attributes:
        number: tells the round's messages from others.
        frozen: places of the parameters that are not trained.
        buckets: those of the others.
        own: by bucket that has left, this rank's gradients of the shard that it owns.
        sums: by bucket, what it has made of its shard.
        counts: of each holder that has said so, of how many microbatches its gradients are.
        left: when each bucket left, on this host's clock.
        again: buckets that are summed once more, as far as this rank knows.
        averages: whether sums are divided by the number of microbatches.
    """

    number: int
    frozen: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    own: dict[int, ShardValues] = field(default_factory=dict)
    sums: dict[int, ShardValues] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    averages: bool = False

    @property
    def last(self) -> int:
        """The bucket that leaves when all gradients are there."""
        return len(self.buckets) - 1

    def tells(self, bucket: int, owner: int) -> bool:
        """Whether the others send an owner something of a bucket: its numbers or, with the first
        and the last, what all must know."""
        return bucket in (0, self.last) or bool(self.buckets[bucket].ranges_of(owner))


class OwnerReducer(Reducer):
    """Sums by owners, for one group of shared weights.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.
        most_buckets: into how many buckets gradients are cut at most; of more than one, those
            that are complete leave before the others.
        servers: holders that own everything and have no gradients of their own; by default there
            are none, and every holder owns a shard. They take all gradients at once.

    Raises:
        RunError: in a step, if not all holders train the same weights.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedWeights,
        transport: Transport,
        most_buckets: int = 1,
        servers: Collection[int] = (),
    ) -> None:
        assert most_buckets == 1 or not servers, "only holders know of how many microbatches"
        self._owners = tuple(holder for holder in shared.ranks if holder in servers) or shared.ranks
        self._givers = tuple(holder for holder in shared.ranks if holder not in servers)
        self.leaves_early = most_buckets > 1
        self._rank = rank
        self._shared = shared
        self._transport = transport
        self._most_buckets = most_buckets
        self._buckets: dict[tuple[int, ...], tuple[Bucket, ...]] = {}
        self._watch = GradientWatch(shared.parameters)
        self._round: _SumRound | None = None
        self._passed: list[Passed] = []

    def _begin(self, number: int) -> _SumRound:
        if self._round is None or self._round.number != number:
            frozen = frozen_places(self._shared.parameters)
            self._round = _SumRound(number, frozen, self._buckets_without(frozen))
        return self._round

    def _buckets_without(self, frozen: tuple[int, ...]) -> tuple[Bucket, ...]:
        if frozen not in self._buckets:
            shared = self._shared
            trained = {
                place: parameter
                for place, parameter in enumerate(shared.parameters)
                if place not in frozen
            }
            # What is frozen seldom changes, and then for good.
            self._buckets = {frozen: buckets_of(trained, self._owners, self._most_buckets)}
        return self._buckets[frozen]

    @property
    def _now(self) -> _SumRound:
        assert self._round is not None, "hand_in comes first"
        return self._round

    @contextmanager
    def closing(self, number: int) -> Iterator[None]:
        """Within, a bucket leaves as soon as all of its gradients have been made."""
        round_ = self._begin(number)
        if not round_.last:
            yield
            return
        missing = [{*bucket.places} - {*round_.frozen} for bucket in round_.buckets]
        missing.pop()

        def complete(place: int) -> None:
            for index, left in enumerate(missing):
                if place in left:
                    left.remove(place)
                    if not left:
                        self._give(index)
            self._sum_what_has_come()

        def again(place: int) -> None:
            places = (bucket.places for bucket in round_.buckets)
            round_.again |= {
                index for index, own in enumerate(places) if place in own and index in round_.own
            }

        trained = frozenset().union(*missing)
        with self._watch.watching(sorted(trained), complete, again):
            yield

    def hand_in(self, number: int, num_gathered: int) -> None:
        round_ = self._begin(number)
        round_.counts[self._rank] = num_gathered
        for index in range(len(round_.buckets)):
            if index not in round_.own:
                self._give(index)

    def _give(self, index: int, more: int = 0) -> None:
        """Send a bucket of this rank's gradients to its owners.

        Args:
            more: what is added to the number of the round.
        """
        round_, shared = self._now, self._shared
        round_.left.setdefault(index, time.perf_counter())
        bucket = round_.buckets[index]
        gradients = {place: vector_of(shared.parameters[place].grad) for place in bucket.places}
        round_.own[index] = []
        gives = self._rank in self._givers
        for owner in (self._rank, *shared.others(self._rank)):
            if owner not in self._owners:
                continue
            values = [cut(gradients[own.place], own) for own in bucket.ranges_of(owner)]
            if owner == self._rank:
                round_.own[index] = values
            elif gives and round_.tells(index, owner):
                header = self._header(index)
                edge = shared.edge(self._rank, owner, Purpose.PART, index)
                self._transport.send(edge, round_.number + more, (*header, values))

    def _header(self, index: int) -> tuple[tuple[int, ...] | None, int, tuple[int, ...]]:
        """Words that go with a bucket: what is not trained, with the first; with the last, how
        many microbatches were summed, and which buckets must be summed once more."""
        round_ = self._now
        frozen = round_.frozen if index == 0 else None
        if index < round_.last:
            return frozen, 0, ()
        return frozen, round_.counts[self._rank], tuple(sorted(round_.again))

    def _sum_what_has_come(self) -> None:
        """Sum the buckets of which all others have sent theirs, as far as anybody can tell."""
        round_ = self._now
        for index in [index for index in round_.own if index not in round_.sums]:
            # All are asked for, so that a transport looks for all.
            come = [
                self._transport.has_come(
                    self._shared.edge(holder, self._rank, Purpose.PART, index), round_.number
                )
                for holder in self._shared.others(self._rank)
                if round_.tells(index, self._rank)
            ]
            if all(come):
                self._sum(index)

    def advance(self, *, averages: bool) -> None:
        round_ = self._now
        round_.averages = averages
        for index in range(len(round_.buckets)):
            if index not in round_.sums:
                self._sum(index)
        for index in sorted(round_.again):
            self._give(index, _AGAIN)
        for index in sorted(round_.again):
            self._sum(index, _AGAIN)

    def _sum(self, index: int, more: int = 0) -> None:
        """Sum this rank's shard of a bucket, and hand it out."""
        round_ = self._now
        if self._rank not in self._owners:
            round_.sums[index] = []
            return
        columns = [self._parts_of(holder, index, more) for holder in self._givers]
        round_.sums[index] = [added(gradients) for gradients in zip(*columns, strict=True)]
        if self._averages_itself:
            for value in round_.sums[index]:
                if value is not None:
                    self._average(value)
        self._hand_out(index, more)

    @property
    def _averages_itself(self) -> bool:
        """Whether owners make means of their sums: only servers know of how many microbatches."""
        return self._owners != self._givers

    def _hand_out(self, index: int, more: int) -> None:
        """Send the sum of the shard that this rank owns to all other holders."""
        sums = self._now.sums[index]
        for holder in self._shared.others(self._rank) if sums else ():
            edge = self._shared.edge(self._rank, holder, Purpose.SUM, index)
            self._transport.send(edge, self._now.number + more, sums)

    def _parts_of(self, holder: int, index: int, more: int) -> ShardValues:
        """One holder's gradients of the shard of a bucket that this rank owns."""
        round_ = self._now
        if holder == self._rank or not round_.tells(index, self._rank):
            return round_.own[index]
        waiting = (
            f"rank {self._rank}, waiting before its update for rank {holder}'s gradients of "
            "weights that both hold"
        )
        frozen, count, again, numbers = self._receive(holder, Purpose.PART, index, more, waiting)
        if index == 0:
            check_trained_alike(self._rank, round_.frozen, holder, frozen)
        if index == round_.last and not more:
            round_.counts[holder] = count
            round_.again |= {*again}
        values: ShardValues = numbers
        return values

    def _receive(self, holder: int, purpose: Purpose, index: int, more: int, waiting: str) -> Any:
        edge = self._shared.edge(holder, self._rank, purpose, index)
        return self._transport.recv(edge, self._now.number + more, waiting)

    def finish(self) -> None:
        whole: dict[int, Tensor] = {}
        for index, bucket in enumerate(self._now.buckets):
            for owner, ranges in bucket.shards:
                if ranges:
                    self._put(ranges, self._sums_of(owner, index), whole)
            self._note(index)
        for place, vector in whole.items():
            self._divide(vector)
            keep(vector, self._shared.parameters[place])
        self._round = None

    def _note(self, index: int) -> None:
        """The sum of a bucket is here; between threads it has gone nowhere."""
        if self.leaves_early:
            self._passed.append(Passed(index, self._now.left[index], time.perf_counter()))

    def _divide(self, summed: Tensor) -> None:
        """Make a sum the mean over microbatches, if that is wanted; here and not by its owner, who
        sums buckets before it knows of how many microbatches."""
        if not self._averages_itself:
            self._average(summed)

    def _average(self, summed: Tensor) -> None:
        total = sum(self._now.counts.values())
        if self._now.averages and total > 1:
            summed.div_(total)

    def _sums_of(self, owner: int, index: int) -> ShardValues:
        if owner == self._rank:
            return self._now.sums[index]
        waiting = (
            f"rank {self._rank}, waiting before its update for rank {owner}'s sum of gradients of "
            "weights that both hold"
        )
        sums: ShardValues = self._receive(owner, Purpose.SUM, index, 0, waiting)
        if index in self._now.again:  # that was the one that does not count
            sums = self._receive(owner, Purpose.SUM, index, _AGAIN, waiting)
        return sums

    def _put(
        self, ranges: Sequence[ParameterRange], sums: ShardValues, whole: dict[int, Tensor]
    ) -> None:
        """Write sums where this rank's own gradients were: between threads others read these, but
        who has sent the sum of a shard has read all of it."""
        for (place, start, stop), value in zip(ranges, sums, strict=True):
            if value is None:
                continue
            if value.layout is not torch.strided:
                gradient = self._shared.parameters[place].grad = value.clone()
                self._divide(gradient)
                continue
            if place not in whole:
                whole[place] = room_for(self._shared.parameters[place], value.dtype)
            whole[place][start:stop] = value

    def take_passed(self) -> list[Passed]:
        passed, self._passed = self._passed, []
        return passed

    def outgoing(self) -> set[Edge]:
        return {
            self._shared.edge(self._rank, holder, purpose, index)
            for holder in self._shared.others(self._rank)
            for purpose in (Purpose.PART, Purpose.SUM)
            for index in range(self._most_buckets)
        }
