"""``Candidate``: a setting with its cuts, which could be the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil, inf, lcm
from typing import NamedTuple

from msgspec.structs import replace as with_fields

from penstock.graph import Contention
from penstock.planner.setting import Rooms, Setting
from penstock.planner.task import Task
from penstock.plans.alternative import Alternative
from penstock.plans.orders import search_order, written
from penstock.plans.plan import Plan
from penstock.plans.stage_plan import Recompute, StagePlan, bytes_of_ranks, costs_of
from penstock.plans.steady import few_minibatches, steady_seconds
from penstock.plans.table import count_of, format_bytes
from penstock.schedule import Schedule
from penstock.schedule.families import SEARCHED
from penstock.schedule.lower import add_recompute, add_update
from penstock.timing.simulator import simulate
from penstock.timing.timeline import Timeline


class Excess(NamedTuple):
    """By how many bytes a limit is missed (≤ 0: it is not), and where."""

    num_bytes: float
    held: float
    limit: float
    place: str

    def __str__(self) -> str:
        over = f"{format_bytes(self.num_bytes)} over the {format_bytes(self.limit)} allowed"
        return f"{format_bytes(self.held)} {self.place}, {over}"


@dataclass(frozen=True)
class Candidate:
    """A setting with its cuts. Its text is for reasons and errors.

    Attributes:
        task: what is planned.
        setting: the schedule and its devices.
        cuts: where stages begin; the last entry is the number of layers.
        recomputes: of each stage.
    """

    task: Task
    setting: Setting
    cuts: tuple[int, ...]
    recomputes: tuple[Recompute, ...]

    def __str__(self) -> str:
        setting = self.setting
        name = setting.schedule.name
        if setting.replicas:
            name += " " + "-".join(map(str, setting.replicas))
        if setting.versions.asynchronous:
            name += f" ({setting.versions.name})"
        again = " and recompute" if any(one != "none" for one in self.recomputes) else ""
        if self.task.num_tensor_ranks > 1:
            again = f", layers over {self.task.num_tensor_ranks} devices{again}"
        if len(setting.replicas) == 1:
            return f"data parallelism on {count_of(setting.num_ranks, 'device')}{again}"
        return f"{count_of(len(self.recomputes), 'stage')} with {name}{again}"

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """Of the plan."""
        return tuple(
            self._stage(index, start, stop)
            for index, (start, stop) in enumerate(pairwise(self.cuts))
        )

    def _stage(self, index: int, start: int, stop: int) -> StagePlan:
        task, setting = self.task, self.setting
        devices, layers = setting.devices_of[index], task.graph.layers[start:stop]
        pace, more = task.pace(devices, setting.devices, setting.mode), task.graph.op_seconds
        is_last = stop == task.num_layers
        hop, busy = (
            (0.0, 0.0) if is_last else task.hop(stop, devices, setting.devices_of[index + 1])
        )

        def seconds(name: str) -> float:
            return pace.passes * task.sum(name, start, stop)

        prepares = seconds("split_forward_seconds") if setting.splits_backward else 0.0
        rank = setting.ranks_of[index][0]
        return StagePlan(
            layers=tuple(layer.name for layer in layers),
            rank=rank,
            forward_seconds=seconds("forward_seconds") + prepares + more,
            backward_input_seconds=seconds("backward_input_seconds") + more,
            backward_weight_seconds=seconds("backward_weight_seconds"),
            split_seconds=seconds("split_seconds") + more,
            recompute_seconds=seconds("recompute_seconds") + more,
            update_seconds=pace.updates * task.sum("update_seconds", start, stop),
            reduce_seconds=self._reduce_seconds(index, start, stop),
            hop_seconds=hop,
            link_seconds=busy,
            transfer_bytes=0 if is_last else task.crossing_bytes[stop],
            parameter_bytes=int(task.sum("parameter_bytes", start, stop)),
            optimizer_bytes=int(task.sum("optimizer_bytes", start, stop)),
            buffer_bytes=int(task.sum("buffer_bytes", start, stop)),
            sum_bytes=self._sum_bytes(index, start, stop),
            workspace_bytes=task.workspace_bytes(
                start, stop, again=self.recomputes[index] == "layers"
            ),
            activation_bytes=task.activation_bytes(start, stop),
            weight_kept_bytes=int(task.sum("weight_kept_bytes", start, stop)),
            input_bytes=task.input_bytes[start],
            layer_input_bytes=task.again_input_bytes(start, stop),
            peak_activations=setting.peaks[rank],
            weight_versions=setting.weight_versions(index, task.num_microbatches),
            recompute=self.recomputes[index],
            splits={} if task.groups is None else task.groups.splits([one.name for one in layers]),
        )

    def _reduce_seconds(self, index: int, start: int, stop: int) -> float:
        """Until gradients of replicas and of weights tied across stages are summed."""
        task, setting = self.task, self.setting
        devices = setting.devices_of[index]
        num_bytes = task.sum("parameter_bytes", start, stop)
        link = task.topology.slowest_link(devices, num_bytes)
        model = task.communication
        whole = model.reduce_seconds(num_bytes, len(devices), link)
        backward = task.sum("backward_input_seconds", start, stop) + task.sum(
            "backward_weight_seconds", start, stop
        )
        pace = task.pace(devices, setting.devices, setting.mode).passes
        hidden = model.overlap * min(whole, pace * backward)
        rate = task.graph.sum_bytes_per_second
        # Each replica adds what all others have of its own share.
        others = (len(devices) - 1) / len(devices)
        added = others * num_bytes / rate if rate else 0.0
        return whole - hidden + added + self._tied_seconds(index, start, stop)

    def _tied_seconds(self, index: int, start: int, stop: int) -> float:
        task, setting = self.task, self.setting
        total = 0.0
        for tie in task.ties:
            if tie.is_parted(start, stop):
                elsewhere = tie.last if start <= tie.first else tie.first
                other = setting.devices_of[self._stage_with(elsewhere)]
                # One half goes there to be summed, and comes back as a sum.
                half = (tie.num_bytes + 1) // 2
                link = task.link_between(setting.devices_of[index], other, half)
                total += 2 * link.seconds(half)
        return total

    def _sum_bytes(self, index: int, start: int, stop: int) -> int:
        """Of the parameters whose gradients a rank of the stage sums with others."""
        if len(self.setting.ranks_of[index]) > 1:
            return int(self.task.sum("parameter_bytes", start, stop))
        return sum(tie.num_bytes for tie in self.task.ties if tie.is_parted(start, stop))

    def _stage_with(self, layer: int) -> int:
        return next(stage for stage, stop in enumerate(self.cuts[1:]) if layer < stop)

    @cached_property
    def schedule(self) -> Schedule:
        """With the recomputes that its stages want."""
        again = [stage for stage, how in enumerate(self.recomputes) if how == "stage"]
        return add_recompute(self.setting.schedule, again) if again else self.setting.schedule

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Predicted memory of each rank."""
        setting, task = self.setting, self.task
        if not setting.is_exact:
            return bytes_of_ranks(self.stages, self.schedule)
        # The same, without another walk through all ops.
        rooms = Rooms(task, setting)
        held = [0] * setting.num_ranks
        for index, bounds in enumerate(pairwise(self.cuts)):
            needed = rooms.held_bytes(index, self.recomputes[index], *bounds)
            for rank in setting.ranks_of[index]:
                held[rank] = needed
        return tuple(held)

    @property
    def peak(self) -> float:
        """Microbatches in flight on the rank that holds most."""
        return max(self.setting.peaks)

    @cached_property
    def least_seconds(self) -> float:
        """No step is shorter: the first microbatch must reach each rank, the rank must do its work,
        and where a rank has one stage and whole backwards, the last gradient must travel back."""
        stages, setting = self.stages, self.setting
        count = self.task.num_microbatches
        if setting.versions.asynchronous:
            return self._least_steady_seconds
        # The first slice of a microbatch need not wait for the others.
        share = 1 / setting.schedule.num_slices
        way_in = [0.0, *accumulate(share * one.forward_seconds + one.hop_seconds for one in stages)]
        way_back = [
            0.0,
            *accumulate(share * one.backward_input_seconds + one.hop_seconds for one in stages),
        ]
        returns = setting.is_single and not setting.splits_backward
        bounds = []
        for own in setting.schedule.stages_of:
            shares = (ceil(count / setting.replicas_of(stage)) for stage in own)
            work = sum(
                share * _busy_seconds(stages[stage])
                for share, stage in zip(shares, own, strict=True)
            )
            updates = sum(stages[stage].update_seconds for stage in own)
            first = own[0]
            bounds.append(way_in[first] + work + updates)
            if returns and not setting.replicas:
                bounds.append(way_in[first] + work + way_back[first])
        return max(bounds)

    @property
    def _least_steady_seconds(self) -> float:
        """A full pipeline is as fast as its slowest rank or link."""
        setting, count = self.setting, self.task.num_microbatches
        replicas = [setting.replicas_of(index) for index in range(len(self.stages))]
        ranks = (
            count * _busy_seconds(stage) / own
            for stage, own in zip(self.stages, replicas, strict=True)
        )
        # Microbatches take turns on the pairs of replicas at the ends of a cut.
        links = (
            count * stage.link_seconds / lcm(*ends)
            for stage, ends in zip(self.stages, pairwise(replicas), strict=False)
        )
        return max(*ranks, *links, 0.0)

    @cached_property
    def num_ops(self) -> int:
        """That a simulation goes through."""
        setting = self.setting
        if not setting.versions.asynchronous:
            return sum(map(len, self.schedule.ranks))
        replicas = setting.replicas or (1,) * setting.num_stages
        turns = 3 * few_minibatches(replicas, self.task.num_microbatches)
        return turns * self.task.num_microbatches * 2 * setting.num_stages

    @cached_property
    def seconds(self) -> float:
        """The predicted minibatch, weight update included; without a flush, in the steady state."""
        if self.setting.versions.asynchronous:
            setting = self.setting
            return steady_seconds(
                setting.stream,
                setting.versions,
                costs_of(self.stages),
                self.task.num_microbatches,
                setting.replicas or (1,) * setting.num_stages,
            )
        return self._timeline.makespan

    @cached_property
    def _timeline(self) -> Timeline:
        """Of a step with a flush."""
        return simulate(add_update(self.schedule), costs_of(self.stages))

    @cached_property
    def bubble(self) -> float:
        """Idle rank-time over all rank-time."""
        if not self.setting.versions.asynchronous:
            return self._timeline.bubble
        if not self.seconds:
            return 0.0
        plan = self.to_plan()
        return max(0.0, 1 - plan.work_seconds / (self.seconds * self.setting.num_ranks))

    @cached_property
    def moved_bytes(self) -> int:
        """Over all links, for one minibatch: outputs, their gradients, and gradients of weights."""
        total = 0.0
        for index, stage in enumerate(self.stages):
            others = self.setting.replicas_of(index) - 1
            updates = 1
            if self.setting.versions.updates == "microbatch":
                updates = self.task.num_microbatches // self.setting.replicas_of(index)
            total += 2 * self.task.num_microbatches * stage.transfer_bytes
            total += 2 * others * stage.parameter_bytes * updates
        if self.task.groups is not None:
            used = self.setting.num_ranks / len(self.task.cluster.devices)
            total += self.task.groups.found.moved_bytes * max(used, 1 / len(self.stages))
        return round(total)

    @cached_property
    def delay(self) -> float:
        """Of the stage whose gradients are oldest, in updates."""
        plan = self.to_plan()
        return max(plan.versions.delay(plan.place(stage)) for stage in range(len(self.stages)))

    @cached_property
    def excess(self) -> Excess:
        """Of the limit that it misses most."""
        if min(self.task.limits) == inf and not self.task.topology.shared_memories:
            return _excess(0, inf, "")
        names = [self.task.cluster.devices[device].name for device in self.setting.devices]
        found = [
            _excess(held, self.task.limits[device], f"on rank {rank} ({names[rank]})")
            for rank, (held, device) in enumerate(
                zip(self.rank_bytes, self.setting.devices, strict=True)
            )
        ]
        for host, limit in self.task.topology.shared_memories:
            own = [
                held
                for held, device in zip(self.rank_bytes, self.setting.devices, strict=True)
                if device in host
            ]
            everybody = len(own) == self.setting.num_ranks
            place = "on all ranks together, which share memory"
            if not everybody:
                place = f"on the {len(own)} ranks that share a host's memory"
            # Who shares layers with a rank shares its host's memory, too.
            found.append(_excess(sum(own) * self.task.num_tensor_ranks, limit, place))
        return max(found)

    def limited_like(self, other: Candidate) -> Candidate:
        """The same cuts under the memory limits of another candidate's cluster."""
        task, like = self.task, other.task
        ranks = range(len(like.cluster.devices))
        limits = {one.name: one.memory_bytes for rank in ranks for one in like.devices_at(rank)}
        shared = {group.name: group.memory_bytes for group in like.cluster.groups}

        def limit(index: int) -> int:
            own = (limits.get(one.name, 0) for one in task.devices_at(index))
            return min(filter(None, own), default=0)

        cluster = with_fields(
            task.cluster,
            devices=tuple(
                with_fields(device, memory_bytes=limit(index))
                for index, device in enumerate(task.cluster.devices)
            ),
            memory_bytes=like.cluster.memory_bytes,
            groups=tuple(
                with_fields(group, memory_bytes=shared.get(group.name, 0))
                for group in task.cluster.groups
            ),
        )
        return replace(self, task=replace(task, cluster=cluster, memory_bytes=like.memory_bytes))

    @property
    def fits(self) -> bool:
        """Whether it keeps all limits."""
        return self.excess.num_bytes <= 0

    def with_final_order(self) -> Candidate:
        """With the order that its family finds for these stages, in the memory of their devices;
        with the one that holds its place, where the simulator says that this is better.

        Raises:
            InputError: the family finds none.
        """
        setting = self.setting
        found = search_order(
            setting.schedule.name,
            self.stages,
            self.task.num_microbatches,
            setting.options,
            [self.task.limits[device] for device in setting.devices],
        )
        settings = (
            replace(setting, schedule=one, is_final=True) for one in (found, setting.schedule)
        )
        ordered, held = (replace(self, setting=one) for one in settings)
        # Links that are busy, updates and memory that a host shares are the simulator's to judge.
        return ordered if ordered.fits and ordered.seconds <= self.seconds else held

    def to_plan(
        self,
        reason: str = "",
        alternatives: tuple[Alternative, ...] = (),
        warnings: tuple[str, ...] = (),
    ) -> Plan:
        """The file that people read and the runtime runs."""
        task, setting = self.task, self.setting
        options = dict(setting.options)
        if setting.replicas:
            options["replicas"] = list(setting.replicas)
        return Plan(
            model=task.graph.fingerprint,
            schedule=setting.schedule.name,
            num_microbatches=task.num_microbatches,
            options=options,
            order=written(setting.schedule) if setting.schedule.name in SEARCHED else (),
            stages=self.stages,
            versions=setting.versions,
            num_threads=task.graph.num_threads,
            microbatch_size=task.graph.microbatch_size,
            devices=tuple(one for device in setting.devices for one in task.devices_at(device)),
            num_tensor_ranks=task.num_tensor_ranks,
            cost_model=task.communication.name,
            reason=reason,
            alternatives=alternatives,
            contention=task.graph.contention if task.topology.shared_memories else Contention(),
            warnings=warnings,
        )


def _busy_seconds(stage: StagePlan) -> float:
    """Of a microbatch on one of a stage's ranks."""
    again = stage.again_seconds if stage.recompute != "none" else 0.0
    return stage.compute_seconds + again


def _excess(held: float, limit: float, place: str) -> Excess:
    return Excess(held - limit if limit < inf else -inf, held, limit, place)
