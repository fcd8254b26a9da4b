"""How large a schedule can be, and how good and how quick the searches are.

    python -m benchmarks.planning.search_and_scale [--largest 4096]

Builds and simulates 1F1B on p = 1,024 for growing m (each size in a process of its own, so that its
peak memory is its own), times zb-auto for growing sizes, plans deep models on large clusters, and
compares zb-auto with the proven optimum on small random pipelines.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

from benchmarks.common.alone import publish
from benchmarks.planning.large_plans import print_plans
from penstock import Costs, schedules, simulate

SMALL = [(2, 2), (2, 4), (2, 8), (4, 4), (3, 4), (3, 5), (5, 3), (8, 2)]
"""(p, m) with p·m ≤ 16, which the exact search takes."""

_ONE_SIZE = """
import json, resource, sys, time
from penstock import Costs, schedules, simulate
p, m = map(int, sys.argv[1:])
started = time.perf_counter()
schedule = schedules.build("1f1b", num_ranks=p, num_microbatches=m)
built = time.perf_counter()
timeline = simulate(schedule, Costs(hop=0.1))
simulated = time.perf_counter()
numbers = timeline.makespan, timeline.bubble, timeline.stage_bubble, max(timeline.peak_activations)
measured = time.perf_counter()
gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps([built - started, simulated - built, measured - simulated, gigabytes]))
"""


def scale(console: Console, p: int, largest: int) -> None:
    """Seconds and memory of 1F1B on ``p`` ranks."""
    table = Table(title=f"1F1B on {p} ranks", box=None, pad_edge=False)
    for name in ("m", "ops", "build s", "simulate s", "metrics s", "µs per op", "peak GiB"):
        table.add_column(name, justify="right")
    for m in (largest // 8, largest // 4, largest // 2, largest):
        command = [sys.executable, "-c", _ONE_SIZE, str(p), str(m)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        build, run, metrics, gigabytes = json.loads(output)
        ops = 2 * p * m
        per_op = 1e6 * (build + run + metrics) / ops
        cells = (f"{build:.2f}", f"{run:.2f}", f"{metrics:.2f}", f"{per_op:.2f}")
        table.add_row(f"{m:,}", f"{ops:,}", *cells, f"{gigabytes:.2f}")
    console.print(table)


def search_times(console: Console) -> None:
    """Seconds that zb-auto takes, with costs that no fixed family was made for."""
    table = Table(title="zb-auto, F I W hop = 1.1 1.2 0.8 0.1, limit p", box=None, pad_edge=False)
    for name in ("p", "m", "ops", "seconds", "bubble", "zb-h1's bubble"):
        table.add_column(name, justify="right")
    costs = Costs(1.1, 1.2, 0.8, 0.1)
    for p, m in ((4, 8), (8, 32), (16, 64), (32, 128), (32, 256)):
        started = time.perf_counter()
        found = schedules.build("zb-auto", num_ranks=p, num_microbatches=m, costs=costs)
        seconds = time.perf_counter() - started
        fixed = schedules.build("zb-h1", num_ranks=p, num_microbatches=m)
        bubbles = [f"{simulate(one, costs).bubble:.2%}" for one in (found, fixed)]
        table.add_row(str(p), str(m), f"{3 * p * m:,}", f"{seconds:.2f}", *bubbles)
    console.print(table)


def gaps_to_the_optimum(count: int, seed: int = 7) -> list[tuple[float, int, int, float, str]]:
    """(how much longer zb-auto's order is than the best, p, m, limit, objective) for random costs
    of every stage and link."""
    draw = random.Random(seed)
    gaps = []
    for _ in range(count):
        p, m = draw.choice(SMALL)
        per_stage = [[draw.uniform(0.5, 2) for _ in range(p)] for _ in range(3)]
        costs = Costs(*per_stage, hop=[draw.uniform(0, 0.4) for _ in range(p - 1)])
        limit, objective = draw.choice([1, 2, 3, p]), draw.choice(["makespan", "stage"])
        lengths = []
        for name in ("zb-auto", "optimal"):
            options = {"costs": costs, "activation_limit": limit, "objective": objective}
            order = schedules.build(name, num_ranks=p, num_microbatches=m, **options)
            lengths.append(length(simulate(order, costs), objective))
        gaps.append((lengths[0] / lengths[1] - 1, p, m, limit, objective))
    return sorted(gaps, reverse=True)


def length(timeline, objective: str) -> float:
    """What a search makes small."""
    if objective == "makespan":
        return timeline.makespan
    return max(row.ends[-1] - row.starts[0] for row in timeline.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=4096, help="most microbatches of 1F1B")
    parser.add_argument("--ranks", type=int, default=1024, help="ranks of 1F1B")
    parser.add_argument("--instances", type=int, default=200, help="random small pipelines")
    arguments = parser.parse_args()
    console = Console(width=120)
    scale(console, arguments.ranks, arguments.largest)
    search_times(console)
    print_plans(Console(width=140))
    gaps = gaps_to_the_optimum(arguments.instances)
    mean = sum(gap for gap, *_ in gaps) / len(gaps)
    exact = sum(gap < 1e-6 for gap, *_ in gaps)
    worst, *where = gaps[0]
    console.print(
        f"zb-auto against optimal on {len(gaps)} random pipelines: {exact} equal, mean gap "
        f"{mean:.2%}, worst {worst:.2%} at p, m, limit, objective = {where}"
    )


if __name__ == "__main__":
    publish(main)
