"""A thread that transfers, for whoever does not want to wait: first what is needed first."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from itertools import count
from typing import NamedTuple

import torch

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


class _Given(NamedTuple):
    """Something to transfer. Sorts by urgency; what is as urgent goes in order."""

    needed_at: int
    number: int
    what: Transfer
    moved: Moved


class Lane:
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
        self._given: list[_Given] = []
        self._num_held_up = 0
        """Transfers that wait for the end of others."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def begin(self, what: Transfer, needed_at: int = 0, behind: Moved | None = None) -> Moved:
        """Perform something.

        Args:
            needed_at: how soon it is needed: lower numbers come first, equal ones in order.
            behind: what has to end before this can begin; others go first meanwhile.
        """
        given = _Given(needed_at, next(self._numbers), what, Moved())
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

    def _let_begin(self, given: _Given, error: BaseException | None = None) -> None:
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

    def _next(self) -> _Given | None:
        with self._turned:
            while not self._given:
                if self._is_closed and not self._num_held_up:
                    return None
                self._turned.wait()
            return heapq.heappop(self._given)

    def _perform(self, given: _Given) -> None:
        """Go on with a transfer until its end, or until something else is more urgent."""
        moved, began = given.moved, time.perf_counter()
        try:
            while True:
                next(given.what)
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


def at_once(what: Callable[[], torch.Event | None]) -> Transfer:
    """A transfer of a single piece."""
    moment = what()
    yield
    return moment
