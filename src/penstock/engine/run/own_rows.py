"""A data set of which a process loads no more than the rows that its stages compute with.

All processes are asked for the same minibatches, in the same order. Only the first stage takes
inputs and only the last one targets, and of a stage with replicas each takes its microbatches. Of
other rows nothing counts but that they are there, so a row that was loaded stands for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.utils.data import Dataset

from penstock.base.errors import InputError
from penstock.core.schedule import Kind
from penstock.engine.run.assembly import Assembly
from penstock.engine.run.recipe import Recipe


class Rows(Protocol):
    """A data set whose rows have numbers."""

    def __getitem__(self, index: Any) -> Any:
        """The row with a number."""

    def __len__(self) -> int:
        """How many there are."""


class OwnRows(Dataset[Any]):
    """The rows of a data set that this process's stages compute with, among stand-ins.

    Args:
        rows: the data set.
        microbatches: those of a minibatch that the process takes something of; ``None`` for all.
        num_microbatches: of a minibatch with enough rows.
    """

    def __init__(
        self, rows: Rows, microbatches: Sequence[int] | None, num_microbatches: int
    ) -> None:
        self._rows = rows
        self._microbatches = microbatches
        self._num_microbatches = num_microbatches

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """The rows of a minibatch, for ``DataLoader``."""
        wanted = self.wanted(len(indices)) or range(min(1, len(indices)))
        loaded = {place: self._rows[indices[place]] for place in wanted}
        return [loaded.get(place, loaded[wanted[0]]) for place in range(len(indices))]

    def wanted(self, num_rows: int) -> Sequence[int]:
        """Which rows of a minibatch the process computes with, by their places in it."""
        count = self._num_microbatches
        # With fewer rows there are fewer microbatches, on other ranks than these.
        if self._microbatches is None or num_rows < count:
            return range(num_rows)
        whole, more = divmod(num_rows, count)
        starts = [number * whole + min(number, more) for number in range(count + 1)]
        return [
            row
            for number in self._microbatches
            for row in range(starts[number], starts[number + 1])
        ]


def own_rows(parts: Assembly, recipe: Recipe, rows: Rows) -> OwnRows:
    """The data set for the processes of a pipeline.

    Raises:
        InputError: it has no rows with numbers, or processes need rows that they do not compute
            with.
    """
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise InputError(
            "own_rows takes a data set whose rows have numbers, with __getitem__ and __len__; one "
            "that can only be read on must be read by every process"
        )
    count = parts.plan.num_microbatches
    # Without a flush, which replica a microbatch is for depends on those before it.
    if not parts.in_processes or parts.plan.versions.asynchronous:
        return OwnRows(rows, None, count)
    if parts.cutter.compares:
        raise InputError(
            "processes compare the minibatches that they are given, and own_rows makes them "
            "differ; give Pipeline(…, compare_data=False)"
        )
    if recipe.weighting.weight is not None:
        raise InputError(
            "weight=… counts the targets of all rows on every process, and own_rows leaves rows "
            "out; load all of them, or leave weight out"
        )
    return OwnRows(rows, _microbatches_here(parts), count)


def _microbatches_here(parts: Assembly) -> list[int]:
    """Those that this process takes inputs or targets of, if a minibatch has enough rows."""
    schedule, ends = parts.plan.build_schedule(), (0, len(parts.plan.stages) - 1)
    (worker,) = parts.workers
    if worker.rank >= len(schedule.ranks):  # a parameter server
        return []
    ops = schedule.ranks[worker.rank]
    return sorted({op.microbatch for op in ops if op.kind is Kind.FORWARD and op.stage in ends})
