"""Who sums a round, and how much: the rule by which all workers divide it alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.summation.split import best_part_bytes, best_split

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
