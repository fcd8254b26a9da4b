"""The same task in other words, and candidates that come of that: devices in groups that share
every layer, groups behind one cut only, and layers in another order.

With tensor parallelism throughout, a task has one graph: the model as one device of a group sees it
(``in_groups``). Convolutions on replicas, each on one device, and linear layers on one group ("one
weird trick", Krizhevsky, arXiv 1404.5997) are plans of two stages, of which only the second one's
layers are shared (``mixed``). There the graph is that of single devices up to the cut and that of a
group behind it, so it belongs to its cut, and nothing may move that. Cuts are ranked by a formula,
and the best few are priced and simulated as everything else.

Branching models may be cut where no prefix of their execution order ends: their layers are put into
another order first (``in_other_orders``, ``learned``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from msgspec.structs import replace as with_fields

from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Cluster, Device, Link, Topology
from penstock.core.cluster.cluster import only
from penstock.core.schedule import families
from penstock.core.schedule.lower import add_update
from penstock.core.timing.simulator import simulate
from penstock.core.versions import Flush
from penstock.planning.partition import best_partition
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import with_cuts
from penstock.planning.planner.groups import TensorGroups
from penstock.planning.planner.hosts import links_of_groups
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.request import PLAIN, Constraints
from penstock.planning.planner.task import Task

if TYPE_CHECKING:
    from penstock.planning.partition.placement import Stages
    from penstock.planning.partition.tensor import TensorSplit


_USUAL_BYTES = 2**20
"""Of a message for which links are compared."""


def in_other_orders(task: Task) -> Iterator[Task]:
    """The task with its layers in other orders: those that the exact partitions of the graph, in
    the steady state, have."""
    names = [layer.name for layer in task.graph.layers]
    for updates in (1 / task.num_microbatches, 1.0):
        for straight in (False, True):
            partition = best_partition(
                task.graph,
                task.cluster,
                task.communication,
                updates=updates,
                straight=straight,
                order="any",
            )
            order = [name for stage in partition.stages for name in stage.layers]
            if order != names:
                names = order
                yield replace(task, graph=task.graph.reordered(order))


def learned(task: Task, constraints: Constraints) -> Candidate | None:
    """The candidate whose placement of layers on devices a policy learned by trial and error,
    judged by simulations of 1F1B (``planning.partition.placement.learned``); ``None`` if it does
    not fit.

    Args:
        task: with devices that are all used, or fewer.
        constraints: what may run twice.
    """
    from penstock.planning.partition.placement import (  # for those who ask
        learned_placement,
        stage_costs,
    )

    link = task.topology.slowest_link(range(len(task.cluster.devices)), _USUAL_BYTES)

    def score(stages: Stages) -> float:
        schedule = families.build(
            PLAIN, num_ranks=len(stages), num_microbatches=task.num_microbatches
        )
        return simulate(add_update(schedule), stage_costs(task.graph, stages, link)).makespan

    num_devices = min(len(task.cluster.devices), task.num_layers)
    stages = learned_placement(task.graph, num_devices, score).stages
    return _placed_candidate(task, constraints, stages)


def _placed_candidate(
    task: Task, constraints: Constraints, stages: Sequence[Sequence[str]]
) -> Candidate | None:
    order = [name for stage in stages for name in stage]
    cuts = tuple(accumulate(map(len, stages), initial=0))
    placed = replace(task, graph=task.graph.reordered(order), marks=cuts)
    offer = Offer(PLAIN, tuple(range(len(stages))), recompute=constraints.recompute)
    candidate = with_cuts(placed, offer.setting(placed), cuts)
    return candidate if candidate.fits else None


_LEAN = (1e-3, 1.0)
"""Seconds that a minibatch may take longer for a GB less on each device, in the seconds that all
layers take: a little for a lot, and whatever it takes."""


def in_groups(
    task: Task, num_tensor_ranks: int, *, elsewhere: bool = False, by_positions: bool = False
) -> Iterator[Task]:
    """The task whose devices are groups of ``num_tensor_ranks`` (at least 2) neighbouring devices
    of another task, which has one device for each: with the fastest split and, where memory is
    short, with those that need less. Where groups would straddle hosts, which slows all of them, it
    also comes with groups inside hosts, and devices that are left over.

    Args:
        elsewhere: whether another engine is to run the plan.
        by_positions: whether they divide the sequence, and nothing else.

    Raises:
        PlanError: the cluster has fewer devices.
    """
    count = len(task.cluster.devices)
    if num_tensor_ranks > count:
        raise PlanError(
            f"layers cannot be split over {num_tensor_ranks} devices: the cluster has {count}"
        )
    everywhere = _neighbours(range(count), num_tensor_ranks)
    shared = _positions_shared_by if by_positions else partial(_shared_by, elsewhere=elsewhere)
    yield from shared(task, everywhere)
    hosts = task.topology.hosts
    if any(len({hosts[device] for device in group}) > 1 for group in everywhere):
        inside = [
            group
            for _, host in groupby(range(count), hosts.__getitem__)
            for group in _neighbours([*host], num_tensor_ranks)
        ]
        if inside:
            yield from shared(task, inside)


def _neighbours(devices: Sequence[int], width: int) -> list[range]:
    """Groups of devices that follow one another, as many as there are."""
    starts = range(0, len(devices) - width + 1, width)
    return [range(devices[start], devices[start] + width) for start in starts]


def _shared_by(task: Task, members: Sequence[range], *, elsewhere: bool) -> Iterator[Task]:
    """The task with these groups for devices, with each split that is worth trying."""
    from penstock.planning.partition.tensor import split_layers  # for the few who ask

    split = partial(
        split_layers,
        task.graph,
        len(members[0]),
        _slowest_link(task, members),
        num_microbatches=task.num_microbatches,
        speed=_slowest_speed(task, members),
        elsewhere=elsewhere,
    )
    shared = _of_groups(task, members)
    chosen = [split()]
    yield shared(chosen[0])
    limit = min(task.devices.tensor_limits) * len(members)
    for price in _LEAN if _total_bytes(chosen[0]) > _SHORT * limit else ():
        leaner = split(seconds_per_byte=price * chosen[0].seconds / 1e9)
        if _total_bytes(leaner) < _LESS * min(map(_total_bytes, chosen)):
            chosen.append(leaner)
            yield shared(leaner)


def _positions_shared_by(task: Task, members: Sequence[range]) -> Iterator[Task]:
    """The task with these groups for devices, each of which divides the sequence."""
    from penstock.planning.partition.context import share_positions  # for the few who ask

    split = share_positions(
        task.graph,
        len(members[0]),
        _slowest_link(task, members),
        num_microbatches=task.num_microbatches,
        speed=_slowest_speed(task, members),
    )
    yield _of_groups(task, members)(split)


def _slowest_link(task: Task, members: Sequence[range]) -> Link:
    links = links_of_groups(task.topology, members, _USUAL_BYTES)
    return max(links, key=lambda link: link.seconds(_USUAL_BYTES))


def _slowest_speed(task: Task, members: Sequence[range]) -> float:
    devices = task.cluster.devices
    return min(devices[index].speed for group in members for index in group)


def _of_groups(task: Task, members: Sequence[range]) -> Callable[[TensorSplit], Task]:
    """For a split, the task whose devices are groups that share layers by it. How groups are joined
    is worked out once for all splits."""
    groups = tuple(tuple(task.cluster.devices[index] for index in group) for group in members)
    cluster = _of_leaders(task.cluster, members, groups)
    topology = Topology(cluster)

    def shared(split: TensorSplit) -> Task:
        made = replace(
            task,
            graph=split.graph,
            cluster=cluster,
            groups=TensorGroups(groups, split, task.graph, task.topology),
            undivided=task,
        )
        vars(made)["topology"] = topology
        return made

    return shared


_SHORT = 0.5
_LESS = 0.99


def _total_bytes(split: TensorSplit) -> int:
    """Bytes that all stages together take on a device of each group, with one microbatch."""
    return sum(layer.trained_bytes + layer.activation_bytes for layer in split.graph.layers)


def _of_leaders(
    cluster: Cluster, members: Sequence[range], groups: Sequence[Sequence[Device]]
) -> Cluster:
    """A cluster with one device for each group: its first one, as slow and as small as the weakest
    in it."""
    leaders = only(cluster, [group[0] for group in members])
    devices = tuple(map(_weakest, leaders.devices, groups))
    return leaders if devices == leaders.devices else with_fields(leaders, devices=devices)


def _weakest(leader: Device, group: Sequence[Device]) -> Device:
    """The first device of a group, as slow and as small as the weakest in it."""
    speed = min(device.speed for device in group)
    memory = min((device.memory_bytes for device in group if device.memory_bytes), default=0)
    if (speed, memory) == (leader.speed, leader.memory_bytes):
        return leader
    return with_fields(leader, speed=speed, memory_bytes=memory)


def widths(task: Task) -> Iterator[int]:
    """The sizes of groups worth trying: powers of two, up to all devices; of many hosts, no more
    than one has, since groups that straddle hosts wait for their cards in every layer."""
    count, width = len(task.cluster.devices), 2
    largest = max(
        Counter(host for host in task.topology.hosts if host >= 0).values(), default=count
    )
    while width <= min(count, max(largest, _FEW_TENSOR_RANKS)):
        yield width
        width *= 2


_FEW_TENSOR_RANKS = 16
"""So many are tried however small hosts are."""

_MOST_CUTS = 3


def mixed(tasks: Sequence[Task], constraints: Constraints) -> Iterator[Candidate]:
    """The candidates that fit: replicas of the first layers, and one group for the others.

    Args:
        tasks: those of single devices, and those of groups, whose splits rank the cuts.
    """
    if constraints.schedule not in (None, PLAIN) or constraints.stages not in (None, 2):
        return
    if constraints.cuts or constraints.replicas or constraints.versions is not None:
        return
    for task in tasks:
        if task.groups is None and task.reducer == "owners" and _is_chain(task):
            seen = {
                other.groups.num_ranks: other.groups.tensor_split
                for other in tasks
                if other.groups is not None and other.undivided is task
            }
            yield from _of(task, seen, constraints)


def _is_chain(task: Task) -> bool:
    """Whether whatever layers read comes from the one before them, and nothing is tied."""
    layers = task.graph.layers
    return not task.layers.ties and not any(
        layer.inputs is not None or layer.after or layer.skip_bytes for layer in layers
    )


def _of(
    task: Task, seen: Mapping[int, TensorSplit], constraints: Constraints
) -> Iterator[Candidate]:
    for width, split in seen.items():
        replicas = min(len(task.cluster.devices) - width, task.num_microbatches)
        if replicas < 1 or (replicas > 1 and not constraints.any_replicas):
            continue
        for cut in _promising(task, split, width, replicas):
            with suppress(InputError, PlanError):
                candidate = _candidate(task, width, replicas, cut, constraints)
                if candidate.fits:
                    yield candidate


def _promising(task: Task, split: TensorSplit, width: int, replicas: int) -> list[int]:
    """The cuts that promise most: the slower stage sets the pace, and sums come behind it."""
    count = task.num_microbatches
    before = [*accumulate(task.layers.compute_seconds, initial=0.0)]
    behind = [*accumulate((layer.compute_seconds for layer in split.graph.layers), initial=0.0)]
    parameters = [*accumulate((layer.parameter_bytes for layer in task.graph.layers), initial=0)]

    def seconds(cut: int) -> float:
        front, back = before[cut] / replicas, behind[-1] - behind[cut]
        link = task.devices.link_between(range(replicas), [replicas], _crossing(task, cut, width))
        hop = link.seconds(_crossing(task, cut, width))
        summed = 2 * (replicas - 1) / replicas * link.seconds(parameters[cut])
        return count * max(front, back, hop) + min(front, back) + 2 * hop + summed

    return sorted(range(1, task.num_layers), key=seconds)[:_MOST_CUTS]


def _crossing(task: Task, cut: int, width: int) -> int:
    """Bytes that a microbatch brings over the cut, on an average of there and back: every member
    gets the value, and one of them sends its gradient."""
    return task.layers.crossing_bytes[cut] * (width + 1) // 2


def _candidate(
    task: Task, width: int, replicas: int, cut: int, constraints: Constraints
) -> Candidate:
    from penstock.planning.partition.tensor import split_layers  # for the few who ask

    group = range(replicas, replicas + width)
    link = task.topology.slowest_link(group, _USUAL_BYTES)
    graph = task.graph
    behind = with_fields(
        graph,
        layers=graph.layers[cut:],
        input_bytes=task.layers.crossing_bytes[cut],
        other_sizes=(),
    )
    speed = min(task.cluster.devices[index].speed for index in group)
    split = split_layers(behind, width, link, num_microbatches=task.num_microbatches, speed=speed)
    *front, last = graph.layers[:cut]
    last = with_fields(last, output_bytes=_crossing(task, cut, width))
    members = [*(range(index, index + 1) for index in range(replicas)), group]
    devices = tuple(tuple(task.cluster.devices[index] for index in own) for own in members)
    made = replace(
        task,
        graph=with_fields(graph, layers=(*front, last, *split.graph.layers), other_sizes=()),
        cluster=_of_leaders(task.cluster, members, devices),
        groups=TensorGroups(devices, split, graph, task.topology),
        undivided=task,
    )
    counts = (replicas, 1) if replicas > 1 else ()
    offer = Offer(PLAIN, tuple(range(replicas + 1)), Flush(), counts, (), constraints.recompute)
    return with_cuts(made, offer.setting(made), (0, cut, task.num_layers))
