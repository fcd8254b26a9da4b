"""Bounds that decide before anything is simulated: by how much a candidate misses limits of memory,
and how many seconds a minibatch takes at least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil, inf, lcm
from typing import NamedTuple

from msgspec.structs import replace as with_fields

from penstock.base.units import format_bytes
from penstock.core.graph import Mode
from penstock.planning.planner.setting import Setting
from penstock.planning.planner.task import Task
from penstock.planning.plans.stage_plan import StagePlan
from penstock.planning.plans.summing import BY_SHARE


def least_busy_seconds(task: Task) -> float:
    """No minibatch is shorter, whatever the plan: all devices are busy all the time."""
    everywhere = range(len(task.cluster.devices))
    modes: tuple[Mode, ...] = ("whole", "split", "stream")
    speed = max(sum(1 / pace for pace in task.least_paces(everywhere, mode)) for mode in modes)
    return task.num_microbatches * sum(task.layers.compute_seconds) / speed


def least_step_seconds(
    stages: Sequence[StagePlan], setting: Setting, num_microbatches: int
) -> float:
    """No step with a flush is shorter: the first microbatch must reach each rank, the rank must do
    its work, and then its gradients must be summed; or, where backwards are whole, the last
    gradient must travel back to the first stage and be summed there."""
    # The first slice of a microbatch need not wait for the others.
    share = 1 / setting.schedule.num_slices
    way_in = _way([share * stage.forward_seconds + stage.hop_seconds for stage in stages])
    way_back = _way([share * stage.backward_input_seconds + stage.hop_seconds for stage in stages])
    sums = [
        _least_sum_seconds(stage) if setting.replicas_of(index) > 1 else 0.0
        for index, stage in enumerate(stages)
    ]
    at_first = sums[0] + stages[0].update_seconds
    bounds = []
    for rank_stages in dict.fromkeys(setting.schedule.stages_of):
        work = sum(
            ceil(num_microbatches / setting.replicas_of(stage)) * stages[stage].busy_seconds
            for stage in rank_stages
        )
        updates = sum(stages[stage].update_seconds for stage in rank_stages)
        first = rank_stages[0]
        summed = sums[first] if len(rank_stages) == 1 else 0.0
        bounds.append(way_in[first] + work + summed + updates)
        if not setting.schedule.splits_backward and share == 1:
            bounds.append(way_in[first] + work + way_back[first] + at_first)
    return max(bounds)


def _least_sum_seconds(stage: StagePlan) -> float:
    """How long after its last gradient the sum of a stage's copies is there, at least."""
    exchange = stage.exchange
    if exchange is None:
        return stage.reduce_seconds
    once, others = sum(exchange.seconds), exchange.num_parts - 1
    last = stage.busy_seconds + stage.split_seconds  # as long as parts are made, at most
    more = others * max(exchange.seconds) - last * others / exchange.num_parts
    return once + max(more, 0.0) + exchange.once


def least_steady_seconds(
    stages: Sequence[StagePlan], setting: Setting, num_microbatches: int
) -> float:
    """No minibatch without a flush is shorter: a full pipeline is as fast as its slowest rank or
    link."""
    replicas = [setting.replicas_of(index) for index in range(len(stages))]
    ranks = (
        num_microbatches * stage.busy_seconds / count
        for stage, count in zip(stages, replicas, strict=True)
    )
    # Microbatches take turns on the pairs of replicas at the ends of a cut.
    links = (
        num_microbatches * stage.link_seconds / lcm(*ends)
        for stage, ends in zip(stages, pairwise(replicas), strict=False)
    )
    return max(*ranks, *links, 0.0)


def _way(seconds: Sequence[float]) -> list[float]:
    """When each stage is reached if the ones before it take so long."""
    return list(accumulate(seconds, initial=0.0))


class Excess(NamedTuple):
    """By how many bytes a limit is missed (≤ 0: it is not), and where.

    Attributes:
        rank: whose limit it is; ``None`` where several share it.
    """

    num_bytes: float
    held: float
    limit: float
    place: str
    rank: int | None = None

    def __str__(self) -> str:
        over = f"{format_bytes(self.num_bytes)} over the {format_bytes(self.limit)} allowed"
        return f"{format_bytes(self.held)} {self.place}, {over}"


NO_EXCESS = Excess(-inf, 0, inf, "")
"""Where nothing is limited."""


def worst_excess(task: Task, setting: Setting, held: Mapping[int, int]) -> Excess:
    """The limit of a task that is missed most.

    Args:
        held: bytes that ranks of a setting need: of ``Setting.unlike_ranks``.
    """
    limits = {rank: task.devices.limits[setting.devices[rank]] for rank in held}
    worst = max(held, key=lambda rank: held[rank] - limits[rank])
    place = f"on rank {worst} ({task.cluster.devices[setting.devices[worst]].name})"
    excesses = [_excess(held[worst], limits[worst], place)._replace(rank=worst)]
    for host, limit in task.topology.shared_memories:
        # Who shares layers with a rank shares its host's memory, too.
        on_host = [
            held[rank] * task.devices.num_behind(device)
            for rank, device in enumerate(setting.devices)
            if device in host
        ]
        place = "on all ranks together, which share memory"
        if len(on_host) < setting.num_ranks:
            place = f"on the {len(on_host)} ranks that share a host's memory"
        excesses.append(_excess(sum(on_host), limit, place))
    return max(excesses, key=lambda excess: excess.num_bytes)


