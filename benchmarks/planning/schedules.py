"""What it costs to build, check and simulate a schedule of millions of ops.

    python -m benchmarks.planning.schedules [--quick]

Each schedule has a process of its own, so that its peak memory is its own. Seconds are the
processor's, so that a busy machine gives nearly the same table; importing what is needed counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.common.alone import publish


class Size(NamedTuple):
    """A schedule to build: of a family, for so many ranks and microbatches."""

    family: str
    num_ranks: int
    num_microbatches: int
    lowered: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)

    def __str__(self) -> str:
        return f"{self.family}, with its messages" if self.lowered else self.family


SIZES = (
    Size("1f1b", 4, 32),
    Size("1f1b", 8, 1_000),
    Size("1f1b", 32, 2_000, lowered=True),
    Size("1f1b", 8, 100_000),
    Size("1f1b", 32, 25_000),
    Size("interleaved-1f1b", 32, 12_500, options={"stages_per_rank": 2}),
    Size("zb-h1", 32, 16_000),
    Size("zb-v", 32, 8_000),
    Size("chimera", 32, 25_000),
    Size("breadth-first", 32, 12_500, options={"stages_per_rank": 2}),
    Size("hanayo", 16, 25_000),
    Size("v-half", 32, 5_200),
    Size("v-min", 32, 5_200),
    Size("1f1b", 1_024, 4_096),
)

_ONE_SIZE = """
import json, resource, sys, time
from penstock import Costs, check, schedules, simulate
from penstock.core.schedule.lower import lower
family, p, m, lowered, options, capacity = json.loads(sys.argv[1])
clock = [time.process_time()]
lap = lambda: clock.append(time.process_time())
schedule = schedules.build(family, num_ranks=p, num_microbatches=m, **options)
if lowered:
    schedule = lower(schedule, capacity)
lap()
check(schedule, capacity)
lap()
timeline = simulate(schedule, Costs(hop=0.1))
lap()
timeline.makespan, timeline.bubble, max(timeline.peak_activations)
lap()
seconds = [b - a for a, b in zip(clock, clock[1:])]
gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps([sum(len(row.starts) for row in timeline.rows), *seconds, gigabytes]))
"""


def measure(size: Size, capacity: int | None = None) -> list[float]:
    """Ops; seconds to build, check, simulate, and for makespan, bubble and peaks; GiB."""
    given = (
        size.family, size.num_ranks, size.num_microbatches, size.lowered, size.options, capacity
    )  # fmt: skip
    command = [sys.executable, "-c", _ONE_SIZE, json.dumps(given)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output)


def main() -> None:
    """Print a row per schedule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only schedules below a million ops")
    arguments = parser.parse_args()
    columns = ("ranks", "microbatches", "ops", "build s", "check s", "simulate s", "metrics s")
    table = Table("family", box=None, pad_edge=False)
    per_op = ("check µs per op", "with capacity 1", "all µs per op")
    for name in (*columns, "in all s", *per_op, "peak GiB"):
        table.add_column(name, justify="right")
    for size in SIZES:
        if arguments.quick and size.num_ranks * size.num_microbatches > 500_000:
            continue
        ops, *seconds, gigabytes = measure(size)
        _, _, bounded, *_ = measure(size, capacity=1)
        table.add_row(
            str(size),
            f"{size.num_ranks:,}",
            f"{size.num_microbatches:,}",
            f"{ops:,.0f}",
            *(f"{part:.3f}" for part in seconds),
            f"{sum(seconds):.2f}",
            f"{1e6 * seconds[1] / ops:.2f}",
            f"{1e6 * bounded / ops:.2f}",
            f"{1e6 * sum(seconds) / ops:.2f}",
            f"{gigabytes:.2f}",
        )
    Console(width=180).print(table)


if __name__ == "__main__":
    publish(main)
