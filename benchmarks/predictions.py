"""Predicted against measured step times on this machine: three models, four schedules, three cuts.

    python -m benchmarks.predictions [--steps 10] [--rounds 3] [--models GPT,ResNet-50]

Each model is profiled once, every plan is made from that profile, and every pipeline (two ranks
as threads of one process) trains for real. Contestants take turns over several rounds; a plan's
time is the median of its steps. For each model and schedule, the table also says whether the
predicted order of the cuts is the measured one, where predictions differ by more than their usual
error.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import penstock as pk
from benchmarks.foretold import Foretold, orders
from examples.models import resnet
from penstock.demo.workload import workload as demo_workload

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "pipedream")
MICROBATCHES = 8


@dataclass
class Work:
    """A model to train, and its minibatches."""

    name: str
    model: nn.Module
    loss: Callable[[Any, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch: tuple[Tensor, Tensor]


@dataclass(kw_only=True)
class Contestant(Foretold):
    """One plan of a model."""

    work: str
    schedule: str
    cut: int


def gpt() -> Work:
    """The demo's GPT."""
    found = demo_workload()
    inputs, targets = found.first_batch()
    return Work("GPT", found.build_model(), found.loss, found.optimizer, (inputs, targets))


def resnet50() -> Work:
    """On small images; batch norm per microbatch."""
    return _of_images("ResNet-50", resnet.build(), rows=2)


def small_resnet() -> Work:
    """So thin that an op of a stage takes a millisecond or two, much of it in Python."""
    return _of_images("thin ResNet", resnet.ResNet(blocks=(2, 2, 2), width=16, classes=10), rows=4)


def _of_images(name: str, model: nn.Module, rows: int) -> Work:
    """With microbatches of so many rows."""
    torch.manual_seed(0)
    images = torch.randn(rows * MICROBATCHES, 3, 64, 64)
    labels = torch.randint(10, (len(images),))
    captured = pk.capture(model, images[:rows], granularity="block")
    return Work(
        name,
        captured,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        (images, labels),
    )


MODELS = {"GPT": gpt, "ResNet-50": resnet50, "thin ResNet": small_resnet}


def profile_of(work: Work) -> pk.LayerGraph:
    inputs, targets = work.batch
    rows = len(inputs) // MICROBATCHES
    return pk.profile(
        work.model,
        inputs[:rows],
        loss=work.loss,
        targets=targets[:rows],
        optimizer=work.optimizer,
        repeats=15,
    )


def cuts_of(graph: pk.LayerGraph) -> tuple[int, int, int]:
    """The even cut, and those nearest to one third and two thirds of the compute."""
    total = sum(layer.compute_seconds for layer in graph.layers)
    sums = list(itertools.accumulate(layer.compute_seconds for layer in graph.layers))

    def nearest(share: float) -> int:
        return min(range(1, len(sums)), key=lambda cut: abs(sums[cut - 1] - share * total))

    even, early, late = nearest(0.5), nearest(0.3), nearest(0.7)
    return even, early, late


def contestants(work: Work, graph: pk.LayerGraph) -> Iterator[Contestant]:
    cluster = pk.Cluster.local(2, kind="cpu")
    for schedule, cut in itertools.product(SCHEDULES, cuts_of(graph)):
        plan = pk.plan(
            graph,
            cluster,
            microbatches=MICROBATCHES,
            schedule=schedule,
            cuts=[cut],
            recompute="never",
        )
        yield Contestant(plan=plan, work=work.name, schedule=schedule, cut=cut)


def train(work: Work, one: Contestant, steps: int) -> None:
    """Some steps of one contestant; the first two are warm-up."""
    with pk.Pipeline(work.model, one.plan, loss=work.loss, optimizer=work.optimizer) as pipeline:
        if one.plan.versions.asynchronous:
            one.seconds += stream_seconds(pipeline, work, steps)
            return
        for step in range(steps):
            start = time.perf_counter()
            pipeline.step(*work.batch)
            if step >= 2:
                one.seconds.append(time.perf_counter() - start)


def stream_seconds(pipeline: pk.Pipeline, work: Work, steps: int) -> list[float]:
    """Between the losses of a stream in its steady state."""
    times = []
    for _ in pipeline.steps(work.batch for _ in range(steps + 3)):
        times.append(time.perf_counter())
    gaps = [second - first for first, second in itertools.pairwise(times)]
    return gaps[2:-1]  # without filling and draining


def show(found: list[Contestant]) -> None:
    console = Console(width=120)
    table = Table(title="predicted against measured seconds of a step, 2 ranks in threads")
    for name in ("model", "schedule", "cut", "predicted ms", "measured ms", "error", "order"):
        table.add_column(name, justify="left" if name in ("model", "schedule") else "right")
    groups = itertools.groupby(found, key=lambda one: (one.work, one.schedule))
    rights = []
    for _, group in groups:
        those = list(group)
        right = all(orders(those))
        rights.append(right)
        for index, one in enumerate(those):
            table.add_row(
                one.work,
                one.schedule,
                f"{one.cut} of {sum(len(stage.layers) for stage in one.plan.stages)}",
                f"{one.plan.step_seconds * 1e3:.1f}",
                f"{one.measured * 1e3:.1f}",
                f"{one.error:+.1%}",
                ("right" if right else "WRONG") if index == 0 else "",
            )
    console.print(table)
    for name, group in itertools.groupby(found, key=lambda one: one.work):
        errors = [abs(one.error) for one in group]
        console.print(
            f"{name}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"
        )
    console.print(f"order of the cuts right in {sum(rights)} of {len(rights)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    found = []
    for name in arguments.models.split(","):
        work = MODELS[name]()
        graph = profile_of(work)
        print(f"{work.name}: {graph.contention}, op {graph.op_seconds * 1e6:.0f} µs")
        those = list(contestants(work, graph))
        for _ in range(arguments.rounds):
            for one in those:
                train(work, one, arguments.steps)
        found += those
    show(found)


if __name__ == "__main__":
    main()
