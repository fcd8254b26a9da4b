"""From what a user hands in to a pipeline that is ready to run, whoever drives it then.

A pipeline calls the layers of the spine, each on its rank, and nothing else; under torchrun each
process trains its own stages of a model that it has as a whole. Neither looks wrong in the model
itself, so two watch it: ``OuterModules``, what is done around the layers, and ``RemoteStages``,
who reads weights that others train.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from penstock.base.errors import InputError, ModelError
from penstock.base.telling import tell
from penstock.engine.device import captured_graphs
from penstock.engine.device.memory import keep_freed_pages, return_freed_pages
from penstock.engine.device.queue import DeviceQueue
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import (
    NamedLayer,
    names_a_spine,
    spine_fingerprint,
    spine_of,
    uncompiled,
)
from penstock.engine.run.assembly import Assembly, Running
from penstock.engine.run.connecting import (
    Connections,
    InProcess,
    InThreads,
    RankPlacement,
    offloading_of,
    worker_of,
)
from penstock.engine.run.cutter import cutter_of
from penstock.engine.run.drive.driver import Deadlines
from penstock.engine.run.drive.joining import TransportName, joined
from penstock.engine.run.feed import Feed
from penstock.engine.run.layout import Layout
from penstock.engine.run.materialising import check_there
from penstock.engine.run.placing import SwapSetup, draw_all, place, queues_of
from penstock.engine.run.rank.compiler import RankExtras
from penstock.engine.run.rank.worker import Worker
from penstock.engine.run.recipe import Recipe
from penstock.engine.run.refusals import check_kinds, check_shareable, check_trains
from penstock.engine.run.seating import RankSeat
from penstock.engine.stage.backends import check_compiler, replaying_on
from penstock.engine.stage.stage import Stage
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.planning.plans import Plan
from penstock.planning.plans.stage_plan import sharing_ranks
from penstock.planning.plans.summing import num_processes

_ABOVE_STATE_DICT = 4
_ABOVE_CALL = 6


class RemoteStages:
    """Watches a model of which this process trains a part.

    Its methods are hooks of the model; they are copied and pickled with it.

    Args:
        own: the stages that this process trains.
        num_stages: how many the pipeline has.
        in_parts: whether it trains parts of their weights.

    Attributes:
        stale: whether other processes have trained weights since this one knew them all.
    """

    def __init__(self, own: list[int], num_stages: int, in_parts: bool = False) -> None:
        self._own = own
        self._num_stages = num_stages
        self._in_parts = in_parts
        self.stale = False

    @classmethod
    def watching(
        cls, model: nn.Module, own: Iterable[int], num_stages: int, *, in_parts: bool = False
    ) -> Self:
        """A ``RemoteStages`` that watches a model, if this process does not train all of it."""
        elsewhere = cls(sorted(own), num_stages, in_parts)
        if len(elsewhere._own) < num_stages or in_parts:
            for module in (model, getattr(model, "original", None)):  # a captured one has two names
                if isinstance(module, nn.Module):
                    elsewhere.watch(module)
        return elsewhere

    def watch(self, model: nn.Module) -> None:
        """Warn when the model's weights are read: by ``state_dict`` or by calling it."""
        # torch does not annotate all of these.
        hooked: Any = model
        hooked.register_state_dict_pre_hook(self._before_state_dict)
        hooked.register_forward_pre_hook(self._before_forward)
        hooked.register_load_state_dict_post_hook(self._after_load)

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._warn("state_dict() of the model", _ABOVE_STATE_DICT)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._warn("calling the model", _ABOVE_CALL)

    def _after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.stale = self.stale and bool(incompatible_keys.missing_keys)

    def _warn(self, reading: str, stack_level: int) -> None:
        if self.stale:
            others = [stage for stage in range(self._num_stages) if stage not in self._own]
            elsewhere = [
                f"stages {', '.join(map(str, others))} of {self._num_stages} are trained by other "
                "ranks, and are here as they were when training began"
            ] * bool(others)
            elsewhere += [
                "of layers that this process shares with other ranks each has a part of the values"
            ] * self._in_parts
            warnings.warn(
                f"{reading} reads weights that this process has not trained: "
                f"{'; '.join(elsewhere)}. pipeline.gather_state_dict(), called on every rank, "
                "gives all of them; pipeline.evaluate runs the model",
                RuntimeWarning,
                stacklevel=stack_level,
            )


