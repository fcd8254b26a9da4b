"""Transport between processes of one host: values lie in shared memory, and rings tell where.

A value is copied once, by its sender; the receiver's tensors lie where it was copied to
(``slots``). What came is told in shared memory too, in a ring (``link``). All else, failures and
the end of a process above all, comes over one socket per pair of ranks, which also wakes who
sleeps. Nothing here has a name in the file system, so nothing can be left behind. Who waits looks
at the rings before it sleeps (``Lookout``).

A hand-over, from the sender's side (S) to the receiver's (R); the numbers stand at the lines below
and in ``slots``:

1. S waits until fewer than 64 messages of this edge lie unasked for.
2. S takes the smallest slot that is free and large enough. If there is none, it makes a segment,
   sends its descriptor in a notice (``NEW_SLOT``), and R maps it. The largest slot that is free but
   too small goes first (``OLD_SLOT``), so that memory follows what is in flight.
3. S copies header, note and tensors into the slot, and marks it WAITING.
4. S tells R (slot, tag, number, layout) in the ring, and wakes R if it sleeps (``WAKE``); without
   a ring, by a notice (``MESSAGE``). If R cannot be told, the slot is FREE again; R that was awake
   may have taken the message, and have left for good, before it is woken: then all is well.
5. R reads the ring and the notices whenever it waits for anything, and keeps the arrival by (edge,
   number).
6. R, when it is asked for the message, marks the slot TAKEN: it no longer counts in 1. While it
   waits for another message of the edge it does so for all of them, or that one could never leave.
7. R's tensors lie in the slot. When the last of them is dropped, the slot is marked FREE, by a byte
   that S sees too: nobody is told.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.engine.transport import slots
from penstock.engine.transport.base import (
    Edge,
    Noted,
    Patience,
    RankFailure,
    Transport,
    gone,
    overdue,
)
from penstock.engine.transport.link import (
    HAS_RINGS,
    RING_BYTES,
    Lookout,
    Notice,
    NoticeKind,
    Peer,
    PeerLink,
    RingReader,
    RingWriter,
)
from penstock.engine.transport.packing import BlockLayout, Packer
from penstock.engine.transport.slots import RemoteSlot, Slot, SlotState, segment_size
from penstock.engine.transport.wire import Codec

_LOOK_AGAIN_MILLISECONDS = 1.0
_PARTING_SECONDS = 1.0
_LONGEST_SLEEP_MILLISECONDS = 100.0
"""Nobody sleeps longer without a look at the rings. On x86-64 no wake-up gets lost; on what only
pretends to be one (an emulator on other cores) one might, and costs no more than this."""


_Arrival = tuple[RemoteSlot, BlockLayout, bytes]
"""A message that nobody has asked for so far, and the note with it."""


class SharedMemoryTransport(Transport):
    """One rank's end of all channels to other processes of this host.

    Args:
        connections: a connected ``SOCK_SEQPACKET`` socket to each other rank; they are closed with
            the transport.
        deadline_seconds: how long a message may take, unless ``patience`` is changed.
        codec: describes the values that are sent.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        deadline_seconds: float,
        codec: Codec | None = None,
    ) -> None:
        self.patience = Patience(deadline_seconds)
        self._rank = rank
        self._packer = Packer(codec or Codec())
        self._peers = {
            other: Peer(other, PeerLink(rank, other, connection), rank)
            for other, connection in connections.items()
        }
        self._rings: list[tuple[Peer, RingReader]] = []
        self._lookout = Lookout(len(connections) + 1)
        self._poll = select.poll()
        self._peer_of = {peer.link.fileno(): peer for peer in self._peers.values()}
        for descriptor in self._peer_of:
            self._poll.register(descriptor, select.POLLIN)
        self._early: dict[tuple[Edge, int], _Arrival] = {}
        self._awaited: Edge | None = None
        self._lowest = 0
        self._failure: RankFailure | None = None
        self._closed: str | None = None
        links = [peer.link for peer in self._peers.values()]
        self._goodbye = weakref.finalize(self, _leave, links, os.getpid(), "its process ended")
        # Otherwise a child, which has copies of the sockets, would hide that this process died.
        os.register_at_fork(after_in_child=partial(_abandon, weakref.ref(self)))
        if HAS_RINGS:
            for peer in self._peers.values():
                self._make_ring(peer)

    def _make_ring(self, peer: Peer) -> None:
        purpose = f"to tell rank {peer.rank} of messages"
        memory, descriptor = slots.allocate(RING_BYTES, self._rank, purpose)
        try:
            # The first notice of a link always has room; a peer that is gone is noticed later.
            with contextlib.suppress(ConnectionError):
                peer.link.tell(Notice(NoticeKind.RING, number=RING_BYTES, descriptor=descriptor))
        finally:
            os.close(descriptor)
        peer.outgoing = RingWriter(memory)

    def meet(self) -> None:
        """Wait until every rank of this host can tell this one of messages, so that a lack of
        memory or of open files shows before there are any.

        Raises:
            RunError: this process cannot map the memory for that.
            PeerError, DeadlineError: another rank did not come.
        """
        waiting = f"rank {self._rank}, waiting for memory to hear from others"
        for peer in self._peers.values() if HAS_RINGS else ():
            self._wait(partial(self._hears, peer), peer, waiting)

    def _hears(self, peer: Peer) -> bool:
        return any(heard is peer for heard, _ in self._rings)

    @property
    def ranks(self) -> frozenset[int]:
        """The other ranks."""
        return frozenset(self._peers)

    def send(self, edge: Edge, number: int, value: Any) -> None:
        peer = self._peers.get(edge.target) or self._peer(edge.target)
        pool, ring, waiting = peer.pool, peer.outgoing, peer.sending
        value, note = value if type(value) is Noted else (value, b"")
        layout, tensors = self._packer.describe(edge, value)
        if peer.farewell:
            self._check_hope(peer, waiting)
        if not peer.has_room(edge.tag, self._lowest):  # [1]
            has_room = partial(peer.has_room, edge.tag, self._lowest)
            self._wait(has_room, peer, waiting, _LOOK_AGAIN_MILLISECONDS)
        # [2]
        slot = pool.free(layout.num_bytes) or self._new_slot(peer, layout.num_bytes, waiting)
        slot.fill(edge.tag, number, layout, tensors, note)  # [3]
        try:  # [4]
            if ring is None:
                self._tell(peer, Notice(NoticeKind.MESSAGE, slot.index, edge.tag, number), waiting)
                return
            entry = slot.index, edge.tag, number, -layout.number if note else layout.number
            if not ring.put(*entry):
                self._wait(partial(ring.put, *entry), peer, waiting, _LOOK_AGAIN_MILLISECONDS)
            if ring.must_wake():
                self._wake(peer, slot, waiting)
        except RunError:
            slot.take_back()
            raise

    def _wake(self, peer: Peer, slot: Slot, waiting: str) -> None:
        """Have a peer look at its ring, where it finds a slot."""
        try:
            self._tell(peer, Notice(NoticeKind.WAKE), waiting)
        except PeerError:
            # [4] Who looks at the rings by itself needs no waking, and may be done by now.
            if peer.died or slot.state == SlotState.WAITING:
                raise

    def _new_slot(self, peer: Peer, num_bytes: int, waiting: str) -> Slot:
        size, pool = segment_size(num_bytes), peer.pool
        if old := pool.largest_free():
            # [2] It is too small: the new one takes its place.
            self._tell(peer, Notice(NoticeKind.OLD_SLOT, old.index), waiting)
            pool.remove(old)
        del old  # its memory goes before more is asked for
        purpose = (
            f"for a message to rank {peer.rank} beside the {pool.num_bytes:,} bytes of "
            f"{len(pool)} messages that rank {peer.rank} has not taken or still uses"
        )
        memory, descriptor = slots.allocate(size, self._rank, purpose)
        try:
            slot = pool.make(memory)
            notice = Notice(NoticeKind.NEW_SLOT, slot.index, 0, size, descriptor=descriptor)
            self._tell(peer, notice, waiting)
        finally:
            os.close(descriptor)
        pool.add(slot)
        return slot

    def _tell(self, peer: Peer, notice: Notice, waiting: str) -> None:
        """Send a notice, reading what comes while the peer does not read."""

        def told() -> bool:
            try:
                return peer.link.tell(notice)
            except ConnectionError:
                self._read_links(0)  # it may have said why
                self._lose(peer)
                return False

        self._wait(told, peer, waiting, _LOOK_AGAIN_MILLISECONDS)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        wanted = (edge, number)
        peer = self._peers.get(edge.source) or self._peer(edge.source)
        arrival = self._early.pop(wanted, None)
        if arrival is None:
            if not (self._rings and self._read_rings()):
                self._read_links(0)
            if wanted not in self._early:
                self._await(wanted, peer, waiting)
            arrival = self._early.pop(wanted)
        slot, layout, note = arrival
        slot.take()  # [6]; from here on [7]
        return self._packer.unpack(edge, slot.block, layout, note, slot.lend)

    def has_come(self, edge: Edge, number: int) -> bool | None:
        if (edge, number) not in self._early:
            self._read_links(0)
        lost = self._failure or any(peer.farewell for peer in self._peers.values())
        return bool(lost) or (edge, number) in self._early

    def _await(self, wanted: tuple[Edge, int], peer: Peer, waiting: str) -> None:
        # [6] The edge's other messages must not keep the wanted one from being sent.
        self._awaited = wanted[0]
        for (edge, _), (slot, *_) in self._early.items():
            if edge == self._awaited:
                slot.take()
        try:
            self._wait(lambda: wanted in self._early, peer, waiting)
        finally:
            self._awaited = None

    def _wait(
        self,
        done: Callable[[], bool],
        peer: Peer,
        waiting: str,
        most_milliseconds: float | None = None,
    ) -> None:
        """Read notices until something is done; by default it is another notice that does it.

        Raises:
            PeerError, DeadlineError: it will not be done.
        """
        patience = self.patience
        end = time.monotonic() + patience.seconds
        while not done():
            self._check_hope(peer, waiting)
            left = 1000 * (end - time.monotonic())
            if left <= 0:
                raise DeadlineError(overdue(waiting, peer.rank, patience))
            self._take_in(left if most_milliseconds is None else min(left, most_milliseconds))

    def _check_hope(self, peer: Peer, waiting: str) -> None:
        """Raise unless what this rank waits for may still come."""
        if self._failure:
            reason = self._failure.reason
            raise PeerError(f"{waiting}: cancelled because {reason}", reason)
        dead = [other for other in self._peers.values() if other.died]
        for other in [peer, *dead]:
            if other.farewell:
                raise PeerError(f"{waiting}: {other.farewell}", other.farewell)

    def _take_in(self, milliseconds: float) -> None:
        """Read all that is here, after waiting for the first of it."""
        if self._read_rings() or (self._lookout.look() and self._read_rings()):
            return
        with self._lookout.asleep():
            if not self._read_rings():
                if self._rings:
                    milliseconds = min(milliseconds, _LONGEST_SLEEP_MILLISECONDS)
                self._read_links(milliseconds)

    def _read_rings(self) -> bool:
        """Read all that rings tell now; whether it was anything."""
        anything, again = False, True
        while again:
            again = False
            for peer, ring in self._rings:
                while (entry := ring.next()) is not None:
                    anything = True
                    index, tag, number, layout = entry
                    slot = peer.remote_slots.get(index)
                    if slot is None:
                        self._read_notices(0)  # the slot itself was told of there, before
                        slot = peer.remote_slots.get(index)
                        again = True
                    self._arrive(peer, slot, peer.edges[tag], number, layout)
        return anything

    def _read_links(self, milliseconds: float) -> None:
        """Read all notices that are here, after waiting for the first one, and the rings."""
        self._read_notices(milliseconds)
        # Behind them: what a peer has sent before it said goodbye must be seen before that is.
        self._read_rings()

    def _read_notices(self, milliseconds: float) -> None:
        while events := self._poll.poll(milliseconds):
            for descriptor, _ in events:
                self._read(self._peer_of[descriptor])
            milliseconds = 0

    def _read(self, peer: Peer) -> None:
        notice = peer.link.read()
        if notice is None:
            self._lose(peer)
            return
        kind, slot, tag, number, text, descriptor = notice
        if kind is NoticeKind.MESSAGE:  # [5]
            remote = peer.remote_slots.get(slot)
            self._arrive(peer, remote, peer.edges[tag], number)
        elif kind is NoticeKind.WAKE:
            pass  # whoever reads links looks at the rings next
        elif kind is NoticeKind.RING:
            purpose = f"to hear of messages from rank {peer.rank}"
            ring = RingReader(slots.attach(descriptor, number, self._rank, purpose))
            self._rings.append((peer, ring))
            self._lookout.rings.append(ring)
        elif kind is NoticeKind.NEW_SLOT:  # [2]
            purpose = f"for a message from rank {peer.rank}"
            memory = slots.attach(descriptor, number, self._rank, purpose)
            peer.remote_slots[slot] = RemoteSlot(memory)
        elif kind is NoticeKind.OLD_SLOT:
            peer.remote_slots.pop(slot, None)
        elif kind is NoticeKind.CLOSED:
            peer.farewell = f"rank {peer.rank} closed its pipeline ({text})"
        elif number >= self._lowest and self._failure is None:
            self._failure = RankFailure(text, number)

    def _arrive(
        self,
        peer: Peer,
        slot: RemoteSlot | None,
        edge: Edge,
        number: int,
        layout_number: int = 0,
    ) -> None:
        if slot is None:
            return  # this process could not map it, and has failed for that
        known = peer.layouts.get(edge.tag)
        if known is not None and known[0] == abs(layout_number):
            layout, note = known[1], slot.note() if layout_number < 0 else b""
        else:
            prefix = slot.prefix(edge)
            layout, note = self._packer.recognise(edge, prefix.text), prefix.note
            if layout_number:
                peer.layouts[edge.tag] = abs(layout_number), layout
        if number < self._lowest:
            slot.give_back()
            return
        key = edge, number
        if before := self._early.pop(key, None):
            before[0].give_back()
        if edge == self._awaited:
            slot.take()
        self._early[key] = slot, layout, note

    def _lose(self, peer: Peer) -> None:
        """The peer is gone; without a farewell it was killed."""
        if self._peer_of.pop(peer.link.fileno(), None):
            self._poll.unregister(peer.link.fileno())
        if not peer.farewell:
            peer.died = True
            peer.farewell = gone(peer.rank)

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        # Every rank of this host hears it, for any may wait for one that now will not answer.
        notice = Notice(NoticeKind.FAILURE, number=self._lowest, text=reason)
        end = time.monotonic() + _PARTING_SECONDS
        for peer in self._peers.values():
            # A rank that is gone needs no notice.
            with contextlib.suppress(OSError):
                while not peer.link.tell(notice) and time.monotonic() < end:
                    time.sleep(_LOOK_AGAIN_MILLISECONDS / 1000)

    def flush(self) -> None:
        """Nothing is under way in this process; memory that is no longer needed is given back."""
        self._read_links(0)  # who never sleeps would not hear of memory that others give up
        for peer in self._peers.values():
            for slot in peer.pool.end_step():
                # A rank that is gone, or does not read, is no reason for a good step to fail.
                with contextlib.suppress(ConnectionError):
                    if peer.link.tell(Notice(NoticeKind.OLD_SLOT, slot.index)):
                        peer.pool.remove(slot)

    def discard(self, before: int) -> None:
        self._lowest = max(self._lowest, before)
        for key in [key for key in self._early if key[1] < self._lowest]:
            self._early.pop(key)[0].give_back()
        if self._failure and self._failure.number < self._lowest:
            self._failure = None

    def close(self, reason: str) -> None:
        self._lookout.leave()
        _leave(self._end(reason), os.getpid(), reason)

    def abandon(self) -> None:
        """Close without a word: for a forked child, which is no rank."""
        for link in self._end("this process was forked from it"):
            link.close()

    def _end(self, reason: str) -> list[PeerLink]:
        """Forget everything; the links are left to be closed."""
        links = [peer.link for peer in self._peers.values()]
        self._closed = self._closed or reason
        self._goodbye.detach()
        self._peers, self._peer_of, self._early, self._rings = {}, {}, {}, []
        self._lookout.rings = []  # which keep memory of others mapped, and its descriptor open
        return links

    def _peer(self, rank: int) -> Peer:
        if self._closed is not None:
            raise RunError(f"rank {self._rank} has closed its pipeline ({self._closed})")
        return self._peers[rank]


def _leave(links: list[PeerLink], process: int, reason: str) -> None:
    """Say goodbye, unless this is a forked child, which was never a rank."""
    for link in links:
        if os.getpid() == process:
            with contextlib.suppress(OSError):
                link.tell(Notice(NoticeKind.CLOSED, text=reason))
        link.close()


def _abandon(reference: weakref.ref[SharedMemoryTransport]) -> None:
    transport = reference()
    if transport is not None:
        transport.abandon()