def _excess(held: float, limit: float, place: str) -> Excess:
    return Excess(held - limit if limit < inf else -inf, held, limit, place)


def has_limits(task: Task) -> bool:
    """Whether any memory is limited."""
    return min(task.devices.different_memories)[0] < inf or bool(task.topology.shared_memories)


def least_excess(task: Task) -> float:
    """Bytes by which any candidate misses a limit, at least; ≤ 0 where one may fit. Worked out
    once.

    Whoever has a layer has its weights, a gradient of them, its optimizer state and buffers, and at
    some moment all that a microbatch keeps there, room to work included. All layers are somewhere;
    what several of them hold may be there once.
    """
    if not task.cache.excess:
        task.cache.excess.append(_least_excess(task))
    return task.cache.excess[0]


def _least_excess(task: Task) -> float:
    if not has_limits(task):
        return -inf
    largest = max(
        layer.trained_bytes + layer.buffer_bytes + layer.activation_bytes + layer.workspace_bytes
        for layer in task.graph.layers
    )
    roomiest = sorted(task.devices.tensor_limits, reverse=True)
    # On the k devices with most memory, one has at least its share of what is missing.
    spread = min(
        (task.layers.state_bytes - room) / count
        for count, room in enumerate(accumulate(roomiest), start=1)
    )
    everywhere = [
        task.num_tensor_ranks * task.layers.state_bytes - limit
        for host, limit in task.topology.shared_memories
        if len(host) == len(task.devices.limits)
    ]
    return max(largest - roomiest[0], spread, *everywhere)


def lacks_room(task: Task, devices: Sequence[int], replicas: Sequence[int]) -> bool:
    """Whether some ranks certainly have too little memory for a model's weights, gradients and
    optimizer state, however it is cut.

    Args:
        devices: of each rank.
        replicas: how many ranks, which follow one another, have the same stages; empty where
            ranks share none.
    """
    if not has_limits(task) or (room := _room(task, devices, replicas)) == inf:
        return False
    return least_state_bytes(task, replicas) > room


def least_state_bytes(task: Task, replicas: Sequence[int]) -> float:
    """Bytes of weights, gradients, optimizer state and buffers that one copy of all stages has, at
    least.

    Args:
        replicas: as ``lacks_room`` has them.
    """
    parameters, optimizer, buffers = (
        task.layers.sum(name, 0, task.num_layers)
        for name in ("parameter_bytes", "optimizer_bytes", "buffer_bytes")
    )
    copies = max(replicas, default=1)
    if task.reducer in BY_SHARE:
        optimizer /= copies
    elif task.reducer == "parameter-server" and copies > 1:
        optimizer = 0
    return 2 * parameters + optimizer + buffers


def _room(task: Task, devices: Sequence[int], replicas: Sequence[int]) -> float:
    """Bytes that one copy of all stages has, on some ranks."""
    if len(task.devices.different_memories) == 1:
        count = len(replicas) if replicas else len(devices)
        return count * task.devices.limits[0]
    limits = [task.devices.limits[device] for device in devices]
    ends = pairwise(accumulate(replicas, initial=0))
    return sum(min(limits[start:stop]) for start, stop in ends) if replicas else sum(limits)


def limited_like(task: Task, like: Task) -> Task:
    """A task under the memory limits of another task's cluster, which has the same devices; itself
    where it has these limits, and worked out once where it has not."""
    own, others = task.alone, like.alone
    if own.cluster is others.cluster and own.memory_bytes == others.memory_bytes:
        return task
    known: tuple[Task, Task] | None = vars(task).get("limited")
    if known is None or known[0] is not like:
        vars(task)["limited"] = known = like, _limited_like(task, like)
    return known[1]


def _limited_like(task: Task, like: Task) -> Task:
    ranks = range(len(like.cluster.devices))
    limits = {
        device.name: device.memory_bytes for rank in ranks for device in like.devices.behind(rank)
    }
    shared = {group.name: group.memory_bytes for group in like.cluster.groups}

    def limit(index: int) -> int:
        allowed = (limits.get(device.name, 0) for device in task.devices.behind(index))
        return min(filter(None, allowed), default=0)

    cluster = with_fields(
        task.cluster,
        devices=tuple(
            with_fields(device, memory_bytes=limit(index))
            for index, device in enumerate(task.cluster.devices)
        ),
        memory_bytes=like.cluster.memory_bytes,
        groups=tuple(
            with_fields(group, memory_bytes=shared.get(group.name, 0))
            for group in task.cluster.groups
        ),
    )
    return replace(task, cluster=cluster, memory_bytes=like.memory_bytes)
