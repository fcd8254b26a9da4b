"""Transport between the processes of a job: shared memory on one host, messages between hosts."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch.distributed as dist

from penstock.errors import RunError
from penstock.transport import segment
from penstock.transport.base import Edge, Transport
from penstock.transport.meeting import Doorway, this_host
from penstock.transport.process_group import ProcessGroupTransport
from penstock.transport.shared_memory import SharedMemoryTransport
from penstock.transport.wire import Codec

Way = Literal["auto", "shared-memory", "process-group"]


class ProcessTransport(Transport):
    """One rank's end of all channels to the other processes of a job; ``connect`` makes it.

    A rank that waits for another host does not look at its own host meanwhile. It need not: whoever
    waits for a failed rank fails too and says so, and ranks never wait in a circle, so the news
    comes to everyone who waits.

    Args:
        far: to all ranks.
        near: to the ranks of this host, or ``None``.

    Attributes:
        group: the process group, for what all ranks do together.
        near_ranks: the ranks with which this one shares memory.
    """

    def __init__(self, far: ProcessGroupTransport, near: SharedMemoryTransport | None) -> None:
        self.group = far.group
        self.near_ranks = near.ranks if near else frozenset[int]()
        self._far = far
        self._near = near

    def send(self, edge: Edge, number: int, value: Any) -> None:
        self._way(edge.target).send(edge, number, value)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        return self._way(edge.source).recv(edge, number, waiting)

    def _way(self, peer: int) -> Transport:
        return self._near if self._near and peer in self.near_ranks else self._far

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        edges = list(edges)
        if self._near:
            self._near.fail(reason, [edge for edge in edges if edge.target in self.near_ranks])
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
        return [self._near, self._far] if self._near else [self._far]


def connect(
    num_ranks: int,
    deadline_seconds: float,
    host: str | None = None,
    way: Way = "auto",
    codec: Codec | None = None,
) -> ProcessTransport:
    """Connect the first ``num_ranks`` processes of the default group; every process must call it.

    Args:
        num_ranks: processes that take part.
        deadline_seconds: how long a message may take.
        host: processes that give the same text share memory; default: found out.
        way: ``"shared-memory"`` between all ranks, ``"process-group"`` between all ranks, or
            ``"auto"``: shared memory between ranks of one host if it can be had there (rank 0 warns
            if not), and the process group between hosts.
        codec: describes the values that are sent; by default, one that knows no class of the user.

    Raises:
        RunError: ``way`` is ``"shared-memory"``, and it cannot be had between all ranks.
    """
    host = host or this_host()
    codec = codec or Codec()
    far = ProcessGroupTransport(num_ranks, deadline_seconds, host, codec)
    rank = dist.get_rank()
    if way == "process-group" or rank >= num_ranks:
        return ProcessTransport(far, None)
    near, problems = _share_memory(far, rank, deadline_seconds, host, codec)
    if way == "shared-memory" and near is not None and len(near.ranks) < num_ranks - 1:
        problems.append(f"rank {rank} is on another host than others")
    answers: list[Any] = [None] * num_ranks
    dist.all_gather_object(answers, problems, group=far.group)
    problems = [problem for answer in answers for problem in answer]
    if not problems:
        return ProcessTransport(far, near)
    if near is not None:
        near.close("shared memory could not be had everywhere")
    if way == "shared-memory":
        raise RunError(
            f"shared memory cannot be had between all ranks: {problems[0]}; use transport='auto' "
            "or 'process-group'"
        )
    if rank == 0:
        warnings.warn(
            f"ranks of one host exchange messages through the process group, which is slower than "
            f"shared memory: {problems[0]}; transport='process-group' silences this warning",
            RuntimeWarning,
            stacklevel=3,
        )
    return ProcessTransport(far, None)


def _share_memory(
    far: ProcessGroupTransport, rank: int, deadline_seconds: float, host: str, codec: Codec
) -> tuple[SharedMemoryTransport | None, list[str]]:
    """Shared memory with the ranks of this host; and what went wrong."""
    answers: list[Any] = [None] * dist.get_world_size(far.group)
    doorway, problem = _open_doorway(rank, len(answers))
    own = (host, doorway.invitation if doorway else None)
    dist.all_gather_object(answers, own, group=far.group)
    if doorway is None:
        return None, [problem]
    if any(invitation is None for _, invitation in answers):
        doorway.close()
        return None, []  # the rank that could not says why
    neighbours = {
        other: invitation
        for other, (name, invitation) in enumerate(answers)
        if other != rank and name == host
    }
    try:
        # The others wait meanwhile for this rank to agree on the outcome, as long again.
        connections = doorway.connections(rank, neighbours, deadline_seconds / 2)
    except (OSError, RunError) as error:
        return None, [f"rank {rank} could not connect to the others of its host: {error}"]
    finally:
        doorway.close()
    return SharedMemoryTransport(rank, connections, deadline_seconds, codec), []


def _open_doorway(rank: int, num_ranks: int) -> tuple[Doorway | None, str]:
    """A doorway, or why there is none or no memory to share."""
    try:
        memory, descriptor = segment.allocate(mmap.PAGESIZE, rank, "to try it")
        os.close(descriptor)
        memory.close()
        return Doorway(num_ranks), ""
    except RunError as error:
        return None, str(error)
    except OSError as error:
        return None, f"rank {rank} cannot open a Unix socket: {error}"
