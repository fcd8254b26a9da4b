"""Plans for devices of mixed speeds: predicted beside measured step times, on emulated devices.

    python -m benchmarks.predicting.emulated_plans [--ranks 4 6 8] [--models GPT] [--op-ms 6]

Two models, a profiled GPT and 24 layers of very different size, are planned for clusters of 4, 6
and 8 devices of mixed speeds on links that cost something. Every plan is rehearsed: each rank is a
real process that sends real messages and waits as long as the plan says that its device computes;
a hop that the plan foresees is kept. The prediction is ``Plan.step_seconds`` alone: nothing that is
measured here enters it. Plans take turns over several rounds.

Sleeping and waking cost some tenths of a millisecond, whatever the op. So the plans for one cluster
are scaled alike, compute and links, until a forward takes ``--op-ms`` on average in the plan with
the shortest ones; all times are shown at the pace of the plan. For each model and cluster the table
also says how many pairs of plans whose predictions are clearly apart were measured in that order.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.predicting.foretold import APART, Foretold, orders
from penstock.core.cluster import Cluster, Device, Group, Link
from penstock.demo.corpus import CONTEXT, workload
from penstock.demo.gpt import GPT
from penstock.training.rehearsal import rehearse

SPEEDS = {
    4: (1.0, 0.5, 1.0, 0.7),
    6: (1.0, 1.0, 0.6, 0.6, 1.5, 0.8),
    8: (1.0, 0.5, 1.0, 0.8, 1.4, 0.7, 1.0, 0.6),
}
"""Of the devices of a cluster; the first half is one server, the second another."""

MICROBATCHES_PER_RANK = 2
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved-1f1b": 2, "pipedream": 1}
_STEPS = 3
_NUM_BLOCKS, _ROWS = 16, 2


@dataclass(kw_only=True)
class Contestant(Foretold):
    """One plan; its steps are measured at its own pace.

    Attributes:
        model, num_devices: of the plan's cluster.
        label: the schedule and what is special about the plan.
    """

    model: str
    num_devices: int
    label: str

    @property
    def mean_forward(self) -> float:
        return statistics.mean(stage.forward_seconds for stage in self.plan.stages)

    def perform(self, scale: float) -> None:
        """One round: some steps after a warm-up, or some streams."""
        found = rehearse(self.plan, steps=_STEPS, scale=scale)
        if not self.plan.versions.asynchronous:
            self.seconds += [seconds / scale for seconds in found.step_seconds]
            return
        assert found.steady_seconds is not None  # a plan's stream is long enough to have a middle
        per_microbatch = found.steady_seconds.measured / scale
        self.seconds.append(per_microbatch * self.plan.num_microbatches)


def gpt() -> pk.LayerGraph:
    """The demo's GPT with more blocks, profiled on this machine."""
    demo = workload()
    inputs, targets = demo.first_batch()
    return pk.profile(
        GPT(context=CONTEXT, layers=_NUM_BLOCKS),
        inputs[:_ROWS],
        loss=demo.loss,
        targets=targets[:_ROWS],
        optimizer=demo.optimizer,
        repeats=5,
        ranks=0,
    )


def uneven() -> pk.LayerGraph:
    """24 layers, the dearest of them about eight times as dear as the cheapest."""
    dice = random.Random(24)
    layers = []
    for index in range(24):
        forward = dice.uniform(1e-3, 8e-3)
        layers.append(
            pk.Layer(
                name=f"layer{index}",
                forward_seconds=forward,
                backward_input_seconds=forward * dice.uniform(0.8, 1.3),
                backward_weight_seconds=forward * dice.uniform(0.6, 1.1),
                update_seconds=dice.uniform(1e-4, 1e-3),
                output_bytes=dice.randrange(100_000, 1_000_000),
                parameter_bytes=dice.randrange(100_000, 4_000_000),
            )
        )
    return pk.LayerGraph(layers=tuple(layers), input_bytes=500_000)


MODELS = {"GPT": gpt, "uneven": uneven}


