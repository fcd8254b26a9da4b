"""Convolutions by rows and linear layers by parameters, beside DDP, on slow links.

    python -m benchmarks.network.hybrid [--hosts 4] [--mbit 100] [--rows 16] [--hidden 2048]

Trains a small VGG (35 MB, nearly all of it in two linear layers) on hosts of one process each
(``shaped_network``), over gloo: as the planner shares its layers between the hosts ("one weird
trick", Krizhevsky, arXiv 1404.5997), and with torch's DistributedDataParallel. The prediction comes
from a profile on one process and from ``penstock measure-cluster`` on the same network. Goals: ten
times DDP at 100 Mbit/s on four hosts, predicted within 15 %.

The hosts share this machine's cores, which real ones do not: each counts as a device as fast as its
share of them. Bytes are what the network interface of the first host counts.
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
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.network.shaped_network import SKIPPED, ShapedNetwork, cannot_shape
from benchmarks.network.shaped_training import expect_success, measured_cluster, sgd

WARM_UP_STEPS = 1
LEAST_RATIO, MOST_WRONG = 10.0, 0.15
_CLASSES = 100


class Work(NamedTuple):
    """What is trained.

    Attributes:
        rows: of each host.
        hosts: how many there are; a minibatch has so many times the rows.
        hidden: features of the linear layers.
    """

    rows: int
    hosts: int
    hidden: int

    def model(self) -> nn.Sequential:
        """A VGG for pictures of 32 × 32, with the same weights in every process."""
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        channels = 3
        for width in (32, 64, 128):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        layers += [nn.Flatten(), nn.Linear(16 * channels, self.hidden), nn.ReLU()]
        layers += [nn.Linear(self.hidden, self.hidden), nn.ReLU(), nn.Linear(self.hidden, _CLASSES)]
        return nn.Sequential(*layers)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a minibatch, the same in every process."""
        generator, rows = torch.Generator().manual_seed(1), self.rows * self.hosts
        inputs = torch.randn(rows, 3, 32, 32, generator=generator)
        return inputs, torch.randint(0, _CLASSES, (rows,), generator=generator)


class Measured(NamedTuple):
    """Of one way to train.

    Attributes:
        seconds: of a step, the median.
        sent_bytes: by the first host, in a step.
        loss: of the last step.
    """

    seconds: float
    sent_bytes: float
    loss: float


def train(work: Work, plan: pk.Plan, steps: int) -> dict[str, Measured]:
    """One process's part in both trainings."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    inputs, targets = work.batch()
    with pk.Pipeline(
        work.model(), plan, loss=cross_entropy, optimizer=sgd, transport="process-group",
        devices="cpu", deadline_seconds=300,
    ) as pipeline:  # fmt: skip
        hybrid = measured(lambda: float(pipeline.step(inputs, targets).detach()), steps)
    results = {"hybrid": hybrid, "DDP": measured(copies(work), steps)}
    dist.destroy_process_group()
    return results


def copies(work: Work) -> Callable[[], float]:
    """A step with DDP, which gives the loss of the whole minibatch."""
    rank, (inputs, targets) = dist.get_rank(), work.batch()
    copy = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = sgd(copy.parameters())
    own_inputs, own_targets = inputs.chunk(work.hosts)[rank], targets.chunk(work.hosts)[rank]

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(copy(own_inputs), own_targets)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def measured(step: Callable[[], float], steps: int) -> Measured:
    """Medians from when all ranks begin until the last has ended."""
    seconds, sent, loss = [], [], 0.0
    for _ in range(WARM_UP_STEPS + steps):
        dist.barrier()
        before, start = sent_bytes(), time.perf_counter()
        loss = step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        sent.append(sent_bytes() - before)
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return Measured(
        statistics.median(seconds[WARM_UP_STEPS:]),
        statistics.median(sent[WARM_UP_STEPS:]),
        float(total) / dist.get_world_size(),
    )


def sent_bytes() -> int:
    """What has left this host over its shaped link so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "wire":
            return int(counts.split()[8])
    return 0


def on_network(
    work: Work, graph: pk.LayerGraph, mbit: float, options: argparse.Namespace
) -> tuple[pk.Plan, dict[str, Measured]]:
    """The plan for the links that are found on the network, and what both trainings take there."""
    with tempfile.TemporaryDirectory() as name, ShapedNetwork(work.hosts, mbit) as network:
        folder = Path(name)
        cluster = measured_cluster(network, folder)
        share = min(1.0, len(os.sched_getaffinity(0)) / work.hosts)
        devices = tuple(replace(device, speed=share) for device in cluster.devices)
        plan = pk.plan(
            graph, replace(cluster, devices=devices), microbatches=1, stages=1, schedule="1f1b",
            tensor_ranks=work.hosts,
        )  # fmt: skip
        plan.save(folder / "plan.json")
        (folder / "work.json").write_text(json.dumps(work))
        job = [sys.executable, "-m", "benchmarks.network.hybrid", "--job", name]
        expect_success(network.run([*job, "--steps", str(options.steps)]))
        results = json.loads((folder / "results.json").read_text())
    return plan, {way: Measured(*numbers) for way, numbers in results.items()}


def show(mbit: float, plan: pk.Plan, results: dict[str, Measured]) -> None:
    """One rate's results."""
    hybrid, ddp = results["hybrid"], results["DDP"]
    said = ", ".join(f"{name} {how}" for name, how in plan.stages[0].splits.items())
    print(f"layers: {said}")
    table = Table("", "s/step", "sent MB", title=f"{mbit:g} Mbit/s", title_justify="left")
    for way, found in results.items():
        table.add_row(way, f"{found.seconds:.3f}", f"{found.sent_bytes / 1e6:.2f}")
    table.add_row("predicted", f"{plan.step_seconds:.3f}", "")
    Console(width=100).print(table)
    ratio, wrong = ddp.seconds / hybrid.seconds, plan.step_seconds / hybrid.seconds - 1
    same = abs(ddp.loss - hybrid.loss) <= 1e-4 * abs(ddp.loss)
    print(f"losses {'agree' if same else f'DIFFER: {hybrid.loss:.6f} and {ddp.loss:.6f}'}")
    for told, good in (
        (f"DDP / hybrid {ratio:.1f} (goal {LEAST_RATIO:g})", ratio >= LEAST_RATIO),
        (f"prediction {wrong:+.1%} (goal ±{MOST_WRONG:.0%})", abs(wrong) <= MOST_WRONG),
    ):
        print(f"{told}: {'met' if good else 'missed'}", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0])
    parser.add_argument("--rows", type=int, default=16, help="of each host")
    parser.add_argument("--hidden", type=int, default=2048, help="features of linear layers")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.job is not None:
        work = Work(*json.loads((options.job / "work.json").read_text()))
        results = train(work, pk.Plan.load(options.job / "plan.json"), options.steps)
        if os.environ["RANK"] == "0":
            (options.job / "results.json").write_text(json.dumps(results))
        return 0
    if cannot_shape():
        return SKIPPED
    torch.set_num_threads(1)
    work = Work(options.rows, options.hosts, options.hidden)
    inputs, targets = work.batch()
    graph = pk.profile(work.model(), inputs, targets=targets, loss=cross_entropy, optimizer=sgd)
    size = sum(parameter.nbytes for parameter in work.model().parameters())
    print(f"VGG of {size / 1e6:.0f} MB, {work.hosts} hosts of {work.rows} rows")
    for mbit in options.mbit:
        show(mbit, *on_network(work, graph, mbit, options))
    return 0


if __name__ == "__main__":
    publish(main)
