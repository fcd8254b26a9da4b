"""Sums of gradients by owners: each holder of the same weights sums one slice, for all of them.

With r holders of M bytes, a slice is M/r, as nearly as numbers can be divided:

1. Each holder sends every owner its own gradients of that owner's slice: (r−1)/r · M in all.
2. The owner adds what it has got in the order of the ranks, so that the sum has the bits of a loop.
3. It sends the sum of its slice to all others: (r−1) · M/r.

That is 2(r−1)/r · M per rank and direction, what a ring of the same ranks moves, in two steps
instead of 2(r−1). If all sent everything to all, it would be (r−1) · M. Until its gradients are the
sums, a rank keeps M besides: in step 2 the r−1 slices that it got and the sum of its own, in step 3
its sum and the r−1 of others.

Gradients are not copied together first: a slice is a list of pieces, each a part of one gradient.
One that a holder does not have is ``None`` there, which is not the same as zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.reduce.reducer import Purpose, Reducer, SharedWeights
from penstock.transport import Edge, Transport
from penstock.transport.tags import FIRST_EXCHANGE

Pieces = list[Tensor | None]


class OwnedPiece(NamedTuple):
    """A part of one parameter: elements ``start`` to ``stop`` of it as a vector.

    Attributes:
        place: the parameter's number among those that are shared.
    """

    place: int
    start: int
    stop: int


class Slice(NamedTuple):
    """What one holder owns of the sum.

    Attributes:
        owner: its rank.
        pieces: none where there are fewer numbers than holders.
    """

    owner: int
    pieces: tuple[OwnedPiece, ...]


class _Round(NamedTuple):
    """What this rank has handed in.

    Attributes:
        number: tells the round's messages from others.
        num_gathered: microbatches whose gradients they are.
        frozen: places of the parameters that are not trained.
        slices: those of the others.
        own: its gradients of the slice that it owns.
    """

    number: int
    num_gathered: int
    frozen: tuple[int, ...]
    slices: tuple[Slice, ...]
    own: Pieces


class OwnerReducer(Reducer):
    """Sums by owners, for one group of shared weights.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.

    Raises:
        RunError: in a step, if not all holders train the same weights.
    """

    def __init__(self, rank: int, shared: SharedWeights, transport: Transport) -> None:
        self._rank = rank
        self._shared = shared
        self._transport = transport
        self._slices: dict[tuple[int, ...], tuple[Slice, ...]] = {}
        self._round: _Round | None = None
        self._sums: Pieces = []

    def hand_in(self, number: int, num_gathered: int) -> None:
        shared = self._shared
        gradients = [_vector(parameter.grad) for parameter in shared.parameters]
        frozen = tuple(
            place for place, one in enumerate(shared.parameters) if not one.requires_grad
        )
        slices = self._slices_without(frozen)
        parts = {
            owner: [_cut(gradients[piece.place], piece) for piece in pieces]
            for owner, pieces in slices
        }
        for owner in shared.others(self._rank):
            edge = shared.edge(self._rank, owner, Purpose.PART)
            self._transport.send(edge, number, (num_gathered, frozen, parts[owner]))
        self._round = _Round(number, num_gathered, frozen, slices, parts[self._rank])

    def _slices_without(self, frozen: tuple[int, ...]) -> tuple[Slice, ...]:
        if frozen not in self._slices:
            shared = self._shared
            trained = {
                place: one for place, one in enumerate(shared.parameters) if place not in frozen
            }
            # What is frozen seldom changes, and then for good.
            self._slices = {frozen: slices_of(trained, shared.ranks)}
        return self._slices[frozen]

    @property
    def _now(self) -> _Round:
        assert self._round is not None, "hand_in comes first"
        return self._round

    def advance(self, *, averages: bool) -> None:
        columns, total = [], 0
        for holder in self._shared.ranks:
            count, pieces = self._parts_of(holder)
            total += count
            columns.append(pieces)
        self._sums = [_sum(gradients) for gradients in zip(*columns, strict=True)]
        if averages and total > 1:
            self._sums = [None if one is None else one.div_(total) for one in self._sums]
        self._hand_out()

    def _hand_out(self) -> None:
        """Send the sum of the slice that this rank owns to all other holders."""
        for holder in self._shared.others(self._rank) if self._sums else ():
            edge = self._shared.edge(self._rank, holder, Purpose.SUM)
            self._transport.send(edge, self._now.number, self._sums)

    def _parts_of(self, holder: int) -> tuple[int, Pieces]:
        """(microbatches, gradients of the slice that this rank owns) of one holder."""
        _, num_gathered, frozen, _, own = self._now
        if holder == self._rank:
            return num_gathered, own
        waiting = (
            f"rank {self._rank}, waiting before its update for rank {holder}'s gradients of "
            "weights that both hold"
        )
        count, theirs, pieces = self._receive(holder, Purpose.PART, waiting)
        if theirs != frozen:
            raise RunError(
                f"rank {self._rank} and rank {holder} hold the same weights, but do not train the "
                "same of them; call requires_grad_ alike on every rank"
            )
        return count, pieces

    def _receive(self, holder: int, purpose: Purpose, waiting: str) -> Any:
        edge = self._shared.edge(holder, self._rank, purpose)
        return self._transport.recv(edge, self._now.number, waiting)

    def finish(self) -> None:
        whole: dict[int, Tensor] = {}
        for owner, pieces in self._now.slices:
            if pieces:
                self._put(pieces, self._sums_of(owner), whole)
        for place, vector in whole.items():
            _keep(vector, self._shared.parameters[place])
        self._forget()

    def _forget(self) -> None:
        self._round = None
        self._sums = []

    def _sums_of(self, owner: int) -> Pieces:
        if owner == self._rank:
            return self._sums
        waiting = (
            f"rank {self._rank}, waiting before its update for rank {owner}'s sum of gradients of "
            "weights that both hold"
        )
        pieces: Pieces = self._receive(owner, Purpose.SUM, waiting)
        return pieces

    def _put(self, pieces: Sequence[OwnedPiece], sums: Pieces, whole: dict[int, Tensor]) -> None:
        """Write sums where this rank's own gradients were: between threads others read these, but
        who has sent the sum of a slice has read all of it."""
        for (place, start, stop), value in zip(pieces, sums, strict=True):
            if value is None:
                continue
            if value.layout is not torch.strided:
                self._shared.parameters[place].grad = value.clone()
                continue
            if place not in whole:
                whole[place] = _room(self._shared.parameters[place], value.dtype)
            whole[place][start:stop] = value

    def outgoing(self) -> set[Edge]:
        return {
            self._shared.edge(self._rank, holder, purpose)
            for holder in self._shared.others(self._rank)
            for purpose in (Purpose.PART, Purpose.SUM)
        }


def slices_of(parameters: Mapping[int, nn.Parameter], owners: Sequence[int]) -> tuple[Slice, ...]:
    """Cut parameters into slices of equal bytes, as nearly as numbers can be divided.

    Args:
        parameters: by their place among those that are shared.
        owners: ranks, one for each slice.
    """
    total = sum(parameter.nbytes for parameter in parameters.values())
    borders = [total * index // len(owners) for index in range(len(owners) + 1)]
    slices: dict[int, list[OwnedPiece]] = {owner: [] for owner in owners}
    before = 0
    for place, parameter in parameters.items():
        count, size = parameter.numel(), parameter.element_size()
        cuts = [min(max((border - before) // size, 0), count) for border in borders]
        for owner, start, stop in zip(owners, cuts, cuts[1:], strict=False):
            if start < stop:
                slices[owner].append(OwnedPiece(place, start, stop))
        before += parameter.nbytes
    return tuple(Slice(owner, tuple(pieces)) for owner, pieces in slices.items())


def begin_equal(rank: int, shared: SharedWeights, transport: Transport) -> None:
    """Give shared weights the values that their first holder has. For processes: each has built the
    model for itself, perhaps with other random numbers.

    They travel slice by slice on the channels of the sums, since a channel between hosts keeps as
    much memory ready as its largest message needed.
    """
    first = shared.ranks[0]
    vectors = [parameter.detach().reshape(-1) for parameter in shared.parameters]
    slices = slices_of(dict(enumerate(shared.parameters)), shared.ranks)
    for number, (_, pieces) in enumerate(slices, start=FIRST_EXCHANGE):
        if rank == first:
            values = [_cut(vectors[piece.place], piece) for piece in pieces]
            for other in shared.others(rank):
                transport.send(shared.edge(first, other, Purpose.SUM), number, values)
            continue
        waiting = f"rank {rank}, waiting for the weights that it shares with rank {first}"
        values = transport.recv(shared.edge(first, rank, Purpose.SUM), number, waiting)
        for (place, start, stop), value in zip(pieces, values, strict=True):
            vectors[place][start:stop] = value
    if rank == first:
        return  # what it sent it has, and may still be leaving its device
    with torch.no_grad():
        for parameter, vector in zip(shared.parameters, vectors, strict=True):
            parameter.copy_(vector.view_as(parameter))


def _vector(gradient: Tensor | None) -> Tensor | None:
    """A gradient as a vector, without copying where that is possible. What is not dense stays as it
    is: threads can hand it over, and nobody else can."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    return gradient.detach().reshape(-1)


def _cut(vector: Tensor | None, piece: OwnedPiece) -> Tensor | None:
    if vector is None or vector.layout is torch.strided:
        return None if vector is None else vector[piece.start : piece.stop]
    return vector if piece.start == 0 else None


def _sum(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """In memory of its own: between threads, others read the same tensors."""
    there = [gradient for gradient in gradients if gradient is not None]
    if len(there) < 2:
        return there[0].clone() if there else None
    total = torch.add(there[0], there[1])
    for gradient in there[2:]:
        total.add_(gradient)
    return total


def _room(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A vector for a sum: the memory of the gradient that it replaces, if it is one."""
    gradient = parameter.grad
    if gradient is not None and gradient.is_contiguous():
        return gradient.detach().view(-1)
    return torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)


def _keep(vector: Tensor, parameter: nn.Parameter) -> None:
    """Make a sum the gradient, unless it is in its memory already; the order in memory stays."""
    gradient = parameter.grad
    if gradient is None or not gradient.is_contiguous():
        like = parameter.detach() if gradient is None else gradient
        shaped = vector.view(like.shape)
        parameter.grad = torch.empty_like(like, dtype=vector.dtype).copy_(shaped)
