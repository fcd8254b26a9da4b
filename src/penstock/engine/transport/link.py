"""How two ranks of one host tell each other of messages: by a ring in shared memory, and a socket.

Notices on the socket, each a packet, tell what lies in shared memory. When the other process ends,
however it ends, the kernel closes its socket, and the reader of this one sees the end of file at
once.

In a ring, who sends leaves a few numbers, and who receives looks. That takes no system call, where
a packet through a socket takes two. Only a reader that has gone to sleep has to be woken, by a
notice; the ring tells whether it has.

An entry is written before the count of entries, and the reader reads the count first. On x86-64
that is enough: a core's stores are seen in their order. Elsewhere they need not be, and Python has
no fence for it, so there are no rings there (``HAS_RINGS``).

Who falls asleep and who leaves an entry must not miss each other. The reader says that it sleeps,
*then* looks a last time; the writer leaves the entry, *then* looks whether the reader sleeps. Each
needs its store to be seen before its load happens, which x86-64 promises for nothing but a locked
instruction: taking a lock is one.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from penstock.base.errors import RunError
from penstock.core.cluster.local import usable_cores
from penstock.engine.transport import packing
from penstock.engine.transport.base import Edge
from penstock.engine.transport.packing import BlockLayout
from penstock.engine.transport.slots import RemoteSlot, SlotPool

HAS_RINGS = platform.machine() in ("x86_64", "AMD64")

_NUM_ENTRIES = 1024
_WORDS_PER_ENTRY = 4
_WORD_BYTES = 8
# Each in a cache line of its own, since one side writes it while the other reads the rest.
_NUM_WRITTEN, _NUM_READ, _IS_ASLEEP, _FIRST_ENTRY = 0, 8, 16, 24

RING_BYTES = -(-_WORD_BYTES * (_FIRST_ENTRY + _WORDS_PER_ENTRY * _NUM_ENTRIES) // mmap.PAGESIZE) * (
    mmap.PAGESIZE
)


RingEntry = tuple[int, int, int, int]
"""One message, as a ring tells of it: the slot where it lies; its edge's tag; which of the edge's
messages it is; and the number of its layout among those of its edge, negative if there is a note
with it, 0 if all has to be read."""


class RingWriter:
    """The end of the one who sends.

    Args:
        memory: ``RING_BYTES`` of it, all zero.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._words = memoryview(memory).cast("q")
        self._num_written = 0
        self._fence = threading.Lock()

    def put(self, slot: int, tag: int, number: int, layout: int) -> bool:
        """Leave an entry; ``False`` if the reader has left so many unread that there is no room."""
        words, count = self._words, self._num_written
        if count - words[_NUM_READ] >= _NUM_ENTRIES:
            return False
        start = _FIRST_ENTRY + _WORDS_PER_ENTRY * (count % _NUM_ENTRIES)
        words[start] = slot
        words[start + 1] = tag
        words[start + 2] = number
        words[start + 3] = layout
        words[_NUM_WRITTEN] = self._num_written = count + 1
        return True

    def must_wake(self) -> bool:
        """Whether the reader sleeps and has not seen the last entry."""
        with self._fence:
            pass
        return self._words[_IS_ASLEEP] != 0


