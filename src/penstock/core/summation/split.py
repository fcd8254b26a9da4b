"""How much of a sum each machine should make, so that all links are done at the same moment.

n workers hold M bytes each, to be summed; worker i has a link of ``b_i`` bytes per second in each
direction, server j one of ``B_j``. Whoever sums x bytes gets them from all other workers and
answers to all:

- a worker that sums g bytes sends M − g to others' sums and (n−1)·g answers: M + (n−2)·g in all;
- a server that sums c bytes receives n·c and sends n·c.

For a time t, the most that each can sum follows, and grows with t: like water in vessels of
different widths. The least t at which they hold M together is the answer, and it is that of the
linear program. Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training"
(BytePS), OSDI'20, section 4.1, has the case in which all links of a kind are alike.

``divide`` is the rule by which all workers divide a round alike, ``parts_of`` cuts each share, and
``num_portions`` says in how many portions gradients leave where ranks sum alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf, sqrt
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.base.values import number

MOST_PORTIONS = 8
"""Each costs two messages per pair of ranks."""

LEAST_PORTION_BYTES = 256 * 1024

MOST_SERVERS = 64
"""The heads of messages have a bit for each."""


def num_portions(num_bytes: float, most: int = MOST_PORTIONS) -> int:
    """In how many portions so many bytes leave.

    >>> num_portions(1e5), num_portions(1e6), num_portions(1e9)
    (1, 3, 8)
    """
    return max(min(most, int(num_bytes // LEAST_PORTION_BYTES)), 1)


PART_OVERHEAD_SECONDS = 100e-6
"""The cost of a part besides its bytes, on both ends together."""

LEAST_PART_BYTES, MOST_PART_BYTES = 16 * 1024, 16 * 1024 * 1024


class Split(NamedTuple):
    """Who sums how much.

    Attributes:
        seconds: until every worker has every sum, if all links are as fast as they say.
        workers: bytes that each worker sums.
        servers: bytes that each server sums.
    """

    seconds: float
    workers: tuple[float, ...]
    servers: tuple[float, ...]


def best_split(num_bytes: float, workers: Sequence[float], servers: Sequence[float] = ()) -> Split:
    """The split of a sum that takes least time.

    Where several take as little, servers get as much as they can take, and workers the rest in
    proportion to what they could.

    Args:
        num_bytes: what each worker holds.
        workers: bytes per second of each worker's link, in each direction; at least one.
        servers: the same of each server; none by default.

    Raises:
        InputError: there is no worker, or a bandwidth is not positive.
    """
    _check(num_bytes, workers, servers)
    count, least = len(workers), num_bytes / min(workers)
    if count == 1 or num_bytes == 0:
        return Split(0.0, _shared(num_bytes, workers), (0.0,) * len(servers))
    seconds = least
    if sum(_most(num_bytes, workers, servers, least)) < num_bytes:
        # Worker i begins to hold water when it has sent its own bytes, and is full when it has sent
        # them to all others; between two such moments all grows in a straight line.
        moments = [time / rate for rate in workers for time in (num_bytes, (count - 1) * num_bytes)]
        moments = sorted({moment for moment in moments if moment >= least})
        held = [sum(_most(num_bytes, workers, servers, moment)) for moment in moments]
        place = bisect_left(held, num_bytes)
        if place == len(held):  # rounding: all workers are full at the last moment
            seconds = moments[-1]
        else:
            (low, high), (few, enough) = moments[place - 1 : place + 1], held[place - 1 : place + 1]
            seconds = low + (num_bytes - few) * (high - low) / (enough - few)
    most = _most(num_bytes, workers, servers, seconds)
    of_workers, of_servers = most[:count], most[count:]
    total = sum(of_servers)
    if total > num_bytes:
        of_servers = [share * num_bytes / total for share in of_servers]
    rest, room = max(num_bytes - sum(of_servers), 0.0), sum(of_workers)
    return Split(
        seconds,
        tuple(share * rest / room if room else 0.0 for share in of_workers),
        tuple(of_servers),
    )


def _most(
    num_bytes: float, workers: Sequence[float], servers: Sequence[float], seconds: float
) -> list[float]:
    """The most bytes that workers and then servers can sum in so many seconds, which are enough for
    each worker to send all of its own."""
    count = len(workers)
    of_servers = [rate * seconds / count for rate in servers]
    if count == 2:  # an answer is as long as what it would have sent: its own share costs nothing
        return [num_bytes] * 2 + of_servers
    spare = ((rate * seconds - num_bytes) / (count - 2) for rate in workers)
    return [min(max(most, 0.0), num_bytes) for most in spare] + of_servers


def _shared(num_bytes: float, weights: Sequence[float]) -> tuple[float, ...]:
    return tuple(num_bytes * weight / sum(weights) for weight in weights)


def _check(num_bytes: float, workers: Sequence[float], servers: Sequence[float]) -> None:
    number("the bytes to sum", num_bytes)
    if not workers:
        raise InputError("a sum needs at least one worker")
    for rate in (*workers, *servers):
        number("the bandwidth of a worker or server", rate, positive=True)


def best_part_bytes(num_bytes: float, bytes_per_second: float, num_workers: int) -> int:
    """The best size of a part: small ones cost more overhead, large ones leave links idle at the
    beginning and at the end of a sum.

    With p bytes a part, M/p parts cost h each, and the first and last take (n+1)·p/B beside what
    the others hide: together least at p = √(h·M·B/(n+1)).

    >>> best_part_bytes(12.5e6, 12.5e6, 4), best_part_bytes(100e6, 25e9 / 8, 4)
    (55902, 2500000)

    Args:
        num_bytes: what each worker holds.
        bytes_per_second: of a worker's link; 0 means so fast that it does not count.
        num_workers: how many hold them.
    """
    if not bytes_per_second:
        return MOST_PART_BYTES
    best = sqrt(PART_OVERHEAD_SECONDS * num_bytes * bytes_per_second / (num_workers + 1))
    return round(min(max(best, LEAST_PART_BYTES), MOST_PART_BYTES))


class Part(NamedTuple):
    """Numbers ``start`` to ``stop`` of a flat buffer, and who sums them.

    Attributes:
        owner: its place among the owners.
    """

    owner: int
    start: int
    stop: int


def parts_of(count: int, shares: Sequence[float], most: int) -> tuple[Part, ...]:
    """Cut a buffer exactly: each owner gets its share to the number, in parts of equal size.

    The parts of different owners take turns in proportion to their shares, so that whoever sends
    them in the order of the buffer keeps all owners busy from the beginning to the end.

    Args:
        count: numbers in the buffer.
        shares: of each owner, in any unit; not all 0.
        most: numbers in a part.

    Returns:
        The parts, in the order of the buffer.

    Raises:
        InputError: no owner has a share, or a part has no room for a number.
    """
    if most < 1 or not 0 < sum(shares) < inf or min(shares) < 0:
        raise InputError("a part needs room for a number, and an owner a positive share")
    total = sum(shares)
    borders = [round(count * share / total) for share in accumulate(shares, initial=0.0)]
    turns: list[tuple[float, int, int]] = []
    for owner, (first, last) in enumerate(pairwise(borders)):
        size = last - first
        num_parts = -(-size // most)
        turns += [
            (
                (part + 0.5) / num_parts,
                owner,
                size * (part + 1) // num_parts - size * part // num_parts,
            )
            for part in range(num_parts)
        ]
    turns.sort()
    ends = accumulate((size for _, _, size in turns), initial=0)
    return tuple(
        Part(owner, start, stop)
        for (_, owner, _), (start, stop) in zip(turns, pairwise(ends), strict=True)
    )


_LEAST_RATE = 1e5
"""Bytes per second that even a flow without a share may send, for what is no part."""


class Owner(NamedTuple):
    """Who sums parts.

    Attributes:
        name: for errors.
        address: (host, port).
        key: what it makes workers prove to know.
        bytes_per_second: of its link in each direction; 0 if nobody says.
    """

    name: str
    address: tuple[str, int]
    key: bytes
    bytes_per_second: float = 0.0


class Division(NamedTuple):
    """Who sums how much.

    Attributes:
        shares: of each owner; 0 for those that are gone.
        seconds: in which that many bytes are exchanged; 0 if nobody knows how fast links are.
        part_bytes: the size of a part.
    """

    shares: tuple[float, ...]
    seconds: float
    part_bytes: int

    def rate(self, place: int) -> float:
        """Bytes per second to and from an owner, at which all are done at once; 0 if nobody
        knows."""
        if not self.seconds:
            return 0.0
        return max(self.shares[place] / self.seconds, _LEAST_RATE)


def divide(
    num_bytes: int, rates: Sequence[float], num_workers: int, missing: int, part_bytes: int = 0
) -> Division:
    """Divide a sum among the owners that are left, by a rule that all workers follow alike.

    Args:
        rates: bytes per second of each owner's link; where one is 0, all count as equal.
        num_workers: the first of the owners.
        missing: a bit for each server that is gone.
        part_bytes: the size of a part; 0 is the best one.
    """
    known = all(rates)
    each = [*rates] if known else [1.0] * len(rates)
    there = [p for p in range(num_workers, len(rates)) if not missing >> (p - num_workers) & 1]
    split = best_split(float(num_bytes), each[:num_workers], [each[place] for place in there])
    of_servers = dict(zip(there, split.servers, strict=True))
    shares = [*split.workers, *(of_servers.get(p, 0.0) for p in range(num_workers, len(rates)))]
    size = part_bytes or best_part_bytes(
        num_bytes, min(each[:num_workers]) if known else 0.0, num_workers
    )
    return Division(tuple(shares), split.seconds if known else 0.0, size)
