"""Where the ranks of a pipeline are: all in threads of this process, or one of them in it.

What differs between the two when a pipeline is put together (``building.assemble``) is a method of
``RankPlacement`` here; all else is the same.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist

from penstock.engine.device.accelerators import HOST, devices_of_ranks
from penstock.engine.device.queue import AcceleratorQueue, DeviceQueue
from penstock.engine.model.spine import NamedLayer, spine_fingerprint
from penstock.engine.reduce import sums
from penstock.engine.reduce.expert_weights import ExpertGroups, StageExperts, with_experts
from penstock.engine.reduce.fully_sharded import CopiesOfStage, HomeGroups, make_homes
from penstock.engine.reduce.owners import OwnerReducer
from penstock.engine.reduce.reducer import MakeReducer
from penstock.engine.run.assembly import Running
from penstock.engine.run.digests import ComparingTransport
from penstock.engine.run.drive.driver import Driver, told
from penstock.engine.run.drive.joining import offsets_of_clocks
from penstock.engine.run.drive.offers import agree
from penstock.engine.run.drive.processes import ProcessDriver
from penstock.engine.run.drive.threads import ThreadDriver
from penstock.engine.run.layout import Layout
from penstock.engine.run.materialising import Values, Wholes
from penstock.engine.run.placing import building, local_rank
from penstock.engine.run.rank.compiler import RankExtras
from penstock.engine.run.rank.on_trust import Poison
from penstock.engine.run.rank.parameter_server import ParameterServer
from penstock.engine.run.rank.updater import Updater
from penstock.engine.run.rank.worker import Worker
from penstock.engine.run.recipe import Recipe
from penstock.engine.run.refusals import (
    check_experts_here,
    check_processes,
    check_sharding,
    check_stage_norms,
    check_updates,
    seats_of,
    warn_of_hosts,
)
from penstock.engine.run.seating import MeshTransport, RankSeat
from penstock.engine.stage.stage import Stage
from penstock.engine.tensor.group import ChannelGroup
from penstock.engine.transport import (
    Codec,
    ThreadExchange,
    ThreadTransport,
    Transport,
    connect,
    groups,
)
from penstock.engine.transport.device_link import DeviceLink
from penstock.engine.transport.on_devices import (
    LinkedDevices,
    ProcessDeviceTransport,
    ThreadDeviceTransport,
    link_devices,
)
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.engine.weights.data_paths import DataPath
from penstock.engine.weights.offload import Keep, Offloading
from penstock.engine.weights.sharded_layers import ShardedLayers
from penstock.planning.plans import Plan
from penstock.planning.plans.summing import server_ranks


@dataclass(frozen=True)
class Connections:
    """How a rank, or a member of one, is connected to others and to its device.

    Attributes:
        transport: its end of its channels to other seats.
        seat: where it sits.
        queue: its work on its device, if that is not the host.
        links: to the devices of other seats.
        make_reducer: how gradients of weights are summed that others hold, too.
    """

    transport: Transport
    seat: RankSeat
    queue: DeviceQueue | None
    links: Mapping[int, DeviceLink] = field(default_factory=dict)
    make_reducer: MakeReducer = OwnerReducer

    @cached_property
    def channels(self) -> Transport:
        """The transport between seats, for tensors that are on the device."""
        if self.queue is not None and isinstance(self.transport, ThreadTransport):
            return ThreadDeviceTransport(self.transport, self.queue)
        if isinstance(self.queue, AcceleratorQueue):
            return ProcessDeviceTransport(self.transport, self.queue, self.links)
        return self.transport

    @cached_property
    def group(self) -> ChannelGroup | None:
        """With whom it shares its layers; ``None`` if with nobody."""
        return self.seat.group(self.channels)

    def stages(self, layout: Layout, wholes: Wholes | None = None) -> dict[int, Stage]:
        """Its own; ``wholes`` brings values for it, where nobody else does."""
        with building(self.queue):
            return layout.stages(self.seat.rank, self.group, wholes)

    def between_ranks(self, layout: Layout) -> Transport:
        """The transport between ranks of the plan."""
        if layout.sharings is None:
            return self.channels
        divided = layout.sharings.along(layout.skips)
        return MeshTransport(self.channels, self.seat, self.group, divided)


def worker_of(
    layout: Layout,
    stages: dict[int, Stage],
    recipe: Recipe,
    connections: Connections,
    extras: RankExtras,
) -> Worker:
    """The worker that performs a rank's ops at a seat, or, of a parameter server, its updates.

    Args:
        stages: the rank's, as its seat has them.
        extras: what else it has; skips and versions of weights are the layout's.

    Raises:
        InputError: the recipe asks for what this rank cannot do.
    """
    check_stage_norms(layout, recipe)
    if recipe.stays_finite:
        for stage in stages.values():
            stage.stay_finite()
    transport, rank = connections.between_ranks(layout), connections.seat.rank
    with building(connections.queue):
        updater = Updater(
            rank,
            layout.num_ranks,
            layout.holdings(rank, stages),
            transport,
            recipe,
            layout.shared(rank, stages, connections.group),
            connections.group,
            connections.make_reducer,
        )
        stores = layout.stores(stages, updater.optimizers)
        make = ParameterServer if rank in layout.server_ranks else Worker
        extras = replace(extras, skips=layout.skips, stores=stores)
        return make(rank, stages, transport, recipe, updater, extras)


def offloading_of(
    plan: Plan, device: torch.device, seconds: float
) -> Callable[[Keep], Offloading] | None:
    """A function that lets a rank's activations leave, if the plan says so."""
    if plan.offload is None:
        return None
    return partial(Offloading, DataPath.between(plan.offload.tier, device, seconds), device)