class RingReader:
    """The end of the one who receives.

    Args:
        memory: the writer's.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._words = memoryview(memory).cast("q")
        self._num_read = 0
        self._fence = threading.Lock()

    def has_news(self) -> bool:
        """Whether there is an entry."""
        return self._words[_NUM_WRITTEN] != self._num_read

    def next(self) -> RingEntry | None:
        """The next entry, if there is one."""
        words, count = self._words, self._num_read
        if words[_NUM_WRITTEN] == count:
            return None
        start = _FIRST_ENTRY + _WORDS_PER_ENTRY * (count % _NUM_ENTRIES)
        entry = words[start], words[start + 1], words[start + 2], words[start + 3]
        words[_NUM_READ] = self._num_read = count + 1
        return entry

    def fall_asleep(self) -> None:
        """The writer has to wake this end from now on; look once more before sleeping."""
        self._words[_IS_ASLEEP] = 1
        with self._fence:
            pass

    def wake(self) -> None:
        """This end looks for itself again."""
        self._words[_IS_ASLEEP] = 0


_LONGEST_LOOK_SECONDS = 2e-3
_SHORTEST_LOOK_SECONDS = 2e-5
_LOOKS_PER_CLOCK = 8


class Lookout:
    """Looks at the rings of all other ranks of this host.

    Args:
        num_ranks: of this host, this one included.

    Attributes:
        rings: those that are looked at.
    """

    def __init__(self, num_ranks: int) -> None:
        self.rings: list[RingReader] = []
        self._num_ranks = num_ranks
        self._cores = usable_cores()
        self._seconds = _LONGEST_LOOK_SECONDS
        self._began = 0.0

    def look(self) -> bool:
        """Look for a while, without sleeping, whether anything comes."""
        # What some rank tells by other ways would be missed for as long as this looks.
        if len(self.rings) < self._num_ranks - 1 or not self._has_cores():
            return False
        rings, clock = self.rings, time.perf_counter
        self._began = clock()
        end = self._began + self._seconds
        while clock() < end:
            for _ in range(_LOOKS_PER_CLOCK):
                for ring in rings:
                    if ring.has_news():
                        return True
        return False

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """While this rank sleeps: whoever leaves something in a ring has to wake it."""
        for ring in self.rings:
            ring.fall_asleep()
        try:
            yield
        finally:
            for ring in self.rings:
                ring.wake()
            self._learn(time.perf_counter() - self._began)

    def _learn(self, waited_seconds: float) -> None:
        """It was not enough to look: how long the next wait is looked at, by how long this one was.
        Who has learned from long waits not to look would else never learn that they have become
        short."""
        if waited_seconds < _LONGEST_LOOK_SECONDS:
            self._seconds = min(2 * waited_seconds, _LONGEST_LOOK_SECONDS)
        else:
            self._seconds = max(self._seconds / 2, _SHORTEST_LOOK_SECONDS)

    def leave(self) -> None:
        """This rank will look no more; who leaves it something finds out when waking it."""
        for ring in self.rings:
            ring.fall_asleep()

    def _has_cores(self) -> bool:
        """Whether a core is left for every thread if this one keeps its own busy."""
        return self._num_ranks * torch.get_num_threads() <= self._cores


_FIELDS = struct.Struct("<qqqq")
_LARGEST_NOTICE_BYTES = 4096
_TRUNCATED = 8
"""``MSG_CTRUNC`` as a plain number, which takes a tenth of the time."""

_DESCRIPTOR_BYTES = struct.calcsize("i")


class NoticeKind(IntEnum):
    """The kinds of notices."""

    NEW_SLOT = 0
    """A slot, of a segment that comes with it; the number is the segment's bytes."""
    OLD_SLOT = 1
    """A slot will not be used again."""
    MESSAGE = 2
    """A slot holds a message; told so where there is no ring."""
    FAILURE = 3
    """The sender failed, the text says why; the number is the lowest that it had not discarded."""
    CLOSED = 4
    """The sender left for good, the text says why."""
    RING = 5
    """Messages will be told of in a ring (``RingWriter``), of a segment that comes with it."""
    WAKE = 6
    """The ring has something new."""


_WITH_SEGMENT = frozenset({NoticeKind.NEW_SLOT, NoticeKind.RING})


class Notice(NamedTuple):
    """Words of one rank to another."""

    kind: NoticeKind
    slot: int = 0
    tag: int = 0
    number: int = 0
    text: str = ""
    descriptor: int = -1
    """That of a segment; the receiver closes it."""


