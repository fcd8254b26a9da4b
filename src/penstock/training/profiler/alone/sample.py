"""One microbatch to measure with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from penstock.base.errors import InputError
from penstock.base.values import is_whole
from penstock.engine.model import microbatches, tree
from penstock.engine.run.recipe import Loss


@dataclass(frozen=True)
class Sample:
    """The inputs of one microbatch, and what the loss takes beside the output.

    Raises:
        InputError: a loss without targets or targets without a loss, or inputs without rows.
    """

    inputs: Any
    targets: Any
    loss: Loss | None

    def __post_init__(self) -> None:
        if (self.loss is None) != (self.targets is None):
            raise InputError("give loss and targets together, or neither")
        microbatches.num_rows(self.inputs, "inputs")

    @cached_property
    def num_rows(self) -> int:
        """The number of rows of the microbatch."""
        return microbatches.num_rows(self.inputs, "inputs")

    def of_sizes(self, sizes: Iterable[int]) -> list[Sample]:
        """Samples of the first rows, smaller than this one, in ascending order.

        Raises:
            InputError: there are not so many.
        """
        given = {size: self.of(size) for size in sizes}
        return [given[size] for size in sorted(given) if size != self.num_rows]

    def of(self, size: int) -> Sample:
        """A sample of the first ``size`` rows.

        Raises:
            InputError: there are not so many.
        """
        if not is_whole(size) or not 1 <= size <= self.num_rows:
            raise InputError(
                f"sizes: {size!r} rows cannot be taken from a sample of {self.num_rows}; give a "
                "larger sample, or smaller sizes"
            )
        taken = [
            tree.replace(Tensor, lambda tensor: tensor[:size], value)
            for value in (self.inputs, self.targets)
        ]
        return replace(self, inputs=taken[0], targets=taken[1])
