"""``Shortfall``: why no plan was found, with what is over by how much and the smallest change that
would do. That nothing fits is said only where that is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from itertools import islice

from msgspec.structs import replace

from penstock.base.units import count_of, format_bytes, format_seconds
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.limits import least_excess
from penstock.planning.planner.race import Race, fastest
from penstock.planning.planner.request import Constraints
from penstock.planning.planner.task import Task
from penstock.planning.planner.why import coarsely

_TIMES_AS_MANY = (2, 4)
_MORE_TIME = "more time (patience_seconds=…, --patience)"


@dataclass(frozen=True)
class Shortfall:
    """Why a request has no plan. Its text is for errors.

    Attributes:
        nearest: of the candidates that were looked at, the one that misses its limits by the fewest
            bytes, if there is any.
        tasks: one per microbatch size.
        constraints: what was asked for.
        race: in which nothing fits; complete if all was looked at, to find the nearest, too.
    """

    nearest: Candidate | None
    tasks: Sequence[Task]
    constraints: Constraints
    race: Race

    def __str__(self) -> str:
        nearest = self.nearest
        if nearest is None:
            return self._without_any()
        coarse = nearest.task.is_coarse and not self.constraints.cuts
        where = f" of those {coarsely(nearest.task)}" if coarse else ""
        missed = f"{self._verdict}; the closest{where}, {nearest}, needs {nearest.excess}"
        changes: list[tuple[str, Candidate]] = []
        if not self.race.patience.is_over:
            self.race.patience.spend(
                lambda: changes.extend(islice(_changes(self.tasks, self.constraints), 1)),
                lambda: True,
            )
        for change, candidate in changes:
            fits = f"{candidate} fits ({format_bytes(max(candidate.rank_bytes))} on a rank)"
            return f"{missed}: allow that much more, or {change}, and {fits}"
        if not self.race.is_complete:
            return f"{missed}: allow that much, or {_MORE_TIME}"
        return f"{missed}: allow that much, or profile smaller microbatches"

    @property
    def _verdict(self) -> str:
        if self.race.is_complete:
            return "no plan fits in memory"
        missing = min(map(least_excess, self.tasks))
        if missing > 0:
            lacking = f"{format_bytes(missing)} are missing on some device, whatever the plan"
            return f"no plan fits in memory: at least {lacking}"
        return (
            f"no plan that fits was found in {format_seconds(self.race.patience.seconds_spent)}, "
            f"in which {count_of(self.race.num_missed, 'schedule')} on some devices "
            f"{'was' if self.race.num_missed == 1 else 'were'} tried"
        )

    def _without_any(self) -> str:
        ties = self.tasks[0].layers.ties
        if not self.race.is_complete:
            return f"{self._verdict}: allow {_MORE_TIME}"
        if ties and self.constraints.never_flushes:
            layers = self.tasks[0].graph.layers
            first, last = layers[ties[0].first].name, layers[ties[0].last].name
            return (
                f"no plan can be built: {first} and {last} share weights, and where weights are "
                "old, what shares them has to be in one stage; ask for fewer stages, take a "
                "schedule that flushes, or give each layer weights of its own"
            )
        return "no plan fits in memory: nothing that was asked for can be built"


def _changes(tasks: Sequence[Task], constraints: Constraints) -> Iterator[tuple[str, Candidate]]:
    """(what to change, what then fits), the smallest change first."""
    free = replaced(
        constraints, schedule=None, options=(), stages=None, cuts=(), replicas=(), any_replicas=True
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
        ("allow recomputing", tasks, replaced(constraints, recompute="where-needed")),
        ("leave schedule, stages and cuts to the planner", tasks, free),
        ("leave recomputing to it too", tasks, replaced(free, recompute="where-needed")),
        ("take smaller microbatches", smaller, replaced(free, recompute="where-needed")),
    )
    for change, chosen, relaxed in steps:
        if chosen and (relaxed != constraints or chosen is not tasks):
            candidate = fastest(chosen, relaxed)
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
