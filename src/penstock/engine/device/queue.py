"""One rank's own queue of work on an accelerator, and how tensors get into it.

The host does not wait: it hands work to streams, and streams wait for each other by events. Three
kinds of stream take part in a rank's work:

- its compute stream, on which all its ops run in their order;
- one on which copies to its device arrive, so that they run beside the ops before;
- on every device that sends it something, one on which these copies leave.

Between processes two more do: one on which what is sent leaves, behind the ops that made it, and
one that waits for what comes, so that only those ops wait with it that need it.

Memory belongs to the stream on which it was allocated, and may be used again as soon as it is
dropped. Who reads it on another stream says so to the allocator (``record_stream``).

Ops happen later than the host asks for them. Events are recorded around every op on the rank's
compute stream (``Stamps``); what they tell is read when somebody wants to see it, so that nobody
waits for that in between.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor

from penstock.engine.device.accelerators import can_pin, is_on_host
from penstock.engine.device.crossing import moved


def timed_event(stream: torch.Stream) -> torch.Event:
    """An event, recorded now on a stream, whose time can be told."""
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


class DeviceClock:
    """Translates events of one device into seconds of this host's monotonic clock.

    Args:
        stream: of that device.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._known = self.stamp()
        self._known.synchronize()
        self._seconds = time.perf_counter()

    def stamp(self) -> torch.Event:
        """An event, recorded now, whose time can be told."""
        return timed_event(self._stream)

    def seconds(self, event: torch.Event) -> float:
        """When an event happened; waits until it has."""
        event.synchronize()
        self._seconds += self._known.elapsed_time(event) / 1000
        # From here on next time: torch tells milliseconds in single precision, which is coarse
        # after some minutes.
        self._known = event
        return self._seconds


class Stamps:
    """When a rank's ops of one minibatch began and ended on its device.

    Args:
        clock: that device's.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._events: list[torch.Event] = []
        self._seconds: tuple[array[float], array[float]] | None = None

    def add(self) -> None:
        """Something begins or ends here."""
        self._events.append(self._clock.stamp())

    def put_off(self) -> None:
        """Something that seemed to begin has only waited: it begins here."""
        self._events[-1] = self._clock.stamp()

    def seconds(self) -> tuple[array[float], array[float]]:
        """The begin and the end of each op; waits until all of them have ended."""
        if not self._events and self._seconds is None:
            self._seconds = array("d"), array("d")
        if self._seconds is None:
            origin, *others = self._events
            start = self._clock.seconds(origin)
            if others:
                others[-1].synchronize()
            moments = [start, *(start + origin.elapsed_time(event) / 1000 for event in others)]
            self._seconds = array("d", moments[::2]), array("d", moments[1::2])
            self._events.clear()
        return self._seconds


def happened(
    starts: array[float], ends: array[float], stamps: Stamps | None
) -> tuple[array[float], array[float]]:
    """When ops happened: as stamps tell, or else when the host asked for them."""
    return (starts, ends) if stamps is None else stamps.seconds()


Moments = Mapping[torch.device, torch.Event]
"""For some devices, a moment in the work of one of their streams."""


NOTHING_ASKED: Moments = MappingProxyType({})


class DeviceQueue(ABC):
    """The work of one rank, where some rank of the process computes on an accelerator.

    Args:
        device: where the rank computes.

    Attributes:
        device: as given.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._callers: Moments = NOTHING_ASKED

    @staticmethod
    def on(device: torch.device) -> DeviceQueue:
        """The queue of a rank on a device."""
        return HostQueue(device) if is_on_host(device) else AcceleratorQueue(device)

    def begin(self, callers: Moments) -> None:
        """Let all that follows happen behind what the caller has asked of the devices before."""
        self._callers = callers

    def given(self, tensor: Tensor) -> Tensor:
        """A tensor that the caller has given, on this device."""
        return self.fetched(tensor, self._callers.get(tensor.device))

    @abstractmethod
    def entered(self) -> AbstractContextManager[object]:
        """A context in which what this thread asks of the device joins this queue."""

    @abstractmethod
    def moment(self) -> torch.Event | None:
        """When all that was asked for up to now has happened; ``None`` if it has."""

    @abstractmethod
    def stamps(self) -> Stamps | None:
        """Stamps for the ops of the next minibatch; ``None`` where the host sees these happen."""

    @abstractmethod
    def fetched(self, tensor: Tensor, moment: torch.Event | None) -> Tensor:
        """A tensor that another rank has made, on this device, with its strides; one that is here
        already is not copied.

        Args:
            tensor: it must not be changed any more.
            moment: when it is made; ``None`` if it is.
        """


