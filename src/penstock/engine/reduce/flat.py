"""Gradients of shared weights as flat buffers in main memory, for those who sum plain numbers.

``FlatReducer`` is what ways to sum have in common that hand such buffers to somebody else. Holders
tell each other, besides, how many microbatches they summed, what is frozen, and which gradients
they lack. Gradients leave as soon as they are complete.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.base.errors import RunError
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

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""In the order in which frames count them (``summation.frames.ITEM_BYTES``)."""


class PlacedGradient(NamedTuple):
    """Where a parameter's gradient lies.

    Attributes:
        place: the parameter's number among those that are shared.
        dtype: the number of its buffer.
        start, stop: its numbers there.
    """

    place: int
    dtype: int
    start: int
    stop: int


class FlatLayout:
    """Where each gradient lies in the buffer of its type: the last parameter's first, since its
    gradient is.

    Args:
        parameters: those that are shared.
        frozen: places of those that are not trained.

    Raises:
        RunError: a parameter has numbers that nobody sums so.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], frozen: Sequence[int]) -> None:
        self.counts = [0] * len(DTYPES)
        self.placed: list[PlacedGradient] = []
        for place, parameter in reversed([*enumerate(parameters)]):
            if place in frozen:
                continue
            if parameter.dtype not in DTYPES:
                raise RunError(
                    f"gradients of type {parameter.dtype} can't be summed so; plan with "
                    "reducer='owners'"
                )
            dtype = DTYPES.index(parameter.dtype)
            start = self.counts[dtype]
            self.counts[dtype] = start + parameter.numel()
            self.placed.append(PlacedGradient(place, dtype, start, self.counts[dtype]))


class FlatBuffers:
    """A buffer for each type of number that a layout has."""

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self.tensors = {
            dtype: torch.empty(count, dtype=DTYPES[dtype])
            for dtype, count in enumerate(layout.counts)
            if count
        }

    @cached_property
    def numbers(self) -> dict[int, NDArray[Any]]:
        """The same memory for numpy, which takes bfloat16 for 16 bits."""
        return {dtype: _as_numbers(tensor) for dtype, tensor in self.tensors.items()}

    def copy(self, placed: PlacedGradient, parameters: Sequence[nn.Parameter]) -> bool:
        """Copy one parameter's gradient in.

        Returns:
            Whether it has one. Otherwise there stands −0, which changes no sum: x + −0 is x, and
            where nobody has one, nobody looks at the sum.

        Raises:
            RunError: the gradient is sparse.
        """
        place, dtype, start, stop = placed
        gradient = parameters[place].grad
        if start == stop:
            return gradient is not None
        room = self.tensors[dtype][start:stop]
        if gradient is None:
            room.fill_(-0.0)
            return False
        if gradient.layout is not torch.strided:
            raise RunError("sparse gradients can't be summed between processes; use sparse=False")
        room.copy_(gradient.detach().reshape(-1))
        return True

    def put(self, parameters: Sequence[nn.Parameter], absent: frozenset[int], divisor: int) -> None:
        """Make sums the parameters' gradients.

        Args:
            absent: places of parameters for which nobody had a gradient.
            divisor: what sums are divided by.
        """
        if divisor > 1:
            for tensor in self.tensors.values():
                tensor.div_(divisor)
        for place, dtype, start, stop in self._layout.placed:
            parameter = parameters[place]
            if place in absent:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter.detach())
            if start < stop:
                shaped = self.tensors[dtype][start:stop].view(parameter.shape)
                parameter.grad.detach().copy_(shaped)


def _as_numbers(tensor: Tensor) -> NDArray[Any]:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    numbers: NDArray[Any] = tensor.numpy()
    return numbers


class _HolderWords(NamedTuple):
    """One holder's words to the others in a round."""

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
        self._own = _HolderWords(0, (), ())
        self._averages = False
        self._has_begun = False
        self._began = 0.0
        self._passed: list[Passed] = []
        self._left: set[PlacedGradient] = set()
        self._watch = GradientWatch(shared.parameters)

    @abstractmethod
    def start(self, layout: FlatLayout) -> None:
        """A round begins, whose gradients lie so; waits for nobody."""

    @abstractmethod
    def give(self, placed: PlacedGradient) -> bool:
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
        frozen = frozen_places(self._shared.parameters)
        if frozen not in self._layouts:
            # What is frozen seldom changes, and then for good.
            self._layouts = {frozen: FlatLayout(self._shared.parameters, frozen)}
        return self._layouts[frozen]

    @contextmanager
    def closing(self, number: int) -> Iterator[None]:
        """Within, each gradient leaves as soon as it has been made."""
        placed = {gradient.place: gradient for gradient in self._start().placed}

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
        frozen = frozen_places(self._shared.parameters)
        layout = self.layout if self._has_begun else self._start()
        self._has_begun = False
        rest = [placed for placed in layout.placed if placed not in self._left]
        absent = tuple(placed.place for placed in rest if not self.give(placed))
        self._number, self._own = number, _HolderWords(num_gathered, frozen, absent)
        for other in self._shared.others(self._rank):
            edge = self._shared.edge(self._rank, other, Purpose.PART)
            self._transport.send(edge, number, tuple(self._own))

    def advance(self, *, averages: bool) -> None:
        self._averages = averages

    def finish(self) -> None:
        total, absent = 0, frozenset(self._own.absent)
        waiting = f"rank {self._rank}, waiting before its update for"
        for holder in self._shared.ranks:
            report = self._own if holder == self._rank else self._hear(holder, waiting)
            check_trained_alike(self._rank, self._own.frozen, holder, report.frozen)
            total += report.num_gathered
            absent &= {*report.absent}
        sums = self.summed(f"{waiting} the sum of gradients of weights that several ranks hold")
        self._passed.append(Passed(0, self._began, time.perf_counter()))
        sums.put(self._shared.parameters, absent, total if self._averages else 1)

    def _hear(self, holder: int, waiting: str) -> _HolderWords:
        edge = self._shared.edge(holder, self._rank, Purpose.PART)
        waiting_for = f"{waiting} rank {holder}'s gradients of weights that both hold"
        return _HolderWords(*self._transport.recv(edge, self._number, waiting_for))

    def take_passed(self) -> list[Passed]:
        passed, self._passed = self._passed, []
        return passed

    def outgoing(self) -> set[Edge]:
        others = self._shared.others(self._rank)
        return {self._shared.edge(self._rank, other, Purpose.PART) for other in others}


def _refuse(place: int) -> None:
    raise RunError(
        "a gradient was added to after it had left, since the model computes otherwise than in the "
        "step before; plan with reducer='owners'"
    )
