"""A thread that does one thing after another, for whoever does not want to wait for each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch

Moved = Future["torch.Event | None"]
"""The end of a transfer: done when the host has done its part; then it tells at which moment of an
accelerator the rest is done, or ``None`` where there is no rest."""
_Transfer = Callable[[], "torch.Event | None"]


class Lane:
    """A thread that performs what it is given, in order. It ends with the process, whatever it
    waits for: a disk that never answers must not keep a process alive.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: SimpleQueue[tuple[_Transfer, Moved] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, what: _Transfer) -> Moved:
        """Perform something behind what was given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Moved = Future()
        self._given.put((what, future))
        return future

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            what, future = given
            try:
                moment = what()
            except BaseException as error:  # whoever waits is told
                future.set_exception(error)
            else:
                future.set_result(moment)
                del moment
            # What was moved must not be kept alive until something else is.
            del given, what, future

    def close(self) -> None:
        """Let the thread end behind what it was given."""
        if self._thread is not None:
            self._given.put(None)
            self._thread = None
