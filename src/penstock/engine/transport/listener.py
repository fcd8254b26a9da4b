"""How the processes of one host find each other: a listening socket each, a connection per pair.

The sockets' addresses are in Linux's abstract namespace, so no file remains, and random. The secret
that a rank must know to be let in is not part of an address, since addresses can be listed. And the
kernel says whose process is at the other end: ranks of one job are one user's.

How two ranks come to a connection; the numbers stand at the lines below:

1. Each opens a listener: a listening socket at a random address, and a secret.
2. They exchange these invitations where both are already: before the fork, or in the job's store.
3. Each knocks at the listeners of lower ranks. That succeeds before their owners look, so all can
   knock first and open afterwards without waiting for each other in a circle.
4. Who knocks has the kernel say whose process listens, then tells the secret and its rank.
5. Each opens to higher ranks: a stranger of another user is turned away unheard; from others a
   message is read when it is there, and nobody waits for one that says nothing.
6. Who knows the secret is let in, the first for each missing rank.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from penstock.base.errors import DeadlineError, RunError
from penstock.engine.transport.shared_memory import SharedMemoryTransport

_SECRET_BYTES = 16
_RANK_BYTES = 8
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group, as in ``SO_PEERCRED``."""
_TIME = struct.Struct("@ll")
"""Seconds and microseconds, as in ``SO_SNDTIMEO``."""


class Credentials(NamedTuple):
    """What another process needs to connect."""

    address: str
    secret: bytes


class Listener:
    """Where one rank waits for others.

    Args:
        num_guests: at most so many others will come.

    Raises:
        OSError: this system has no such sockets.
    """

    def __init__(self, num_guests: int) -> None:
        self.credentials = Credentials(  # [1]
            f"\0penstock-{secrets.token_hex(16)}", secrets.token_bytes(_SECRET_BYTES)
        )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(self.credentials.address)
            self._socket.listen(max(1, num_guests))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Nobody is let in any more; may be called twice."""
        self._socket.close()

    def connections(
        self, rank: int, hosts: Mapping[int, Credentials], deadline_seconds: float
    ) -> dict[int, socket.socket]:
        """A socket to each of ``hosts``, who all call this at about the same time.

        Each connects to those of lower rank, which succeeds before they look, and then waits for
        those of higher rank.

        Raises:
            OSError: a connection was refused.
            DeadlineError: a rank did not come.
        """
        end = time.monotonic() + deadline_seconds
        with contextlib.ExitStack() as stack:
            connections = {}
            for other in sorted(hosts):  # [3]
                if other < rank:
                    connections[other] = stack.enter_context(_connect_to(rank, hosts[other], end))
            missing = {other for other in hosts if other > rank}
            with _PendingConnections(self._socket, self.credentials.secret) as guests:
                while missing:
                    for guest, connection in guests.admitted(end, rank, min(missing)):
                        stack.enter_context(connection)
                        if guest in missing:  # [6]
                            missing.remove(guest)
                            connections[guest] = connection
                        else:
                            connection.close()
            stack.pop_all()
        return connections


class _PendingConnections:
    """Who has come to a listener, and has not said so far who it is.

    Anybody on this host can come. Processes of other users are turned away at once; among those of
    this user may be one that says nothing, for which nobody waits.

    Args:
        door: a listening socket.
        secret: what a guest must know.
    """

    def __init__(self, door: socket.socket, secret: bytes) -> None:
        self._door = door
        self._secret = secret
        self._guests: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._poll.register(door, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for guest in self._guests.values():
            guest.close()

    def admitted(self, end: float, rank: int, missing: int) -> Iterator[tuple[int, socket.socket]]:
        """(rank, connection) of guests that know the secret, as they come.

        Raises:
            DeadlineError: nobody comes.
        """
        events = self._poll.poll(max(0.0, 1000 * (end - time.monotonic())))
        if not events or time.monotonic() > end:
            raise DeadlineError(
                f"rank {rank}, connecting to the other ranks of this host: rank {missing} did "
                "not come in time; if it starts later than this one, raise deadline_seconds"
            )
        for descriptor, _ in events:
            if descriptor == self._door.fileno():
                self._open()
                continue
            self._poll.unregister(descriptor)
            guest = self._guests.pop(descriptor)
            rank_of_guest = self._rank_of(guest)
            if rank_of_guest is None:
                guest.close()
            else:
                yield rank_of_guest, guest

    def _open(self) -> None:
        guest, _ = self._door.accept()
        if not _is_own(guest):  # [5]
            guest.close()
            return
        guest.setblocking(False)
        self._guests[guest.fileno()] = guest
        self._poll.register(guest, select.POLLIN)

    def _rank_of(self, guest: socket.socket) -> int | None:
        """Who a guest says it is; ``None`` if it does not know the secret."""
        try:
            words = guest.recv(_SECRET_BYTES + _RANK_BYTES)
        except OSError:
            return None
        known = secrets.compare_digest(words[:_SECRET_BYTES], self._secret)
        return int.from_bytes(words[_SECRET_BYTES:], "big") if known else None


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this process's user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return bool(user == os.geteuid())


def _connect_to(rank: int, credentials: Credentials, end: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Where strangers crowd the listener, connecting waits, and this is what limits the wait.
        left = max(1.0, 1e6 * (end - time.monotonic()))
        limit = _TIME.pack(*divmod(int(left), 1_000_000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.connect(credentials.address)
        if not _is_own(connection):
            raise PermissionError("a process of another user has taken the rank's address")
        # [4]
        connection.send(credentials.secret + rank.to_bytes(_RANK_BYTES, "big"))
    except OSError:
        connection.close()
        raise
    return connection


class SharedMemoryExchange:
    """Shared memory between processes that are forked from this one, without ``torch.distributed``.

    Make it, fork, call ``transport(rank)`` in each child and ``close()`` in the parent.

    Args:
        num_ranks: how many processes there will be.
        deadline_seconds: how long they may take to come, and a message to arrive.

    Raises:
        RunError: this system has no such sockets.
    """

    def __init__(self, num_ranks: int, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._doorways: list[Listener] = []
        try:
            for _ in range(num_ranks):
                self._doorways.append(Listener(num_ranks))
        except OSError as error:
            self.close()
            raise RunError(
                f"processes cannot be connected on {sys.platform}: {error}; use threads"
            ) from error

    def transport(self, rank: int) -> SharedMemoryTransport:
        """The transport of this process, which becomes a rank. Every rank must call it.

        Raises:
            DeadlineError: another rank did not.
            RunError: a connection was refused, since its process has ended.
        """
        listener = self._doorways[rank]
        for other in self._doorways:
            if other is not listener:
                other.close()
        # [2] The invitations were there before the fork.
        hosts = {k: other.credentials for k, other in enumerate(self._doorways) if k != rank}
        try:
            connections = listener.connections(rank, hosts, self._deadline_seconds)
        except OSError as error:
            raise RunError(
                f"rank {rank} could not connect to the others of this host: {error}; another rank "
                "has ended before it came, see its output"
            ) from error
        finally:
            listener.close()
        return SharedMemoryTransport(rank, connections, self._deadline_seconds)

    def close(self) -> None:
        """This process will be no rank; may be called twice."""
        for listener in self._doorways:
            listener.close()


def this_host() -> str:
    """Equal for processes that can share memory: they run under one kernel and see one network."""
    parts = [socket.gethostname()]
    # Without /proc, the name has to do; if two hosts bear one name, connecting them fails.
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    return " ".join(parts)
