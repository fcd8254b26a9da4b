"""Sums of flat buffers that somebody else makes: ``torch.distributed``, or servers (BytePS).

``AllReducer`` sums by ``torch.distributed``, in buckets: in the library's own order of adding.

``ServerReducer`` sums by owners of which some are spare machines, in parts. Each holder that sums
for its host runs a summation server in this process, for the parts that it owns, and connects to
those that do so for other hosts and to the spare ones. Everything else is
``penstock.core.summation``'s.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import InputError
from penstock.core.cluster import SpareMachine
from penstock.core.summation.adding import Filled
from penstock.core.summation.exchange import SumExchange
from penstock.core.summation.frames import Member, is_loopback, key_of, parse_address
from penstock.core.summation.server import SummationServer
from penstock.core.summation.split import Owner
from penstock.engine.reduce.flat import FlatBuffers, FlatReducer
from penstock.engine.reduce.inside import Range
from penstock.engine.reduce.reducer import Purpose, ServedGradients, SharedWeights
from penstock.engine.transport import Edge, Transport, groups
from penstock.engine.transport.base import FIRST_EXCHANGE
from penstock.planning.plans.summing import Summing

_BUCKET_BYTES = 4 * 2**20


class _FlatBucket(NamedTuple):
    """Numbers ``start`` to ``stop`` of the buffer of a type, which are summed at once."""

    dtype: int
    start: int
    stop: int


class AllReducer(FlatReducer):
    """Sums by all-reduce, for one group of shared weights.

    Every holder gets the same bits; which they are depends on the library and the number of ranks.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.
        summing: the plan's.
        made: by the tag of each group of weights and by slice, the process group of the ranks that
            exchange it.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedWeights,
        transport: Transport,
        summing: Summing,
        made: Sequence[Sequence[dist.ProcessGroup]],
    ) -> None:
        super().__init__(rank, shared, transport, summing)
        self._group: dist.ProcessGroup | None = None
        if self._slice is not None:
            self._group = made[shared.tag][self._slice]
            groups.lend(self._group, self)
        self._buffers: tuple[Mapping[int, int], FlatBuffers] | None = None
        self._there: dict[int, Filled] = {}
        self._to_begin: deque[_FlatBucket] = deque()
        self._under_way: list[tuple[_FlatBucket, dist.Work]] = []
        self.closed = False

    def release(self) -> None:
        """Let go of the group, which has been destroyed."""
        self._group = None

    def start(self, counts: Mapping[int, int]) -> FlatBuffers:
        if self._buffers is None or self._buffers[0] != counts:
            self._buffers = counts, FlatBuffers(counts)
        _, buffers = self._buffers
        self._there = {dtype: Filled() for dtype in buffers.tensors}
        self._under_way.clear()
        self._to_begin = deque(
            _FlatBucket(
                dtype, start, min(start + _BUCKET_BYTES // tensor.element_size(), len(tensor))
            )
            for dtype, tensor in buffers.tensors.items()
            for start in range(0, len(tensor), _BUCKET_BYTES // tensor.element_size())
        )
        return buffers

    def fill(self, dtype: int, start: int, stop: int) -> None:
        assert self._buffers is not None
        if start < stop:
            self._there[dtype].add(start, stop)
        # In the order of the buckets, which is the same on all holders.
        while self._to_begin and self._is_filled(self._to_begin[0]):
            bucket = self._to_begin.popleft()
            numbers = self._buffers[1].tensors[bucket.dtype][bucket.start : bucket.stop]
            self._under_way.append((bucket, self._all_reduced(numbers)))

    def _is_filled(self, bucket: _FlatBucket) -> bool:
        return self._there[bucket.dtype].has(bucket.start, bucket.stop)

    def _all_reduced(self, numbers: Tensor) -> dist.Work:
        try:
            work = dist.all_reduce(numbers, group=self._group, async_op=True)
        except RuntimeError as error:
            raise groups.lost("summing gradients", self._others, self._transport) from error
        assert isinstance(work, dist.Work)
        return work

    def summed(self, ranges: Mapping[int, Range], waiting: str) -> FlatBuffers:
        assert self._buffers is not None
        left = []
        for bucket, work in self._under_way:
            start, stop = ranges.get(bucket.dtype, (0, 0))
            if bucket.start < stop and start < bucket.stop:
                groups.wait(work, self._transport, self._others, waiting)
            else:
                left.append((bucket, work))
        self._under_way = left
        return self._buffers[1]

    @property
    def _others(self) -> list[int]:
        assert self._slice is not None
        return [rank for rank in self._hosts.exchanging(self._slice) if rank != self._rank]

    def close(self, *, failed: bool) -> None:
        self.closed = True


SECRET, JOB = "PENSTOCK_SECRET", "PENSTOCK_JOB"
"""Environment variables that say what workers of a job and its servers must both know."""

DEFAULT_JOB = "job"
_PARTING_SECONDS = 10.0
_SLICE_BITS = 20
"""Of the number of a sum, those below that of a slice of it."""


class ServerReducer(FlatReducer):
    """Sums by holders and spare machines, for one group of shared weights.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.
        summing: the plan's.
        attempt: the name of this pipeline, in hexadecimal digits, which no other has.
        numbers: by the tag of each group of weights, what tells its sum from all others of the
            pipeline.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedWeights,
        transport: Transport,
        summing: Summing,
        attempt: str,
        numbers: Sequence[int],
    ) -> None:
        super().__init__(rank, shared, transport, summing)
        self._sum = numbers[shared.tag]
        self._summing = summing
        self._session = bytes.fromhex(attempt)[:16]
        self._server: SummationServer | None = None
        self._exchange: SumExchange | None = None
        self._round = 0
        self._buffers: tuple[Mapping[int, int], list[FlatBuffers]] | None = None

    def open(self) -> None:
        """Meet those who sum for other hosts, and the servers.

        Raises:
            InputError: a server beyond this machine, and no secret.
            RunError: a server can't be reached, or refuses.
        """
        spare = [_owner(server) for server in self._summing.servers]
        word, first = secrets.token_hex(16), self._shared.ranks[0]
        if self._rank == first:
            # It makes up the secret with which holders know each other.
            for other in self._shared.others(first):
                self._transport.send(self._edge_to(other, Purpose.SUM), FIRST_EXCHANGE, word)
        else:
            edge = self._shared.edge(first, self._rank, Purpose.SUM)
            waiting = f"rank {self._rank}, waiting for the secret of rank {first}"
            word = self._transport.recv(edge, FIRST_EXCHANGE, waiting)
        if self._slice is not None:
            self._meet(self._hosts.exchanging(self._slice), word, spare)

    def _edge_to(self, other: int, purpose: Purpose) -> Edge:
        return self._shared.edge(self._rank, other, purpose)

    def _meet(self, ranks: Sequence[int], word: str, spare: Sequence[Owner]) -> None:
        """Exchange addresses with the ranks that exchange this one's slice, and connect."""
        key, place = key_of(word, ""), ranks.index(self._rank)
        self._server = SummationServer(own_host(), 0, key)
        addresses = {self._rank: self._server.address}
        for other in (*ranks[place + 1 :], *ranks[:place]):
            edge = self._edge_to(other, Purpose.PART)
            self._transport.send(edge, FIRST_EXCHANGE, addresses[self._rank])
        addresses |= {rank: self._hear_address(rank) for rank in ranks if rank != self._rank}
        rates = self._summing.bytes_per_second
        holders = [
            Owner(f"rank {rank}", addresses[rank], key, rates[rank] if rates else 0.0)
            for rank in ranks
        ]
        assert self._slice is not None
        number = self._sum + (self._slice << _SLICE_BITS)
        member = Member(self._session, number, place, len(holders))
        self._exchange = SumExchange(member, [*holders, *spare], self._server)

    def _hear_address(self, rank: int) -> tuple[str, int]:
        edge = self._shared.edge(rank, self._rank, Purpose.PART)
        waiting = f"rank {self._rank}, waiting for where rank {rank} sums gradients"
        host, port = self._transport.recv(edge, FIRST_EXCHANGE, waiting)
        return host, port

    def start(self, counts: Mapping[int, int]) -> FlatBuffers:
        if self._buffers is None or self._buffers[0] != counts:
            # Two for what is given, in turns, since the last one may be needed again; one for sums.
            self._buffers = counts, [FlatBuffers(counts) for _ in range(3)]
        _, buffers = self._buffers
        self._round += 1
        assert self._exchange is not None, "open comes first"
        given = buffers[self._round % 2]
        self._exchange.begin(self._round, given.numbers, buffers[2].numbers, filled=False)
        return given

    def fill(self, dtype: int, start: int, stop: int) -> None:
        assert self._exchange is not None
        self._exchange.fill(dtype, start, stop)

    def summed(self, ranges: Mapping[int, Range], waiting: str) -> FlatBuffers:
        assert self._exchange is not None and self._buffers is not None
        self._exchange.wait(self._transport.patience.seconds, waiting, ranges)
        return self._buffers[1][2]

    def take_served(self) -> list[ServedGradients]:
        if self._exchange is None:
            return []
        return [ServedGradients(*served) for served in self._exchange.take_served()]

    def close(self, *, failed: bool) -> None:
        if self._exchange is not None:
            self._exchange.close()
        if self._server is not None:
            self._server.close(0.0 if failed else _PARTING_SECONDS)


def _owner(server: SpareMachine) -> Owner:
    secret, job = os.environ.get(SECRET, ""), os.environ.get(JOB, DEFAULT_JOB)
    address = parse_address(server.where)
    if not secret and not is_loopback(address[0]):
        raise InputError(
            f"the server {server.name!r} at {address[0]} may be another machine, and {SECRET} is "
            "not set; set it to the same words here, on all ranks, and where penstock serve runs"
        )
    name = f"the server {server.name!r}"
    return Owner(name, address, key_of(secret, job), server.bytes_per_second)


def own_host() -> str:
    """The address at which other ranks reach this host: that from which it reaches rank 0."""
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with suppress(OSError):
        family = socket.getaddrinfo(first, 1, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((first, 1))  # sends nothing
            host: str = probe.getsockname()[0]
            return host
    return "127.0.0.1"
