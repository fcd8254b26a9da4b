"""Transport between processes: ``torch.distributed`` point-to-point messages.

gloo has three habits, all measured. It is rendezvous at every size, so sends are kept under way in
the background. Its receiver must know the size, so both ends remember how large the blocks of an
edge have been, and announce growth. A receive posted early makes its thread spin beside the
compute, so a receive is posted only when its op is next.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import DeadlineError, PeerError, RunError
from penstock.transport import packing
from penstock.transport.base import Edge, Transport
from penstock.transport.packing import BlockKind

_FIRST_CAPACITY = 4096
_MOST_UNDER_WAY = 4
_PARTING_SECONDS = 1.0


class ProcessGroupTransport(Transport):
    """One rank's end of all channels to the other processes.

    Args:
        num_ranks: processes that take part: the first ones of the default group. Every process of
            the job must construct it, since making a group is collective.
        deadline_seconds: how long a message may take.
    """

    def __init__(self, num_ranks: int, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        timeout = datetime.timedelta(seconds=deadline_seconds)
        self.group = dist.new_group(list(range(num_ranks)), timeout=timeout, backend="gloo")
        self._capacity: dict[Edge, int] = defaultdict(lambda: _FIRST_CAPACITY)
        self._under_way: dict[Edge, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._early: dict[tuple[Edge, int], Any] = {}

    def send(self, edge: Edge, microbatch: int, value: Any) -> None:
        header, tensors = packing.describe(value)
        size = packing.block_size(header, tensors)
        if size > self._capacity[edge]:
            self._post(edge, packing.pack_notice(BlockKind.GROW, size))
            self._capacity[edge] = size
        self._post(edge, packing.pack(microbatch, header, tensors))

    def _post(self, edge: Edge, block: Tensor) -> None:
        under_way = self._under_way[edge]
        waiting = f"rank {edge.source}, sending to rank {edge.target}"
        while len(under_way) >= _MOST_UNDER_WAY:
            self._finish(under_way.popleft()[0], edge.target, waiting)
        try:
            work = dist.isend(block, edge.target, group=self.group, tag=edge.tag)
        except RuntimeError as error:
            raise self._translated(error, edge.target, waiting) from error
        if work is not None:
            under_way.append((work, block))

    def _finish(self, work: dist.Work, peer: int, waiting: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._translated(error, peer, waiting) from error

    def recv(self, edge: Edge, microbatch: int, waiting: str) -> Any:
        wanted = (edge, microbatch)
        while wanted not in self._early:
            block = self._receive(edge, waiting)
            kind, number, header = packing.read_prefix(block)
            if kind is BlockKind.FAILURE:
                reason = header.decode()
                raise PeerError(f"{waiting}: cancelled because {reason}", reason)
            if kind is BlockKind.GROW:
                self._capacity[edge] = number
                continue
            self._early[edge, number] = packing.unpack(block, header)
        return self._early.pop(wanted)

    def _receive(self, edge: Edge, waiting: str) -> Tensor:
        block = torch.empty(self._capacity[edge], dtype=torch.uint8)
        try:
            dist.recv(block, edge.source, group=self.group, tag=edge.tag)
        except RuntimeError as error:
            raise self._translated(error, edge.source, waiting) from error
        return block

    def _translated(self, error: RuntimeError, peer: int, waiting: str) -> RunError:
        if "timed out" in str(error).lower():
            return DeadlineError(
                f"{waiting}: rank {peer} did not answer within {self._deadline_seconds:g} s; "
                "if its work takes longer, raise deadline_seconds"
            )
        reason = f"rank {peer} is gone (its process ended or was killed)"
        return PeerError(f"{waiting}: {reason}", reason)

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        notice = packing.pack_notice(BlockKind.FAILURE, text=reason)
        parting = []
        for edge in edges:
            # A rank that is gone needs no notice.
            with contextlib.suppress(RuntimeError):
                parting.append(dist.isend(notice, edge.target, group=self.group, tag=edge.tag))
        for work in parting:
            if work is not None:
                with contextlib.suppress(RuntimeError):
                    work.wait(datetime.timedelta(seconds=_PARTING_SECONDS))

    def flush(self) -> None:
        for edge, under_way in self._under_way.items():
            waiting = f"rank {edge.source}, end of the step, sending to rank {edge.target}"
            while under_way:
                self._finish(under_way.popleft()[0], edge.target, waiting)
