"""What every rank must have been given alike: a seal on each minibatch, which its messages carry.

Under torchrun each process calls the pipeline for itself. The first stage's rank takes the inputs
and the last stage's the targets, so if their loaders shuffle differently, rows are paired with the
labels of others, and nothing fails. A seal is a few numbers that tell what was called, with how
many microbatches, of which data. It travels with each value that a stage hands to the next and with
the gradients that copies of a stage sum, and who takes such a message compares it with its own
seal: before it computes with it, so that no weight changes.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.model import tree
from penstock.model.microbatches import Microbatches
from penstock.transport import Edge, Noted, Transport
from penstock.transport.base import OnTop
from penstock.transport.tags import REPORT_TAG, SHARED_TAGS

_FIELDS = struct.Struct("<iiqdQQ")
_MOST_SAMPLES = 1024


class Request(IntEnum):
    """What the caller asked of a pipeline."""

    EVALUATE = 1
    STEP = 2
    ACCUMULATE = 3

    def __str__(self) -> str:
        return _REQUESTS[self]


_REQUESTS = {
    Request.EVALUATE: "evaluate()",
    Request.STEP: "step() or steps()",
    Request.ACCUMULATE: "step(update=False)",
}


class Seal(NamedTuple):
    """What ranks compare.

    Attributes:
        request: a ``Request``.
        goes_on: whether another minibatch follows in the same loop.
        num_microbatches: how many there are.
        share: the factor on the gradients.
        inputs, targets: digests; 0 where they are not compared.
    """

    request: int
    goes_on: bool
    num_microbatches: int
    share: float
    inputs: int
    targets: int

    def packed(self) -> bytes:
        """As a note of a message."""
        return _FIELDS.pack(*self)

    @classmethod
    def unpacked(cls, note: bytes) -> Seal:
        """Undo ``packed``."""
        request, goes_on, *rest = _FIELDS.unpack(note)
        return cls(request, bool(goes_on), *rest)


def digest(value: Any) -> int:
    """A number that differs, as good as surely, for different data; never 0.

    Of a tensor, shape, dtype and at most 1024 numbers count, spread evenly over all its dimensions:
    what takes 10 µs tells two minibatches apart, if not two that differ in a few numbers.
    """
    leaves, _ = tree.flatten(list(value) if isinstance(value, Microbatches) else value)
    check = len(leaves)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            check = _check_of(leaf.detach(), check)
        elif isinstance(leaf, bool | int | float | str):
            check = crc32(repr(leaf).encode(errors="replace"), check)
    return check + 1


def _check_of(tensor: Tensor, check: int) -> int:
    check = crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), check)
    if tensor.layout is not torch.strided:
        return check
    sample = tensor[_places(tuple(tensor.shape))] if tensor.numel() > _MOST_SAMPLES else tensor
    flat = sample.resolve_conj().resolve_neg().contiguous().view(-1)
    return crc32(flat.view(torch.uint8).cpu().numpy().data, check)


@lru_cache(maxsize=256)
def _places(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Which numbers count: in the middle of the parts of each dimension, since borders are often
    empty."""
    steps = [1] * len(shape)
    counts = list(shape)
    while torch.Size(counts).numel() > _MOST_SAMPLES:
        largest = counts.index(max(counts))
        steps[largest] *= 2
        counts[largest] = -(-shape[largest] // steps[largest])
    return tuple(slice(step // 2, None, step) for step in steps)


def check_alike(own: bytes, other: bytes, ranks: tuple[int, int], where: str) -> None:
    """Raise if two ranks have not been given the same; nothing is compared with an empty note.

    Args:
        own: the packed seal of the first rank.
        other: that of the second.
        ranks: which two.
        where: what to begin the error with.

    Raises:
        RunError: they differ; it says in what, and what to do.
    """
    if own == other or not own or not other:
        return
    difference = _difference(Seal.unpacked(own), Seal.unpacked(other), ranks)
    if difference:
        raise RunError(f"{where}: {difference}")


def _difference(own: Seal, other: Seal, ranks: tuple[int, int]) -> str:
    mine, theirs = ranks
    if own.request != other.request:
        return (
            f"rank {mine} calls {Request(own.request)}, but rank {theirs} "
            f"{Request(other.request)}; make the same calls on every rank"
        )
    if own.num_microbatches != other.num_microbatches:
        return (
            f"rank {mine} has {own.num_microbatches} microbatches, but rank {theirs} has "
            f"{other.num_microbatches}; give every rank minibatches of as many rows"
        )
    if own.share != other.share:
        return (
            f"share is {own.share:g} on rank {mine}, but {other.share:g} on rank {theirs}; give "
            "every rank the same"
        )
    for what in ("inputs", "targets"):
        digests = getattr(own, what), getattr(other, what)
        if all(digests) and digests[0] != digests[1]:
            return _different_data(what, mine, theirs)
    if own.goes_on != other.goes_on:
        ends, goes_on = (theirs, mine) if own.goes_on else (mine, theirs)
        return (
            f"rank {ends} ends its loop with this minibatch, but rank {goes_on} goes on; give "
            "every rank as many minibatches, and let all leave the loop at the same one"
        )
    return ""


def _different_data(what: str, mine: int, theirs: int) -> str:
    return (
        f"ranks {mine} and {theirs} train on different data: their {what} differ. The first "
        "stage's rank takes the inputs and the last one's the targets, so rows would be paired "
        "with the targets of others. Give every rank the same minibatches: shuffle with the same "
        "seed everywhere (DataLoader(…, generator=torch.Generator().manual_seed(0))) and leave out "
        "DistributedSampler. If they differ on purpose, give Pipeline(…, compare_data=False)"
    )


class SealedTransport(OnTop):
    """Seals what one rank sends, and compares the seals of what it gets.

    Args:
        inner: carries the messages.
        rank: whose.

    Attributes:
        seal: of the minibatch at hand, packed; empty: none.
        synchronous: whether all that is under way belongs to this minibatch.
    """

    def __init__(self, inner: Transport, rank: int) -> None:
        super().__init__(inner)
        self._rank = rank
        self.seal = b""
        self.synchronous = True

    def send(self, edge: Edge, number: int, value: Any) -> None:
        sealed = self.seal and self._has_seal(edge)
        self._inner.send(edge, number, Noted(value, self.seal) if sealed else value)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        value = self._inner.recv(edge, number, waiting)
        # Who waits for a report compares its seal: the minibatch at hand may be a later one.
        if type(value) is Noted and edge.tag != REPORT_TAG:
            value, seal = value
            if self._has_seal(edge):
                check_alike(self.seal, seal, (self._rank, edge.source), waiting)
        return value

    def _has_seal(self, edge: Edge) -> bool:
        """Whether messages of an edge belong to the minibatch at hand: gradients that come back may
        be those of an earlier one."""
        forward = edge.tag < REPORT_TAG and edge.tag % 2 == 0
        return forward or (edge.tag >= SHARED_TAGS and self.synchronous)
