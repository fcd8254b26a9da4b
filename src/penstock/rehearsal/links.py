"""A transport whose messages take as long as planned, though this machine's are faster."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from penstock.rehearsal.waits import Alarm
from penstock.transport import Edge, Transport


class PlannedLinks(Transport):
    """Hands messages over by another transport, and keeps each back until it would have come.

    Args:
        inner: carries them.
        alarm: wakes when a message may be used.
        hop_seconds: planned, of the edges between stages.
        reduce_seconds: of all other edges, on which copies of a stage exchange gradients.
    """

    def __init__(
        self,
        inner: Transport,
        alarm: Alarm,
        hop_seconds: Mapping[Edge, float],
        reduce_seconds: float,
    ) -> None:
        self._inner = inner
        self._alarm = alarm
        self._hop_seconds = hop_seconds
        self._reduce_seconds = reduce_seconds

    def send(self, edge: Edge, number: int, value: Any) -> None:
        hop = self._hop_seconds.get(edge, self._reduce_seconds)
        if hop:
            # A tensor: as part of a message's description it would make each one a new kind.
            value = value, torch.tensor(time.perf_counter() + hop, dtype=torch.float64)
        self._inner.send(edge, number, value)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        value = self._inner.recv(edge, number, waiting)
        if self._hop_seconds.get(edge, self._reduce_seconds):
            value, usable = value
            self._alarm.until(usable.item())
        return value

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        self._inner.fail(reason, edges)

    def flush(self) -> None:
        self._inner.flush()

    def discard(self, before: int) -> None:
        self._inner.discard(before)

    def close(self, reason: str) -> None:
        self._inner.close(reason)
