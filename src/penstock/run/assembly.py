"""Put a pipeline together: from a model, a plan and a recipe to workers and their driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args

from torch import nn

from penstock.device.placement import Devices, devices_of_ranks
from penstock.device.queue import AcceleratorQueue, DeviceQueue
from penstock.errors import InputError
from penstock.model.randomness import LayerStreams
from penstock.model.spine import NamedLayer, spine_fingerprint
from penstock.plans import Plan
from penstock.run.cutter import Cutter
from penstock.run.drive.clocks import offsets_of_clocks
from penstock.run.drive.driver import Deadlines, Driver, told
from penstock.run.drive.joining import TransportName
from penstock.run.drive.offers import agree
from penstock.run.drive.processes import ProcessDriver
from penstock.run.drive.threads import ThreadDriver
from penstock.run.feed import Feed
from penstock.run.layout import Layout
from penstock.run.rank.forward import Void
from penstock.run.rank.updater import Updater
from penstock.run.rank.worker import Worker
from penstock.run.recipe import Recipe
from penstock.run.seals import SealedTransport
from penstock.run.settling import building, local_rank, materialise_all, place_all, queues_of
from penstock.run.shared_state import SharedState
from penstock.stage.stage import Stage
from penstock.transport import Codec, ThreadExchange, ThreadTransport, Transport, connect
from penstock.transport.device_link import DeviceLink
from penstock.transport.linking import LinkedDevices, link_devices
from penstock.transport.on_devices import ProcessDeviceTransport, ThreadDeviceTransport
from penstock.transport.rendezvous import Rendezvous
from penstock.values import expect, flag, one_of, whole

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
    message_types: Sequence[type] = ()
    compare_data: bool = True

    def __post_init__(self) -> None:
        one_of("results", self.results, get_args(Results))
        expect(self.message_types, Sequence, "message_types", "give a list of classes")
        whole("seed", self.seed, -(2**63), 2**64 - 1)
        flag("record", self.record)
        Codec(self.message_types)  # refuses in threads what processes would refuse

    @property
    def settings(self) -> dict[str, str]:
        """Arguments that must be alike on all ranks, as text by their names."""
        return {name: repr(getattr(self, name)) for name in ("transport", "record", "results")}


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
    materialise_all(layers, plan, devices, queues, running.seed)
    layout = Layout(model, plan, layers, streams, one_process=True, devices=devices)
    exchange = ThreadExchange(plan.num_ranks, running.deadlines.start.seconds)
    stages = {rank: layout.stages(rank) for rank in range(plan.num_ranks)}
    shared = {rank: layout.shared_state(stages[rank]) for rank in stages}
    place_all(layout, stages, queues)
    workers = [
        _worker(layout, stages[rank], rank, transport, recipe, shared[rank], queues.get(rank))
        for rank, transport in enumerate(exchange.transports)
    ]
    first_copies: dict[int, Stage] = {}
    for held in stages.values():
        first_copies = {**held, **first_copies}
    driver = ThreadDriver(workers, plan.num_threads, running.deadlines)
    return Assembly(
        plan,
        driver,
        _cutter(layout, recipe),
        Feed(plan, layout, recipe, driver),
        layout,
        streams,
        workers,
        dict(sorted(first_copies.items())),
        _sentence(["ranks are threads of this process, and hand values over as they are"]),
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
    plan, seed = agree(meeting, plan, spine_fingerprint(layers), running.seed, settings)
    if plan.num_ranks != meeting.num_ranks:
        raise InputError(
            f"the plan has {plan.num_ranks} ranks, but the job has {meeting.num_ranks} processes; "
            f"start it with torchrun --nproc-per-node={plan.num_ranks}, or plan for "
            f"{meeting.num_ranks} ranks (stages = ranks × stages per rank of the schedule)"
        )
    assert running.transport != "threads"  # who asks for them meets nobody
    start = running.deadlines.start
    codec = Codec(_message_types(layers, running))
    transport = connect(meeting, start.seconds, way=running.transport, codec=codec)
    transport.patience = start
    try:
        streams = LayerStreams(seed)
        devices = devices_of_ranks(
            running.devices, plan.on_accelerator, [meeting.rank], first=local_rank()
        )
        queues = queues_of(devices)
        materialise_all(layers, plan, devices, queues, seed)
        layout = Layout(model, plan, layers, streams, one_process=False, devices=devices)
        sealed = SealedTransport(transport, meeting.rank)
        stages = layout.stages(meeting.rank)
        shared = layout.shared_state(stages)
        place_all(layout, {meeting.rank: stages}, queues)
        queue = queues.get(meeting.rank)
        links = LinkedDevices()
        if running.transport == "auto":
            own_host = transport.hosts[meeting.rank]
            device = devices[meeting.rank]
            links = link_devices(meeting, own_host, device, queue, layout.neighbours, start.seconds)
        worker = _worker(layout, stages, meeting.rank, sealed, recipe, shared, queue, links.of_rank)
        # The user's code has run: whoever fails in it says so here, before others wait for more.
        meeting.exchange(None, NoneType, "to start training")
        with building(queue):
            worker.updater.sums.begin_equal()
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
            _cutter(layout, recipe),
            compares=running.compare_data and has_peers,
            modules=[*_modules_of(layers)] if has_peers else (),
            takes_inputs=0 in stages,
            takes_targets=len(plan.stages) - 1 in stages,
        ),
        Feed(plan, layout, recipe, driver),
        layout,
        streams,
        [worker],
        stages,
        _sentence([transport.told, links.told]),
    )


def _sentence(parts: Iterable[str]) -> str:
    text = "; ".join(filter(None, parts))
    return f"{text[:1].upper()}{text[1:]}."


def _cutter(layout: Layout, recipe: Recipe) -> Cutter:
    return Cutter(
        layout.num_microbatches,
        layout.num_slices,
        recipe.weighting,
        layout.has_copies and recipe.updates == "minibatch",
    )


def _modules_of(layers: tuple[NamedLayer, ...]) -> Iterator[nn.Module]:
    return (module for layer in layers for module in layer.module.modules())


def _message_types(layers: tuple[NamedLayer, ...], running: Running) -> list[type]:
    """The classes that messages may hold: the engine's, the user's, and those that layers say their
    outputs are made of."""
    told = {kind for layer in layers for kind in getattr(layer.module, "message_types", ())}
    return [Void, *running.message_types, *told]


def _worker(
    layout: Layout,
    stages: dict[int, Stage],
    rank: int,
    transport: Transport,
    recipe: Recipe,
    shared: SharedState,
    queue: DeviceQueue | None,
    links: Mapping[int, DeviceLink] = MappingProxyType({}),
) -> Worker:
    if queue is not None and isinstance(transport, ThreadTransport):
        transport = ThreadDeviceTransport(transport, queue)
    elif isinstance(queue, AcceleratorQueue):
        transport = ProcessDeviceTransport(transport, queue, links)
    with building(queue):
        updater = Updater(
            rank,
            layout.num_ranks,
            layout.holdings(rank, stages),
            transport,
            recipe,
            layout.shared(rank, stages),
        )
        stores = layout.stores(stages, updater.optimizers)
        return Worker(rank, stages, transport, recipe, updater, layout.skips, stores, shared)
