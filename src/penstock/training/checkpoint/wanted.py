"""When a loop over ``Pipeline.steps`` saves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

from penstock.base.values import flag, whole
from penstock.training.checkpoint.folder import as_path

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints in the course of ``Pipeline.steps``.

    Behind every so many minibatches the pipeline drains, so that all stages are at the same step,
    and saves as ``Pipeline.save`` does. Without ``drain`` an asynchronous pipeline goes on, and
    each stage is copied when it comes to that step itself; what is loaded is the same as if the
    pipeline had drained there, and so are the losses of who goes on from it: those of the run that
    did not drain are others. The ``position`` is the number of minibatches trained on.

    Attributes:
        folder: of the run.
        every: how many minibatches are between two checkpoints; counted from the run's beginning,
            so that a resumed run saves where the first would have.
        keep: how many complete checkpoints stay; ``None``: all.
        background: write while training goes on; it always does without ``drain``.
        drain: whether an asynchronous pipeline lets its stages come to the same step first. A
            synchronous one always has.

    Raises:
        InputError: a number below 1, or no folder.
    """

    folder: str | os.PathLike[str]
    every: int
    keep: int | None = None
    background: bool = True
    drain: bool = True

    def __post_init__(self) -> None:
        as_path(self.folder)
        whole("every", self.every, 1)
        if self.keep is not None:
            whole("keep", self.keep, 1)
        flag("background", self.background)
        flag("drain", self.drain)

    def stretches(self, values: Iterator[T], step: int) -> Iterator[Iterator[T]]:
        """Cut what comes into pieces that end where a checkpoint is due.

        Args:
            values: one for each minibatch to come. Of each piece all must be taken before the next.
            step: how many minibatches were trained on before.

        >>> wanted = Checkpoints("runs/a", every=4)
        >>> [list(stretch) for stretch in wanted.stretches(iter("abcdefgh"), 1)]
        [['a', 'b', 'c'], ['d', 'e', 'f', 'g'], ['h']]
        """
        count = self.every - step % self.every
        for first in values:
            yield chain([first], islice(values, count - 1))
            count = self.every
