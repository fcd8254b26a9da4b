"""When ops happen on an accelerator, which is later than when the host asks for them.

Events are recorded around every op on the rank's compute stream. What they tell is read when
somebody wants to see it, so that nobody waits for that in between.
"""

from __future__ import annotations

import time
from array import array

import torch


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
        """What seemed to begin has only waited: it begins here."""
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
            told = [start, *(start + origin.elapsed_time(event) / 1000 for event in others)]
            self._seconds = array("d", told[::2]), array("d", told[1::2])
            self._events.clear()
        return self._seconds


def happened(
    starts: array[float], ends: array[float], stamps: Stamps | None
) -> tuple[array[float], array[float]]:
    """When ops happened: as stamps tell, or else when the host asked for them."""
    return (starts, ends) if stamps is None else stamps.seconds()
