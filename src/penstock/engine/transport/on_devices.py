"""Messages of ranks that compute on accelerators, on top of any transport.

Between threads, a tensor is handed over as it is, with the moment in its sender's work when it is
made; whoever receives it copies it to its own device behind that moment. Nobody waits but streams.

Between processes, the transport below carries every message, and always its small part: how the
value is nested, what is no tensor of a device, seals. Failures, deadlines and the end of a process
stay its job. The bytes of tensors on a device go one of two ways:

- straight to the device of the other rank, where there is a link between the two (``device_link``).
  The host waits for nothing.
- through main memory, where there is none. They are copied to pinned memory on a stream of their
  own, and the message is held back until they are there; the host waits for that only when it is
  about to wait for another rank anyway, which may itself be waiting for this message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.device.queue import AcceleratorQueue, DeviceQueue
from penstock.engine.model import tree
from penstock.engine.transport.base import Edge, OnTop, Transport
from penstock.engine.transport.device_link import DeviceLink, is_dense_on


class _Handed(NamedTuple):
    """A value between threads, and when it is made."""

    value: Any
    moment: torch.Event | None


class ThreadDeviceTransport(OnTop):
    """One rank's end of all its channels to other threads, for tensors of any device.

    Args:
        inner: hands over values as they are; all ranks of the process have the same.
        queue: this rank's work on its device.
    """

    def __init__(self, inner: Transport, queue: DeviceQueue) -> None:
        super().__init__(inner)
        self._queue = queue

    @property
    def queue(self) -> DeviceQueue:
        return self._queue

    def send(self, edge: Edge, number: int, value: Any) -> None:
        self.inner.send(edge, number, _Handed(value, self._queue.moment()))

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        received, moment = self.inner.recv(edge, number, waiting), None
        if type(received) is _Handed:
            received, moment = received
        here = partial(self._queue.fetched, moment=moment)
        return tree.replace(Tensor, partial(tree.apart, made=here), received)


class _HeldBack(NamedTuple):
    """A message whose tensors are on their way to main memory, and when they are there."""

    edge: Edge
    number: int
    value: Any
    moment: torch.Event


class ProcessDeviceTransport(OnTop):
    """One rank's end of all its channels to other processes, for tensors of its accelerator.

    Args:
        inner: carries values in main memory.
        queue: this rank's work on its device.
        links: to ranks whose devices take tensors from this one's directly.
    """

    def __init__(
        self,
        inner: Transport,
        queue: AcceleratorQueue,
        links: Mapping[int, DeviceLink] = MappingProxyType({}),
    ) -> None:
        super().__init__(inner)
        self._queue = queue
        self._links = links
        self._held_back: deque[_HeldBack] = deque()

    @property
    def queue(self) -> AcceleratorQueue:
        return self._queue

    def send(self, edge: Edge, number: int, value: Any) -> None:
        while self._held_back and self._held_back[0].moment.query():
            self._release()
        link = self._links.get(edge.target)
        if link is not None:
            message = link.describe(edge, number, value)
            # First, so that the other rank is told even if the library makes its sender wait.
            self.inner.send(edge, number, message.small_part)
            link.post(message)
            return
        leaves, structure = tree.flatten(value)
        places = [
            place for place, leaf in enumerate(leaves) if is_dense_on(self._queue.device, leaf)
        ]
        if not places:
            self.inner.send(edge, number, value)
            return
        copies, moment = self._queue.to_host([leaves[place].detach() for place in places])
        for place, copied in zip(places, copies, strict=True):
            leaves[place] = copied.requires_grad_(leaves[place].requires_grad)
        self._held_back.append(_HeldBack(edge, number, tree.unflatten(leaves, structure), moment))

    def hand_over(self) -> None:
        while self._held_back:
            self._release()
        super().hand_over()

    def _release(self) -> None:
        edge, number, value, moment = self._held_back.popleft()
        moment.synchronize()
        self.inner.send(edge, number, value)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        self.hand_over()
        link = self._links.get(edge.source)
        if link is not None:
            return link.receive(edge, number, partial(self.inner.recv, waiting=waiting))
        received = self.inner.recv(edge, number, waiting)
        return tree.replace(Tensor, partial(tree.apart, made=self._queue.from_host), received)

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        self._held_back.clear()
        super().fail(reason, edges)
        for link in self._links.values():
            link.abort()

    def flush(self) -> None:
        self.hand_over()
        super().flush()

    def discard(self, before: int) -> None:
        self._held_back = deque(held for held in self._held_back if held.number >= before)
        for link in self._links.values():
            link.discard(before)
        super().discard(before)

    def close(self, reason: str) -> None:
        self._held_back.clear()
        for link in self._links.values():
            link.close()
        super().close(reason)
