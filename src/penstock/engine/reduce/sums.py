"""``GradientSums``: the sums that a rank takes part in, which are due, and in which order.

What makes a reducer follows from its name in a plan (``maker_of``). Weights with several holders
begin with the same values (``begin_equal``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import accumulate
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor, nn

from penstock.base.units import count_of
from penstock.core.summation.split import MOST_PORTIONS
from penstock.core.summation.tree import TreeRole
from penstock.engine.reduce.buckets import buckets_of, cut
from penstock.engine.reduce.delegated import AllReducer, ServerReducer
from penstock.engine.reduce.expert_weights import ExpertReducer
from penstock.engine.reduce.fully_sharded import FullyShardedReducer
from penstock.engine.reduce.inside import Hosts, sharing_cards
from penstock.engine.reduce.owners import OwnerReducer
from penstock.engine.reduce.reducer import (
    MakeReducer,
    Passed,
    Purpose,
    Reducer,
    ServedGradients,
    SharedWeights,
)
from penstock.engine.reduce.rows import RowReducer
from penstock.engine.reduce.sharding import ShardedReducer, Shards
from penstock.engine.reduce.stale import StaleReducer
from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.base import FIRST_EXCHANGE
from penstock.engine.transport.groups import make_groups
from penstock.engine.weights.sharded_layers import ShardedLayers
from penstock.planning.plans.summing import Summing

T = TypeVar("T")

NOT_SHARDED: Mapping[int, ShardedLayers] = MappingProxyType({})


class GradientSums:
    """Completes the gradients of weights that one rank shares with others.

    A round begins with ``begin`` and sums every group of shared weights once.

    Args:
        shared: the weights of which this rank holds one of several copies.
        everywhere: whether all holders keep the sum; otherwise the first of them does, and the
            others have no gradient.
        make: makes the reducer of each group of weights.
    """

    def __init__(
        self,
        rank: int,
        shared: Sequence[SharedWeights],
        transport: Transport,
        *,
        everywhere: bool,
        make: MakeReducer = OwnerReducer,
    ) -> None:
        self._rank = rank
        self._shared = shared
        self._transport = transport
        self._everywhere = everywhere
        self._reducers: list[Reducer] = [make(rank, weights, transport) for weights in shared]
        self._sharded = [
            reducer for reducer in self._reducers if isinstance(reducer, ShardedReducer)
        ]
        self._in_rows = [reducer for reducer in self._reducers if isinstance(reducer, RowReducer)]
        for reducer in self.stale[1:]:
            reducer.heard = self.stale[0].heard
        self._number = 0
        self._averages = False
        self._num_gathered = 0
        self._to_hand_in: list[set[int]] = []
        self._to_advance: list[int] = []
        self._to_finish: set[int] = set()
        self._to_take_back: list[tuple[ShardedReducer, int]] = []

    @property
    def number(self) -> int:
        """The number that tells the messages of the round at hand from others."""
        return self._number

    @property
    def stale(self) -> list[StaleReducer]:
        """Those of weights whose updates need not wait for all workers."""
        return [reducer for reducer in self._reducers if isinstance(reducer, StaleReducer)]

    def take_last(self) -> None:
        """Take the weights with which a stream has ended that nobody knew to end."""
        for reducer in self.stale:
            reducer.take_back(self._number)

    def begin(self, number: int, *, averages: bool) -> None:
        """Begin a round.

        Args:
            number: tells its messages from those of other rounds.
            averages: whether sums are divided by the number of microbatches of all holders.
        """
        self._number = number
        self._averages = averages
        self._num_gathered = 0
        self._to_hand_in = [set(weights.stages) for weights in self._shared]
        self._to_advance = []
        self._to_finish = set(range(len(self._shared)))

    def begin_equal(self, summing: Summing) -> None:
        """Give shared weights the values that their first holder has, and let reducers meet. For
        processes.

        Args:
            summing: the plan's, which says who is near whom.
        """
        for reducer, weights in zip(self._reducers, self._shared, strict=True):
            if reducer.begins_equal:
                continue
            if weights.stand_ins is not None:
                weights.stand_ins.gather_values()
            begin_equal(self._rank, weights, self._transport, summing)
            if weights.stand_ins is not None:
                weights.stand_ins.hand_back_values()
        try:
            for reducer in self._reducers:
                reducer.open()
        except BaseException:
            self.close(failed=True)
            raise

    def shards(self, *, hands_sums_to_all: bool) -> Shards:
        """The rows that this rank owns of weights of which each holder updates a part.

        Args:
            hands_sums_to_all: whether every holder is given all sums.
        """
        for reducer in self._sharded:
            reducer.hands_sums_to_all = hands_sums_to_all
        parts = [item for reducer in self._sharded for item in reducer.shards.items()]
        parts += [item for reducer in self._in_rows for item in reducer.shards.items()]
        return Shards(dict(parts))

    def rows_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What has the gradient of a parameter: its rows here, if each holder keeps some only."""
        rows = (reducer.rows_of(parameter) for reducer in self._in_rows)
        return next((own for own in rows if own is not None), parameter)

    def norms_of_rows(self, stage: int | None = None) -> dict[nn.Parameter, Tensor]:
        """The norms of whole gradients of which each holder has rows; all holders call it.

        Args:
            stage: whose; by default all stages'.
        """
        norms: dict[nn.Parameter, Tensor] = {}
        for reducer in self._in_rows:
            if stage in (None, reducer.stage):
                norms |= reducer.norms()
        return norms

    def gather(self, num_microbatches: int) -> None:
        """A minibatch of so many microbatches begins: gather weights of which holders have rows."""
        for reducer in self._in_rows:
            reducer.gather(num_microbatches)

    def drop(self) -> None:
        """Forget what a failed round has gathered."""
        for reducer in self._in_rows:
            reducer.drop()

    @cached_property
    def expert_homes(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each stage whose copies exchange tokens, in the middle of ops."""
        experts = [reducer for reducer in self._reducers if isinstance(reducer, ExpertReducer)]
        return {reducer.stage: reducer.ranks for reducer in experts}

    @property
    def has_any(self) -> bool:
        """Whether there is anything to sum."""
        return bool(self._shared)

    @property
    def has_shards(self) -> bool:
        """Whether others update weights for this rank."""
        return bool(self._sharded)

    def serves(self, stage: int) -> bool:
        """Whether this rank is a parameter server that may step a stage bucket by bucket."""
        reducers = [
            reducer
            for reducer, weights in zip(self._reducers, self._shared, strict=True)
            if stage in weights.stages
        ]
        return bool(reducers) and all(
            isinstance(reducer, ShardedReducer) and reducer.serves for reducer in reducers
        )

    def update_in_turn(self, stage: int, step: Callable[[], None]) -> None:
        """Step a stage that this rank ``serves``, and answer, bucket by bucket.

        Args:
            step: steps all rows that have a gradient.
        """
        for index in [*self._to_advance]:
            reducer = self._reducers[index]
            if stage in self._shared[index].stages and isinstance(reducer, ShardedReducer):
                self._to_advance.remove(index)
                self._to_finish.remove(index)
                reducer.update_in_turn(step)

    def hand_back(self, stage: int) -> None:
        """A stage has stepped: give others what this rank has updated for them. What they have is
        to be taken before anybody reads the stage's weights."""
        for reducer in self._sharded:
            if stage in reducer.stages:
                reducer.hand_back(self._number)
                self._to_take_back.append((reducer, self._number))

    def relay(self) -> None:
        """All stages have stepped: hand on what others have updated, to those who get it from this
        rank. Later would be too late: whoever waits for this rank's first op may be waited for."""
        for reducer, number in sorted(self._to_take_back, key=lambda item: item[0].tag):
            reducer.relay(number)

    def take_back(self, stage: int | None = None) -> None:
        """Wait for what others have updated.

        Args:
            stage: the one whose weights are wanted; by default all stages.
        """
        wanted = [item for item in self._to_take_back if stage is None or stage in item[0].stages]
        for reducer, number in wanted:
            self._to_take_back.remove((reducer, number))
            reducer.take_back(number)

    def close(self, *, failed: bool) -> None:
        """No round follows; ``failed`` says whether it is because this rank has failed."""
        for reducer in self._reducers:
            reducer.close(failed=failed)

    def gathered(self) -> None:
        """The gradients of one more microbatch are there."""
        self._num_gathered += 1

    def leaves_early(self, stage: int) -> bool:
        """Whether gradients of a stage may leave while its last backward runs."""
        return any(
            reducer.leaves_early and stage in weights.stages
            for reducer, weights in zip(self._reducers, self._shared, strict=True)
        )

    @contextmanager
    def closing(self, stage: int) -> Iterator[None]:
        """Within, the last gradients of a stage are made."""
        with ExitStack() as stack:
            for reducer, left in zip(self._reducers, self._to_hand_in, strict=True):
                if left == {stage}:
                    stack.enter_context(reducer.closing(self._number))
            yield

    def hand_in(self, stage: int) -> None:
        """The gradients of a stage are complete here: let others sum those that they wait for."""
        for index, left in enumerate(self._to_hand_in):
            if stage in left:
                left.remove(stage)
                if not left:
                    stand_ins = self._shared[index].stand_ins
                    if stand_ins is not None:
                        stand_ins.gather()
                    self._reducers[index].hand_in(self._number, self._num_gathered)
                    self._to_advance.append(index)

    def complete(self, stage: int | None = None) -> None:
        """Make the gradients of shared weights the sums over their holders.

        Args:
            stage: the one that uses the weights; by default all stages.
        """
        due = [
            index
            for index in sorted(self._to_finish)
            if stage is None or stage in self._shared[index].stages
        ]
        if not due:
            return
        for index in sorted(self._to_advance):
            self._reducers[index].advance(averages=self._averages)
        self._to_advance.clear()
        for index in due:
            self._to_finish.remove(index)
            self._reducers[index].finish()
            stand_ins = self._shared[index].stand_ins
            if stand_ins is not None:
                stand_ins.hand_back()
            if not self._everywhere and self._rank != self._shared[index].ranks[0]:
                for parameter in self._shared[index].parameters:
                    parameter.grad = None

    def take_passed(self) -> list[tuple[int, Passed]]:
        """Exchanges of copies of a stage since this was asked last, with the stage."""
        return self._by_stage(lambda reducer: reducer.take_passed())

    def take_served(self) -> list[tuple[int, ServedGradients]]:
        """Gradients that servers have had of a stage since this was asked last, with the stage."""
        return self._by_stage(lambda reducer: reducer.take_served())

    def _by_stage(self, taken: Callable[[Reducer], Iterable[T]]) -> list[tuple[int, T]]:
        """Reports of reducers, with the stage whose weights they sum; of weights that several
        stages share nothing, which would be no stage's."""
        return [
            (min(weights.stages), report)
            for reducer, weights in zip(self._reducers, self._shared, strict=True)
            for report in taken(reducer)
            if len(weights.stages) == 1
        ]

    def outgoing(self) -> set[Edge]:
        """The channels on which others may wait for this rank's gradients or sums."""
        return {edge for reducer in self._reducers for edge in reducer.outgoing()}


def in_threads(summing: Summing, attempt: str, servers: Collection[int]) -> MakeReducer:
    """A maker of reducers for ranks that are threads of one process.

    Args:
        summing: the plan's, which says in which order they add.
        attempt: the name of this pipeline, in hexadecimal digits, which no other has.
        servers: the ranks that are parameter servers, if any are.
    """
    if servers:
        return _stepping_servers(summing, attempt, servers, 1)
    return partial(_by_owners, summing=summing, most_buckets=1)


def _stepping_servers(
    summing: Summing, attempt: str, servers: Collection[int], most_buckets: int = MOST_PORTIONS
) -> MakeReducer:
    """A maker of reducers for a rank whose shared weights parameter servers may update."""
    if summing.stale and servers:
        return partial(StaleReducer, servers=servers, most_stale=summing.stale, attempt=attempt)
    return partial(_sharded, summing=summing, servers=servers, most_buckets=most_buckets)


def maker_of(
    summing: Summing,
    attempt: str,
    holders: Sequence[Sequence[Sequence[int]]],
    seconds: float,
    coordinate: int = 0,
    servers: Collection[int] = (),
    ranks: Sequence[Sequence[int]] = (),
    fully_sharded: Mapping[int, ShardedLayers] = NOT_SHARDED,
) -> MakeReducer:
    """A maker of reducers for a rank that is a process; all ranks call it.

    Args:
        summing: the plan's.
        attempt: the name of this pipeline, in hexadecimal digits, which no other has.
        holders: the processes that hold each group of shared weights, by its tag and by the
            coordinate of tensor ranks, of which each has a part; alike on all ranks.
        seconds: how long ranks wait for each other.
        coordinate: this process's.
        servers: the ranks that are parameter servers, if any are.
        ranks: those that hold each group of shared weights, by its tag.
        fully_sharded: the stages of which this process has rows, known by the time when reducers
            are made.
    """
    if summing.reducer == "fully-sharded":
        return partial(FullyShardedReducer, sharded=fully_sharded)
    if summing.reducer == "parameter-server":
        return _stepping_servers(summing, attempt, servers)
    # By tag, the place of this process's team; of groups that it has nothing of, any.
    firsts = accumulate(map(len, holders[:-1]), initial=0) if holders else ()
    places = [
        first + min(coordinate, len(those) - 1)
        for first, those in zip(firsts, holders, strict=True)
    ]
    hosts = [Hosts.of(summing, own) for own in ranks]
    if summing.reducer == "servers":
        counted = [host for host, those in zip(hosts, holders, strict=True) for _ in those]
        by_shares = sharing_cards(summing, counted)
        return partial(ServerReducer, summing=by_shares, attempt=attempt, numbers=places)
    if summing.reducer == "all-reduce":
        parts = [
            host.exchanging_of(team)
            for host, those in zip(hosts, holders, strict=True)
            for team in those
        ]
        made = iter(make_groups(seconds, [part for own in parts for part in own]))
        by_team = [[next(made) for _ in own] for own in parts]
        by_tag = [by_team[place] for place in places]
        return partial(AllReducer, summing=summing, made=by_tag)
    return partial(_sharded if summing.reducer == "sharded" else _by_owners, summing=summing)


def _by_owners(
    rank: int,
    shared: SharedWeights,
    transport: Transport,
    summing: Summing,
    most_buckets: int = MOST_PORTIONS,
) -> Reducer:
    tree = summing.tree(shared.ranks)
    return OwnerReducer(rank, shared, transport, most_buckets, tree=tree)


def _sharded(
    rank: int,
    shared: SharedWeights,
    transport: Transport,
    summing: Summing,
    servers: Collection[int] = (),
    most_buckets: int = MOST_PORTIONS,
) -> Reducer:
    """Tied weights are of several stages, each with an optimizer, and of gradients of which tensor
    ranks have terms nobody knows a row before all are summed: all holders keep all of those."""
    make = ShardedReducer if shared.divisible else OwnerReducer
    serving = [holder for holder in shared.ranks if holder in servers]
    tree = summing.tree(shared.ranks, serving or None)
    return make(rank, shared, transport, most_buckets, servers, tree)


def summing_words(summing: Summing) -> str:
    """Who sums gradients, where it is not the usual; else empty."""
    if summing.reducer == "servers" and not summing.servers:
        return "gradients of copies are summed by the ranks' own machines (colocated servers)"
    if summing.reducer == "servers":
        servers = count_of(len(summing.servers), "server")
        return f"gradients of copies are summed by ranks and {servers}"
    if summing.reducer == "parameter-server":
        servers = count_of(max(len(summing.servers), 1), "parameter server")
        late = f", {summing.stale} late at most" if summing.stale else ""
        return f"weights of copies are updated by {servers}, the last of the ranks{late}"
    if summing.reducer == "fully-sharded":
        kept = "a step" if summing.gathered_for == "step" else "each use"
        return f"each copy has a part of the weights, and gathers all for {kept}"
    words = {
        "all-reduce": "gradients of copies are summed by torch.distributed",
        "sharded": "each copy updates a part of the weights for all",
    }
    return words.get(summing.reducer, "")


def begin_equal(rank: int, shared: SharedWeights, transport: Transport, summing: Summing) -> None:
    """Give shared weights the values that their first holder has. For processes: each has built the
    model for itself, perhaps with other random numbers.

    They go down the tree of holders that has the first one on top, shard by shard on the channels
    of the sums, since a channel between hosts keeps as much memory ready as its largest message
    needed. All who get them answer: what leaves an accelerator may be overwritten behind something
    that its target has made of it, and the first update need not come behind any such thing.
    """
    if not shared.parameters:
        return
    first = shared.ranks[0]
    role = TreeRole.of(summing.tree(shared.ranks, [first]), rank)
    above = [target for targets in role.targets for target in targets]
    below = [source for sources in reversed(role.sources) for source in sources]
    vectors = [parameter.detach().reshape(-1) for parameter in shared.parameters]
    owners = dict.fromkeys(shared.ranks, 1)
    buckets = buckets_of(dict(enumerate(shared.parameters)), owners, MOST_PORTIONS)
    for index, bucket in enumerate(buckets):
        for number, (_, ranges) in enumerate(bucket.shards, start=FIRST_EXCHANGE):
            values = [cut(vectors[own.place], own) for own in ranges]
            for source in above:
                waiting = f"rank {rank}, waiting for the weights that it shares with rank {first}"
                edge = shared.edge(source, rank, Purpose.SUM, index)
                received = transport.recv(edge, number, waiting)
                for (place, start, stop), value in zip(ranges, received, strict=True):
                    vectors[place][start:stop] = value
                values = received
            for target in below:
                transport.send(shared.edge(rank, target, Purpose.SUM, index), number, values)
    for target in below:
        waiting = f"rank {rank}, waiting for rank {target} to have the weights that both hold"
        transport.recv(shared.edge(target, rank, Purpose.SUM), FIRST_EXCHANGE, waiting)
    for source in above:
        with torch.no_grad():
            for parameter, vector in zip(shared.parameters, vectors, strict=True):
                parameter.copy_(vector.view_as(parameter))
        answer = vectors[0].new_zeros(1)
        transport.send(shared.edge(rank, source, Purpose.SUM), FIRST_EXCHANGE, answer)
