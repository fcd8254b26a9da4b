"""Is the planner right about slow networks? Data parallelism and its own plan on shaped links.

    python -m benchmarks.network.shaped_training [--mbit 25 50 100] [--repeats 2] [--wait-ms 1]

Trains one parameter-heavy MLP on four hosts (``shaped_network``) over gloo: with torch's
DistributedDataParallel, and with Penstock as two plans say: data parallelism, and the planner's own
choice. What a step takes is predicted from two measurements that know nothing of the training: a
profile of the layers on one process, and ``penstock measure-cluster`` on the same network. Shown
are medians over steps beside the predictions, and the ratio of DDP to the planner's choice.

The hosts share this machine's few cores, which real ones do not. So a layer computes its true
values and gradients, and then waits until as much time has passed as an accelerator of a given
speed would take; with ``--wait-ms 0`` it does not wait, and the hosts take each other's cores.
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
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss
from torch.nn.parallel import DistributedDataParallel

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.network.shaped_network import SKIPPED, ShapedNetwork, cannot_shape
from penstock.core.cluster import Cluster
from penstock.core.graph import LayerGraph

WARM_UP_STEPS = 1
FIRST_BUCKET_BYTES = 2**20
"""Of gradients that DDP gathers before it sums any; its later buckets are 25 times as large."""


class Wait(torch.autograd.Function):
    """A linear layer of a slower device, which takes so many seconds per row, twice that back."""

    @staticmethod
    def forward(context: Any, rows: Tensor, weight: Tensor, bias: Tensor, seconds: float) -> Tensor:
        end = time.perf_counter() + seconds * len(rows)
        context.save_for_backward(rows, weight)
        context.seconds = seconds
        result = linear(rows, weight, bias)
        wait_until(end)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        end = time.perf_counter() + 2 * context.seconds * len(gradient)
        rows, weight = context.saved_tensors
        result = gradient @ weight, gradient.t() @ rows, gradient.sum(0), None
        wait_until(end)
        return result


def wait_until(end: float) -> None:
    """Leave the core to others meanwhile."""
    if (left := end - time.perf_counter()) > 0:
        time.sleep(left)


class SlowLinear(nn.Linear):
    """A linear layer and a ReLU that take at least so many seconds per row."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, rows: Tensor) -> Tensor:
        return Wait.apply(rows, self.weight, self.bias, self.seconds).relu()


class Work(NamedTuple):
    """What is trained.

    Attributes:
        width: of every layer.
        depth: linear layers.
        rows: of a microbatch.
        microbatches: per minibatch.
        wait_seconds: per row and layer, the least that a forward takes; a backward twice as long.
    """

    width: int
    depth: int
    rows: int
    microbatches: int
    wait_seconds: float

    def model(self) -> nn.Sequential:
        """The layers, with the same weights in every process."""
        torch.manual_seed(0)
        layers = [SlowLinear(self.width, self.wait_seconds) for _ in range(self.depth)]
        return nn.Sequential(*layers)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a minibatch, the same in every process."""
        shape = (self.rows * self.microbatches, self.width)
        generator = torch.Generator().manual_seed(1)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def profile(self, rows: int) -> LayerGraph:
        """What the layers take, alone, with microbatches of so many rows."""
        inputs, targets = (tensor[:rows] for tensor in self.batch())
        return pk.profile(self.model(), inputs, targets=targets, loss=mse_loss, optimizer=sgd)

    @property
    def hidden_share(self) -> float:
        """Of a backward, what still runs when DDP has its first bucket full and begins to sum."""
        layer_bytes = 4 * (self.width + 1) * self.width
        return max(0.0, 1 - ceil(FIRST_BUCKET_BYTES / layer_bytes) / self.depth)


class Times(NamedTuple):
    """Seconds per step.

    Attributes:
        data_parallel: of DDP.
        copies: of Penstock with the whole model on every host.
        chosen: of Penstock with the planner's choice.
    """

    data_parallel: float
    copies: float
    chosen: float

    @property
    def ratio(self) -> float:
        """How many times longer than the planner's choice DDP takes."""
        return self.data_parallel / self.chosen


class Plans(NamedTuple):
    """What is predicted, and all but the first run.

    Attributes:
        data_parallel: a copy per host as DDP trains it, which sums while backwards still run.
        copies: the same as Penstock trains it, with parts leaving as simulated.
        chosen: what the planner thinks best.
    """

    data_parallel: pk.Plan
    copies: pk.Plan
    chosen: pk.Plan

    @property
    def predicted(self) -> Times:
        """What their steps should take."""
        return Times(*(plan.step_seconds for plan in self))


def sgd(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of both; small steps, since targets are noise."""
    return torch.optim.SGD(parameters, lr=1e-3)


def train(work: Work, copies: pk.Plan, chosen: pk.Plan, options: argparse.Namespace) -> Times:
    """One process's part in all trainings."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times = Times(
        chosen=train_planned(work, chosen, options.steps),
        copies=train_planned(work, copies, options.copies_steps),
        data_parallel=train_copies(work, options.copies_steps),
    )
    dist.destroy_process_group()
    return times


def train_planned(work: Work, plan: pk.Plan, steps: int) -> float:
    """Seconds of a step with Penstock."""
    inputs, targets = work.batch()
    with pk.Pipeline(
        work.model(), plan, loss=mse_loss, optimizer=sgd, transport="process-group",
        deadline_seconds=120, results="none",
    ) as pipeline:  # fmt: skip
        return timed(lambda: pipeline.step(inputs, targets), steps)


