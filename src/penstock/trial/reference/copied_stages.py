"""Gradients of stages with copies, added as their ranks add them: each copy those of its own
microbatches, and then all in the order of a tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.core.summation.tree import SumTree


class CopiedStage(NamedTuple):
    """A stage with copies.

    Attributes:
        parameters: of the model.
        tree: of the ranks that have a copy.
        rank_of: from (microbatch, microbatches in the minibatch) to the rank that runs it.
    """

    parameters: tuple[nn.Parameter, ...]
    tree: SumTree
    rank_of: Callable[[int, int], int]


class CopiedStages:
    """Keeps the gradients of each copy apart until all microbatches are through.

    Args:
        stages: those with copies; the gradients of other stages are left alone.
    """

    def __init__(self, stages: Sequence[CopiedStage] = ()) -> None:
        self._stages = stages
        self._sums: dict[nn.Parameter, dict[int, Tensor]] = {}

    def gather(self, microbatch: int, count: int) -> None:
        """Take the gradients of a microbatch, which is one of so many."""
        for parameters, _, rank_of in self._stages:
            rank = rank_of(microbatch, count)
            for parameter in parameters:
                if parameter.grad is not None:
                    own = self._sums.setdefault(parameter, {})
                    gradient, parameter.grad = parameter.grad, None
                    own[rank] = own[rank] + gradient if rank in own else gradient

    def add_up(self) -> None:
        """Give parameters the sums over all copies."""
        for parameters, tree, _ in self._stages:
            for parameter in parameters:
                if parameter in self._sums:
                    parameter.grad = folded(tree, self._sums.pop(parameter))


def folded(tree: SumTree, gradients: Mapping[int, Tensor | None]) -> Tensor | None:
    """The sum of the gradients, by rank, that are there; ``None`` if none is."""
    there = {rank: gradient for rank, gradient in gradients.items() if gradient is not None}
    return tree.fold(there, torch.add) if there else None
