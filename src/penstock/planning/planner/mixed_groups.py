"""Plans of two stages of which only the second one's layers are shared: convolutions on replicas,
each on one device, and linear layers on one group ("one weird trick", Krizhevsky, arXiv 1404.5997).

Where a plan has one size of groups throughout, a task has one graph: the model as one device of a
group sees it. Here the graph is that of single devices up to the cut and that of a group behind it,
so it belongs to its cut, and nothing may move that. Cuts are ranked by a formula, and the best few
are priced and simulated as everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec.structs import replace as with_fields

from penstock.base.errors import InputError, PlanError
from penstock.core.versions import Flush
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import with_cuts
from penstock.planning.planner.offers import PLAIN, Offer
from penstock.planning.planner.task import Task, TensorGroups
from penstock.planning.planner.tensor_groups import USUAL_BYTES, of_leaders
from penstock.planning.planner.wish import Wish

if TYPE_CHECKING:
    from penstock.planning.partition.tensor import TensorSplit

_MOST_CUTS = 3


def mixed(tasks: Sequence[Task], wish: Wish) -> Iterator[Candidate]:
    """The candidates that fit: replicas of the first layers, and one group for the others.

    Args:
        tasks: those of single devices, and those of groups, whose splits rank the cuts.
    """
    if wish.schedule not in (None, PLAIN) or wish.stages not in (None, 2):
        return
    if wish.cuts or wish.replicas or wish.versions is not None:
        return
    for task in tasks:
        if task.groups is None and task.reducer == "owners" and _is_chain(task):
            seen = {
                other.groups.num_ranks: other.groups.tensor_split
                for other in tasks
                if other.groups is not None and other.groups.single is task
            }
            yield from _of(task, seen, wish)


def _is_chain(task: Task) -> bool:
    """Whether whatever layers read comes from the one before them, and nothing is tied."""
    layers = task.graph.layers
    return not task.ties and not any(
        layer.inputs is not None or layer.after or layer.skip_bytes for layer in layers
    )


def _of(task: Task, seen: Mapping[int, TensorSplit], wish: Wish) -> Iterator[Candidate]:
    for width, split in seen.items():
        replicas = min(len(task.cluster.devices) - width, task.num_microbatches)
        if replicas < 1 or (replicas > 1 and not wish.any_replicas):
            continue
        for cut in _promising(task, split, width, replicas):
            with suppress(InputError, PlanError):
                candidate = _candidate(task, width, replicas, cut, wish)
                if candidate.fits:
                    yield candidate


def _promising(task: Task, split: TensorSplit, width: int, replicas: int) -> list[int]:
    """The cuts that promise most: the slower stage sets the pace, and sums come behind it."""
    count = task.num_microbatches
    before = [*accumulate(task.compute_seconds, initial=0.0)]
    behind = [*accumulate((layer.compute_seconds for layer in split.graph.layers), initial=0.0)]
    parameters = [*accumulate((one.parameter_bytes for one in task.graph.layers), initial=0)]

    def seconds(cut: int) -> float:
        front, back = before[cut] / replicas, behind[-1] - behind[cut]
        link = task.link_between(range(replicas), [replicas], _crossing(task, cut, width))
        hop = link.seconds(_crossing(task, cut, width))
        summed = 2 * (replicas - 1) / replicas * link.seconds(parameters[cut])
        return count * max(front, back, hop) + min(front, back) + 2 * hop + summed

    return sorted(range(1, task.num_layers), key=seconds)[:_MOST_CUTS]


def _crossing(task: Task, cut: int, width: int) -> int:
    """Bytes that a microbatch brings over the cut, on an average of there and back: every member
    gets the value, and one of them sends its gradient."""
    return task.crossing_bytes[cut] * (width + 1) // 2


def _candidate(task: Task, width: int, replicas: int, cut: int, wish: Wish) -> Candidate:
    from penstock.planning.partition.tensor import split_layers  # for the few who ask

    group = range(replicas, replicas + width)
    link = task.topology.slowest_link(group, USUAL_BYTES)
    graph = task.graph
    behind = with_fields(
        graph, layers=graph.layers[cut:], input_bytes=task.crossing_bytes[cut], other_sizes=()
    )
    split = split_layers(behind, width, link, num_microbatches=task.num_microbatches)
    *front, last = graph.layers[:cut]
    last = with_fields(last, output_bytes=_crossing(task, cut, width))
    members = [*(range(index, index + 1) for index in range(replicas)), group]
    devices = tuple(tuple(task.cluster.devices[index] for index in own) for own in members)
    made = replace(
        task,
        graph=with_fields(graph, layers=(*front, last, *split.graph.layers), other_sizes=()),
        cluster=of_leaders(task.cluster, members, devices),
        groups=TensorGroups(devices, split, task),
    )
    counts = (replicas, 1) if replicas > 1 else ()
    offer = Offer(PLAIN, tuple(range(replicas + 1)), Flush(), counts, (), wish.recompute)
    return with_cuts(made, offer.setting(made), (0, cut, task.num_layers))
