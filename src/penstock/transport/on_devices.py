"""Messages of ranks that compute on accelerators, on top of any transport.

Between threads, a tensor is handed over as it is, with the moment in its sender's work when it is
made; whoever receives it copies it to its own device behind that moment. Nobody waits but streams.

Between processes, the transport below carries bytes of main memory: what is sent is copied there by
the sender, who waits for it, and from there to the receiver's device.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.device.queue import DeviceQueue
from penstock.model import tree
from penstock.transport.base import Edge, OnTop, Transport


class _Handed(NamedTuple):
    """A value between threads, and when it is made."""

    value: Any
    moment: torch.Event | None


class DeviceTransport(OnTop):
    """One rank's end of all its channels, for tensors of any device.

    Args:
        inner: the transport below.
        queue: this rank's work on its device.
        in_threads: whether the transport below hands over tensors as they are; all ranks of a
            process have the same.
    """

    def __init__(self, inner: Transport, queue: DeviceQueue, *, in_threads: bool) -> None:
        super().__init__(inner)
        self._queue = queue
        self._in_threads = in_threads

    @property
    def queue(self) -> DeviceQueue:
        return self._queue

    def send(self, edge: Edge, number: int, value: Any) -> None:
        if self._in_threads:
            value = _Handed(value, self._queue.moment())
        self.inner.send(edge, number, value)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        received, moment = self.inner.recv(edge, number, waiting), None
        if type(received) is _Handed:
            received, moment = received
        return tree.replace(Tensor, partial(self._queue.fetched, moment=moment), received)
