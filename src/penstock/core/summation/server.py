"""``SummationServer``: adds parts for workers, on a spare machine or inside a worker's process.

One thread per worker receives and adds, another one sends. A part is added in the order of the
workers, whatever the order in which they come: what comes early waits. When all have come, the sum
goes to all, and the part is forgotten. Of sums that are made, those that are needed first leave
first (``priority``). A worker that leaves ends its session: the others are told.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from penstock.base.errors import InputError, PenstockError, RunError
from penstock.core.summation.adding import Numbers, add_to, bytes_of, room_for
from penstock.core.summation.frames import (
    GREETING_SECONDS,
    HEAD_BYTES,
    FrameHead,
    FrameKind,
    Member,
    receive,
    tune,
)
from penstock.core.summation.listener import Listener
from penstock.core.summation.priority import Frame, FrameQueue

_END = None
_OLD_ROUNDS = 2
_OF_WORKERS = frozenset({FrameKind.PUSH, FrameKind.GONE, FrameKind.PACE})


class Outlet(Protocol):
    """Where what a server tells one worker goes; must not wait."""

    def put(self, item: Frame | None, /) -> None:
        """Take a frame, or ``None`` at the end."""


class _Sum:
    """A part under way: the sum of the first workers' numbers, and of others what came early."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total: Numbers | None = None
        self.num_added = 0
        self.early: dict[int, tuple[Numbers, bool]] = {}

    def take(self, place: int, numbers: Numbers, *, own: bool, dtype: int) -> None:
        self.early[place] = numbers, own
        while self.num_added in self.early:
            numbers, own = self.early.pop(self.num_added)
            if self.total is None:
                self.total = numbers if own else numbers.copy()
            else:
                add_to(self.total, numbers, dtype)
            self.num_added += 1


class _Session:
    """The sums of one group of weights of one job."""

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members
        self.members: dict[int, Outlet] = {}
        self.lock = threading.Lock()
        self.over: int | None = None
        self._sums: dict[FrameHead, _Sum] = {}

    def contribute(self, place: int, head: FrameHead, numbers: Numbers, *, own: bool) -> None:
        """Add one worker's numbers of a part.

        Args:
            own: whether nobody else will use this memory.

        Raises:
            RunError: the worker has given numbers of this part before.
        """
        part = head.part
        with self.lock:
            if self.over is not None:
                return
            under_way = self._sums.setdefault(part, _Sum())
        with under_way.lock:  # others add other parts meanwhile
            if place in under_way.early or place < under_way.num_added:
                raise RunError(f"it sent its numbers of {part.start}… of round {part.round} twice")
            under_way.take(place, numbers, own=own, dtype=part.dtype)
            done = under_way.num_added == self.num_members
        if done:
            with self.lock:
                self._sums.pop(part, None)
                self._forget(part.round)
                outlets = [*self.members.values()]
            for outlet in outlets:
                outlet.put((part._replace(kind=FrameKind.SUM), under_way.total))

    def _forget(self, newest: int) -> None:
        """Drop what nobody will complete: parts of divisions among owners that are gone."""
        for part in [part for part in self._sums if part.round + _OLD_ROUNDS <= newest]:
            del self._sums[part]

    def tell_all(self, head: FrameHead) -> None:
        """Hand a frame without numbers to every worker."""
        with self.lock:
            outlets = [*self.members.values()]
        for outlet in outlets:
            outlet.put((head, None))

    def end(self, place: int) -> None:
        """A worker has left; the others can't be given sums any more."""
        with self.lock:
            if self.over is not None:
                return
            self.over = place
            self._sums.clear()
            outlets = [outlet for other, outlet in self.members.items() if other != place]
        for outlet in outlets:
            outlet.put((FrameHead(FrameKind.ABORT, start=place), None))
            outlet.put(_END)


