"""A socket between two ranks of one host: small notices, each a packet, and the end of the peer.

The notices tell what lies in shared memory. When the other process ends, however it ends, the
kernel closes its socket, and the reader of this one sees the end of file at once.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from enum import IntEnum
from typing import Any, NamedTuple

from penstock.base.errors import RunError
from penstock.engine.transport import packing
from penstock.engine.transport.base import Edge

_FIELDS = struct.Struct("<qqqq")
_LARGEST_NOTICE_BYTES = 4096
_TRUNCATED = 8
"""``MSG_CTRUNC`` as a plain number, which takes a tenth of the time."""

_DESCRIPTOR_BYTES = struct.calcsize("i")


class NoticeKind(IntEnum):
    """What a notice says."""

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
    """Messages will be told of in a ring (``ring``), of a segment that comes with it."""
    WAKE = 6
    """The ring has something new."""


_WITH_SEGMENT = frozenset({NoticeKind.NEW_SLOT, NoticeKind.RING})


class Notice(NamedTuple):
    """What one rank tells another."""

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
    """What a packet says; ``None`` if it is nonsense."""
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
