"""Timing messages between the processes of a job: what ``penstock measure-cluster`` runs.

One pair of ranks at a time sends a message to and fro while all others wait, so that no two
measurements share a wire; long ones in both directions at once, as sums and pipelines do, which a
wire that has one for both, TCP's acknowledgements, and cores that copy make slower. Sizes grow
until a message takes long, so that a slow network is measured in the same time as a fast one.
Then the ranks of a host send alone, and then two at once: if two take as long together as one after
the other, they share a card, or what else is on their way. Each host is asked in turn, while all
others are still. Its ranks send to ranks of different hosts where there are so many; with two
hosts, a card that only the receivers share looks like one of the senders'. At last all ranks sum
tensors together.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from math import ceil
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import DeadlineError, InputError, PeerError, RunError
from penstock.core.cluster import Cluster, Link, Topology
from penstock.core.cluster.local import host_identity, host_memory_bytes
from penstock.core.cluster.measured import (
    Fit,
    Pair,
    Seat,
    chosen_pairs,
    fit,
    gathered,
    ranks_by_host,
    ring_seconds,
)
from penstock.core.cluster.parts import DeviceKind
from penstock.engine.device.accelerators import HOST_BACKEND, device_of, is_on_host
from penstock.engine.device.memory import total_bytes
from penstock.engine.transport.rendezvous import Rendezvous

_SHARED = 1.5
"""How many times as long two senders take at once as one, from which on they share a card: 2 if
they do, 1 if they don't."""

_REPEATS = 3
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**26


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


