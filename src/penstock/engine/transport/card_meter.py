"""Who shares a network card: ranks of a host send alone, and then two at once.

If two take as long together as one after the other, they share what is on their way. Each host is
asked in turn, while all others are still. Its ranks send to ranks of different hosts where there
are so many; with two hosts, a card that only the receivers share looks like one of the senders'.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.cluster import Link

_SHARED = 1.5
"""How many times as long two senders take at once as one, from which on they share a card: 2 if
they do, 1 if they don't."""

_REPEATS = 3
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**26

Pair = tuple[int, int]


class CardMeter:
    """One rank's part in finding out; all ranks do the same in the same order.

    Args:
        rank: this one.
        wires: the group over which messages go, which lie in main memory.
        words: the group over which times are agreed upon.
        seconds: about how long a message may take.
    """

    def __init__(
        self, rank: int, wires: dist.ProcessGroup, words: dist.ProcessGroup, seconds: float
    ) -> None:
        self._rank, self._wires, self._words, self._seconds = rank, wires, words, seconds

    def sharers(
        self, hosts: Mapping[str, Sequence[int]], links: Mapping[Pair, Link]
    ) -> Iterator[tuple[int, ...]]:
        """The ranks behind each card of hosts with several ranks, if there are several hosts.

        Args:
            hosts: the ranks of each host.
            links: those that were measured, the lower rank first.
        """
        for host, ranks in hosts.items():
            others = [own for other, own in hosts.items() if other != host]
            if len(ranks) < 2 or not others:
                continue
            receivers = _in_turns(others)
            pairs = {rank: (rank, receivers[k % len(receivers)]) for k, rank in enumerate(ranks)}
            num_bytes = self._size(ranks, links)
            cards: list[list[int]] = []
            for rank in ranks:
                for card in cards:
                    if self._share(pairs[card[0]], pairs[rank], num_bytes):
                        card.append(rank)
                        break
                else:
                    cards.append([rank])
            yield from map(tuple, cards)

    def _size(self, ranks: Sequence[int], links: Mapping[Pair, Link]) -> int:
        """Bytes that take about as long as they may on the way out of a host."""
        leaving = (
            link.bytes_per_second
            for (first, second), link in links.items()
            if (first in ranks) != (second in ranks)
        )
        wanted = self._seconds * max(leaving, default=0.0)
        return int(min(max(wanted, _LEAST_BYTES), _MOST_BYTES))

    def _share(self, first: Pair, second: Pair, num_bytes: int) -> bool:
        alone = max(self._timed([pair], num_bytes) for pair in (first, second))
        return self._timed([first, second], num_bytes) > _SHARED * alone

    def _timed(self, pairs: Sequence[Pair], num_bytes: int) -> float:
        """Seconds until all that is sent at once has come; the same on every rank."""
        block = torch.zeros(num_bytes, dtype=torch.uint8)
        return median(self._once(pairs, block) for _ in range(1 + _REPEATS))

    def _once(self, pairs: Sequence[Pair], block: Tensor) -> float:
        dist.barrier(group=self._words)
        begin = time.perf_counter()
        for source, target in pairs:
            if self._rank == source:
                dist.send(block, target, group=self._wires)
                dist.recv(block[:1], target, group=self._wires)  # all of it has come
            elif self._rank == target:
                dist.recv(block, source, group=self._wires)
                dist.send(block[:1], source, group=self._wires)
        took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX, group=self._words)
        return float(took)


def _in_turns(hosts: Sequence[Sequence[int]]) -> list[int]:
    """The first ranks of all hosts, then the second ones, and so on."""
    columns = chain.from_iterable(zip_longest(*hosts))
    return [rank for rank in columns if rank is not None]
