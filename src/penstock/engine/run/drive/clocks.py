"""One time axis for processes on several hosts.

Processes of one Linux host share the monotonic clock that records are read from; two hosts started
theirs on different days. A rank per host plays ping-pong with rank 0, as NTP does: if the answer
takes as long as the question, rank 0 read its clock in the middle of the exchange. The quickest of
many exchanges leaves the least room for error: half its round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.transport import ProcessTransport
from penstock.engine.transport.rendezvous import translated

NUM_EXCHANGES = 32
"""Per host."""

ReadClock = Callable[[], float]


def clock_offsets(
    group: dist.ProcessGroup, host_ids: Sequence[Hashable], clock: ReadClock = time.perf_counter
) -> tuple[float, ...]:
    """By how many seconds each rank's clock is ahead of rank 0's, the same on every rank.

    Collective: every process of the group calls it. Subtracting a rank's offset from its times
    gives them on rank 0's clock. Clocks drift by some microseconds per second, so that a long job
    asks again from time to time.

    Args:
        group: processes that exchange CPU tensors (gloo).
        host_ids: what tells the host of each rank; ranks with equal ones read the same clock, so
            that those on rank 0's host have exactly 0.
        clock: what this rank reads, in seconds.

    Returns:
        The offset of every rank, exact to half the quickest round trip to its host.
    """
    rank = dist.get_rank(group)
    speakers = {host: r for r, host in reversed(list(enumerate(host_ids)))}
    own = 0.0
    # One after the other: whoever waits for two at once answers neither at once.
    for speaker in sorted(set(speakers.values()) - {0}):
        if rank == speaker:
            own = _asked(group, clock)
        elif rank == 0:
            _answer(group, speaker, clock)
    offsets = [torch.zeros(1, dtype=torch.float64) for _ in host_ids]
    dist.all_gather(offsets, torch.tensor([own], dtype=torch.float64), group=group)
    return tuple(float(offsets[speakers[host]]) for host in host_ids)


def offsets_of_clocks(transport: ProcessTransport) -> tuple[float, ...]:
    """By how many seconds each rank's clock is ahead of rank 0's; collective.

    Raises:
        PeerError, DeadlineError: another rank has ended, or does not answer.
    """
    group = transport.group
    if group is None or len(set(transport.hosts)) == 1:
        return (0.0,) * len(transport.hosts)
    seconds, argument = transport.patience
    where = f"rank {dist.get_rank()}, comparing its clock with those of other hosts"
    with translated(where, seconds, f"raise {argument}"):
        return clock_offsets(group, transport.hosts)


def _asked(group: dist.ProcessGroup, clock: ReadClock) -> float:
    """Ask rank 0 for the time until one answer has been quick."""
    host = dist.get_global_rank(group, 0)
    answer = torch.zeros(2, dtype=torch.float64)
    exchanges: list[tuple[float, float]] = []
    for _ in range(NUM_EXCHANGES):
        sent = clock()
        dist.send(_PING, host, group=group)
        dist.recv(answer, host, group=group)
        back = clock()
        heard, answered = answer.tolist()
        round_trip = (back - sent) - (answered - heard)
        exchanges.append((round_trip, (sent + back) / 2 - (heard + answered) / 2))
    return min(exchanges)[1]


def _answer(group: dist.ProcessGroup, asker: int, clock: ReadClock) -> None:
    host = dist.get_global_rank(group, asker)
    ping = torch.zeros_like(_PING)
    for _ in range(NUM_EXCHANGES):
        dist.recv(ping, host, group=group)
        heard = clock()
        dist.send(_times(heard, clock()), host, group=group)


def _times(*times: float) -> Tensor:
    return torch.tensor(times, dtype=torch.float64)


_PING = torch.zeros(1)
