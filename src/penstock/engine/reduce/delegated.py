"""Sums of flat buffers that somebody else makes: ``torch.distributed``, or servers (BytePS).

``AllReducer`` sums by ``torch.distributed``, in buckets: in the library's own order of adding.

``ServerReducer`` sums by owners of which some are spare machines, in parts. Each holder runs a
summation server in this process, for the parts that it owns, and connects to those of all others
and to the spare ones. Everything else is ``penstock.core.summation``'s.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import DeadlineError, InputError, PeerError
from penstock.core.cluster import SpareMachine
from penstock.core.summation.adding import Filled
from penstock.core.summation.exchange import SumExchange
from penstock.core.summation.frames import Member, is_loopback, key_of, parse_address
from penstock.core.summation.server import SummationServer
from penstock.core.summation.split import Owner
from penstock.engine.reduce.flat import FlatBuffers, FlatLayout, FlatReducer, PlacedGradient
from penstock.engine.reduce.reducer import Purpose, ServedGradients, SharedWeights
from penstock.engine.transport import Transport, groups
from penstock.engine.transport.base import FIRST_EXCHANGE, gone
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
        group: of the holders of each group of weights, by its tag.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedWeights,
        transport: Transport,
        group: Sequence[dist.ProcessGroup],
    ) -> None:
        super().__init__(rank, shared, transport)
        self._group: dist.ProcessGroup | None = group[shared.tag]
        groups.lend(group[shared.tag], self)
        self._buffers: tuple[FlatLayout, FlatBuffers] | None = None
        self._filled: dict[int, Filled] = {}
        self._to_begin: deque[_FlatBucket] = deque()
        self._under_way: list[dist.Work] = []
        self.closed = False

    def release(self) -> None:
        """Let go of the group, which has been destroyed."""
        self._group = None

    def start(self, layout: FlatLayout) -> None:
        if self._buffers is None or self._buffers[0] is not layout:
            self._buffers = layout, FlatBuffers(layout)
        _, buffers = self._buffers
        self._filled = {dtype: Filled() for dtype in buffers.tensors}
        self._to_begin = deque(
            _FlatBucket(
                dtype, start, min(start + _BUCKET_BYTES // tensor.element_size(), len(tensor))
            )
            for dtype, tensor in buffers.tensors.items()
            for start in range(0, len(tensor), _BUCKET_BYTES // tensor.element_size())
        )

    def give(self, placed: PlacedGradient) -> bool:
        assert self._buffers is not None
        _, buffers = self._buffers
        there = buffers.copy(placed, self._shared.parameters)
        if placed.start < placed.stop:
            self._filled[placed.dtype].add(placed.start, placed.stop)
        # In the order of the buckets, which is the same on all holders.
        while self._to_begin and self._is_filled(self._to_begin[0]):
            dtype, start, stop = self._to_begin.popleft()
            self._under_way.append(self._begun(buffers.tensors[dtype][start:stop]))
        return there

    def _is_filled(self, bucket: _FlatBucket) -> bool:
        return self._filled[bucket.dtype].has(bucket.start, bucket.stop)

    def _begun(self, bucket: Tensor) -> dist.Work:
        try:
            work = dist.all_reduce(bucket, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._lost("summing gradients") from error
        assert isinstance(work, dist.Work)
        return work

    def summed(self, waiting: str) -> FlatBuffers:
        assert self._buffers is not None
        patience = self._transport.patience
        for work in self._under_way:
            try:
                work.wait(timedelta(seconds=patience.seconds))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    raise DeadlineError(
                        f"{waiting}: rank {self._others} did not answer within "
                        f"{patience.seconds:g} s; see what they printed last, or raise "
                        f"{patience.argument}"
                    ) from error
                raise self._lost(waiting) from error
        self._under_way.clear()
        return self._buffers[1]

    @property
    def _others(self) -> str:
        return " or ".join(map(str, sorted(self._shared.others(self._rank))))

    def _lost(self, waiting: str) -> PeerError:
        reason = gone(self._others)
        return PeerError(f"{waiting}: {reason}", reason)

    def close(self, *, failed: bool) -> None:
        self.closed = True


SECRET, JOB = "PENSTOCK_SECRET", "PENSTOCK_JOB"
"""Environment variables that say what workers of a job and its servers must both know."""

DEFAULT_JOB = "job"
_PARTING_SECONDS = 10.0


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
        super().__init__(rank, shared, transport)
        self._sum = numbers[shared.tag]
        self._summing = summing
        self._session = bytes.fromhex(attempt)[:16]
        self._server: SummationServer | None = None
        self._exchange: SumExchange | None = None
        self._round = 0
        self._buffers: tuple[FlatLayout, list[FlatBuffers]] | None = None

    def open(self) -> None:
        """Meet the other holders and the servers.

        Raises:
            InputError: a server beyond this machine, and no secret.
            RunError: a server can't be reached, or refuses.
        """
        spare = [_owner(server) for server in self._summing.servers]
        word, first = secrets.token_hex(16), self._shared.ranks[0]
        addresses = {self._rank: self._listen(word)} if self._rank == first else {}
        if self._rank != first:
            # The first one makes up the secret with which holders know each other.
            *_, word = addresses[first] = self._hear_address(first)
            addresses[self._rank] = self._listen(word)
        for other in self._shared.others(self._rank):
            edge = self._shared.edge(self._rank, other, Purpose.PART)
            self._transport.send(edge, FIRST_EXCHANGE, addresses[self._rank])
        addresses |= {
            rank: self._hear_address(rank) for rank in self._shared.ranks if rank not in addresses
        }
        rates = self._summing.bytes_per_second
        holders = [
            Owner(
                f"rank {rank}",
                addresses[rank][:2],
                key_of(word, ""),
                rates[rank] if rates else 0.0,
            )
            for rank in self._shared.ranks
        ]
        assert self._server is not None
        place = self._shared.ranks.index(self._rank)
        member = Member(self._session, self._sum, place, len(holders))
        self._exchange = SumExchange(member, [*holders, *spare], self._server)

    def _listen(self, word: str) -> tuple[str, int, str]:
        self._server = SummationServer(own_host(), 0, key_of(word, ""))
        return *self._server.address, word

    def _hear_address(self, rank: int) -> tuple[str, int, str]:
        edge = self._shared.edge(rank, self._rank, Purpose.PART)
        waiting = f"rank {self._rank}, waiting for where rank {rank} sums gradients"
        host, port, word = self._transport.recv(edge, FIRST_EXCHANGE, waiting)
        return host, port, word

    def start(self, layout: FlatLayout) -> None:
        if self._buffers is None or self._buffers[0] is not layout:
            # Two for what is given, in turns, since the last one may be needed again; one for sums.
            self._buffers = layout, [FlatBuffers(layout) for _ in range(3)]
        _, buffers = self._buffers
        self._round += 1
        assert self._exchange is not None, "open comes first"
        given = buffers[self._round % 2]
        self._exchange.begin(self._round, given.numbers, buffers[2].numbers, filled=False)

    def give(self, placed: PlacedGradient) -> bool:
        assert self._exchange is not None and self._buffers is not None
        _, buffers = self._buffers
        there = buffers[self._round % 2].copy(placed, self._shared.parameters)
        self._exchange.fill(placed.dtype, placed.start, placed.stop)
        return there

    def summed(self, waiting: str) -> FlatBuffers:
        assert self._exchange is not None and self._buffers is not None
        self._exchange.wait(self._transport.patience.seconds, waiting)
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
