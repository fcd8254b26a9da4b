"""Sums of gradients by owners: each holder of the same weights sums one shard, for all of them.

With r holders of M bytes, a shard is M/r, as nearly as numbers can be divided:

1. Each holder sends every owner its own gradients of that owner's shard: (r−1)/r · M in all.
2. The owner adds what it has got in the order of the ranks, so that the sum has the bits of a loop.
3. It sends the sum of its shard to all others: (r−1) · M/r.

That is 2(r−1)/r · M per rank and direction, what a ring of the same ranks moves, in two steps
instead of 2(r−1). If all sent everything to all, it would be (r−1) · M. Until its gradients are the
sums, a rank keeps M besides: in step 2 the r−1 shards that it got and the sum of its own, in step 3
its sum and the r−1 of others.

Holders that are near each other, as devices of one host are, sum among themselves first: gradients
go up a tree of groups (``summation.tree``), where delegates add them and hand partial sums on, and
sums come back the same ways. The three steps above are those of a tree with one level.

Gradients are not copied together first: a shard is a list of ranges, each of one gradient.
One that a holder does not have is ``None`` there, which is not the same as zeros.

Between processes the steps are made of each bucket of the gradients by itself. A bucket is sent as
soon as the last backward has made it, while the backwards of the layers below go on; where the
transport can tell that all others' have come, it is summed and sent on at once, too. The last
bucket waits for ``hand_in``: with it, a holder says how many microbatches it summed. If a gradient
was added to after it had left, the holder says that as well, and all sum its bucket once more.

What holders wait for has one order, the same on all of them: (stage of the way up and back,
bucket). So all partial sums are on the network before anybody waits for a sum, and nobody waits in
a circle; what has come meanwhile is passed on out of turn.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from penstock.core.summation.tree import SumTree, TreeRole
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
from penstock.engine.reduce.rounds import BucketSum, SumRound
from penstock.engine.transport import Edge, Transport

Counts = tuple[tuple[int, int], ...]
"""(holder, microbatches whose gradients it has)."""

_AGAIN = 1 << 31
"""Added to the number of a round for buckets that are summed once more."""


class OwnerReducer(Reducer):
    """Sums by owners, for one group of shared weights.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.
        most_buckets: into how many buckets gradients are cut at most; of more than one, those
            that are complete leave before the others.
        servers: holders that own everything and have no gradients of their own; by default there
            are none.
        tree: of all holders: who owns what, and who adds what to what. By default each holder owns
            an equal shard, or each server, and sums what all have in the order of the ranks.

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
        tree: SumTree | None = None,
    ) -> None:
        serving = [holder for holder in shared.ranks if holder in servers]
        self._tree = tree or SumTree.of(shared.ranks, owners=serving or None)
        self._role = TreeRole.of(self._tree, rank)
        self._givers = tuple(holder for holder in shared.ranks if holder not in servers)
        # They have no part in the sums from which owners know what all must know.
        learners = () if serving else set(shared.ranks).difference(self._tree.owners)
        self._learners = frozenset(learners)
        self.leaves_early = most_buckets > 1
        self._rank = rank
        self._shared = shared
        self._transport = transport
        self._most_buckets = most_buckets
        self._buckets: dict[tuple[int, ...], tuple[Bucket, ...]] = {}
        self._watch = GradientWatch(shared.parameters)
        self._round: SumRound | None = None
        self._passed: list[Passed] = []

    def _begin(self, number: int) -> SumRound:
        if self._round is None or self._round.number != number:
            frozen = frozen_places(self._shared.parameters)
            self._round = SumRound(number, frozen, self._buckets_without(frozen))
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
            self._buckets = {frozen: buckets_of(trained, self._tree.weights, self._most_buckets)}
        return self._buckets[frozen]

    @property
    def _now(self) -> SumRound:
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
                        self._give(index, round_.under_way)
            self._pass_on_what_has_come()

        def again(place: int) -> None:
            places = (bucket.places for bucket in round_.buckets)
            round_.again |= {
                index
                for index, own in enumerate(places)
                if place in own and index in round_.under_way
            }

        trained = frozenset().union(*missing)
        with self._watch.watching(sorted(trained), complete, again):
            yield

    def hand_in(self, number: int, num_gathered: int) -> None:
        round_ = self._begin(number)
        if self._rank in self._givers:
            round_.counts[self._rank] = num_gathered
        for index in range(len(round_.buckets)):
            if index not in round_.under_way:
                self._give(index, round_.under_way)

    def _give(self, index: int, sums: dict[int, BucketSum], more: int = 0) -> None:
        """Send a bucket of this rank's gradients to those who add them up.

        Args:
            sums: where the bucket goes.
            more: what is added to the number of the round.
        """
        round_, shared = self._now, self._shared
        round_.left.setdefault(index, time.perf_counter())
        bucket = round_.buckets[index]
        sums[index] = passing = BucketSum(index, round_.number + more)
        if self._rank in self._givers:
            gradients = {place: vector_of(shared.parameters[place].grad) for place in bucket.places}
            passing.partial = {
                owner: [cut(gradients[own.place], own) for own in ranges]
                for owner, ranges in bucket.shards
            }
        self._hand_up(passing, 0)

    def _hand_up(self, passing: BucketSum, level: int) -> None:
        """Send what this rank has of a bucket to the delegates of its group of a level."""
        if self._rank not in self._givers:
            return
        for target, owners in self._role.targets[level].items():
            values = chain.from_iterable(passing.partial.pop(owner) for owner in owners)
            if self._now.tells(passing.index, owners):
                edge = self._shared.edge(self._rank, target, Purpose.PART, passing.index)
                message = (*self._header(passing.index), [*values])
                self._transport.send(edge, passing.number, message)

    def _header(self, index: int) -> tuple[tuple[int, ...] | None, Counts, tuple[int, ...]]:
        """Words that go with a bucket: what is not trained, with the first; with the last, how
        many microbatches were summed, and which buckets must be summed once more."""
        round_ = self._now
        frozen = round_.frozen if index == 0 else None
        if index < round_.last:
            return frozen, (), ()
        return frozen, tuple(sorted(round_.counts.items())), tuple(sorted(round_.again))

    def _pass_on_what_has_come(self) -> None:
        """Do what others need of buckets without waiting, as far as anybody can tell."""
        for passing in (*self._now.under_way.values(), *self._now.repeated.values()):
            while passing.stage < self._num_stages(passing):
                # All are asked for, so that a transport looks for all.
                edges = self._awaited(passing)
                come = [self._transport.has_come(edge, passing.number) for edge in edges]
                if not all(come):
                    break
                self._go_on(passing)

    def advance(self, *, averages: bool) -> None:
        round_ = self._now
        round_.averages = averages
        self._pass_on(round_.under_way)
        for index in sorted(round_.again):
            self._give(index, round_.repeated, _AGAIN)
        self._pass_on(round_.repeated)

    def _pass_on(self, sums: Mapping[int, BucketSum]) -> None:
        while waiting := [own for own in sums.values() if own.stage < self._num_stages(own)]:
            # A server learns with the last bucket of how many microbatches gradients are.
            turn = 1 if self._rank in self._givers else -1
            self._go_on(min(waiting, key=lambda own: (own.stage, turn * own.index)))
            if self._role.num_levels > 1:
                self._pass_on_what_has_come()

    def _num_stages(self, passing: BucketSum) -> int:
        """How many stages there are until others have what they need of this rank, and it knows
        what all must know; it may take sums that nobody else needs when it likes."""
        levels = self._role.num_levels
        if self._rank in self._learners and passing.index == self._now.last:
            return 2 * levels + 1
        below = [level for level in range(levels) if self._role.sources[level]]
        return 2 * levels - min(below, default=levels)

    def _awaited(self, passing: BucketSum) -> list[Edge]:
        """The channels of the messages that a bucket's next stage begins with."""
        levels = self._role.num_levels
        if passing.stage < levels:
            return [
                self._shared.edge(source, self._rank, Purpose.PART, passing.index)
                for source, owners in self._role.sources[passing.stage].items()
                if source in self._givers and self._now.tells(passing.index, owners)
            ]
        above = 2 * levels - passing.stage
        return [
            self._shared.edge(target, self._rank, Purpose.SUM, passing.index)
            for target, owners in (self._role.targets[above] if above < levels else {}).items()
            if self._hands_back(passing.index, self._rank, owners)
        ]

    def _go_on(self, passing: BucketSum) -> None:
        """Do a bucket's next stage, and those behind it for which nothing must come."""
        self._do_stage(passing)
        while passing.stage < self._num_stages(passing) and not self._awaited(passing):
            self._do_stage(passing)

    def _do_stage(self, passing: BucketSum) -> None:
        """On the way up, add partial sums of a level and hand them on; on the way back, take the
        sums that come from a level and hand them to the one below."""
        levels = self._role.num_levels
        if passing.stage < levels:
            self._add(passing, passing.stage)
            if passing.stage + 1 < levels:
                self._hand_up(passing, passing.stage + 1)
        else:
            above = 2 * levels - passing.stage
            if above < levels:
                for target in self._role.targets[above]:
                    self._take_sums(passing, above, target)
            if above:
                self._hand_down(passing, above - 1)
        passing.stage += 1

    def _add(self, passing: BucketSum, level: int) -> None:
        """Make the partial sums of a level; of the last one, sums."""
        role, is_top = self._role, level + 1 == self._role.num_levels
        got = {source: self._parts_of(passing, source, level) for source in role.sources[level]}
        for owner, sources in role.additions[level].items():
            columns = [
                passing.partial[owner] if source == self._rank else got[source][owner]
                for source in sources
                if source in self._givers
            ]
            if len(columns) > 1 or is_top:  # else it is what it was
                passing.partial[owner] = [added(values) for values in zip(*columns, strict=True)]
        if is_top and self._rank in self._tree.owners:
            passing.sums[self._rank] = own = passing.partial.pop(self._rank)
            if self._has_servers:
                for value in own:
                    if value is not None:
                        self._average(value)

    @property
    def _has_servers(self) -> bool:
        """Whether servers sum, who make means of their sums, too: only they know of how many
        microbatches."""
        return len(self._givers) < len(self._shared.ranks)

    def _parts_of(self, passing: BucketSum, source: int, level: int) -> dict[int, ShardValues]:
        """A holder's gradients, or a delegate's partial sums, by the owner whose share they are."""
        round_, index = self._now, passing.index
        owners = self._role.sources[level][source]
        if source not in self._givers or not round_.tells(index, owners):
            return {owner: [] for owner in owners}
        waiting = (
            f"rank {self._rank}, waiting before its update for rank {source}'s gradients of "
            "weights that both hold"
        )
        frozen, counts, again, values = self._receive(source, Purpose.PART, passing, waiting)
        if index == 0:
            check_trained_alike(self._rank, round_.frozen, source, frozen)
        if passing.number == round_.number:
            self._learn(counts, again)
        return round_.split(index, owners, values)

    def _learn(self, counts: Counts, again: tuple[int, ...]) -> None:
        self._now.counts.update(counts)
        self._now.again |= {*again}

    def _receive(self, peer: int, purpose: Purpose, passing: BucketSum, waiting: str) -> Any:
        edge = self._shared.edge(peer, self._rank, purpose, passing.index)
        return self._transport.recv(edge, passing.number, waiting)

    @property
    def _shares_sums(self) -> bool:
        """Whether owners hand sums to all."""
        return True

    def _hands_back(self, index: int, target: int, owners: tuple[int, ...]) -> bool:
        """Whether a holder is sent something on the way back: sums of some owners' shares or, with
        the last bucket, what only owners know."""
        learns = index == self._now.last and target in self._learners
        return learns or (self._shares_sums and self._now.has_numbers(index, owners))

    def _hand_down(self, passing: BucketSum, level: int) -> None:
        """Send sums to those of whose gradients they were made at a level."""
        for source, owners in self._role.sources[level].items():
            if self._hands_back(passing.index, source, owners):
                values = chain.from_iterable(
                    passing.sums[owner] for owner in owners if self._shares_sums
                )
                _, *known = self._header(passing.index)
                message = (*known, [*values]) if source in self._learners else [*values]
                edge = self._shared.edge(self._rank, source, Purpose.SUM, passing.index)
                self._transport.send(edge, passing.number, message)

    def _take_sums(self, passing: BucketSum, level: int, target: int) -> None:
        """Take the sums that come from one who has had this rank's partial sums."""
        owners = self._role.targets[level][target]
        if not self._hands_back(passing.index, self._rank, owners):
            return
        waiting = (
            f"rank {self._rank}, waiting before its update for rank {target}'s sum of gradients of "
            "weights that both hold"
        )
        message = self._receive(target, Purpose.SUM, passing, waiting)
        if self._rank in self._learners:
            *known, message = message
            if passing.number == self._now.number:
                self._learn(*known)
        if self._shares_sums:
            passing.sums |= self._now.split(passing.index, owners, message)

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
        if not self._has_servers:
            self._average(summed)

    def _average(self, summed: Tensor) -> None:
        total = sum(self._now.counts.values())
        if self._now.averages and total > 1:
            summed.div_(total)

    def _sums_of(self, owner: int, index: int) -> ShardValues:
        """The sum of a shard, for which the rank waits if it was not to be handed on."""
        sums = self._now.under_way, self._now.repeated  # what is repeated does not count
        for passing in (own[index] for own in sums if index in own):
            if owner not in passing.sums:
                self._take_sums(passing, *self._places[owner])
        return self._now.final(index).sums.pop(owner)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """By owner, where its sums come from: level and peer."""
        return {
            owner: (level, target)
            for level, targets in enumerate(self._role.targets)
            for target, owners in targets.items()
            for owner in owners
        }

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
