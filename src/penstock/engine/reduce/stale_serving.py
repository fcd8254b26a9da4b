"""``Serving``: a parameter server's part of a stream, as gradients of many workers arrive."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Collection, Sequence

from penstock.base.errors import DeadlineError
from penstock.core.summation.listener import Ring
from penstock.core.summation.staleness import Answer, Contribution
from penstock.engine.reduce.stale import StaleReducer
from penstock.engine.transport import Edge, Transport


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
