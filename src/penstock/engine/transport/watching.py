"""``ReceiveWatch``: whether a receive is done, where the library tells only who waits for it."""

from __future__ import annotations

import datetime
import queue
import threading
import weakref
from dataclasses import dataclass, field

import torch.distributed as dist

from penstock.engine.transport.base import Edge

_FOR_EVER = datetime.timedelta(days=365)
"""A wait that ends before its message comes would close the connection."""

_PARTING_SECONDS = 5.0


@dataclass
class _Watched:
    """A receive that a thread waits for.

    Attributes:
        work: the receive.
        done: set when nothing is left to wait for.
        error: what the wait ended with, if not with the message.
    """

    work: dist.Work
    done: threading.Event = field(default_factory=threading.Event)
    error: RuntimeError | None = None


class ReceiveWatch:
    """Waits for receives in a thread of its own, one after another in the order in which they were
    given: of sums of gradients, all of a portion are needed, and portions come in their order.

    The thread begins with the first receive that is watched. It touches nothing but the receive.
    """

    def __init__(self) -> None:
        self._watched: dict[Edge, _Watched] = {}
        self._inbox: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Not when the interpreter ends: a thread that wakes then ends the process with an abort.
        weakref.finalize(self, self._inbox.put, None).atexit = False

    def has(self, edge: Edge) -> bool:
        """Whether the receive that stands for an edge is waited for here."""
        return edge in self._watched

    def is_done(self, edge: Edge, work: dist.Work) -> bool:
        """Whether nobody would have to wait for the receive that stands for an edge; it is watched
        from now on."""
        if edge not in self._watched:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_wait_for_all, args=(self._inbox,), name="penstock-receives", daemon=True
                )
                self._thread.start()
            self._watched[edge] = watched = _Watched(work)
            self._inbox.put(watched)
        return self._watched[edge].done.is_set()

    def wait(self, edge: Edge, seconds: float) -> bool:
        """Wait for a receive that is watched; it no longer is when it is done.

        Returns:
            Whether it is done in time.

        Raises:
            RuntimeError: it failed.
        """
        watched = self._watched[edge]
        if not watched.done.wait(seconds):
            return False
        del self._watched[edge]
        if watched.error is not None:
            raise watched.error
        return True

    def close(self) -> None:
        """Nothing more will be watched. If nothing is waited for, the thread has ended then."""
        self._inbox.put(None)
        if self._thread is not None and all(one.done.is_set() for one in self._watched.values()):
            self._thread.join(_PARTING_SECONDS)


def _wait_for_all(inbox: queue.SimpleQueue[_Watched | None]) -> None:
    while (watched := inbox.get()) is not None:
        try:
            watched.work.wait(_FOR_EVER)
        except RuntimeError as error:
            watched.error = error
        watched.done.set()
