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

Which ranks are linked is decided once when they meet (``link_devices``). All ranks tell where they
compute, and all come to the same conclusion. A pair of ranks is linked if both compute on
accelerators of one kind that torch has a collective library for, and on different ones: no library
connects a device with itself. Each linked pair has a group per direction (``device_link`` says
why), in which one byte is exchanged at once, always in the order of the pairs: libraries connect
when something is first sent, and who sends would wait for that. If it fails for any pair, all go
through main memory, and a warning says why.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.device.accelerators import is_on_host
from penstock.engine.device.queue import AcceleratorQueue, DeviceQueue
from penstock.engine.model import tree
from penstock.engine.transport import groups
from penstock.engine.transport.base import Edge, OnTop, Transport
from penstock.engine.transport.device_link import DeviceLink, is_dense_on
from penstock.engine.transport.rendezvous import Rendezvous, within

_RankPair = tuple[int, int]
"""The lower one first."""


class _Whereabouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank computes.

    Attributes:
        host: equal for ranks that share a host.
        kind: of its device.
        identity: tells its device from the others of its host.
        name: of its device, for people.
        library: what torch sends tensors of such devices with; empty where there is none.
        problem: why there is none.
    """

    host: str
    kind: str
    identity: str
    name: str
    library: str
    problem: str


@dataclass(frozen=True)
class LinkedDevices:
    """How the tensors of one rank travel.

    Attributes:
        of_rank: the links to other ranks, by their numbers.
        words: what is linked and what not, and why, as a sentence without its end; empty where no
            rank computes on an accelerator.
    """

    of_rank: Mapping[int, DeviceLink] = field(default_factory=dict)
    words: str = ""


def link_devices(
    meeting: Rendezvous,
    host: str,
    device: torch.device,
    queue: DeviceQueue | None,
    pairs: Iterable[_RankPair],
    seconds: float,
) -> LinkedDevices:
    """Link the devices of all ranks that can be linked; every rank must call it.

    Args:
        meeting: where all ranks meet.
        host: of this rank.
        device: on which it computes.
        queue: its work there.
        pairs: those that exchange tensors; the same on every rank.
        seconds: how long ranks wait for each other, and how long a tensor may be under way.

    Raises:
        PeerError, DeadlineError: another rank did not come.
    """
    places = meeting.exchange(_place_of(host, device), _Whereabouts, "to say on which device it is")
    if all(place.kind == "cpu" for place in places):
        return LinkedDevices()
    pairs = sorted(pairs)
    apart = {pair: _why_apart(pair, places[pair[0]], places[pair[1]]) for pair in pairs}
    linked = [pair for pair in pairs if not apart[pair]]
    if not linked:
        return LinkedDevices(words=_told(places, apart))
    made: dict[int, DeviceLink] = {}
    problem = ""
    try:
        # The others wait meanwhile for this rank to tell how it went, as long again.
        made = within(
            seconds / 2, lambda: _connect(meeting.rank, linked, places, device, queue, seconds)
        )
    except (RuntimeError, ValueError, TimeoutError) as error:
        problem = f"rank {meeting.rank}: {str(error).partition(chr(10))[0] or 'no answer'}"
    problems = [*filter(None, meeting.exchange(problem, str, "to say whether devices are linked"))]
    if problems:
        for own in made.values():
            own.close()
        library = places[linked[0][0]].library
        apart = dict.fromkeys(pairs, f"{library} could not connect them ({problems[0]})")
        if meeting.rank == 0:
            warnings.warn(
                f"tensors go through main memory, which is slower: {apart[linked[0]]}; "
                "transport='shared-memory' or 'process-group' silences this warning",
                RuntimeWarning,
                stacklevel=2,
            )
        made = {}
    return LinkedDevices(made, _told(places, apart))


def _place_of(host: str, device: torch.device) -> _Whereabouts:
    library, problem = ("", "") if is_on_host(device) else _library_for(device)
    return _Whereabouts(host, device.type, _identity(device), str(device), library, problem)


def _library_for(device: torch.device) -> tuple[str, str]:
    """The library that sends tensors of a device, or why there is none."""
    try:
        library = dist.get_default_backend_for_device(device)
    except ValueError:
        return "", f"torch has no collective library for {device.type}"
    if library == dist.get_default_backend_for_device("cpu"):
        return "", f"torch's library for {device.type}, {library}, goes through main memory, too"
    if not dist.is_backend_available(library):
        return "", f"this torch was built without {library}"
    return library, ""


def _identity(device: torch.device) -> str:
    """Equal only for the same device of a host. A process may number its devices in its own way, so
    the number counts only where devices tell nothing better."""
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    known = None
    if properties_of is not None and not is_on_host(device):
        known = getattr(properties_of(device), "uuid", None)
    return str(device.index or 0) if known is None else str(known)


def _why_apart(pair: _RankPair, first: _Whereabouts, second: _Whereabouts) -> str:
    """Why two ranks are not linked; empty if they can be."""
    for rank, place in zip(pair, (first, second), strict=True):
        if place.kind == "cpu":
            return f"rank {rank} computes on the CPU"
        if place.problem:
            return place.problem
    if (first.kind, first.library) != (second.kind, second.library):
        return f"one is on {first.name}, the other on {second.name}"
    if (first.host, first.identity) == (second.host, second.identity):
        return f"both compute on {first.name}"
    return ""


def _told(places: list[_Whereabouts], apart: Mapping[_RankPair, str]) -> str:
    linked = [pair for pair, why in apart.items() if not why]
    others = {pair: why for pair, why in apart.items() if why}
    pair, why = next(iter(others.items()), ((0, 0), ""))
    more = f", {len(others) - 1} more pairs likewise" if len(others) > 1 else ""
    detour = f"through main memory between ranks {pair[0]} and {pair[1]} ({why}{more})"
    if not linked:
        return f"tensors of accelerators go {detour}" if others else ""
    library = places[linked[0][0]].library
    return f"tensors go straight from device to device by {library}" + (
        f", but {detour}" if others else ""
    )


def _connect(
    rank: int,
    linked: list[_RankPair],
    places: list[_Whereabouts],
    device: torch.device,
    queue: DeviceQueue | None,
    seconds: float,
) -> dict[int, DeviceLink]:
    """Groups for all linked pairs, and the links of this rank, each of which has carried a byte."""
    made: dict[int, DeviceLink] = {}
    # torch wants all ranks to make all groups, in the same order, also those that they are not in.
    made_groups = [
        [groups.new_group(seconds, places[pair[0]].library, pair) for _direction in range(2)]
        for pair in linked
    ]
    for pair, (up, down) in zip(linked, made_groups, strict=True):
        if rank not in pair:
            continue
        assert isinstance(queue, AcceleratorQueue)
        is_lower = rank == pair[0]
        outgoing, incoming = (up, down) if is_lower else (down, up)
        made[sum(pair) - rank] = DeviceLink(queue, outgoing, incoming)
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        for group, sends in ((up, is_lower), (down, not is_lower)):
            if sends:
                work = dist.isend(byte, group=group, group_dst=1 - dist.get_rank(group))
            else:
                work = dist.irecv(byte, group=group, group_src=1 - dist.get_rank(group))
            assert work is not None  # this rank is in the group
            work.wait()
    if made:
        torch.accelerator.current_stream(device).synchronize()
    return made


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


class _Delayed(NamedTuple):
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
        self._held_back: deque[_Delayed] = deque()

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
        self._held_back.append(_Delayed(edge, number, tree.unflatten(leaves, structure), moment))

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
