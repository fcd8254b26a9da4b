"""The original PipeDream optimizer against ours: the slowest stage or cut, the plan, and the time.

Run with ``python -m benchmarks.planning.planner``. The original's numbers and its seconds of CPU
are recorded (tests/data/pipedream/MANIFEST.md); ours are measured here.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.alone import publish
from penstock.core.cluster import Cluster, Device, Link
from penstock.core.graph import Layer, LayerGraph
from penstock.interop.pipedream_profiles import read_pipedream_graph
from penstock.planning.partition import COST_MODELS, Partition, best_partition, cost_model

DATA = Path(__file__).parents[2] / "tests" / "data" / "pipedream"


def main() -> None:
    """Print both tables."""
    console = Console(width=120)
    console.print(against_the_original())
    console.print(large_chain())


def against_the_original() -> Table:
    """A row for each of five models on fifteen clusters, under ``pipedream-released``."""
    table = Table(title="PipeDream's optimizer and Penstock, cost model pipedream-released")
    for name in ("model", "cluster", "original ms", "plan", "CPU s", "ours ms", "plan", "CPU s"):
        table.add_column(name, justify="right" if name.endswith((" ms", " s")) else "left")
    table.add_column("ours / original", justify="right")
    graphs: dict[str, LayerGraph] = {}
    for row in json.loads((DATA / "reference.json").read_text()):
        model = row["model"]
        graph = graphs.setdefault(model, read_pipedream_graph(DATA / model / "graph.txt"))
        links = [Link(bytes_per_second=speed) for speed in row["bandwidths_Bps"]]
        cluster = Cluster.tree(row["machines_per_level"], links)
        found, seconds = timed(graph, cluster, "pipedream-released", order="any")
        theirs = row.get("shipped") or row["linear_order"]
        ours = found.bottleneck_seconds * 1000
        table.add_row(
            model,
            row["cluster"],
            f"{theirs['bottleneck_ms']:.2f}",
            short(theirs["config"]),
            f"{theirs['cpu_s']:.2f}" if "cpu_s" in theirs else "",
            f"{ours:.2f}",
            short("-".join(map(str, found.replicas))),
            f"{seconds:.3f}",
            f"{ours / theirs['bottleneck_ms']:.3f}",
        )
    return table


def large_chain(num_layers: int = 1000, num_devices: int = 1024) -> Table:
    """A long chain of random layers on a large flat cluster, under every cost model."""
    chance = random.Random(1)
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_seconds=chance.uniform(0.5e-3, 2e-3),
            backward_input_seconds=chance.uniform(1e-3, 4e-3),
            backward_weight_seconds=0.0,
            output_bytes=chance.randint(10**5, 10**6),
            parameter_bytes=chance.randint(0, 4 * 10**6),
        )
        for index in range(num_layers)
    )
    devices = tuple(Device(name=f"device{index}") for index in range(num_devices))
    cluster = Cluster(devices=devices, link=Link(latency_seconds=1e-5, bytes_per_second=5e9))
    table = Table(title=f"{num_layers} layers on {num_devices} devices")
    for name in ("cost model", "bottleneck ms", "stages", "CPU s"):
        table.add_column(name, justify="left" if name == "cost model" else "right")
    for name in COST_MODELS:
        found, seconds = timed(LayerGraph(layers=layers), cluster, name)
        milliseconds = f"{found.bottleneck_seconds * 1000:.4f}"
        table.add_row(name, milliseconds, str(len(found.stages)), f"{seconds:.2f}")
    return table


def timed(graph: LayerGraph, cluster: Cluster, name: str, **options) -> tuple[Partition, float]:
    """A partition, and the seconds of CPU that it took to find."""
    begun = time.process_time()
    found = best_partition(graph, cluster, cost_model(name), **options)
    return found, time.process_time() - begun


def short(config: str) -> str:
    """Runs of equal counts as one: ``1-1-1-3-1`` is ``1×3-3-1``."""
    parts: list[tuple[str, int]] = []
    for count in config.split("-"):
        if parts and parts[-1][0] == count:
            parts[-1] = (count, parts[-1][1] + 1)
        else:
            parts.append((count, 1))
    return "-".join(
        f"{count}×{times}" if times > 2 else "-".join([count] * times) for count, times in parts
    )


if __name__ == "__main__":
    publish(main)
