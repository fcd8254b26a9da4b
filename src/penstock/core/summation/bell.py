"""Bells: how a server hears at once which of its workers has something for it.

Transports wait for one message of one sender. Who serves many, in the order in which they come,
listens for bells besides: a connection from each worker, on which nothing but frames without
numbers travel. A connection that ends is heard, too.
"""

from __future__ import annotations

import queue
import socket
from contextlib import suppress
from typing import NamedTuple

from penstock.base.errors import PenstockError, RunError
from penstock.core.summation.frames import (
    GREETING_SECONDS,
    Head,
    Kind,
    Member,
    greet,
    tune,
)
from penstock.core.summation.listener import Listener


class Ring(NamedTuple):
    """What is heard.

    Attributes:
        group: of which weights.
        place: the worker's among those that have a copy of them.
        has_left: whether the worker's connection has ended, and nothing more will be heard of it.
    """

    group: int
    place: int
    has_left: bool = False


class Bell(Listener):
    """Listens for the workers of one group of weights.

    Args:
        host: the address to listen on.
        key: what workers must prove to know (``frames.key_of``).
        group: tells the weights from others.
        num_workers: how many have a copy.
        heard: where rings are put, in the order in which they come.

    Attributes:
        address: (host, port) on which it listens.
    """

    def __init__(
        self, host: str, key: bytes, group: int, num_workers: int, heard: queue.SimpleQueue[Ring]
    ) -> None:
        self._group, self._num_workers, self._heard = group, num_workers, heard
        self._places: set[int] = set()
        super().__init__(host, 0, key, "bell")

    def close(self) -> None:
        """Listen no more."""
        self._stop()

    def _serve(self, connection: socket.socket, name: str) -> None:
        """One worker, from its greeting to its end; strangers are refused and leave no trace."""
        place = None
        # A frame that is none ends the connection as its end would.
        with suppress(PenstockError, OSError):
            place = self._let_in(self._welcome(connection))
            while Head.received(connection, [Kind.RING]) is not None:
                self._heard.put(Ring(self._group, place))
        if place is not None:
            self._heard.put(Ring(self._group, place, has_left=True))

    def _let_in(self, member: Member) -> int:
        with self._lock:
            known = (self._group, self._num_workers) == (member.group, member.num_members)
            if not known or member.place in self._places:
                raise RunError(f"worker {member.place} of {member.num_members} is not expected")
            self._places.add(member.place)
            return member.place


class Ringer:
    """A worker's connection to a bell.

    Args:
        address: (host, port) of the bell.
        member: who the worker is.
        key: what it proves to know.

    Raises:
        RunError: nobody listens there, or who does refuses.
    """

    def __init__(self, address: tuple[str, int], member: Member, key: bytes) -> None:
        where = f"the parameter server at {address[0]}:{address[1]}"
        try:
            self._connection = socket.create_connection(address, GREETING_SECONDS)
            try:
                greet(self._connection, member, key)
                tune(self._connection)
            except BaseException:
                self._connection.close()
                raise
        except OSError as error:
            raise RunError(f"{where} can't be reached ({error.strerror or error})") from None
        except RunError as error:
            raise RunError(f"{where}: {error}") from None

    def ring(self, number: int) -> None:
        """Say that gradients are on their way. Where the server is gone, whoever waits for its
        weights is told why."""
        with suppress(OSError):
            self._connection.sendall(Head(Kind.RING, start=number).packed())

    def close(self) -> None:
        """Nothing more will be sent."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
