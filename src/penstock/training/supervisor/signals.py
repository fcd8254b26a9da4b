"""Signals to the supervisor, as something to wait for beside the ends of its ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a job from outside: Ctrl-C, ``kill``, and a terminal that is closed."""

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Signals:
    """Takes the signals that end a job, until they are given back.

    A signal that was ignored when this process was started, as by ``nohup``, stays ignored.

    Attributes:
        descriptor: becomes readable when a signal has come.
    """

    def __init__(self) -> None:
        self.descriptor, self._written = os.pipe()
        for end in (self.descriptor, self._written):
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        self._before: dict[signal.Signals, _Handler] = {}
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _come)

    def take(self) -> list[signal.Signals]:
        """The signals that have come since the last call, in their order."""
        try:
            numbers = os.read(self.descriptor, 64)
        except BlockingIOError:
            return []
        # SIGCHLD and others of the user's come here, too.
        return [signal.Signals(number) for number in numbers if number in self._before]

    def give_back(self) -> None:
        """Let signals do what they did before; may be called twice, and in a fork."""
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self.descriptor)
            os.close(self._written)


def _come(_number: int, _frame: FrameType | None) -> None:
    """Its number is in the pipe already."""


@contextmanager
def held_back() -> Iterator[None]:
    """Signals wait meanwhile: a fork must not get one before it is ready for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
