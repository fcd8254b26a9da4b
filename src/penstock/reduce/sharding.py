"""``ShardedReducer``: each holder keeps the sum of the rows that it owns, and updates them for all.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
1910.02054, section 5.1: with r holders, each has 1/r of the optimizer's state. The bytes are those
of a sum that all get, since weights travel in place of sums:

1. Holders hand in, and owners sum, as ``owners`` describes. What a holder owns is whole rows of
   parameters, so that the optimizer's state is in rows, too, which a checkpoint can put together.
2. The optimizer of a holder has, in the place of each parameter, the rows of it that the holder
   owns: a parameter that shares its memory (``Shards``). Its gradient is the sum of these rows.
3. When all stages of a rank have stepped, it sends its rows to the other holders and takes theirs.

Where gradients must be known as a whole, to clip them, 1 hands the sums to all first, which is half
as much again to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from penstock.errors import InputError
from penstock.reduce.owners import OwnedPiece, OwnerReducer, Pieces, Slice
from penstock.reduce.reducer import Purpose, SharedWeights
from penstock.transport import Edge, Transport

_ELEMENTWISE = {
    "ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip


class Shard(NamedTuple):
    """The rows of a parameter that one holder owns.

    Attributes:
        start: the first row.
        part: the rows, in the memory of the whole parameter; ``None`` if there are none.
    """

    start: int
    part: nn.Parameter | None

    @property
    def stop(self) -> int:
        """The row behind the last one."""
        if self.part is None:
            return self.start
        return self.start + (self.part.shape[0] if self.part.dim() else 1)


class Shards:
    """What one rank owns of the parameters that it shares.

    Args:
        shards: by the whole parameter.

    Attributes:
        of: as given.
    """

    def __init__(self, shards: Mapping[nn.Parameter, Shard]) -> None:
        self.of = dict(shards)

    def put_into(self, optimizer: torch.optim.Optimizer, whose: str) -> None:
        """Let an optimizer have the rows that the rank owns, in the place of whole parameters.

        Raises:
            InputError: its step needs more of a parameter than the numbers that it changes.
        """
        if not any(one in self.of for group in optimizer.param_groups for one in group["params"]):
            return
        kind = type(optimizer)
        alone = getattr(kind, "elementwise", None)
        known = kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE
        if not (known if alone is None else alone) or optimizer.state:
            raise InputError(
                f"{kind.__name__}, the optimizer of {whose}, may need whole parameters to step, "
                "and with reducer='sharded' a rank has rows of them; take 'owners', one of "
                f"{', '.join(sorted(_ELEMENTWISE))}, or say elementwise = True in its class"
            )
        for group in optimizer.param_groups:
            own = (self.of.get(one, Shard(0, one)).part for one in group["params"])
            group["params"] = [part for part in own if part is not None]

    def lend(self) -> None:
        """Give rows the gradients of their whole parameters, where these have some."""
        for whole, (start, part) in self.of.items():
            if part is not None and whole.grad is not None:
                part.grad = _rows(whole.grad.detach(), start, part)

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget the gradients of those of some parameters that are shared in rows."""
        for whole in parameters:
            if whole in self.of:
                whole.grad = None
                if (part := self.of[whole].part) is not None:
                    part.grad = None


def _rows(whole: torch.Tensor, start: int, part: torch.Tensor) -> torch.Tensor:
    return whole[start : start + part.shape[0]] if part.dim() else whole


def _row_size(whole: torch.Tensor) -> int:
    """How many numbers a row has; of one number without dimensions, that."""
    return max(whole[0].numel(), 1) if whole.dim() else 1