class HostQueue(DeviceQueue):
    """The work of a rank on the CPU beside others on accelerators: the host does it at once."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def moment(self) -> None:
        """All has happened."""

    def stamps(self) -> None:
        """The host sees when ops happen."""

    def fetched(self, tensor: Tensor, moment: torch.Event | None) -> Tensor:
        if is_on_host(tensor.device):
            return tensor
        if moment is not None:
            moment.synchronize()
        return moved(tensor, self.device)


class AcceleratorQueue(DeviceQueue):
    """The work of a rank on an accelerator: streams of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._compute = torch.Stream(device)
        self._arriving = torch.Stream(device)
        self._leaving: dict[torch.device, torch.Stream] = {}
        self._sending = torch.Stream(device)
        self._awaiting = torch.Stream(device)
        self._departing = torch.Stream(device)
        self._clock = DeviceClock(self._compute)

    def entered(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = self._compute
        return stream

    def begin(self, callers: Moments) -> None:
        super().begin(callers)
        moment = callers.get(self.device)
        if moment is not None:
            self._compute.wait_event(moment)

    def moment(self) -> torch.Event:
        return self._compute.record_event()

    def stamps(self) -> Stamps:
        return Stamps(self._clock)

    def fetched(self, tensor: Tensor, moment: torch.Event | None) -> Tensor:
        if tensor.device == self.device:
            if moment is not None:
                self._compute.wait_event(moment)
            tensor.record_stream(self._compute)
            return tensor
        if is_on_host(tensor.device):
            with self._arriving:
                arrived = moved(tensor, self.device, non_blocking=True)
        else:
            arrived = self._copied(tensor, moment)
        self._compute.wait_event(self._arriving.record_event())
        arrived.record_stream(self._compute)
        return arrived

    def _copied(self, tensor: Tensor, moment: torch.Event | None) -> Tensor:
        """A copy from another accelerator. It is made by the current stream of the *source*, which
        without one of our own would be the one on which the user works there."""
        leaving = self._leaving.get(tensor.device)
        if leaving is None:
            leaving = self._leaving[tensor.device] = torch.Stream(tensor.device)
        if moment is not None:
            leaving.wait_event(moment)
        with leaving, self._arriving:
            arrived = moved(tensor, self.device, non_blocking=True)
        tensor.record_stream(leaving)
        return arrived

    def sending(self) -> AbstractContextManager[object]:
        """A context for what leaves this device: behind all ops asked for up to now, and in the way
        of none that follow. What is read in it must be kept until that has happened."""
        self._sending.wait_event(self._compute.record_event())
        stream: AbstractContextManager[object] = self._sending
        return stream

    def arriving(self) -> AbstractContextManager[object]:
        """A context for what is to come to this device: beside the ops before. What is allocated in
        it belongs to whoever ``joins`` it."""
        stream: AbstractContextManager[object] = self._arriving
        return stream

    def join(self, wait: Callable[[], object], tensors: Iterable[Tensor] = ()) -> None:
        """Let the ops that follow come behind something, and use what it has made.

        Args:
            wait: makes the current stream wait for it, and not the host.
            tensors: what it has made.
        """
        # Not on the stream of arrivals: what comes next would have to wait for this, too.
        with self._awaiting:
            wait()
        self._compute.wait_event(self._awaiting.record_event())
        for tensor in tensors:
            tensor.record_stream(self._compute)

    def keep_until(self, wait: Callable[[], object], tensors: Iterable[Tensor]) -> None:
        """Let nobody else have the memory of tensors before something; no op comes behind that.

        Args:
            wait: makes the current stream wait for it.
            tensors: which the caller may drop.
        """
        with self._departing:
            wait()
        for tensor in tensors:
            tensor.record_stream(self._departing)

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event]:
        """Copies in main memory, and when they are there; nobody waits for that.

        They are in pinned memory, which torch keeps and gives out again once the last copy from or
        to it has happened.

        Args:
            tensors: on this device; no op that follows may overwrite them before that moment.
        """
        with self.sending():
            copies = [
                self._staging_for(tensor).copy_(tensor, non_blocking=True) for tensor in tensors
            ]
        for tensor in tensors:
            tensor.record_stream(self._sending)
        return copies, self._sending.record_event()

    def from_host(self, tensor: Tensor) -> Tensor:
        """A tensor that has come in main memory, on this device; the caller's memory is free at
        once, and the host does not wait for the copy."""
        return self.fetched(self._staging_for(tensor).copy_(tensor), None)

    def _staging_for(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=can_pin())


class Landing:
    """A stream on which what a caller gives reaches a device, so that nothing that ranks compute
    or send each other holds it up.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)
        self._reads_pinned = False

    def landed(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of another device. From pageable memory it has been read when this
        returns; another accelerator reads it on the caller's current stream there."""
        if is_on_host(tensor.device) and tensor.is_pinned():
            self._reads_pinned = True
        with self._stream:
            return moved(tensor, self._stream.device, non_blocking=True)

    def moment(self) -> torch.Event:
        """When all that has landed up to now is there."""
        return self._stream.record_event()

    def settle(self) -> None:
        """Wait until pinned memory has been read."""
        if self._reads_pinned:
            self._reads_pinned = False
            self._stream.record_event().synchronize()


def moments_of_caller(devices: Iterable[torch.device]) -> dict[torch.device, torch.Event]:
    """Now, on the streams of some devices that are current in this thread."""
    return {
        device: torch.accelerator.current_stream(device).record_event()
        for device in devices
        if not is_on_host(device)
    }


def taken_up(tensors: Iterable[Tensor], moment: torch.Event | None) -> None:
    """Let this thread's current streams go on behind a moment, and use what was made before it; the
    thread itself does not wait."""
    if moment is None:
        return
    torch.accelerator.current_stream(moment.device).wait_event(moment)
    for tensor in tensors:
        if not is_on_host(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))
