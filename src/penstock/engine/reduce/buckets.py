"""Gradients of shared weights in buckets that travel together, each cut into one shard per owner.

A shard is a list of ranges of parameters. Here they are chosen, cut from gradients, added up, and
put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.core.summation.split import num_portions


class ParameterRange(NamedTuple):
    """Some elements of one parameter: ``start`` to ``stop`` of it as a vector.

    Attributes:
        place: the parameter's number among those that are shared.
    """

    place: int
    start: int
    stop: int


class BucketShard(NamedTuple):
    """The part of a bucket's sum that one holder owns.

    Attributes:
        owner: its rank.
        ranges: none where there are fewer numbers than holders.
    """

    owner: int
    ranges: tuple[ParameterRange, ...]


class Bucket(NamedTuple):
    """Gradients that leave at once. Every holder owns a shard of each bucket, so that all links
    are busy in both directions from the first bucket to the last.

    Attributes:
        places: the parameters of which it has numbers.
        shards: who owns which of these.
    """

    places: frozenset[int]
    shards: tuple[BucketShard, ...]

    def ranges_of(self, owner: int) -> tuple[ParameterRange, ...]:
        """The ranges that a holder owns."""
        return next((shard.ranges for shard in self.shards if shard.owner == owner), ())


def buckets_of(
    parameters: Mapping[int, nn.Parameter], owners: Mapping[int, int], most: int
) -> tuple[Bucket, ...]:
    """Cut parameters into buckets of equal bytes, and each of these into shards.

    Args:
        parameters: by their place among those that are shared.
        owners: the weights of their shards' bytes, by rank.
        most: the largest number of buckets; of few bytes, fewer are made.

    Returns:
        At least one, in the order in which backwards make gradients: the last parameters first.
    """
    sizes = {place: parameter.element_size() for place, parameter in parameters.items()}
    whole = [
        ParameterRange(place, 0, parameter.numel())
        for place, parameter in reversed([*parameters.items()])
    ]
    num_bytes = sum(parameter.nbytes for parameter in parameters.values())
    buckets = []
    for ranges in _divided(whole, sizes, [1] * num_portions(num_bytes, most)):
        cut = _divided(sorted(ranges), sizes, [*owners.values()])
        shards = [BucketShard(owner, tuple(own)) for owner, own in zip(owners, cut, strict=True)]
        buckets.append(Bucket(frozenset(place for place, *_ in ranges), tuple(shards)))
    return tuple(buckets)


def _borders(total: int, weights: Sequence[int]) -> list[int]:
    """Where parts of a whole begin and end that have these weights."""
    return [total * before // sum(weights) for before in accumulate(weights, initial=0)]


def _divided(
    ranges: Iterable[ParameterRange], sizes: Mapping[int, int], weights: Sequence[int]
) -> list[list[ParameterRange]]:
    """Cut ranges, in their order, into groups.

    Args:
        sizes: bytes of a number, by place.
        weights: of the groups' bytes.
    """
    ranges = [*ranges]
    total = sum((stop - start) * sizes[place] for place, start, stop in ranges)
    borders = _borders(total, weights)
    groups: list[list[ParameterRange]] = [[] for _ in weights]
    before = 0
    for place, start, stop in ranges:
        size, length = sizes[place], stop - start
        cuts = [start + min(max((border - before) // size, 0), length) for border in borders]
        for group, first, last in zip(groups, cuts, cuts[1:], strict=False):
            if first < last:
                group.append(ParameterRange(place, first, last))
        before += length * size
    return groups


def row_buckets_of(
    parameters: Sequence[nn.Parameter], owners: Mapping[int, int], most: int
) -> tuple[Bucket, ...]:
    """Cut parameters into buckets of whole parameters, of bytes as equal as these allow, and each
    bucket into shards of whole rows. So a holder owns one run of rows of each parameter.

    Args:
        parameters: those that are shared.
        owners: the weights of their shards' bytes, by rank.
        most: the largest number of buckets; of few bytes, or few parameters, fewer are made.

    Returns:
        At least one, the last parameters first.
    """
    total = sum(parameter.nbytes for parameter in parameters)
    number = num_portions(total, most)
    buckets: list[Bucket] = []
    stop, done = len(parameters), 0
    for first in reversed(range(len(parameters))):
        done += parameters[first].nbytes
        is_full = len(buckets) < number - 1 and done * number >= total * (len(buckets) + 1)
        if is_full or first == 0:
            buckets.append(_of_rows(parameters, first, stop, owners))
            stop = first
    return tuple(buckets) or (_of_rows(parameters, 0, 0, owners),)


def _of_rows(
    parameters: Sequence[nn.Parameter], first: int, stop: int, owners: Mapping[int, int]
) -> Bucket:
    """The bucket that some neighbouring parameters make."""
    shards = tuple(
        BucketShard(owner, tuple(own._replace(place=first + own.place) for own in ranges))
        for owner, ranges in row_shards_of(parameters[first:stop], owners)
    )
    return Bucket(frozenset(range(first, stop)), shards)


def row_shards_of(
    parameters: Sequence[nn.Parameter], owners: Mapping[int, int]
) -> tuple[BucketShard, ...]:
    """Cut parameters into shards of whole rows, whose bytes have the weights of their owners as
    nearly as rows allow.

    Args:
        parameters: those that are shared.
        owners: the weights of their shards' bytes, by rank.
    """
    total = sum(parameter.nbytes for parameter in parameters)
    borders = _borders(total, [*owners.values()])
    shards: dict[int, list[ParameterRange]] = {owner: [] for owner in owners}
    before = 0
    for place, parameter in enumerate(parameters):
        count = parameter.shape[0] if parameter.dim() else 1
        row = parameter.nbytes / count if count else 0.0
        for owner, (first, last) in zip(owners, _cuts(borders, before, count, row), strict=True):
            if first < last:
                size = parameter.numel() // count
                shards[owner].append(ParameterRange(place, first * size, last * size))
        before += parameter.nbytes
    return tuple(BucketShard(owner, tuple(ranges)) for owner, ranges in shards.items())


def _cuts(borders: Iterable[int], before: int, count: int, row: float) -> Iterator[tuple[int, int]]:
    """(first row, row behind the last) of each owner."""
    rows = [min(max(round((border - before) / row), 0), count) if row else 0 for border in borders]
    rows[-1] = count if row else 0
    return pairwise(rows)


ShardValues = list[Tensor | None]
"""The numbers of each range of a shard; ``None`` where its parameter has no gradient."""


def vector_of(gradient: Tensor | None) -> Tensor | None:
    """A gradient as a vector, without copying where that is possible. What is not dense stays as it
    is: threads can hand it over, and nobody else can."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    return gradient.detach().reshape(-1)


