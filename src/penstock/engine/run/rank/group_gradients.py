"""Gradients of layers that a group shares: terms are summed, norms travel as squares of parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.engine.reduce.agreement import Share
from penstock.engine.tensor.group import ChannelGroup


class Divided(Protocol):
    """What a stage says of its parameters."""

    @property
    def terms(self) -> Sequence[nn.Parameter]:
        """Those of which every member has a term of the gradient."""

    @property
    def parts(self) -> Sequence[nn.Parameter]:
        """Those of which every member has a part."""


class GroupGradients:
    """One member's part in completing its group's gradients, round after round.

    Args:
        group: with whom.
        holdings: what each stage says of its parameters.

    Attributes:
        group: as given.
    """

    def __init__(self, group: ChannelGroup, holdings: Mapping[int, Divided]) -> None:
        self.group = group
        self._terms = {stage: held.terms for stage, held in holdings.items()}
        self._parts = {id(part) for held in holdings.values() for part in held.parts}
        self._left: set[int] = set()

    def begin(self) -> None:
        """A round begins, in which every stage's gradients are made whole once."""
        self._left = {stage for stage, terms in self._terms.items() if terms}

    def complete(self, stage: int | None = None) -> None:
        """Sum the members' terms, one message for all gradients of a dtype.

        Args:
            stage: the one whose gradients are complete but for that; by default all.
        """
        due = sorted(self._left if stage is None else self._left & {stage})
        self._left -= {*due}
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for index in due:
            for parameter in self._terms[index]:
                if parameter.grad is not None:
                    by_dtype[parameter.grad.dtype].append(parameter)
        for parameters in by_dtype.values():
            flat = torch.cat([_gradient(one).reshape(-1) for one in parameters])
            sizes = [one.numel() for one in parameters]
            pieces = torch.split(self.group.all_reduce(flat), sizes)
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)

    def share(self, own: Share, parameters: Mapping[int, nn.Parameter]) -> Share:
        """What the group knows, of what one member does: norms of whole gradients.

        Args:
            own: norms of this member's gradients, by any key.
            parameters: whose gradients they are.
        """
        divided = [key for key in own.norms if id(parameters[key]) in self._parts]
        norms = dict(own.norms)
        if divided:
            squares = torch.stack([norms[key].double().square() for key in divided])
            whole = self.group.all_reduce(squares).sqrt()
            norms |= {
                key: norm.to(norms[key].dtype) for key, norm in zip(divided, whole, strict=True)
            }
        overflow = None if own.overflow is None else self.group.largest(own.overflow)
        return Share(norms, overflow)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
