"""Movers: what moves bytes beside compute, for whoever does not want to wait.

An I/O thread transfers between main memory and a tier: first what is needed first.

Side streams copy between main memory and a device on which a rank's weights come and go. Nobody
waits on the host. What comes is written behind the last use of the memory that it goes to; what
goes is read behind the ops that made it; and who needs what has come lets its own stream wait.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.device.accelerators import can_pin


class SideStreams:
    """Streams of an accelerator: what comes in does not wait for what goes out, nor what is urgent
    for what else comes in.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._coming = torch.Stream(device)
        self._overtaking = torch.Stream(device)
        self._going = torch.Stream(device)

    def now(self) -> torch.Event:
        """When all has happened that this thread's current stream has been asked for."""
        return torch.accelerator.current_stream(self._device).record_event()

    def bring(
        self,
        target: Tensor,
        source: Tensor,
        behind: Iterable[torch.Event | None],
        *,
        overtakes: bool = False,
    ) -> torch.Event:
        """Copy main memory to the device.

        Args:
            target: on the device.
            source: in main memory; if that is pinned, it must stay as it is until the copy is made.
            behind: after which moments; ``None`` is over.
            overtakes: whether it comes beside what else is on its way here, and not behind it.

        Returns:
            When the copy is made.
        """
        stream = self._overtaking if overtakes else self._coming
        return self._copied(stream, target, source, target, behind)

    def take_out(
        self, target: Tensor, source: Tensor, behind: Iterable[torch.Event | None]
    ) -> torch.Event:
        """Copy from the device to main memory; arguments as for ``bring``, the other way round."""
        return self._copied(self._going, target, source, source, behind)

    def take_all_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.Event:
        """Copy (target, source) pairs to main memory, behind all that this thread's current stream
        has been asked for. Who keeps the sources until that stream comes behind the end of it can
        let their memory be used again at once.

        Returns:
            When the copies are made.
        """
        self._going.wait_event(self.now())
        with self._going:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._going.record_event()

    def _copied(
        self,
        stream: torch.Stream,
        target: Tensor,
        source: Tensor,
        on_device: Tensor,
        behind: Iterable[torch.Event | None],
    ) -> torch.Event:
        for moment in behind:
            if moment is not None:
                stream.wait_event(moment)
        with stream:
            target.copy_(source, non_blocking=True)
        on_device.record_stream(stream)
        return stream.record_event()

    def settle(self) -> None:
        """Wait, on the host, until all copies are made."""
        self._coming.synchronize()
        self._overtaking.synchronize()
        self._going.synchronize()


def pinned_bytes(num_bytes: int) -> Tensor:
    """Bytes in main memory that devices copy from and to without the host; where the kind of device
    has no such memory, ordinary ones, and then the host waits for copies.

    Raises:
        RuntimeError: there is no such memory left.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=can_pin())


Transfer = Generator[None, None, "torch.Event | None"]
"""A transfer that stops behind each piece, so that something more urgent may come in between; at
its end it gives a moment as ``Moved`` has it."""


class Moved(Future["torch.Event | None"]):
    """The end of a transfer: done when the host has done its part; then it tells at which moment of
    an accelerator the rest is done, or ``None`` where there is no rest.

    Attributes:
        stretches: from when to when a thread was at work on it, as ``time.perf_counter`` counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stretches: list[tuple[float, float]] = []


class _QueuedTransfer(NamedTuple):
    """Something to transfer. Sorts by urgency; what is as urgent goes in order."""

    needed_at: int
    number: int
    transfer: Transfer
    moved: Moved


class IOThread:
    """A thread that performs one transfer at a time: the one that is needed first, and what it has
    begun goes on behind that. It ends with the process, whatever it waits for: a disk that never
    answers must not keep a process alive.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = count()
        self._turned = threading.Condition()
        self._given: list[_QueuedTransfer] = []
        self._num_held_up = 0
        """Transfers that wait for the end of others."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def begin(self, transfer: Transfer, needed_at: int = 0, behind: Moved | None = None) -> Moved:
        """Perform something.

        Args:
            needed_at: how soon it is needed: lower numbers come first, equal ones in order.
            behind: what has to end before this can begin; others go first meanwhile.
        """
        given = _QueuedTransfer(needed_at, next(self._numbers), transfer, Moved())
        moved = given.moved
        with self._turned:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._num_held_up += 1
        if behind is None:
            self._let_begin(given)
        else:
            behind.add_done_callback(lambda ended: self._let_begin(given, ended.exception()))
        return moved

    def _let_begin(self, given: _QueuedTransfer, error: BaseException | None = None) -> None:
        with self._turned:
            self._num_held_up -= 1
            if error is None:
                heapq.heappush(self._given, given)
            self._turned.notify()
        if error is not None:
            given.moved.set_exception(error)

    def _run(self) -> None:
        while (given := self._next()) is not None:
            self._perform(given)
            # What was moved must not be kept alive until something else is.
            del given

    def _next(self) -> _QueuedTransfer | None:
        with self._turned:
            while not self._given:
                if self._is_closed and not self._num_held_up:
                    return None
                self._turned.wait()
            return heapq.heappop(self._given)

    def _perform(self, given: _QueuedTransfer) -> None:
        """Go on with a transfer until its end, or until something else is more urgent."""
        moved, began = given.moved, time.perf_counter()
        try:
            while True:
                next(given.transfer)
                with self._turned:
                    if self._given and self._given[0] < given:
                        heapq.heappush(self._given, given)
                        moved.stretches.append((began, time.perf_counter()))
                        return
        except StopIteration as end:
            moved.stretches.append((began, time.perf_counter()))
            moved.set_result(end.value)
        except BaseException as error:  # whoever waits is told
            moved.set_exception(error)

    def close(self) -> None:
        """Let the thread end behind what it was given."""
        with self._turned:
            self._is_closed = True
            self._turned.notify()


def at_once(move: Callable[[], torch.Event | None]) -> Transfer:
    """A transfer of a single piece."""
    moment = move()
    yield
    return moment
