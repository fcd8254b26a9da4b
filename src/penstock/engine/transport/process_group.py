"""Transport between processes: ``torch.distributed`` point-to-point messages.

gloo has six habits, all measured. It is rendezvous at every size, so sends are kept under way in
the background. Its receiver must know the size, so both ends remember how large the blocks of an
edge have been, and announce growth. A message leaves only once its receiver has said that it is
ready, and that word queues behind what the receiver itself is sending. So between hosts, on every
edge that has been used, a receive stands for the next message, which then travels while both ends
compute. On one host that costs more than it hides: the thread that takes the message in is in the
way of the compute, so there a receive is posted only when its op is next. And a receive whose
memory is gone when its message comes makes the thread spin and blocks the connection, so that
memory lives as long as the group. Whether a receive is done it tells only who waits for it, which
another thread does for those who can use the time (``ReceiveWatch``).
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.engine.transport import groups, packing
from penstock.engine.transport.base import (
    SHARED_TAGS,
    Edge,
    Noted,
    Patience,
    Transport,
    gone,
    overdue,
)
from penstock.engine.transport.packing import BlockKind, Packer
from penstock.engine.transport.wire import Codec

_FIRST_CAPACITY = 4096
_MOST_UNDER_WAY = 64
_PARTING_SECONDS, _LEAST_PARTING_SECONDS = 5.0, 0.01


class ProcessGroupTransport(Transport):
    """One rank's end of all channels to the other processes.

    Args:
        group: of all processes that take part, and of nobody else's messages.
        near: the ranks on this process's host.
        deadline_seconds: how long a message may take, unless ``patience`` is changed.
        codec: describes the values that are sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        near: frozenset[int],
        deadline_seconds: float,
        codec: Codec | None = None,
    ) -> None:
        self.patience = Patience(deadline_seconds)
        self._group: dist.ProcessGroup | None = group
        self._near = near
        self._capacity: dict[Edge, int] = defaultdict(lambda: _FIRST_CAPACITY)
        self._under_way: dict[Edge, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._discarded: list[tuple[dist.Work, Tensor]] = []
        self._standing: dict[Edge, tuple[dist.Work, Tensor]] = {}
        # The group outlives this object, and what receives write to must outlive the group.
        weakref.finalize(group, self._standing.clear).atexit = False
        groups.lend(group, self)
        self._watch = ReceiveWatch()
        self._packer = Packer(codec or Codec())
        self._early: dict[tuple[Edge, int], Any] = {}
        self._farewells: dict[Edge, str] = {}
        self._lowest = 0
        self._closed: str | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, until every rank has gone on to another pipeline."""
        assert self._group is not None
        return self._group

    @property
    def closed(self) -> bool:
        """Whether nothing will be sent or received any more."""
        return self._closed is not None

    def release(self) -> None:
        """Let go of the group, which has been destroyed, and of what was under way in it."""
        self._group = None
        self._under_way.clear()
        self._discarded.clear()
        self._standing.clear()

    def send(self, edge: Edge, number: int, value: Any) -> None:
        self._check_open()
        value, note = value if type(value) is Noted else (value, b"")
        layout, tensors = self._packer.describe(edge, value)
        if layout.num_bytes > self._capacity[edge]:
            self._post(edge, packing.pack_notice(BlockKind.GROW, layout.num_bytes))
            self._capacity[edge] = layout.num_bytes
        self._post(edge, packing.pack(number, layout, tensors, note))

    def _post(self, edge: Edge, block: Tensor) -> None:
        under_way = self._under_way[edge]
        waiting = f"rank {edge.source}, sending to rank {edge.target}"
        while len(under_way) >= _MOST_UNDER_WAY:
            self._finish(under_way.popleft()[0], edge.target, waiting)
        try:
            work = dist.isend(block, edge.target, group=self.group, tag=edge.tag)
        except RuntimeError as error:
            raise self._translated(error, edge.target, waiting) from error
        if work is not None:
            under_way.append((work, block))

    def _finish(self, work: dist.Work, peer: int, waiting: str) -> None:
        try:
            work.wait(datetime.timedelta(seconds=self.patience.seconds))
        except RuntimeError as error:
            raise self._translated(error, peer, waiting) from error

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        self._check_open()
        wanted = (edge, number)
        while wanted not in self._early:
            if farewell := self._farewells.get(edge):
                raise PeerError(f"{waiting}: {farewell}", farewell)
            self._take_in(self._receive(edge, waiting), edge, waiting)
            if edge.source not in self._near:
                # If the source is gone by now, whoever asks for its next message is told.
                with contextlib.suppress(RunError):
                    self._stand(edge, waiting)
        return self._early.pop(wanted)

    def _take_in(self, block: Tensor, edge: Edge, waiting: str) -> None:
        kind, number, note, text = packing.read_prefix(edge, packing.memory_of(block))
        if kind is BlockKind.GROW:
            if number <= self._capacity[edge]:
                packing.refuse(edge, f"a block of {number} bytes is announced as a larger one")
            self._capacity[edge] = number
        elif kind is BlockKind.CLOSED:
            reason = text.decode(errors="replace")
            self._farewells[edge] = f"rank {edge.source} closed its pipeline ({reason})"
        elif number < self._lowest:
            return
        elif kind is BlockKind.FAILURE:
            reason = text.decode(errors="replace")
            raise PeerError(f"{waiting}: cancelled because {reason}", reason)
        else:
            layout = self._packer.recognise(edge, text)
            self._early[edge, number] = self._packer.unpack(edge, block.numpy(), layout, note)

    def _receive(self, edge: Edge, waiting: str) -> Tensor:
        self._stand(edge, waiting)
        if self._watch.has(edge) and not self._watch.release(edge):
            self._await_watched(edge, waiting)
            return self._standing.pop(edge)[1]
        work, block = self._standing.pop(edge)
        self._finish(work, edge.source, waiting)
        return block

    def _await_watched(self, edge: Edge, waiting: str) -> None:
        try:
            if not self._watch.wait(edge, self.patience.seconds):
                raise DeadlineError(overdue(waiting, edge.source, self.patience))
        except DeadlineError:
            raise
        except RuntimeError as error:
            raise self._translated(error, edge.source, waiting) from error

    def has_come(self, edge: Edge, number: int) -> bool | None:
        # Of all else, nobody gains by knowing what a thread would have to wait for.
        if edge.source in self._near or edge.tag < SHARED_TAGS:
            return None
        waiting = f"rank {edge.target}, looking for a message of rank {edge.source}"
        while (edge, number) not in self._early and edge not in self._farewells:
            self._stand(edge, waiting)
            if not self._watch.is_done(edge, self._standing[edge][0]):
                return False
            self._take_in(self._receive(edge, waiting), edge, waiting)
        return True

    def _stand(self, edge: Edge, waiting: str) -> None:
        """Be ready for the next message of an edge."""
        if edge in self._standing:
            return
        block = self._block(edge)
        try:
            work = dist.irecv(block, edge.source, group=self.group, tag=edge.tag)
        except RuntimeError as error:
            raise self._translated(error, edge.source, waiting) from error
        assert work is not None  # only a process outside of the group gets none
        self._standing[edge] = (work, block)

    def _block(self, edge: Edge) -> Tensor:
        """Memory for the next message of an edge."""
        num_bytes = self._capacity[edge]
        try:
            return torch.empty(num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise RunError(
                f"rank {edge.target} has no memory for a message of {num_bytes:,} bytes from rank "
                f"{edge.source}; use smaller microbatches, or more memory"
            ) from error

    def _translated(self, error: RuntimeError, peer: int, waiting: str) -> RunError:
        if "timed out" in str(error).lower():
            return DeadlineError(overdue(waiting, peer, self.patience))
        reason = gone(peer)
        return PeerError(f"{waiting}: {reason}", reason)

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        if self.closed:
            return
        notice = packing.pack_notice(BlockKind.FAILURE, self._lowest, reason)
        parting = []
        for edge in edges:
            # A rank that is gone needs no notice.
            with contextlib.suppress(RuntimeError):
                parting.append(dist.isend(notice, edge.target, group=self.group, tag=edge.tag))
        end = time.monotonic() + _PARTING_SECONDS  # of all together: there may be many
        for work in parting:
            if work is not None:
                left = max(end - time.monotonic(), _LEAST_PARTING_SECONDS)
                with contextlib.suppress(RuntimeError):
                    work.wait(datetime.timedelta(seconds=left))

    def flush(self) -> None:
        for edge, under_way in self._under_way.items():
            waiting = f"rank {edge.source}, end of the step, sending to rank {edge.target}"
            while under_way:
                self._finish(under_way.popleft()[0], edge.target, waiting)

    def discard(self, before: int) -> None:
        self._lowest = max(self._lowest, before)
        # The receiver will come to them in time; they must not be in the way of other messages.
        for under_way in self._under_way.values():
            self._discarded += under_way
            under_way.clear()
        for key in [key for key in self._early if key[1] < self._lowest]:
            del self._early[key]

    def close(self, reason: str) -> None:
        if self._closed is not None:
            return
        self._closed = reason
        self._watch.close()
        self._early.clear()
        notice = packing.pack_notice(BlockKind.CLOSED, text=reason)
        # It leaves when a rank waits on one of these edges, as long as this process lives.
        for edge, under_way in self._under_way.items():
            with contextlib.suppress(RuntimeError):
                work = dist.isend(notice, edge.target, group=self.group, tag=edge.tag)
                if work is not None:
                    under_way.append((work, notice))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise RunError(f"this rank has closed its pipeline ({self._closed})")


_FOR_EVER = datetime.timedelta(days=365)
"""A wait that ends before its message comes would close the connection."""


@dataclass
class _WatchedReceive:
    """A receive that a thread waits for.

    Attributes:
        work: the receive.
        taken: held by who waits, once somebody does.
        done: set when nothing is left to wait for.
        error: what the wait ended with, if not with the message.
    """

    work: dist.Work
    taken: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)
    error: RuntimeError | None = None


class ReceiveWatch:
    """Waits for receives in a thread of its own, one after another in the order in which they were
    given: of sums of gradients, all of a portion are needed, and portions come in their order.

    The thread begins with the first receive that is watched. It touches nothing but the receive.
    """

    def __init__(self) -> None:
        self._watched: dict[Edge, _WatchedReceive] = {}
        self._inbox: queue.SimpleQueue[_WatchedReceive | None] = queue.SimpleQueue()
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
            self._watched[edge] = watched = _WatchedReceive(work)
            self._inbox.put(watched)
        return self._watched[edge].done.is_set()

    def release(self, edge: Edge) -> bool:
        """Let go of a receive that the thread has not come to yet, so that nobody waits for others
        who needs this one now: these may need what its caller does next.

        Returns:
            Whether it is let go of, and is the caller's to wait for.
        """
        if self._watched[edge].taken.acquire(blocking=False):
            del self._watched[edge]
            return True
        return False

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
        if self._thread is not None and all(
            watched.done.is_set() for watched in self._watched.values()
        ):
            self._thread.join(_PARTING_SECONDS)


def _wait_for_all(inbox: queue.SimpleQueue[_WatchedReceive | None]) -> None:
    while (watched := inbox.get()) is not None:
        if not watched.taken.acquire(blocking=False):
            continue
        try:
            watched.work.wait(_FOR_EVER)
        except RuntimeError as error:
            watched.error = error
        watched.done.set()
