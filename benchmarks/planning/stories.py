"""PipeDream's stories: which models want data parallelism, which a pipeline, and what it gains.

Run with ``python -m benchmarks.planning.stories``. Profiles are PipeDream's own
(tests/data/pipedream), and so are the clusters. Two judges: the steady state (``best_partition``:
the slowest stage or cut) under two cost models, and ``plan``, which simulates. Published speed-ups
were measured on real machines; what can be compared with them is the trend.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.common.alone import publish
from benchmarks.planning.planner import DATA, short
from penstock.core.cluster import Cluster, Link
from penstock.core.graph import LayerGraph
from penstock.interop.pipedream_profiles import read_pipedream_graph
from penstock.planning.partition import (
    CostModel,
    Partition,
    PartitionedStage,
    best_partition,
    cost_model,
    evaluate,
)
from penstock.planning.planner import plan
from penstock.planning.plans import Plan

PUBLISHED = {
    "resnet50": "data parallel, 1×",
    "vgg16": "15-1, 5.28×",
    "alexnet": "15-1, 4.92×",
    "gnmt_large": "straight, 2.34×",
}
"""On 4 servers of 4 devices, over data parallelism (SOSP 2019)."""

RELEASED = cost_model("pipedream-released")
HIDDEN = cost_model("ring", overlap=1.0)
"""A ring all-reduce that hides behind the backward, as data parallelism usually has it."""

NUM_MICROBATCHES = 16
"""As many as devices: one round of data parallelism."""


class Speed(NamedTuple):
    """Replicas of each stage, and times the speed of data parallelism on all devices."""

    replicas: tuple[int, ...]
    speed_up: float

    def __str__(self) -> str:
        return f"{short('-'.join(map(str, self.replicas)))}, {self.speed_up:.2f}×"


def clusters() -> dict[str, Cluster]:
    """The published ones with 16 devices."""
    fast, slow, flat = (Link(bytes_per_second=speed) for speed in (12e9, 1.25e9, 3.125e9))
    return {
        "4×4, 12 GB/s and 10 Gbit/s": Cluster.tree((4, 4), (fast, slow)),
        "16, 10 Gbit/s": Cluster.tree((16,), (slow,)),
        "16, 25 Gbit/s": Cluster.tree((16,), (flat,)),
    }


def graph_of(model: str) -> LayerGraph:
    """One of PipeDream's profiles."""
    return read_pipedream_graph(DATA / model / "graph.txt")


def steady(graph: LayerGraph, cluster: Cluster, model: CostModel) -> Speed:
    """The best partition of a graph in the steady state."""
    everywhere = PartitionedStage(
        tuple(layer.name for layer in graph.layers), tuple(range(len(cluster.devices)))
    )
    alike = evaluate(graph, cluster, model, Partition((everywhere,), 0.0))
    best = best_partition(graph, cluster, model, order="any")
    return Speed(best.replicas, alike / best.bottleneck_seconds)


def planned(graph: LayerGraph, cluster: Cluster, *, asynchronous: bool) -> tuple[Plan, Speed]:
    """The simulated best plan, its exchanges hidden as far as a backward is long."""
    found = plan(
        graph,
        cluster,
        microbatches=NUM_MICROBATCHES,
        asynchronous=asynchronous,
        overlap=HIDDEN.overlap,
    )
    (alike,) = (one for one in found.alternatives if one.label == "data parallel")
    return found, Speed(found.replicas, alike.step_seconds / found.step_seconds)


def steady_states() -> Table:
    """All models on all clusters."""
    table = Table(title="The steady state: replicas, and times the speed of data parallelism")
    for head in ("model", "cluster", "pipedream-released", "ring, hidden", "published (4×4)"):
        table.add_column(head)
    for model, published in PUBLISHED.items():
        graph = graph_of(model)
        for number, (name, cluster) in enumerate(clusters().items()):
            speeds = [str(steady(graph, cluster, one)) for one in (RELEASED, HIDDEN)]
            table.add_row(model, name, *speeds, "" if number else published)
    return table


def plans() -> Table:
    """All models on the cluster of the published speed-ups, simulated."""
    name, cluster = next(iter(clusters().items()))
    table = Table(title=f"penstock.plan, {NUM_MICROBATCHES} microbatches, {name}")
    for head in ("model", "updates", "schedule", "replicas, speed-up", "s to plan", "published"):
        table.add_column(head, justify="right" if head.startswith("s ") else "left")
    for model, published in PUBLISHED.items():
        graph = graph_of(model)
        for asynchronous in (True, False):
            begun = time.perf_counter()
            found, speed = planned(graph, cluster, asynchronous=asynchronous)
            table.add_row(
                model,
                "may be asynchronous" if asynchronous else "synchronous",
                found.schedule,
                str(speed),
                f"{time.perf_counter() - begun:.1f}",
                published if asynchronous else "",
            )
    return table


def main() -> None:
    """Print both tables."""
    console = Console(width=120)
    console.print(time.strftime("%Y-%m-%d"))
    console.print(steady_states())
    console.print(plans())


if __name__ == "__main__":
    publish(main)
