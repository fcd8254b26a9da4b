"""A transport whose messages take as long as planned, though this machine's are faster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.base import OnTop
from penstock.training.rehearsal.waits import Alarm


class PlannedLinks(OnTop):
    """Hands messages over by another transport, and keeps each back until it would have come.

    Args:
        inner: carries them.
        alarm: wakes when a message may be used.
        hop_seconds: planned, of each edge; those that are not there take what they take.
        link_seconds: of these, how long a message keeps others between the same ranks waiting.
    """

    def __init__(
        self,
        inner: Transport,
        alarm: Alarm,
        hop_seconds: Mapping[Edge, float],
        link_seconds: Mapping[Edge, float],
    ) -> None:
        super().__init__(inner)
        self._alarm = alarm
        self._hop_seconds = hop_seconds
        self._link_seconds = link_seconds
        self._free: dict[tuple[int, int], float] = {}

    def send(self, edge: Edge, number: int, value: Any) -> None:
        hop = self._hop_seconds.get(edge)
        if hop:
            # A tensor: as part of a message's description it would make each one a new kind.
            value = value, torch.tensor(self._leaves(edge) + hop, dtype=torch.float64)
        self.inner.send(edge, number, value)

    def _leaves(self, edge: Edge) -> float:
        """When a message that is ready now begins its way."""
        ranks = edge.source, edge.target
        leaves = max(time.perf_counter(), self._free.get(ranks, 0.0))
        self._free[ranks] = leaves + self._link_seconds.get(edge, 0.0)
        return leaves

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        value = self.inner.recv(edge, number, waiting)
        if self._hop_seconds.get(edge):
            value, usable = value
            self._alarm.until(usable.item())
        return value
