"""Transport between the processes of a job: shared memory on one host, messages between hosts."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import torch.distributed as dist

from penstock.base.errors import RunError
from penstock.core.cluster.local import host_identity
from penstock.engine.transport import groups, slots
from penstock.engine.transport.base import Edge, Patience, Transport
from penstock.engine.transport.listener import Credentials, RankListener
from penstock.engine.transport.packing import short
from penstock.engine.transport.process_group import ProcessGroupTransport
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.engine.transport.shared_memory import SharedMemoryTransport
from penstock.engine.transport.wire import Codec

TransportKind = Literal["auto", "shared-memory", "process-group"]

_TO_SIT_DOWN = "to say where it runs"


class ProcessTransport(Transport):
    """One rank's end of all channels to the other processes of a job; ``connect`` makes it.

    A rank that waits for another host does not look at its own host meanwhile. It need not: whoever
    waits for a failed rank fails too and says so, and ranks never wait in a circle, so the news
    comes to everyone who waits.

    Args:
        meeting: where all ranks have met; those that wait in torch's collectives look there for the
            failure of another.
        hosts: the host of every rank.
        far: to all ranks; ``None`` if all of them are near.
        near: to the ranks of this host, or ``None``.
        summary: how messages travel, and why so, as a sentence without its end.

    Attributes:
        told: the summary.
        hosts: the host of every rank; equal where they share a clock and memory.
        near_ranks: the ranks with which this one shares memory.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        hosts: Sequence[str],
        far: ProcessGroupTransport | None,
        near: SharedMemoryTransport | None,
        summary: str = "",
    ) -> None:
        self.told = summary
        self._meeting = meeting
        self.hosts = tuple(hosts)
        self.near_ranks = near.ranks if near else frozenset[int]()
        self._far = far
        self._near = near
        if far is None and near is not None:  # nothing to choose between, with every message
            self.send, self.recv = near.send, near.recv  # type: ignore[method-assign]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, if there is one: wherever ranks are on several hosts."""
        return self._far.group if self._far else None

    @property
    def patience(self) -> Patience:
        """How long a message may take."""
        return self._all()[0].patience

    @patience.setter
    def patience(self, patience: Patience) -> None:
        for transport in self._all():
            transport.patience = patience

    def send(self, edge: Edge, number: int, value: Any) -> None:
        self._way(edge.target).send(edge, number, value)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        return self._way(edge.source).recv(edge, number, waiting)

    def has_come(self, edge: Edge, number: int) -> bool | None:
        return self._way(edge.source).has_come(edge, number)

    def _way(self, peer: int) -> Transport:
        if self._near and peer in self.near_ranks:
            return self._near
        assert self._far is not None  # or all ranks would be near
        return self._far

    def failure_heard(self) -> str:
        return self._meeting.failure()

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        edges = list(edges)
        if self._near:
            self._near.fail(reason, [edge for edge in edges if edge.target in self.near_ranks])
        self._meeting.fail(short(reason).decode())
        if self._far:
            self._far.fail(reason, [edge for edge in edges if edge.target not in self.near_ranks])

    def flush(self) -> None:
        for transport in self._all():
            transport.flush()

    def discard(self, before: int) -> None:
        for transport in self._all():
            transport.discard(before)

    def close(self, reason: str) -> None:
        for transport in self._all():
            transport.close(reason)

    def _all(self) -> list[Transport]:
        return [transport for transport in (self._near, self._far) if transport is not None]


