"""Weights with several holders, and the protocol of all ways of summing their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.base.errors import RunError
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.tensor.unequal_groups import WholePlaceholders
from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.base import RENEWED_TAGS, SHARED_TAGS

_MOST_LANES = 16


class Purpose(IntEnum):
    """The purpose of a message between holders of the same weights; each has its own channels."""

    PART = 0
    """One holder's gradients, for another to sum."""
    SUM = 1
    """A sum that is done; before the first step, the weights to begin with."""
    WEIGHTS = 2
    """Weights that their owner has updated."""


class SharedWeights(NamedTuple):
    """Weights of which several ranks hold a copy: tied ones, or those of a stage with copies.

    Attributes:
        tag: tells their messages from those of other shared weights.
        ranks: those that hold a copy, ascending.
        stages: those of this rank that use them.
        parameters: this rank's copies, in an order that is the same on all holders.
        divisible: whether each holder may update a part of them for all: where they are copies of
            one stage, and their gradients are whole when they are summed.
        stand_ins: whose ``parameters`` these are, if this rank's own are parts and holders have
            different ones.
    """

    tag: int
    ranks: tuple[int, ...]
    stages: frozenset[int]
    parameters: tuple[nn.Parameter, ...]
    divisible: bool = True
    stand_ins: WholePlaceholders | None = None

    def edge(self, source: int, target: int, purpose: Purpose, lane: int = 0) -> Edge:
        """The channel on which one holder tells another something.

        Args:
            lane: 0 … 15; messages of different lanes do not wait for each other.
        """
        if purpose is Purpose.WEIGHTS:
            return Edge(source, target, RENEWED_TAGS + _MOST_LANES * self.tag + lane)
        channel = len(Purpose) * self.tag + purpose
        return Edge(source, target, SHARED_TAGS + _MOST_LANES * channel + lane)

    def others(self, rank: int) -> tuple[int, ...]:
        """The other holders, beginning with the one behind ``rank``: where all send in this order,
        none gets everybody's message at once."""
        place = self.ranks.index(rank)
        return self.ranks[place + 1 :] + self.ranks[:place]


class Passed(NamedTuple):
    """A part of gradients on its way to the sum and back, as one rank saw it.

    Attributes:
        part: its number.
        start, end: from when it left until its sum was here, in seconds of ``time.perf_counter``.
    """

    part: int
    start: float
    end: float


class ServedGradients(NamedTuple):
    """One rank's gradients at one server.

    Attributes:
        server: its number, from 0.
        start, end: from when they began to leave until all that the server makes of them was here,
            in seconds of ``time.perf_counter``.
    """

    server: int
    start: float
    end: float


class Reducer(ABC):
    """One rank's part in summing the gradients of one group of shared weights, round after round.

    In each round ``hand_in``, ``advance`` and ``finish`` are called, in this order. A rank calls
    ``advance`` for every group whose gradients it has handed in before it calls ``finish`` for any,
    and all ranks call it for groups in the same order. So ranks cannot wait for each other in a
    circle, whatever the order of their stages, as long as the three keep to what they say.
    """

    begins_equal = False
    """Whether the weights of its holders are equal already when it is made."""

    leaves_early = False
    """Whether gradients may leave before all of them are there."""

    def closing(self, number: int) -> AbstractContextManager[None]:
        """Within, the last gradients of this rank are made: those that are may leave.

        Args:
            number: that of the round, as ``hand_in`` will have it.
        """
        return nullcontext()

    @abstractmethod
    def hand_in(self, number: int, num_gathered: int) -> None:
        """This rank's gradients are complete. Waits for no other rank.

        Args:
            number: tells this round's messages from others.
            num_gathered: microbatches whose gradients these are.
        """

    @abstractmethod
    def advance(self, *, averages: bool) -> None:
        """Do what others need to finish. May wait until they have handed in, or advance, too.

        Args:
            averages: whether sums are divided by the number of microbatches of all holders.
        """

    @abstractmethod
    def finish(self) -> None:
        """Make every ``.grad`` the sum over all holders that have one: with the same bits on all of
        them, those of adding in the order of the ranks. May wait until others advance."""

    def take_passed(self) -> list[Passed]:
        """Exchanges since this was asked last, as far as anybody notes them."""
        return []

    def take_served(self) -> list[ServedGradients]:
        """Gradients that servers have had since this was asked last."""
        return []

    def open(self) -> None:  # noqa: B027 - most need nothing but the transport
        """Meet the other holders, before the first round. All call it for groups in one order."""

    def close(self, *, failed: bool) -> None:  # noqa: B027 - most keep nothing open
        """No round follows. Does not raise; may be called twice.

        Args:
            failed: whether this rank has failed, so that others need nothing of it any more.
        """

    @abstractmethod
    def outgoing(self) -> set[Edge]:
        """The channels on which others may wait for this rank."""


MakeReducer = Callable[[int, SharedWeights, Transport], Reducer]
"""From (rank, weights, the rank's end of its channels) to that rank's reducer."""


class GradientWatch:
    """Tells which gradients are complete, on a CPU. One that is made in several steps is complete
    after as many as it took in the round before, so that the first round tells nothing.

    Args:
        parameters: those of which gradients may be watched.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._places: tuple[int, ...] = ()
        self._times_made: Counter[int] = Counter()

    def watches(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters."""
        return [*map(id, self._parameters)] == [*map(id, parameters)]

    @contextmanager
    def watching(
        self, places: Iterable[int], complete: Callable[[int], None], again: Callable[[int], None]
    ) -> Iterator[None]:
        """Within, the last gradients of a round are made.

        Args:
            places: the parameters that are trained, by their number.
            complete: called with each whose gradient is complete.
            again: called with each whose gradient is added to although it seemed to be complete,
                since the model computes otherwise than in the round before.
        """
        trained = tuple(places)
        expected = self._times_made if trained == self._places else Counter()
        self._places, self._times_made = trained, Counter()
        times_made = self._times_made

        def made(place: int, _: Tensor) -> None:
            times_made[place] += 1
            if times_made[place] == expected[place]:
                complete(place)
            elif times_made[place] > expected[place] > 0:
                again(place)

        hooks = [
            _when_made(self._parameters[place], partial(made, place))
            for place in trained
            # Elsewhere gradients are made later than it seems, and by other threads.
            if is_on_host(self._parameters[place].device)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def frozen_places(parameters: Sequence[nn.Parameter]) -> tuple[int, ...]:
    """The places of parameters that are not trained."""
    return tuple(place for place, parameter in enumerate(parameters) if not parameter.requires_grad)


def check_trained_alike(
    rank: int, own: Sequence[int], other: int, theirs: Sequence[int] | None
) -> None:
    """Raise ``RunError`` unless two holders of the same weights have frozen the same of them.

    Args:
        own, theirs: ``frozen_places`` of the ranks.
    """
    if theirs != own:
        raise RunError(
            f"rank {rank} and rank {other} hold the same weights, but do not train the same of "
            "them; call requires_grad_ alike on every rank"
        )


def _when_made(parameter: Tensor, then: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(then)  # type: ignore[no-untyped-call]
    return handle
