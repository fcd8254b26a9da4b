"""The protocol of workers and summation servers: a greeting, then frames.

The greeting, with numbers as they stand at the lines of ``greet`` and ``receive_greeting``:

1. The worker sends a magic word and 16 random bytes, the server answers with the same of its own.
2. The worker says who it is, with a proof (HMAC-SHA256) that it knows the secret of the job: over
   both random words and all that it says, so that no proof can be used twice or for another.
3. The server checks the proof and answers with one of its own, or with the reason why not.

A frame is a head of fixed size and, for ``PUSH`` and ``SUM``, as many plain numbers as the head
says. Nothing that is received is ever unpickled, and no length is believed that a part cannot have.
The proof tells who is there, it encrypts nothing: whoever can write into the connection of others
can change gradients.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum
from ipaddress import ip_address
from typing import NamedTuple

from penstock.base.errors import RunError
from penstock.core.summation.split import MOST_PART_BYTES

DEFAULT_PORT = 5600
GREETING_SECONDS = 10.0
"""How long either end waits for all of a greeting."""

_MAGIC = b"PSTKSUM1"
_WORD_BYTES, _PROOF_BYTES = 16, 32
_WHO = struct.Struct("<16sIHHd")
_HEAD = struct.Struct("<BB6xQQQQ")
_REASON = struct.Struct("<BH")
_MOST_REASON = 1000
_PACE = 47  # SO_MAX_PACING_RATE of Linux, which the socket module does not name
_NOT_SENT_BYTES = 1 << 17
"""So much waits in the kernel at most: what is behind it can still be sent elsewhere."""

_NOT_SENT_SECONDS = 0.02
_LEAST_NOT_SENT_BYTES = 1 << 14

HEAD_BYTES = _HEAD.size

_FEW_BYTES = 2048
"""For fewer, nobody waits for all of them before reading any."""

_MOST_AT_ONCE = 1 << 17
"""Bytes that may lie in the kernel before they are read: more would close TCP's window."""


class FrameKind(IntEnum):
    """The meaning of a frame."""

    PUSH = 1
    """A worker's numbers of a part."""
    SUM = 2
    """The sum of a part."""
    GONE = 3
    """An owner does not answer any more; ``start`` is its place among the owners."""
    ABORT = 4
    """A worker has left; ``start`` is its place among the workers."""
    PACE = 5
    """A worker is to be answered at ``start`` bytes per second."""
    RING = 6
    """Numbers come by another way; ``start`` tells which of the worker's they are."""


_MOST_PACE = 10**15
"""More bytes per second than anything sends."""

ITEM_BYTES = (4, 8, 2, 2)
"""Of float32, float64, float16 and bfloat16, which a head tells by their place here."""


class FrameHead(NamedTuple):
    """The head of a frame.

    Attributes:
        kind: what the frame is.
        dtype: the place of the numbers' type in ``ITEM_BYTES``.
        missing: a bit for each server that is gone: tells the parts of one division from others'.
        round: which sum of many.
        start: the first number of the part.
        length: how many numbers follow.
    """

    kind: FrameKind
    dtype: int = 0
    missing: int = 0
    round: int = 0
    start: int = 0
    length: int = 0

    def packed(self) -> bytes:
        """As it travels."""
        return _HEAD.pack(*self)

    @property
    def num_bytes(self) -> int:
        """Of the numbers behind it."""
        return self.length * ITEM_BYTES[self.dtype]

    @property
    def part(self) -> FrameHead:
        """The fields that are the same in all frames about one part of one sum."""
        return self._replace(kind=FrameKind.PUSH)

    @classmethod
    def received(cls, connection: socket.socket, kinds: Iterable[FrameKind]) -> FrameHead | None:
        """Wait for the next head; ``None`` at the end of the connection.

        Raises:
            RunError: it is none, or of no kind of these.
        """
        head = bytearray(HEAD_BYTES)
        if not receive(connection, memoryview(head), may_end=True):
            return None
        kind, *numbers = _HEAD.unpack(head)
        if kind not in {*kinds}:
            raise RunError(f"it sent a frame of kind {kind}, which is none that it may send")
        read = cls(FrameKind(kind), *numbers)
        if read.kind in {FrameKind.PUSH, FrameKind.SUM}:
            if read.dtype >= len(ITEM_BYTES):
                raise RunError(f"it sent numbers of type {read.dtype}, which there is not")
            if not 0 < read.num_bytes <= MOST_PART_BYTES:
                raise RunError(
                    f"it announced a part of {read.num_bytes:,} bytes; a part has 1 to "
                    f"{MOST_PART_BYTES:,}"
                )
        elif read.length:
            raise RunError(f"it announced {read.length} numbers behind a frame that has none")
        elif read.kind is FrameKind.PACE and read.start >= _MOST_PACE:
            raise RunError(f"it asks for {read.start:,} bytes per second, which nothing sends")
        return read


