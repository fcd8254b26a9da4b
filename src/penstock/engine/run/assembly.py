"""Put a pipeline together: from a model, a plan and a recipe to workers and their driver.

The state of this process's stages, copied to main memory, and as the unsplit model's.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.base.values import expect, flag, one_of, whole
from penstock.engine.device.placement import HOST, Devices, devices_of_ranks
from penstock.engine.device.queue import DeviceQueue
from penstock.engine.model import tree
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import NamedLayer, spine_fingerprint
from penstock.engine.reduce import ways
from penstock.engine.reduce.owners import OwnerReducer
from penstock.engine.run.connecting import (
    Connections,
    device_here,
    offloading_of,
    wholes_of,
    worker_of,
)
from penstock.engine.run.cutter import Cutter, cutter_of
from penstock.engine.run.drive.driver import Deadlines, Driver, StageStates, told
from penstock.engine.run.drive.joining import TransportName, agree, offsets_of_clocks
from penstock.engine.run.drive.processes import ProcessDriver
from penstock.engine.run.drive.threads import ThreadDriver
from penstock.engine.run.feed import Feed
from penstock.engine.run.given_weights import GivenWeights
from penstock.engine.run.layout import Layout
from penstock.engine.run.materialising import Init, Initialiser, Values, check_there
from penstock.engine.run.placing import (
    Settling,
    building,
    check_spillable,
    draw_all,
    place_all,
    queues_of,
    settled_in,
)
from penstock.engine.run.rank.on_trust import Poison
from penstock.engine.run.rank.worker import Worker
from penstock.engine.run.recipe import Recipe
from penstock.engine.run.refusals import (
    check_kinds,
    check_processes,
    check_shareable,
    check_updates,
    seats_of,
)
from penstock.engine.run.seals import SealedTransport
from penstock.engine.run.seating import Seat
from penstock.engine.stage.stage import Stage
from penstock.engine.transport import Codec, ThreadExchange, connect
from penstock.engine.transport.linking import LinkedDevices, link_devices
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.engine.weights.residence import Residence
from penstock.planning.plans import Plan
from penstock.planning.plans.serving import server_ranks

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
            raise InputError(
                'init="per-layer" draws what initial_weights=… gives; leave one of them out'
            )
        Codec(self.message_types)  # refuses in threads what processes would refuse

    def values(self, model: nn.Module, layers: Sequence[NamedLayer]) -> Values:
        """Where the layers of a model have their initial values from.

        Raises:
            FileError: from files that are of another model.
            ModelError: a layer has no way to its values.
        """
        if self.weights is not None:
            return GivenWeights(model, layers, self.weights)
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

    @property
    def in_parts(self) -> bool:
        """Whether this process has parts of its stages' layers, and nobody has the whole ones."""
        return self.in_processes and any(worker.seat.size > 1 for worker in self.workers)

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
    if running.weights is None and running.init == "given":
        check_there(layers)
    if meeting is None:
        return _in_threads(model, layers, plan, recipe, running)
    return _in_processes(model, layers, plan, recipe, running, meeting)