def _owned_rows(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The rows, in the memory of the whole, that some of its numbers make."""
    size = _row_size(whole)
    return whole[start // size : stop // size] if whole.dim() else whole


class ShardedReducer(OwnerReducer):
    """Sums by owners who also update, for one group of shared weights.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.

    Attributes:
        shards: what this rank owns, by the whole parameter.
        hands_sums_to_all: whether every holder gets all sums.
    """

    def __init__(self, rank: int, shared: SharedWeights, transport: Transport) -> None:
        super().__init__(rank, shared, transport)
        self.hands_sums_to_all = False
        self._rows = row_slices_of(shared.parameters, shared.ranks)
        self.shards = {parameter: Shard(0, None) for parameter in shared.parameters}
        for place, start, stop in self._pieces(rank):
            whole = shared.parameters[place]
            rows = _owned_rows(whole.detach(), start, stop)
            part = nn.Parameter(rows, requires_grad=whole.requires_grad)
            self.shards[whole] = Shard(start // _row_size(whole), part)

    def _pieces(self, rank: int) -> tuple[OwnedPiece, ...]:
        return next(pieces for owner, pieces in self._rows if owner == rank)

    def _slices_without(self, frozen: tuple[int, ...]) -> tuple[Slice, ...]:
        return self._rows  # who owns what never changes, since the optimizer's state is there

    def _hand_out(self) -> None:
        if self.hands_sums_to_all:
            super()._hand_out()

    def finish(self) -> None:
        if self.hands_sums_to_all:
            super().finish()
            return
        for (place, *_), value in zip(self._pieces(self._rank), self._sums, strict=True):
            part = self.shards[self._shared.parameters[place]].part
            assert part is not None
            part.grad = None if value is None else value.view_as(part)
        for parameter in self._shared.parameters:
            parameter.grad = None
        self._forget()

    def hand_back(self, number: int) -> None:
        """Send the rows that have been updated to all other holders; waits for nobody."""
        values: Pieces = [
            self._shared.parameters[place].detach().reshape(-1)[start:stop]
            for place, start, stop in self._pieces(self._rank)
        ]
        for other in self._shared.others(self._rank) if values else ():
            edge = self._shared.edge(self._rank, other, Purpose.WEIGHTS)
            self._transport.send(edge, number, values)

    @torch.no_grad()
    def take_back(self, number: int) -> None:
        """Wait for the rows that others have updated."""
        for other in self._shared.others(self._rank):
            pieces = self._pieces(other)
            if not pieces:
                continue
            edge = self._shared.edge(other, self._rank, Purpose.WEIGHTS)
            waiting = f"rank {self._rank}, waiting for the weights that rank {other} has updated"
            values = self._transport.recv(edge, number, waiting)
            for (place, start, stop), value in zip(pieces, values, strict=True):
                rows = _owned_rows(self._shared.parameters[place], start, stop)
                rows.copy_(value.view(rows.shape))

    def outgoing(self) -> set[Edge]:
        others = self._shared.others(self._rank)
        weights = {self._shared.edge(self._rank, other, Purpose.WEIGHTS) for other in others}
        return super().outgoing() | weights


def row_slices_of(parameters: Sequence[nn.Parameter], owners: Sequence[int]) -> tuple[Slice, ...]:
    """Cut parameters into slices of whole rows and of bytes as equal as rows allow.

    Args:
        parameters: those that are shared.
        owners: ranks, one for each slice.
    """
    total = sum(parameter.nbytes for parameter in parameters)
    borders = [total * index // len(owners) for index in range(len(owners) + 1)]
    slices: dict[int, list[OwnedPiece]] = {owner: [] for owner in owners}
    before = 0
    for place, parameter in enumerate(parameters):
        count = parameter.shape[0] if parameter.dim() else 1
        row = parameter.nbytes / count if count else 0.0
        for owner, (first, last) in zip(owners, _cuts(borders, before, count, row), strict=True):
            if first < last:
                size = parameter.numel() // count
                slices[owner].append(OwnedPiece(place, first * size, last * size))
        before += parameter.nbytes
    return tuple(Slice(owner, tuple(pieces)) for owner, pieces in slices.items())


def _cuts(borders: Iterable[int], before: int, count: int, row: float) -> Iterator[tuple[int, int]]:
    """(first row, row behind the last) of each owner."""
    rows = [min(max(round((border - before) / row), 0), count) if row else 0 for border in borders]
    rows[-1] = count if row else 0
    return pairwise(rows)