class Member(NamedTuple):
    """Who a worker is.

    Attributes:
        session: 16 bytes that tell one job's sums from others'.
        group: tells the sums of different weights of a job apart.
        place: the worker's among those that hold the weights.
        num_members: how many hold them.
        bytes_per_second: at which the server is to answer; 0 is as fast as it can.
    """

    session: bytes
    group: int
    place: int
    num_members: int
    bytes_per_second: float = 0.0


def key_of(secret: str, job: str) -> bytes:
    """The key that proofs of a job are made with."""
    return hmac.digest(secret.encode(), b"penstock job " + job.encode(), hashlib.sha256)


def greet(connection: socket.socket, member: Member, key: bytes) -> None:
    """A worker's part of the greeting.

    Raises:
        RunError: the server refuses, is not one, or does not know the secret.
        OSError: it is gone, or takes too long.
    """
    talk = _Talk(connection)
    own = os.urandom(_WORD_BYTES)
    talk.say(_MAGIC + own)  # [1]
    theirs = talk.hear_magic_word()
    who = _WHO.pack(*member)
    talk.say(who + _proof(key, b"worker", theirs, own, who))  # [2]
    status, length = _REASON.unpack(talk.hear(_REASON.size))
    if status or length > _MOST_REASON:  # [3]
        text = talk.hear(min(length, _MOST_REASON)).decode(errors="replace")
        raise RunError(f"it refuses: {text}")
    if not hmac.compare_digest(talk.hear(_PROOF_BYTES), _proof(key, b"server", own, theirs, who)):
        raise RunError("it does not know the secret of this job")
    connection.settimeout(None)


def receive_greeting(connection: socket.socket, key: bytes) -> Member:
    """A server's part of the greeting.

    Raises:
        RunError: who is there is no worker, or does not know the secret; it has been told.
        OSError: it is gone, or takes too long.
    """
    talk = _Talk(connection)
    own = os.urandom(_WORD_BYTES)
    theirs = talk.hear_magic_word()
    talk.say(_MAGIC + own)  # [1]
    who = talk.hear(_WHO.size)
    proof = talk.hear(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"worker", own, theirs, who)):  # [3]
        reason = "the secret or the name of the job is another one"
        talk.refuse(f"{reason} (PENSTOCK_SECRET, PENSTOCK_JOB)")
        raise RunError(reason)
    member = Member(*_WHO.unpack(who))
    if not member.place < member.num_members or not 0 <= member.bytes_per_second < _MOST_PACE:
        reason = f"worker {member.place} of {member.num_members} cannot be"
        talk.refuse(reason)
        raise RunError(reason)
    talk.say(_REASON.pack(0, 0) + _proof(key, b"server", theirs, own, who))
    connection.settimeout(None)
    return member


