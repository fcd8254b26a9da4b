"""Tensor parallelism as a task: groups of devices that share every layer, and the model as one of
them sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec.structs import replace as with_fields

from penstock.base.errors import PlanError
from penstock.core.cluster import Cluster, Device
from penstock.core.cluster.cluster import only
from penstock.planning.planner.task import Task, TensorGroups

USUAL_BYTES = 2**20
"""Of a message for which links are compared."""


def in_groups(task: Task, num_tensor_ranks: int) -> Task:
    """A task whose devices are groups of ``num_tensor_ranks`` (at least 2) neighbouring devices of
    another task, which has one device for each.

    Raises:
        PlanError: the cluster has fewer devices.
    """
    from penstock.planning.partition.tensor import split_layers  # for the few who ask

    cluster, count = task.cluster, len(task.cluster.devices)
    if num_tensor_ranks > count:
        raise PlanError(
            f"layers cannot be split over {num_tensor_ranks} devices: the cluster has {count}"
        )
    last = count - count % num_tensor_ranks
    members = [range(first, first + num_tensor_ranks) for first in range(0, last, num_tensor_ranks)]
    links = [task.topology.slowest_link(group, USUAL_BYTES) for group in members]
    slowest = max(links, key=lambda link: link.seconds(USUAL_BYTES))
    tensor_split = split_layers(
        task.graph, num_tensor_ranks, slowest, num_microbatches=task.num_microbatches
    )
    groups = tuple(tuple(cluster.devices[index] for index in group) for group in members)
    return replace(
        task,
        graph=tensor_split.graph,
        cluster=of_leaders(cluster, members, groups),
        groups=TensorGroups(groups, tensor_split, task),
    )


def of_leaders(
    cluster: Cluster, members: Sequence[range], groups: Sequence[Sequence[Device]]
) -> Cluster:
    """A cluster with one device for each group: its first one, as slow and as small as the weakest
    in it."""
    leaders = only(cluster, [group[0] for group in members])
    devices = tuple(
        with_fields(
            leader,
            speed=min(device.speed for device in group),
            memory_bytes=min(
                (device.memory_bytes for device in group if device.memory_bytes), default=0
            ),
        )
        for leader, group in zip(leaders.devices, groups, strict=True)
    )
    return with_fields(leaders, devices=devices)


def widths(task: Task) -> Iterator[int]:
    """The sizes of groups worth trying: powers of two, up to all devices."""
    width = 2
    while width <= len(task.cluster.devices):
        yield width
        width *= 2
