"""Tensor parallelism as a task: groups of devices that share every layer, and the model as one of
them sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as with_fields

from penstock.base.errors import PlanError
from penstock.core.cluster import Cluster, Device
from penstock.core.cluster.subset import only
from penstock.planning.planner.task import Task
from penstock.planning.plans.stage_plan import Split

if TYPE_CHECKING:
    from penstock.planning.partition.tensor import TensorSplit

USUAL_BYTES = 2**20
"""Of a message for which links are compared."""


@dataclass(frozen=True)
class TensorGroups:
    """Who shares layers with whom, and how.

    Attributes:
        devices: those of each group, which stands for one device of the task's cluster.
        tensor_split: which layers are split, and how; where groups are of different sizes, the
            layers of the large ones.
        single: the task without groups.
    """

    devices: tuple[tuple[Device, ...], ...]
    tensor_split: TensorSplit
    single: Task

    @property
    def num_ranks(self) -> int:
        """Devices of the largest group."""
        return max(map(len, self.devices))

    @property
    def are_alike(self) -> bool:
        """Whether all groups are equally large."""
        return len({*map(len, self.devices)}) == 1

    def splits(self, layers: Sequence[str]) -> dict[str, Split]:
        """How the group shares some layers, by their names."""
        return {name: self._split(name) for name in layers}

    def _split(self, name: str) -> Split:
        split = self.tensor_split.splits[name]
        return "whole" if split == "any" and self.tensor_split.layouts[name] == "whole" else split


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
