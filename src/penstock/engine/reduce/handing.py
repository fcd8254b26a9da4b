"""``FlatReducer``: what ways to sum have in common that hand flat buffers to somebody else.

Holders tell each other, besides, how many microbatches they summed, what is frozen, and which
gradients they lack. Gradients leave as soon as they are complete.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from penstock.base.errors import RunError
from penstock.engine.reduce.flat import FlatBuffers, FlatLayout, Placed
from penstock.engine.reduce.reducer import Passed, Purpose, Reducer, SharedWeights
from penstock.engine.reduce.watch import GradientWatch
from penstock.engine.transport import Edge, Transport


class _Told(NamedTuple):
    """What one holder tells the others of a round."""

    num_gathered: int
    frozen: tuple[int, ...]
    absent: tuple[int, ...]


class FlatReducer(Reducer):
    """Hands in flat buffers of gradients, and takes their sums.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.

    Raises:
        RunError: in a step, if not all holders train the same weights.
    """

    leaves_early = True

    def __init__(self, rank: int, shared: SharedWeights, transport: Transport) -> None:
        self._rank = rank
        self._shared = shared
        self._transport = transport
        self._layouts: dict[tuple[int, ...], FlatLayout] = {}
        self._number = 0
        self._own = _Told(0, (), ())
        self._averages = False
        self._has_begun = False
        self._began = 0.0
        self._passed: list[Passed] = []
        self._left: set[Placed] = set()
        self._watch = GradientWatch(shared.parameters)

    @abstractmethod
    def start(self, layout: FlatLayout) -> None:
        """A round begins, whose gradients lie so; waits for nobody."""

    @abstractmethod
    def give(self, placed: Placed) -> bool:
        """Take over one parameter's gradient, which is complete; waits for nobody.

        Returns:
            Whether there is one.
        """

    @abstractmethod
    def summed(self, waiting: str) -> FlatBuffers:
        """Wait for the sums.

        Args:
            waiting: what waits, for errors.
        """

    @property
    def layout(self) -> FlatLayout:
        """Where gradients lie now."""
        frozen = _frozen(self._shared.parameters)
        if frozen not in self._layouts:
            # What is frozen seldom changes, and then for good.
            self._layouts = {frozen: FlatLayout(self._shared.parameters, frozen)}
        return self._layouts[frozen]

    @contextmanager
    def closing(self, number: int) -> Iterator[None]:
        """Within, each gradient leaves as soon as it has been made."""
        placed = {one.place: one for one in self._start().placed}

        def complete(place: int) -> None:
            self._left.add(placed[place])
            self.give(placed[place])

        with self._watch.watching(placed, complete, _refuse):
            yield

    def _start(self) -> FlatLayout:
        layout, self._has_begun = self.layout, True
        self._left, self._began = set(), time.perf_counter()
        self.start(layout)
        return layout

    def hand_in(self, number: int, num_gathered: int) -> None:
        frozen = _frozen(self._shared.parameters)
        layout = self.layout if self._has_begun else self._start()
        self._has_begun = False
        rest = [placed for placed in layout.placed if placed not in self._left]
        absent = tuple(placed.place for placed in rest if not self.give(placed))
        self._number, self._own = number, _Told(num_gathered, frozen, absent)
        for other in self._shared.others(self._rank):
            edge = self._shared.edge(self._rank, other, Purpose.PART)
            self._transport.send(edge, number, tuple(self._own))

    def advance(self, *, averages: bool) -> None:
        self._averages = averages

    def finish(self) -> None:
        total, absent = 0, frozenset(self._own.absent)
        waiting = f"rank {self._rank}, waiting before its update for"
        for holder in self._shared.ranks:
            told = self._own if holder == self._rank else self._hear(holder, waiting)
            if told.frozen != self._own.frozen:
                raise RunError(
                    f"rank {self._rank} and rank {holder} hold the same weights, but do not train "
                    "the same of them; call requires_grad_ alike on every rank"
                )
            total += told.num_gathered
            absent &= {*told.absent}
        sums = self.summed(f"{waiting} the sum of gradients of weights that several ranks hold")
        self._passed.append(Passed(0, self._began, time.perf_counter()))
        sums.put(self._shared.parameters, absent, total if self._averages else 1)

    def _hear(self, holder: int, waiting: str) -> _Told:
        edge = self._shared.edge(holder, self._rank, Purpose.PART)
        told = f"{waiting} rank {holder}'s gradients of weights that both hold"
        return _Told(*self._transport.recv(edge, self._number, told))

    def take_passed(self) -> list[Passed]:
        passed, self._passed = self._passed, []
        return passed

    def outgoing(self) -> set[Edge]:
        others = self._shared.others(self._rank)
        return {self._shared.edge(self._rank, other, Purpose.PART) for other in others}


def _frozen(parameters: Sequence[nn.Parameter]) -> tuple[int, ...]:
    """Places of those that are not trained."""
    return tuple(place for place, one in enumerate(parameters) if not one.requires_grad)


def _refuse(place: int) -> None:
    raise RunError(
        "a gradient was added to after it had left, since the model computes otherwise than in the "
        "step before; plan with reducer='owners'"
    )
