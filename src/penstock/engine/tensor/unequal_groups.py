"""Groups of different sizes, of which one hands values to the other, or both hold the same weights.

Groups of equal size hand over shard by shard. Where sizes differ, every shard of the source is cut
at the borders of the target's shards, and each piece goes to whom it belongs: every number once.

Shards of weights that both hold do not match. Such weights are tied, so they are few. Before their
holders sum gradients, the members of each group make theirs whole, in placeholders; behind the sum,
each takes its shard again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.engine.masters import take_gradient_dtype
from penstock.engine.tensor.group import Bounds, ShardSpec, TensorGroup, bounds


class Handover(NamedTuple):
    """A slice that one member of a group sends to one member of another.

    Attributes:
        source, target: their coordinates.
        within: where it lies in the source's part.
    """

    source: int
    target: int
    within: Bounds


def slices(lengths: Sequence[int], num_targets: int) -> Iterator[Handover]:
    """All that goes from one group to another, also what is empty: a target does not know where
    parts begin, and waits for everyone.

    Args:
        lengths: of the parts of the source's members, along the dimension that is divided.
        num_targets: how many members the other group has.

    >>> [tuple(one) for one in slices([2, 1], 1)]
    [(0, 0, Bounds(start=0, stop=2)), (1, 0, Bounds(start=0, stop=1))]
    """
    start = 0
    for source, length in enumerate(lengths):
        for target in range(num_targets):
            wanted = bounds(sum(lengths), num_targets, target)
            first = min(max(wanted.start - start, 0), length)
            last = min(max(wanted.stop - start, first), length)
            yield Handover(source, target, Bounds(first, last))
        start += length


def senders(num_sources: int, target: int, *, divided: bool) -> list[int]:
    """From whom a member gets a value.

    Args:
        num_sources: how many members the group has that hands it over.
        target: the member's coordinate.
        divided: whether each of those has a part; otherwise one that has all of it is enough.
    """
    return [*range(num_sources)] if divided else [target % num_sources]


def receivers(source: int, num_sources: int, num_targets: int, *, divided: bool) -> list[int]:
    """To whom a member sends a value; the counterpart of ``senders``."""
    return [
        target
        for target in range(num_targets)
        if source in senders(num_sources, target, divided=divided)
    ]


class WholePlaceholders:
    """Whole parameters that one member shows to other groups in the place of its own.

    Args:
        parameters: the member's.
        shapes: of whole ones.
        cuts: how each is divided; ``None`` for those of which all members have everything.
        terms: the identities of those of whose gradients every member has a term.
        group: with whom; ``None`` for a rank that sits alone.

    Attributes:
        parameters: whole ones, in the same order. Their values mean nothing before
            ``gather_values``, and they have gradients only while these are summed.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shapes: Sequence[tuple[int, ...]],
        cuts: Sequence[ShardSpec | None],
        terms: frozenset[int],
        group: TensorGroup | None,
    ) -> None:
        self._pairs = list(zip(parameters, cuts, strict=True))
        self._terms = terms
        self._group = group
        self.parameters = tuple(
            nn.Parameter(own.detach().new_empty(shape), own.requires_grad)
            for own, shape in zip(parameters, shapes, strict=True)
        )

    def gather(self) -> None:
        """Give the placeholders whole gradients. All members call it at the same time."""
        for whole, (own, cut) in zip(self.parameters, self._pairs, strict=True):
            whole.requires_grad_(own.requires_grad)
            take_gradient_dtype(whole, own)
            gradient = own.grad
            if gradient is not None and self._group is not None and id(own) in self._terms:
                gradient = self._group.all_reduce(gradient)
            whole.grad = None if gradient is None else self._whole(gradient, cut)

    def hand_back(self) -> None:
        """Take the own parts of the sums."""
        for whole, (own, cut) in zip(self.parameters, self._pairs, strict=True):
            own.grad = None if whole.grad is None else self._part(whole.grad, cut)
            whole.grad = None

    def gather_values(self) -> None:
        """Give the placeholders whole values."""
        with torch.no_grad():
            for whole, (own, cut) in zip(self.parameters, self._pairs, strict=True):
                whole.copy_(self._whole(own.detach(), cut))

    def hand_back_values(self) -> None:
        """Take the own parts of the values."""
        with torch.no_grad():
            for whole, (own, cut) in zip(self.parameters, self._pairs, strict=True):
                own.copy_(self._part(whole.detach(), cut))

    def _whole(self, part: Tensor, cut: ShardSpec | None) -> Tensor:
        if cut is None or self._group is None:
            return part.clone()
        return cut.joined(self._group.exchange([part] * self._group.size))

    def _part(self, whole: Tensor, cut: ShardSpec | None) -> Tensor:
        if cut is None or self._group is None:
            return whole
        return cut.part(whole, self._group.size, self._group.index)
