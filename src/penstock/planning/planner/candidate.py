"""``Candidate``: a setting with its cuts, which could be the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf

from penstock.base.kept import kept
from penstock.base.units import count_of
from penstock.core.graph import Contention
from penstock.core.schedule import Schedule
from penstock.core.schedule.families import SEARCHED
from penstock.core.schedule.lower import add_recompute
from penstock.core.schedule.memory import SizesOfOne
from penstock.planning.planner.limits import (
    NO_EXCESS,
    Excess,
    has_limits,
    least_steady_seconds,
    least_step_seconds,
    limited_like,
    worst_excess,
)
from penstock.planning.planner.memory_limits import memory_limits
from penstock.planning.planner.pricing import CutSetting
from penstock.planning.planner.pricing import written as written_summing
from penstock.planning.planner.terms import Terms
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
        """The schedule that is simulated, with the recomputes that the stages want."""
        count, setting = self.task.num_microbatches, self.setting
        whole = setting.whole(count) if setting.is_folded and self._shows_all else None
        return setting.with_recomputes(self._run_twice, whole)

    @cached_property
    def _run_twice(self) -> tuple[int, ...]:
        """The stages that run forward a second time as a whole."""
        return tuple(stage for stage, how in enumerate(self.recomputes) if how == "stage")

    @property
    def _shows_all(self) -> bool:
        """Whether the ranks of all pipelines side by side are simulated: where there are no more
        than two, and where they wait for each other."""
        task, setting = self.task, self.setting
        width = setting.num_pipelines
        return not (setting.is_folded and task.devices.are_apart(setting.devices, width))

    @property
    def _shown_ranks(self) -> Sequence[int]:
        """The ranks that are simulated."""
        setting = self.setting
        if self._shows_all:
            return range(setting.num_ranks)
        last = setting.num_pipelines - 1
        return [rank for first in setting.first_ranks for rank in (first, first + last)]

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Predicted bytes of memory of each rank."""
        every, first_of = range(self.setting.num_ranks), self.setting.first_of
        tensors = [self.tensor_bytes[first_of(rank)] for rank in every]
        return allocated(tensors, self._slacks(every))

    @cached_property
    def held(self) -> dict[int, int]:
        """As ``rank_bytes``, of the ranks that differ by their stages or what their devices have
        (``Setting.unlike_ranks``)."""
        ranks, first_of = self.setting.unlike_ranks(self.task), self.setting.first_of
        tensors = [self.tensor_bytes[first_of(rank)] for rank in ranks]
        return dict(zip(ranks, allocated(tensors, self._slacks(ranks)), strict=True))

    def held_on(self, rank: int) -> int:
        """As ``held``, of one rank alone where microbatches are whole."""
        if "held" not in vars(self) and self.setting.schedule.num_slices == 1:
            tensors = self.tensor_bytes_on(self.setting.first_of(rank))
            return allocated([tensors], self._slacks([rank]))[0]
        return self.held[rank]

    def _slacks(self, ranks: Iterable[int]) -> tuple[float, ...]:
        devices = self.task.cluster.devices
        return tuple(devices[self.setting.devices[rank]].allocator_slack for rank in ranks)

    @cached_property
    def tensor_bytes(self) -> dict[int, int]:
        """Predicted bytes of tensors on each of ``Setting.first_ranks``."""
        setting = self.setting
        if setting.schedule.num_slices == 1:
            return {rank: self.tensor_bytes_on(rank) for rank in setting.first_ranks}
        held = bytes_of_ranks(self.stages, setting.with_recomputes(self._run_twice))
        return {rank: held[setting.scheduled(rank)] for rank in setting.first_ranks}

    @kept
    def tensor_bytes_on(self, rank: int) -> int:
        """Predicted bytes of tensors on a rank where microbatches are whole, without a walk through
        all ops for each way to cut the model."""
        memory = memory_limits(self.task, self.setting)
        if self.setting.is_exact:
            (stage,) = self.setting.stages_on(rank)
            return memory.held_bytes(stage, self.recomputes[stage], *self.cuts[stage : stage + 2])
        own = self.setting.moments_on(rank)
        again = [stage for stage in own.stages if self.recomputes[stage] == "stage"]
        state = (
            memory.state_bytes(stage, self.recomputes[stage], *self.cuts[stage : stage + 2])
            for stage in own.stages
        )
        return sum(state) + ceil(own.most_bytes(self._sizes, again))

    def _sizes(self, stage: int) -> SizesOfOne:
        start, stop = self.cuts[stage : stage + 2]
        numbers, layers = self.task.layers.numbers(start, stop), self.recomputes[stage] == "layers"
        whole = numbers["again_input_bytes" if layers else "activation_bytes"]
        return self.task.layers.input_bytes[start], whole, numbers["weight_kept_bytes"]

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

    def forget(self) -> None:
        """Keep what this takes at least, and no more of what was worked out for that than takes
        little memory: it may be one of hundreds that wait for their turn."""
        kept = self.least_seconds
        vars(self).pop("stages", None)
        self.setting.stage_plans(self.task).clear()
        vars(self)["least_seconds"] = kept

    @cached_property
    def num_ops(self) -> int:
        """How many ops a simulation goes through."""
        setting = self.setting
        if not setting.versions.asynchronous:
            few = setting.with_recomputes(self._run_twice).num_ops
            folded = setting.is_folded and self._shows_all
            return few * setting.num_pipelines // 2 if folded else few
        count = num_simulated(setting.versions, self.task.num_microbatches, setting.all_replicas)
        return count * 2 * setting.num_stages

    @cached_property
    def effort(self) -> int:
        """How long a simulation takes, in ops of one that goes through them in the order of
        time."""
        setting = self.setting
        asynchronous = setting.versions.asynchronous
        in_turn = asynchronous and max(setting.all_replicas) > 1
        if in_turn or self.task.devices.rank_places(setting.devices).cards:
            # Who updates behind each backward also waits for a sum, and updates.
            each = in_turn and setting.versions.updates == "microbatch"
            return self.num_ops * (2 if each else 1)
        # Of pipelines side by side whose ranks have one stage each, one does.
        does = 2 if setting.is_single and setting.num_pipelines > 1 else 1
        return self.num_ops // (does * _QUICKER) + 1

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction for the stages in the order of the schedule's ops."""
        setting, ranks = self.setting, self._shown_ranks
        places = self.task.devices.rank_places(setting.devices).of(ranks)
        return Prediction(
            self.stages,
            self.task.num_microbatches,
            setting.versions,
            setting.all_replicas,
            self.schedule,
            self._build,
            cards=places.cards,
            hosts=places.hosts,
            slacks=self._slacks(ranks),
        )

    def _build(self, num_microbatches: int) -> Schedule:
        setting: Terms = self.setting
        if not self._shows_all:
            setting, num_microbatches = setting.folded(num_microbatches)
        schedule = setting.build(num_microbatches)
        return add_recompute(schedule, self._run_twice) if self._run_twice else schedule

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
        return worst_excess(self.task, self.setting, self.held)

    def limited_like(self, other: Candidate) -> Candidate:
        """This candidate's cuts under the memory limits of another candidate's cluster."""
        task = limited_like(self.task, other.task)
        return self if task is self.task else replace(self, task=task)

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
            [self.task.devices.tensor_limits[device] for device in setting.devices],
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
        # Only who adds up on servers asks with whom.
        for ranks in setting.ranks_of if self.way.reducer == "servers" else ():
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
        places = task.devices.rank_places(setting.devices)
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
            devices=tuple(
                part for device in setting.devices for part in task.devices.behind(device)
            ),
            hosts=places.hosts,
            cards=places.cards,
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