def cut(vector: Tensor | None, own: ParameterRange) -> Tensor | None:
    """A range of a gradient; one that is not dense goes whole, as its first range."""
    if vector is None or vector.layout is torch.strided:
        return None if vector is None else vector[own.start : own.stop]
    return vector if own.start == 0 else None


def added(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of those that are there, in their order; ``None`` if none is. It is in memory of its
    own: between threads, others read the same tensors."""
    there = [gradient for gradient in gradients if gradient is not None]
    if len(there) < 2:
        return there[0].clone() if there else None
    total = torch.add(there[0], there[1])
    for gradient in there[2:]:
        total.add_(gradient)
    return total


def room_for(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A vector for a sum: the memory of the gradient that it replaces, if it is one."""
    gradient = parameter.grad
    if gradient is not None and gradient.is_contiguous():
        return gradient.detach().view(-1)
    return torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)


def keep(vector: Tensor, parameter: nn.Parameter) -> None:
    """Make a sum the gradient, unless it is in its memory already; the order in memory stays."""
    gradient = parameter.grad
    if gradient is None or not gradient.is_contiguous():
        like = parameter.detach() if gradient is None else gradient
        shaped = vector.view(like.shape)
        parameter.grad = torch.empty_like(like, dtype=vector.dtype).copy_(shaped)