class SummationServer(Listener):
    """Listens for workers and adds what they send.

    Args:
        host: the address to listen on.
        port: 0 takes any that is free.
        key: what workers must prove to know (``frames.key_of``).
        tell: called with a sentence when somebody comes, leaves or is refused, or cannot be let in.

    Attributes:
        address: (host, port) on which it listens.
        sent: bytes that have gone to workers.

    Raises:
        InputError: the address can't be listened on.
    """

    def __init__(
        self, host: str, port: int, key: bytes, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._sessions: dict[tuple[bytes, int], _Session] = {}
        self._senders: set[threading.Thread] = set()
        self.sent = 0
        try:
            super().__init__(host, port, key, "sums", tell)
        except OSError as error:
            raise InputError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; give another address"
            ) from None

    def join(self) -> None:
        """Wait until the server is closed."""
        self._acceptor.join()

    def close(self, seconds: float = 0.0) -> None:
        """End all sessions and listen no more.

        Args:
            seconds: the most to wait until workers have the sums that they can be given.
        """
        end = time.monotonic() + seconds
        with self._lock:
            senders = [*self._senders]
        for sender in senders:
            sender.join(max(end - time.monotonic(), 0.0))
        self._stop()

    def attach(self, member: Member, outlet: Outlet) -> _Session:
        """Let a worker take part.

        Raises:
            RunError: there is one in its place already, or others count themselves differently.
        """
        with self._lock:
            key = member.session, member.group
            session = self._sessions.get(key)
            if session is None or session.over is not None:
                session = self._sessions[key] = _Session(member.num_members)
            with session.lock:
                if session.num_members != member.num_members or member.place in session.members:
                    raise RunError(
                        f"worker {member.place} of {member.num_members} is none of "
                        f"{session.num_members}, or is here already"
                    )
                session.members[member.place] = outlet
        return session

    def detach(self, member: Member, session: _Session) -> None:
        """A worker has left."""
        session.end(member.place)
        with self._lock:
            if self._sessions.get((member.session, member.group)) is session:
                del self._sessions[member.session, member.group]

    def _serve(self, connection: socket.socket, name: str) -> None:
        """One worker, from its greeting to its end."""
        try:
            member = self._welcome(connection)
            self._serve_member(connection, member, name)
            self._tell(f"worker {member.place} of {member.num_members} left ({name})")
        except PenstockError as error:
            self._tell(f"refused {name}: {error}")
        except OSError as error:
            self._tell(f"lost {name}: {error.strerror or error}")

    def _serve_member(self, connection: socket.socket, member: Member, name: str) -> None:
        outlet = FrameQueue()
        with self._sending(connection, outlet, name):
            session = self.attach(member, outlet)
            try:
                self._tell(f"worker {member.place} of {member.num_members} came from {name}")
                while (head := FrameHead.received(connection, _OF_WORKERS)) is not None:
                    self._take(connection, member, session, head)
            finally:
                self.detach(member, session)

    @contextmanager
    def _sending(
        self,
        connection: socket.socket,
        outlet: FrameQueue,
        name: str,
    ) -> Iterator[None]:
        """Within, a thread sends what is put into the outlet; then what is left in it.

        Raises:
            RunError: there can be no more threads.
        """
        sender = threading.Thread(
            target=self._send_all, args=(connection, outlet), daemon=True, name=f"sums to {name}"
        )
        try:
            sender.start()
        except RuntimeError as error:
            raise RunError(f"this machine has no thread left for it ({error})") from None
        with self._lock:
            self._senders.add(sender)
        try:
            yield
        finally:
            outlet.put(_END)
            sender.join(GREETING_SECONDS)
            with self._lock:
                self._senders.discard(sender)

    @staticmethod
    def _take(
        connection: socket.socket, member: Member, session: _Session, head: FrameHead
    ) -> None:
        if head.kind is FrameKind.GONE:
            session.tell_all(head)
            return
        if head.kind is FrameKind.PACE:
            tune(connection, float(head.start))
            return
        numbers = room_for(head.length, head.dtype)
        receive(connection, bytes_of(numbers))
        session.contribute(member.place, head, numbers, own=True)

    def _send_all(self, connection: socket.socket, frames: FrameQueue) -> None:
        """Send until the end is put in, or nobody listens."""
        with suppress(OSError):
            while (frame := frames.get()) is not None:
                head, numbers = frame
                connection.sendall(head.packed())
                if numbers is not None:
                    connection.sendall(bytes_of(numbers))
                with self._lock:
                    self.sent += HEAD_BYTES + (0 if numbers is None else numbers.nbytes)
                del frame, numbers  # while this thread waits, it keeps no sum alive
            connection.shutdown(socket.SHUT_WR)
