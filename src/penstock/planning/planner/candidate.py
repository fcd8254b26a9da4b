"""``Candidate``: a setting with its cuts, which could be the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf

from penstock.base.units import count_of
from penstock.core.graph import Contention
from penstock.core.schedule import Schedule
from penstock.core.schedule.families import SEARCHED
from penstock.core.schedule.lower import add_recompute
from penstock.planning.planner.limits import (
    NO_EXCESS,
    Excess,
    has_limits,
    least_steady_seconds,
    least_step_seconds,
    limited_like,
    worst_excess,
)
from penstock.planning.planner.pricing import CutSetting
from penstock.planning.planner.pricing import written as written_summing
from penstock.planning.planner.setting import StageSizes
from penstock.planning.plans.memory_parts import allocated
from penstock.planning.plans.orders import search_order, written
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.prediction import Prediction, num_simulated
from penstock.planning.plans.stage_plan import bytes_of_ranks
from penstock.planning.plans.summing import Summing, exchanged_bytes
from penstock.planning.plans.table import Alternative, family_title

_QUICKER = 16
"""How many times as many ops are gone through where nothing happens in the order of time."""


@dataclass(frozen=True)
class Candidate(CutSetting):
    """A setting with its cuts, judged by a simulation. Its text is for reasons and errors."""

    def __str__(self) -> str:
        setting = self.setting
        name = family_title(setting.schedule.name, setting.replicas, setting.versions)
        again = " and recompute" if set(self.recomputes) != {"none"} else ""
        if self.way.reducer != "owners":
            again += f", gradients summed by {self.way.reducer}"
        if self.task.expert_ranks > 1:
            again += f", experts over {self.task.expert_ranks} of them"
        if self.task.num_tensor_ranks > 1:
            alike = self.task.groups is None or self.task.groups.are_alike
            which = "layers" if alike else "the last one's layers"
            besides = "" if self.task.groups is None else self.task.groups.tensor_split.besides
            again = f", {which} over {self.task.num_tensor_ranks} devices{besides}{again}"
        if len(setting.replicas) == 1:
            return f"data parallelism on {count_of(setting.num_ranks, 'device')}{again}"
        return f"{count_of(len(self.recomputes), 'stage')} with {name}{again}"

    @cached_property
    def schedule(self) -> Schedule:
        """The setting's schedule with the recomputes that the stages want."""
        return self.setting.with_recomputes(self._run_twice)

    @property
    def _run_twice(self) -> tuple[int, ...]:
        """The stages that run forward a second time as a whole."""
        return tuple(stage for stage, how in enumerate(self.recomputes) if how == "stage")

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Predicted bytes of memory of each rank."""
        if self.setting.schedule.num_slices == 1:
            return tuple(map(self.bytes_on, range(self.setting.num_ranks)))
        return allocated(bytes_of_ranks(self.stages, self.schedule), self._slacks)

    @cached_property
    def _slacks(self) -> tuple[float, ...]:
        devices = self.task.cluster.devices
        return tuple(devices[device].allocator_slack for device in self.setting.devices)

    def bytes_on(self, rank: int) -> int:
        """As ``rank_bytes``, of one rank where microbatches are whole, without a walk through all
        ops for each way to cut the model."""
        (needed,) = allocated([self._tensor_bytes_on(rank)], [self._slacks[rank]])
        return needed

    def _tensor_bytes_on(self, rank: int) -> int:
        memory = self.setting.memory_for(self.task)
        if self.setting.is_exact:
            (stage,) = self.setting.schedule.stages_of[rank]
            return memory.held_bytes(stage, self.recomputes[stage], *self.cuts[stage : stage + 2])
        own = self.setting.moments(self._run_twice)[rank]
        state = (
            memory.state_bytes(stage, self.recomputes[stage], *self.cuts[stage : stage + 2])
            for stage in own.stages
        )
        return sum(state) + ceil(own.most_bytes(self._sizes))

    def _sizes(self, stage: int) -> StageSizes:
        start, stop = self.cuts[stage : stage + 2]
        numbers, layers = self.task.numbers(start, stop), self.recomputes[stage] == "layers"
        whole = numbers["again_input_bytes" if layers else "activation_bytes"]
        return self.task.input_bytes[start], whole, numbers["weight_kept_bytes"]

    @property
    def peak(self) -> float:
        """Microbatches in flight on the rank that holds most."""
        return max(self.setting.peaks)

    @cached_property
    def least_seconds(self) -> float:
        """A minibatch is predicted to take at least as long."""
        asynchronous = self.setting.versions.asynchronous
        bound = least_steady_seconds if asynchronous else least_step_seconds
        return bound(self.stages, self.setting, self.task.num_microbatches)

    @cached_property
    def num_ops(self) -> int:
        """How many ops a simulation goes through."""
        setting = self.setting
        if not setting.versions.asynchronous:
            return self.schedule.num_ops
        count = num_simulated(setting.versions, self.task.num_microbatches, setting.all_replicas)
        return count * 2 * setting.num_stages

    @cached_property
    def effort(self) -> int:
        """How long a simulation takes, in ops of one that goes through them in the order of
        time."""
        setting = self.setting
        asynchronous = setting.versions.asynchronous
        alike = not asynchronous and setting.is_single and len({*setting.all_replicas}) == 1
        if self._cards or (asynchronous and max(setting.all_replicas) > 1):
            apart = alike and len({*self._cards}) == setting.num_ranks
            return 2 * self.num_ops // max(setting.all_replicas[0], 2) if apart else self.num_ops
        return self.num_ops // ((setting.all_replicas[0] if alike else 1) * _QUICKER) + 1

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction for the stages in the order of the schedule's ops."""
        setting = self.setting
        return Prediction(
            self.stages,
            self.task.num_microbatches,
            setting.versions,
            setting.all_replicas,
            self.schedule,
            self._build,
            cards=self._cards,
            hosts=self._hosts,
            slacks=self._slacks,
        )

    def _build(self, num_microbatches: int) -> Schedule:
        schedule = self.setting.build(num_microbatches)
        return add_recompute(schedule, self._run_twice) if self._run_twice else schedule

    @cached_property
    def _cards(self) -> tuple[int, ...]:
        """The card of each rank, none where no rank has one; of a rank on several hosts, −1."""
        known, apart = self.task.topology.cards, self.task.straddling
        cards = [-1 if device in apart else known[device] for device in self.setting.devices]
        return _numbered(cards) if max(cards) >= 0 else ()

    @cached_property
    def _hosts(self) -> tuple[int, ...]:
        """The host of each rank, where ranks have cards; of a rank on several, a number of its
        own."""
        known, apart = self.task.topology.hosts, self.task.straddling
        hosts = [
            (known[device], device if device in apart else -1) for device in self.setting.devices
        ]
        places = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        return tuple(places[host] for host in hosts) if self._cards else ()

    @property
    def seconds(self) -> float:
        """The predicted minibatch, weight update included; without a flush, in the steady state."""
        return self.prediction.step_seconds

    @property
    def frames_per_second(self) -> float:
        """Microbatches that go through per second."""
        return self.prediction.frames_per_second

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes over all links for one minibatch: outputs, their gradients, and gradients of
        weights."""
        total = 0.0
        for index, stage in enumerate(self.stages):
            others = self.setting.replicas_of(index) - 1
            summed = exchanged_bytes(self.way.reducer, stage.summed_bytes, stage.parameter_bytes)
            if others and self.way.reducer == "parameter-server":
                others += 1  # each copy sends all, and gets all
            updates = 1
            if self.setting.versions.updates == "microbatch":
                updates = self.task.num_microbatches // self.setting.replicas_of(index)
            total += 2 * self.task.num_microbatches * stage.transfer_bytes
            total += 2 * others * summed * updates
            if others and self.way.gathers_each_use:
                # One of these is counted with the sums.
                uses = 2 * self.task.num_microbatches / self.setting.replicas_of(index) - 1
                total += others * uses * stage.parameter_bytes
        if self.task.groups is not None:
            used = self.setting.num_ranks / len(self.task.cluster.devices)
            total += self.task.groups.tensor_split.moved_bytes * max(used, 1 / len(self.stages))
        return round(total)

    @cached_property
    def excess(self) -> Excess:
        """By how many bytes the candidate misses the limit that it misses most, and where;
        infinite where it cuts inside of what may not be cut."""
        if self.task.inside.intersection(self.cuts):
            return Excess(inf, inf, 0, "in a part that is not cut")
        if not has_limits(self.task):
            return NO_EXCESS
        return worst_excess(self.task, self.setting, self.rank_bytes)

    def limited_like(self, other: Candidate) -> Candidate:
        """This candidate's cuts under the memory limits of another candidate's cluster."""
        return replace(self, task=limited_like(self.task, other.task))

    @property
    def fits(self) -> bool:
        """Whether the candidate keeps all memory limits."""
        return self.excess.num_bytes <= 0

    def with_final_order(self) -> Candidate:
        """This candidate with the order that its family finds for its stages in the memory of their
        devices, or with the one that holds its place, where the simulator says that this is
        better.

        Raises:
            InputError: the family finds none.
        """
        setting, held = self.setting, self.as_it_stands()
        searched = search_order(
            setting.schedule.name,
            self.stages,
            self.task.num_microbatches,
            setting.given_options,
            [self.task.tensor_limits[device] for device in setting.devices],
        )
        ordered = replace(held, setting=replace(held.setting, schedule=searched))
        # Links that are busy, updates and memory that a host shares are the simulator's to judge.
        return ordered if ordered.fits and ordered.seconds <= self.seconds else held

    def as_it_stands(self) -> Candidate:
        """This candidate with the order that holds the place of one to be searched."""
        return replace(self, setting=replace(self.setting, is_final=True))

    def _summing(self) -> Summing:
        setting = self.setting
        groups: dict[int, list[int]] = {}
        for ranks in setting.ranks_of:
            for rank in ranks:
                groups.setdefault(rank, []).extend(setting.devices[other] for other in ranks)
        devices = [[setting.devices[rank], *groups[rank]] for rank in sorted(groups)]
        return written_summing(self.task, self.way.reducer, devices, self.way.levels)

    def to_plan(
        self,
        reason: str = "",
        alternatives: tuple[Alternative, ...] = (),
        warnings: tuple[str, ...] = (),
    ) -> Plan:
        """The plan that people read and the runtime runs."""
        task, setting = self.task, self.setting
        return Plan(
            model=task.graph.fingerprint,
            schedule=setting.schedule.name,
            num_microbatches=task.num_microbatches,
            options=setting.given_options,
            order=written(setting.schedule) if setting.schedule.name in SEARCHED else (),
            stages=self.stages,
            versions=setting.versions,
            num_threads=task.graph.num_threads,
            microbatch_size=task.graph.microbatch_size,
            devices=tuple(part for device in setting.devices for part in task.devices_at(device)),
            hosts=self._hosts,
            cards=self._cards,
            summing=self._summing(),
            cost_model=task.communication.name,
            reason=reason,
            alternatives=alternatives,
            contention=task.graph.contention if task.topology.shared_memories else Contention(),
            estimate=task.graph.estimate,
            warnings=warnings,
            example=task.graph.example,
            input_shapes={
                layer.name: layer.input_shape for layer in task.graph.layers if layer.input_shape
            },
        )


def _numbered(numbers: Sequence[int]) -> tuple[int, ...]:
    """Numbers from 0 in the order in which they first come; those below 0 are −1."""
    places = {
        number: place for place, number in enumerate(dict.fromkeys(n for n in numbers if n >= 0))
    }
    return tuple(places.get(number, -1) for number in numbers)