class _Talk:
    """A greeting: one deadline for all of it, however slowly the other end says it.

    Args:
        connection: whose timeout is used for that.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._end = time.monotonic() + GREETING_SECONDS

    def say(self, words: bytes) -> None:
        self._limit()
        self._connection.sendall(words)

    def refuse(self, reason: str) -> None:
        text = reason.encode()[:_MOST_REASON]
        self.say(_REASON.pack(1, len(text)) + text)

    def hear(self, num_bytes: int) -> bytes:
        said = bytearray()
        while len(said) < num_bytes:
            self._limit()
            more = self._connection.recv(num_bytes - len(said))
            if not more:
                raise ConnectionError("the connection ended in the middle of a greeting")
            said += more
        return bytes(said)

    def hear_magic_word(self) -> bytes:
        said = self.hear(len(_MAGIC) + _WORD_BYTES)
        if not said.startswith(_MAGIC):
            raise RunError("it is no summation server or worker of this version of Penstock")
        return said[len(_MAGIC) :]

    def _limit(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"it did not greet within {GREETING_SECONDS:g} s")
        self._connection.settimeout(left)


def _proof(key: bytes, *said: bytes) -> bytes:
    return hmac.digest(key, b"".join(said), hashlib.sha256)


def receive(connection: socket.socket, room: memoryview, *, may_end: bool = False) -> bool:
    """Fill ``room``.

    Returns:
        ``False`` if the connection has ended before the first byte and ``may_end``.

    Raises:
        ConnectionError: it has ended elsewhere.
    """
    there = 0
    while there < len(room):
        left = len(room) - there
        if left > _FEW_BYTES:
            _await(connection, min(left, _MOST_AT_ONCE))
        count = connection.recv_into(room[there:])
        if not count:
            if may_end and not there:
                return False
            raise ConnectionError("the connection ended in the middle of a frame")
        there += count
    return True


def _await(connection: socket.socket, num_bytes: int) -> None:
    """Sleep until so many bytes are here, or the connection has ended.

    On a slow link bytes come a packet at a time, and whoever is woken by each of them spends ten
    times as long on waking as on adding.
    """
    # A system that cannot say so has what comes read as it comes, as has a socket that is closed.
    with suppress(OSError, ValueError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
        watch = select.poll()
        watch.register(connection, select.POLLIN)
        watch.poll()
        # A frame without numbers is shorter, and nothing may come behind it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def tune(connection: socket.socket, bytes_per_second: float = 0.0) -> None:
    """Let a connection send at once, little ahead, and no faster than this; 0 is without a limit.

    Where the system paces no connections, it sends as fast as it can.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # What the kernel has taken has lost its turn to what is needed first, and on a slow
        # connection a fixed number of bytes is a large part of the round.
        most = round(bytes_per_second * _NOT_SENT_SECONDS) if bytes_per_second else _NOT_SENT_BYTES
        most = min(max(most, _LEAST_NOT_SENT_BYTES), _NOT_SENT_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, most)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if bytes_per_second:
        try:
            connection.setsockopt(
                socket.SOL_SOCKET, _PACE, struct.pack("<Q", round(bytes_per_second))
            )
        except OSError:
            return  # not Linux


def is_loopback(host: str) -> bool:
    """Whether it is an address that only this machine can reach, or the name ``localhost`` of one;
    where any other name leads to, others may decide.

    >>> is_loopback("127.0.0.2"), is_loopback("localhost"), is_loopback("127.example.com")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of ``"host"``, ``"host:port"`` or ``"[::1]:port"``.

    >>> parse_address("box"), parse_address("10.0.0.7:99"), parse_address("[::1]:7")
    (('box', 5600), ('10.0.0.7', 99), ('::1', 7))

    Raises:
        RunError: it is none.
    """
    host, _, port = text.rpartition(":") if "]" in text or text.count(":") == 1 else (text, "", "")
    if text.endswith("]"):
        host, port = text, ""
    host = host.strip("[]")
    if not host or (port and not (port.isdecimal() and int(port) < 1 << 16)):
        raise RunError(f"{text!r} is no address; write host:port, for example 10.0.0.7:5600")
    return host, int(port) if port else DEFAULT_PORT
