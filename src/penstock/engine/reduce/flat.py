"""Gradients of shared weights as flat buffers, for those who sum plain numbers.

``FlatReducer`` is what ways to sum have in common that hand such buffers to somebody else. Where
several holders are on one host, these sum inside first (``inside``). Holders tell each other,
besides, how many microbatches they summed, what is frozen, and which gradients they lack. Gradients
leave as soon as they are complete, and sums become gradients as they come.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.base.errors import RunError
from penstock.core.summation.adding import Filled
from penstock.core.summation.split import MOST_PORTIONS, num_portions
from penstock.engine.device.accelerators import HOST
from penstock.engine.masters import gradient_dtype
from penstock.engine.reduce.inside import Hosts, HostSums, Range, SliceLayout
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
from penstock.planning.plans.summing import Summing

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

    Attributes:
        counts: numbers in each buffer, by the place of its type in ``DTYPES``.
        placed: the gradients, in the order of the buffers.

    Raises:
        RunError: a parameter has numbers that nobody sums so.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], frozen: Sequence[int]) -> None:
        self.counts: dict[int, int] = {}
        self.placed: list[PlacedGradient] = []
        for place, parameter in reversed([*enumerate(parameters)]):
            if place in frozen:
                continue
            kind = gradient_dtype(parameter)
            if kind not in DTYPES:
                raise RunError(
                    f"gradients of type {kind} can't be summed so; plan with reducer='owners'"
                )
            dtype = DTYPES.index(kind)
            start = self.counts.get(dtype, 0)
            self.counts[dtype] = start + parameter.numel()
            self.placed.append(PlacedGradient(place, dtype, start, self.counts[dtype]))

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(count * DTYPES[dtype].itemsize for dtype, count in self.counts.items())


class FlatBuffers:
    """A buffer for each type of number that there is.

    Args:
        counts: how many numbers of each type, by its place in ``DTYPES``.
        device: where they are; by default in main memory.

    Attributes:
        tensors: the buffers, by the place of their type.
    """

    def __init__(self, counts: Mapping[int, int], device: torch.device = HOST) -> None:
        self.tensors = {
            dtype: torch.empty(count, dtype=DTYPES[dtype], device=device)
            for dtype, count in counts.items()
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

    def put(self, placed: PlacedGradient, parameters: Sequence[nn.Parameter], divisor: int) -> None:
        """Make a sum one parameter's gradient.

        Args:
            divisor: what the sum is divided by.
        """
        place, dtype, start, stop = placed
        parameter = parameters[place]
        if parameter.grad is None:
            kind = gradient_dtype(parameter)
            parameter.grad = torch.empty_like(parameter.detach(), dtype=kind)
        if start < stop:
            gradient = parameter.grad.detach()
            gradient.copy_(self.tensors[dtype][start:stop].view(parameter.shape))
            if divisor > 1:
                gradient.div_(divisor)


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
        summing: the plan's; who is near whom.

    Raises:
        RunError: in a step, if not all holders train the same weights.
    """

    leaves_early = True

    def __init__(
        self, rank: int, shared: SharedWeights, transport: Transport, summing: Summing
    ) -> None:
        self._rank = rank
        self._shared = shared
        self._transport = transport
        self._hosts = Hosts.of(summing, shared.ranks)
        near = len(self._hosts.host_of(rank)) > 1
        self._inside = (
            HostSums(rank, shared, transport, self._hosts, summing.levels[:-1]) if near else None
        )
        self._slice = self._hosts.slice_of(rank)
        self._whole: FlatBuffers | None = None
        self._given: FlatBuffers | None = None
        self._filled: dict[int, Filled] = {}
        self._layouts: dict[tuple[int, ...], tuple[FlatLayout, SliceLayout]] = {}
        self._number = 0
        self._own = _HolderWords(0, (), ())
        self._averages = False
        self._has_begun = False
        self._began = 0.0
        self._passed: list[Passed] = []
        self._left: set[PlacedGradient] = set()
        self._watch = GradientWatch(shared.parameters)

    @abstractmethod
    def start(self, counts: Mapping[int, int]) -> FlatBuffers:
        """A round begins between hosts; waits for nobody.

        Args:
            counts: numbers of this rank's slice, by their type; alike on all that exchange it.

        Returns:
            Where to write what is handed in.
        """

    @abstractmethod
    def fill(self, dtype: int, start: int, stop: int) -> None:
        """Some numbers to hand in are there; waits for nobody."""

    @abstractmethod
    def summed(self, ranges: Mapping[int, Range], waiting: str) -> FlatBuffers:
        """Wait for sums between hosts.

        Args:
            ranges: of which numbers of the slice, by their type.
            waiting: what waits, for errors.
        """

    def _now(self) -> tuple[FlatLayout, SliceLayout]:
        """Where gradients lie now, and their slices."""
        frozen = frozen_places(self._shared.parameters)
        if frozen not in self._layouts:
            layout = FlatLayout(self._shared.parameters, frozen)
            portions = num_portions(layout.num_bytes, MOST_PORTIONS)
            slices = SliceLayout(layout.counts, self._hosts.num_slices, portions)
            # What is frozen seldom changes, and then for good.
            self._layouts = {frozen: (layout, slices)}
            self._whole = None
        return self._layouts[frozen]

    @contextmanager
    def closing(self, number: int) -> Iterator[None]:
        """Within, each gradient leaves as soon as it has been made."""
        layout = self._start(number)
        placed = {gradient.place: gradient for gradient in layout.placed}

        def complete(place: int) -> None:
            self._left.add(placed[place])
            self._give(placed[place])
            if self._inside is not None:
                self._inside.add_what_has_come(self._hand_out)

        with self._watch.watching(placed, complete, _refuse):
            yield

    def _start(self, number: int) -> FlatLayout:
        layout, slices = self._now()
        self._has_begun, self._number = True, number
        self._left, self._began = set(), time.perf_counter()
        if self._slice is not None:
            self._given = self.start(slices.counts(self._slice))
        if self._inside is None:
            return layout
        if self._whole is None:
            device = next((p.device for p in self._shared.parameters), HOST)
            self._whole = FlatBuffers(layout.counts, device)
        self._filled = {dtype: Filled() for dtype in layout.counts}
        self._inside.begin(number, slices, self._whole.tensors)
        return layout

    def _give(self, placed: PlacedGradient) -> bool:
        """Hand on one parameter's gradient, which is complete; waits for nobody.

        Returns:
            Whether there is one.
        """
        parameters, (_, dtype, start, stop) = self._shared.parameters, placed
        if self._inside is None:
            assert self._given is not None
            there = self._given.copy(placed, parameters)
            self.fill(dtype, start, stop)
            return there
        assert self._whole is not None
        there = self._whole.copy(placed, parameters)
        if start < stop:
            self._filled[dtype].add(start, stop)
            self._give_portions()
        return there

    def _give_portions(self) -> None:
        """Give those of which all gradients are there to the others of this host."""
        assert self._inside is not None
        _, slices = self._now()
        for portion in range(slices.num_portions):
            if not self._inside.has_given(portion) and all(
                self._filled[dtype].has(start, stop)
                for dtype, (start, stop) in slices.portion(portion).items()
            ):
                self._inside.give(portion)

    def _hand_out(self, portion: int, sums: Sequence[Tensor]) -> None:
        """Hand what this host has summed to the other hosts."""
        assert self._slice is not None and self._given is not None
        _, slices = self._now()
        ranges = slices.in_slice(portion, self._slice)
        for (dtype, (start, stop)), value in zip(ranges.items(), sums, strict=True):
            if start < stop:
                self._given.tensors[dtype][start:stop].copy_(value)
                self.fill(dtype, start, stop)

    def hand_in(self, number: int, num_gathered: int) -> None:
        frozen = frozen_places(self._shared.parameters)
        layout = self._now()[0] if self._has_begun else self._start(number)
        self._has_begun = False
        rest = [placed for placed in layout.placed if placed not in self._left]
        absent = tuple(placed.place for placed in rest if not self._give(placed))
        if self._inside is not None:
            self._give_portions()  # those without a number, too
        self._own = _HolderWords(num_gathered, frozen, absent)
        for other in self._shared.others(self._rank):
            edge = self._shared.edge(self._rank, other, Purpose.PART)
            self._transport.send(edge, number, tuple(self._own))

    def advance(self, *, averages: bool) -> None:
        self._averages = averages
        if self._inside is not None:
            self._inside.complete(self._hand_out)

    def finish(self) -> None:
        total, absent = 0, frozenset(self._own.absent)
        waiting = f"rank {self._rank}, waiting before its update for"
        for holder in self._shared.ranks:
            report = self._own if holder == self._rank else self._hear(holder, waiting)
            check_trained_alike(self._rank, self._own.frozen, holder, report.frozen)
            total += report.num_gathered
            absent &= {*report.absent}
        divisor, (layout, slices) = total if self._averages else 1, self._now()
        left = [placed for placed in layout.placed if placed.place not in absent]
        for portion in reversed(range(slices.num_portions)):  # first layers first
            sums = self._summed(portion, f"{waiting} the sum of gradients of weights that several "
                                "ranks hold")  # fmt: skip
            starts = {dtype: start for dtype, (start, _) in slices.portion(portion).items()}
            while left and left[-1].start >= starts.get(left[-1].dtype, 0):
                sums.put(left.pop(), self._shared.parameters, divisor)
        self._passed.append(Passed(0, self._began, time.perf_counter()))

    def _summed(self, portion: int, waiting: str) -> FlatBuffers:
        """Wait for the sums of a portion."""
        _, slices = self._now()
        if self._inside is None:
            return self.summed(slices.portion(portion), waiting)
        assert self._whole is not None
        if self._slice is not None:
            places = slices.in_slice(portion, self._slice)
            sums = self.summed(places, waiting).tensors
            for dtype, (start, stop) in slices.slice(portion, self._slice).items():
                if start < stop:
                    own = sums[dtype][slice(*places[dtype])]
                    self._whole.tensors[dtype][start:stop].copy_(own)
        self._inside.spread(portion)
        return self._whole

    def _hear(self, holder: int, waiting: str) -> _HolderWords:
        edge = self._shared.edge(holder, self._rank, Purpose.PART)
        waiting_for = f"{waiting} rank {holder}'s gradients of weights that both hold"
        return _HolderWords(*self._transport.recv(edge, self._number, waiting_for))

    def take_passed(self) -> list[Passed]:
        passed, self._passed = self._passed, []
        return passed

    def outgoing(self) -> set[Edge]:
        others = self._shared.others(self._rank)
        edges = {self._shared.edge(self._rank, other, Purpose.PART) for other in others}
        return edges if self._inside is None else edges | self._inside.outgoing()


def _refuse(place: int) -> None:
    raise RunError(
        "a gradient was added to after it had left, since the model computes otherwise than in the "
        "step before; plan with reducer='owners'"
    )
