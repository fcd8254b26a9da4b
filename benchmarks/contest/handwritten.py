"""What a loop written by hand for two ranks reaches: the yardstick for the engine's own cost.

It does nothing but the schedule: a list of forwards and backwards, plain autograd, and a tensor
handed over wherever two stages meet. It knows no errors, no records, no other models than a chain,
no other shapes than the first microbatch's and no more than two ranks. Losses are on the last rank.
The order of ops is read once from Penstock's schedule, for the same order is what is compared.

Between threads, tensors are handed over as they are. Between processes they lie in one shared area
that lives as long as the contestant, and the receiver computes with them where they lie: a
hand-over is one copy.
"""

from __future__ import annotations

import itertools
import mmap
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.works import Work
from benchmarks.contest.peers import Peer, accumulating
from benchmarks.contest.penstock_peers import schedule_for
from penstock.core.schedule import Kind, Schedule

DEADLINE_SECONDS = 60.0
SPIN_SECONDS = 1e-3
NAP_SECONDS = 50e-6
AREA = "handwritten"
"""What the shared memory is called in ``/proc/*/maps``."""

LINE_BYTES = 64
"""Of a cache line: the counts of different channels lie in different ones."""


class Border(NamedTuple):
    """One way in which tensors cross between neighbouring stages."""

    source: int
    target: int


class Channel(Protocol):
    """Hands over the tensors of one border, in the order of their microbatches."""

    def put(self, tensor: Tensor) -> None:
        """Hand over a tensor that is no part of a graph."""

    def get(self) -> Tensor:
        """Wait for the next tensor."""


class QueueChannel(Channel):
    """Between threads: the tensor itself."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def put(self, tensor: Tensor) -> None:
        self._queue.put(tensor)

    def get(self) -> Tensor:
        return self._queue.get(timeout=DEADLINE_SECONDS)


class RingChannel(Channel):
    """Between processes: slots in shared memory, filled in turn, and a count of how often.

    Nobody tells the sender that a slot is free again: the schedule does. There are as many slots as
    microbatches that the earlier of the two stages has in flight at most. Before that stage begins
    one more, it has gone back through an old one, whose gradient came from the later stage. So both
    are done with the slots of the old one: the later stage with its input, the earlier stage with
    its gradient.

    The count is written after the tensor. x86 shows them to the other process in this order.

    Args:
        count: one integer in shared memory.
        slots: tensors in shared memory. None is a view of another one: autograd would take a change
            of one for a change of all.
    """

    def __init__(self, count: memoryview, slots: Sequence[Tensor]) -> None:
        self._count = count
        self._slots = itertools.cycle(slots)
        self._passed = 0

    def put(self, tensor: Tensor) -> None:
        next(self._slots).copy_(tensor)
        self._passed += 1
        self._count[0] = self._passed

    def get(self) -> Tensor:
        if self._count[0] == self._passed:
            self._wait()
        self._passed += 1
        return next(self._slots)

    def _wait(self) -> None:
        start = time.perf_counter()
        while self._count[0] == self._passed:
            waited = time.perf_counter() - start
            if waited > DEADLINE_SECONDS:
                raise TimeoutError(f"the other rank handed over nothing for {waited:.0f} s")
            if waited > SPIN_SECONDS:
                time.sleep(NAP_SECONDS)


class RankLoop:
    """One rank's ops, and what it takes to perform them.

    Args:
        work: what is trained.
        schedule: of both ranks.
        rank: whose ops these are.
        parts: the layers of every stage.
        channels: for every border.

    Attributes:
        part: the layers of this rank's stages.
        indices: which of the spine's layers they are.
    """

    def __init__(
        self,
        work: Work,
        schedule: Schedule,
        rank: int,
        parts: Sequence[nn.Sequential],
        channels: Mapping[Border, Channel],
    ) -> None:
        held, cut = schedule.stages_of[rank], work.stages(schedule.num_stages)
        self.part = nn.Sequential(*(layer for stage in held for layer in parts[stage]))
        self.indices = [index for stage in held for index in cut[stage]]
        self._ops = [
            (op.kind is Kind.FORWARD, op.stage, op.microbatch) for op in schedule.ranks[rank]
        ]
        self._last = schedule.num_stages - 1
        self._has_loss = self._last in held
        self._parts = parts
        self._channels = channels
        self._loss = work.loss
        self._num_microbatches = work.num_microbatches
        self._share = torch.ones(()) / work.num_microbatches

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Accumulate the gradients of one minibatch; gives its mean loss on the last rank."""
        channels, last = self._channels, self._last
        rows, wanted = (value.chunk(self._num_microbatches) for value in (inputs, targets))
        kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        total = torch.zeros(())
        for is_forward, stage, microbatch in self._ops:
            if is_forward:
                if stage == 0:
                    given = rows[microbatch]
                else:
                    given = channels[Border(stage - 1, stage)].get().detach().requires_grad_()
                value = self._parts[stage](given)
                if stage == last:
                    value = self._loss(value, wanted[microbatch])
                    total += value.detach()
                else:
                    channels[Border(stage, stage + 1)].put(value.detach())
                kept[stage, microbatch] = given, value
            else:
                given, value = kept.pop((stage, microbatch))
                value.backward(
                    self._share if stage == last else channels[Border(stage + 1, stage)].get()
                )
                if stage > 0:
                    channels[Border(stage, stage - 1)].put(given.grad)
        return total / self._num_microbatches if self._has_loss else None


