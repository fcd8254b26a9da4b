"""Whole stand-ins for weights that groups of different sizes hold: their parts do not match.

Such weights are tied, so they are few. Before their holders sum gradients, the members of each
group make theirs whole; behind the sum, each takes its part again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.engine.tensor.cuts import Cut
from penstock.engine.tensor.group import Group


class StandIns:
    """What one member shows to other groups in the place of its parameters.

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
        cuts: Sequence[Cut | None],
        terms: frozenset[int],
        group: Group | None,
    ) -> None:
        self._pairs = list(zip(parameters, cuts, strict=True))
        self._terms = terms
        self._group = group
        self.parameters = tuple(
            nn.Parameter(own.detach().new_empty(shape), own.requires_grad)
            for own, shape in zip(parameters, shapes, strict=True)
        )

    def gather(self) -> None:
        """Give the stand-ins whole gradients. All members call it at the same time."""
        for whole, (own, cut) in zip(self.parameters, self._pairs, strict=True):
            whole.requires_grad_(own.requires_grad)
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
        """Give the stand-ins whole values."""
        with torch.no_grad():
            for whole, (own, cut) in zip(self.parameters, self._pairs, strict=True):
                whole.copy_(self._whole(own.detach(), cut))

    def hand_back_values(self) -> None:
        """Take the own parts of the values."""
        with torch.no_grad():
            for whole, (own, cut) in zip(self.parameters, self._pairs, strict=True):
                own.copy_(self._part(whole.detach(), cut))

    def _whole(self, part: Tensor, cut: Cut | None) -> Tensor:
        if cut is None or self._group is None:
            return part.clone()
        return cut.joined(self._group.exchange([part] * self._group.size))

    def _part(self, whole: Tensor, cut: Cut | None) -> Tensor:
        if cut is None or self._group is None:
            return whole
        return cut.part(whole, self._group.size, self._group.index)