def train_copies(work: Work, steps: int) -> float:
    """Seconds of a step with DDP."""
    inputs, targets = work.batch()
    rank, count = dist.get_rank(), dist.get_world_size()
    copy = DistributedDataParallel(work.model())
    optimizer = sgd(copy.parameters())
    own_inputs, own_targets = inputs.chunk(count)[rank], targets.chunk(count)[rank]

    def step() -> None:
        optimizer.zero_grad()
        mse_loss(copy(own_inputs), own_targets).backward()
        optimizer.step()

    return timed(step, steps)


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


class Layers(NamedTuple):
    """Profiles of the layers: with rows of a microbatch, and with those of one host's share."""

    of_microbatch: LayerGraph
    of_share: LayerGraph


def plans(layers: Layers, cluster: Cluster, work: Work) -> Plans:
    """What to train, and what DDP should take."""
    count = len(cluster.devices)

    def copies(hidden: float) -> pk.Plan:
        return pk.plan(
            layers.of_share, cluster, microbatches=count, replicas=(count,), schedule="1f1b",
            overlap=hidden,
        )  # fmt: skip

    asked = {"microbatches": work.microbatches}
    chosen = pk.plan(layers.of_microbatch, cluster, **asked)
    if chosen.num_ranks < count:  # every host trains
        chosen = pk.plan(layers.of_microbatch, cluster, stages=count, **asked)
    return Plans(copies(work.hidden_share), copies(0.0), chosen)


def on_network(
    layers: Layers, work: Work, mbit: float, options: argparse.Namespace
) -> tuple[Cluster, Plans, Times]:
    """(measured links, plans, measured steps) at one rate."""
    with tempfile.TemporaryDirectory() as name, ShapedNetwork(options.hosts, mbit) as network:
        folder = Path(name)
        cluster = measured_cluster(network, folder)
        made = plans(layers, cluster, work)
        made.copies.save(folder / "copies.json")
        made.chosen.save(folder / "chosen.json")
        (folder / "work.json").write_text(json.dumps(work))
        job = [sys.executable, "-m", "benchmarks.network.shaped_training", "--job", name]
        job += ["--steps", str(options.steps), "--copies-steps", str(options.copies_steps)]
        expect_success(network.run(job))
        measured = Times(*json.loads((folder / "times.json").read_text()))
    return cluster, made, measured


def measured_cluster(network: ShapedNetwork, folder: Path) -> Cluster:
    """The links that ``penstock measure-cluster`` finds on a network."""
    meter = [sys.executable, "-m", "penstock.cli", "measure-cluster"]
    expect_success(network.run([*meter, "-o", str(folder / "cluster.json")]))
    return Cluster.load(folder / "cluster.json")


def expect_success(code: int) -> None:
    """End this program where a command on the hosts failed; it has said why."""
    if code:
        sys.exit(f"a command on the shaped network ended with exit code {code}")


def show(mbit: float, cluster: Cluster, made: Plans, measured: Times) -> None:
    """One rate's results."""
    predicted = made.predicted
    found = cluster.link.bytes_per_second * 8e-6
    title = f"{mbit:g} Mbit/s (measured {found:.1f}, {cluster.link.latency_seconds * 1e6:.0f} µs)"
    replicas = "-".join(map(str, made.chosen.replicas))
    chosen = f"planner's choice: {made.chosen.schedule}, stages {replicas}"
    table = Table("", "measured", "predicted", "difference", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for label, real, thought, unit in (
        ("data parallelism (DDP)", measured.data_parallel, predicted.data_parallel, " s"),
        ("data parallelism (Penstock)", measured.copies, predicted.copies, " s"),
        (chosen, measured.chosen, predicted.chosen, " s"),
        ("ratio", measured.ratio, predicted.ratio, ""),
    ):
        table.add_row(
            label, f"{real:.3g}{unit}", f"{thought:.3g}{unit}", f"{thought / real - 1:+.1%}"
        )
    Console(width=120).print(table)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, nargs="+", default=[25.0, 50.0, 100.0])
    parser.add_argument("--repeats", type=int, default=1, help="of everything")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=8, help="linear layers")
    parser.add_argument("--rows", type=int, default=8, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--wait-ms", type=float, default=1.0, help="per row and layer")
    parser.add_argument("--steps", type=int, default=10, help="of the pipeline")
    parser.add_argument("--copies-steps", type=int, default=2, help="of data parallelism")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.job is not None:
        work = Work(*json.loads((options.job / "work.json").read_text()))
        copies, chosen = (
            pk.Plan.load(options.job / f"{name}.json") for name in ("copies", "chosen")
        )
        times = train(work, copies, chosen, options)
        if os.environ["RANK"] == "0":
            (options.job / "times.json").write_text(json.dumps(times))
        return 0
    if cannot_shape():
        return SKIPPED
    work = Work(
        options.width, options.depth, options.rows, options.microbatches, options.wait_ms / 1e3
    )
    torch.set_num_threads(1)
    share = work.rows * work.microbatches // options.hosts
    layers = Layers(work.profile(work.rows), work.profile(share))
    size = sum(parameter.nbytes for parameter in work.model().parameters())
    print(f"MLP of {size / 1e6:.0f} MB, {work.microbatches} microbatches of {work.rows} rows")
    for _ in range(options.repeats):
        for mbit in options.mbit:
            show(mbit, *on_network(layers, work, mbit, options))
    return 0


if __name__ == "__main__":
    publish(main)
