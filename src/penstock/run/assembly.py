"""Put a pipeline together: from a model, a plan and a recipe to workers and their driver."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn

from penstock.errors import InputError
from penstock.planner import Plan
from penstock.randomness import LayerStreams
from penstock.run.driver import Driver
from penstock.run.layout import Layout
from penstock.run.processes import ProcessDriver, agree, offsets_of_clocks
from penstock.run.recipe import Recipe
from penstock.run.threads import ThreadDriver
from penstock.run.updater import Updater
from penstock.run.worker import Worker
from penstock.spine import NamedLayer, spine_fingerprint
from penstock.stage import Stage
from penstock.transport import ThreadExchange, Transport, connect
from penstock.values import one_of

TransportName = Literal["auto", "threads", "shared-memory", "process-group"]
Results = Literal["every rank", "none"]


@dataclass(frozen=True)
class Running:
    """How to run, whatever the training is; see ``Pipeline``."""

    transport: TransportName
    seed: int
    deadline_seconds: float
    record: bool
    results: Results

    def __post_init__(self) -> None:
        one_of("transport", self.transport, get_args(TransportName))
        one_of("results", self.results, get_args(Results))
        if not 0 < self.deadline_seconds <= threading.TIMEOUT_MAX:
            raise InputError(
                f"deadline_seconds is {self.deadline_seconds}, but must be > 0 and not infinite: "
                "without a deadline, a rank that hangs would hang all others"
            )


@dataclass(frozen=True)
class Assembly:
    """A pipeline that is ready to run.

    Attributes:
        plan: that is run: under torchrun, rank 0's.
        driver: runs the workers.
        layout: which rank holds what.
        streams: where layers draw random numbers.
        workers: of this process.
        stages: of this process, by number; of a stage with copies here, the first.
    """

    plan: Plan
    driver: Driver[Any]
    layout: Layout
    streams: LayerStreams
    workers: Sequence[Worker]
    stages: Mapping[int, Stage]


def several_processes() -> bool:
    """Whether this process is one of several of a job."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def assemble(
    model: nn.Module, layers: tuple[NamedLayer, ...], plan: Plan, recipe: Recipe, running: Running
) -> Assembly:
    """Build what runs the plan: processes if the job has several and threads were not asked for.

    Raises:
        InputError: the number of processes is not the plan's.
        ModelError: the model cannot be spread so, or processes built different ones.
    """
    threads = running.transport == "threads" or (
        running.transport == "auto" and not several_processes()
    )
    if threads:
        return _in_threads(model, layers, plan, recipe, running)
    return _in_processes(model, layers, plan, recipe, running)


def _in_threads(
    model: nn.Module, layers: tuple[NamedLayer, ...], plan: Plan, recipe: Recipe, running: Running
) -> Assembly:
    streams = LayerStreams(running.seed)
    layout = Layout(model, plan, layers, streams, one_process=True)
    exchange = ThreadExchange(plan.num_ranks, running.deadline_seconds)
    workers = [
        _worker(layout, rank, plan.num_ranks, transport, recipe)
        for rank, transport in enumerate(exchange.transports)
    ]
    driver = ThreadDriver(workers, plan.num_threads)
    return Assembly(plan, driver, layout, streams, workers, _first_copies(workers))


def _in_processes(
    model: nn.Module, layers: tuple[NamedLayer, ...], plan: Plan, recipe: Recipe, running: Running
) -> Assembly:
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise InputError(
                f"transport={running.transport!r} needs one process per rank: start the script "
                f"with torchrun --nproc-per-node={plan.num_ranks}, or use transport='threads'"
            )
        dist.init_process_group("gloo")
        # It stays for the next pipeline: made anew, it would find the addresses of the old one in
        # torchrun's store.
        atexit.register(_leave_group)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    assert running.transport != "threads"  # of which there are none here
    transport = connect(num_ranks, running.deadline_seconds, way=running.transport)
    plan, seed = agree(transport.group, plan, spine_fingerprint(layers), running.seed)
    if plan.num_ranks != num_ranks:
        raise InputError(
            f"the plan has {plan.num_ranks} ranks, but the job has {num_ranks} processes; "
            f"start it with torchrun --nproc-per-node={plan.num_ranks}, or plan for "
            f"{num_ranks} ranks (stages = ranks × stages per rank of the schedule)"
        )
    streams = LayerStreams(seed)
    layout = Layout(model, plan, layers, streams, one_process=False)
    worker = _worker(layout, rank, num_ranks, transport, recipe)
    worker.updater.sums.begin_equal()
    driver = ProcessDriver(
        worker,
        transport,
        num_ranks,
        num_threads=plan.num_threads,
        record=running.record,
        share_results=running.results == "every rank",
        clock_offsets=offsets_of_clocks(transport.group) if running.record else None,
    )
    return Assembly(plan, driver, layout, streams, [worker], worker.stages)


def _worker(
    layout: Layout, rank: int, num_ranks: int, transport: Transport, recipe: Recipe
) -> Worker:
    stages = layout.stages(rank)
    updater = Updater(
        rank,
        num_ranks,
        layout.holdings(rank, stages),
        transport,
        recipe,
        layout.shared(rank, stages),
    )
    stores = layout.stores(stages, updater.optimizers)
    return Worker(rank, stages, transport, recipe, updater, layout.skips, stores)


def _first_copies(workers: Sequence[Worker]) -> dict[int, Stage]:
    found: dict[int, Stage] = {}
    for worker in workers:
        for index, stage in worker.stages.items():
            found.setdefault(index, stage)
    return dict(sorted(found.items()))


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