def cluster_of(num_devices: int) -> Cluster:
    """Two servers on a slow link, with a faster one inside each."""
    devices = tuple(
        Device(name=f"d{index}", speed=speed) for index, speed in enumerate(SPEEDS[num_devices])
    )
    names = [device.name for device in devices]
    half = num_devices // 2
    inside = Link(latency_seconds=1e-3, bytes_per_second=1.25e9)
    groups = tuple(
        Group(name=name, members=tuple(members), link=inside)
        for name, members in (("left", names[:half]), ("right", names[half:]))
    )
    between = Link(latency_seconds=2e-3, bytes_per_second=1.25e8)
    return Cluster(devices=devices, link=between, groups=groups)


def contestants(model: str, graph: pk.LayerGraph, num_devices: int) -> Iterator[Contestant]:
    """All schedules on all devices, one with cuts that know nothing of speeds, two with a stage
    that has replicas, and whatever the planner itself would take."""
    cluster = cluster_of(num_devices)
    count = MICROBATCHES_PER_RANK * num_devices

    def made(label: str, **request: Any) -> Contestant:
        plan = pk.plan(graph, cluster, microbatches=count, **request)
        return Contestant(plan=plan, model=model, num_devices=num_devices, label=label)

    for name, per_rank in STAGES_PER_RANK.items():
        yield made(name, schedule=name, stages=per_rank * num_devices)
    size = len(graph.layers)
    cuts = [size * stage // num_devices for stage in range(1, num_devices)]
    yield made("1f1b, as many layers each", schedule="1f1b", cuts=cuts)
    replicas = (2, *[1] * (num_devices - 2))
    for name in ("1f1b", "pipedream"):
        yield made(name, schedule=name, replicas=replicas)
    yield made("planner's choice", asynchronous=False)


def show(console: Console, found: Sequence[Contestant]) -> None:
    """The table and its sum."""
    table = Table(title="predicted and measured ms of a step, emulated devices of mixed speeds")
    for name in ("model", "devices", "plan", "replicas", "predicted", "measured", "best", "error",
                 "pairs in order"):  # fmt: skip
        words = name in ("model", "plan", "replicas")
        table.add_column(name, justify="left" if words else "right")
    rights = totals = 0
    for _, group in itertools.groupby(found, key=lambda one: (one.model, one.num_devices)):
        those = list(group)
        found_orders = orders(those)
        right, total = sum(found_orders), len(found_orders)
        rights, totals = rights + right, totals + total
        for index, one in enumerate(those):
            named = one.plan.schedule if one.label == "planner's choice" else ""
            table.add_row(
                one.model,
                str(one.num_devices),
                f"{one.label}: {named}" if named else one.label,
                "-".join(map(str, one.plan.replicas)) if max(one.plan.replicas) > 1 else "",
                f"{one.plan.step_seconds * 1e3:.1f}",
                f"{one.measured * 1e3:.1f}",
                f"{min(one.seconds) * 1e3:.1f}",
                f"{one.error:+.1%}",
                f"{right} of {total}" if index == 0 else "",
                end_section=index == len(those) - 1,
            )
    console.print(table)
    errors = [abs(one.error) for one in found]
    within = sum(error <= APART for error in errors)
    console.print(
        f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, "
        f"{within} of {len(errors)} within {APART:.0%}; {rights} of {totals} pairs in order"
    )


def main() -> None:
    """Plan, rehearse in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, choices=list(SPEEDS), default=list(SPEEDS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--op-ms", type=float, default=6.0)
    options = parser.parse_args()
    console = Console(width=130)
    found: list[Contestant] = []
    graphs = {model: MODELS[model]() for model in options.models}
    for (model, graph), ranks in itertools.product(graphs.items(), options.ranks):
        those = list(contestants(model, graph, ranks))
        scale = options.op_ms / 1e3 / min(one.mean_forward for one in those)
        console.print(f"{model}, {ranks} devices: {scale:.2f} times as slow as planned")
        for _, one in itertools.product(range(options.rounds), those):
            one.perform(scale)
        found += those
    show(console, found)


if __name__ == "__main__":
    publish(main)
