"""``StaleReducer``: a parameter server that does not wait for the slowest worker at every update.

Which gradients an update gets, and when a worker may go on, ``summation.staleness`` decides as they
arrive. What travels is what ``sharding`` sends, with the numbers of each worker's own minibatches:

1. A worker sends its gradients (M bytes), and rings if the transport tells nobody what came first.
2. The server takes them in the order in which they come, and asks the clock what follows.
3. An update adds contributions in the order of (minibatch, rank), and steps.
4. An answer is a copy of the weights as they are, since the next update may come at any time.
5. Behind the last minibatch all workers have all of the journal: what each update has added up, and
   what each worker has read. It is all that the result depends on.

``Serving`` is the server's part of a stream, over all groups of weights.
"""

from __future__ import annotations

import queue
import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from penstock.base.errors import DeadlineError
from penstock.core.summation.frames import Member, key_of
from penstock.core.summation.listener import Bell, Ring, Ringer
from penstock.core.summation.staleness import Answer, Contribution, StaleClock, StaleStream
from penstock.engine.reduce.buckets import ShardValues, added
from penstock.engine.reduce.delegated import own_host
from penstock.engine.reduce.reducer import (
    Purpose,
    SharedWeights,
    check_trained_alike,
    frozen_places,
)
from penstock.engine.reduce.sharding import ShardedReducer
from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.base import FIRST_EXCHANGE


