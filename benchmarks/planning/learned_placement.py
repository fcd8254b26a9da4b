"""Does a learned placer find better placements of a branching graph than simpler ones?

    python -m benchmarks.planning.learned_placement [--samples 300] [--seeds 5]

The score is the simulated step of 1F1B with every stage's own times and hops by the bytes that
cross. Random placements, hill climbing and the learned policy get the same number of scores; on
small graphs all placements are scored. The prefix column is the best cut of the execution order by
beat, which is what the planner's dynamic programme looks at. The last table is of chains, with the
slowest stage as the score, where that programme is proven optimal.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from itertools import pairwise
from statistics import mean

from rich.console import Console
from rich.table import Table

from benchmarks.planning.placers import brute_force_placement, random_placement
from penstock import schedules, simulate
from penstock.base.errors import PlanError
from penstock.core.cluster import Link
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition import balance
from penstock.planning.partition.placement import (
    Stages,
    greedy_placement,
    learned_placement,
    stage_costs,
)

PLACERS = {"random": random_placement, "greedy": greedy_placement, "learned": learned_placement}
MICROBATCHES = 8
LINK = Link(bytes_per_second=60.0)
EVERY_LAYER = {"max_groups": 1000, "tiny": 0.0}


class Builder:
    """Layers, one after another."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.layers: list[Layer] = []

    def add(self, name: str, *inputs: str, seconds: float = 0.0, size: int = 0) -> str:
        each = seconds or self.draw.uniform(0.3, 2.5)
        self.layers.append(
            Layer(
                name=name,
                forward_seconds=each,
                backward_input_seconds=each,
                backward_weight_seconds=each,
                output_bytes=size or self.draw.randint(10, 60),
                inputs=inputs,
            )
        )
        return name

    @property
    def graph(self) -> LayerGraph:
        return LayerGraph(layers=tuple(self.layers))


def inception(seed: int, num_blocks: int, depths: tuple[int, ...]) -> LayerGraph:
    """Blocks of parallel branches that are concatenated, listed branch by branch."""
    build = Builder(seed)
    last = build.add("stem", seconds=2.0)
    for block in range(num_blocks):
        ends = []
        for branch, depth in enumerate(depths):
            end = last
            for step in range(depth):
                end = build.add(f"b{block}.{branch}.{step}", end)
            ends.append(end)
        last = build.add(f"b{block}.cat", *ends, seconds=0.2, size=80)
    build.add("head", last, seconds=2.0)
    return build.graph


def series_parallel(seed: int, num_layers: int) -> LayerGraph:
    """Layers that read one or two of the four before them; what nobody reads goes into the last."""
    build = Builder(seed)
    names = [build.add("layer0")]
    for at in range(1, num_layers - 1):
        count = build.draw.choice((1, 1, 2))
        sources = sorted(set(build.draw.choices(names[-4:], k=count)))
        names.append(build.add(f"layer{at}", *sources))
    read = {name for layer in build.layers for name in layer.inputs or ()}
    build.add("last", *(name for name in names if name not in read))
    return build.graph


def translator(seed: int, num_layers: int) -> LayerGraph:
    """An encoder, and a decoder whose layers all read the encoder's output too, as in GNMT."""
    build = Builder(seed)
    source = build.add("encoder.embedding", seconds=0.3)
    for at in range(num_layers):
        source = build.add(f"encoder.{at}", source)
    target = build.add("decoder.embedding", seconds=0.3)
    for at in range(num_layers):
        target = build.add(f"decoder.{at}", target, source)
    build.add("classifier", target, seconds=3.0)
    return build.graph


def two_towers(seed: int, depth: int) -> LayerGraph:
    """Two independent inputs that meet at the end, one tower listed behind the other."""
    build = Builder(seed)
    ends = []
    for tower in ("image", "text"):
        end = build.add(f"{tower}.0")
        for at in range(1, depth):
            end = build.add(f"{tower}.{at}", end)
        ends.append(end)
    build.add("join", *ends)
    return build.graph


def chain(seed: int, num_layers: int) -> LayerGraph:
    """One layer after another."""
    build = Builder(seed)
    end = build.add("layer0")
    for at in range(1, num_layers):
        end = build.add(f"layer{at}", end)
    return build.graph


def step_of(graph: LayerGraph) -> Callable[[Stages], float]:
    """The simulated step of 1F1B."""

    def score(stages: Stages) -> float:
        order = schedules.build("1f1b", num_ranks=len(stages), num_microbatches=MICROBATCHES)
        return simulate(order, stage_costs(graph, stages, LINK)).makespan

    return score


def beat_of(graph: LayerGraph) -> Callable[[Stages], float]:
    """The slowest stage."""

    def score(stages: Stages) -> float:
        costs = stage_costs(graph, stages)
        parts = (costs.forward, costs.backward_input, costs.backward_weight)
        return max(map(sum, zip(*parts, strict=True)))

    return score


def prefix_cuts(graph: LayerGraph, num_devices: int) -> Stages:
    """The most even cuts of the execution order."""
    cuts = balance([layer.compute_seconds for layer in graph.layers], num_devices)
    names = [layer.name for layer in graph.layers]
    return tuple(tuple(names[a:b]) for a, b in pairwise(cuts))


