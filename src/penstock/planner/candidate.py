"""What the search weighs: a ``Task``, a ``Setting`` for it, and the ``Candidate`` they give."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf

from penstock.cluster import Cluster
from penstock.graph import LayerGraph
from penstock.planner.plan import Plan
from penstock.planner.stage_plan import StagePlan, bytes_of_ranks, costs_of
from penstock.planner.table import format_bytes
from penstock.schedule import Schedule
from penstock.schedule.lower import add_update
from penstock.schedule.memory import peak_activations
from penstock.simulator import simulate
from penstock.versions import Flush, Policy, place_of, weight_copies


@dataclass(frozen=True)
class Setting:
    """A schedule on some number of ranks, before anything is said about layers.

    Attributes:
        schedule: of one minibatch; of a stream, as long as shows how much is in flight.
        versions: which weights passes read.
        replicas: of each stage; empty for one of each.
    """

    schedule: Schedule
    versions: Policy = field(default_factory=Flush)
    replicas: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        """How many devices it uses."""
        return self.schedule.num_ranks

    @property
    def num_stages(self) -> int:
        """Into how many stages it wants the model cut."""
        return self.schedule.num_stages

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(self.schedule.ranks_of(stage)[0] for stage in range(self.num_stages))

    def replicas_of(self, stage: int) -> int:
        """How many ranks hold a stage."""
        return self.replicas[stage] if self.replicas else 1

    def weight_versions(self, stage: int, num_microbatches: int) -> int:
        """Copies of a stage's weights."""
        replicas = self.replicas or (1,) * self.num_stages
        return weight_copies(
            self.versions, place_of(self.versions, replicas, stage, num_microbatches)
        )

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Per rank, microbatches in flight at the worst moment."""
        return peak_activations(self.schedule.ranks, self.schedule.num_slices)


@dataclass(frozen=True)
class Task:
    """What was asked for, and the numbers of any stage that could be part of an answer."""

    graph: LayerGraph
    cluster: Cluster
    num_microbatches: int
    memory_bytes: int | None

    def limit(self, rank: int) -> float:
        """Bytes that a rank may use."""
        limits = (self.cluster.devices[rank].memory_bytes, self.memory_bytes)
        return min((limit for limit in limits if limit), default=inf)

    def hop_seconds(self, stop: int) -> float:
        """From the output of the layer before ``stop`` until another rank can use it."""
        hop = self.cluster.link.seconds(self.graph.layers[stop - 1].output_bytes)
        # A link with a latency was measured as a whole; one without does not know what handing a
        # message to another worker costs, but the profile does.
        return hop if self.cluster.link.latency_seconds else hop + self.graph.hop_seconds

    def sizes(self, start: int, stop: int) -> tuple[int, int, int]:
        """Bytes of parameters, optimizer state and one microbatch's activations of a stage with
        layers ``[start, stop)``."""
        parameters, optimizer, activations = self._sums
        # A stage hands back the gradient of its input, so it holds that whatever its layers keep.
        held = self.graph.layers[start].held_input_bytes
        return (
            parameters[stop] - parameters[start],
            optimizer[stop] - optimizer[start],
            activations[stop] - activations[start] + held,
        )

    def stage(self, setting: Setting, index: int, start: int, stop: int) -> StagePlan:
        """Stage ``index`` with layers ``[start, stop)``, on its device."""
        layers, rank = self.graph.layers[start:stop], setting.rank_of[index]
        speed = self.cluster.devices[rank].speed
        parameters, optimizer, activations = self.sizes(start, stop)
        return StagePlan(
            layers=tuple(layer.name for layer in layers),
            rank=rank,
            forward_seconds=sum(layer.forward_seconds for layer in layers) / speed,
            backward_input_seconds=sum(one.backward_input_seconds for one in layers) / speed,
            backward_weight_seconds=sum(one.backward_weight_seconds for one in layers) / speed,
            update_seconds=sum(layer.update_seconds for layer in layers) / speed,
            hop_seconds=self.hop_seconds(stop) if stop < len(self.graph.layers) else 0.0,
            parameter_bytes=parameters,
            optimizer_bytes=optimizer,
            activation_bytes=activations,
            weight_kept_bytes=sum(layer.weight_kept_bytes for layer in layers),
            input_bytes=self._input_bytes[start],
            layer_input_bytes=sum(self._input_bytes[start:stop]),
            peak_activations=setting.peaks[rank],
            weight_versions=setting.weight_versions(index, self.num_microbatches),
        )

    @cached_property
    def _input_bytes(self) -> list[int]:
        """Of every layer."""
        return [self.graph.input_bytes, *(layer.output_bytes for layer in self.graph.layers)]

    @cached_property
    def _sums(self) -> tuple[list[int], ...]:
        """Of parameters, optimizer state and activations: entry k is that of the first k layers."""
        layers = self.graph.layers
        columns = (
            (layer.parameter_bytes for layer in layers),
            (layer.optimizer_bytes for layer in layers),
            (layer.activation_bytes for layer in layers),
        )
        return tuple(list(accumulate(column, initial=0)) for column in columns)


@dataclass(frozen=True)
class Candidate:
    """A setting with its cuts. Its text is for reasons and errors."""

    task: Task
    setting: Setting
    stages: tuple[StagePlan, ...]

    def __str__(self) -> str:
        count = len(self.stages)
        return f"{count} stage{'s' if count > 1 else ''} with {self.setting.schedule.name}"

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Predicted memory of each rank."""
        return bytes_of_ranks(self.stages, self.setting.schedule)

    @property
    def peak(self) -> float:
        """Microbatches in flight on the rank that holds most."""
        return max(self.setting.peaks)

    @cached_property
    def least_seconds(self) -> float:
        """No step is shorter than the work of its busiest rank."""
        work = [0.0] * self.setting.num_ranks
        for index, stage in enumerate(self.stages):
            count = self.setting.replicas_of(index)
            compute = self.task.num_microbatches * stage.compute_seconds / count
            work[stage.rank] += compute + stage.update_seconds
        return max(work)

    @cached_property
    def seconds(self) -> float:
        """The predicted step, weight update included."""
        if self.setting.versions.asynchronous:
            return self.to_plan().step_seconds
        return simulate(add_update(self.setting.schedule), costs_of(self.stages)).makespan

    def excess(self) -> tuple[float, str]:
        """By how many bytes it misses the limit it misses most (≤ 0: it fits), and where."""
        devices = self.task.cluster.devices
        needs = [
            (held, self.task.limit(rank), f"on rank {rank} ({devices[rank].name})")
            for rank, held in enumerate(self.rank_bytes)
        ]
        shared = self.task.cluster.memory_bytes or inf
        needs.append((sum(self.rank_bytes), shared, "on all ranks together, which share memory"))
        held, limit, place = max(needs, key=lambda need: need[0] - need[1])
        over = f"{format_bytes(held - limit)} over the {format_bytes(limit)} allowed"
        return held - limit, f"{format_bytes(held)} {place}, {over}"

    def to_plan(self, reason: str = "") -> Plan:
        """The file that people read and the runtime runs."""
        return Plan(
            model=self.task.graph.fingerprint,
            schedule=self.setting.schedule.name,
            num_microbatches=self.task.num_microbatches,
            options={"replicas": list(self.setting.replicas)} if self.setting.replicas else {},
            stages=self.stages,
            versions=self.setting.versions,
            num_threads=self.task.graph.num_threads,
            reason=reason,
        )