class StaleReducer(ShardedReducer):
    """One rank's part in stale-synchronous updates of one group of shared weights.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.
        servers: the one rank that updates.
        most_stale: by how many updates a gradient may be late.
        attempt: the name of this pipeline, in hexadecimal digits, which no other has.

    Attributes:
        stages: those of this rank that use the weights.
        stream: what happened in the last stream, once it is over.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedWeights,
        transport: Transport,
        servers: Collection[int],
        most_stale: int,
        attempt: str,
    ) -> None:
        super().__init__(rank, shared, transport, servers=servers)
        (self._server,) = servers
        self._most_stale = most_stale
        self._session = bytes.fromhex(attempt)[:16]
        self._ringer: Ringer | None = None
        self._bell: Bell | None = None
        self.heard: queue.SimpleQueue[Ring] = queue.SimpleQueue()  # of all groups of a rank
        self.stream = StaleStream()
        self._clock = StaleClock(len(self._givers), most_stale)
        self._kept: dict[Contribution, ShardValues] = {}
        self._numbers: list[int] = []

    @property
    def serves(self) -> bool:
        """Whether this rank is the server."""
        return self._rank == self._server

    def open(self) -> None:
        """Connect workers to the server's bell.

        Raises:
            RunError: the server can't be reached, or refuses.
        """
        edges = [self._shared.edge(self._server, giver, Purpose.SUM) for giver in self._givers]
        if self.serves:
            word = secrets.token_hex(16)
            count = len(self._givers)
            self._bell = Bell(own_host(), key_of(word, ""), self.tag, count, self.heard)
            for edge in edges:
                self._transport.send(edge, FIRST_EXCHANGE - 1, (*self._bell.address, word))
            return
        place = self._givers.index(self._rank)
        waiting = f"rank {self._rank}, waiting for where the parameter server listens"
        host, port, word = self._transport.recv(edges[place], FIRST_EXCHANGE - 1, waiting)
        member = Member(self._session, self.tag, place, len(self._givers))
        self._ringer = Ringer((host, port), member, key_of(word, ""))

    def close(self, *, failed: bool) -> None:
        if self._ringer is not None:
            self._ringer.close()
        if self._bell is not None:
            self._bell.close()

    def hand_in(self, number: int, num_gathered: int) -> None:
        super().hand_in(number, num_gathered)
        if self._ringer is not None:
            self._ringer.ring(number)

    @torch.no_grad()
    def take_back(self, number: int) -> None:
        """Wait for weights that have seen enough."""
        if self.serves:
            return
        edge = self._shared.edge(self._server, self._rank, Purpose.WEIGHTS)
        waiting = f"rank {self._rank}, waiting for the weights of rank {self._server}'s next update"
        journal, values = self._transport.recv(edge, number, waiting)
        if journal is not None:
            self.stream = StaleStream.unpacked(journal.tolist())
        self._put_rows(self._ranges_of(self._server), values)
        self._note_served(self._server)

    # What the server does instead of ``hand_in``, ``advance`` and ``finish``.

    def begin_stream(self) -> None:
        """Whatever was before, a stream begins."""
        self._clock = StaleClock(len(self._givers), self._most_stale)
        self._kept.clear()
        self._numbers = []

    def begin_minibatch(self, number: int) -> None:
        """Messages about the next minibatch of the stream have this number."""
        self._numbers.append(number)

    @property
    def has_updated(self) -> bool:
        """Whether the update of the minibatch at hand has been made."""
        return self._clock.num_updates >= len(self._numbers)

    @property
    def is_over(self) -> bool:
        """Whether everything is applied and answered."""
        return self._clock.is_over

    def expected(self) -> dict[int, tuple[Edge, int]]:
        """By the place of a worker, the message with its next gradients, if there may be one."""
        return {
            place: (self._shared.edge(giver, self._rank, Purpose.PART), self._numbers[minibatch])
            for place, giver in enumerate(self._givers)
            if (minibatch := self._clock.next_of(place).minibatch) < len(self._numbers)
        }

    def take_in(self, place: int) -> list[tuple[Contribution, ...] | Answer]:
        """Take the next gradients of a worker, and decide what follows. [2]"""
        contribution = self._clock.next_of(place)
        edge, number = self.expected()[place]
        waiting = f"rank {self._rank}, waiting for rank {edge.source}'s gradients"
        frozen, *_, numbers = self._transport.recv(edge, number, waiting)
        own = frozen_places(self._shared.parameters)
        check_trained_alike(self._rank, own, edge.source, frozen)
        self._kept[contribution] = numbers
        return self._clock.arrive(place)

    def ends_with(self, minibatch: int) -> list[tuple[Contribution, ...] | Answer]:
        """No minibatch follows this one."""
        return self._clock.ends_with(minibatch)

    def add_up(self, contributions: Sequence[Contribution]) -> None:
        """Give the rows that the server steps the sum of some contributions. [3]"""
        columns = zip(
            *(self._kept.pop(contribution) for contribution in contributions), strict=True
        )
        self._give_rows(0, map(added, columns))

    def answer(self, to: Contribution) -> None:
        """Send a worker the weights as they are. [4]"""
        giver, number = self._givers[to.worker], self._numbers[to.minibatch]
        self._send(giver, number, ends=self._clock.is_over_for(to))

    def send_to_all(self, number: int) -> None:
        """Give all workers the weights with which the stream has ended."""
        for giver in self._givers:
            self._send(giver, number, ends=True)

    def _send(self, giver: int, number: int, *, ends: bool) -> None:
        values = [value.clone() for value in self._values_of(self._ranges_of(self._rank))]
        journal: Tensor | None = None
        if ends:  # [5]
            self.stream = self._clock.stream
            journal = torch.tensor(self.stream.packed(), dtype=torch.int64)
        edge = self._shared.edge(self._rank, giver, Purpose.WEIGHTS)
        self._transport.send(edge, number, (journal, values))


class Serving:
    """A parameter server's part of a stream, over all groups of weights.

    Args:
        rank: the server's.
        reducers: one for each group.
        transport: the rank's end of its channels.
        step: steps the stages of a group whose gradients are there.
    """

    def __init__(
        self,
        rank: int,
        reducers: Sequence[StaleReducer],
        transport: Transport,
        step: Callable[[Collection[int]], None],
    ) -> None:
        self._rank, self._reducers, self._transport, self._step = rank, reducers, transport, step
        self._by_tag = {reducer.tag: reducer for reducer in reducers}
        self._early: deque[Ring] = deque()
        self._heard = reducers[0].heard
        self._count: int | None = None

    def forget(self) -> None:
        """Whatever was under way is given up."""
        self._count = None
        self._early.clear()

    def serve(self, number: int, *, is_last: bool) -> None:
        """Make the updates of one minibatch.

        Args:
            number: of its messages.
            is_last: whether none follows.
        """
        if self._count is None:
            self._count = 0
            for reducer in self._reducers:
                reducer.begin_stream()
        for reducer in self._reducers:
            reducer.begin_minibatch(number)
        self._count += 1
        if is_last:
            self._end()
        while not all(reducer.has_updated for reducer in self._reducers):
            self._take_next()

    def drain(self, number: int) -> None:
        """End a stream behind the minibatch before, which nobody knew to be the last.

        Args:
            number: of the messages with which workers get what came of it.
        """
        if self._count is not None:
            self._end()
        for reducer in self._reducers:
            reducer.send_to_all(number)

    def _end(self) -> None:
        assert self._count is not None
        for reducer in self._reducers:
            self._follow(reducer, reducer.ends_with(self._count - 1))
        while not all(reducer.is_over for reducer in self._reducers):
            self._take_next()
        self.forget()

    def _take_next(self) -> None:
        reducer, place = self._next()
        self._follow(reducer, reducer.take_in(place))

    def _follow(
        self, reducer: StaleReducer, decided: Sequence[tuple[Contribution, ...] | Answer]
    ) -> None:
        for decision in decided:
            if isinstance(decision, Answer):
                reducer.answer(decision.to)
            else:
                reducer.add_up(decision)
                self._step(reducer.stages)

    def _next(self) -> tuple[StaleReducer, int]:
        """Whose gradients have come first of those that are expected now."""
        waiting = f"rank {self._rank}, waiting for any worker's gradients"
        expected: list[tuple[StaleReducer, int, tuple[Edge, int]]] = [
            (reducer, place, message)
            for reducer in self._reducers
            for place, message in reducer.expected().items()
        ]
        first = self._transport.first_of([message for *_, message in expected], waiting)
        if first is not None:
            reducer, place, _ = expected[first]
            return reducer, place
        return self._next_heard({(reducer.tag, place) for reducer, place, _ in expected}, waiting)

    def _next_heard(
        self, expected: Collection[tuple[int, int]], waiting: str
    ) -> tuple[StaleReducer, int]:
        for ring in self._early:
            if (ring.group, ring.place) in expected:
                self._early.remove(ring)
                return self._by_tag[ring.group], ring.place
        patience = self._transport.patience
        while True:
            try:
                ring = self._heard.get(timeout=patience.seconds)
            except queue.Empty:
                raise DeadlineError(
                    f"{waiting}: none came within {patience.seconds:g} s; if their work takes "
                    f"longer, raise {patience.argument}"
                ) from None
            # Of one that has left, what it has said last comes now, or why it has left.
            if (ring.group, ring.place) in expected:
                return self._by_tag[ring.group], ring.place
            self._early.append(ring)