class RankPlacement(ABC):
    """Where ranks are, asked by ``building.assemble`` in the order of the methods here.

    Attributes:
        plan: the one that is run.
        seed: of everything random.
        attempt: the name of this pipeline, which no other has, the same on all ranks.
        seats: of the whole plan, in their order.
        one_process: whether all ranks are here.
        in_processes: whether other processes have ranks of the pipeline.
    """

    one_process: bool
    in_processes: bool

    def __init__(
        self, plan: Plan, seed: int, attempt: str, recipe: Recipe, running: Running
    ) -> None:
        check_updates(plan, recipe, one_process=self.one_process)
        self.plan = plan
        self.seed = seed
        self.attempt = attempt
        self.seats = seats_of(plan)
        self._running = running
        self._start = running.deadlines.start

    @abstractmethod
    def devices(self) -> dict[int, torch.device]:
        """Where the ranks of this process compute, by the numbers of their seats; parameter servers
        do so in main memory."""

    @abstractmethod
    def kinds(self, devices: Mapping[int, torch.device]) -> Sequence[str]:
        """The kinds of device of all seats, in their order."""

    @abstractmethod
    def drawn(
        self, devices: Mapping[int, torch.device], queues: Mapping[int, DeviceQueue]
    ) -> tuple[Mapping[int, torch.device], Mapping[int, DeviceQueue]]:
        """By rank, where layers go that are drawn before stages are built, and those devices' work;
        of the others values are drawn when they are divided, or leave."""

    @abstractmethod
    def connections(
        self,
        layout: Layout,
        devices: Mapping[int, torch.device],
        queues: Mapping[int, DeviceQueue],
    ) -> list[Connections]:
        """How the ranks of this process are connected, in the order of their seats."""

    def wholes(self, layout: Layout, seat: RankSeat, values: Values) -> Wholes | None:
        """A source of whole values, where a process keeps parts of them only."""
        return None

    def shard(self, layout: Layout, stages: Mapping[RankSeat, Mapping[int, Stage]]) -> None:  # noqa: B027 - in threads nobody does
        """Let stages keep rows of their weights where the plan says so, before anything else knows
        these.

        Raises:
            ModelError: a layer cannot be sharded.
        """

    @abstractmethod
    def begin(self, workers: Sequence[Worker], layout: Layout) -> None:
        """Make equal what other processes have, too: all has been built."""

    @abstractmethod
    def driver(self, workers: Sequence[Worker]) -> Driver[Any]:
        """Who drives the workers."""

    @abstractmethod
    def transport_text(self, layout: Layout) -> str:
        """How messages travel between ranks, and why so, as a sentence."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell others that nothing comes of it."""


class InThreads(RankPlacement):
    """All ranks in this process, each in a thread of its own."""

    one_process = True
    in_processes = False

    def __init__(self, plan: Plan, recipe: Recipe, running: Running) -> None:
        super().__init__(plan, running.seed, _new_name(), recipe, running)

    def devices(self) -> dict[int, torch.device]:
        given, plan = self._running.devices, self.plan
        devices = devices_of_ranks(given, plan.on_accelerator, range(plan.num_seats))
        servers = server_ranks(plan)
        return devices | {seat.number: HOST for seat in self.seats if seat.rank in servers}

    def kinds(self, devices: Mapping[int, torch.device]) -> Sequence[str]:
        return [devices[seat.number].type for seat in self.seats]

    def drawn(
        self, devices: Mapping[int, torch.device], queues: Mapping[int, DeviceQueue]
    ) -> tuple[Mapping[int, torch.device], Mapping[int, DeviceQueue]]:
        if self.plan.num_tensor_ranks > 1:
            return dict.fromkeys(range(self.plan.num_ranks), HOST), {}
        return (devices, queues) if self.plan.spill is None else ({}, {})

    def connections(
        self,
        layout: Layout,
        devices: Mapping[int, torch.device],
        queues: Mapping[int, DeviceQueue],
    ) -> list[Connections]:
        exchange = ThreadExchange(len(self.seats), self._start.seconds)
        make_reducer = sums.in_threads(self.plan.summing, self.attempt, layout.server_ranks)
        return [
            Connections(transport, seat, queues.get(seat.number), make_reducer=make_reducer)
            for seat, transport in zip(self.seats, exchange.transports, strict=True)
        ]

    def begin(self, workers: Sequence[Worker], layout: Layout) -> None:
        """Nobody else has anything."""

    def driver(self, workers: Sequence[Worker]) -> ThreadDriver:
        return ThreadDriver(workers, self.plan.num_threads, self._running.deadlines)

    def transport_text(self, layout: Layout) -> str:
        return "Ranks are threads of this process, and hand values over as they are."

    def fail(self, error: BaseException) -> None:
        """Nobody waits."""