def handwritten_threads(family: str) -> Callable[[Work], Peer]:
    """A schedule of forwards and backwards in two threads: the caller's, and one that stays."""

    def build(work: Work) -> Peer:
        schedule = schedule_for(family, work.num_microbatches)
        parts = parts_of(work, schedule)
        channels = {border: QueueChannel() for border in borders_of(schedule)}
        loops = [RankLoop(work, schedule, rank, parts, channels) for rank in range(2)]
        first, last = (accumulating(work, loop.part, loop.indices, loop.backward) for loop in loops)
        helper = ThreadPoolExecutor(1, initializer=partial(torch.set_num_threads, 1))

        def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
            ending = helper.submit(last.step, inputs, targets)
            first.step(inputs, targets)
            return ending.result()

        part = nn.Sequential(*first.part, *last.part)
        return Peer(part, [*first.indices, *last.indices], step, close=helper.shutdown)

    return build


def handwritten_processes(family: str) -> Callable[[Work], Peer]:
    """A schedule of forwards and backwards in two processes, which share some memory."""

    def build(work: Work) -> Peer:
        schedule = schedule_for(family, work.num_microbatches)
        parts = parts_of(work, schedule)
        channels = rings(work, schedule, parts)
        loop = RankLoop(work, schedule, dist.get_rank(), parts, channels)
        # Without channels there are no slots, and without slots the memory is given back.
        close = channels.clear
        return accumulating(work, loop.part, loop.indices, loop.backward, close=close)

    return build


def parts_of(work: Work, schedule: Schedule) -> list[nn.Sequential]:
    """The layers of every stage."""
    layers, cut = work.layers(), work.stages(schedule.num_stages)
    return [nn.Sequential(*(layers[index] for index in indices)) for indices in cut]


def borders_of(schedule: Schedule) -> list[Border]:
    """Every border, forward and backward."""
    pairs = [*itertools.pairwise(range(schedule.num_stages))]
    return [Border(*pair) for pair in pairs] + [Border(*reversed(pair)) for pair in pairs]


def most_in_flight(schedule: Schedule, stage: int) -> int:
    """How many microbatches a stage has gone forward with and not back, at the most."""
    (rank,) = schedule.ranks_of(stage)
    own = (op for op in schedule.ranks[rank] if op.stage == stage)
    return max(itertools.accumulate(1 if op.kind is Kind.FORWARD else -1 for op in own))


def rings(
    work: Work, schedule: Schedule, parts: Sequence[nn.Sequential]
) -> dict[Border, RingChannel]:
    """A channel for every border, one after the other in shared memory; alike on both ranks."""
    values = [work.inputs.chunk(work.num_microbatches)[0]]
    with torch.no_grad():
        for part in parts[:-1]:
            values.append(part(values[-1]))
    borders = borders_of(schedule)
    num_slots = [most_in_flight(schedule, min(border)) for border in borders]
    rooms = [room_for(values[max(border)]) for border in borders]
    sizes = [LINE_BYTES + count * room for count, room in zip(num_slots, rooms, strict=True)]
    *starts, num_bytes = itertools.accumulate(sizes, initial=0)
    area = area_of_both_ranks(num_bytes)
    channels = {}
    for border, start, size, room in zip(borders, starts, sizes, rooms, strict=True):
        count = memoryview(area)[start : start + 8].cast("q")
        offsets = range(start + LINE_BYTES, start + size, room)
        like = values[max(border)]
        channels[border] = RingChannel(count, [slot(area, offset, like) for offset in offsets])
    return channels


def slot(area: mmap.mmap, offset: int, like: Tensor) -> Tensor:
    """A tensor in an area, with another one's shape and type."""
    flat = torch.frombuffer(area, dtype=like.dtype, count=like.numel(), offset=offset)
    return flat.view(like.shape)


def room_for(value: Tensor) -> int:
    """Bytes that a slot takes, in whole cache lines."""
    return -(-value.nbytes // LINE_BYTES) * LINE_BYTES


def area_of_both_ranks(num_bytes: int) -> mmap.mmap:
    """Zeros that both ranks see. They have no name in the file system, so nothing stays behind."""
    with open(os.memfd_create(AREA), "r+b") as own:
        own.truncate(num_bytes)
        paths = [f"/proc/{os.getpid()}/fd/{own.fileno()}"]
        dist.broadcast_object_list(paths)  # rank 0's
        with open(paths[0], "r+b") as shared:
            area = mmap.mmap(shared.fileno(), num_bytes)
        dist.barrier()  # before rank 0 closes it
    return area