class PeerLink:
    """One end of the socket.

    Args:
        connection: a connected ``SOCK_SEQPACKET`` socket.
    """

    def __init__(self, rank: int, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._rank = rank
        self._peer = peer
        self._connection = connection
        self._ancillary_bytes = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)

    def fileno(self) -> int:
        """For ``poll``."""
        return self._connection.fileno()

    def tell(self, notice: Notice) -> bool:
        """Send a notice; ``False`` if the peer has not read so many that there is no room.

        Raises:
            ConnectionError: the peer is gone.
        """
        kind, slot, tag, number, text, descriptor = notice
        data = _FIELDS.pack(kind, slot, tag, number)
        try:
            if descriptor >= 0:
                socket.send_fds(self._connection, [data], [descriptor])
            else:
                self._connection.send(data + packing.short(text) if text else data)
        except BlockingIOError:
            return False
        return True

    def read(self) -> Notice | None:
        """The next notice, when there is one; ``None`` if the peer is gone.

        Raises:
            RunError: this process cannot take a segment, since it has too many open files; or what
                came is no notice.
        """
        try:
            data, ancillary, flags, _ = self._receive()
        except ConnectionError:
            return None
        if not data:
            return None
        if flags & _TRUNCATED:
            raise RunError(
                f"rank {self._rank} could not take shared memory from rank {self._peer}: too many "
                "files are open; raise the limit (ulimit -n) or use transport='process-group'"
            )
        descriptor = _descriptor(ancillary) if ancillary else -1
        notice = _notice(data, descriptor)
        if notice is None:
            if descriptor >= 0:
                os.close(descriptor)
            packing.refuse(Edge(self._peer, self._rank, 0), "it is no notice")
        return notice

    def _receive(self) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        wanted = _LARGEST_NOTICE_BYTES, self._ancillary_bytes, socket.MSG_CMSG_CLOEXEC
        try:
            return self._connection.recvmsg(*wanted)
        except ConnectionResetError:
            # The peer left before it had read all. The kernel says so once, ahead of what the peer
            # has sent: for example, why it left.
            return self._connection.recvmsg(*wanted)

    def close(self) -> None:
        """This process's end."""
        self._connection.close()


def _notice(data: bytes, descriptor: int) -> Notice | None:
    """Read a packet; ``None`` if it is nonsense."""
    if len(data) < _FIELDS.size:
        return None
    kind, slot, tag, number = _FIELDS.unpack_from(data)
    if kind not in _KINDS or (kind in _WITH_SEGMENT) != (descriptor >= 0):
        return None
    text = data[_FIELDS.size :].decode(errors="replace")
    return Notice(_KINDS[kind], slot, tag, number, text, descriptor)


_KINDS = {int(kind): kind for kind in NoticeKind}


def _descriptor(ancillary: list[tuple[int, int, bytes]]) -> int:
    _, _, data = ancillary[0]
    return int.from_bytes(data[:_DESCRIPTOR_BYTES], sys.byteorder)


_MOST_UNDER_WAY = 64


class _EdgesByTag(dict[int, Edge]):
    """The channels from one rank to another, each made once."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__()
        self._ends = source, target

    def __missing__(self, tag: int) -> Edge:
        edge = self[tag] = Edge(*self._ends, tag)
        return edge


class Peer:
    """One other rank, as this one deals with it."""

    def __init__(self, rank: int, link: PeerLink, own_rank: int) -> None:
        self.rank = rank
        self.link = link
        self.sending = f"rank {own_rank}, sending to rank {rank}"
        self.edges = _EdgesByTag(rank, own_rank)
        self.pool = SlotPool()
        self.remote_slots: dict[int, RemoteSlot] = {}
        self.outgoing: RingWriter | None = None
        self.layouts: dict[int, tuple[int, BlockLayout]] = {}
        """By tag, the last layout that came, and its number."""
        self.farewell = ""
        """Why nothing will come any more; empty while it lives."""
        self.died = False

    def has_room(self, tag: int, lowest: int) -> bool:
        """Whether one more message may be under way to it."""
        pool = self.pool
        # Mostly there are fewer slots than that, whatever is in them.
        return len(pool) < _MOST_UNDER_WAY or pool.num_waiting(tag, lowest) < _MOST_UNDER_WAY