class OuterModules:
    """Watches the modules of a model that are in no layer.

    Args:
        model: as given to ``Pipeline``.
        layers: its spine.
    """

    def __init__(self, model: nn.Module, layers: Iterable[NamedLayer]) -> None:
        inside = {id(module) for layer in layers for module in layer.module.modules()}
        # A captured model's layers are traces, in which hooks of its containers may be already.
        around = [("", model)] if hasattr(model, "original") else model.named_modules()
        self._modules = [
            (name or "the model", module, _children(module))
            for name, module in around
            if id(module) not in inside
        ]

    def check(self) -> None:
        """Raise ``ModelError`` if something was done to these modules that no stage would see."""
        for name, module, children in self._modules:
            for hook in _hooks(module):
                raise ModelError(
                    f"{name} ({type(module).__name__}) has the hook {hook!r}, which would never be "
                    "called: a pipeline runs the layers of the spine, and not what is around them; "
                    "register it on a layer"
                )
            if _children(module) != children:
                raise ModelError(
                    f"{name} ({type(module).__name__}) has got other layers since the Pipeline was "
                    "built, which it would not train; change the model before, or build a new "
                    "Pipeline"
                )


def _children(module: nn.Module) -> tuple[object, ...]:
    children = module._modules
    return (*children, *map(id, children.values()))  # before every step: without a frame for each


def _hooks(module: nn.Module) -> list[object]:
    """Those that are called with the forward of a module."""
    kinds = (
        module._forward_pre_hooks, module._forward_hooks,
        module._backward_pre_hooks, module._backward_hooks,
    )  # fmt: skip
    if not any(kinds):
        return []
    hooks = (hook for kind in kinds for hook in kind.values())
    return [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), RemoteStages)]


class Built(NamedTuple):
    """A pipeline that is ready to run.

    Attributes:
        model: the one that was given; captured, if it names no spine.
        parts: what runs it.
        recipe: how it trains.
        outside: watches what of the model no stage runs.
    """

    model: nn.Module
    parts: Assembly
    recipe: Recipe
    outside: OuterModules


def build(
    model: nn.Module,
    plan: Plan,
    transport: TransportName,
    deadlines: Deadlines,
    described: Callable[[nn.Module], tuple[Recipe, Running]],
) -> Built:
    """Meet the other processes if there are any, hold a plan against a model, and build the ranks.

    Args:
        transport: how messages travel between ranks.
        deadlines: how long ranks wait for each other.
        described: says how to train and how to run this model, in layers; what it raises, the other
            processes hear.

    Raises:
        ModelError: the model cannot be cut, or the plan is for another one.
        InputError: a number of processes that the plan does not have.
        PeerError, DeadlineError: another process failed or did not come.
    """
    with joined(transport, deadlines.start.seconds, num_processes(plan)) as meeting:
        if plan.spill is None:
            keep_freed_pages()
        else:  # kept pages would be missing in a budget, unless that turns out to have room
            return_freed_pages()
        given, model = model, in_layers(model, plan)
        layers = spine_of(model)
        plan.check_model([layer.name for layer in layers], spine_fingerprint(layers))
        outside = OuterModules(model, layers)
        outside.check()
        recipe, running = described(model)
        if model is not given and model is uncompiled(given) and running.compile is None:
            warnings.warn(
                "the model was compiled as a whole, which a pipeline does not call: its layers run "
                "as they are. Give Pipeline(…, compile=True), which compiles each stage's passes",
                RuntimeWarning,
                stacklevel=5,
            )
        check_trains(layers, recipe)
        parts = assemble(model, layers, plan, recipe, running, meeting)
        return Built(model, parts, recipe, outside)


def in_layers(model: nn.Module, plan: Plan) -> nn.Module:
    """The model itself, and not what torch.compile made of it, if it names its spine, or if nobody
    knows how the plan cuts it; otherwise captured as it was for the plan.

    Raises:
        ModelError: it cannot be traced any more.
    """
    model = uncompiled(model)
    if not isinstance(model, nn.Module) or names_a_spine(model):
        return model
    # Tracing takes seconds to import, and few models need it.
    from penstock.engine.tracing.entrance import as_planned

    return as_planned(model, plan) or model


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
        placement: RankPlacement = InThreads(plan, recipe, running)
    else:
        placement = InProcess(meeting, plan, layers, recipe, running)
    try:
        return _assembled(model, layers, recipe, running, placement)
    except BaseException as error:
        placement.fail(error)
        raise


