"""From a seat and its end of the channels to the worker that performs its ops there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from penstock.engine.device.placement import HOST, Devices, devices_of_ranks
from penstock.engine.device.queue import AcceleratorQueue, DeviceQueue
from penstock.engine.reduce.owners import OwnerReducer
from penstock.engine.reduce.reducer import MakeReducer
from penstock.engine.run.layout import Layout
from penstock.engine.run.materialising import Values, Wholes
from penstock.engine.run.placing import building, local_rank
from penstock.engine.run.rank.parameter_server import ParameterServer
from penstock.engine.run.rank.updater import Updater
from penstock.engine.run.rank.worker import RankExtras, Worker
from penstock.engine.run.recipe import Recipe
from penstock.engine.run.refusals import check_stage_norms
from penstock.engine.run.replicas import SharedState
from penstock.engine.run.seating import MeshTransport, Seat
from penstock.engine.stage.stage import Stage
from penstock.engine.tensor.channel_group import ChannelGroup
from penstock.engine.transport import ThreadTransport, Transport
from penstock.engine.transport.device_link import DeviceLink
from penstock.engine.transport.on_devices import ProcessDeviceTransport, ThreadDeviceTransport
from penstock.engine.weights.offload import Keep, Offloading
from penstock.engine.weights.residence import Residence
from penstock.engine.weights.ways import Way
from penstock.planning.plans import Plan
from penstock.planning.plans.serving import server_ranks


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
    seat: Seat
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


def device_here(plan: Plan, given: Devices | None, seat: Seat) -> dict[int, torch.device]:
    """Where the rank of this process computes; parameter servers do so in main memory."""
    if seat.rank in server_ranks(plan):
        return {seat.number: HOST}
    return devices_of_ranks(given, plan.on_accelerator, [seat.number], first=local_rank())


def wholes_of(layout: Layout, seat: Seat, transport: Transport, values: Values) -> Wholes | None:
    """What brings whole values, where a process keeps parts of them only.

    Args:
        transport: between seats, for what is in main memory, where values are drawn.
    """
    group = seat.group(transport)
    if group is None or layout.sharings is None:
        return None
    return Wholes(layout.layers_of(seat.rank), values, group, layout.sharings.cuts)


def worker_of(
    layout: Layout,
    stages: dict[int, Stage],
    recipe: Recipe,
    connections: Connections,
    shared: SharedState,
    residence: Residence | None,
    offloading: Callable[[Keep], Offloading] | None,
) -> Worker:
    """What performs a rank's ops at a seat, or, of a parameter server, its updates.

    Args:
        stages: the rank's, as its seat has them.
        shared: what no forward of them may write.
        residence: which of them are in memory, if they come and go.
        offloading: makes what lets activations leave, if any do.

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
        extras = RankExtras(layout.skips, stores, shared, residence, offloading)
        return make(rank, stages, transport, recipe, updater, extras)


def offloading_of(
    plan: Plan, device: torch.device, seconds: float
) -> Callable[[Keep], Offloading] | None:
    """What makes what lets a rank's activations leave, if the plan says so."""
    if plan.offload is None:
        return None
    return partial(Offloading, Way.between(plan.offload.tier, device, seconds), device)
