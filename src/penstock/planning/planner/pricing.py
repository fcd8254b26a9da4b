"""What the stages of a candidate cost: seconds and bytes of layers, on the devices of a setting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.planning.planner.setting import Setting
from penstock.planning.planner.summing import Way
from penstock.planning.planner.task import Task
from penstock.planning.plans.stage_plan import RecomputeWay, StagePlan
from penstock.planning.plans.summing import COPIES_OF_GRADIENTS


class _Reduced(NamedTuple):
    """How a stage's gradients are summed; see ``StagePlan``."""

    seconds: float
    num_parts: int = 1
    steps: tuple[float, ...] = ()


@dataclass(frozen=True)
class CutSetting:
    """A setting with its cuts, and what that costs before anything is known of the order of ops.

    Attributes:
        task: what is planned.
        setting: the schedule and its devices.
        cuts: where stages begin; the last entry is the number of layers.
        recomputes: what each stage runs again before its backward.
    """

    task: Task
    setting: Setting
    cuts: tuple[int, ...]
    recomputes: tuple[RecomputeWay, ...]

    @cached_property
    def way(self) -> Way:
        """How copies of stages sum their gradients."""
        copies = sum(len(ranks) > 1 for ranks in self.setting.ranks_of)
        return Way(self.task, self.setting.reducer_of(self.task), max(copies, 1))

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """The plan of each stage, with its predicted costs, in execution order."""
        return tuple(self._stage(index) for index in range(len(self.recomputes)))

    def _stage(self, index: int) -> StagePlan:
        start, stop = self.cuts[index : index + 2]
        task, setting = self.task, self.setting
        devices, layers = setting.devices_of[index], task.graph.layers[start:stop]
        pace, more = task.pace(devices, setting.devices, setting.mode), task.graph.op_seconds
        is_last = stop == task.num_layers
        hop, busy = (
            (0.0, 0.0) if is_last else task.hop(stop, devices, setting.devices_of[index + 1])
        )

        def seconds(name: str) -> float:
            return pace.passes * task.sum(name, start, stop)

        prepares = seconds("split_forward_seconds") if setting.schedule.splits_backward else 0.0
        rank, replicas = setting.ranks_of[index][0], len(setting.ranks_of[index])
        update = pace.updates * task.sum("update_seconds", start, stop)
        reduced = self._reduced(index, start, stop)
        return StagePlan(
            layers=tuple(layer.name for layer in layers),
            rank=rank,
            forward_seconds=seconds("forward_seconds") + prepares + more,
            backward_input_seconds=seconds("backward_input_seconds") + more,
            backward_weight_seconds=seconds("backward_weight_seconds"),
            split_seconds=seconds("split_seconds") + more,
            recompute_seconds=seconds("recompute_seconds") + more,
            update_seconds=self.way.update_seconds(update, replicas),
            reduce_seconds=reduced.seconds,
            reduce_parts=reduced.num_parts,
            reduce_steps=reduced.steps,
            hop_seconds=hop,
            link_seconds=busy,
            transfer_bytes=0 if is_last else task.crossing_bytes[stop],
            parameter_bytes=int(task.sum("parameter_bytes", start, stop)),
            optimizer_bytes=self.way.optimizer_bytes(
                task.sum("optimizer_bytes", start, stop), replicas
            ),
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
            tensor_ranks=task.num_devices_at(devices[0]),
            splits={}
            if task.groups is None or task.num_devices_at(devices[0]) == 1
            else task.groups.splits([layer.name for layer in layers]),
        )

    def _reduced(self, index: int, start: int, stop: int) -> _Reduced:
        """How gradients of replicas, and of weights tied across stages, are summed."""
        task, setting = self.task, self.setting
        devices = setting.devices_of[index]
        num_bytes = task.sum("parameter_bytes", start, stop)
        model = task.communication
        whole = self.way.exchange_seconds(num_bytes, devices)
        backward = task.sum("backward_input_seconds", start, stop) + task.sum(
            "backward_weight_seconds", start, stop
        )
        pace = task.pace(devices, setting.devices, setting.mode).passes
        hidden = model.overlap * min(whole, pace * backward)
        rate = task.graph.sum_bytes_per_second
        # Each replica adds what all others have of its own share.
        added = self.way.added_bytes(num_bytes, devices) / rate if rate else 0.0
        seconds = whole - hidden + added + self._tied_seconds(index, start, stop)
        num_parts = self.way.num_parts(num_bytes, devices)
        if num_parts == 1:
            return _Reduced(seconds)
        latency = self.way.exchange_seconds(0.0, devices)
        return _Reduced(seconds, num_parts, (max(whole - latency, 0.0), added))

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
        """Bytes of the parameters whose gradients a rank of the stage sums with others."""
        if len(self.setting.ranks_of[index]) > 1:
            copies = COPIES_OF_GRADIENTS[self.way.reducer]
            return copies * int(self.task.sum("parameter_bytes", start, stop))
        return sum(tie.num_bytes for tie in self.task.ties if tie.is_parted(start, stop))

    def _stage_with(self, layer: int) -> int:
        return next(stage for stage, stop in enumerate(self.cuts[1:]) if layer < stop)