def _assembled(
    model: nn.Module,
    layers: tuple[NamedLayer, ...],
    recipe: Recipe,
    running: Running,
    placement: RankPlacement,
) -> Assembly:
    """The one sequence, wherever ranks are. Its order is a contract: processes meet at several of
    these lines."""
    plan, seconds = placement.plan, running.deadlines.step.seconds
    streams = LayerStreams(placement.seed)
    devices = placement.devices()
    queues = queues_of(devices)
    if plan.num_tensor_ranks > 1:
        check_shareable(plan, recipe)
        check_kinds(placement.seats, placement.kinds(devices))
    values = replace(running, seed=placement.seed).values(model, layers)
    draw_all(layers, plan, *placement.drawn(devices, queues), values)
    one_process = placement.one_process
    layout = Layout(model, plan, layers, streams, one_process=one_process, devices=devices)
    connections = placement.connections(layout, devices, queues)
    stages = {
        own.seat: own.stages(layout, placement.wholes(layout, own.seat, values))
        for own in connections
    }
    placement.shard(layout, stages)
    setup = SwapSetup(plan, layout, recipe, values, devices, seconds)
    workers = _workers(connections, stages, setup, queues)
    compile_stages(plan, recipe, running, stages.values(), devices.values())
    placement.begin(workers, layout)
    driver = placement.driver(workers)
    cutter = cutter_of(plan, layout, recipe, devices, queues)
    if placement.in_processes:
        modules = [module for layer in layers for module in layer.module.modules()]
        cutter = replace(cutter, compares=running.compare_data, modules=modules)
    return Assembly(
        plan,
        driver,
        cutter,
        Feed(plan, layout, recipe, driver),
        layout,
        streams,
        workers,
        _first_copies(plan, stages),
        placement.transport_text(layout),
        placement.attempt,
        running.deadlines,
        in_processes=placement.in_processes,
    )


def _workers(
    connections: Sequence[Connections],
    stages: Mapping[RankSeat, dict[int, Stage]],
    setup: SwapSetup,
    queues: Mapping[int, DeviceQueue],
) -> list[Worker]:
    """The workers of this process, whose stages go to their devices, or tiers."""
    layout, recipe = setup.layout, setup.recipe
    # Who shares what is found in memory, before anything moves.
    shared = {seat: layout.shared_state(own) for seat, own in stages.items()}
    residences = place(setup, stages, queues)
    workers = []
    for own in connections:
        device = setup.devices[own.seat.number]
        extras = RankExtras(
            shared=shared[own.seat],
            residence=residences.get(own.seat.rank),
            offloading=offloading_of(setup.plan, device, setup.seconds),
            shapes=setup.plan.input_shapes,
        )
        workers.append(worker_of(layout, stages[own.seat], recipe, own, extras))
    return workers


def _first_copies(plan: Plan, stages: Mapping[RankSeat, Mapping[int, Stage]]) -> dict[int, Stage]:
    """By number, the stages of this process, each as the first of its ranks here has it; parameter
    servers run none."""
    copies: dict[int, Stage] = {}
    for seat, own in stages.items():
        if seat.rank < plan.num_ranks:
            copies = {**own, **copies}
    return dict(sorted(copies.items()))


def compile_stages(
    plan: Plan,
    recipe: Recipe,
    running: Running,
    stages: Iterable[Mapping[int, Stage]],
    devices: Collection[torch.device],
) -> None:
    """Let the stages of this process run as compiled passes, if that is wanted.

    Args:
        stages: those of each seat here, by number.
        devices: on which they compute.

    Raises:
        InputError: something else that is wanted needs the layers themselves in every pass, or
            there is no compiler.
        ModelError: layers have hooks, which no pass would call.
    """
    if running.compile is None and not running.replay:
        return
    _check_compiling(plan, recipe, "replay=True" if running.replay else "compile=…")
    backend = running.compile or replaying_on(devices)
    check_compiler(backend, devices)
    if backend == "cudagraphs":
        tell(captured_graphs.UNTRIED)
    for own in stages:
        for stage in own.values():
            stage.compile(backend)


def _check_compiling(plan: Plan, recipe: Recipe, argument: str) -> None:
    refusals = {
        f"{sharing_ranks(plan.stages)} ranks, which exchange parts of values inside of layers": (
            plan.num_tensor_ranks > 1
        ),
        "the reducer 'fully-sharded', which gathers weights layer by layer": (
            plan.summing.reducer == "fully-sharded"
        ),
        "expert ranks, which exchange tokens inside of layers": plan.divides_experts,
        "slices, of which each has another past": plan.placement.num_slices > 1,
        "activations that are offloaded between passes": plan.offload is not None,
        "batch_norm='minibatch', which follows layers from outside": (
            recipe.batch_norm == "minibatch"
        ),
    }
    for other, is_wanted in refusals.items():
        if is_wanted:
            raise InputError(f"{argument} and {other}, do not go together; leave one of them out")
