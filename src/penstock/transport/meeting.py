"""How the processes of one host find each other: a listening socket each, a connection per pair.

The sockets' addresses are in Linux's abstract namespace, so no file remains, and random. The secret
that a rank must know to be let in is not part of an address, since addresses can be listed.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from penstock.errors import DeadlineError, RunError
from penstock.transport.shared_memory import SharedMemoryTransport

_SECRET_BYTES = 16
_RANK_BYTES = 8


class Invitation(NamedTuple):
    """What another process needs to connect."""

    address: str
    secret: bytes


class Doorway:
    """Where one rank waits for others.

    Args:
        num_guests: at most so many others will come.

    Raises:
        OSError: this system has no such sockets.
    """

    def __init__(self, num_guests: int) -> None:
        self.invitation = Invitation(
            f"\0penstock-{secrets.token_hex(16)}", secrets.token_bytes(_SECRET_BYTES)
        )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(self.invitation.address)
            self._socket.listen(max(1, num_guests))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Nobody is let in any more; may be called twice."""
        self._socket.close()

    def connections(
        self, rank: int, hosts: Mapping[int, Invitation], deadline_seconds: float
    ) -> dict[int, socket.socket]:
        """A socket to each of ``hosts``, who all call this at about the same time.

        Each connects to those of lower rank, which succeeds before they look, and then waits for
        those of higher rank.

        Raises:
            OSError: a connection was refused.
            DeadlineError: a rank did not come.
        """
        with contextlib.ExitStack() as stack:
            found = {}
            for other in sorted(hosts):
                if other < rank:
                    found[other] = stack.enter_context(_knock(rank, hosts[other]))
            end = time.monotonic() + deadline_seconds
            while missing := [other for other in hosts if other > rank and other not in found]:
                guest, connection = self._admit(end, rank, missing)
                stack.enter_context(connection)
                if guest in missing:
                    found[guest] = connection
            stack.pop_all()
        return found

    def _admit(self, end: float, rank: int, missing: list[int]) -> tuple[int | None, socket.socket]:
        """(rank, connection) of the next guest; the rank is ``None`` if it is a stranger."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(max(0.0, 1000 * (end - time.monotonic()))):
            raise DeadlineError(
                f"rank {rank}, connecting to the other ranks of this host: rank {missing[0]} did "
                "not come in time; if it starts later than this one, raise deadline_seconds"
            )
        connection, _ = self._socket.accept()
        connection.settimeout(max(0.001, end - time.monotonic()))
        words = connection.recv(_SECRET_BYTES + _RANK_BYTES)
        if not secrets.compare_digest(words[:_SECRET_BYTES], self.invitation.secret):
            connection.close()
            return None, connection
        return int.from_bytes(words[_SECRET_BYTES:], "big"), connection


def _knock(rank: int, invitation: Invitation) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(invitation.address)
        connection.send(invitation.secret + rank.to_bytes(_RANK_BYTES, "big"))
    except OSError:
        connection.close()
        raise
    return connection


class SharedMemoryExchange:
    """Shared memory between processes that are forked from this one, without ``torch.distributed``.

    Make it, fork, call ``transport(rank)`` in each child and ``close()`` in the parent.

    Args:
        num_ranks: how many processes.
        deadline_seconds: how long they may take to come, and a message to arrive.

    Raises:
        RunError: this system has no such sockets.
    """

    def __init__(self, num_ranks: int, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._doorways: list[Doorway] = []
        try:
            for _ in range(num_ranks):
                self._doorways.append(Doorway(num_ranks))
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
        doorway = self._doorways[rank]
        for other in self._doorways:
            if other is not doorway:
                other.close()
        hosts = {k: other.invitation for k, other in enumerate(self._doorways) if k != rank}
        try:
            connections = doorway.connections(rank, hosts, self._deadline_seconds)
        except OSError as error:
            raise RunError(
                f"rank {rank} could not connect to the others of this host: {error}; another rank "
                "has ended before it came, see its output"
            ) from error
        finally:
            doorway.close()
        return SharedMemoryTransport(rank, connections, self._deadline_seconds)

    def close(self) -> None:
        """This process will be no rank; may be called twice."""
        for doorway in self._doorways:
            doorway.close()


def this_host() -> str:
    """Equal for processes that can share memory: they run under one kernel and see one network."""
    parts = [socket.gethostname()]
    # Without /proc, the name has to do; if two hosts bear one name, connecting them fails.
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    return " ".join(parts)
