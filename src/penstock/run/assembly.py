"""Put a pipeline together: from a model, a plan and a recipe to workers and their driver."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from penstock.device.placement import Devices, devices_of_ranks
from penstock.device.queue import AcceleratorQueue, DeviceQueue
from penstock.errors import InputError
from penstock.model.randomness import LayerStreams
from penstock.model.spine import NamedLayer, spine_fingerprint
from penstock.plans import Plan
from penstock.reduce import ways
from penstock.reduce.owners import OwnerReducer
from penstock.reduce.reducer import MakeReducer
from penstock.run.cutter import Cutter
from penstock.run.drive.clocks import offsets_of_clocks
from penstock.run.drive.driver import Deadlines, Driver, StageStates, told
from penstock.run.drive.joining import TransportName
from penstock.run.drive.offers import agree
from penstock.run.drive.processes import ProcessDriver
from penstock.run.drive.threads import ThreadDriver
from penstock.run.feed import Feed
from penstock.run.given_weights import GivenWeights
from penstock.run.giving import DeviceGiver, Giver
from penstock.run.groups import check_processes, check_shareable, member
from penstock.run.layout import Layout
from penstock.run.materialising import Init, Initialiser, Values
from penstock.run.rank.forward import Void
from penstock.run.rank.updater import Updater
from penstock.run.rank.worker import Worker
from penstock.run.recipe import Recipe
from penstock.run.seals import SealedTransport
from penstock.run.seating import Seat
from penstock.run.settling import building, draw_all, local_rank, place_all, queues_of
from penstock.run.shared_state import SharedState
from penstock.run.spilling import Settling, check_spillable, settled_in
from penstock.stage.stage import Stage
from penstock.transport import Codec, ThreadExchange, ThreadTransport, Transport, connect
from penstock.transport.device_link import DeviceLink
from penstock.transport.linking import LinkedDevices, link_devices
from penstock.transport.on_devices import ProcessDeviceTransport, ThreadDeviceTransport
from penstock.transport.rendezvous import Rendezvous
from penstock.values import expect, flag, one_of, whole
from penstock.weights.residence import Residence

Results = Literal["every rank", "none"]


@dataclass(frozen=True)
class Running:
    """How to run, whatever the training is: the arguments of ``Pipeline`` with these names."""

    transport: TransportName
    seed: int
    deadlines: Deadlines
    record: bool
    results: Results
    devices: Devices | None = None
    init: Init = "given"
    message_types: Sequence[type] = ()
    compare_data: bool = True
    weights: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        one_of("results", self.results, get_args(Results))
        one_of("init", self.init, get_args(Init))
        expect(self.message_types, Sequence, "message_types", "give a list of classes")
        whole("seed", self.seed, -(2**63), 2**64 - 1)
        flag("record", self.record)
        if self.weights is not None and self.init == "per-layer":
            raise InputError('init="per-layer" draws what weights=… gives; leave one of them out')
        Codec(self.message_types)  # refuses in threads what processes would refuse

    def values(self, layers: Sequence[NamedLayer]) -> Values:
        """Where the layers of a model have their initial values from.

        Raises:
            FileError: from files that are of another model.
        """
        if self.weights is not None:
            return GivenWeights(layers, self.weights)
        return Initialiser(layers, self.seed, anew=self.init == "per-layer")

    @property
    def settings(self) -> dict[str, str]:
        """Arguments that must be alike on all ranks, as text by their names."""
        names = ("transport", "record", "results", "init")
        return {name: repr(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Assembly:
    """A pipeline that is ready to run.

    Attributes:
        plan: the one that is run: under torchrun, rank 0's.
        driver: runs the workers.
        cutter: cuts minibatches for these ranks.
        feed: gives them to the driver.
        layout: which rank holds what.
        streams: where layers draw random numbers.
        workers: this process's, in the order of their ranks.
        stages: this process's, by number; where several ranks here have copies, the first one's.
        transport: how messages travel between ranks, and why so, as a sentence.
        attempt: the name of this pipeline, which no other has, the same on all ranks.
        deadlines: how long ranks wait for each other.
        in_processes: whether other processes have ranks of it.
    """

    plan: Plan
    driver: Driver[Any]
    cutter: Cutter
    feed: Feed
    layout: Layout
    streams: LayerStreams
    workers: Sequence[Worker]
    stages: Mapping[int, Stage]
    transport: str
    attempt: str
    deadlines: Deadlines
    in_processes: bool

    def states(self) -> StageStates:
        """The state of this process's stages, under the model's keys: of a member of a group its
        parts, numbered stage × (most members of any) + coordinate."""
        most = self.plan.num_tensor_ranks
        if most == 1:
            return {index: stage.state_dict() for index, stage in self.stages.items()}
        if not self.in_processes:  # between steps, the model has what was trained
            return {index: self.layout.own_state(index) for index in self.stages}
        (worker,) = self.workers
        return {
            most * index + worker.seat.coordinate: stage.state_dict()
            for index, stage in self.stages.items()
        }

    def joined(self, states: StageStates) -> StageStates:
        """By stage, what all members of its group have of it; ``states`` of all are here."""
        most, sharings = self.plan.num_tensor_ranks, self.layout.sharings
        if sharings is None or not self.in_processes or not states:
            return states
        return {
            stage: sharings.joined(
                [states[most * stage + index] for index in range(planned.tensor_ranks)]
            )
            for stage, planned in enumerate(self.plan.stages)
        }

    def meet(self, purpose: str) -> Rendezvous | None:
        """A meeting of all processes, which must all come; ``None`` if there is only this one.

        Args:
            purpose: what they do together, for example ``"loading a checkpoint"``.
        """
        if not self.in_processes:
            return None
        return Rendezvous.of_group(purpose, self.deadlines.step.seconds, "raise deadline_seconds")


def _new_name() -> str:
    return uuid.uuid4().hex


def assemble(
    model: nn.Module,
    layers: tuple[NamedLayer, ...],
    plan: Plan,
    recipe: Recipe,
    running: Running,
    meeting: Rendezvous | None,
) -> Assembly:
    """Build what runs the plan: in processes if they have met, else in threads.

    Raises:
        InputError: the number of processes is not the plan's.
        ModelError: the model cannot be spread so, or processes built different ones.
        PeerError, DeadlineError: another process failed or did not come.
    """
    if meeting is None:
        return _in_threads(model, layers, plan, recipe, running)
    return _in_processes(model, layers, plan, recipe, running, meeting)


def _in_threads(
    model: nn.Module, layers: tuple[NamedLayer, ...], plan: Plan, recipe: Recipe, running: Running
) -> Assembly:
    streams = LayerStreams(running.seed)
    devices = devices_of_ranks(running.devices, plan.on_accelerator, range(plan.num_ranks))
    queues = queues_of(devices)
    if plan.num_tensor_ranks > 1:
        check_shareable(plan, recipe, on_host=not queues)
    if plan.spill is None:
        draw_all(layers, plan, devices, queues, running.values(layers))
    layout = Layout(model, plan, layers, streams, one_process=True, devices=devices)
    exchange = ThreadExchange(plan.num_seats, running.deadlines.start.seconds)
    if plan.num_tensor_ranks > 1:
        members = [
            member(layout, Seat.numbered(number, plan.group_sizes), transport, recipe)
            for number, transport in enumerate(exchange.transports)
        ]
        workers = [worker for worker, _ in members]
        stages = {worker.rank: held for worker, held in reversed(members)}
    else:
        stages = {rank: layout.stages(rank) for rank in range(plan.num_ranks)}
        shared = {rank: layout.shared_state(stages[rank]) for rank in stages}
        place_all(layout, stages, queues)
        residences = _residences(layers, plan, recipe, running, layout, stages)
        workers = [
            _worker(
                layout,
                stages[rank],
                rank,
                recipe,
                shared[rank],
                _Connections(transport, queues.get(rank)),
            )
            for rank, transport in enumerate(exchange.transports)
        ]
        for rank, residence in residences.items():
            workers[rank].settle_in(residence)
    first_copies: dict[int, Stage] = {}
    for held in stages.values():
        first_copies = {**held, **first_copies}
    driver = ThreadDriver(workers, plan.num_threads, running.deadlines)
    return Assembly(
        plan,
        driver,
        _cutter(plan, layout, recipe, devices, queues),
        Feed(plan, layout, recipe, driver),
        layout,
        streams,
        workers,
        dict(sorted(first_copies.items())),
        _sentence(["ranks are threads of this process, and hand values over as they are"]),
        _new_name(),
        running.deadlines,
        in_processes=False,
    )


def _in_processes(
    model: nn.Module,
    layers: tuple[NamedLayer, ...],
    plan: Plan,
    recipe: Recipe,
    running: Running,
    meeting: Rendezvous,
) -> Assembly:
    if recipe.post_validate and plan.summing.reducer == "sharded":
        raise InputError(
            "post_validate undoes updates, and with the reducer 'sharded' others have made a part "
            "of them; leave it out, or take another reducer"
        )
    settings = {**recipe.settings, **running.settings}
    plan, seed, attempt = agree(
        meeting, plan, spine_fingerprint(layers), running.seed, _new_name(), settings
    )
    check_processes(plan, meeting.num_ranks)
    in_groups = plan.num_tensor_ranks > 1
    seat = Seat.numbered(meeting.rank, plan.group_sizes) if in_groups else Seat(meeting.rank)
    assert running.transport != "threads"  # who asks for them meets nobody
    start = running.deadlines.start
    codec = Codec(_message_types(layers, running))
    transport = connect(meeting, start.seconds, way=running.transport, codec=codec)
    transport.patience = start
    try:
        streams = LayerStreams(seed)
        devices = devices_of_ranks(
            running.devices, plan.on_accelerator, [seat.rank], first=local_rank()
        )
        queues = queues_of(devices)
        alike = replace(running, seed=seed)
        if in_groups:
            check_shareable(plan, recipe, on_host=not queues)
        if plan.spill is None:
            draw_all(layers, plan, devices, queues, alike.values(layers))
        layout = Layout(model, plan, layers, streams, one_process=False, devices=devices)
        sealed = SealedTransport(transport, meeting.rank)
        queue = queues.get(seat.rank)
        links = LinkedDevices()
        if in_groups:
            worker, stages = member(layout, seat, sealed, recipe, equal=True)
        else:
            stages = layout.stages(meeting.rank)
            shared = layout.shared_state(stages)
            place_all(layout, {meeting.rank: stages}, queues)
            if running.transport == "auto":
                own_host = transport.hosts[meeting.rank]
                device = devices[meeting.rank]
                links = link_devices(
                    meeting, own_host, device, queue, layout.neighbours, start.seconds
                )
            residences = _residences(layers, plan, recipe, alike, layout, {meeting.rank: stages})
            make = ways.maker_of(plan.summing, attempt, layout.holders, start.seconds)
            connections = _Connections(sealed, queue, links.of_rank, make)
            worker = _worker(layout, stages, meeting.rank, recipe, shared, connections)
            for residence in residences.values():
                worker.settle_in(residence)
        # The user's code has run: whoever fails in it says so here, before others wait for more.
        meeting.exchange(None, NoneType, "to start training")
        with building(queue):
            worker.updater.sums.begin_equal()
            layout.let_go()  # what was made equal are copies, where a group has the model's layers
            worker.transport.hand_over()
        driver = ProcessDriver(
            worker,
            sealed,
            meeting,
            running.deadlines,
            num_threads=plan.num_threads,
            clock_offsets=offsets_of_clocks(transport) if running.record else None,
            share_results=running.results == "every rank",
        )
    except BaseException as error:
        transport.close(f"before its first step, {type(error).__name__}: {told(error)}")
        raise
    has_peers = meeting.num_ranks > 1
    return Assembly(
        plan,
        driver,
        replace(
            _cutter(plan, layout, recipe, devices, queues),
            compares=running.compare_data and has_peers,
            modules=[*_modules_of(layers)] if has_peers else (),
        ),
        Feed(plan, layout, recipe, driver),
        layout,
        streams,
        [worker],
        stages,
        _sentence(
            [transport.told, links.told, ways.told(plan.summing) if layout.shared_stages else ""]
        ),
        attempt,
        running.deadlines,
        in_processes=has_peers,
    )


def _residences(
    layers: tuple[NamedLayer, ...],
    plan: Plan,
    recipe: Recipe,
    running: Running,
    layout: Layout,
    stages: Mapping[int, Mapping[int, Stage]],
) -> dict[int, Residence]:
    """Where stages come and go: of each rank of this process, which are in memory."""
    if plan.spill is None:
        return {}
    check_spillable(plan, recipe, layout)
    values = running.values(layers)
    return {
        rank: settled_in(
            Settling(plan, layout, recipe, values, running.deadlines.step.seconds), rank, own
        )
        for rank, own in stages.items()
    }


def _sentence(parts: Iterable[str]) -> str:
    text = "; ".join(filter(None, parts))
    return f"{text[:1].upper()}{text[1:]}."


def _cutter(
    plan: Plan,
    layout: Layout,
    recipe: Recipe,
    devices: Mapping[int, torch.device],
    queues: Mapping[int, DeviceQueue],
) -> Cutter:
    last = len(plan.stages) - 1
    here = [
        {devices[rank] for rank in plan.placement.ranks_of(stage) if rank in devices}
        for stage in (0, last)
    ]
    return Cutter(
        layout.num_microbatches,
        layout.num_slices,
        recipe.weighting,
        layout.has_copies and recipe.updates == "minibatch",
        gives_inputs=_giver(here[0], queues, "stage 0, given its inputs"),
        gives_targets=_giver(here[1], queues, f"stage {last}, given its targets"),
    )


def _giver(
    devices: set[torch.device], queues: Mapping[int, DeviceQueue], told: str
) -> Giver | None:
    if not devices:
        return None  # other processes compute with them
    # Which copy of a stage gets a microbatch is known when it is there; then its rank fetches it.
    if not queues or len(devices) > 1:
        return Giver()
    (device,) = devices
    return DeviceGiver(device, told)


def _modules_of(layers: tuple[NamedLayer, ...]) -> Iterator[nn.Module]:
    return (module for layer in layers for module in layer.module.modules())


def _message_types(layers: tuple[NamedLayer, ...], running: Running) -> list[type]:
    """The classes that messages may hold: the engine's, the user's, and those that layers say their
    outputs are made of."""
    told = {kind for layer in layers for kind in getattr(layer.module, "message_types", ())}
    return [Void, *running.message_types, *told]


class _Connections(NamedTuple):
    """How a rank is connected to others and to its device.

    Attributes:
        transport: its end of its channels.
        queue: its work on its device, if that is not the host.
        links: to the devices of other ranks.
        make_reducer: how gradients of weights are summed that others hold, too.
    """

    transport: Transport
    queue: DeviceQueue | None
    links: Mapping[int, DeviceLink] = MappingProxyType({})
    make_reducer: MakeReducer = OwnerReducer

    def on_device(self) -> Transport:
        """The transport for tensors that are on the device."""
        if self.queue is not None and isinstance(self.transport, ThreadTransport):
            return ThreadDeviceTransport(self.transport, self.queue)
        if isinstance(self.queue, AcceleratorQueue):
            return ProcessDeviceTransport(self.transport, self.queue, self.links)
        return self.transport


def _worker(
    layout: Layout,
    stages: dict[int, Stage],
    rank: int,
    recipe: Recipe,
    shared: SharedState,
    connections: _Connections,
) -> Worker:
    transport = connections.on_device()
    with building(connections.queue):
        updater = Updater(
            rank,
            layout.num_ranks,
            layout.holdings(rank, stages),
            transport,
            recipe,
            layout.shared(rank, stages),
            make_reducer=connections.make_reducer,
        )
        stores = layout.stores(stages, updater.optimizers)
        return Worker(rank, stages, transport, recipe, updater, layout.skips, stores, shared)