SIZES = (256, 2**10, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
"""Bytes of the messages, as long as time allows."""

FEWEST_SIZES = 4
FEWEST_REPEATS, MOST_REPEATS = 3, 40

_BOTH_WAYS_BYTES = 2**18
"""From which size on messages cross; shorter ones tell the latency."""

_SUMS_SHARE = 3.0
"""How much longer than a pair the sums may take: they are measured once."""


class SummedTogether(NamedTuple):
    """One all-reduce over all ranks.

    Attributes:
        num_bytes: on every rank.
        measured_seconds: median, of the rank that took longest.
        predicted_seconds: of a ring of the measured links, 2(n − 1)·(latency + bytes ÷ n ÷
            bandwidth), with the slowest link.
    """

    num_bytes: int
    measured_seconds: float
    predicted_seconds: float


class Measurement(NamedTuple):
    """The outcome of a measurement; the same on every rank.

    Attributes:
        cluster: device i is rank i's; with the cards that ranks of a host share.
        fits: of each pair that was measured, the lower rank first.
        sums: all-reduces, small ones first; none where there is one rank.
    """

    cluster: Cluster
    fits: dict[Pair, Fit]
    sums: tuple[SummedTogether, ...]


def measure_cluster(
    *,
    most_pairs: int = 66,
    seconds_per_pair: float = 1.0,
    deadline_seconds: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Time the links between all processes of the default group.

    Collective: every process calls it with the same arguments. Where the group's backend is
    that of accelerators, messages lie on the current one; else they lie in main memory.

    Args:
        most_pairs: if there are more pairs of ranks than this, only neighbours are measured: those
            on each host, and hosts that follow one another.
        seconds_per_pair: about how long each pair, and the all-reduces, take.
        deadline_seconds: how long one message or one turn of another pair may take.
        progress: is told (done, total) on every rank.

    Raises:
        InputError: an argument is not positive.
        PeerError: another rank has ended.
        DeadlineError: another rank did not answer in time.
    """
    if not min(seconds_per_pair, deadline_seconds) > 0 or most_pairs < 1:
        raise InputError("most_pairs, seconds_per_pair and deadline_seconds must be positive")
    return _Meter(seconds_per_pair, deadline_seconds).run(most_pairs, progress)


class _Meter:
    """One rank's part in the measurement."""

    def __init__(self, seconds_per_pair: float, deadline_seconds: float) -> None:
        self._seconds = seconds_per_pair
        self._deadline_seconds = deadline_seconds
        self._hosts: list[str] = []
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._device = device_of(dist.get_backend())
        self._on_host = is_on_host(self._device)
        self._meeting = Rendezvous.of_group(
            "measuring links", deadline_seconds, "give it longer with --deadline"
        )
        timeout = datetime.timedelta(seconds=deadline_seconds)
        with self._translated("meeting the other ranks"):
            # Numbers to agree upon go through main memory, whatever is measured.
            self._words = dist.new_group(timeout=timeout, backend=HOST_BACKEND)
            wires = HOST_BACKEND if self._on_host else dist.get_backend()
            self._wires = dist.new_group(timeout=timeout, backend=wires)

    def run(self, most_pairs: int, progress: Callable[[int, int], None] | None) -> Measurement:
        """Everything, in the order that all ranks keep to."""
        seats = self._seats()
        self._hosts = [seat.host for seat in seats]
        pairs = chosen_pairs(self._hosts, most_pairs)
        steps = len(pairs) + (self._num_ranks > 1)
        tell = progress or (lambda done, total: None)
        fits = {}
        for done, pair in enumerate(pairs):
            tell(done, steps)
            with self._translated(f"measuring the link of ranks {pair[0]} and {pair[1]}", pair):
                fits[pair] = self._pair(*pair)
        links = {pair: fit.link for pair, fit in fits.items()}
        cards: list[tuple[int, ...]] = []
        if self._on_host:  # elsewhere messages go ways that their library chooses
            meter = CardMeter(self._rank, self._wires, self._words, self._seconds / 10)
            with self._translated("finding out who shares a card"):
                cards = [*meter.sharers(ranks_by_host(self._hosts), links)]
        cluster = gathered(seats, links, cards)
        sums: tuple[SummedTogether, ...] = ()
        if self._num_ranks > 1:
            tell(len(pairs), steps)
            slowest = Topology(cluster).slowest_link(range(self._num_ranks))
            with self._translated("measuring an all-reduce"):
                sums = tuple(self._sums(slowest))
        tell(steps, steps)
        return Measurement(cluster, fits, sums)

    def _seats(self) -> list[Seat]:
        memory_bytes = 0 if self._on_host else total_bytes(self._device)
        kind: DeviceKind = "cpu" if self._on_host else "gpu"
        own = Seat(host_identity(), kind, memory_bytes, host_memory_bytes())
        return self._meeting.exchange(own, Seat, "to say where it runs")

    def _pair(self, first: int, second: int) -> Fit:
        """The link of two ranks, which all others wait for; the same on every rank."""
        times: list[float] = []
        if self._rank == first:
            times = self._call(second)
        elif self._rank == second:
            self._answer(first)
        numbers = torch.zeros(1 + len(SIZES), dtype=torch.float64)
        numbers[: 1 + len(times)] = torch.tensor([len(times), *times], dtype=torch.float64)
        dist.broadcast(numbers, first, group=self._words)
        count = int(numbers[0])
        return fit(SIZES[:count], numbers[1 : 1 + count].tolist())

    def _call(self, peer: int) -> list[float]:
        """Median seconds one way, of each size."""
        times: list[float] = []
        for index, size in enumerate(SIZES):
            expected = 2 * _expected(times, index) if times else 0.0
            if len(times) >= FEWEST_SIZES and _least(expected) > self._seconds:
                break
            repeats = self._repeats(expected) if times else MOST_REPEATS
            self._say(peer, size, repeats)
            block = self._block(size)
            trip = self._crossing if size >= _BOTH_WAYS_BYTES else self._one_way
            times.append(median([trip(block, peer) for _ in range(1 + repeats)][1:]))
        self._say(peer, 0, 0)
        return times

    def _answer(self, peer: int) -> None:
        while True:
            numbers = torch.zeros(2, dtype=torch.int64)
            dist.recv(numbers, peer, group=self._words)
            size, repeats = numbers.tolist()
            if not size:
                return
            block = self._block(size)
            for _ in range(1 + repeats):
                if size >= _BOTH_WAYS_BYTES:
                    self._crossing(block, peer)
                else:
                    dist.recv(block, peer, group=self._wires)
                    dist.send(block, peer, group=self._wires)
            self._finish()

    def _say(self, peer: int, size: int, repeats: int) -> None:
        dist.send(torch.tensor([size, repeats]), peer, group=self._words)

    def _one_way(self, block: Tensor, peer: int) -> float:
        """Half the seconds of a message to and fro."""
        self._finish()
        start = time.perf_counter()
        dist.send(block, peer, group=self._wires)
        dist.recv(block, peer, group=self._wires)
        self._finish()
        return (time.perf_counter() - start) / 2

    def _crossing(self, block: Tensor, peer: int) -> float:
        """Seconds of a message while another one comes the other way."""
        self._finish()
        # In the other order Gloo sends first one way and then the other.
        ways = [
            dist.P2POp(dist.irecv, torch.empty_like(block), peer, self._wires),
            dist.P2POp(dist.isend, block, peer, self._wires),
        ]
        start = time.perf_counter()
        for work in dist.batch_isend_irecv(ways):
            work.wait()
        self._finish()
        return time.perf_counter() - start

    def _sums(self, slowest: Link) -> Iterator[SummedTogether]:
        times: list[float] = []
        for index, size in enumerate(SIZES):
            expected = _expected(times, index) if times else 0.0
            if len(times) >= FEWEST_SIZES and _least(expected) > _SUMS_SHARE * self._seconds:
                break
            repeats = self._repeats(expected) if times else FEWEST_REPEATS
            block = torch.zeros(size // 4, device=self._device)
            seconds = median([self._one_sum(block) for _ in range(1 + repeats)][1:])
            # All ranks must agree on when to stop.
            longest = torch.tensor([seconds], dtype=torch.float64)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._words)
            times.append(float(longest))
            predicted = ring_seconds(self._num_ranks, size, slowest)
            yield SummedTogether(size, times[-1], predicted)

    def _one_sum(self, block: Tensor) -> float:
        dist.barrier(group=self._words)
        self._finish()
        start = time.perf_counter()
        dist.all_reduce(block, group=self._wires)
        self._finish()
        return time.perf_counter() - start

    def _repeats(self, expected_seconds: float) -> int:
        share = self._seconds / len(SIZES)
        wanted = ceil(share / max(1e-9, expected_seconds))
        return min(MOST_REPEATS, max(FEWEST_REPEATS, wanted))

    def _block(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _finish(self) -> None:
        if not self._on_host:
            torch.accelerator.synchronize(self._device)

    @contextmanager
    def _translated(self, doing: str, pair: Pair | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunError):
                raise
            raise self._refusal(str(error), doing, pair) from error

    def _refusal(self, text: str, doing: str, pair: Pair | None) -> RunError:
        other = "another rank"
        if pair is not None and self._rank in pair:
            other = f"rank {sum(pair) - self._rank}"
        where = f"rank {self._rank}, {doing}"
        if "timed out" in text.lower() or "timeout" in text.lower():
            return DeadlineError(
                f"{where}: {other} did not answer within {self._deadline_seconds:g} s; see its "
                "output, or give it longer with --deadline"
            )
        return PeerError(
            f"{where}: {other} is gone (its process ended or was killed); see its output"
        )


def _least(expected_seconds: float) -> float:
    """Time of the fewest repeats, and of the one before them that is not counted."""
    return (1 + FEWEST_REPEATS) * expected_seconds


def _expected(times: list[float], index: int) -> float:
    """Seconds one way of the next size, at the last one's rate."""
    return times[-1] * SIZES[index] / SIZES[index - 1]
