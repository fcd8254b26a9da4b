"""One worker's part in sums by owners: it hands in numbers, and gets their sums.

Owners are the workers themselves, in their order, and then servers. What happens, with numbers that
stand at the lines below:

1. A worker pushes each part of its numbers to the part's owner as soon as it has all of the part;
   of those that are ready the one that is needed first (``priority``). A thread per owner sends.
2. Owners add, and send sums back; a thread per owner receives. A round is over for a worker when it
   has all sums.
3. A server whose connection ends is gone. Whoever lacks a sum of it, or begins another round, tells
   all other owners, and they tell all workers. Every worker divides the numbers anew among those
   that are left, by the same rule, and pushes all parts of the round again, which now have other
   names: the update is summed again.
4. A worker may be a round ahead of another one that still lacks a sum, so each keeps, and pushes,
   what it handed in the round before, too. More is never needed: a round ends only when all workers
   have begun it, and so have ended the one before.
5. A worker that leaves ends the exchange for all: an owner says so behind the last sum that it has
   for a worker. Who lacks none of that owner's has what it needs.
"""

from __future__ import annotations

import socket
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.core.summation.adding import Filled, Numbers, Round, bytes_of, room_for
from penstock.core.summation.frames import (
    GREETING_SECONDS,
    HEAD_BYTES,
    ITEM_BYTES,
    FrameHead,
    FrameKind,
    Member,
    greet,
    receive,
    tune,
)
from penstock.core.summation.priority import Frame, FrameQueue
from penstock.core.summation.server import SummationServer, _Session
from penstock.core.summation.split import (
    MOST_SERVERS,
    Division,
    Owner,
    Part,
    divide,
    parts_of,
)

Ranges = Mapping[int, tuple[int, int]]
"""By the type of numbers, from which to which of them."""


