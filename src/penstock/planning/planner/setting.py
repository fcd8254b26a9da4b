"""``Setting``: a schedule on some devices, before anything is said about layers; ``MemoryLimits``:
which layers its stages have memory for.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from penstock.core.graph import Mode
from penstock.core.schedule import Schedule, families
from penstock.core.schedule.lower import add_recompute
from penstock.core.schedule.memory import Load, Moments, loads, peak_activations
from penstock.core.schedule.repetition import MANY, abridged
from penstock.core.versions import Flush, Policy, place_of, weight_copies
from penstock.planning.partition.chain import Table
from penstock.planning.planner.request import RecomputeRule
from penstock.planning.planner.task import Task
from penstock.planning.plans.orders import stand_in
from penstock.planning.plans.stage_plan import RecomputeWay, StagePlan
from penstock.planning.plans.summing import (
    BY_SHARE,
    GatheredFor,
    ReducerName,
    Summing,
    room_to_sum,
    weights_held,
)

_RECOMPUTES: tuple[RecomputeWay, ...] = ("none", "layers", "stage")

_FEW_ROWS = 8
"""That are looked at first where nobody knows how much a stage has memory for."""
_MANY_OPS = 100_000
"""Of a schedule that is not kept in several variants."""


@dataclass(frozen=True)
class Terms:
    """Which schedule on which devices, whether it is built or not.

    Attributes:
        family: the schedule's.
        devices: the device of each rank, by its index in the cluster.
        versions: which weights passes read.
        replicas: how many each stage has; empty for one of each.
        options: (name, value) pairs that the family is given.
        recompute: what may run twice.
    """

    family: str
    devices: tuple[int, ...]
    versions: Policy = field(default_factory=Flush)
    replicas: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    recompute: RecomputeRule = "where-needed"

    @property
    def num_ranks(self) -> int:
        """How many ranks the schedule uses."""
        return len(self.devices)

    @property
    def given_options(self) -> dict[str, Any]:
        """All that the family is given besides ranks and microbatches."""
        return dict(self.options) | ({"replicas": list(self.replicas)} if self.replicas else {})

    @property
    def copies(self) -> tuple[int, ...]:
        """How many ranks, which follow one another, do the same: replicas of a stage, or of all
        stages of a rank where pipelines stand side by side; empty where no rank has a copy."""
        if not self.replicas or self.family in families.UNLIKE_REPLICAS:
            return self.replicas
        width = self.replicas[0]
        return (width,) * (self.num_ranks // width)

    @cached_property
    def num_pipelines(self) -> int:
        """How many pipelines stand side by side and do the same, but that the first ones may have a
        microbatch more; 1 where that is not so, or where the order of all is searched at once."""
        alike = len({*self.replicas}) == 1 and not self.versions.asynchronous
        return self.replicas[0] if alike and self.family not in families.SEARCHED else 1

    def folded(self, num_microbatches: int) -> tuple[Terms, int]:
        """(the terms of the first and the last of many pipelines side by side, and the microbatches
        of these two); themselves, and all microbatches, where there are no more than two.

        The first and the last come as far as all of them: what 16,384 devices do is told by 16.
        """
        width = self.num_pipelines
        if width <= 2:
            return self, num_microbatches
        own = -(-num_microbatches // width) + num_microbatches // width
        few = self.devices[: 2 * self.num_ranks // width]
        replicas = (2,) * len(self.replicas)
        terms = Terms(self.family, few, self.versions, replicas, self.options, self.recompute)
        return terms, own

    @property
    def terms(self) -> Terms:
        """These alone, which are quickly compared: schedules of equal terms are equal, searched
        ones for equal costs."""
        return Terms(*(getattr(self, own.name) for own in fields(Terms)))

    def build(self, num_microbatches: int) -> Schedule:
        """The schedule for some microbatches. A family that searches has to know the stages' costs,
        so its place is held by another order until it has them.

        Raises:
            InputError: the family refuses.
        """
        options = self.given_options
        if self.family in families.SEARCHED:
            return stand_in(self.family, self.num_ranks, num_microbatches, options)
        return families.build(
            self.family, num_ranks=self.num_ranks, num_microbatches=num_microbatches, **options
        )

    def shown(self, num_microbatches: int) -> Schedule:
        """As ``build``; of very many microbatches, so few as show what ranks do and hold, where
        they do the same again and again for the others."""
        short, varies = None, families.HOLD_ALL | families.SEARCHED
        if num_microbatches >= MANY and self.family not in varies:
            short = abridged(self.build, num_microbatches, 2 * self.num_ranks)
        return self.build(num_microbatches) if short is None else short


@lru_cache(maxsize=64)
def _blocks(devices: tuple[int, ...], width: int) -> tuple[tuple[int, ...], ...]:
    """The devices of ranks that do the same, which follow one another; kept once for all settings
    on the same devices."""
    return tuple(devices[first : first + width] for first in range(0, len(devices), width))


@dataclass(frozen=True, kw_only=True)
class Setting(Terms):
    """A schedule on some devices, built.

    Attributes:
        schedule: of one minibatch; of a stream, as long as shows how much is in flight. Of more
            than two pipelines side by side, the first and the last alone (``folded``); what ranks
            of a copy hold is then counted as for the first, since no other holds more. Of very
            many microbatches, as ``shown`` has it.
        is_final: whether the schedule is the one that runs, and none that holds the place of an
            order still to be searched.
    """

    schedule: Schedule
    is_final: bool = True

    @property
    def num_stages(self) -> int:
        """How many stages the schedule cuts the model into."""
        return self.schedule.num_stages

    @cached_property
    def is_folded(self) -> bool:
        """Whether the schedule has two of more pipelines side by side."""
        return self.schedule.num_ranks < self.num_ranks

    def first_of(self, rank: int) -> int:
        """The rank of the first pipeline that does what a rank does; of a schedule that has all
        ranks, the rank itself."""
        return rank - rank % self.num_pipelines if self.is_folded else rank

    def scheduled(self, rank: int) -> int:
        """The rank of the schedule that stands for a rank."""
        return 2 * (rank // self.num_pipelines) if self.is_folded else rank

    @property
    def first_ranks(self) -> range:
        """The ranks of the first pipeline; of a schedule that has all ranks, all."""
        return range(0, self.num_ranks, self.num_pipelines if self.is_folded else 1)

    def _known_for(self, task: Task) -> dict[str, Any]:
        """Results of a task, as long as it is the one that was last asked for."""
        known: tuple[Task, dict[str, Any]] | None = vars(self).get("known")
        if known is None or known[0] is not task:
            vars(self)["known"] = known = task, {}
        return known[1]

    def unlike_ranks(self, task: Task) -> Sequence[int]:
        """One of all ranks that have the same stages and as much memory, which they share with no
        others; worked out once."""
        known = self._known_for(task)
        if "unlike ranks" not in known:
            known["unlike ranks"] = self._unlike_ranks(task)
        ranks: Sequence[int] = known["unlike ranks"]
        return ranks

    def _unlike_ranks(self, task: Task) -> Sequence[int]:
        if not self.is_folded or task.topology.shared_memories:
            return range(self.num_ranks)
        if len(task.devices.different_memories) == 1:
            return self.first_ranks
        chosen: dict[Hashable, int] = {}
        for rank, device in enumerate(self.devices):
            chosen.setdefault((self.first_of(rank), task.devices.memories[device]), rank)
        return tuple(chosen.values())

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank."""
        return self.schedule.stages_of[self.scheduled(rank)]

    @cached_property
    def ranks_of(self) -> tuple[Sequence[int], ...]:
        """The ranks of each stage."""
        own = [self.schedule.ranks_of(stage) for stage in range(self.num_stages)]
        if not self.is_folded:
            return tuple(own)
        # A pipeline may have no copies of its own, so that a stage is on ranks in a row.
        width = self.num_pipelines
        return tuple(range(ranks[0] // 2 * width, (ranks[0] // 2 + 1) * width) for ranks in own)

    @cached_property
    def devices_of(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage."""
        if self.is_folded:
            blocks = _blocks(self.devices, self.num_pipelines)
            return tuple(blocks[ranks[0] // self.num_pipelines] for ranks in self.ranks_of)
        return tuple(tuple(self.devices[rank] for rank in ranks) for ranks in self.ranks_of)

    @cached_property
    def is_single(self) -> bool:
        """Whether every rank has one stage."""
        return all(len(stages) == 1 for stages in self.schedule.stages_of)

    @property
    def mode(self) -> Mode:
        """How the ranks work, as ``Contention`` asks for it."""
        if self.versions.asynchronous:
            return "stream"
        return "split" if self.schedule.splits_backward else "whole"

    @cached_property
    def all_replicas(self) -> tuple[int, ...]:
        """How many ranks hold each stage."""
        return self.replicas or (1,) * self.num_stages

    def replicas_of(self, stage: int) -> int:
        """How many ranks hold a stage."""
        return self.all_replicas[stage]

    def reducer_of(self, task: Task) -> ReducerName:
        """How copies of stages sum gradients: as the task says, where there are copies, and where
        the way goes with a pipeline that never flushes."""
        has_copies = any(len(ranks) > 1 for ranks in self.ranks_of)
        drains = not self.versions.asynchronous
        steps = task.reducer in {*BY_SHARE, "parameter-server"}
        return task.reducer if has_copies and (drains or not steps) else "owners"

    def host_levels(self, task: Task) -> tuple[tuple[int, ...], ...]:
        """Which ranks share a host, where a task wants weights to be sharded inside hosts only; as
        ``Summing.levels``."""
        if not task.hybrid or self.reducer_of(task) != "fully-sharded":
            return ()
        hosts = [task.topology.hosts[device] for device in self.devices]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        return (tuple(numbers[host] for host in hosts),) if len(numbers) > 1 else ()

    def copy_sums(self, task: Task) -> tuple[CopySums, ...]:
        """How the copies of each stage sum gradients.

        Raises:
            InputError: hosts that would have all weights of a stage have other numbers of copies.
        """
        reducer, levels = self.reducer_of(task), self.host_levels(task)
        summing = Summing(reducer=reducer, levels=levels)
        shards = [summing.num_shards(own) if levels else len(own) for own in self.ranks_of]
        return tuple(
            CopySums(len(ranks), count, reducer, task.gathered_for)
            for ranks, count in zip(self.ranks_of, shards, strict=True)
        )

    def weight_versions(self, stage: int, num_microbatches: int) -> int:
        """Copies of a stage's weights."""
        if isinstance(self.versions, Flush):
            stage = 0  # all have as many
        place = place_of(self.versions, self.all_replicas, stage, num_microbatches)
        return weight_copies(self.versions, place)

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Per rank of the schedule, microbatches in flight at the worst moment; of copies, as many
        as of the first, since no other has more of them."""
        schedule, activations = self.schedule, self.versions.activations
        if not self.is_single:
            return peak_activations(schedule.rank_ops, schedule.num_slices, activations)
        every = range(self.num_stages)
        firsts = [schedule.rank_ops[schedule.ranks_of(stage)[0]] for stage in every]
        of_stages = peak_activations(firsts, schedule.num_slices, activations)
        return tuple(of_stages[stage] for (stage,) in schedule.stages_of)

    def loads(self, stage: int, *, again: bool = False) -> tuple[Load, ...]:
        """The loads of a stage's ranks at their worst moments; exact where every rank has one
        stage, else an even share.

        Args:
            again: whether it runs forward a second time.
        """
        ranks = self.schedule.ranks_of(stage)
        if not self.is_exact:
            held = max(self.peaks[rank] for rank in ranks)
            return (Load(inputs=held, whole=1) if again else Load(whole=held),)
        activations = self.versions.activations
        key = stage, again, activations
        kept = self._kept("loads")
        if key not in kept:
            # Later replicas have no more microbatches than the first.
            moments = self._moments_of(ranks[0])
            kept[key] = loads(moments, (stage,) if again else (), activations)
        of_stage: tuple[Load, ...] = kept[key]
        return of_stage

    def moments_on(self, rank: int) -> Moments:
        """The moments of a rank; made once for all cuts, and for whatever runs again."""
        return self._moments_of(self.scheduled(rank))

    def _moments_of(self, number: int) -> Moments:
        kept = self._kept("moments")
        if number not in kept:
            numbers = {number}
            # Where the first rank that is asked about has no room, nobody asks about the others.
            if kept and self.is_single:
                numbers |= {self.schedule.ranks_of(stage)[0] for stage in range(self.num_stages)}
            elif kept:
                numbers |= {*map(self.scheduled, self.first_ranks)}
            asked = sorted(numbers - kept.keys())
            ranks = [self.schedule.rank_ops[own] for own in asked]
            kept.update(zip(asked, Moments.of_ranks(ranks), strict=True))
        of_rank: Moments = kept[number]
        return of_rank

    def memory_for(self, task: Task) -> MemoryLimits:
        """The memory that stages of a task have; made once for all cuts."""
        known = self._known_for(task)
        if "memory" not in known:
            known["memory"] = MemoryLimits(task, self)
        memory: MemoryLimits = known["memory"]
        return memory

    def stage_plans(self, task: Task) -> dict[Hashable, StagePlan]:
        """The plans of stages that were made, by all that they depend on."""
        plans: dict[Hashable, StagePlan] = self._known_for(task).setdefault("stages", {})
        return plans

    def _kept(self, name: str) -> dict[Any, Any]:
        """Results that follow from the ops alone, whatever the devices."""
        kept: dict[Any, Any] = vars(self.schedule.columns).setdefault(name, {})
        return kept

    @cached_property
    def is_exact(self) -> bool:
        """Whether ``loads`` are exact: every rank has one stage, and microbatches are whole."""
        return self.is_single and self.schedule.num_slices == 1

    def whole(self, num_microbatches: int) -> Schedule:
        """The schedule with the ranks of all pipelines, for who must look at them."""
        if not self.is_folded:
            return self.schedule
        kept, key = self._kept("whole"), (self.num_pipelines, num_microbatches)
        if key not in kept:
            kept[key] = self.shown(num_microbatches)
        schedule: Schedule = kept[key]
        return schedule

    def with_recomputes(
        self, stages: tuple[int, ...], schedule: Schedule | None = None
    ) -> Schedule:
        """The schedule, or the ``whole`` one, in which some stages run forward a second time; made
        once for all cuts, of large ones for those that follow one another."""
        plain = schedule or self.schedule
        if not stages:
            return plain
        kept: dict[Any, Any] = vars(plain.columns).setdefault("with_recomputes", {})
        if stages not in kept:
            if plain.num_ops > _MANY_OPS:
                kept.clear()
            kept[stages] = add_recompute(plain, stages)
        recomputing: Schedule = kept[stages]
        return recomputing


class MemoryLimits:
    """Which layers the stages of a setting have memory for, and with how much recomputing.

    Args:
        slack: bytes by which limits may be exceeded.
        shared: of a rank with several stages, whether each gets an even share of its limit;
            otherwise these have no limit.
    """

    def __init__(
        self, task: Task, setting: Setting, slack: float = 0.0, shared: bool = True
    ) -> None:
        self._task = task
        self._setting = setting
        stages = range(setting.num_stages)
        self._copies = [setting.weight_versions(stage, task.num_microbatches) for stage in stages]
        self._sums = setting.copy_sums(task)
        self._slack, self._shared = slack, shared
        self._again: dict[Hashable, Table] = {}
        self._at_rest: dict[Hashable, Table] = {}
        self._longest: dict[Hashable, int] = {}
        self._kinds: dict[int, Hashable] = {}

    @cached_property
    def is_free(self) -> bool:
        """Whether nothing is limited and nothing must run twice."""
        rule = self._setting.recompute
        return rule in {"where-needed", "never"} and min(self._limits) == inf

    @cached_property
    def _limits(self) -> list[float]:
        return [self._limit(stage) for stage in range(self._setting.num_stages)]

    def _limit(self, stage: int) -> float:
        setting = self._setting
        if not setting.is_single and not self._shared:
            return inf
        stages_of = setting.schedule.stages_of
        count = max(len(stages_of[rank]) for rank in setting.schedule.ranks_of(stage))
        return min(
            (limit + self._slack) / (1 + allocator) / count
            for limit, allocator in self._task.devices.memories_of(setting.devices_of[stage])
        )

    def kind(self, stage: int) -> Hashable:
        """Stages of one kind have the same tables."""
        if self.is_free:
            return None
        if stage not in self._kinds:
            ways = self._key(stage, "none"), self._key(stage, "stage")
            self._kinds[stage] = self._limits[stage], *ways
        return self._kinds[stage]

    def again_seconds(self, stage: int, num_rows: int) -> Table:
        """Seconds that a stage takes longer because it must run forward twice, with up to so much
        of what is between two of ``Task.places``; infinite where it does not fit even so. Worked
        out once for all stages of a kind."""
        kind = self.kind(stage)
        if kind not in self._again or len(self._again[kind]) < num_rows:
            self._again[kind] = self._again_seconds(stage, num_rows)
        return self._again[kind][:num_rows]

    def _again_seconds(self, stage: int, num_rows: int) -> Table:
        rule, limit = self._setting.recompute, self._limits[stage]
        again = self._task.layers.tables(num_rows)["recompute_seconds"]
        if rule in {"stage", "layers"}:
            return np.where(self.num_bytes(stage, rule, num_rows) <= limit, again, inf)
        fits = self.num_bytes(stage, "none", num_rows) <= limit
        if rule == "never":
            return np.where(fits, 0.0, inf)
        least = np.minimum(
            self.num_bytes(stage, "layers", num_rows), self.num_bytes(stage, "stage", num_rows)
        )
        return np.where(fits, 0.0, np.where(least <= limit, again, inf))

    def longest(self, stage: int) -> int:
        """The most that a stage can have of what is between two places: whatever begins at a place
        needs no less if it has more. (That the halves of a tied weight come together may spare
        memory, so of models with such weights nothing is known.)"""
        count = len(self._task.places) - 1
        if self._task.layers.ties or self._limits[stage] == inf:
            return count
        kind = self.kind(stage)
        if kind not in self._longest:
            length = min(_FEW_ROWS, count)
            while length < count and self._fitting_rows(stage, length) == length:
                length = min(2 * length, count)
            self._longest[kind] = self._fitting_rows(stage, length)
        return self._longest[kind]

    def _fitting_rows(self, stage: int, num_rows: int) -> int:
        """Of so many rows, those up to the last one in which something fits."""
        fits = np.isfinite(self.again_seconds(stage, num_rows))
        fits &= (
            np.arange(fits.shape[1]) > np.arange(num_rows)[:, None]
        )  # as far as there are stages
        return int(np.flatnonzero(fits.any(axis=1)).max(initial=-1)) + 1

    def recompute(self, stage: int, start: int, stop: int) -> RecomputeWay:
        """The recomputing that a stage with layers ``[start, stop)``, which fits, needs."""
        rule, limit = self._setting.recompute, self._limits[stage]
        if rule in {"stage", "layers"}:
            return rule
        if rule == "never" or limit == inf:
            return "none"
        if self.held_bytes(stage, "none", start, stop) <= limit:
            return "none"
        return self.lighter(stage, start, stop)

    def lighter(self, stage: int, start: int, stop: int) -> RecomputeWay:
        """The recomputing with which a stage with layers ``[start, stop)`` needs less memory."""
        ways: tuple[RecomputeWay, ...] = ("layers", "stage")
        return min(ways, key=lambda how: self.held_bytes(stage, how, start, stop))

    def held_bytes(self, stage: int, how: RecomputeWay, start: int, stop: int) -> int:
        """Bytes that a rank needs for a stage with layers ``[start, stop)``, also where these begin
        or end between the places of the tables."""
        key = (*self._key(stage, how), start, stop)
        known = self._task.cache.held
        if key not in known:
            numbers, inputs = (
                self._task.layers.numbers(start, stop),
                self._task.layers.input_bytes[start],
            )
            copies, sums, loads, *_ = key
            known[key] = int(_needed(numbers, inputs, copies, sums, loads, how))
        return known[key]

    def state_bytes(self, stage: int, how: RecomputeWay, start: int, stop: int) -> int:
        """Bytes that a rank needs for a stage with layers ``[start, stop)`` while nothing is in
        flight."""
        key = self._copies[stage], self._sums[stage], how == "layers", start, stop
        known = self._task.cache.held
        if key not in known:
            numbers = self._task.layers.numbers(start, stop)
            known[key] = int(_at_rest(numbers, self._copies[stage], self._sums[stage], how))
        return known[key]

    def lightest(self, stage: int) -> tuple[Table, ...]:
        """``num_bytes`` of every way that is allowed, in the order of ``ways``, with whatever there
        is between two places."""
        count = len(self._task.places) - 1
        return tuple(self.num_bytes(stage, how, count) for how in self.ways)

    @property
    def ways(self) -> tuple[RecomputeWay, ...]:
        """The ways to recompute that the setting allows."""
        rule = self._setting.recompute
        if rule == "where-needed":
            return _RECOMPUTES
        return ("none",) if rule == "never" else (rule,)

    def num_bytes(self, stage: int, how: RecomputeWay, num_rows: int) -> Table:
        """Bytes that a rank of a stage needs, as ``again_seconds``."""
        copies, sums, loads, _ = self._key(stage, how)
        tables = self._task.layers.tables(num_rows)
        key = num_rows, copies, sums, how == "layers"
        if key not in self._at_rest:
            self._at_rest[key] = _at_rest(tables, copies, sums, how)
        needed: Table = _in_flight(tables, tables["input_bytes"], loads, how)
        return needed + self._at_rest[key]

    def _key(
        self, stage: int, how: RecomputeWay
    ) -> tuple[int, CopySums, tuple[Load, ...], RecomputeWay]:
        """All of a stage that decides, with its layers, what it needs."""
        return self._copies[stage], self._sums[stage], self._loads(stage, how), how

    def _loads(self, stage: int, how: RecomputeWay) -> tuple[Load, ...]:
        return self._setting.loads(stage, again=how == "stage")


class CopySums(NamedTuple):
    """How many ranks have a copy of a stage, and how they sum gradients: what of the stage's state
    each of them keeps. Without copies, gradients of tied weights only are summed.

    Attributes:
        num_replicas, reducer: as said.
        num_shards: in how many shards weights are where they are fully sharded.
        gathered_for: as ``Summing`` has it.
    """

    num_replicas: int
    num_shards: int
    reducer: ReducerName
    gathered_for: GatheredFor

    def state_bytes(self, numbers: Mapping[str, Any], copies: int) -> Any:
        """Bytes of weights, gradients and optimizer state, and the room to sum.

        Args:
            numbers: sums over the stage's layers, as numbers or tables (``LayerSums.tables``).
            copies: of the weights.
        """
        count, reducer = self.num_shards, self.reducer
        held, gradients = numbers["parameter_bytes"], numbers["gradient_bytes"]
        optimizer, room = numbers["optimizer_bytes"], numbers["tied_bytes"]
        if self.num_replicas > 1:
            if reducer == "fully-sharded":
                held = weights_held(self.gathered_for, held, numbers["largest_bytes"], count)
            room = room_to_sum(reducer, gradients, numbers["largest_gradient_bytes"])
            if reducer == "parameter-server":
                optimizer = 0 * optimizer
            elif reducer in BY_SHARE:
                optimizer = optimizer / count
        return copies * np.ceil(held) + gradients + np.ceil(optimizer) + np.ceil(room)


def _needed(
    numbers: Mapping[str, Any],
    inputs: Any,
    copies: int,
    summing: CopySums,
    loads: tuple[Load, ...],
    how: RecomputeWay,
) -> Any:
    """The bytes that a rank needs for one stage, as numbers, or for many at once, as tables.

    Args:
        numbers: sums over the stage's layers, by their names (``LayerSums.numbers`` and ``tables``).
        inputs: bytes of the stage's input.
        copies: of the weights.
        summing: what of the stage's state a rank keeps.
        loads: the worst moments of the rank.
        how: what runs again.
    """
    return _in_flight(numbers, inputs, loads, how) + _at_rest(numbers, copies, summing, how)


def _in_flight(
    numbers: Mapping[str, Any], inputs: Any, loads: tuple[Load, ...], how: RecomputeWay
) -> Any:
    """The bytes of what is in flight at the worst moment; as ``_needed``."""
    whole = numbers["again_input_bytes" if how == "layers" else "activation_bytes"]
    sizes = inputs, whole, numbers["weight_kept_bytes"]
    most: Any = 0
    for load in loads:
        held = [count * size for count, size in zip(load, sizes, strict=True) if count]
        most = np.maximum(most, sum(held)) if len(loads) > 1 else sum(held)
    return np.ceil(most)


def _at_rest(numbers: Mapping[str, Any], copies: int, summing: CopySums, how: RecomputeWay) -> Any:
    """The bytes of all else; as ``_needed``."""
    workspace = "again_workspace_bytes" if how == "layers" else "workspace_bytes"
    return summing.state_bytes(numbers, copies) + numbers["buffer_bytes"] + numbers[workspace]
