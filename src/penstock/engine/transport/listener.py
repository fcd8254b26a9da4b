"""How the processes of one host find each other: a listening socket each, a connection per pair.

The sockets' addresses are in Linux's abstract namespace, so no file remains, and random. The secret
that a rank must know to be let in is not part of an address, since addresses can be listed. And the
kernel says whose process is at the other end: ranks of one job are one user's.

How two ranks come to a connection; the numbers stand at the lines below:

1. Each makes a listener: a socket at a random address, and a secret.
2. They exchange these credentials where both are already: before the fork, or in the job's store.
3. Each connects to the listeners of lower ranks. That succeeds before their owners look, so all
   can connect first and accept afterwards without waiting for each other in a circle.
4. Who connects has the kernel say whose process listens, then tells the secret and its rank.
5. Each accepts higher ranks: a stranger of another user is turned away unheard; from others a
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
from typing import NamedTuple, Self

from penstock.base.errors import DeadlineError, RunError
from penstock.engine.transport.shared_memory import SharedMemoryTransport

_SECRET_BYTES = 16
_RANK_BYTES = 8
_PEER_CREDENTIALS = struct.Struct("iII")
"""Process, user and group, as in ``SO_PEERCRED``."""
_TIME = struct.Struct("@ll")
"""Seconds and microseconds, as in ``SO_SNDTIMEO``."""


class Credentials(NamedTuple):
    """The address and the secret with which another process connects."""

    address: str
    secret: bytes


class RankListener:
    """Where one rank waits for others.

    Args:
        most_connections: at most so many others will come.

    Raises:
        OSError: this system has no such sockets.
    """

    def __init__(self, most_connections: int) -> None:
        self.credentials = Credentials(  # [1]
            f"\0penstock-{secrets.token_hex(16)}", secrets.token_bytes(_SECRET_BYTES)
        )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(self.credentials.address)
            self._socket.listen(max(1, most_connections))
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
            with _PendingConnections(self._socket, self.credentials.secret) as pending:
                while missing:
                    for other, connection in pending.admitted(end, rank, min(missing)):
                        stack.enter_context(connection)
                        if other in missing:  # [6]
                            missing.remove(other)
                            connections[other] = connection
                        else:
                            connection.close()
            stack.pop_all()
        return connections


class _PendingConnections:
    """Connections to a listener whose processes have not said so far which rank they are.

    Anybody on this host can come. Processes of other users are turned away at once; among those of
    this user may be one that says nothing, for which nobody waits.

    Args:
        listening: the listener's socket.
        secret: what a rank must know.
    """

    def __init__(self, listening: socket.socket, secret: bytes) -> None:
        self._listening = listening
        self._secret = secret
        self._pending: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._poll.register(listening, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._pending.values():
            connection.close()

    def admitted(self, end: float, rank: int, missing: int) -> Iterator[tuple[int, socket.socket]]:
        """(rank, connection) of those that know the secret, as they come.

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
            if descriptor == self._listening.fileno():
                self._accept()
                continue
            self._poll.unregister(descriptor)
            connection = self._pending.pop(descriptor)
            rank_there = self._rank_of(connection)
            if rank_there is None:
                connection.close()
            else:
                yield rank_there, connection

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        if not _is_own(connection):  # [5]
            connection.close()
            return
        connection.setblocking(False)
        self._pending[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _rank_of(self, connection: socket.socket) -> int | None:
        """The rank that a process says it is; ``None`` if it does not know the secret."""
        try:
            words = connection.recv(_SECRET_BYTES + _RANK_BYTES)
        except OSError:
            return None
        known = secrets.compare_digest(words[:_SECRET_BYTES], self._secret)
        return int.from_bytes(words[_SECRET_BYTES:], "big") if known else None


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this process's user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, user, _ = _PEER_CREDENTIALS.unpack(data)
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
        self._listeners: list[RankListener] = []
        try:
            for _ in range(num_ranks):
                self._listeners.append(RankListener(num_ranks))
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
        listener = self._listeners[rank]
        for other in self._listeners:
            if other is not listener:
                other.close()
        # [2] The credentials were there before the fork.
        hosts = {k: other.credentials for k, other in enumerate(self._listeners) if k != rank}
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
        for listener in self._listeners:
            listener.close()