def row_of(
    graph: LayerGraph,
    num_devices: int,
    score: Callable[[Stages], float],
    arguments: argparse.Namespace,
) -> dict[str, float | None]:
    """The optimum if it can be had, and the mean and the worst of each placer over the seeds."""
    row: dict[str, float | None] = {"prefix": score(prefix_cuts(graph, num_devices))}
    try:
        limit = arguments.limit
        found = brute_force_placement(graph, num_devices, score, limit=limit, **EVERY_LAYER)
        row["all"] = found.seconds
    except PlanError:
        row["all"] = None
    for name, place in PLACERS.items():
        runs = [
            place(
                graph, num_devices, score, num_samples=arguments.samples, seed=seed, **EVERY_LAYER
            )
            for seed in range(arguments.seeds)
        ]
        row[name] = mean(run.seconds for run in runs)
        row[f"{name} worst"] = max(run.seconds for run in runs)
        row[f"{name} best"] = min(run.seconds for run in runs)
        row[f"{name} scores"] = mean(len(run.history) for run in runs)
    return row


def print_table(console: Console, title: str, rows: dict[str, dict[str, float | None]]) -> None:
    table = Table(title=title, box=None, pad_edge=False)
    for name in ("graph", "reference", "prefix", *PLACERS):
        table.add_column(name, justify="left" if name == "graph" else "right")
    for label, row in rows.items():
        least = reference(row)
        cells = [
            f"{row[name] / least - 1:+.1%} ({row[f'{name} worst'] / least - 1:+.1%})"
            for name in PLACERS
        ]
        kind = "optimum" if row["all"] is not None else "best seen"
        prefix = f"{row['prefix'] / least - 1:+.1%}"
        table.add_row(label, f"{kind} {least:.1f}", prefix, *cells)
    console.print(table)


def reference(row: dict[str, float | None]) -> float:
    """The optimum, or the best that anybody found."""
    if row["all"] is not None:
        return row["all"]
    return min(row["prefix"], *(row[f"{name} best"] for name in PLACERS))


def conclusion(rows: dict[str, dict[str, float | None]]) -> str:
    """What the table says, in words that follow from its numbers."""
    gaps = {
        name: [row[name] / reference(row) - 1 for row in rows.values()]
        for name in ("prefix", *PLACERS)
    }
    means = {name: mean(found) for name, found in gaps.items()}
    order = sorted(means, key=means.__getitem__)
    ranking = ", ".join(f"{name} {means[name]:+.1%}" for name in order)
    wins = sum(a < b - 1e-9 for a, b in zip(gaps["learned"], gaps["greedy"], strict=True))
    losses = sum(a > b + 1e-9 for a, b in zip(gaps["learned"], gaps["greedy"], strict=True))
    beaten = "learned is best" if order[0] == "learned" else f"{order[0]} is best, not learned"
    scores = ", ".join(
        f"{name} {mean(row[f'{name} scores'] for row in rows.values()):.0f}" for name in PLACERS
    )
    return (
        f"Mean gap to the reference: {ranking}. On average {beaten}: against greedy the learned "
        f"policy wins on {wins} graphs and loses on {losses} of {len(rows)}. Scores used on "
        f"average: {scores}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=300, help="scores for each placer")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each placer")
    parser.add_argument("--limit", type=int, default=20_000, help="placements to try all of")
    arguments = parser.parse_args()
    console = Console(width=120)
    graphs = {
        "inception 1 block, p=3": (inception(1, 1, (1, 2, 3, 2)), 3),
        "inception 3 blocks, p=4": (inception(2, 3, (1, 2, 3, 2)), 4),
        "series-parallel 12, p=3": (series_parallel(3, 12), 3),
        "series-parallel 30, p=4": (series_parallel(4, 30), 4),
        "series-parallel 30', p=4": (series_parallel(5, 30), 4),
        "translator 4+4, p=3": (translator(6, 4), 3),
        "translator 8+8, p=4": (translator(7, 8), 4),
        "two towers 6, p=3": (two_towers(8, 6), 3),
        "two towers 12, p=4": (two_towers(9, 12), 4),
    }
    title = f"Gap of the mean (of the worst) run, 1F1B m={MICROBATCHES}, {arguments.samples} scores"
    rows = {
        label: row_of(graph, count, step_of(graph), arguments)
        for label, (graph, count) in graphs.items()
    }
    print_table(console, title, rows)
    console.print(conclusion(rows))
    chains = {
        f"chain of {length}, p={count}": (chain(length, length), count)
        for length, count in ((10, 3), (16, 4), (40, 4), (40, 8))
    }
    rows = {
        label: row_of(graph, count, beat_of(graph), arguments)
        for label, (graph, count) in chains.items()
    }
    print_table(console, "Chains, slowest stage: prefix is the exact programme", rows)
    least = min(
        min(row[f"{name} best"] for name in PLACERS) / row["prefix"] - 1 for row in rows.values()
    )
    console.print(
        f"On chains the best run of any placer is {least:+.1%} off the exact programme: it cannot "
        "be beaten there."
    )


if __name__ == "__main__":
    main()