class SumExchange:
    """A worker's connections to all owners.

    Args:
        member: the worker.
        owners: the workers in their order, then servers; alike on all workers.
        own: this worker's own server, which adds the parts that it owns.
        part_bytes: the size of a part; 0 is the best one.

    Attributes:
        sent, received: bytes that have gone to and come from other owners.
        missing: a bit for each server that is gone.

    Raises:
        RunError: an owner can't be reached or refuses.
    """

    def __init__(
        self,
        member: Member,
        owners: Sequence[Owner],
        own: SummationServer,
        part_bytes: int = 0,
    ) -> None:
        if len(owners) - member.num_members > MOST_SERVERS:
            raise RunError(f"a sum may have {MOST_SERVERS} servers at most")
        self._member, self._owners = member, tuple(owners)
        self._part_bytes = part_bytes
        self.sent = self.received = 0
        self.missing = 0
        self._own = own
        self._lock = threading.Condition()
        self._failure: RunError | None = None
        self._ended: dict[int, str] = {}
        self._news = 0
        self._closed = False
        self._current: Round | None = None
        self._previous: Round | None = None
        self._since: dict[int, float] = {}
        self._until: dict[int, float] = {}
        self._divisions: dict[tuple[int, int], Division] = {}
        self._queues = [FrameQueue() for _ in owners]
        self._connections: dict[int, socket.socket] = {}
        self._session: _Session = own.attach(member, _ToSelf(self))
        try:
            for place, owner in enumerate(self._owners):
                if place != member.place:
                    self._connections[place] = self._connected(place, owner)
        except BaseException:
            self.close()
            raise
        for place in range(len(self._owners)):
            self._start(self._send_all, place)
            if place != member.place:
                self._start(self._receive_all, place)

    def _start(self, work: object, place: int) -> None:
        assert callable(work)
        name = f"sums: {self._owners[place].name}"
        threading.Thread(target=work, args=(place,), daemon=True, name=name).start()

    def _connected(self, place: int, owner: Owner) -> socket.socket:
        host, port = owner.address
        rate = self._division(1 << 30).rate(place)  # which depends on no size
        try:
            connection = socket.create_connection(owner.address, GREETING_SECONDS)
            try:
                greet(connection, self._member._replace(bytes_per_second=rate), owner.key)
                tune(connection, rate)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            raise RunError(
                f"{owner.name} can't be reached at {host}:{port} ({error.strerror or error}); "
                "start `penstock serve` there, or take it out of the plan"
            ) from None
        except RunError as error:
            raise RunError(f"{owner.name} at {host}:{port}: {error}") from None
        return connection

    def begin(
        self,
        number: int,
        given: Mapping[int, Numbers],
        sums: Mapping[int, Numbers],
        *,
        filled: bool = True,
    ) -> None:
        """Hand in numbers to be summed; waits for nobody.

        Args:
            number: the round's, the same on all workers; higher than that of the round before.
            given: this worker's numbers by the place of their type in ``ITEM_BYTES``: as many on
                all workers. They stay as they are until the round after the next one begins. Those
                that are needed first stand last.
            sums: where the sums go; each as large as what is given.
            filled: whether all numbers are there; otherwise ``fill`` says of each when it is.
        """
        with self._lock:
            for place in self._ended.keys() - set(range(self._member.num_members)):
                self._divide_anew(place)
            # [4]
            self._previous, self._current = self._current, Round(number, given, sums)
            self._since.clear()
            self._until.clear()
            if not filled:
                self._current.filled = {dtype: Filled() for dtype in given}
            self._push(self._current, wanted=True)

    def fill(self, dtype: int, start: int, stop: int) -> None:
        """Numbers ``start`` to ``stop`` of the round that began last are there now; each once."""
        if start == stop:
            return
        with self._lock:
            round_ = self._current
            assert round_ is not None, "begin comes first"
            assert round_.filled is not None, "all numbers were there"
            first, last = round_.filled[dtype].add(start, stop)
            waiting = round_.waiting[dtype]
            low = bisect_left(waiting, first, key=attrgetter("start"))
            high = max(low, bisect_right(waiting, last, key=attrgetter("stop")))
            for part in reversed(waiting[low:high]):
                self._queue(round_, dtype, part)
            del waiting[low:high]

    def _queue(self, round_: Round, dtype: int, part: Part) -> None:
        self._since.setdefault(part.owner, time.perf_counter())
        numbers = round_.given[dtype][part.start : part.stop]
        self._queues[part.owner].put((self._head(round_, dtype, part), numbers))  # [1]

    def _head(self, round_: Round, dtype: int, part: Part) -> FrameHead:
        length = part.stop - part.start
        return FrameHead(FrameKind.PUSH, dtype, self.missing, round_.number, part.start, length)

    def _push(self, round_: Round, *, wanted: bool) -> None:
        """Queue the parts of a round that are there; if they are ``wanted``, the sums of all parts
        are waited for."""
        if wanted:
            round_.left.clear()
        for dtype, numbers in round_.given.items():
            division = self._division(numbers.nbytes)
            most = max(division.part_bytes // ITEM_BYTES[dtype], 1)
            round_.waiting[dtype] = []
            filled = None if round_.filled is None else round_.filled[dtype]
            for part in reversed(parts_of(len(numbers), division.shares, most)):
                if wanted:
                    round_.left[self._head(round_, dtype, part)] = part.owner
                if filled is None or filled.has(part.start, part.stop):
                    self._queue(round_, dtype, part)
                else:
                    round_.waiting[dtype].append(part)
            round_.waiting[dtype].reverse()

    def _division(self, num_bytes: int) -> Division:
        key = num_bytes, self.missing
        if key not in self._divisions:
            rates = [owner.bytes_per_second for owner in self._owners]
            self._divisions[key] = divide(
                num_bytes, rates, self._member.num_members, self.missing, self._part_bytes
            )
        return self._divisions[key]

    def wait(self, seconds: float, waiting: str, ranges: Ranges | None = None) -> None:
        """Wait until sums of the round are there.

        Args:
            seconds: the most that may pass without any news.
            waiting: what waits, for errors.
            ranges: of which numbers; by default of all.

        Raises:
            PeerError: a worker has left.
            DeadlineError: nothing came for so long.
            RunError: an owner sent what it may not send.
        """
        with self._lock:
            assert self._current is not None, "begin comes first"
            while left := _within(self._current.left, ranges):
                if self._failure is not None:
                    raise self._failure
                ended = next((owner for owner in left.values() if owner in self._ended), None)
                if ended is not None:
                    reason = self._ended[ended]
                    raise PeerError(f"{waiting}: {reason}", reason)
                seen = self._news
                if not self._lock.wait_for(partial(self._has_news, seen), seconds):
                    silent = sorted({self._owners[owner].name for owner in left.values()})
                    raise DeadlineError(
                        f"{waiting}: {' and '.join(silent)} did not answer within {seconds:g} s; "
                        "see what they printed last, or raise deadline_seconds"
                    )

    def take_served(self) -> list[tuple[int, float, float]]:
        """(number, from when, until when) of each server that had parts of the last round, in
        seconds of ``time.perf_counter``; each is told once."""
        with self._lock:
            first = self._member.num_members
            until = {owner: end for owner, end in self._until.items() if owner >= first}
            self._until.clear()
            return [(owner - first, self._since[owner], end) for owner, end in until.items()]

    def _has_news(self, seen: int) -> bool:
        return self._news != seen

    def _send_all(self, place: int) -> None:
        frames = self._queues[place]
        connection = self._connections.get(place)
        while (frame := frames.get()) is not None:
            head, numbers = frame
            if head.kind is FrameKind.PUSH and head.missing != self.missing:
                continue  # another division holds by now
            if connection is None:
                if numbers is not None:
                    self._session.contribute(self._member.place, head, numbers, own=False)
                else:
                    self._session.tell_all(head)
                continue
            try:
                connection.sendall(head.packed())
                if numbers is not None:
                    connection.sendall(bytes_of(numbers))
            except OSError:
                self._lost(place)
                return
            self.sent += HEAD_BYTES + (head.num_bytes if numbers is not None else 0)
            del frame, numbers

    def _receive_all(self, place: int) -> None:
        """Receive what one owner sends."""
        connection = self._connections[place]
        kinds = {FrameKind.SUM, FrameKind.GONE, FrameKind.ABORT}
        try:
            while (head := FrameHead.received(connection, kinds)) is not None:
                numbers = None
                if head.kind is FrameKind.SUM:
                    numbers = room_for(head.length, head.dtype)
                    receive(connection, bytes_of(numbers))
                    self.received += HEAD_BYTES + head.num_bytes
                self.take(head, numbers, place)
        except OSError:
            pass
        except RunError as error:
            self._fail(RunError(f"{self._owners[place].name}: {error}; is it another version?"))
            return
        self._lost(place)

    def take(self, head: FrameHead, numbers: Numbers | None, place: int) -> None:
        """Hear what an owner tells.

        Raises:
            RunError: it tells what it cannot know.
        """
        if head.kind is FrameKind.ABORT:
            if not head.start < self._member.num_members:
                raise RunError(f"it says that worker {head.start} has left, which there is not")
            self._end(place, self._owners[head.start].name)  # [5]
        elif head.kind is FrameKind.GONE:
            if not self._member.num_members <= head.start < len(self._owners):
                raise RunError(f"it says that owner {head.start} is gone, which is no server")
            self._divide_anew(head.start)
        else:
            assert numbers is not None
            with self._lock:
                round_ = self._current
                if round_ is None or head.part not in round_.left:
                    if round_ is None or head.round > round_.number:
                        raise RunError(f"it sent a sum of round {head.round}, which nobody began")
                    return  # of a division or a round that is over
                # [2] Under the lock, so that nothing late is written into the next round's sums.
                round_.sums[head.dtype][head.start : head.start + head.length] = numbers
                del round_.left[head.part]
                self._until[place] = time.perf_counter()
                self._news += 1
                self._lock.notify_all()

    def _lost(self, place: int) -> None:
        """A connection has ended."""
        if not self._closed:
            self._end(place, self._owners[place].name)

    def _divide_anew(self, place: int) -> None:
        """[3] A server is gone: go on without it."""
        with self._lock:
            bit = 1 << (place - self._member.num_members)
            if self.missing & bit or self._closed:
                return
            self.missing |= bit
            self._news += 1
            self._lock.notify_all()
            with suppress(OSError):
                self._connections[place].shutdown(socket.SHUT_RDWR)
            division = self._division(1 << 30)
            for other, connection in self._connections.items():
                rate = division.rate(other)
                if rate:
                    with suppress(OSError):
                        tune(connection, rate)
                    self._queues[other].put((FrameHead(FrameKind.PACE, start=round(rate)), None))
            for frames in self._queues:  # those that are gone do not read theirs
                frames.put((FrameHead(FrameKind.GONE, start=place), None))
            if self._previous is not None:
                self._push(self._previous, wanted=False)
            if self._current is not None:
                self._push(self._current, wanted=bool(self._current.left))

    def _end(self, place: int, whose: str) -> None:
        """Nothing more comes from an owner, which has ended itself or says that a worker has."""
        with self._lock:
            self._ended.setdefault(place, f"{whose} has left")
            self._news += 1
            lacking = self._current is not None and place in self._current.left.values()
            if place >= self._member.num_members and lacking:
                # A worker may have lost the connection to this server only; if it has left indeed,
                # its own server is told of next.
                self._divide_anew(place)
            self._lock.notify_all()

    def _fail(self, error: RunError) -> None:
        with self._lock:
            if self._failure is None and not self._closed:
                self._failure = error
            self._news += 1
            self._lock.notify_all()

    def close(self) -> None:
        """Leave: who still waits for this worker is told."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.notify_all()
        self._own.detach(self._member, self._session)
        for frames in self._queues:
            frames.put(None)
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _within(left: Mapping[FrameHead, int], ranges: Ranges | None) -> Mapping[FrameHead, int]:
    """Those of some parts that have a number of some ranges."""
    if ranges is None:
        return left
    return {
        head: owner
        for head, owner in left.items()
        for start, stop in [ranges.get(head.dtype, (0, 0))]
        if head.start < stop and start < head.start + head.length
    }


class _ToSelf:
    """Where this worker's own server puts what it tells it."""

    def __init__(self, exchange: SumExchange) -> None:
        self._exchange = exchange

    def put(self, item: Frame | None, /) -> None:
        if item is not None:
            head, numbers = item
            self._exchange.take(head, numbers, self._exchange._member.place)
