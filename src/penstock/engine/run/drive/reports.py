"""Reports: what ranks that are processes tell each other at the end of a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from penstock.core.schedule import Op
from penstock.core.timing.spans import TransferKind
from penstock.engine.device.queue import happened
from penstock.engine.run.minibatch import StepResult
from penstock.engine.run.outcome import Peak, RankRecord
from penstock.engine.weights.store import HeldVersions

_KINDS: tuple[TransferKind, ...] = get_args(TransferKind)


class RankReport(NamedTuple):
    """A rank's message to all others at the end of a step.

    It travels as plain data. Where records are exchanged, ``times`` holds the starts and the ends
    of the ops of its program, which all ranks know, ``versions`` the weight version that each
    read, and ``moved`` a row for each thing that it moved: numbers travel ten times
    as fast as ops.
    """

    times: Tensor | None
    versions: Tensor | None
    moved: Tensor | None
    losses: dict[int, Tensor]
    outputs: dict[int, Any]
    metrics: dict[str, dict[int, Tensor]]
    peak: Peak | None
    held: HeldVersions | None

    def packed(self) -> tuple[Any, ...]:
        """The report as it travels."""
        peak = None if self.peak is None else tuple(self.peak)
        held = None if self.held is None else tuple(self.held)
        each = [*self.losses.values()]
        # One tensor travels faster than many.
        losses = torch.stack(each) if len({loss.dtype for loss in each}) == 1 else each
        results = [*self.losses], losses, self.outputs, self.metrics
        return self.times, self.versions, self.moved, *results, peak, held

    @classmethod
    def unpacked(cls, packed: tuple[Any, ...]) -> RankReport:
        """Undo ``packed``."""
        times, versions, moved, microbatches, losses, outputs, metrics, peak, held = packed
        peak, held = peak and Peak(*peak), held and HeldVersions(*held)
        own = dict(zip(microbatches, losses, strict=True))
        return cls(times, versions, moved, own, outputs, metrics, peak, held)

    @classmethod
    def of(cls, result: StepResult, *, records: bool, results: bool) -> RankReport:
        """The report of a rank's own result.

        Args:
            records: whether when ops ran is told.
            results: whether losses, outputs and metrics are.
        """
        times = versions = moved = None
        if records:
            # Of an accelerator it is known when all has happened: this waits for the device.
            columns = happened(result.starts, result.ends, result.stamps)
            times = torch.from_numpy(np.array(columns, np.float64))
            versions = torch.tensor(result.versions, dtype=torch.int64)
            if result.moved:
                rows = [(_KINDS.index(kind), *numbers) for kind, *numbers in result.moved]
                moved = torch.tensor(rows, dtype=torch.float64)
        own = (result.losses, result.outputs, result.metrics) if results else ({}, {}, {})
        return cls(times, versions, moved, *own, result.peak, result.held)

    def record(self, ops: Sequence[Op], base: int, clock_offset: float) -> RankRecord | None:
        """When the rank performed its ops, if it tells that; arguments as for ``RankRecord``."""
        if self.times is None or self.versions is None:
            return None
        starts, ends = (array("d", column.tolist()) for column in self.times)
        versions = self.versions.tolist()
        return RankRecord(ops, starts, ends, versions, base, clock_offset, moved=self._moved())

    def _moved(self) -> list[tuple[TransferKind, int, int, float, float]]:
        rows = [] if self.moved is None else self.moved.tolist()
        return [
            (_KINDS[int(kind)], int(stage), int(number), start, end)
            for kind, stage, number, start, end in rows
        ]
