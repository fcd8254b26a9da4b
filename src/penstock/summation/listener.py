"""``Listener``: an address at which workers call, each served by a thread of its own."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress


class Listener(ABC):
    """Listens from the end of its construction on, until it is told to stop.

    Args:
        host: the address to listen on.
        port: 0 takes any that is free.
        purpose: what threads are named after.

    Attributes:
        address: (host, port) on which it listens.

    Raises:
        OSError: the address can't be listened on.
    """

    def __init__(self, host: str, port: int, purpose: str) -> None:
        self._purpose = purpose
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
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

    def _stop(self) -> None:
        """Listen no more, and end all connections."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = [*self._connections]
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            with self._lock:
                self._connections.add(connection)
            name = f"{peer[0]}:{peer[1]}"
            threading.Thread(
                target=self._attend,
                args=(connection, name),
                daemon=True,
                name=f"{self._purpose} of {name}",
            ).start()

    def _attend(self, connection: socket.socket, name: str) -> None:
        try:
            self._serve(connection, name)
        finally:
            with self._lock:
                self._connections.discard(connection)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
