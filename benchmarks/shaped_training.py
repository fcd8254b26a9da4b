"""Is the planner right about slow networks? Data parallelism and a pipeline on shaped links.

    python -m benchmarks.shaped_training [--mbit 25 100] [--hosts 4] [--width 1024] [--steps 5]

Trains one parameter-heavy MLP on so many hosts (``benchmarks.shaped_network``), with torch's
DistributedDataParallel and as Penstock's straight pipeline, over gloo. What a step takes is
predicted from two measurements that know nothing of the training: a profile of the layers on one
process, and ``penstock measure-cluster`` on the same network. Shown are medians over steps beside
the predictions, and the ratio of the two ways to train.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import penstock as pk
from benchmarks.shaped_network import SKIPPED, ShapedNetwork, end_on_signals, missing
from penstock.cluster import Cluster
from penstock.graph import LayerGraph

WARM_UP_STEPS = 1


class Work(NamedTuple):
    """What is trained.

    Attributes:
        width: of every layer.
        depth: linear layers.
        rows: of a microbatch.
        microbatches: per minibatch.
    """

    width: int
    depth: int
    rows: int
    microbatches: int

    def model(self) -> nn.Sequential:
        """Linear layers with a ReLU between them; the same weights in every process."""
        torch.manual_seed(0)
        layers = [nn.Linear(self.width, self.width) for _ in range(self.depth)]
        between = [layer for linear in layers for layer in (linear, nn.ReLU())]
        return nn.Sequential(*between[:-1])

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a minibatch."""
        shape = (self.rows * self.microbatches, self.width)
        return torch.randn(shape), torch.randn(shape)


class Times(NamedTuple):
    """Seconds per step."""

    data_parallel: float
    pipeline: float

    @property
    def ratio(self) -> float:
        """How many times longer data parallelism takes."""
        return self.data_parallel / self.pipeline


def sgd(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of both; small steps, since targets are noise."""
    return torch.optim.SGD(parameters, lr=1e-3)


def train(work: Work, plan: pk.Plan, steps: int) -> Times:
    """One process's part in both trainings."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    inputs, targets = work.batch()
    with pk.Pipeline(
        work.model(), plan, loss=mse_loss, optimizer=sgd, transport="process-group",
        deadline_seconds=120, results="none",
    ) as pipeline:  # fmt: skip
        pipeline_seconds = timed(lambda: pipeline.step(inputs, targets), steps)
    rank, count = dist.get_rank(), dist.get_world_size()
    copy = DistributedDataParallel(work.model())
    optimizer = sgd(copy.parameters())
    own_inputs, own_targets = inputs.chunk(count)[rank], targets.chunk(count)[rank]

    def step() -> None:
        optimizer.zero_grad()
        mse_loss(copy(own_inputs), own_targets).backward()
        optimizer.step()

    data_parallel_seconds = timed(step, steps)
    dist.destroy_process_group()
    return Times(data_parallel_seconds, pipeline_seconds)


def timed(step: Callable[[], object], steps: int) -> float:
    """Median seconds from when all ranks begin until the last has ended."""
    seconds = []
    for _ in range(WARM_UP_STEPS + steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP_STEPS:])


def plans(graph: LayerGraph, cluster: Cluster, work: Work, overlap: float) -> tuple[pk.Plan, ...]:
    """(data parallelism, straight pipeline), as the planner sees them."""
    count = len(cluster.devices)
    wanted = {"microbatches": work.microbatches, "schedule": "1f1b", "recompute": "never"}
    copies = pk.plan(graph, cluster, replicas=(count,), overlap=overlap, **wanted)
    return copies, pk.plan(graph, cluster, stages=count, **wanted)


def on_network(
    graph: LayerGraph, work: Work, hosts: int, mbit: float, options: argparse.Namespace
) -> tuple[Cluster, Times, Times]:
    """(measured links, measured, predicted) at one rate."""
    with tempfile.TemporaryDirectory() as name, ShapedNetwork(hosts, mbit) as network:
        folder = Path(name)
        meter = [sys.executable, "-m", "penstock.cli", "measure-cluster"]
        expect_success(network.run([*meter, "-o", str(folder / "cluster.json")]))
        cluster = Cluster.load(folder / "cluster.json")
        copies, pipeline = plans(graph, cluster, work, options.overlap)
        pipeline.save(folder / "plan.json")
        (folder / "work.json").write_text(json.dumps(work))
        job = [sys.executable, "-m", "benchmarks.shaped_training", "--steps", str(options.steps)]
        expect_success(network.run([*job, "--job", name]))
        measured = Times(*json.loads((folder / "times.json").read_text()))
    return cluster, measured, Times(copies.step_seconds, pipeline.step_seconds)


def expect_success(code: int) -> None:
    """End this program where a command on the hosts failed; it has said why."""
    if code:
        sys.exit(f"a command on the shaped network ended with exit code {code}")


def show(mbit: float, cluster: Cluster, measured: Times, predicted: Times) -> None:
    """One rate's results."""
    found = cluster.link.bytes_per_second * 8e-6
    title = f"{mbit:g} Mbit/s (measured {found:.1f}, {cluster.link.latency_seconds * 1e6:.0f} µs)"
    table = Table("", "measured", "predicted", "difference", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for label, real, thought, unit in (
        ("data parallelism", measured.data_parallel, predicted.data_parallel, " s"),
        ("pipeline", measured.pipeline, predicted.pipeline, " s"),
        ("ratio", measured.ratio, predicted.ratio, ""),
    ):
        table.add_row(
            label, f"{real:.3g}{unit}", f"{thought:.3g}{unit}", f"{thought / real - 1:+.1%}"
        )
    Console().print(table)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, nargs="+", default=[25.0, 100.0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4, help="linear layers")
    parser.add_argument("--rows", type=int, default=32, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--overlap", type=float, default=0.0, help="of DDP's all-reduce")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.job is not None:
        work = Work(*json.loads((options.job / "work.json").read_text()))
        times = train(work, pk.Plan.load(options.job / "plan.json"), options.steps)
        if os.environ["RANK"] == "0":
            (options.job / "times.json").write_text(json.dumps(times))
        return 0
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return SKIPPED
    end_on_signals()
    work = Work(options.width, options.depth, options.rows, options.microbatches)
    torch.set_num_threads(1)
    model, (inputs, targets) = work.model(), work.batch()
    graph = pk.profile(
        model, inputs[: work.rows], targets=targets[: work.rows], loss=mse_loss, optimizer=sgd
    )
    size = sum(parameter.nbytes for parameter in model.parameters())
    print(f"MLP of {size / 1e6:.0f} MB, {work.microbatches} microbatches of {work.rows} rows")
    for mbit in options.mbit:
        show(mbit, *on_network(graph, work, options.hosts, mbit, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
