"""Which device is which rank: of a few devices all orders that differ, good ones of many."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations, pairwise, permutations
from math import inf

from msgspec.structs import replace

from penstock.core.cluster import Cluster, Device
from penstock.planning.planner.setting import Setting
from penstock.planning.planner.task import Task

ReplicaShape = tuple[tuple[int, ...], tuple[int, ...]]
"""(replicas of each stage, devices of each rank)."""

_FEW_DEVICES, _FEW_LAYERS = 4, 8
"""Of so many, all orders are tried, and any number of replicas at each stage."""

_SOME_DEVICES = 6
"""Of so many, any number of replicas at each stage is tried, but not all orders."""

_MOST_SWAPPED = 16
"""Devices of clusters in which any two change places to see whether that is better."""


def are_few(task: Task) -> bool:
    """Whether all orders are tried."""
    return len(task.cluster.devices) <= _FEW_DEVICES and task.num_layers <= _FEW_LAYERS


def are_some(task: Task) -> bool:
    """Whether all replicas are tried, if in good orders only."""
    return len(task.cluster.devices) <= _SOME_DEVICES


def orders(task: Task, num_ranks: int) -> list[tuple[int, ...]]:
    """Devices for so many ranks: of a few, all orders that make a difference; of many, as they are
    listed; the fastest, in three orders, or of some devices in all that make a difference; those
    with most memory first, because the first stages hold most; and those that come first if all are
    ordered by speed or memory."""
    if are_few(task):
        return _different_orders(task, range(len(task.cluster.devices)), num_ranks)
    listed = range(len(task.cluster.devices))
    devices = task.cluster.devices
    fastest = sorted(listed, key=lambda index: -devices[index].speed)[:num_ranks]
    roomiest = sorted(listed, key=lambda index: -task.devices.limits[index])[:num_ranks]
    choices = [
        tuple(listed[:num_ranks]),
        tuple(sorted(fastest)),
        tuple(fastest),
        tuple(roomiest),
    ]
    if len({devices[index].speed for index in fastest}) > 1:
        choices.insert(3, tuple(reversed(fastest)))
    choices += (tuple(order[:num_ranks]) for order in unlike_first(task, listed))
    if are_some(task) and num_ranks <= _FEW_DEVICES:
        choices += _different_orders(task, fastest, num_ranks)
    return list(dict.fromkeys(choices))


def all_shapes(task: Task) -> Iterator[ReplicaShape]:
    """All replicas of stages on a few devices, in all orders that make a difference; on some more,
    in good ones."""
    for num_ranks in range(2, len(task.cluster.devices) + 1):
        every_order = orders(task, num_ranks)
        for num_stages in range(1, min(num_ranks - 1, task.num_layers) + 1):
            for ends in combinations(range(1, num_ranks), num_stages - 1):
                counts = tuple(end - start for start, end in pairwise((0, *ends, num_ranks)))
                yield from ((counts, order) for order in every_order)


def orders_for(task: Task, counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Devices for stages with given replicas: those of a stage near each other, or the stages of a
    pipeline."""
    if are_few(task):
        return _different_orders(task, range(len(task.cluster.devices)), sum(counts))
    choices = []
    for order in unlike_first(task, range(len(task.cluster.devices))):
        choices.append(tuple(order[: sum(counts)]))
        if not task.devices.is_flat:
            choices.append(tuple(order[number] for number in pipeline_by_pipeline(counts)))
    return list(dict.fromkeys(choices))


def _different_orders(task: Task, pool: Iterable[int], num_ranks: int) -> list[tuple[int, ...]]:
    different: dict[Hashable, tuple[int, ...]] = {}
    for order in permutations(pool, num_ranks):
        different.setdefault(task.devices.appearance(order), order)
    return list(different.values())


def unlike_first(task: Task, pool: Sequence[int]) -> list[list[int]]:
    """Some devices in the orders that bring equal ones together: as listed, fastest first, slowest
    first, and those with most memory first or last."""
    speeds = {index: task.cluster.devices[index].speed for index in pool}
    limits = {index: task.devices.limits[index] for index in pool}
    choices = [[*pool]]
    for numbers in (speeds, limits):
        if len({*numbers.values()}) > 1:
            choices.append(sorted(pool, key=numbers.__getitem__, reverse=True))
            choices.append(sorted(pool, key=numbers.__getitem__))
    return choices


def pipeline_by_pipeline(counts: Sequence[int]) -> tuple[int, ...]:
    """The devices of ranks, which go stage by stage, where the first replicas of all stages come
    first, then the second ones, and so on."""
    seats = [(replica, stage) for stage, count in enumerate(counts) for replica in range(count)]
    device = {seat: number for number, seat in enumerate(sorted(seats))}
    return tuple(device[seat] for seat in seats)


def swapped(task: Task, setting: Setting) -> Iterator[tuple[int, ...]]:
    """The devices of ranks, but for two unlike ones of different stages that change places, one of
    which may have been idle; nothing for clusters of many devices, or where all orders are tried.
    """
    if are_few(task) or len(task.cluster.devices) > _MOST_SWAPPED:
        return
    # Of some devices also equal ones on other hosts, since links may be slow.
    paths = task.topology.paths if are_some(task) else [()] * len(task.cluster.devices)
    kinds = [
        (device.speed, limit, tuple(path))
        for device, limit, path in zip(
            task.cluster.devices, task.devices.limits, paths, strict=True
        )
    ]
    stages = {rank: stage for stage, ranks in enumerate(setting.ranks_of) for rank in ranks}
    for first, second in combinations(range(setting.num_ranks), 2):
        own, other = setting.devices[first], setting.devices[second]
        if kinds[own] != kinds[other] and stages[first] != stages[second]:
            devices = [*setting.devices]
            devices[first], devices[second] = other, own
            yield tuple(devices)
    for rank, own in enumerate(setting.devices):
        for idle in {*range(len(kinds))} - {*setting.devices}:
            if kinds[own] != kinds[idle]:
                yield (*setting.devices[:rank], idle, *setting.devices[rank + 1 :])


_DeviceKey = tuple[float, float, float, float, str]


def in_canonical_order(cluster: Cluster) -> Cluster:
    """The cluster with its devices listed by what they are, and not as somebody wrote them: those
    of a group one after another, fast and roomy ones first; as it is where wires join single
    devices. Equal ones keep their order."""
    if cluster.wires:
        return cluster
    groups = {group.name: group for group in cluster.groups}
    parents = {name: group.name for group in cluster.groups for name in group.members}
    children: dict[str, dict[str, None]] = {}
    for device in cluster.devices:
        name = device.name
        while name:
            parent = parents.get(name, "")
            children.setdefault(parent, {})[name] = None
            name = parent

    def sorted_below(name: str) -> tuple[list[_DeviceKey], str, list[str]]:
        """(keys of the devices of a group, what else it is like, their names in order)."""
        if name in devices:
            return [_key_of(devices[name])], "", [name]
        own = sorted(map(sorted_below, children[name]), key=lambda child: child[:2])
        group = groups.get(name)
        like = "" if group is None else repr((group.link, group.card, group.memory_bytes))
        return (
            [key for keys, _, _ in own for key in keys],
            like + "".join(text for _, text, _ in own),
            [below for _, _, names in own for below in names],
        )

    devices = {device.name: device for device in cluster.devices}
    *_, names = sorted_below("")
    return replace(cluster, devices=tuple(devices[name] for name in names))


def _key_of(device: Device) -> _DeviceKey:
    memory = device.memory_bytes or inf
    price, kind = device.price_per_hour, device.kind or ""
    return -device.speed, -memory, device.allocator_slack, price, kind
