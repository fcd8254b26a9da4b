"""Where nothing fits: what is over by how much, and the smallest change that would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace as replaced

from msgspec.structs import replace

from penstock.base.units import format_bytes
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.race import fastest
from penstock.planning.planner.task import Task
from penstock.planning.planner.why import coarsely
from penstock.planning.planner.wish import Wish

_TIMES_AS_MANY = (2, 4)


def shortfall(nearest: Candidate | None, tasks: Sequence[Task], wish: Wish) -> str:
    """The message for a request that no memory limit allows.

    Args:
        nearest: the candidate that misses its limits by the fewest bytes, if there is any.
        tasks: one per microbatch size.
    """
    if nearest is None:
        return "no plan fits in memory: nothing that was asked for can be built"
    coarse = nearest.task.is_coarse and not wish.cuts
    where = f" of those {coarsely(nearest.task)}" if coarse else ""
    missed = f"no plan fits in memory; the closest{where}, {nearest}, needs {nearest.excess}"
    for change, candidate in _changes(tasks, wish):
        fits = f"{candidate} fits ({format_bytes(max(candidate.rank_bytes))} on a rank)"
        return f"{missed}: allow that much more, or {change}, and {fits}"
    return f"{missed}: allow that much, or profile smaller microbatches"


def _changes(tasks: Sequence[Task], wish: Wish) -> Iterator[tuple[str, Candidate]]:
    """(what to change, what then fits), the smallest change first."""
    free = replaced(
        wish, schedule=None, options=(), stages=None, cuts=(), replicas=(), any_replicas=True
    )
    smaller = [
        replaced(
            task,
            graph=task.graph.at(size),
            num_microbatches=task.num_microbatches * task.graph.microbatch_size // size,
        )
        for task in tasks
        for size in task.graph.sizes
        if size < task.graph.microbatch_size and task.graph.microbatch_size % size == 0
    ]
    steps = (
        ("allow recomputing", tasks, replaced(wish, recompute="where-needed")),
        ("leave schedule, stages and cuts to the planner", tasks, free),
        ("leave recomputing to it too", tasks, replaced(free, recompute="where-needed")),
        ("take smaller microbatches", smaller, replaced(free, recompute="where-needed")),
    )
    for change, chosen, what in steps:
        if chosen and (what != wish or chosen is not tasks):
            candidate = fastest(chosen, what)
            if candidate is not None:
                yield change, candidate
    for times in _TIMES_AS_MANY:
        more = [with_more_devices(task, times) for task in tasks]
        candidate = fastest(more, replaced(free, recompute="where-needed"))
        if candidate is not None:
            count = len(more[0].cluster.devices) * more[0].num_tensor_ranks
            yield f"give it {count} devices like these", candidate


def with_more_devices(task: Task, times: int) -> Task:
    """The same cluster several times over, servers and all; memory that the whole cluster shares
    does not grow."""
    cluster = task.cluster
    turns = range(2, times + 1)
    devices = [
        replace(device, name=_again(device.name, turn))
        for turn in turns
        for device in cluster.devices
    ]
    groups = [
        replace(
            group,
            name=_again(group.name, turn),
            members=tuple(_again(name, turn) for name in group.members),
        )
        for turn in turns
        for group in cluster.groups
    ]
    wires = [
        replace(wire, between=(_again(wire.between[0], turn), _again(wire.between[1], turn)))
        for turn in turns
        for wire in cluster.wires
    ]
    grown = replace(
        cluster,
        devices=(*cluster.devices, *devices),
        groups=(*cluster.groups, *groups),
        wires=(*cluster.wires, *wires),
    )
    return replaced(task, cluster=grown)


def _again(name: str, turn: int) -> str:
    return f"{name} ({turn})"