def _in_threads(
    model: nn.Module, layers: tuple[NamedLayer, ...], plan: Plan, recipe: Recipe, running: Running
) -> Assembly:
    streams = LayerStreams(running.seed)
    check_updates(plan, recipe, one_process=True)
    seats = seats_of(plan)
    devices = devices_of_ranks(running.devices, plan.on_accelerator, range(plan.num_seats))
    devices |= {seat.number: HOST for seat in seats if seat.rank in server_ranks(plan)}
    queues = queues_of(devices)
    values = running.values(model, layers)
    if plan.num_tensor_ranks > 1:
        check_shareable(plan, recipe)
        check_kinds(seats, [devices[seat.number].type for seat in seats])
        here = dict.fromkeys(range(plan.num_ranks), HOST)
        draw_all(layers, plan, here, {}, values)
    elif plan.spill is None:
        draw_all(layers, plan, devices, queues, values)
    layout = Layout(model, plan, layers, streams, one_process=True, devices=devices)
    exchange = ThreadExchange(len(seats), running.deadlines.start.seconds)
    servers = layout.server_ranks
    attempt = _new_name()
    make = ways.stepping_servers(plan.summing, attempt, servers) if servers else OwnerReducer
    connections = [
        Connections(transport, seat, queues.get(seat.number), make_reducer=make)
        for seat, transport in zip(seats, exchange.transports, strict=True)
    ]
    held = {one.seat: one.stages(layout) for one in connections}
    shared = {seat: layout.shared_state(own) for seat, own in held.items()}
    residences = _settled(values, plan, recipe, running, layout, held, devices, queues)
    stages = {seat.rank: own for seat, own in held.items() if seat.coordinate == 0}
    seconds = running.deadlines.step.seconds
    workers = [
        worker_of(
            layout,
            held[one.seat],
            recipe,
            one,
            shared[one.seat],
            residences.get(one.seat.rank),
            offloading_of(plan, devices[one.seat.number], seconds),
        )
        for one in connections
    ]
    first_copies: dict[int, Stage] = {}
    for rank in range(plan.num_ranks):  # parameter servers run none
        first_copies = {**stages[rank], **first_copies}
    driver = ThreadDriver(workers, plan.num_threads, running.deadlines)
    return Assembly(
        plan,
        driver,
        cutter_of(plan, layout, recipe, devices, queues),
        Feed(plan, layout, recipe, driver),
        layout,
        streams,
        workers,
        dict(sorted(first_copies.items())),
        _sentence(["ranks are threads of this process, and hand values over as they are"]),
        attempt,
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
    settings = {**recipe.settings, **running.settings}
    plan, seed, attempt = agree(
        meeting, plan, spine_fingerprint(layers), running.seed, _new_name(), settings
    )
    check_processes(plan, meeting.num_ranks)
    check_updates(plan, recipe, one_process=False)
    seats = seats_of(plan)
    seat = seats[meeting.rank]
    serves = seat.rank in server_ranks(plan)
    assert running.transport != "threads"  # who asks for them meets nobody
    start = running.deadlines.start
    codec = Codec(_message_types(layers, running))
    transport = connect(meeting, start.seconds, way=running.transport, codec=codec)
    transport.patience = start
    try:
        streams = LayerStreams(seed)
        devices = device_here(plan, running.devices, seat)
        queues = queues_of(devices)
        device, queue = devices[seat.number], queues.get(seat.number)
        alike = replace(running, seed=seed)
        if plan.num_tensor_ranks > 1:
            check_shareable(plan, recipe)
            kinds = meeting.exchange(device.type, str, "to say on which kind of device it is")
            check_kinds(seats, kinds)
        values = alike.values(model, layers)
        if plan.spill is None and seat.size == 1:
            here = {} if queue is None else {seat.rank: queue}
            draw_all(layers, plan, {seat.rank: device}, here, values)
        layout = Layout(model, plan, layers, streams, one_process=False, devices=devices)
        links = LinkedDevices()
        if running.transport == "auto":
            pairs, own_host = layout.neighbours, transport.hosts[meeting.rank]
            links = link_devices(meeting, own_host, device, queue, pairs, start.seconds)
        make = ways.maker_of(
            plan.summing,
            attempt,
            layout.holders,
            start.seconds,
            seat.coordinate,
            layout.server_ranks,
        )
        sealed = SealedTransport(transport, meeting.rank)
        connections = Connections(sealed, seat, queue, links.of_rank, make)
        stages = connections.stages(layout, wholes_of(layout, seat, sealed, values))
        shared = layout.shared_state(stages)
        residences = _settled(values, plan, recipe, alike, layout, {seat: stages}, devices, queues)
        offloading = offloading_of(plan, device, running.deadlines.step.seconds)
        residence = residences.get(seat.rank)
        worker = worker_of(layout, stages, recipe, connections, shared, residence, offloading)
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
            num_told=plan.num_ranks,
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
            cutter_of(plan, layout, recipe, devices, queues),
            compares=running.compare_data and has_peers,
            modules=[*_modules_of(layers)] if has_peers else (),
        ),
        Feed(plan, layout, recipe, driver),
        layout,
        streams,
        [worker],
        {} if serves else stages,
        _sentence(
            [
                transport.told,
                links.told,
                ways.told(plan.summing) if layout.weights.shared_stages else "",
            ]
        ),
        attempt,
        running.deadlines,
        in_processes=has_peers,
    )


def _settled(
    values: Values,
    plan: Plan,
    recipe: Recipe,
    running: Running,
    layout: Layout,
    held: Mapping[Seat, dict[int, Stage]],
    devices: Mapping[int, torch.device],
    queues: Mapping[int, DeviceQueue],
) -> dict[int, Residence]:
    """Move stages to their ranks' devices; where they come and go, to tiers: of each rank of this
    process, which are in memory."""
    if plan.spill is None:
        place_all(layout, held, queues)
        return {}
    check_spillable(plan, recipe, layout)
    if not queues:
        place_all(layout, held, queues)
    settling = Settling(plan, layout, recipe, values, devices, running.deadlines.step.seconds)
    residences = {}
    for seat, own in held.items():
        with building(queues.get(seat.number)):
            residences[seat.rank] = settled_in(settling, seat.rank, own)
    if queues:  # what is left: buffers, and what is tied
        place_all(layout, held, queues)
    return residences


def _sentence(parts: Iterable[str]) -> str:
    text = "; ".join(filter(None, parts))
    return f"{text[:1].upper()}{text[1:]}."


def _modules_of(layers: tuple[NamedLayer, ...]) -> Iterator[nn.Module]:
    return (module for layer in layers for module in layer.module.modules())


def _message_types(layers: tuple[NamedLayer, ...], running: Running) -> list[type]:
    """The classes that messages may hold: the engine's, the user's, and those that layers say their
    outputs are made of."""
    told = {kind for layer in layers for kind in getattr(layer.module, "message_types", ())}
    return [Poison, *running.message_types, *told]


def copied_states(parts: Assembly) -> dict[int, dict[str, Any]]:
    """The state of each stage, copied to main memory, with all updates made; nothing may run
    meanwhile."""
    states: dict[int, dict[str, Any]] = {}
    if parts.plan.spill is None:
        return copied(parts.states())
    for worker in parts.workers:
        worker.settle()
        for index in worker.stages:
            with worker.visiting(index):
                # Nothing may see a stage when it leaves; the next may come to the same place.
                states |= copied({index: parts.stages[index].state_dict()})
    return dict(sorted(states.items()))


def copied(states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The states of stages, copied to main memory; what is tied stays so."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return {k: dict(tree.replace(Tensor, copy_of, state)) for k, state in states.items()}


def by_key(states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The states of stages as that of the model."""
    return {key: value for _, state in sorted(states.items()) for key, value in state.items()}
