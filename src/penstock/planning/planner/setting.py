"""``Setting``: a schedule on some devices, before anything is said about layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from penstock.core.graph import Mode
from penstock.core.schedule import Schedule
from penstock.core.schedule.lower import add_recompute
from penstock.core.schedule.memory import Load, Moments, loads, peak_activations
from penstock.core.versions import Flush, place_of, weight_copies
from penstock.planning.planner.task import Task
from penstock.planning.planner.terms import Terms
from penstock.planning.plans.stage_plan import StagePlan
from penstock.planning.plans.summing import (
    BY_SHARE,
    GatheredFor,
    ReducerName,
    Summing,
    room_to_sum,
    weights_held,
)

_MANY_OPS = 100_000
"""Of a schedule that is not kept in several variants."""


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

    def known_for(self, task: Task) -> dict[str, Any]:
        """Results of a task, as long as it is the one that was last asked for."""
        known: tuple[Task, dict[str, Any]] | None = vars(self).get("known")
        if known is None or known[0] is not task:
            vars(self)["known"] = known = task, {}
        return known[1]

    def unlike_ranks(self, task: Task) -> Sequence[int]:
        """One of all ranks that have the same stages and as much memory, which they share with no
        others; worked out once."""
        known = self.known_for(task)
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

    def speeds(self, task: Task) -> tuple[float, ...]:
        """How many times as fast as a graph's device the devices of each stage are together."""
        return tuple(
            self.replicas_of(stage) / task.pace(devices, self.devices, self.mode).passes
            for stage, devices in enumerate(self.devices_of)
        )

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

    def stage_plans(self, task: Task) -> dict[Hashable, StagePlan]:
        """The plans of stages that were made, by all that they depend on."""
        plans: dict[Hashable, StagePlan] = self.known_for(task).setdefault("stages", {})
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