class InProcess(RankPlacement):
    """One rank, or one member of it, in this process.

    Args:
        meeting: where all processes meet.
        plan: this process's; rank 0's is run.
        layers: of the whole model.

    Raises:
        InputError: the number of processes is not the plan's, or their settings differ.
        ModelError: processes built different models.
        PeerError, DeadlineError: another process failed or did not come.
    """

    one_process = False

    def __init__(
        self,
        meeting: Rendezvous,
        plan: Plan,
        layers: Sequence[NamedLayer],
        recipe: Recipe,
        running: Running,
    ) -> None:
        settings = {**recipe.settings, **running.settings}
        fingerprint = spine_fingerprint(layers)
        agreed = agree(
            meeting, plan, fingerprint, running.seed, _new_name(), settings, _traced(layers)
        )
        check_processes(agreed.plan, meeting.num_ranks)
        super().__init__(*agreed, recipe, running)
        self.in_processes = meeting.num_ranks > 1
        self._meeting = meeting
        self._seat = self.seats[meeting.rank]
        way = running.transport
        assert way != "threads"  # who asks for them meets nobody
        codec = Codec(_message_types(layers, running))
        self._transport = connect(meeting, self._start.seconds, way=way, codec=codec)
        self._transport.patience = self._start
        self._compared = ComparingTransport(self._transport, meeting.rank)
        self._links = LinkedDevices()
        self._sharded: dict[int, ShardedLayers] = {}
        self._experts: dict[int, StageExperts] = {}

    def devices(self) -> dict[int, torch.device]:
        seat, plan = self._seat, self.plan
        if seat.rank in server_ranks(plan):
            return {seat.number: HOST}
        first = local_rank()
        return devices_of_ranks(
            self._running.devices, plan.on_accelerator, [seat.number], first=first
        )

    def kinds(self, devices: Mapping[int, torch.device]) -> Sequence[str]:
        own = devices[self._seat.number].type
        return self._meeting.exchange(own, str, "to say on which kind of device it is")

    def drawn(
        self, devices: Mapping[int, torch.device], queues: Mapping[int, DeviceQueue]
    ) -> tuple[Mapping[int, torch.device], Mapping[int, DeviceQueue]]:
        seat = self._seat
        if self.plan.spill is not None or seat.size > 1:
            return {}, {}
        own = {seat.rank: queues[seat.number]} if queues else {}
        return {seat.rank: devices[seat.number]}, own

    def connections(
        self,
        layout: Layout,
        devices: Mapping[int, torch.device],
        queues: Mapping[int, DeviceQueue],
    ) -> list[Connections]:
        meeting, seat, seconds = self._meeting, self._seat, self._start.seconds
        if meeting.rank == 0:
            firsts = [own.number for own in self.seats if own.coordinate == 0]
            warn_of_hosts(self.plan, firsts, self._transport.hosts)
        queue = queues.get(seat.number)
        if self._running.transport == "auto":
            host, device = self._transport.hosts[meeting.rank], devices[seat.number]
            pairs = layout.neighbours
            self._links = link_devices(meeting, host, device, queue, pairs, seconds)
        make_reducer = sums.maker_of(
            self.plan.summing,
            self.attempt,
            layout.holders,
            seconds,
            seat.coordinate,
            layout.server_ranks,
            [first.ranks for first, *_ in layout.weights.groups],
            self._sharded,
        )
        if self.plan.divides_experts:
            make_reducer = partial(with_experts, others=make_reducer, experts=self._experts)
        return [Connections(self._compared, seat, queue, self._links.of_rank, make_reducer)]

    def wholes(self, layout: Layout, seat: RankSeat, values: Values) -> Wholes | None:
        group = seat.group(self._compared)  # for what is in main memory, where values are drawn
        if group is None or layout.sharings is None:
            return None
        return Wholes(layout.layers_of(seat.rank), values, group, layout.sharings.cuts)

    def shard(self, layout: Layout, stages: Mapping[RankSeat, Mapping[int, Stage]]) -> None:
        device = self.devices()[self._seat.number].type
        if self.plan.summing.reducer == "fully-sharded":
            check_sharding(layout.weights.tied, device)
            self._shard_fully(layout, stages[self._seat])
        if self.plan.divides_experts:
            check_experts_here(device)
            self._divide_experts(layout, stages[self._seat])

    def _shard_fully(self, layout: Layout, own: Mapping[int, Stage]) -> None:
        self._meeting.exchange(None, NoneType, "to have parts of stages")
        rank = self._seat.rank
        homes = {stage: ranks for stage, ranks in self._homes.items() if len(ranks) > 1}
        made = make_homes(homes, self.plan.summing, rank, self._start.seconds)
        copies = {stage: CopiesOfStage(home, rank, self._transport) for stage, home in made.items()}
        layout.shard(own, copies)
        for index in copies:
            sharded = own[index].sharded
            assert sharded is not None
            self._sharded[index] = sharded

    def _divide_experts(self, layout: Layout, own: Mapping[int, Stage]) -> None:
        divided = {
            stage: ExpertGroups(ranks, planned.expert_ranks)
            for (stage, ranks), planned in zip(self._homes.items(), self.plan.stages, strict=True)
            if planned.expert_ranks > 1
        }
        wanted = [(stage, ranks) for stage, parted in divided.items() for ranks in parted.all]
        made = self._groups([ranks for _, ranks in wanted])
        rank, doing = self._seat.rank, "sending tokens to their experts"
        reached = {
            key: CopiesOfStage(HomeGroups.of_one(group, key[1]), rank, self._transport, doing)
            for key, group in zip(wanted, made, strict=True)
            if rank in key[1]
        }
        here = {stage: parted for stage, parted in divided.items() if rank in parted.everyone}
        layout.divide_experts(
            own,
            {
                stage: (reached[stage, parted.with_all(rank)], reached[stage, parted.everyone])
                for stage, parted in here.items()
            },
        )
        for stage, parted in here.items():
            experts = own[stage].experts
            assert experts is not None
            self._experts[stage] = StageExperts(experts, parted.with_same(rank))

    @property
    def _homes(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each stage, ascending."""
        ranks_of = self.plan.placement.ranks_of
        return {stage: tuple(sorted(ranks_of(stage))) for stage in range(len(self.plan.stages))}

    def _groups(self, parts: Sequence[Sequence[int]]) -> list[dist.ProcessGroup]:
        """A process group for each of some sets of ranks, when all processes have come."""
        self._meeting.exchange(None, NoneType, "to have parts of stages")
        return groups.make_groups(self._start.seconds, parts)

    def begin(self, workers: Sequence[Worker], layout: Layout) -> None:
        # The user's code has run: whoever fails in it says so here, before others wait for more.
        self._meeting.exchange(None, NoneType, "to start training")
        (worker,) = workers
        with building(worker.queue):
            worker.updater.sums.begin_equal(self.plan.summing)
            layout.let_go()  # what was made equal are copies, where a group has the model's layers
            worker.transport.hand_over()

    def driver(self, workers: Sequence[Worker]) -> ProcessDriver:
        (worker,), running = workers, self._running
        return ProcessDriver(
            worker,
            self._compared,
            self._meeting,
            running.deadlines,
            num_told=self.plan.num_ranks,
            num_threads=self.plan.num_threads,
            clock_offsets=offsets_of_clocks(self._transport) if running.record else None,
            share_results=running.results == "every rank",
        )

    def transport_text(self, layout: Layout) -> str:
        summed = sums.summing_words(self.plan.summing) if layout.weights.shared_stages else ""
        text = "; ".join(filter(None, [self._transport.told, self._links.words, summed]))
        return f"{text[:1].upper()}{text[1:]}."

    def fail(self, error: BaseException) -> None:
        self._transport.close(f"before its first step, {type(error).__name__}: {told(error)}")


def _new_name() -> str:
    return uuid.uuid4().hex


def _message_types(layers: Sequence[NamedLayer], running: Running) -> list[type]:
    """The classes that messages may hold: the engine's, the user's, and those that layers say their
    outputs are made of."""
    of_layers = {kind for layer in layers for kind in getattr(layer.module, "message_types", ())}
    return [Poison, *running.message_types, *of_layers]


def _traced(layers: Sequence[NamedLayer]) -> dict[str, str]:
    """The digests of the layers of a model that was traced, by their names."""
    digests = ((layer.name, getattr(layer.module, "traced_as", None)) for layer in layers)
    return {name: digest for name, digest in digests if isinstance(digest, str)}