class _RankAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank is, and how others of its host reach it; or why they cannot.

    Attributes:
        host: equal for ranks that share a host.
        credentials: of its listener; ``None`` where shared memory is not wanted, or not to be had.
        problem: why it is not to be had; empty where there is none.
    """

    host: str
    credentials: Credentials | None = None
    problem: str = ""


def connect(
    meeting: Rendezvous,
    deadline_seconds: float,
    host: str | None = None,
    way: TransportKind = "auto",
    codec: Codec | None = None,
) -> ProcessTransport:
    """Connect all processes of the job; every one must call it.

    Args:
        meeting: where all processes meet.
        deadline_seconds: how long a message may take, unless ``patience`` is changed; so too
            connecting.
        host: processes that give the same text share memory; default: found out.
        way: ``"shared-memory"`` between all ranks, ``"process-group"`` between all ranks, or
            ``"auto"``: shared memory between ranks of one host if it can be had there (rank 0 warns
            if not), and the process group between hosts.
        codec: describes the values that are sent; by default, one that knows no class of the user.

    Raises:
        RunError: ``way`` is ``"shared-memory"``, and it cannot be had between all ranks.
        PeerError, DeadlineError: another rank did not come.
    """
    own = host or host_identity()
    near, problems = None, list[str]()
    if way == "process-group":
        hosts = [
            seat.host for seat in meeting.exchange(_RankAddress(own), _RankAddress, _TO_SIT_DOWN)
        ]
    else:
        hosts, near, problems = _share_memory(meeting, own, deadline_seconds, codec)
    groups.remember(meeting.processes)
    groups.destroy_unused()  # every rank has come, and so is through with what it has closed
    strangers = [rank for rank, other in enumerate(hosts) if other != hosts[0]]
    if way == "shared-memory" and strangers:
        problems = [f"rank {strangers[0]} is on another host than rank 0"]
    if problems:
        if near is not None:
            near.close("shared memory could not be had everywhere")
        near = None
        _do_without(way, problems[0], meeting.rank)
    summary = _summary(way, hosts, problems)
    if near is not None and len(near.ranks) == meeting.num_ranks - 1:
        return ProcessTransport(meeting, hosts, None, near, summary)
    neighbours = frozenset(rank for rank, other in enumerate(hosts) if other == own)
    group = groups.make_group(deadline_seconds)
    far = ProcessGroupTransport(group, neighbours, deadline_seconds, codec)
    return ProcessTransport(meeting, hosts, far, near, summary)


def _summary(way: TransportKind, hosts: Sequence[str], problems: Sequence[str]) -> str:
    """How messages travel, and why so; the same on every rank."""
    if way != "auto":
        by = "shared memory" if way == "shared-memory" else "the process group"
        return f"messages go through {by}, as transport={way!r} says"
    if problems:
        return f"messages go through the process group, since {problems[0]}"
    if len(set(hosts)) == 1:
        return "messages go through shared memory, since all ranks are on one host"
    if len(set(hosts)) == len(hosts):
        return "messages go through the process group, since every rank is on a host of its own"
    return (
        "messages go through shared memory between ranks of one host, and through the process "
        f"group between the {len(set(hosts))} hosts"
    )


def _share_memory(
    meeting: Rendezvous, host: str, deadline_seconds: float, codec: Codec | None
) -> tuple[list[str], SharedMemoryTransport | None, list[str]]:
    """The hosts of all ranks, shared memory with those of this host, and all ranks' problems."""
    listener, problem = _make_listener(meeting.rank, meeting.num_ranks)
    near = None
    try:
        own = _RankAddress(host, listener.credentials if listener else None, problem)
        seats = meeting.exchange(own, _RankAddress, _TO_SIT_DOWN)
        problems = [seat.problem for seat in seats if seat.problem]
        if listener is not None and not problems:
            near, problem = _connect_near(meeting.rank, listener, seats, deadline_seconds, codec)
            answers = meeting.exchange(problem, str, "to say whether it shares memory")
            problems = [answer for answer in answers if answer]
    except BaseException:
        if near is not None:
            near.close("another rank did not come")
        raise
    finally:
        if listener is not None:
            listener.close()
    return [seat.host for seat in seats], near, problems


def _connect_near(
    rank: int,
    listener: RankListener,
    seats: Sequence[_RankAddress],
    deadline_seconds: float,
    codec: Codec | None,
) -> tuple[SharedMemoryTransport | None, str]:
    """Shared memory with the ranks of this host; or why there is none."""
    neighbours = {
        other: seat.credentials
        for other, seat in enumerate(seats)
        if other != rank and seat.host == seats[rank].host and seat.credentials
    }
    try:
        # The others wait meanwhile for this rank to agree on the outcome, as long again.
        connections = listener.connections(rank, neighbours, deadline_seconds / 2)
    except (OSError, RunError) as error:
        return None, f"rank {rank} could not connect to the others of its host: {error}"
    near = None
    try:
        near = SharedMemoryTransport(rank, connections, deadline_seconds, codec)
        near.meet()
    except RunError as error:
        if near is not None:
            near.close("shared memory could not be had")
        return None, str(error)
    return near, ""


def _make_listener(rank: int, num_ranks: int) -> tuple[RankListener | None, str]:
    """A listener; or why there is none, or no memory to share."""
    try:
        memory, descriptor = slots.allocate(mmap.PAGESIZE, rank, "to try it")
        os.close(descriptor)
        memory.close()
        return RankListener(num_ranks), ""
    except RunError as error:
        return None, str(error)
    except OSError as error:
        return None, f"rank {rank} cannot open a Unix socket: {error}"


def _do_without(way: TransportKind, problem: str, rank: int) -> None:
    """Refuse to do without shared memory, or warn that it is slower; all ranks do the same."""
    if way == "shared-memory":
        raise RunError(
            f"shared memory cannot be had between all ranks: {problem}; use transport='auto' or "
            "'process-group'"
        )
    if rank == 0:
        warnings.warn(
            f"ranks of one host exchange messages through the process group, which is slower than "
            f"shared memory: {problem}; transport='process-group' silences this warning",
            RuntimeWarning,
            stacklevel=4,
        )
