"""``Listener``: an address at which workers call, each served by a thread of its own.

Anybody can call who reaches the address, so callers cost little until they have proved that they
know the secret: they have seconds for that, and only so many wait at once. When there are more, or
the system has no descriptors or threads left, the one that has waited longest is hung up on: a
worker proves what it knows within milliseconds, and who is hung up on is not one, most likely.

Bells let a server hear at once which of its workers has something for it. Transports wait for one
message of one sender. Who serves many, in the order in which they come, listens for bells besides:
a connection from each worker, on which nothing but frames without numbers travel. A connection that
ends is heard, too.
"""

from __future__ import annotations

import queue
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from penstock.base.errors import PenstockError, RunError
from penstock.core.summation.frames import (
    GREETING_SECONDS,
    FrameHead,
    FrameKind,
    Member,
    greet,
    receive_greeting,
    tune,
)

_MOST_CALLERS = 64
"""Callers who may be about to prove that they know the secret."""

_BREATH_SECONDS = 0.1
"""Until the system is asked again for what it has just refused."""


class Listener(ABC):
    """Listens from the end of its construction on, until it is told to stop.

    Args:
        host: the address to listen on.
        port: 0 takes any that is free.
        key: what callers must prove to know (``frames.key_of``).
        purpose: what threads are named after.
        tell: called with a sentence when something happens that people may want to know.

    Attributes:
        address: (host, port) on which it listens.

    Raises:
        OSError: the address can't be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        purpose: str,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._key, self._purpose, self._tell = key, purpose, tell
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._callers: dict[socket.socket, None] = {}  # in the order in which they came
        self._closing = threading.Event()
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, port), family=family, backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        name = f"{purpose}: accept"
        self._acceptor = threading.Thread(target=self._accept, daemon=True, name=name)
        self._acceptor.start()

    @abstractmethod
    def _serve(self, connection: socket.socket, name: str) -> None:
        """Serve who has called until it leaves; raises nothing. The connection is closed then.

        Args:
            name: the caller's address.
        """

    def _welcome(self, connection: socket.socket) -> Member:
        """Who has called, once it has proved that it knows the secret.

        Raises:
            RunError: it has not; it has been told.
            OSError: it is gone, or says too little.
        """
        member = receive_greeting(connection, self._key)
        with self._lock:
            self._callers.pop(connection, None)
        tune(connection, member.bytes_per_second)
        return member

    def _stop(self) -> None:
        """Listen no more, and end all connections."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = [*self._connections]
        for connection in connections:
            _hang_up(connection)

    def _accept(self) -> None:
        hindered = False
        while not self._closing.is_set():
            try:
                self._take_call()
                hindered = False
            except (OSError, RuntimeError) as error:  # no descriptor, no memory, no thread
                if self._closing.is_set():
                    return
                if not hindered:
                    reason = getattr(error, "strerror", None) or error
                    self._tell(f"cannot let anybody in ({reason}); it tries again until it can")
                hindered = True
                longest = self._waits_longest()  # may take a breath more for its greeting
                self._closing.wait(_BREATH_SECONDS)
                self._give_up(longest)

    def _take_call(self) -> None:
        connection, peer = self._listener.accept()
        name = f"{peer[0]}:{peer[1]}"
        with self._lock:
            self._connections.add(connection)
            self._callers[connection] = None
        self._give_up(self._waits_longest(_MOST_CALLERS))
        thread = threading.Thread(
            target=self._attend,
            args=(connection, name),
            daemon=True,
            name=f"{self._purpose} of {name}",
        )
        try:
            thread.start()
        except RuntimeError:
            self._forget(connection)
            raise

    def _waits_longest(self, allowed: int = 0) -> socket.socket | None:
        """The first of the callers, if there are more than are allowed."""
        with self._lock:
            return next(iter(self._callers)) if len(self._callers) > allowed else None

    def _give_up(self, caller: socket.socket | None) -> None:
        """Hang up on a caller, unless it has proved meanwhile that it is a worker."""
        with self._lock:
            if caller is not None and caller in self._callers:
                del self._callers[caller]
                _hang_up(caller)  # its thread closes it

    def _attend(self, connection: socket.socket, name: str) -> None:
        try:
            self._serve(connection, name)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._callers.pop(connection, None)
        _hang_up(connection)
        connection.close()


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Ring(NamedTuple):
    """A bell that was heard.

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
            while FrameHead.received(connection, [FrameKind.RING]) is not None:
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
            self._connection.sendall(FrameHead(FrameKind.RING, start=number).packed())

    def close(self) -> None:
        """Nothing more will be sent."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
