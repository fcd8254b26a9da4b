"""Seconds of collectives and hops over a ring inside a host, or over hosts with cards."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.core.catalogue import HostSpec

_STEP_SECONDS = 4e-6
_BASE_SECONDS = 20e-6
_REACHED = 0.77
"""Share of a link's bandwidth that collectives reach: sums over eight A100 move 230 of 300 GB/s
(VIA-Research/vTrain, its measured tables)."""


@dataclass(frozen=True)
class CollectiveRing:
    """Ranks that sum or gather together.

    Attributes:
        host: the machines that they are on.
        size: how many ranks.
        per_host: how many of them share a host, evenly.
        rings_per_host: groups like this one that use the host's cards at the same time.
    """

    host: HostSpec
    size: int
    per_host: int
    rings_per_host: int = 1

    @property
    def bytes_per_second(self) -> float:
        """What every rank moves per second, in each direction: the narrowest place of the ring."""
        inside = math.inf
        if self.per_host > 1 and self.host.link is not None:
            inside = self.host.link.bytes_per_second.value
        if self.size <= self.per_host:
            return _REACHED * inside
        card = self.host.card
        cards = self.host.devices / card.devices_per_card
        # A ring leaves a host by as many cards as it has ranks there, if there are so many.
        used = min(cards, self.per_host) if self.per_host > 1 else 1.0
        share = min(1.0, cards / (used * self.rings_per_host))
        return _REACHED * min(inside, used * share * card.bytes_per_second.value)

    @property
    def latency_seconds(self) -> float:
        """What each of its steps waits for."""
        card = self.host.card.latency_seconds.value if self.size > self.per_host else 0.0
        link = self.host.link.latency_seconds.value if self.host.link is not None else 0.0
        return max(card, link, _STEP_SECONDS)


def all_reduce_seconds(num_bytes: float, ring: CollectiveRing) -> float:
    """The sum of so many bytes on every rank: a ring for much, a tree's steps for little."""
    if ring.size <= 1 or not num_bytes:
        return 0.0
    moved = 2 * (ring.size - 1) / ring.size * num_bytes / ring.bytes_per_second
    return moved + _steps(ring)


def gather_seconds(num_bytes: float, ring: CollectiveRing) -> float:
    """An all-gather to, or a reduce-scatter of, so many bytes."""
    if ring.size <= 1 or not num_bytes:
        return 0.0
    return (ring.size - 1) / ring.size * num_bytes / ring.bytes_per_second + _steps(ring)


def _steps(ring: CollectiveRing) -> float:
    hosts = max(1, ring.size // max(1, ring.per_host))
    inside = min(ring.size, ring.per_host)
    rounds = inside + 2 * math.log2(hosts) if hosts > 1 else inside
    return _BASE_SECONDS + ring.latency_seconds * rounds


def hop_seconds(num_bytes: float, host: HostSpec, *, leaves_host: bool) -> float:
    """A message from one rank to the next."""
    if leaves_host or host.link is None:
        rate, latency = host.card.bytes_per_second.value, host.card.latency_seconds.value
    else:
        rate, latency = host.link.bytes_per_second.value, host.link.latency_seconds.value
    return _BASE_SECONDS + latency + num_bytes / (_REACHED * rate)
